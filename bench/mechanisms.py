"""What mechanisms buy that one could do without: each is measured with and without it, in turn, in one run.

    python -m bench.mechanisms [NAME …] [--seconds 2]

drawing     rows of an outbox in the queue's own database leave in the transaction that stores the message
at_once     short verbs on SQLite run in the event loop, not in a thread
lanes       what a poll still computes for slow lanes of groups that have none
beats       heartbeats go through the event loop while it turns, else through a socket of their own
http        a poll over HTTP asks the broker itself, and opens no consumer for it
skew        moments are moved by how far the clocks of two shards are apart

The table of CONTRIBUTING.md has the figures, and what was decided. An ack in the user's transaction is
measured by `python -m bench.guards`.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import tempfile
import time
import timeit
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import postroom
from postroom.address import parse
from postroom.broker.broker import Broker, open_endpoint
from postroom.client.connection import Connection
from postroom.client.consumer.slow_lane import first_room
from postroom.client.forward.outbox_source import DrawingEndpoint
from postroom.config import DEFAULTS
from postroom.endpoint.requests import Beats
from postroom.endpoint.values import Beat, PollRequest, Settle, Verdict
from postroom.model.policy.settings import GroupWish
from postroom.model.topology.names import slow_topic
from postroom.store.sharded.shard import Skew
from postroom.wire.client.remote import RemoteEndpoint

from .grounds import ground
from .outbox import relayed

__all__ = ["Bought", "measure"]

_ROUNDS = 5
_VALUE = b"x" * 100
_BEATS = Beats((Beat("bench", "g", "m", "bench", ()),))


@dataclass(frozen=True)
class Bought:
    what: str
    unit: str
    those_with: float  # medians of the rounds
    without: float

    def __str__(self) -> str:
        ratio = self.those_with / self.without if self.without else 0.0
        figures = f"{self.those_with:>12,.1f} {self.without:>12,.1f} {ratio:>8.2f}"
        return f"{self.what:<58} {figures}  {self.unit}"


async def _in_turn(
    what: str, unit: str, have: Callable[[], Awaitable[float]], lack: Callable[[], Awaitable[float]]
) -> Bought:
    """Medians of rounds that take turns: what else the machine does meets both."""
    pairs = [(await have(), await lack()) for _ in range(_ROUNDS)]
    return Bought(what, unit, *(statistics.median(side) for side in zip(*pairs, strict=True)))


@asynccontextmanager
async def _queue(url: str, *, at_once: bool = True) -> AsyncIterator[Connection]:
    broker = await open_endpoint(parse(url))
    if not at_once:
        broker._workers._at_once = None
    async with Connection(broker, "bench") as mq:
        await mq.create_topic("bench", partitions=1)
        yield mq


def _file(folder: str) -> str:
    return f"sqlite:///{Path(folder) / secrets.token_hex(4)}.db"


# ---- an outbox ----


async def drawing(seconds: float) -> AsyncIterator[Bought]:
    messages = int(10_000 * seconds)
    for store in ("sqlite", "postgresql"):
        with ground(store) as where:

            async def drawn(where=where) -> float:  # type: ignore[no-untyped-def]
                return (await relayed(where, messages, same=True)).per_s

            async def stamped(where=where) -> float:  # type: ignore[no-untyped-def]
                with patch.object(DrawingEndpoint, "over", staticmethod(lambda *parts: None)):
                    return (await relayed(where, messages, same=True)).per_s

            yield await _in_turn(f"drawing: a relay on {store}", "messages/s", drawn, stamped)


# ---- polls ----


async def _one_by_one(url: str, seconds: float, *, quick: bool) -> float:
    """CPU of a message that is polled and acked by itself, in microseconds."""
    async with _queue(url, at_once=quick) as mq:
        await mq.send_many("bench", [postroom.Message(_VALUE)] * int(20_000 * seconds))
        async with mq.consumer("bench", "g", window=1) as consumer:
            done, began, cpu = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - began < seconds:
                await consumer.ack(await consumer.poll(1))
                done += 1
            return (time.process_time() - cpu) / done * 1e6


async def at_once(seconds: float) -> AsyncIterator[Bought]:
    with tempfile.TemporaryDirectory() as folder:
        for name, url in (("in memory", lambda: "memory://"), ("on a file", lambda: _file(folder))):
            yield await _in_turn(
                f"at_once: poll and ack one by one {name}",
                "µs of CPU each",
                lambda url=url: _one_by_one(url(), seconds, quick=True),  # type: ignore[misc]
                lambda url=url: _one_by_one(url(), seconds, quick=False),  # type: ignore[misc]
            )


async def lanes(seconds: float) -> AsyncIterator[Bought]:
    """The poll beside what it computes for a lane that is not there."""
    computed = min(timeit.repeat(lambda: (slow_topic("bench", "g"), first_room(1)), number=10_000, repeat=5))
    with tempfile.TemporaryDirectory() as folder:
        whole = await _one_by_one(_file(folder), seconds, quick=True)
    yield Bought(
        "lanes: computed for none, beside a poll and ack", "µs of CPU", computed / 10_000 * 1e6, whole
    )


# ---- served ----


async def beats(seconds: float) -> AsyncIterator[Bought]:
    """A heartbeat, and the connections that a broker has of ten clients."""
    async with postroom.connect("memory://") as mq:
        await mq.create_topic("bench", partitions=1)
        await mq.create_group("bench", "g")
        served = await mq.serve("127.0.0.1", 0)
        clients = [await postroom.connect(served.url) for _ in range(10)]
        server = served._server
        few = len(server.connections)
        for client in clients:
            assert isinstance(client._endpoint, RemoteEndpoint)
            await asyncio.to_thread(client._endpoint._beater._beat_alone, _BEATS)
        yield Bought("beats: connections of ten clients", "sockets", few, len(server.connections))
        endpoint = clients[0]._endpoint
        assert isinstance(endpoint, RemoteEndpoint)
        beater, times = endpoint._beater, int(200 * seconds)

        def each(beat: Callable[[Beats], object]) -> float:
            began = time.perf_counter()
            for _ in range(times):
                beat(_BEATS)
            return (time.perf_counter() - began) / times * 1e6

        yield await _in_turn(
            "beats: through the loop, and always by a socket of its own",
            "µs each",
            lambda: asyncio.to_thread(each, beater.beat),
            lambda: asyncio.to_thread(each, beater._beat_alone),
        )
        for client in clients:
            await client.close()


async def http(seconds: float) -> AsyncIterator[Bought]:
    """Ten messages, taken and acked: as HTTP asks for them, and by a consumer for each request."""
    with tempfile.TemporaryDirectory() as folder:
        async with _queue(_file(folder)) as mq:
            await mq.send_many("bench", [postroom.Message(_VALUE)] * int(100_000 * seconds))
            broker = mq._endpoint
            assert isinstance(broker, Broker)

            async def asked() -> None:
                await broker.subscribe("bench", "g", GroupWish(mode="shared"), "web", "bench")
                token = secrets.randbits(62) | 1
                reply = await broker.poll(
                    PollRequest("bench", "g", "web", token, 10, 1 << 22, 0, empty_handed=True)
                )
                for grant in reply.grants:
                    verdicts = tuple(Verdict("ack", lease.first, lease.last) for lease in grant.leases)
                    part = Settle(grant.topic, grant.partition_id, token, verdicts)
                    await broker.settle("bench", "g", [part])

            async def opened() -> None:
                async with mq.consumer("bench", "g", window=10) as consumer:
                    await consumer.ack(await consumer.poll(10))

            async def per_s(request: Callable[[], Awaitable[None]]) -> float:
                done, began = 0, time.perf_counter()
                while time.perf_counter() - began < seconds / 2:
                    await request()
                    done += 1
                return done / (time.perf_counter() - began)

            yield await _in_turn(
                "http: a poll and its acks", "requests/s", lambda: per_s(asked), lambda: per_s(opened)
            )


async def skew(seconds: float) -> AsyncIterator[Bought]:
    """What it costs where clocks agree, and how late a message is where they do not."""
    now = time.time_ns() // 1_000_000
    took = (
        min(
            timeit.repeat(
                lambda: bool(Skew(now, now, DEFAULTS.tuning.store.skew_ms)), number=10_000, repeat=5
            )
        )
        / 10_000
        * 1e6
    )
    yield Bought("skew: asked for each verb, clocks agree", "µs", took, 0.0)
    due, ahead = now + 5_000, -60_000  # the shard is a minute behind
    late = [
        there - ahead - due
        for there in (Skew(now + ahead, now, DEFAULTS.tuning.store.skew_ms).there(due), due)
    ]
    yield Bought("skew: a message is late, the shard a minute behind", "ms", *late)


MEASURED: dict[str, Callable[[float], AsyncIterator[Bought]]] = {
    "drawing": drawing, "at_once": at_once, "lanes": lanes, "beats": beats, "http": http,
    "skew": skew,
}  # fmt: skip


async def measure(names: list[str], seconds: float) -> list[Bought]:
    found = []
    print(f"{'':<58} {'with':>12} {'without':>12} {'ratio':>8}")
    for name in names or list(MEASURED):
        async for one in MEASURED[name](seconds):
            print(one, flush=True)
            found.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.mechanisms", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*MEASURED, []], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    asyncio.run(measure(args.names, args.seconds))


if __name__ == "__main__":
    main()
