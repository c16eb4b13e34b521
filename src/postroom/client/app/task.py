"""A task: a handler that can also be sent to.

    @app.subscribe("orders", group="billing")
    async def bill(order: Order): ...

    await bill(order)                            # calls the function, here and now
    await bill.send(order, key="42")             # sends a message that it will handle
    bill.send_sync(order, delay="1h")            # the same without asyncio
    bill.send(order, connection=db)              # within the transaction that is open there: an outbox

Decides what such a message is (the body as the handler's annotation decodes it; for a task with a name, the
header that says so) and which connection it goes through: the one that was given, the one the app runs on, or
one of this event loop's or process's own, opened when it is first needed. Must never send a task into a queue
that no worker could read, such as a second one in memory.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)
from weakref import WeakKeyDictionary

from ...address import parse
from ...errors import UsageError
from ...model.delivery.retry import Backoff
from ...model.messages.body import encoder
from ...model.policy.settings import Exhausted, Mode
from ...model.policy.slow_lane import SlowLane
from ...model.topology.names import TASK_HEADER
from ...sync.portal import refuse_running_loop
from ...sync.process import PerProcess
from ...units import Duration, Moment
from ..connection import Connection, connect
from ..consumer.reading import Position
from ..message import Receipt, Received
from .subscription import AckMode, MissedHook, Subscription

if TYPE_CHECKING:
    from ... import sync
    from ..forward.outbox import Outbox
    from .app import App

__all__ = ["HandlerOptions", "Registering", "RegisteringLists", "RunOptions", "SendOptions", "Task", "Ways"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
B = TypeVar("B")
Body = TypeVar("Body", contravariant=True)
Result = TypeVar("Result", covariant=True)


class SendOptions(TypedDict, total=False):
    """What `send` takes besides the body: see `Connection.send`."""

    key: str | bytes | None
    headers: Mapping[str, str | bytes] | None
    id: str | None
    source: str | None
    expires: Duration | datetime | None
    slot: int | None
    delay: Duration | None
    at: Moment | None
    timeout: Duration


class Task(Generic[Body, P, Result]):
    """What `@app.subscribe` makes of a function."""

    def __init__(self, function: Callable[..., Any], subscription: Subscription, ways: Ways) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.topic, self.group = subscription.topic, subscription.group
        self.name = subscription.task
        """What tells it apart from other tasks of the topic and group; None: it is the only one there."""
        self._handler, self._ways = subscription.handler, ways

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        called: Result = self.function(*args, **kwargs)
        return called

    def __repr__(self) -> str:
        return f"<task {self._handler.name} of {self.topic}/{self.group}>"

    # ---- sending ----

    @overload
    def send(  # type: ignore[overload-overlap]
        self, body: Body, *, connection: Connection | None = None, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Receipt]: ...
    @overload
    def send(self, body: Body, *, connection: object, **options: Unpack[SendOptions]) -> Awaitable[None]: ...
    def send(self, body: Any, *, connection: Any = None, **options: Any) -> Awaitable[Any]:
        """Send a message that this task will handle; `options` are those of `Connection.send`.

        With `connection`, of the application's database, it is written into the app's outbox in the
        transaction that is open there, and sent once that commits: nothing is left to await then, unless the
        connection is an async one of SQLAlchemy.
        """
        if connection is None or isinstance(connection, Connection):
            return self._sent(body, connection, options)
        return self._written(body, connection, options)

    def send_sync(
        self, body: Body, *, connection: Any = None, **options: Unpack[SendOptions]
    ) -> Receipt | None:
        """Send without asyncio, and wait until it is stored. None: it is in the outbox of `connection`."""
        if connection is not None and not _is_blocking_queue(connection):
            if not isinstance(self._written(body, connection, options), _Done):
                raise UsageError("this connection is an async one: write `await task.send(…, connection=…)`")
            return None
        value, how = self._packed(body, options)
        mq = self._ways.blocking() if connection is None else connection
        receipt: Receipt = mq.send(self.topic, value, **how)
        return receipt

    async def _sent(self, body: Any, connection: Connection | None, options: Any) -> Receipt:
        value, how = self._packed(body, options)
        mq = await self._ways.connection() if connection is None else connection
        return await mq.send(self.topic, value, **how)

    def _written(self, body: Any, connection: Any, options: Any) -> Awaitable[Any]:
        value, how = self._packed(body, options)
        if "timeout" in how:
            raise UsageError("timeout= is for the queue; into an outbox nothing is waited for: leave it out")
        written: Awaitable[Any] | None = self._ways.outbox().send(connection, self.topic, value, **how)
        return _Done() if written is None else written

    def _packed(self, body: Any, options: Any) -> tuple[bytes, dict[str, Any]]:
        if self.name is not None:
            headers = {**(options.get("headers") or {}), TASK_HEADER: f"{self.group}/{self.name}"}
            options = {**options, "headers": headers}
        return self._encode(body), options

    @functools.cached_property
    def _encode(self) -> Callable[[Any], bytes]:
        return encoder(self._handler.annotation, where=f"task {self._handler.name}")


class _Done:
    """Awaited or not, it is done: so that `send` may be awaited whatever the connection is."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


