"""A queue for users' tests: in memory, with a clock that the test moves.

    async def test_a_failed_order_is_tried_again(postroom_queue, postroom_clock):
        await postroom_queue.create_topics("orders", "bills")
        await postroom_queue.send("orders", b'{"id": 7}')
        assert (await postroom_queue.run_until_idle(app)).errors    # the handlers of a postroom.App, now
        postroom_clock.advance(60)                                  # its retry is due
        assert (await postroom_queue.run_until_idle(app)).errors == []

Decides when an app has nothing left to do: no message is due, none is at work, and every verdict is stored.
Must never sleep until a moment: what is due is due by the test's clock, and retries have no jitter here. Must
not need pytest, nor any plugin for asyncio: a queue opens itself in the loop that first uses it, and closes
with that loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from .. import sync
from ..broker.broker import Broker
from ..client.app.app import App
from ..client.app.worker import Worker
from ..client.codec import unpack
from ..client.connection import Connection
from ..client.consumer.opened import Browsed
from ..client.message import Readable, Received, Value
from ..clock import ManualClock
from ..config import DEFAULTS
from ..endpoint.endpoint import Told
from ..errors import PostroomError, UsageError
from ..model.messages.batch import records
from ..store import open_memory
from ..store.contract import Appended
from ..sync.facade import like, wrapped
from ..sync.portal import LoopThread

__all__ = ["Captured", "Ran", "Sent", "SyncTestQueue", "TestQueue", "capture", "open_sync", "run_until_idle"]


class TestQueue(Connection):
    """A connection to a queue of its own, in memory. It opens when it is first used, in that event loop."""

    __test__ = False  # for pytest: it is no test

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()

    def __getattr__(self, name: str) -> Any:
        """Comes here for what `Connection.__init__` sets, as long as it has not been called."""
        if (
            name.startswith("__")
            or "_guard" in vars(self)
            or not (name.startswith("_") or name == "client_id")
        ):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._open()
        return getattr(self, name)

    def _open(self) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError("this queue is for async tests: a plain one takes postroom_sync") from None
        Connection.__init__(self, Broker(open_memory("", self.clock), self.clock), "test", self.clock)
        self._keeper = self._close_with_the_loop()
        try:
            self._keeper.__anext__().send(None)
        except StopIteration:  # it waits at its yield now
            pass

    async def _close_with_the_loop(self) -> AsyncGenerator[None, None]:
        """Every runner lets async generators end before it closes its loop, and this one ends the queue."""
        try:
            yield
        finally:
            await self.close()

    @property
    def opened(self) -> bool:
        return "_guard" in vars(self)

    async def create_topics(self, *names: str) -> None:
        for name in names:
            await self.create_topic(name)

    async def run_until_idle(self, app: App, *, timeout: float = 60) -> Ran:
        """Run the app's handlers on this queue until nothing is left to do."""
        return await run_until_idle(app, self, timeout=timeout)

    async def ask(self, app: App, topic: str, value: Value, **options: Any) -> Received:
        """Send a request, and run the app's handlers until there is a reply."""
        asked = asyncio.create_task(self.request(topic, value, **options))
        try:
            while not asked.done():
                await run_until_idle(app, self)
                await asyncio.wait((asked,), timeout=DEFAULTS.tuning.client.test_check_s)
            return await asked
        finally:
            asked.cancel()

    def capture(self) -> Captured:
        """Record what is sent from now on."""
        return capture(self)

    def end(self) -> None:
        """Close it from outside the loop, if the loop is still there."""
        if self.opened and not self._guard.closed and not self._guard.loop.is_closed():
            self._guard.loop.run_until_complete(self.close())


@like(TestQueue)
class SyncTestQueue(sync.Connection):  # type: ignore[type-var]
    """A queue for plain tests, without asyncio."""

    __test__ = False


def open_sync(clock: ManualClock) -> SyncTestQueue:
    async def opened() -> TestQueue:
        queue = TestQueue(clock)
        queue._open()
        return queue

    queue: SyncTestQueue = LoopThread(wrapped).call(opened)
    return queue


# ---- what was sent ----


