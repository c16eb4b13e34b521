"""Keeping a handler running: one subscription, from the start of the app to its end.

Decides when a handler is opened anew: whenever its worker ended, after a pause that grows, whatever the error
was. What waiting may mend (`health`) is waited for from the start on; what it cannot mend ends the start of
the app, and once the app runs is shown, logged and tried again all the same.

A member of a broadcast group that begins anew may have missed messages. Its `on_missed` is called after the
member's place in the topic is fixed and before its first message is handled: what changed before is seen by
what it reloads, and what changes afterwards comes as a message. While it has not returned, no message is
handled; if it fails, it is called again. Must never forget that it is owed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...backoff import SLOW
from ...endpoint.values import GroupInfo
from ...errors import GroupConflict, PermissionDenied, UnknownGroup, UnknownTopic
from ...model.policy.settings import FIXED
from ...model.topology.names import base_of
from ...tasks import end
from ..connection import Connection
from ..consumer.driven import DrivenConsumer
from .call import HandlerThreads
from .health import HandlerHealth, Standing, is_final, may_mend
from .subscription import Subscription, window_for
from .worker import Worker

__all__ = ["Joined", "Keeper", "join"]


log = logging.getLogger("postroom.app")

_TRIES = 3  # to have the settings as the decorator names them; others may change them at the same time


@dataclass(frozen=True, slots=True)
class Joined:
    consumer: DrivenConsumer
    group: GroupInfo  # in mode "broadcast" the member's own
    anew: bool  # a member of a broadcast group that did not go on where its handler stopped


async def join(connection: Connection, subscription: Subscription, before: GroupInfo | None) -> Joined:
    """Enter the group with the settings that the decorator names; `before` is what this handler had last.

    Decides three things that differ from a plain consumer. Settings that a group can change are applied to
    the group that is there; mode, order and start are not, and conflict. A member of a broadcast group that
    begins anew, though its handler may remember older messages, is told so (`anew`). And an ordinary group
    that was deleted under its handler is not made again, which would handle the whole topic once more, unless
    it was set to expire: somebody has to make it, or to start the app again.

    Must never leave a consumer half open, and never say that nothing was missed where that is not known.
    """
    if before is not None and base_of(before.name) is None:
        await _refuse_deleted(connection, subscription, before)
    settings = dict(subscription.consumer)
    for tries_left in reversed(range(_TRIES)):
        try:
            consumer = await _entered(connection, subscription, settings)
            break
        except GroupConflict as conflict:
            settings = await _applied(connection, subscription, settings, conflict, keep=not tries_left)
    else:
        consumer = await _entered(connection, subscription, settings)
    group = consumer._joined
    assert group is not None
    # Who has no name begins at the end; that is nothing new to a handler that has not begun yet.
    anew = group.fresh if subscription.member is not None else before is not None
    return Joined(consumer, group, anew and base_of(group.name) is not None)


async def _refuse_deleted(connection: Connection, subscription: Subscription, before: GroupInfo) -> None:
    """Raise UnknownGroup if somebody deleted the group under its handler."""
    topic, group = subscription.topic, subscription.group
    if before.settings.expires_ms or await _is_there(connection, topic, group):
        return
    if (await connection.topic(topic)).created_at <= before.created_at:  # else the topic is another one
        raise UnknownGroup(
            f"group {group!r} of topic {topic!r} was deleted under its handler: make it with "
            f"create_group({topic!r}, {group!r}) to say where it starts, or start the app again",
            topic=topic,
            group=group,
        )


async def _is_there(connection: Connection, topic: str, group: str) -> bool:
    try:
        await connection.lag(topic, group)
    except UnknownGroup:
        return False
    return True


async def _entered(
    connection: Connection, subscription: Subscription, settings: Mapping[str, Any]
) -> DrivenConsumer:
    consumer = connection._driven(
        connection.consumer(
            subscription.topic,
            subscription.group,
            ack="on_delivery" if subscription.ack == "on_delivery" else "manual",
            window=window_for(subscription, None),
            **settings,
        )
    )
    try:
        return await consumer.__aenter__()
    except BaseException:
        connection._consumers.remove(consumer)
        raise


# ---- settings ----


async def _applied(
    connection: Connection,
    subscription: Subscription,
    settings: Mapping[str, Any],
    conflict: GroupConflict,
    *,
    keep: bool,
) -> dict[str, Any]:
    """Change the group as the decorator asks; returns the settings to ask for next. Raises what conflicts.

    `keep`: somebody else changes it back again and again; then the group's settings are good enough.
    """
    topic, group = subscription.topic, subscription.group
    differs: Mapping[str, tuple[str, str]] = conflict.details.get("differs", {})
    if not differs or any(name in FIXED for name in differs):
        raise conflict
    others = {name: value for name, value in settings.items() if name not in differs}
    why = "others change it at the same time"
    if not keep:
        try:
            await connection.alter_group(topic, group, **{name: settings[name] for name in differs})
        except PermissionDenied as denied:
            why = str(denied)
        else:
            changes = ", ".join(f"{name} {was} → {now}" for name, (was, now) in differs.items())
            log.info("group %s of %s: %s, as its handler asks", group, topic, changes)
            return dict(settings)
    kept = ", ".join(f"{name} {was}, not {now}" for name, (was, now) in differs.items())
    log.warning(
        "group %s of %s keeps %s as its handler asks: %s; change it with `postroom group alter`, or leave "
        "the setting out of the decorator",
        group,
        topic,
        kept,
        why,
    )
    return others


_LONGEST_FOR_TOPIC = 1.0  # seconds between two looks whether a topic is there now


class Keeper:
    """`work` makes a worker on a consumer that was entered; `grace_s` is asked for when it is needed."""

    def __init__(
        self,
        connection: Connection,
        subscription: Subscription,
        work: Callable[[Subscription, DrivenConsumer], Worker],
        stopping: asyncio.Event,
        grace_s: Callable[[], float],
    ) -> None:
        self._connection, self.subscription, self._work = connection, subscription, work
        self._stopping, self._grace_s = stopping, grace_s
        self.worker: Worker | None = None
        self._before: GroupInfo | None = None  # what it joined last
        self._owed = False  # `on_missed` is to be called before a message is handled
        self._tries = 0  # since it ran
        self._standing = Standing(subscription.name, subscription.topic, subscription.group)

    @property
    def health(self) -> HandlerHealth:
        return self._standing.health

    # ---- opening ----

    async def open(self) -> Worker:
        """Join the group. Nothing is handled yet, but messages may come in."""
        joined = await join(self._connection, self.subscription, self._before)
        again, self._before = self._before is not None, joined.group
        if joined.anew:
            self._owed = True
            self._tell_forgotten(again)
        self.worker = self._work(self.subscription, joined.consumer)
        return self.worker

    async def open_first(self) -> None:
        """The same at the start of the app: raises only what waiting cannot mend."""
        try:
            await self.open()
        except Exception as error:
            if not may_mend(error):
                raise
            self._tries = 1
            self._standing.stopped_by(error)

    def _tell_forgotten(self, again: bool) -> None:
        name, member = self.subscription.name, self.subscription.member
        if again:
            who = "its member" if member is None else f"member {member!r}"
            log.warning("%s: %s was forgotten and has joined again; it may have missed messages", name, who)
        else:
            log.info("%s: member %r is new here, or was forgotten: it begins anew", name, member)

    # ---- running ----

    async def run(self) -> None:
        """Until the app stops. Raises only if there is no connection any more."""
        if self.worker is None and not await self._paused(None):
            return
        while (error := await self._run_once()) is not None:
            self._tries += 1
            if is_final(error):
                raise error
            if not await self._paused(error):
                return

    async def _run_once(self) -> BaseException | None:
        """Until its worker ends: why; None: the app stops."""
        try:
            worker = self.worker or await self.open()
        except Exception as failure:
            self._standing.stopped_by(failure)
            return failure
        try:
            error = await self._served(worker)
            if error is not None:  # shown at once: handlers may take their time to end
                self._standing.stopped_by(error)
            return error
        finally:
            await worker.stop(self._grace_s())
            self.worker = None

    async def _served(self, worker: Worker) -> BaseException | None:
        try:
            await self.tell_missed()
        except Exception as failure:
            return failure
        if self._stopping.is_set():
            return None
        worker.start()
        self._standing.runs()
        error = await self._ended(worker)
        if worker.handled:
            self._tries = 0
        if error is None and not self._stopping.is_set():
            return RuntimeError("the worker of the handler ended by itself")
        return error

    async def _ended(self, worker: Worker) -> BaseException | None:
        failing = asyncio.create_task(worker.failed())
        stopping = asyncio.create_task(self._stopping.wait())
        done, waiting = await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return failing.result() if failing in done else None

    async def _paused(self, error: BaseException | None) -> bool:
        """Wait a little; False: the app stops."""
        seconds = SLOW.after(self._tries)
        if error is None or isinstance(error, UnknownTopic):
            seconds = min(seconds, _LONGEST_FOR_TOPIC)
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return True
        return False

    # ---- what was missed ----

    async def tell_missed(self) -> None:
        """Call `on_missed` if it is owed, unless the app stops first; raises what it raises."""
        if not self._owed:
            return
        hook = self.subscription.on_missed
        if hook is not None:
            calling = asyncio.create_task(_called(hook))
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                await asyncio.wait((calling, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not calling.done():
                    return
                if calling.cancelled():
                    raise RuntimeError("on_missed cancelled itself")
                calling.result()
            finally:
                await end((calling, stopping))
        self._owed = False


async def _called(hook: Callable[[], object]) -> None:
    """As a handler is: a coroutine function here, a plain one in a thread."""
    if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None)):  # noqa: B004
        returned = hook()
    else:
        found: list[object] = []
        threads = HandlerThreads(1, "postroom-on-missed")
        error = await threads.run(lambda: found.append(hook()))
        threads.close()
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(f"on_missed raised {error!r}")
        returned = found[0]
    if inspect.isawaitable(returned):
        await returned
