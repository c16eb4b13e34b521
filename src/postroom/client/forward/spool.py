"""A spool that needs no queue to begin with: for programs that send, and start while the queue may be away.

    async with postroom.Spool("orders.spool", "postroom://queue:7070") as spool:
        await spool.send("orders", b"…", key="42")

Decides when the queue is asked for again. What is wrong with the file, or with how the queue is named, is
raised when it is opened; whatever the queue says is shown in `spooled`, and tried again. Must never let a
send wait for the queue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...address import parse, parse_shards
from ...backoff import SLOW, STUCK
from ...clock import Clock, SystemClock
from ...config import DEFAULTS
from ...endpoint.asking import AskingEndpoint
from ...endpoint.operations import Operation
from ...endpoint.values import Beat, Held
from ...errors import ClosedError, PostroomError
from ...model.delivery.delivery import Span
from ...model.topology.names import check_topic
from ...tasks import end
from ...units import Duration, Moment, duration_ms
from ...wire.client.remote import RemoteEndpoint
from ..connection import Connecting, Connection, connect
from ..credentials import reaching
from ..message import Receipt, Value
from ..owner_check import Guard
from .forwarder import Trouble
from .spool_file import Spooled
from .spool_producer import SpooledProducer, limit_of, path_of
from .spool_writer import SpoolWriter

__all__ = ["Spool"]


log = logging.getLogger("postroom.spool")


class Spool:
    """Use it as `async with`. The arguments behind `spool_bytes` are those of `connect`."""

    def __init__(
        self,
        path: str | Path,
        url: str,
        *,
        spool_bytes: int | str = DEFAULTS.spool_bytes,
        token: str | None = None,
        tls: bool | str | Path | ssl.SSLContext | None = None,
        client_id: str | None = None,
        zone: str | None = None,
        shards: Mapping[str, str] | None = None,
        migrate: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.path: Path = path_of(path)
        self.connection: Connection | None = None  # to brokers at once; to a database, when it is there
        self._limit = limit_of(spool_bytes)
        self._clock = clock or SystemClock()
        self._reaching = _Reaching(url, token, tls, client_id, zone, shards, migrate, clock)
        self._writer: SpoolWriter | None = None
        self._guard: Guard | None = None
        self._producers: dict[str, SpooledProducer] = {}
        self._task: asyncio.Task[None] | None = None

    # ---- sending ----

    async def send(
        self,
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
        timeout: Duration = DEFAULTS.send_timeout_ms / 1000,
    ) -> Receipt:
        """Keep a message: it is safe in the file when this returns, and is forwarded from there."""
        return await self.producer(topic).send(
            value,
            key=key,
            headers=headers,
            id=id,
            source=source,
            expires=expires,
            slot=slot,
            delay=delay,
            at=at,
            timeout=timeout,
        )

    async def send_many(
        self,
        topic: str,
        messages: Iterable[Any],
        *,
        slot: int | None = None,
        delay: Duration | None = None,
        at: Moment | None = None,
        timeout: Duration = DEFAULTS.send_timeout_ms / 1000,
    ) -> list[Receipt]:
        """Keep messages: all of them or, if one is wrong, none."""
        sender = self.producer(topic)
        return await sender.send_many(messages, slot=slot, delay=delay, at=at, timeout=timeout)

    def producer(self, topic: str) -> SpooledProducer:
        """One for this topic; it may `post` as well."""
        if self._writer is None or self._guard is None:
            raise ClosedError(f"the spool {self.path} is not open: use it within `async with`")
        found = self._producers.get(topic) if isinstance(topic, str) else None
        if found is None or found.closed:
            found = SpooledProducer(_Now(self), self._guard, check_topic(topic), self._writer)
            self._producers[topic] = found
        return found

    # ---- what waits ----

    @property
    def spooled(self) -> Spooled:
        """What waits in the file."""
        return Spooled(0, 0, 0, {}) if self._writer is None else self._writer.depth()

    async def forwarded(self, timeout: Duration | None = None) -> bool:
        """Wait until the queue has everything that is in the file; False: the time was over before."""
        if self._writer is None:
            raise ClosedError(f"the spool {self.path} is not open: use it within `async with`")
        limit_s = None if timeout is None else duration_ms(timeout, name="timeout") / 1000
        return await self._writer.forwarded(limit_s)

    # ---- life ----

    async def open(self) -> None:
        """The file; the queue is looked for meanwhile. Once more is harmless."""
        if self._writer is not None:
            return
        self._guard = Guard()
        writer = SpoolWriter(self.path, self._limit)
        await writer.open()
        self._writer = writer
        self.connection = self._reaching.at_once()
        if self.connection is not None:
            writer.forward(self.connection._endpoint, self.connection.client_id)
        else:
            self._task = self._guard.loop.create_task(self._reach(writer))

    async def close(self) -> None:
        """What can be forwarded quickly is; the rest stays in the file for whoever opens it next."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        await asyncio.gather(*(one.close() for one in self._producers.values()), return_exceptions=True)
        if self._task is not None:
            await end([self._task])
        await writer.close()
        if self.connection is not None:
            await self.connection.close()
            self.connection = None

    async def _reach(self, writer: SpoolWriter) -> None:
        """Until there is a database to forward to."""
        tries, told = 0, ""
        while self.connection is None:
            tries += 1
            try:
                self.connection = await self._reaching.connecting()
            except Exception as error:  # nothing of it is the senders' affair
                stuck = not (isinstance(error, PostroomError) and error.retriable)
                if str(error) != told:
                    log.warning("messages wait in the spool %s: %s", self.path, error)
                    told = str(error) if await _noted(writer, Trouble(str(error), stuck)) else ""
                await asyncio.sleep((STUCK if stuck else SLOW).after(tries))
        if told:
            log.warning("the queue of the spool %s is there", self.path)
        noted = not told or await _noted(writer, None)
        writer.forward(self.connection._endpoint, self.connection.client_id)
        while not noted:
            await asyncio.sleep(SLOW.after(tries))
            noted = await _noted(writer, None)

    def _now_ms(self) -> int:
        """By the queue's clock, once it is there."""
        return self._clock.now_ms() if self.connection is None else self.connection._endpoint.now_ms()

    def _reached_ms(self) -> int:
        return self._clock.now_ms() if self.connection is None else self.connection._endpoint.reached_ms()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Reaching:
    """How the queue is reached. What is wrong with the arguments is said when it is made."""

    def __init__(
        self,
        url: str,
        token: str | None,
        tls: bool | str | Path | ssl.SSLContext | None,
        client_id: str | None,
        zone: str | None,
        shards: Mapping[str, str] | None,
        migrate: bool,
        clock: Clock | None,
    ) -> None:
        self._clock, self._client_id = clock, client_id
        self._address = parse(url)
        self._way = reaching(self._address, token, tls, zone, shards=parse_shards(shards), migrate=migrate)

        def connecting() -> Connecting:
            return connect(
                url,
                token=token,
                tls=tls,
                client_id=client_id,
                zone=zone,
                shards=shards,
                migrate=migrate,
                clock=clock,
            )

        self.connecting = connecting
        connecting()

    def at_once(self) -> Connection | None:
        """A connection to brokers looks for them whenever it is used; a database has to be there."""
        if self._address.kind != "postroom":
            return None
        way = self._way
        client_id = self._client_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        endpoint = RemoteEndpoint(
            self._address.brokers,
            client=client_id,
            token=way.token,
            tls=way.tls,
            zone=way.zone,
            clock=self._clock,
        )
        return Connection(endpoint, client_id, self._clock)


async def _noted(writer: SpoolWriter, trouble: Trouble | None) -> bool:
    """Whether that could be written into the spool's file: its own disk may be full, too."""
    try:
        await writer.tell(trouble)
    except PostroomError as error:
        log.debug("not noted in the spool %s: %s", writer.path, error)
        return False
    return True


class _Now(AskingEndpoint):
    """All that a spooled producer asks of an endpoint is the time: the queue may be away."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def now_ms(self) -> int:
        return self._spool._now_ms()

    def reached_ms(self) -> int:
        return self._spool._reached_ms()

    async def _ask(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        raise AssertionError(f"a spooled producer leaves {operation.name} to the forwarder")

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        raise AssertionError("a spooled producer holds no delivery")

    async def close(self) -> None:
        """There is nothing to close."""