@dataclass(frozen=True, slots=True)
class Sent(Readable):
    """A message that was sent; `text`, `json()`, `decode(Order)` and `header(name)` read it."""

    topic: str
    value: bytes
    key: bytes | None = None
    headers: Mapping[str, bytes] = field(default_factory=dict)
    id: str | None = None


class Captured:
    """A list of what was sent and stored. `with capture(mq) as captured` ends it; it need not end."""

    def __init__(self) -> None:
        self._sent: list[Sent] = []
        self._active = True

    def sent(self, topic: str | None = None) -> list[Sent]:
        """Return what was sent to the topic, or to all."""
        return [sent for sent in self._sent if topic is None or sent.topic == topic]

    def values(self, topic: str) -> list[bytes]:
        return [sent.value for sent in self.sent(topic)]

    def clear(self) -> None:
        self._sent.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._active = False

    def _record(self, topic: str, batch: bytes) -> None:
        if self._active:
            found = unpack(records(batch), Browsed(topic, -1, -1))
            self._sent += [Sent(topic, m.value, m.key, dict(m.headers), m._id) for m in found]


def capture(mq: Connection | sync.Connection) -> Captured:
    """Record what is sent through this connection from now on, by whatever way it is sent."""
    endpoint: Any = (mq._target if isinstance(mq, sync.Connection) else mq)._endpoint
    captured, append, append_soon = Captured(), endpoint.append, endpoint.append_soon

    async def recording(topic: str, partition_id: int, batch: bytes, **options: Any) -> Appended:
        appended: Appended = await append(topic, partition_id, batch, **options)
        if not appended.duplicate:
            captured._record(topic, batch)
        return appended

    def recording_soon(topic: str, partition_id: int, batch: bytes, producer: str, told: Told) -> bool:
        def answered(result: Appended | PostroomError) -> None:
            if isinstance(result, Appended) and not result.duplicate:
                captured._record(topic, batch)
            told(result)

        return bool(append_soon(topic, partition_id, batch, producer, answered))

    endpoint.append, endpoint.append_soon = recording, recording_soon
    endpoint.lone_append = lambda topic, partition_id: None  # all go by these
    return captured


# ---- running handlers ----


@dataclass(frozen=True, slots=True)
class Ran:
    handled: int  # messages whose handler ended
    errors: list[BaseException]  # what handlers raised


async def run_until_idle(app: App, mq: Connection | None = None, *, timeout: float = 60) -> Ran:
    """Run the app's handlers on `mq` (else on the connection it was made with) until nothing is left to do.

    What is retried later is left: move the clock and run again.
    """
    if app.running:
        raise UsageError("the app runs already: run_until_idle runs its handlers itself")
    connection = mq if mq is not None else app._url
    if not isinstance(connection, Connection):
        raise UsageError("say on which queue: run_until_idle(app, postroom_queue)")
    errors: list[BaseException] = []
    with _on(app, connection, errors):
        workers = await app._open_by_hand(connection)
        try:
            for worker in workers:
                worker.start(feed=False)
            await _until_idle(workers, timeout)
        finally:
            await asyncio.gather(*(worker.stop(0) for worker in workers))
    return Ran(sum(worker.handled for worker in workers), errors)


async def _until_idle(workers: list[Worker], timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            while True:
                before = [worker.progress for worker in workers]
                found = sum([await worker.look() for worker in workers])
                quiet = [await worker.quiet(DEFAULTS.tuning.client.test_check_s) for worker in workers]
                if all(quiet) and not found and before == [worker.progress for worker in workers]:
                    return
    except TimeoutError:
        names = ", ".join(worker.subscription.name for worker in workers)
        raise TimeoutError(f"after {timeout:g} seconds there was still something to do for {names}") from None


@contextmanager
def _on(app: App, connection: Connection, errors: list[BaseException]) -> Iterator[None]:
    """The app as it is while it runs on that connection: failures are kept, and delays have no jitter."""
    hook, fraction = app._on_error, app._fraction

    def keep(error: BaseException, messages: list[Received]) -> Any:
        errors.append(error)
        return None if hook is None else hook(error, messages)

    app._connection, app._on_error, app._fraction = connection, keep, float
    try:
        yield
    finally:
        app._connection, app._on_error, app._fraction = None, hook, fraction
