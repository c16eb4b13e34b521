"""The blocking classes, made from the asynchronous ones: `postroom.sync` shows them.

Decides how each member is turned: coroutines become blocking calls, async iterators plain ones, `async with`
plain `with`, and futures those of concurrent.futures. What type checkers see of it is generated from the same
classes: `__init__.pyi`, by `make stub`. Must never leave a call behind: whoever interrupts one (Ctrl-C)
cancels it. Must never block an event loop: a call from within a running one is refused, and so is one in a
child process after fork.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from ..client.connection import Connection as AsyncConnection
from ..client.connection import connect as _connect
from ..client.consumer.consumer import Consumer as AsyncConsumer
from ..client.consumer.user_transaction import prepared
from ..client.forward.outbox import Relay as AsyncRelay
from ..client.forward.spool import Spool as AsyncSpool
from ..client.forward.spool_producer import SpooledProducer as AsyncSpooledProducer
from ..client.hosting import Served as AsyncServed
from ..client.message import Received as AsyncReceived
from ..client.producer.producer import Producer as AsyncProducer
from ..client.producer.staging import Segment as AsyncSegment
from ..client.producer.staging import Staging as AsyncStaging
from ..clock import Clock
from .portal import LoopThread, Portal, PostFuture, Pump, refuse_running_loop

__all__ = [
    "Connection",
    "Consumer",
    "Facade",
    "Producer",
    "Received",
    "Relay",
    "Segment",
    "Served",
    "Spool",
    "SpooledProducer",
    "Staging",
    "connect",
    "for_threads",
    "like",
    "wrapped",
]

C = TypeVar("C", bound="type[Facade]")


class Facade:
    """Stands for an asynchronous object. Plain attributes are read as they are."""

    __slots__ = ("_portal", "_target")
    __wraps__: ClassVar[type]

    def __init__(self, portal: Portal, target: Any) -> None:
        self._portal = portal
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._target, name)

    def __repr__(self) -> str:
        return repr(self._target)

    def __eq__(self, other: object) -> bool:
        return self._target is other._target if isinstance(other, Facade) else NotImplemented

    def __hash__(self) -> int:
        return hash(id(self._target))


class _Block(Facade):
    """What is used with `with`."""

    __slots__ = ()

    def __enter__(self) -> Self:
        self._portal.call(self._target.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(self._target.__aexit__, kind, error, trace)


# ---- making them ----

_FACADES: dict[type, type[Facade]] = {}


def like(target: type) -> Callable[[C], C]:
    """Give a facade every public member of the asynchronous class, in its blocking form."""

    def fill(facade: C) -> C:
        written = {name for base in facade.__mro__ for name in vars(base)}
        for name, member in inspect.getmembers(target):
            if not name.startswith("_") and name not in written:
                setattr(facade, name, _member(name, member))
        facade.__wraps__ = target
        facade.__doc__ = facade.__doc__ or target.__doc__
        _FACADES[target] = facade
        return facade

    return fill


def _member(name: str, member: Any) -> Any:
    if inspect.isasyncgenfunction(member):
        return _iterating(member)
    if inspect.isfunction(member):
        return _blocking(member)
    return property(lambda self: getattr(self._target, name), doc=getattr(member, "__doc__", None))


def _blocking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Facade, *args: Any, **kwargs: Any) -> Any:
        self._portal.check()
        given = {name: _bare(value) for name, value in kwargs.items()}
        return self._portal.call(function, self._target, *map(_bare, args), **given)

    return call


def _iterating(function: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(function)
    def iterate(self: Facade, *args: Any, **kwargs: Any) -> Iterator[Any]:
        pump = Pump(functools.partial(function, self._target, *args, **kwargs))
        try:
            while items := self._portal.call(pump.take):
                yield from items
        finally:
            self._portal.soon(pump.stop)

    return iterate


def _bare(value: Any) -> Any:
    """An argument as the asynchronous client takes it."""
    if isinstance(value, Facade):
        return value._target
    if isinstance(value, Iterator) or (
        isinstance(value, list | tuple) and any(isinstance(item, Facade) for item in value)
    ):
        return [_bare(item) for item in value]  # an iterator may block: it must not run in the loop
    return value


def wrapped(portal: Portal, value: Any) -> Any:
    """What a call returned, in its blocking form."""
    facade = _FACADES.get(type(value))
    if facade is not None:
        return facade(portal, value)
    if type(value) is list and value and type(value[0]) in _FACADES:
        return [_FACADES[type(item)](portal, item) for item in value]
    return PostFuture(value) if isinstance(value, asyncio.Future) else value


# ---- what there is ----


@like(AsyncReceived)
class Received(Facade):
    __slots__ = ()

    def ack(self, *, connection: Any = None) -> None:
        self._portal.check()
        if connection is None:
            self._portal.call(AsyncReceived.ack, self._target)
        else:
            self._portal.call(prepared, self._target)(connection)  # in the thread that uses it

    ack.__doc__ = AsyncReceived.ack.__doc__

    # Nothing to wait for: what is read of the value need not go through the loop.

    def json(self) -> Any:
        return self._target.json()

    def decode(self, into: Any) -> Any:
        return self._target.decode(into)

    def header(self, name: str, default: str | None = None) -> str | None:
        found: str | None = self._target.header(name, default)
        return found

    json.__doc__, decode.__doc__ = AsyncReceived.json.__doc__, AsyncReceived.decode.__doc__
    header.__doc__ = AsyncReceived.header.__doc__


@like(AsyncProducer)
class Producer(_Block):
    __slots__ = ()


@like(AsyncSpooledProducer)
class SpooledProducer(_Block):
    __slots__ = ()


@like(AsyncConsumer)
class Consumer(_Block):
    __slots__ = ()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Received:
        async def step() -> AsyncReceived | None:
            return await anext(self._target, None)

        found: Received | None = self._portal.call(step)
        if found is None:
            raise StopIteration
        return found


@like(AsyncServed)
class Served(_Block):
    __slots__ = ()


@like(AsyncRelay)
class Relay(_Block):
    __slots__ = ()


@like(AsyncSegment)
class Segment(Facade):
    __slots__ = ()


@like(AsyncStaging)
class Staging(Facade):
    __slots__ = ()


@like(AsyncConnection)
class Connection(_Block):
    """Has an event loop of its own, in a thread of its own."""

    __slots__ = ()

    def close(self) -> None:
        """Close what was made from this connection, then the connection. Once more is harmless."""
        if self._portal.closed:
            return
        self._portal.check()
        try:
            self._portal.call(self._target.close)
        finally:
            self._portal.end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@like(AsyncSpool)
class Spool(_Block):
    """Has an event loop of its own, in a thread of its own, while it is open."""

    __slots__ = ()

    def __init__(self, path: str | Path, url: str, **how: Any) -> None:
        """What the asynchronous one takes."""
        refuse_running_loop()
        target = AsyncSpool(path, url, **how)
        super().__init__(LoopThread(wrapped), target)

    def close(self) -> None:
        """What can be forwarded quickly is; the rest stays in the file for whoever opens it next."""
        if self._portal.closed:
            return
        self._portal.check()
        try:
            self._portal.call(self._target.close)
        finally:
            self._portal.end()

    def __enter__(self) -> Self:
        try:
            self._portal.call(self._target.open)
        except BaseException:
            self._portal.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    url: str,
    *,
    token: str | None = None,
    tls: bool | str | Path | ssl.SSLContext | None = None,
    client_id: str | None = None,
    zone: str | None = None,
    shards: Mapping[str, str] | None = None,
    migrate: bool = False,
    metrics: bool = False,
    clock: Clock | None = None,
) -> Connection:
    """Connect to a store, or to brokers: `with postroom.sync.connect(url) as mq`, or `close()` in the end."""
    refuse_running_loop()
    connecting = _connect(
        url, token=token, tls=tls, client_id=client_id, zone=zone, shards=shards, migrate=migrate,
        metrics=metrics, clock=clock,
    )  # fmt: skip
    loop = LoopThread(wrapped)
    try:
        connection: Connection = loop.call(connecting._opened)
    except BaseException:
        loop.end()
        raise
    return connection


def for_threads(portal: Portal, target: Any) -> Any:
    """What a handler in a thread gets for something of the app's: it goes through the app's loop."""
    return _FACADES[type(target)](portal, target)
