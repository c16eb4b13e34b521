"""What a quiet producer and its consumer feel of others that are busy, in the same broker (R41).

The quiet one sends 100 messages a second to a topic of its own, one at a time, and one consumer receives
them: alone, beside a producer that floods another topic, beside one that floods the same topic, and beside a
group of many members that works through a large backlog. Everybody is in this process and shares its
interpreter, so that what the flood costs in Python counts against the broker too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from postroom.address import parse
from postroom.broker.broker import Broker, open_endpoint
from postroom.endpoint.values import PollReply, PollRequest, Settle, Verdict
from postroom.errors import PostroomError
from postroom.model.messages.batch import BatchBuilder
from postroom.model.policy.settings import GroupWish, TopicSettings
from postroom.store.contract import Append, Appended

from .grounds import Ground
from .measure import percentile

__all__ = ["FACTOR", "Felt", "run"]

FACTOR = 5  # the goal: p99 beside others is at most so many times p99 alone, and two commits on top
RATE = 100
_FLOODS = 96  # batches of a flood in flight
_BACKLOG = 200_000
_MEMBERS = 50
_STAMP = struct.Struct(">q")


@dataclass(frozen=True)
class Felt:
    """Milliseconds of the quiet one: until its messages were stored, and until they were received."""

    store: str
    beside: str
    stored_p50: float
    stored_p99: float
    received_p50: float
    received_p99: float
    others_per_s: float  # messages of the others meanwhile
    commit_p99: float  # one commit, of whomever

    def allowed_p99(self, alone: Felt) -> float:
        """Of being stored: the commit that is under way and its own may be large ones."""
        return FACTOR * alone.stored_p99 + 2 * self.commit_p99


class _Quiet:
    def __init__(self, broker: Broker, place: int) -> None:
        self._broker, self._place = broker, place
        self.stored: list[float] = []
        self.received: list[float] = []

    async def send(self, seconds: float) -> None:
        """One at a time: one that takes long holds up the next."""
        start, producer = time.perf_counter(), secrets.randbits(62)
        for number in itertools.count():
            at = max(time.perf_counter(), start + number / RATE)
            if at - start > seconds:
                break
            await asyncio.sleep(at - time.perf_counter())
            builder, before = BatchBuilder(), time.perf_counter_ns()
            builder.extend(1, [(None, _STAMP.pack(before), [])])
            await self._broker.append("quiet", self._place, builder.build(producer, 0, number))
            self.stored.append((time.perf_counter_ns() - before) / 1e6)

    async def receive(self) -> None:
        await self._broker.subscribe("quiet", "own", GroupWish(), "reader", "bench")
        while True:
            reply, token = await _poll(self._broker, "quiet", "own", "reader", 100)
            now = time.perf_counter_ns()
            for grant in reply.grants:
                for batch in grant.batches:
                    if batch.records == 1:  # else it is the flood's
                        self.received.append((now - _STAMP.unpack(batch.data[-9:-1])[0]) / 1e6)
            await _ack(self._broker, "quiet", "own", reply, token)


async def _poll(broker: Broker, topic: str, group: str, member: str, messages: int) -> tuple[PollReply, int]:
    token = secrets.randbits(62) + 1
    request = PollRequest(topic, group, member, token, messages, 1 << 24, 15_000, True)
    return await broker.poll(request), token


async def _ack(broker: Broker, topic: str, group: str, reply: PollReply, token: int) -> None:
    parts = [
        Settle(g.topic, g.partition_id, token, tuple(Verdict("ack", one.first, one.last) for one in g.leases))
        for g in reply.grants
    ]
    if parts:
        await broker.settle(topic, group, parts)


class _Others:
    """What is busy beside the quiet one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.messages = 0
        self._values = [os.urandom(500).hex().encode() for _ in range(1000)]

    def _batch(self) -> bytes:
        """Without a sequence: it is built once, and sent again and again."""
        builder = BatchBuilder()
        builder.extend(1, [(None, value, []) for value in self._values])
        return builder.build()

    async def flood(self, topic: str) -> None:
        """Many large batches in flight, and a next one as soon as one is stored."""
        place, batch = (await self._broker.route(topic)).ranges[0].partition_id, self._batch()

        async def send() -> None:
            while True:
                await self._broker.append(topic, place, batch)
                self.messages += len(self._values)

        await asyncio.gather(*(send() for _ in range(_FLOODS)))

    async def fill(self, topic: str) -> None:
        place, batch = (await self._broker.route(topic)).ranges[0].partition_id, self._batch()
        for _ in range(_BACKLOG // len(self._values)):
            await self._broker.append(topic, place, batch)

    async def drain(self, topic: str) -> None:
        async def member(name: str) -> None:
            while True:
                reply, token = await _poll(self._broker, topic, "busy", name, 10)  # so that it lasts
                self.messages += sum(
                    one.last - one.first + 1 for grant in reply.grants for one in grant.leases
                )
                await _ack(self._broker, topic, "busy", reply, token)

        await self._broker.subscribe(topic, "busy", GroupWish(), "m0", "bench")
        await asyncio.gather(*(member(f"m{number}") for number in range(_MEMBERS)))


@asynccontextmanager
async def _running(*works: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # it failed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _nobody() -> None:
    pass


Busy = Callable[[_Others], Awaitable[None]]

SCENES: tuple[tuple[str, Busy], ...] = (
    ("nobody", lambda others: _nobody()),
    ("a flood of another topic", lambda others: others.flood("busy")),
    ("a flood of the same topic", lambda others: others.flood("quiet")),
    ("a group with a backlog", lambda others: others.drain("busy")),
)


async def run(where: Ground, seconds: float) -> list[Felt]:
    return [await _scene(where, beside, busy, seconds) for beside, busy in SCENES]


async def _scene(where: Ground, beside: str, busy: Busy, seconds: float) -> Felt:
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        broker = await open_endpoint(parse(where.fresh(Path(folder))), migrate=True)
        try:
            for topic in ("quiet", "busy"):
                await broker.create_topic(topic, TopicSettings(), 1, False)
            others = _Others(broker)
            if "backlog" in beside:
                await others.fill("busy")
            quiet = _Quiet(broker, (await broker.route("quiet")).ranges[0].partition_id)
            async with _running(quiet.receive(), busy(others)):
                await asyncio.sleep(0.5)
                others.messages, start = 0, time.perf_counter()
                with _commits(broker) as commits:
                    await quiet.send(seconds)
                spent = time.perf_counter() - start
                await asyncio.sleep(0.2)
        finally:
            await broker.close()
    return _felt(where.store, beside, quiet, others.messages / spent, commits)


@contextmanager
def _commits(broker: Broker) -> Iterator[list[float]]:
    """How long each of its commits took, in milliseconds."""
    taken: list[float] = []
    append = broker.store.log.append

    def timed(appends: Sequence[Append]) -> list[Appended | PostroomError]:
        before = time.perf_counter()
        try:
            return append(appends)
        finally:
            taken.append((time.perf_counter() - before) * 1000)

    with patch.object(broker.store.log, "append", timed):
        yield taken


def _felt(store: str, beside: str, quiet: _Quiet, others_per_s: float, commits: list[float]) -> Felt:
    received = quiet.received if "same" not in beside and quiet.received else [float("nan")]
    return Felt(
        store, beside,
        percentile(quiet.stored, 50), percentile(quiet.stored, 99),
        percentile(received, 50), percentile(received, 99),
        others_per_s, percentile(commits, 99),
    )  # fmt: skip
