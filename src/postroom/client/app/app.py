"""The app: handlers and the topics they are for, run together.

    app = postroom.App("sqlite:///orders.db")

    @app.subscribe("orders", group="billing")
    async def bill(order: Order, message): ...

    app.run()                       # or `postroom worker module:app`, `async with app`, app.lifespan

Decides the life of the app: all consumers are opened before the first handler runs, so that a conflict stops
the app at once; a handler whose topic is not there yet waits for it, and one that ended is started again
(`supervisor`). How each of them is doing is in `health()`. Must never make anything but groups, and topics of
recurring schedules; and must never stop because of what a handler does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import tzinfo
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from ...address import parse, shards_named
from ...errors import UnknownTopic, UsageError
from ...metrics import Metrics
from ...model.delivery.retry import Backoff
from ...model.policy.recurrence import Missed
from ...model.policy.settings import Exhausted, Mode
from ...model.policy.slow_lane import SlowLane
from ...sync.portal import Portal
from ...units import Duration, duration_ms
from ..connection import Connection, connect
from ..consumer.driven import DrivenConsumer
from ..consumer.reading import Position
from ..message import Receipt, Received, Value
from .call import Middleware, middleware_of, refuse_unused
from .figures import HandlersFigures
from .recurring import Recurring, Ticker, make_recurring, prepare
from .subscription import (
    AckMode,
    Batch,
    MissedHook,
    Subscription,
    chosen,
    make_reply,
    make_subscription,
    merged,
    with_concurrency,
)
from .supervisor import AppHealth, Keeper
from .task import HandlerOptions, Registering, RegisteringLists, RunOptions, SendOptions, Task, Ways
from .worker import ErrorHook, Worker

if TYPE_CHECKING:
    from ... import sync
    from ..forward.outbox import Outbox, Relay

__all__ = ["App"]


log = logging.getLogger("postroom.app")

F = TypeVar("F", bound=Callable[..., Any])
_URL, _SHARDS = "POSTROOM_URL", "POSTROOM_SHARDS"


class App:
    """Handlers, and what runs them. `options` are those of `postroom.connect`; a connection has its own.

    Without `url` it runs on the queue that POSTROOM_URL names, with the shards of POSTROOM_SHARDS; they are
    read when the app connects.
    """

    def __init__(self, url: str | Connection | None = None, *, grace: Duration = 30, **options: Any) -> None:
        if options and isinstance(url, Connection):
            raise UsageError(f"{', '.join(options)}: options are for an address; this connection has its own")
        self._url, self._options = url, options
        self._grace_s = duration_ms(grace, name="grace") / 1000
        self._subscriptions: list[Subscription] = []
        self._on_error: ErrorHook | None = None
        self._middleware: list[Middleware] = []
        self._schedules: list[Recurring] = []
        self._fraction: Callable[[], float] = random.random
        self.outboxes: list[tuple[Outbox, Any, dict[str, Any]]] = []
        self._relays: list[Relay] = []
        self._connection: Connection | None = None
        self._keepers: list[Keeper] = []
        self._tickers: list[Ticker] = []
        self._runs: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._ways = Ways(self)
        self._figures = HandlersFigures()
        self._trouble: str | None = None  # why it is not running yet, though it was started

    def use(self, url: str, *, shards: Mapping[str, str] | None = None) -> None:
        """Run on that queue instead of the app's own, as `postroom worker --url` does; before it is started.

        Options that are for the app's own queue (token, shards …) do not count there.
        """
        if isinstance(self._url, Connection):
            raise UsageError(
                "the app was made with a connection, and runs on that one: leave --url out, or make the app "
                "with an address"
            )
        if self.running:
            raise UsageError("the app runs already: choose its queue before it is started")
        if url == self._url:
            return
        if self._url is not None:
            named, own = (parse(one).shown or one for one in (url, self._url))
            log.warning("the app runs on %s, as asked for, and not on its own queue, %s", named, own)
        kept = {name: value for name, value in self._options.items() if name in ("client_id", "clock")}
        self._url, self._options = url, {**kept, **({"shards": shards} if shards else {})}

    def configure(
        self, *, only: Iterable[str] = (), concurrency: int | None = None, metrics: bool | None = None
    ) -> None:
        """Change how the app runs, as the options of `postroom worker` do; before it is started.

        `only`: handlers by name, and no others. `concurrency` is for all of them but recurring ones.
        `metrics` counts what its embedded queue does.
        """
        if self.running:
            raise UsageError("the app runs already: configure it before it is started")
        if names := list(only):
            self._subscriptions = chosen(self._subscriptions, names)
            topics = {one.topic for one in self._subscriptions}
            self._schedules = [one for one in self._schedules if one.topic in topics]
        if concurrency is not None:
            recurring = {one.topic for one in self._schedules}
            self._subscriptions = [
                one if one.topic in recurring else with_concurrency(one, concurrency)
                for one in self._subscriptions
            ]
        if metrics is not None and not isinstance(self._url, Connection):
            self._options = {**self._options, "metrics": metrics}

    def _reached(self) -> tuple[str, dict[str, Any]]:
        """The address of the app's queue, and the options to connect with."""
        assert not isinstance(self._url, Connection)
        if self._url is not None:
            return self._url, self._options
        url, shards = os.environ.get(_URL), shards_named(os.environ.get(_SHARDS, ""), _SHARDS)
        if not url:
            raise UsageError(
                "the app names no queue: set POSTROOM_URL, give `postroom worker` a --url, or write it down, "
                "as in postroom.App('sqlite:///orders.db')"
            )
        return url, {**({"shards": shards} if shards else {}), **self._options}

    @property
    def _on_file(self) -> bool:
        """Whether its queue is a file of this machine."""
        return not isinstance(self._url, Connection) and parse(self._reached()[0]).path is not None

    # ---- what is to be handled ----

    @overload
    def subscribe(
        self,
        topic: str,
        group: str,
        *,
        name: str | None = None,
        batch: None = None,
        **options: Unpack[HandlerOptions],
    ) -> Registering: ...
    @overload
    def subscribe(
        self,
        topic: str,
        group: str,
        *,
        batch: Batch | int | tuple[Any, ...],
        **options: Unpack[HandlerOptions],
    ) -> RegisteringLists: ...
    def subscribe(
        self,
        topic: str,
        group: str,
        *,
        mode: Mode | None = None,
        order: str | None = None,
        concurrency: int = 8,
        batch: Batch | int | tuple[Any, ...] | None = None,
        timeout: Duration | None = None,
        retry: Backoff = Backoff(1, 2, "10m"),  # noqa: B008 — frozen
        window: int | None = None,
        window_bytes: int | str | None = None,
        lease: Duration | None = None,
        max_handling: Duration | None = None,
        max_attempts: int | None = None,
        exhausted: Exhausted | None = None,
        max_hold: Duration | None = None,
        expires: Duration | None = None,
        slow_lane: SlowLane | bool | None = None,
        start: Position | None = None,
        ack: AckMode = "after",
        member: str | None = None,
        on_missed: MissedHook | None = None,
        name: str | None = None,
    ) -> Any:
        """Register a handler: returns → ack, raises → retry, RetryLater → then, Dead → dead letters.

        The function becomes a task: it is called as before, and `await function.send(body)` sends a message
        that it will handle. Several tasks share a topic and group if each has a `name`: a message sent to one
        of them carries it, and a name that no task has is a dead letter.

        Its parameters are the body, decoded by annotation, and `message`. With `batch` it takes lists of
        them as one unit of work; it may settle some of the messages itself, and the rest follow its ending.
        A plain function runs in a thread. `timeout` cancels a coroutine function and counts as a failure;
        a plain function cannot be cancelled. `ack="on_delivery"`: at most once, failures are only told;
        `ack="manual"`: the handler settles; if it raises, what it left is retried.

        In mode "ordered" different keys run side by side, up to `concurrency`, and each key in order: the
        next message of a key is begun once the one before is settled. A list may have several messages of
        a key, in order, and no other list has that key at the same time; if the handler raises, all it left
        of the list is retried, and comes again in order. With `order="partition"` a partition is one key.

        In mode "broadcast" a handler with a name (`member=`) goes on where it stopped. One that was forgotten
        joins again by itself; `on_missed` is called before its next message, as it may have missed some.

        Settings of the group that are named here (lease, max_attempts, exhausted, max_hold, expires,
        slow_lane) are applied to a group that is there already; another mode, order or start is refused.
        """
        scope = _caller_names()

        def register(function: Any) -> Task[Any, Any, Any]:
            function = function.function if isinstance(function, Task) else function  # subscribed twice
            settings: dict[str, Any] = {"mode": mode, "order": order, "lease": lease}
            settings |= {"max_attempts": max_attempts, "exhausted": exhausted, "max_hold": max_hold}
            settings |= {"expires": expires, "slow_lane": slow_lane, "member": member}
            settings |= {"max_handling": max_handling, "window_bytes": window_bytes}
            subscription = make_subscription(
                function, scope, topic=topic, group=group, concurrency=concurrency, batch=batch,
                timeout=timeout, retry=retry, ack=ack, window=window, start=start,
                on_missed=on_missed, name=name, **settings,
            )  # fmt: skip
            self._register(subscription)
            return Task(function, subscription, self._ways)

        return register

    def reply(
        self,
        topic: str,
        group: str,
        *,
        concurrency: int = 8,
        batch: Batch | int | tuple[Any, ...] | None = None,
        timeout: Duration | None = None,
        traceback: bool = False,
        window: int | None = None,
        window_bytes: int | str | None = None,
        lease: Duration | None = None,
        max_handling: Duration | None = None,
        max_attempts: int | None = None,
        expires: Duration | None = None,
        start: Position | None = None,
    ) -> Callable[[F], F]:
        """Register a handler that answers requests: what it returns is the reply; see `subscription`.

        bytes and str are sent as they are, anything else as JSON; a `postroom.Message` brings headers along.
        What it raises is told to who asked, at once, and is not tried again. `traceback`: with its traceback.
        With `batch` it takes lists, as `subscribe` has them, and returns a list: the reply to each, in order.
        """
        scope = _caller_names()

        def register(function: F) -> F:
            settings: dict[str, Any] = {"mode": None, "order": None, "exhausted": None, "max_hold": None}
            settings |= {"max_handling": max_handling, "window_bytes": window_bytes, "expires": expires}
            subscription = make_reply(
                function, scope, topic=topic, group=group, concurrency=concurrency, batch=batch,
                timeout=timeout, traceback=traceback, window=window, lease=lease,
                max_attempts=max_attempts, start=start, **settings,
            )  # fmt: skip
            self._register(subscription)
            return function

        return register

    def every(
        self,
        when: Duration,
        *,
        timezone: str | tzinfo | None = None,
        missed: Missed = "skip",
        name: str | None = None,
        **options: Unpack[RunOptions],
    ) -> Callable[[F], F]:
        """Run a function again and again: once for each tick, however many workers there are.

        `when` is a cron expression ("0 2 * * *", in `timezone`, else UTC) or a duration ("10m"). A run is a
        message in the topic `every.<name>`: `options` are those of `subscribe`, such as `timeout`, `retry`
        and `max_attempts`. The function takes its tick (a datetime), `message`, both or nothing. Ticks that
        came while no worker ran are left out ("skip"), run "once" for all of them, or "all" of them.
        """
        scope = _caller_names()

        def register(function: F) -> F:
            recurring, subscription = make_recurring(function, scope, when, timezone, missed, name, options)
            if any(recurring.name == other.name for other in self._schedules):
                raise UsageError(f"there are two schedules {recurring.name!r}: give one another name=")
            self._register(subscription)
            self._schedules.append(recurring)
            return function

        return register

    def outbox(self, outbox: Outbox, connect: Any, **options: Any) -> None:
        """Relay an outbox while the app runs; the arguments are those of `outbox.relay`, without `mq`."""
        if self.running:
            raise UsageError("the app runs already: name its outboxes before it starts")
        self.outboxes.append((outbox, connect, options))

    def _register(self, subscription: Subscription) -> None:
        if self.running:
            raise UsageError("the app runs already: register handlers before it starts")
        for other in self._subscriptions:
            if subscription.shares_with(other):
                raise UsageError(_sharing(other, subscription))
        self._subscriptions.append(subscription)
        try:
            for parts in self._by_consumer():
                merged(parts)
        except UsageError:
            self._subscriptions.remove(subscription)
            raise

    def on_error(self, hook: F) -> F:
        """Register a function (async or plain) to be told of failures: it gets the error and the messages."""
        self._on_error = hook
        return hook

    def middleware(self, function: F) -> F:
        """Register what runs around every handler, in the order registered: see `client.app.call`.

        `async def mw(message, call_next)` awaits `call_next()`; or a generator, with one `yield` in it.
        Handlers of lists have it called with the list.
        """
        if self.running:
            raise UsageError("the app runs already: register middleware before it starts")
        self._middleware.append(middleware_of(function))
        return function

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        return tuple(self._subscriptions)

    @property
    def schedules(self) -> tuple[Recurring, ...]:
        return tuple(self._schedules)

    # ---- sending ----

    @property
    def connection(self) -> Connection:
        """The connection the app runs on."""
        if self._connection is None:
            raise UsageError("the app is not running: it is connected between start() and stop()")
        return self._connection

    @property
    def sync(self) -> sync.Connection:
        """The same for handlers that are plain functions: `app.sync.send(…)`, as of `postroom.sync`."""
        found: sync.Connection = self._for_threads(self.connection)
        return found

    async def send(self, topic: str, value: Value, **options: Unpack[SendOptions]) -> Receipt:
        """As `Connection.send`."""
        return await self.connection.send(topic, value, **options)

    async def send_many(self, topic: str, messages: Iterable[Any], **options: Any) -> list[Receipt]:
        """As `Connection.send_many`."""
        return await self.connection.send_many(topic, messages, **options)

    # ---- life ----

    @property
    def running(self) -> bool:
        return self._connection is not None

    async def start(self, *, create: bool = False) -> None:
        """Connect, open every consumer, and start. What is wrong is raised here, and nothing runs then.

        With `create`, topics of the handlers that are not there are created, with the usual settings.

        What may come by itself is waited for, while the others run: a topic that is not there yet, a store
        that is away for a moment. `health()` and the log say so.
        """
        if self.running:
            raise UsageError("the app runs already")
        self._stopping = asyncio.Event()
        if isinstance(self._url, Connection):
            self._connection = self._url
        else:
            url, options = self._reached()
            self._connection = await connect(url, **options)
        try:
            if create:
                await self._create_topics(self._connection)
            for outbox, where, options in self.outboxes:
                self._relays.append(outbox.relay(self._connection, where, **options))
                await self._relays[-1].start()
            self._keepers = await self._open_all(self._connection)
        except BaseException:
            await self._disconnect()
            raise
        self._runs = [asyncio.create_task(keeper.run()) for keeper in self._keepers]
        self._tickers = [Ticker(self._connection, recurring) for recurring in self._schedules]
        self._runs += [asyncio.create_task(ticker.run(self._stopping)) for ticker in self._tickers]

    async def stop(self, grace: Duration | None = None) -> None:
        """Take no more messages, let handlers end, at most for the grace; hand back the rest; disconnect.

        Once more, with `grace=0`, hands back at once.
        """
        if not self.running:
            return
        if grace is not None:
            self._grace_s = duration_ms(grace, name="grace") / 1000
            if self._stopping.is_set() and not self._grace_s:
                for worker in self._workers:
                    worker.hurry()
        self._stopping.set()
        await asyncio.gather(*self._runs, return_exceptions=True)
        await self._disconnect()

    async def wait(self) -> None:
        """Wait until the app is stopped; raises what ended it, if it was that."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait((stopping, *self._runs), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        for task in done:
            if task is not stopping and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def health(self) -> AppHealth:
        """How each handler is doing, and each recurring schedule; may be called from any thread."""
        found = [*(keeper.health for keeper in self._keepers), *(ticker.health for ticker in self._tickers)]
        return AppHealth(self.running, tuple(found), self._trouble)

    async def metrics(self, *, groups: bool = True) -> Metrics:
        """Return what handlers did, and the figures of the app's queue: see `postroom.metrics`.

        An app that counts what its embedded queue does is made with `App(url, metrics=True)`.
        """
        running = {(one.topic, one.group): float(one.state == "running") for one in self.health().handlers}
        own = tuple(self._figures.families(running.items()))
        if self._connection is None:
            return Metrics(own)
        return Metrics((*own, *(await self._connection.metrics(groups=groups)).families))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @asynccontextmanager
    async def lifespan(self, web: object = None) -> AsyncIterator[dict[str, Any]]:
        """`FastAPI(lifespan=app.lifespan)`; `request.state.postroom` is then the connection, and
        `request.state.postroom_app` this app, for its health."""
        async with self:
            yield {"postroom": self.connection, "postroom_app": self}

    def run(self, *, create: bool = False) -> None:
        """Run until SIGINT or SIGTERM; a second one does not wait for handlers. `create`: as for `start`."""
        from .program import run

        run(self, create=create)

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        relays, self._relays = self._relays, []
        await asyncio.gather(*(relay.stop() for relay in relays))
        self._runs, self._keepers, self._tickers = [], [], []
        if connection is not None and connection is not self._url:
            await connection.close()

    async def _create_topics(self, connection: Connection) -> None:
        for topic in dict.fromkeys(one.topic for one in self._subscriptions):
            try:
                await connection.topic(topic)
            except UnknownTopic:
                made = await connection.create_topic(topic, exist_ok=True)
                log.info("created topic %s (%d partitions)%s", topic, made.partitions, connection._where)

    # ---- workers ----

    @property
    def _workers(self) -> list[Worker]:
        return [keeper.worker for keeper in self._keepers if keeper.worker is not None]

    async def _open_all(self, connection: Connection) -> list[Keeper]:
        refuse_unused(self._middleware, [subscription.handler for subscription in self._subscriptions])
        await prepare(connection, self._schedules)
        keepers = self._make_keepers(connection)
        try:
            for keeper in keepers:
                await keeper.open_first()
        except BaseException:
            await _let_go(keepers)
            raise
        return keepers

    async def _open_by_hand(self, connection: Connection) -> list[Worker]:
        """For `testing`: workers that fetch only when they are told to; nothing is waited for."""
        refuse_unused(self._middleware, [subscription.handler for subscription in self._subscriptions])
        await prepare(connection, self._schedules)
        self._stopping = asyncio.Event()
        keepers = self._make_keepers(connection)
        try:
            for keeper in keepers:
                (await keeper.open()).consumer.by_hand()
                await keeper.tell_missed()
            for recurring in self._schedules:  # who moves the clock himself misses nothing
                await Ticker(connection, recurring).step(late_ms=None)
        except BaseException:
            await _let_go(keepers)
            raise
        return [keeper.worker for keeper in keepers if keeper.worker is not None]

    def _make_keepers(self, connection: Connection) -> list[Keeper]:
        return [
            Keeper(connection, merged(parts), self._work, self._stopping, lambda: self._grace_s)
            for parts in self._by_consumer()
        ]

    def _by_consumer(self) -> list[list[Subscription]]:
        """Subscriptions, those together that share a consumer: named tasks of one topic and group."""
        found: dict[object, list[Subscription]] = {}
        for one in self._subscriptions:
            key: object = id(one) if one.broadcast else (one.topic, one.group)
            found.setdefault(key, []).append(one)
        return list(found.values())

    def _work(self, subscription: Subscription, consumer: DrivenConsumer) -> Worker:
        return Worker(
            subscription,
            consumer,
            for_thread=self._for_threads,
            on_error=self._on_error,
            fraction=self._fraction,
            middleware=self._middleware,
            figures=self._figures,
        )

    def _for_threads(self, target: Received | Connection) -> Any:
        from ...sync.facade import for_threads, wrapped

        return for_threads(Portal(self.connection._guard.loop, wrapped), target)


async def _let_go(keepers: Iterable[Keeper]) -> None:
    await asyncio.gather(*(keeper.worker.stop(0) for keeper in keepers if keeper.worker is not None))


def _sharing(one: Subscription, other: Subscription) -> str:
    both = (
        f"{other.handler.name} and {one.handler.name} both handle topic {one.topic!r} for group {one.group!r}"
    )
    if one.task is not None:
        return f"{both} as task {one.task!r}: give one of them another name="
    if one.broadcast and other.broadcast:
        apart = "Give one of them another member=, or a group of its own"
        return f"{both}: each message would go to one of them at random. {apart}"
    return (
        f"{both}: each message would go to one of them at random. Give each a name, as in "
        f"@app.subscribe({one.topic!r}, group={one.group!r}, name='…'), and send with "
        f"{one.handler.name}.send(…); or give one of them a group of its own"
    )


def _caller_names() -> Mapping[str, Any]:
    """The names where `subscribe` is called, for annotations of types that are local to a function."""
    return dict(sys._getframe(2).f_locals)
