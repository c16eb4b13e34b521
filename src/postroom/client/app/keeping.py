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
from collections.abc import Callable

from ...broker.endpoint import GroupInfo
from ...errors import UnknownTopic
from ..connection import Connection
from ..consuming.consumer import Consumer
from ..ending import end
from ..producing.appending import pause
from .health import HandlerHealth, Standing, is_final, may_mend
from .membership import join
from .subscription import Subscription
from .threads import HandlerThreads
from .worker import Worker

__all__ = ["Keeper"]

log = logging.getLogger("postroom.app")

_LONGEST_FOR_TOPIC = 1.0  # seconds between two looks whether a topic is there now


class Keeper:
    """`work` makes a worker on a consumer that was entered; `grace_s` is asked for when it is needed."""

    def __init__(
        self,
        connection: Connection,
        subscription: Subscription,
        work: Callable[[Subscription, Consumer], Worker],
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
        seconds = 10 * pause(max(1, self._tries))
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
