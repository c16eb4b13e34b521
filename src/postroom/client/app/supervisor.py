"""The supervisor keeps each handler of an app running, and says how it is doing, for people and for probes.

Decides which of three states a handler is in, from the error that stopped it: it runs; it waits for something
that comes by itself or that somebody is about to make (a topic, a database that is away); or it failed, and
somebody has to look. Whatever the state, its subscription is opened anew whenever its worker ended, after a
pause that grows, from the start of the app to its end. What waiting may mend is waited for from the start on;
what it cannot mend ends the start of the app, and once the app runs is shown, logged and tried again all the
same. An error is logged when it is new, not each time it is met again. Its health may be read from any
thread.

A member of a broadcast group that begins anew may have missed messages. Its `on_missed` is called after the
member's place in the topic is fixed and before its first message is handled: what changed before is seen by
what it reloads, and what changes afterwards comes as a message. While it has not returned, no message is
handled; if it fails, it is called again. Must never forget that it is owed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from ...backoff import SLOW
from ...endpoint.values import GroupInfo
from ...errors import (
    AccessError,
    CatalogError,
    ClosedError,
    ForkError,
    GenerationChanged,
    GroupConflict,
    PermissionDenied,
    PostroomError,
    UnknownFate,
    UnknownGroup,
    UnknownPartition,
    UnknownTopic,
)
from ...model.policy.settings import FIXED
from ...model.topology.names import base_of
from ...tasks import end
from ..connection import Connection
from ..consumer.driven import DrivenConsumer
from .call import HandlerThreads
from .subscription import Subscription, window_for
from .worker import Worker

__all__ = [
    "AppHealth",
    "HandlerHealth",
    "Joined",
    "Keeper",
    "Standing",
    "State",
    "is_final",
    "join",
    "may_mend",
]


log = logging.getLogger("postroom.app")

State = Literal["running", "waiting", "failed"]


@dataclass(frozen=True, slots=True)
class HandlerHealth:
    """How one handler is doing."""

    name: str
    topic: str
    group: str
    state: State
    since: datetime  # of the state
    error: str | None  # what it waits for, or what is wrong; None: it runs


@dataclass(frozen=True, slots=True)
class AppHealth:
    """How an app is doing; `ok` is what a probe wants to know."""

    running: bool  # between start() and stop()
    handlers: tuple[HandlerHealth, ...]
    error: str | None = None  # what the app as a whole waits for: its queue

    @property
    def ok(self) -> bool:
        """The app runs, and so does every handler of it."""
        return self.running and all(one.state == "running" for one in self.handlers)

    def as_dict(self) -> dict[str, Any]:
        """For an answer in JSON."""
        handlers = [{**asdict(one), "since": one.since.isoformat()} for one in self.handlers]
        why = {} if self.error is None else {"error": self.error}
        return {"ok": self.ok, "running": self.running, **why, "handlers": handlers}


def may_mend(error: BaseException) -> bool:
    """Whether waiting may help: the topic is not there yet, or the store or broker is away or busy."""
    passing = UnknownTopic | UnknownPartition | UnknownFate | GenerationChanged
    return isinstance(error, passing) or (isinstance(error, PostroomError) and error.retriable)


def is_final(error: BaseException) -> bool:
    """The connection itself is gone: nothing can be tried on it any more."""
    return isinstance(error, ClosedError | ForkError)


class Standing:
    """The state of one handler, and what the log was told of it."""

    def __init__(self, name: str, topic: str, group: str, queue: str = "") -> None:
        self._name, self._topic, self._group = name, topic, group
        self._queue = queue  # its address for people
        self._state: State = "waiting"
        self._since = datetime.now(UTC)
        self._error: str | None = "it has not started yet"
        self._told: str | None = None  # the last error that was logged, since it ran
        self._ran = False

    @property
    def health(self) -> HandlerHealth:
        return HandlerHealth(self._name, self._topic, self._group, self._state, self._since, self._error)

    def runs(self) -> None:
        if self._told is not None:
            log.info("%s runs again" if self._ran else "%s runs now", self._name)
        self._told, self._ran = None, True
        self._enter("running", None)

    def stopped_by(self, error: BaseException) -> None:
        """It does not run now, because of that. What ended it may be gone when it starts again."""
        text, joins_again = _described(error), _is_forgotten(error)
        if joins_again:
            text = "its member was forgotten; it joins again"
        elif isinstance(error, UnknownTopic):
            text = self._waiting_for(error)
        passing = self._state == "running" or joins_again or may_mend(error)
        self._enter("waiting" if passing and not is_final(error) else "failed", text)
        if text == self._told:
            return
        self._told = text
        if isinstance(error, UnknownTopic):
            log.warning("%s: %s", self._name, self._waiting_for(error, self._queue))
        elif joins_again:
            log.warning("%s: %s", self._name, text)
        elif self._state == "waiting":
            log.warning("%s starts again after an error: %r", self._name, error, exc_info=error)
        else:
            own = None if isinstance(error, CatalogError | AccessError) else error  # its sentence says it all
            log.error("%s cannot go on and is tried again: %s", self._name, text, exc_info=own)

    def _enter(self, state: State, error: str | None) -> None:
        if state != self._state:
            self._state, self._since = state, datetime.now(UTC)
        self._error = error

    def _waiting_for(self, error: UnknownTopic, queue: str = "") -> str:
        """`queue`: for the log alone; health may be shown to anybody."""
        topic = str(error.details.get("topic", self._topic))
        close: Sequence[str] = error.details.get("close", ())
        meant = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
        gone = "was deleted" if self._ran else "does not exist yet"
        where, option = (f" in {queue}", f" --url {queue}") if queue else ("", "")
        return (
            f"topic {topic!r} {gone}{where}{meant}; waiting for it — create it with `postroom topic create "
            f"{topic}{option}`, or start the worker with --create"
        )


def _is_forgotten(error: BaseException) -> bool:
    """A member of a broadcast group whose own group is gone: it only has to join again."""
    return isinstance(error, UnknownGroup) and "member" in error.details


def _described(error: BaseException) -> str:
    text = str(error)
    return (
        text if isinstance(error, PostroomError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
    )


# ---- joining a group ----


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


# ---- keeping a handler running ----


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
        self._standing = Standing(
            subscription.name, subscription.topic, subscription.group, connection._queue
        )

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
