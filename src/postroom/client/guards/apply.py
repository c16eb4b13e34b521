"""How a guard is used: as a block in the user's own transaction, or over a handler in one that it owns.

    with guards.once(connection, message) as fresh: …      the transaction is yours: commit it, then ack
    async with guards.once(session, message) as fresh: …

    @guards.once(Session)                                  opens a session for each message, commits when
    def credit(order: Order, message, session): …          the handler returns, rolls back when it raises

Decides what a guard reads from a message: the scope (the topic and group it was delivered to, unless named),
the id, the entity (its key, unless named) and the version. Must never guess: what cannot be read is a
DecodeError, which an app takes to the dead letters with its reason, since it will never fit.

Decides nothing about messages: a rule does. Must never commit or roll back a transaction that is the user's,
never run a handler before its rule has decided, and never let a guard work where nothing could be rolled
back.
"""

from __future__ import annotations

import functools
import inspect
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from ...errors import DecodeError, InvalidSetting, UsageError
from .. import databases
from ..app.handler import Handler
from ..consumer.in_flight import LeasedDelivery
from ..databases import Theirs
from ..forward.transactions import Block, OwnConnection, is_awaited, resolved
from ..message import Received
from . import tables

__all__ = [
    "Entity",
    "Guarded",
    "Id",
    "Ready",
    "Rule",
    "Text",
    "Version",
    "bare",
    "entity_of",
    "id_of",
    "scope_of",
    "text_of",
    "use",
    "version_of",
]


Id: TypeAlias = str | Callable[[Any], str] | None
Entity: TypeAlias = str | bytes | Callable[[Any], str | bytes] | None
Version: TypeAlias = str | int | Callable[[Any], int]
Text: TypeAlias = str | Callable[[Any], str]

_LIMIT = 2**63
_PLACE = re.compile(r"[0-9]+-([0-9]+)")  # the id of a message that was given none


def bare(message: Any) -> Received:
    """The message itself: functions without await have it in another form (postroom.sync)."""
    found = getattr(message, "_target", message)
    if not isinstance(found, Received):
        raise UsageError(
            f"a guard takes a received message, not {type(message).__name__}: `message` of a handler"
        )
    return found


def scope_of(message: Received, scope: str | None) -> str:
    if scope is not None:
        if not isinstance(scope, str) or not scope:
            raise InvalidSetting(f"scope={scope!r}: a name, such as 'billing'")
        return scope
    delivery = message._delivery
    if not isinstance(delivery, LeasedDelivery):
        raise UsageError("this message was read, not delivered to a group: name a scope= for the guard")
    return f"{message.topic}/{delivery.settler.who.group}"


def id_of(message: Received, id: Id) -> tuple[str, ...]:
    """The id that the sender gave; else the one by place, which a message keeps when Postroom moves it.

    With its timestamp then: a queue that is made anew counts its places from the beginning again.
    """
    if callable(id):
        id = id(message)
    if id is None:
        id, place = message.id, _PLACE.fullmatch(message.id)
        if place is not None and int(place[1]) == message.offset:
            return (message.topic, id, str(message.timestamp))
    if not isinstance(id, str) or not id:
        raise DecodeError(f"the id of a message is text that is not empty; id= gave {id!r}")
    return (message.topic, id)


def entity_of(message: Received, entity: Entity) -> bytes:
    found = entity(message) if callable(entity) else message.key if entity is None else entity
    if isinstance(found, str):
        found = found.encode()
    if not isinstance(found, bytes) or not found:
        raise DecodeError(
            f"the message has no key, or entity= gave {found!r}: send it with key=, or name what it is about "
            "with entity="
        )
    return found


def version_of(message: Received, version: Version) -> int:
    """A whole number: of the header of that name, or what the function returns."""
    if isinstance(version, str):
        raw = message.headers.get(version)
        if raw is None:
            raise DecodeError(
                f"the message has no header {version!r}: send it, or name another with version="
            )
        found: Any = _number(raw)
    else:
        found = version(message) if callable(version) else version
    if type(found) is not int or not -_LIMIT <= found < _LIMIT:
        raise DecodeError(f"a version is a whole number of 64 bits; version={version!r} gave {found!r}")
    return found


def text_of(message: Received, what: Text, name: str) -> str:
    """The header of that name, or what the function returns."""
    if callable(what):
        found: Any = what(message)
    elif what in message.headers:
        found = message.headers[what].decode(errors="replace")
    else:
        raise DecodeError(f"the message has no header {what!r}: send it, or name another with {name}=")
    if not isinstance(found, str):
        raise DecodeError(f"{name}= gave {found!r}: it is to be text")
    return found


def _number(raw: bytes) -> int | bytes:
    try:
        return int(raw)
    except ValueError:
        return raw


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
