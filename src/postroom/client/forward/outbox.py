"""The outbox: messages are written in the caller's own transaction, and sent after its commit (R30).

    outbox = postroom.Outbox()

    with outbox.transaction(connection):
        connection.execute("UPDATE accounts SET …")
        outbox.send(connection, "transfers", b"…", key="42")

    async with outbox.relay(mq, connect):      # in one process or in many: one of them leads
        ...

Decides what may be written, and refuses what could not be rolled back. Must never begin, commit or roll back
a transaction that it was not asked to.

The relay sends what is committed, in the order of ids per key, and deletes it then (R30, I21). Any number of
processes may have one; whichever has the lease leads, and the others look now and then whether it still does.
Decides its own life: what is wrong from the start (no table, no connection) is raised there; later the relay
goes on by itself, with a new connection and a new identity, whatever happened to the old ones. Must never
send anything itself: the forwarder does, under a stamp (I12).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from ...backoff import SLOW
from ...clock import Clock, SystemClock
from ...errors import LeaseLost, UsageError
from ...tasks import end
from ...units import Duration, Moment, duration_ms
from .. import databases
from ..codec import listed
from ..databases import Opening, opening
from ..message import Message, Value
from .forwarder import Forwarder, Trouble
from .outbox_source import DrawingEndpoint, OutboxSource
from .outbox_table import NAME, Row, Table, kind_named, look, rows_of
from .transactions import Block, Hooks, OwnConnection, is_awaited, joined, resolved

if TYPE_CHECKING:
    from ..connection import Connection


__all__ = ["Outbox", "Relay", "RelaySettings", "make_relay", "transactional"]


log = logging.getLogger("postroom.outbox")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RelaySettings:
    table: Table
    opening: Opening
    lease_ms: int
    poll_ms: int


class Relay:
    """Made by `Outbox.relay`; use it as `async with`."""

    def __init__(self, mq: Connection, settings: RelaySettings, wakers: list[Callable[[], None]]) -> None:
        self._mq, self._settings, self._wakers = mq, settings, wakers
        self._source: OutboxSource | None = None
        self._forwarder: Forwarder | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._forwarded = 0  # by forwarders before this one

    @property
    def leading(self) -> bool:
        """Whether this is the relay that sends."""
        return self._source is not None and self._source.leading

    @property
    def forwarded(self) -> int:
        """Messages that this relay has sent."""
        return self._forwarded + (self._forwarder.forwarded if self._forwarder is not None else 0)

    @property
    def troubles(self) -> dict[str, Trouble]:
        """By topic, why its messages wait."""
        return {} if self._forwarder is None else self._forwarder.troubles

    def wake(self) -> None:
        """There may be messages. From any thread."""
        forwarder = self._forwarder
        if forwarder is not None:
            forwarder.wake()

    # ---- life ----

    async def start(self) -> None:
        """SchemaMismatch: the table is missing or old. What the driver says, if it cannot connect."""
        self._mq._guard.check()
        if self._task is not None:
            raise UsageError("this relay runs already: make another with outbox.relay(…)")
        settings = self._settings
        await asyncio.to_thread(OutboxSource(settings.table, settings.opening, settings.lease_ms, "").check)
        self._task = asyncio.create_task(self._run())
        self._wakers.append(self.wake)

    async def stop(self) -> None:
        """At any step; gives the lease back. Once more is harmless."""
        if self._task is None:
            return
        with suppress(ValueError):
            self._wakers.remove(self.wake)
        self._stopping.set()
        await asyncio.shield(self._task)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _run(self) -> None:
        tries = 0
        while not self._stopping.is_set():
            before = self.forwarded
            error = await self._forward()
            if isinstance(error, LeaseLost):
                log.info("another relay leads the outbox %s now", self._settings.table.name)
            elif error is not None:
                tries = 1 if self.forwarded > before else tries + 1
                log.warning("the relay of %s starts again: %r", self._settings.table.name, error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(SLOW.after(tries)):
                        await self._stopping.wait()

    async def _forward(self) -> BaseException | None:
        """Until it is told to stop, or something ends it: that is returned."""
        settings, holder, limits = self._settings, secrets.token_hex(16), self._mq._limits
        way = DrawingEndpoint.over(self._mq._endpoint, settings.table.name, holder)
        source = OutboxSource(
            settings.table, settings.opening, settings.lease_ms, holder, way, tuning=limits.tuning.client
        )
        forwarder = Forwarder(
            way or self._mq._endpoint, source, client=self._mq.client_id, look_ms=settings.poll_ms,
            limits=limits,
        )  # fmt: skip
        self._source, self._forwarder = source, forwarder
        running, stopping = (asyncio.create_task(one) for one in (forwarder.run(), self._stopping.wait()))
        try:
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            source.stopping = True
            if not running.done():  # what is on its way: the next relay would finish it all the same
                await asyncio.to_thread(source.idle.wait, limits.tuning.client.relay_stop_s)
            return running.exception() if running.done() else None
        finally:
            await end((running, stopping))
            self._forwarded, self._forwarder = self.forwarded, None
            await _let_go(forwarder, source)


async def _let_go(forwarder: Forwarder, source: OutboxSource) -> None:
    """In the forwarder's own thread, which the connection belongs to."""
    try:
        await forwarder._ask(source.leave)
    except Exception as error:  # it may be that the connection is what failed; the lease ends by itself
        log.debug("the lease of a relay was not given back: %r", error)
    await asyncio.to_thread(forwarder.let_go)


