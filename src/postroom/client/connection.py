"""The connection: where everything starts.

Owns the endpoint, the heartbeat, and the producers and consumers made from it; closing it closes them.
Decides nothing about messages. Must never be used from another process or event loop than its own (`guard`),
and must let go of everything however its block is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..address import Address, parse, parse_shards
from ..broker.broker import open_endpoint
from ..broker.exposition import Sampler, of_counts, of_groups, of_process
from ..broker.served import embedded, figures_of, measured
from ..clock import Clock, SystemClock
from ..config import DEFAULTS, Limits
from ..endpoint.endpoint import Endpoint
from ..errors import InvalidSetting, UsageError
from ..metrics import Metrics
from ..model.messages.compression import AUTO, COMPRESSIONS
from ..model.policy.settings import Exhausted, Mode
from ..model.policy.slow_lane import SlowLane
from ..model.topology.names import check_group, check_member, check_topic
from ..units import Duration, Moment, duration_ms, size_bytes
from ..wire.client.remote import RemoteEndpoint, open_remote
from ..wire.server.listening import Listening
from .admin import Admin, group_wish
from .consumer.consumer import AckMode, Consumer, ConsumerSettings
from .consumer.driven import DrivenConsumer
from .consumer.heartbeat import Heartbeat
from .consumer.in_flight import Window
from .consumer.reading import Position, Reading, as_start
from .credentials import Reaching, reaching
from .forward.spool_producer import Spools
from .hosting import Served
from .message import Receipt, Received, Value
from .owner_check import Guard
from .producer.accumulator import Batching
from .producer.producer import Producer
from .producer.staging import Staging
from .producer.staging import make as make_staging
from .requests import Requesting

__all__ = ["Connecting", "Connection", "connect"]

log = logging.getLogger("postroom.connection")

_MOST_SENDERS = 1000  # topics whose producers are kept for `send`; of those with nothing under way
_CLIENT_CHARS = 100  # the name of a member that has none of its own begins with it


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
) -> Connecting:
    """Connect to a store, or to brokers: `async with connect(url) as mq`, or `mq = await connect(url)`.

    Brokers (postroom://a:7070,b:7070) know the client by its `token` (else: POSTROOM_TOKEN). `tls` is True,
    or a file with the authorities to trust (else: POSTROOM_TLS). Those of the client's `zone` are preferred.

    `shards={"b": "mysql://…"}` names further databases of the queue, of any kind: partitions are spread over
    all of them, and topics and groups are kept in the first, `url`. One of those that is down is allowed.
    `migrate` makes or changes the tables on a database server, which else is done by `postroom migrate`.
    `metrics` counts what an embedded queue is asked, for `mq.metrics()`; brokers count by themselves.
    `clock` is for tests that move time.
    """
    address, others = parse(url), parse_shards(shards)
    way = reaching(address, token, tls, zone, shards=others, migrate=migrate)
    if client_id is not None and not _is_name(client_id, _CLIENT_CHARS):
        raise InvalidSetting(
            f"client_id={client_id!r}: a name of 1 to {_CLIENT_CHARS} printable characters, such as 'shop-1'"
        )
    return Connecting(lambda: _open(address, others, way, client_id, migrate, metrics, clock))


class Connecting:
    """A connection about to be opened."""

    __slots__ = ("_connection", "_open")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Connection, name):
            raise UsageError(
                f"this is not connected yet, so it has no {name}: write `mq = await postroom.connect(…)`, or "
                "`async with postroom.connect(…) as mq:`"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __init__(self, opening: Callable[[], Awaitable[Connection]]) -> None:
        self._open = opening
        self._connection: Connection | None = None

    def __await__(self) -> Generator[Any, None, Connection]:
        return self._opened().__await__()

    async def _opened(self) -> Connection:
        if self._connection is not None:
            raise UsageError("this was awaited already: call connect() once for each connection")
        self._connection = await self._open()
        return self._connection

    async def __aenter__(self) -> Connection:
        return await self._opened()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._connection is not None
        await self._connection.__aexit__(kind, error, trace)


async def _open(
    address: Address,
    shards: Mapping[str, Address],
    way: Reaching,
    client_id: str | None,
    migrate: bool,
    metrics: bool,
    clock: Clock | None,
) -> Connection:
    client_id = client_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    endpoint: Endpoint
    if address.kind == "postroom":
        endpoint = await open_remote(
            address.brokers,
            client=client_id,
            token=way.token,
            tls=way.tls,
            zone=way.zone,
            clock=clock,
        )
    else:
        broker = await open_endpoint(
            address, clock=clock, migrate=migrate, shards=shards, name=f"program {client_id}"
        )
        endpoint = measured(broker) if metrics else broker
    connection = Connection(endpoint, client_id, clock)
    connection._queue = address.shown or (f"sqlite:///{address.path}" if address.path else "")
    return connection


class Connection(Admin, Requesting):
    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str | None = None,
        clock: Clock | None = None,
        limits: Limits = DEFAULTS,
    ) -> None:
        self._limits = limits
        self.client_id: str = client_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._endpoint = endpoint
        self._queue = ""  # its address for people; "": it has none
        self._guard = Guard()
        self._heartbeat = Heartbeat(endpoint, self._guard, clock or SystemClock())
        if isinstance(endpoint, RemoteEndpoint):
            endpoint.on_ask = self._heartbeat.answer
        self._shared: dict[str, Producer] = {}  # by topic, for `send`
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []
        self._served: list[Served] = []
        self._spools: Spools | None = None
        self._sampler: Sampler | None = None  # made when metrics are first asked for
        self._closing: asyncio.Task[None] | None = None

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
        """Send a message and wait until it is stored. Concurrent sends share batches.

        The value is bytes, sent as they are, or what a handler's annotation decodes: str, a dataclass, a
        msgspec Struct, a pydantic model, a dict, a list, a number.
        A repeat of an `id` is dropped if the topic has a `dedup_window`, and only then.
        With `delay` or `at` it is delivered then: to the millisecond and never before, however far
        away; `cancel` takes it back until then.
        """
        return await self._sender(topic).send(
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
        """Send messages and wait until all are stored. If one is wrong, none is sent.

        An item is a `postroom.Message`, with a key and headers of its own, or a value as `send` takes it.

        `delay` or `at` is for those that have none of their own: they are all due at one moment.
        """
        sender = self._sender(topic)
        return await sender.send_many(messages, slot=slot, delay=delay, at=at, timeout=timeout)

    def producer(
        self,
        topic: str,
        *,
        linger: Duration = 0,
        compression: str = "lz4",
        confirm: bool = True,
        timeout: Duration = DEFAULTS.send_timeout_ms / 1000,
        batch_messages: int = DEFAULTS.batch_messages,
        batch_bytes: int | str = DEFAULTS.batch_bytes,
        buffer_bytes: int | str = DEFAULTS.buffer_bytes,
        spool: str | Path | None = None,
        spool_bytes: int | str = DEFAULTS.spool_bytes,
    ) -> Producer:
        """A producer of its own: posts without waiting, gathers, compresses. `confirm=False` is one-way.

        With `spool`, a file, messages land there first and are forwarded when the queue takes them.
        """
        self._guard.check()
        if spool is not None:
            self._spools = self._spools or Spools(self._endpoint, self._guard, self.client_id, self._limits)
            spooled = self._spools.producer(
                topic, spool, spool_bytes, timeout=timeout, buffer_bytes=buffer_bytes, confirm=confirm
            )
            self._producers = [*(p for p in self._producers if not p.closed), spooled]
            return spooled
        if compression != AUTO and compression not in COMPRESSIONS:
            raise InvalidSetting(
                f"compression={compression!r}: choose one of {', '.join(COMPRESSIONS)}, {AUTO}"
            )
        batching = Batching(
            linger_ms=duration_ms(linger, name="linger"),
            compression=compression,
            confirm=confirm,
            batch_messages=_within("batch_messages", batch_messages, DEFAULTS.max_batch_messages),
            batch_bytes=_within(
                "batch_bytes", size_bytes(batch_bytes, name="batch_bytes"), DEFAULTS.max_batch_bytes
            ),
            client=self.client_id,
            tuning=self._limits.tuning.client,
        )
        producer = Producer(
            self._endpoint,
            self._guard,
            check_topic(topic),
            self.route,
            batching,
            timeout_ms=duration_ms(timeout, name="timeout"),
            buffer_bytes=_within("buffer_bytes", size_bytes(buffer_bytes, name="buffer_bytes"), 2**62),
        )
        self._producers = [*(p for p in self._producers if not p.closed), producer]
        return producer

    def _sender(self, topic: str) -> Producer:
        """Return the shared producer of the topic, which checks who uses it."""
        found = self._shared.get(topic) if isinstance(topic, str) else None
        if found is None:
            self._guard.check()
            if len(self._shared) >= _MOST_SENDERS:
                self._shared = {name: one for name, one in self._shared.items() if not one._at_rest}
            batching = Batching(client=self.client_id, tuning=self._limits.tuning.client)
            found = Producer(self._endpoint, self._guard, check_topic(topic), self.route, batching)
            self._shared[topic] = found
        return found

    def staging(
        self, query: str, batch: int = 0, *, timeout: Duration = "1m", compare: bool = True
    ) -> Staging:
        """What a job writes, published once however often the job is run again: see `client.staging`.

        `query` is the job's name, the same whenever it is run again; `batch` counts what it writes one after
        the other. A store or broker that is away is waited for until `timeout`. A batch that comes again with
        other content is refused; without `compare`, what was decided first counts if the number is the same.
        """
        self._guard.check()
        return make_staging(
            self._endpoint, self._guard, self.route, query, batch, timeout, self.client_id, compare
        )

    # ---- receiving ----

    def consumer(
        self,
        topic: str,
        group: str,
        *,
        mode: Mode | None = None,
        order: str | None = None,
        start: Position | None = None,
        lease: Duration | None = None,
        max_attempts: int | None = None,
        exhausted: Exhausted | None = None,
        max_hold: Duration | None = None,
        expires: Duration | None = None,
        slow_lane: SlowLane | bool | None = None,
        ack: AckMode = "manual",
        window: int = DEFAULTS.window_messages,
        window_bytes: int | str = DEFAULTS.window_bytes,
        max_handling: Duration = DEFAULTS.max_handling_ms / 1000,
        member: str | None = None,
    ) -> Consumer:
        """A member of a group. Settings left out are whatever the group has; a new group takes defaults.

        In mode "ordered" each key is handled in order: the next message of a key is handed out once the one
        before is settled, and a failing one holds its key (`order="partition"`: its partition) until it
        succeeds, or is given up after `max_attempts` or `max_hold` (`exhausted="stop"`: then it waits for
        `redrive`). `poll` may return several messages of a key, in order; if one of them is retried or
        released, those behind it are taken back: settling them raises LeaseLost, and they come again.

        In mode "broadcast" every member gets every message. One that has a name (`member=`) goes on where
        it stopped, and begins where the group starts; those who share a name share the messages. One without
        begins at the end, and is forgotten when it leaves. A member that was forgotten while it was there
        (paused for too long, or deleted) gets UnknownGroup: `begins_anew` says that a new one starts over.
        """
        self._guard.check()
        settings = ConsumerSettings(
            topic=topic,
            group=check_group(group),
            member=f"{self.client_id}-{secrets.token_hex(3)}" if member is None else check_member(member),
            client=self.client_id,
            wish=group_wish(mode, order, start, lease, max_attempts, exhausted, max_hold, expires, slow_lane),
            ack=ack,
            window=Window(window, size_bytes(window_bytes, name="window_bytes")),
            max_handling_ms=duration_ms(max_handling, name="max_handling"),
            named=member is not None,
            limits=self._limits,
        )
        consumer = Consumer(self._endpoint, self._guard, self._heartbeat, settings, self._explained)
        self._consumers = [*(c for c in self._consumers if not c.closed), consumer]
        return consumer

    def _driven(self, consumer: Consumer) -> DrivenConsumer:
        """Return the same member of the group for an app to drive."""
        driven = self._consumers[self._consumers.index(consumer)] = DrivenConsumer.of(consumer)
        return driven

    async def read(
        self,
        topic: str,
        *,
        start: Position = "earliest",
        end: Position | None = None,
        partition: int | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[Received, None]:
        """Browse: no group, no ack. Up to `end` (None: what is there now), or for ever with `follow`."""
        if follow and end is not None:
            raise InvalidSetting("follow=True reads for ever: leave out end=, or follow=")
        first, last = as_start(start), None if end is None else as_start(end, name="end")
        first.check_past(self._endpoint.now_ms())
        route = await self.route(topic)
        for name, place in (("start", first), ("end", last)):
            for number, _ in () if place is None else place.offsets:
                route.readable(number)  # or says which there are
                if partition not in (None, number):
                    raise InvalidSetting(
                        f"partition={partition} reads that one alone, and {name}= names partition {number}: "
                        f"choose {name}={{{partition}: …}}"
                    )
        reading = Reading(
            self._endpoint, self._guard, route, start=first, end=last, partition=partition, follow=follow,
            limits=self._limits,
        )  # fmt: skip
        messages = reading.messages()
        try:
            async for message in messages:
                yield message
        finally:
            await messages.aclose()

    # ---- serving ----

    async def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 7070,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        zone: str = "",
        advertise: str = "",
        kafka: int | None = None,
        kafka_advertised: str = "",
    ) -> Served:
        """Host this queue for others: they connect to `.url` of what is returned, until it is closed.

        On this machine's own address anybody may come. For others to come in, there has to be a `token` (made
        up here, or one of `postroom access add`), which they give to `connect`. `port=0`: any that is free.
        `kafka=9092` listens for Kafka clients there, too; they connect to `.kafka`, or to `kafka_advertised`.
        """
        self._guard.check()
        broker = embedded(self._endpoint)
        if broker is None:
            raise UsageError("this connection is itself served by a broker: connect to the store to serve it")
        listening = Listening(host, port, zone, advertise, tls)
        beside = None if kafka is None else Listening(host, kafka, zone, kafka_advertised, tls)
        served = await Served._start(broker, listening, token, beside)
        self._served = [*(one for one in self._served if not one.closed), served]
        return served

    async def metrics(self, *, groups: bool = True) -> Metrics:
        """Return the figures of the queue, as values and as text for Prometheus: see `postroom.metrics`.

        Of an embedded queue: how far groups are behind, and, if `connect` was given `metrics=True`, what this
        process did since it connected. A queue that is served has them at its brokers: there are none here.
        Without `groups` the store is not asked.
        """
        self._guard.check()
        broker = embedded(self._endpoint)
        if broker is None:
            return Metrics(())
        self._sampler = self._sampler or Sampler(broker)
        if groups:
            await self._sampler.sample()
        figures = figures_of(self._endpoint)
        counted = () if figures is None else of_counts(figures)
        behind = of_groups(self._sampler) if groups else ()
        process = of_process(broker, None if figures is None else figures.started_at)
        return Metrics((*counted, *behind, *process))

    # ---- life ----

    @property
    def _where(self) -> str:
        """Which queue this is, to stand behind what was looked for in it."""
        return f" in {self._queue}" if self._queue else ""

    @property
    def closed(self) -> bool:
        return self._closing is not None

    async def close(self) -> None:
        """Close what was made from this connection, then the connection. Once more is harmless."""
        if self._closing is None:
            self._guard.check()
            self._closing = self._guard.loop.create_task(self._close())
        self._guard.check_loop()
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._close_requests()
            leaving = [consumer.close(handled=False) for consumer in self._consumers]
            flushing = [producer.close() for producer in [*self._producers, *self._shared.values()]]
            for outcome in await asyncio.gather(*leaving, *flushing, return_exceptions=True):
                if isinstance(outcome, Exception):
                    log.error("while the connection was closed: %r", outcome)
        finally:
            if self._spools is not None:
                await self._spools.close()
            await asyncio.gather(*(served.close() for served in self._served), return_exceptions=True)
            self._guard.closed = True
            await asyncio.to_thread(self._heartbeat.stop)
            await self._endpoint.close()

    async def __aenter__(self) -> Self:
        self._guard.check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _is_name(name: object, longest: int) -> bool:
    """Printable: people read it in listings, and not every database can keep the rest."""
    return isinstance(name, str) and 0 < len(name) <= longest and name.isprintable()


def _within(name: str, value: int, limit: int) -> int:
    if type(value) is int and 1 <= value <= limit:
        return value
    raise InvalidSetting(f"{name}={value!r}: a whole number from 1 to {limit}")
