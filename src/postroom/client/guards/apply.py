"""How a guard is used: as a block in the user's own transaction, or over a handler in one that it owns.

    with guards.once(connection, message) as fresh: …      the transaction is yours: commit it, then ack
    async with guards.once(session, message) as fresh: …

    @guards.once(Session)                                  opens a session for each message, commits when
    def credit(order: Order, message, session): …          the handler returns, rolls back when it raises

Decides nothing about messages: a rule does. Must never commit or roll back a transaction that is the user's,
never run a handler before its rule has decided, and never let a guard work where nothing could be rolled
back.
"""

from __future__ import annotations

import functools
import inspect
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ...errors import InvalidSetting, UsageError
from .. import databases
from ..app.handler import Handler
from ..databases import Theirs
from ..forward.outbox.transactions import Block, OwnConnection, is_awaited, resolved
from ..message import Received
from . import tables
from .fields import bare

__all__ = ["Guarded", "Ready", "Rule", "use"]

T = TypeVar("T", covariant=True)
_CONNECTION = ("connection", "session")  # parameters of a handler that take it


class Rule(Protocol[T]):
    def ready(self, theirs: Theirs, connection: Any, message: Received) -> Sequence[Received]:
        """What is to be handled now, in order, and is written down as handled in the same transaction."""

    def shown(self, ready: Sequence[Any]) -> T:
        """The same as a block gets it."""


class Ready:
    """Messages whose turn it is, in order. All of them are to be handled: each can be had once."""

    __slots__ = ("_left",)

    def __init__(self, messages: Sequence[Any]) -> None:
        self._left = list(reversed(messages))

    def __iter__(self) -> Iterator[Any]:
        while self._left:
            yield self._left.pop()

    def __len__(self) -> int:
        return len(self._left)


# ---- a block ----


class Guarded(Generic[T]):
    """A guard on one message: `with`, or `async with` for an async session or connection of SQLAlchemy."""

    __slots__ = ("_connection", "_decided", "_message", "_rule")

    def __init__(self, rule: Rule[T], connection: Any, message: Any) -> None:
        self._rule = rule
        self._connection, self._message = resolved(connection), message
        self._decided: Any = None

    def __enter__(self) -> T:
        return self._shown(_ready(self._rule, self._connection, self._message))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and isinstance(self._decided, Ready) and self._decided:
            raise UsageError(
                f"{len(self._decided)} messages were ready and not handled: go through all of them; if this "
                "transaction is rolled back, they come again"
            )

    async def __aenter__(self) -> T:
        return self._shown(await _ready_async(self._rule, self._connection, self._message))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _shown(self, ready: Sequence[Any]) -> T:
        self._decided = shown = self._rule.shown(ready)
        return shown


def _ready(rule: Rule[Any], connection: Any, message: Any) -> Sequence[Any]:
    theirs = databases.of(connection)
    if not theirs.in_transaction:
        raise UsageError(
            "this connection commits each statement by itself, so a guard could not be rolled back with the "
            "handler's work: begin a transaction first (or connect without autocommit)"
        )
    found = bare(message)
    with tables.explained(theirs):
        ready = rule.ready(theirs, connection, found)
    return [message if one is found else one for one in ready]


async def _ready_async(rule: Rule[Any], connection: Any, message: Any) -> Sequence[Any]:
    if not is_awaited(connection):
        return _ready(rule, connection, message)
    found: Sequence[Any] = await connection.run_sync(lambda sync: _ready(rule, sync, message))
    return found


# ---- over a handler ----


def use(rule: Rule[Any], connection: Any, message: Any) -> Any:
    """A block on a message; without one, what goes over a handler."""
    if message is not None:
        return Guarded(rule, connection, message)
    opens = isinstance(connection, str) or callable(connection)
    if not opens or isinstance(connection, sqlite3.Connection):  # which can be called, for its own reasons
        raise InvalidSetting(
            f"{type(connection).__name__} does not open connections: over a handler a guard takes a function "
            "that does (a sessionmaker, engine.connect, or your own), or an alias of Django; in a block it "
            "takes the connection and the message"
        )
    names = dict(sys._getframe(2).f_locals)  # for annotations of types that are local to a function
    return lambda function: _over(rule, connection, names, function)


def _over(
    rule: Rule[Any], factory: Any, names: Mapping[str, Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            given, message, result = plan.given(args, kwargs)
            async with OwnConnection(factory) as connection:
                if not is_awaited(connection):
                    databases.of(connection)  # refused before anything is begun
                async with Block(connection, {}, _nothing):
                    await plan.check_async(connection)
                    for one in await _ready_async(rule, connection, message):
                        done = await function(**plan.arguments(given, message, one, connection))
                        result = done if one is message else result
            return result

        plan = _Plan(function, call_async, names)
        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given, message, result = plan.given(args, kwargs)
        with OwnConnection(factory) as connection:
            databases.of(connection)  # refused before anything is begun
            with Block(connection, {}, _nothing):
                plan.check(connection)
                for one in _ready(rule, connection, message):
                    done = function(**plan.arguments(given, message, one, connection))
                    result = done if one is message else result
        return result

    plan = _Plan(function, call, names)
    return call


def _nothing() -> None:
    """Nobody is to be told of the end of a guard's own transaction."""


class _Plan:
    """What the handler takes, and what its guarded form takes: no connection, and the message in any case."""

    def __init__(
        self, function: Callable[..., Any], guarded: Callable[..., Any], names: Mapping[str, Any]
    ) -> None:
        taken = inspect.signature(function).parameters
        self._connection = next((name for name in _CONNECTION if name in taken), None)
        left = [parameter for name, parameter in taken.items() if name != self._connection]
        guarded.__annotations__ = {n: v for n, v in guarded.__annotations__.items() if n != self._connection}
        self._handler = self._look(guarded, left, names)
        self._adds_message = self._handler.message is None
        if self._adds_message:
            left.append(inspect.Parameter("message", inspect.Parameter.KEYWORD_ONLY))
            self._handler = self._look(guarded, left, names)
        self._checked = False

    def _look(self, guarded: Any, parameters: list[inspect.Parameter], names: Mapping[str, Any]) -> Handler:
        guarded.__signature__ = self._signature = inspect.Signature(parameters)
        return Handler.of(guarded, many=False, scope=names)

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Any, None]:
        """Arguments by name, the message among them, and the result if the handler is not called."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        return arguments, arguments[self._handler.message or "message"], None

    def arguments(self, given: dict[str, Any], message: Any, one: Any, connection: Any) -> dict[str, Any]:
        """To call the handler with one of the messages that are ready."""
        found = dict(given)
        if one is not message:
            decode = self._handler.decode
            found |= self._handler.arguments(None if decode is None else decode(one.value), one)
        if self._adds_message:
            del found["message"]
        return found if self._connection is None else found | {self._connection: connection}

    def check(self, connection: Any) -> None:
        """Once: that the tables are there, and of this version."""
        if not self._checked:
            tables.check(databases.of(connection))
            self._checked = True

    async def check_async(self, connection: Any) -> None:
        if is_awaited(connection):
            await connection.run_sync(self.check)
        else:
            self.check(connection)