def make_relay(mq: Any, settings: RelaySettings, wakers: list[Callable[[], None]]) -> Any:
    """Of a connection, or of one of `postroom.sync`: then it is used without await."""
    portal = getattr(mq, "_portal", None)
    if portal is None:
        return Relay(mq, settings, wakers)

    async def make() -> Relay:
        return Relay(mq._target, settings, wakers)

    return portal.call(make)


class Outbox:
    """`table` is its name in the caller's database. May be shared by all threads of a process."""

    def __init__(self, table: str = NAME, *, clock: Clock | None = None) -> None:
        self.table = Table(table)
        self._clock = clock or SystemClock()
        self._hooks = Hooks(self.wake)
        self._depths: dict[int, int] = {}  # open blocks of `transaction`, by connection
        self._wakers: list[Callable[[], None]] = []

    # ---- writing ----

    def send(
        self,
        connection: Any,
        topic: str,
        value: Value,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        id: str | None = None,
        source: str | None = None,
        expires: Duration | datetime | None = None,
        slot: int | None = None,
        delay: Duration | None = None,
        at: Moment | None = None,
    ) -> Any:
        """Write a message in the transaction that is open on the connection: it is sent once that commits.

        The arguments are those of `mq.send`; moments count from this call. On an async session or connection
        of SQLAlchemy it is awaited, `await outbox.send(…)`, and else returns None; one that was not awaited
        stops the commit. A connection of Django may be named by its alias.
        """
        message = Message(value, key, headers, id, source, expires)
        return self._send(connection, topic, [message], slot=slot, delay=delay, at=at)

    def send_many(
        self,
        connection: Any,
        topic: str,
        messages: Iterable[Any],
        *,
        slot: int | None = None,
        delay: Duration | None = None,
        at: Moment | None = None,
    ) -> Any:
        """Several, in their order; if one is wrong, none is written. Async as `send` is."""
        return self._send(connection, topic, listed(messages), slot=slot, delay=delay, at=at)

    def _send(self, connection: Any, topic: str, messages: Sequence[Any], **when: Any) -> Any:
        rows = rows_of(topic, messages, self._clock.now_ms(), **when)
        connection = resolved(connection)
        if not is_awaited(connection):
            return self._write(connection, rows)
        return self._write_async(connection, rows, self._hooks.begin(connection))

    async def _write_async(self, connection: Any, rows: list[Row], done: Callable[[], None]) -> None:
        await connection.run_sync(self._write, rows)
        done()

    def _write(self, connection: Any, rows: list[Row]) -> None:
        theirs = databases.of(connection)
        if not theirs.in_transaction:
            raise UsageError(
                "this connection commits each statement by itself, so the message could not be rolled back: "
                "write it within `with outbox.transaction(connection):`, or in a transaction of your own"
            )
        with self.table.explaining():
            if len(rows) == 1:
                theirs.run(self.table.insert, rows[0])
            elif rows:
                theirs.many(self.table.insert, rows)
        self._hooks.wrote(connection)

    # ---- transactions ----

    def transaction(self, connection: Any) -> Block:
        """A block that commits when it is left, rolls back if it raises, and wakes the relay.

        What is open on the connection already belongs to it. A block within a block is a savepoint. For an
        async session or connection of SQLAlchemy: `async with`.
        """
        return Block(resolved(connection), self._depths, self.wake)

    @overload
    def transactional(self, function: F) -> F: ...

    @overload
    def transactional(self, *, connect: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...

    def transactional(self, function: Any = None, *, connect: Any = None) -> Any:
        """Make a function one transaction: `@outbox.transactional`, if it is given a connection or session.

        It runs in `transaction` of the first argument that is one. With `connect=`, as in
        `@outbox.transactional(connect=Session)`, each call opens one, which the function gets as its first
        argument, and closes it. Plain functions and coroutine functions alike.
        """
        if function is None:
            return functools.partial(transactional, self, connect=connect)
        return transactional(self, function, connect)

    # ---- the tables ----

    def ddl(self, database: str) -> list[str]:
        """The statements that make the tables on "sqlite", "postgres" or "mysql", for a migration."""
        return self.table.ddl(kind_named(database))

    def create_table(self, connection: Any) -> Any:
        """Make the tables, unless they are there; commits if no transaction is open. Async as `send` is."""
        return self._on(connection, self._create)

    def _create(self, connection: Any) -> None:
        with joined(connection):
            theirs = databases.of(connection)
            for statement in self.table.ddl(theirs.kind):
                theirs.run(statement)

    def status(self, connection: Any) -> Any:
        """What waits, how old the oldest is, and what is stuck: an `OutboxStatus`. Async as `send` is."""
        return self._on(connection, functools.partial(look, self.table))

    def include_name(self, name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
        """For Alembic: `context.configure(include_name=outbox.include_name)` hides Postroom's tables."""
        table = name if type_ == "table" else parent_names.get("table_name")
        return table is None or not (
            table.startswith("postroom_") or table in (self.table.name, self.table.relay)
        )

    def _on(self, connection: Any, work: Callable[[Any], Any]) -> Any:
        connection = resolved(connection)
        return connection.run_sync(work) if is_awaited(connection) else work(connection)

    # ---- sending ----

    def relay(self, mq: Any, connect: Any, *, lease: Duration = 10, poll: Duration = 0.5) -> Relay:
        """What sends the messages: `async with outbox.relay(mq, connect):`, in as many processes as you like.

        One of them leads, until it is stopped, or for `lease` after it was cut off. `connect` opens a
        connection to the outbox's database: an address, a function, an engine, or an alias of Django. Commits
        of this process wake it; those of others it sees after `poll` at most. `mq` may be of `postroom.sync`:
        then it is `with`, not `async with`.
        """
        settings = RelaySettings(
            self.table, opening(connect), duration_ms(lease, name="lease"), duration_ms(poll, name="poll")
        )
        made: Relay = make_relay(mq, settings, self._wakers)
        return made

    def wake(self) -> None:
        """Tell the relays of this process that something was committed. From any thread; never needed."""
        for waker in tuple(self._wakers):
            waker()


def transactional(outbox: Outbox, function: Callable[..., Any], connect: Any) -> Callable[..., Any]:
    """Return the function as one transaction, on the first argument that is a connection.

    `connect` opens one for each call instead, which becomes its first argument, and is closed again.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            if connect is None:
                async with outbox.transaction(_found(function, args, kwargs)):
                    return await function(*args, **kwargs)
            async with OwnConnection(connect) as connection, outbox.transaction(connection):
                return await function(connection, *args, **kwargs)

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if connect is None:
            with outbox.transaction(_found(function, args, kwargs)):
                return function(*args, **kwargs)
        with OwnConnection(connect) as connection, outbox.transaction(connection):
            return function(connection, *args, **kwargs)

    return call


def _found(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for value in (*args, *kwargs.values()):
        if databases.library(value) and hasattr(value, "commit") and hasattr(value, "rollback"):
            return value  # an object that is mapped to a table is of the same library, and no connection
    raise UsageError(
        f"{function.__qualname__} was called without a connection or session: give it one, or let one be "
        "opened for each call with @outbox.transactional(connect=…)"
    )