def _is_blocking_queue(connection: Any) -> bool:
    """Whether it is a connection of `postroom.sync`, as against one of a database."""
    return isinstance(getattr(connection, "_target", None), Connection)


# ---- the ways out of an app ----


class Ways:
    """How tasks of an app send: by the connection it runs on, where that may be used, else by their own."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._outgoing: _Outgoing | None = None

    async def connection(self) -> Connection:
        found = self._app._connection or self._app._url
        if isinstance(found, Connection) and found._guard.loop is asyncio.get_running_loop():
            return found
        return await self._apart().connection()

    def blocking(self) -> sync.Connection:
        refuse_running_loop()
        app = self._app
        return app.sync if app._connection is not None else self._apart().blocking()

    def outbox(self) -> Outbox:
        outboxes = [outbox for outbox, _, _ in self._app.outboxes]
        if len(outboxes) == 1:
            return outboxes[0]
        raise UsageError(
            "the app has no outbox to write to: name it with app.outbox(outbox, connect)"
            if not outboxes
            else "the app has several outboxes: write outbox.send(connection, topic, body) for the one meant"
        )

    def _apart(self) -> _Outgoing:
        if isinstance(self._app._url, Connection):
            raise UsageError(
                "the app was made with a connection, which belongs to another event loop: send there, or "
                "make the app with an address"
            )
        url, options = self._app._reached()
        if self._outgoing is None or self._outgoing.reaches != (url, options):
            self._outgoing = _Outgoing(url, options)
        return self._outgoing


class _Outgoing:
    """The connections that tasks send through while their app does not run where they are sent from.

    A web process that only sends need not start the app: the first send opens a connection, which is kept,
    one for each event loop and one for all threads without one. It is closed when the loop ends.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        if parse(url).kind == "memory":
            raise UsageError(
                "the app does not run, and a queue in memory is only there while it does: start it first, or "
                "name the queue, as in task.send(…, connection=mq)"
            )
        self.reaches = (url, options)
        self._opened: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Connection]]
        self._opened = WeakKeyDictionary()
        self._keepers: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()
        self._process = PerProcess(url, options)

    async def connection(self) -> Connection:
        """Return the connection of the event loop that runs."""
        loop = asyncio.get_running_loop()
        opening = self._opened.get(loop)
        if opening is None or (opening.done() and _is_unusable(opening)):
            opening = self._opened[loop] = loop.create_task(self._open(loop))
        return await asyncio.shield(opening)

    def blocking(self) -> sync.Connection:
        """Return the connection of this process, for threads without an event loop."""
        return self._process.get()

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Connection:
        url, options = self.reaches
        opened = await connect(url, **options)
        keeper = self._keepers[loop] = _closed_with_the_loop(opened)
        await anext(keeper)
        return opened


async def _closed_with_the_loop(connection: Connection) -> AsyncGenerator[None, None]:
    """Every runner lets async generators end before it closes its loop, and this one ends the connection."""
    try:
        yield
    finally:
        await connection.close()


def _is_unusable(opening: asyncio.Task[Connection]) -> bool:
    return opening.cancelled() or opening.exception() is not None or opening.result().closed


# ---- what the decorators promise to type checkers ----


class RunOptions(TypedDict, total=False):
    """What `every` takes for its runs: see `App.subscribe`."""

    mode: Mode | None
    order: str | None
    concurrency: int
    timeout: Duration | None
    retry: Backoff
    window: int | None
    lease: Duration | None
    max_handling: Duration | None
    max_attempts: int | None
    exhausted: Exhausted | None
    max_hold: Duration | None


class HandlerOptions(RunOptions, total=False):
    """What `subscribe` takes: see there."""

    window_bytes: int | str | None
    expires: Duration | None
    slow_lane: SlowLane | bool | None
    start: Position | None
    ack: AckMode
    member: str | None
    on_missed: MissedHook | None


class Registering(Protocol):
    """What `@app.subscribe(…)` is: the body is the first parameter that is no message."""

    @overload
    def __call__(self, function: Callable[[Received], R]) -> Task[Any, [Received], R]: ...
    @overload
    def __call__(self, function: Callable[[sync.Received], R]) -> Task[Any, [sync.Received], R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Received, B, Q], R]
    ) -> Task[B, Concatenate[Received, B, Q], R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[sync.Received, B, Q], R]
    ) -> Task[B, Concatenate[sync.Received, B, Q], R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[B, Q], R]) -> Task[B, Concatenate[B, Q], R]: ...


class RegisteringLists(Protocol):
    """The same with `batch=`: a message of the task has one body, and the function takes a list of them."""

    @overload
    def __call__(self, function: Callable[[list[Received]], R]) -> Task[Any, [list[Received]], R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[list[B], Q], R]
    ) -> Task[B, Concatenate[list[B], Q], R]: ...
