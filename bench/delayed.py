"""Delayed messages: how late they are, how fast many come that are due at once, and what waiting ones cost.

python -m bench.delayed [lateness|burst|others|all] [--store sqlite|postgresql|mariadb] [--seconds 10]
                        [--messages 200000] [--waiting 1000000] [--json FILE]

Goals: p99 lateness under 50 ms at 1,000 a second; 50,000 a second delivered when due; a million waiting cost
the others nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import postroom
from postroom.store import SqlStore
from postroom.store.sql.session import Area

from .grounds import STORES, Ground, ground
from .measure import percentile, timed

__all__ = ["Burst", "Lateness", "Others", "burst", "lateness", "others"]

RATE = 1_000
SIZE = 100
_LONG = 3_600  # seconds until what only waits is due


@dataclass(frozen=True)
class Lateness:
    store: str
    sending: str  # "before": all of them; "meanwhile": each by itself, by the process that receives them
    per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    early: int  # came before they were due
    samples: int


@dataclass(frozen=True)
class Burst:
    store: str
    messages: int
    a_row: int  # messages scheduled together
    scheduled_per_s: float
    delivered_per_s: float  # from the due moment until the last one was acked
    first_ms: float  # until the first one came


@dataclass(frozen=True)
class Others:
    store: str
    waiting: int
    publish_ratio: float  # messages a second with them waiting, against none
    consume_ratio: float
    publish_per_s: float
    consume_per_s: float


# ---- lateness ----


async def lateness(where: Ground, seconds: float, *, before: bool = False) -> Lateness:
    """A steady 1,000 a second, each sent by itself.

    Either each is due after 0.2 to 2 seconds, and one process sends, moves and receives all of them; or all
    are sent before the first one is due, so that how late they are is the queue's doing alone.
    """
    samples: list[float] = []
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        async with postroom.connect(where.fresh(Path(folder)), migrate=True) as mq:
            await mq.create_topic("bench")
            async with mq.consumer("bench", group="bench", ack="after", window=10_000) as consumer:
                receiving = asyncio.create_task(_receive(consumer, samples, int(seconds * RATE)))
                if before:
                    took = await _send_before(mq, int(seconds * RATE))
                else:
                    start = time.perf_counter()
                    await _paced(lambda: _send_later(mq), seconds)
                    took = time.perf_counter() - start
                await asyncio.wait_for(receiving, seconds + 60)
    ms = [sample * 1000 for sample in samples]
    return Lateness(
        where.store,
        "before" if before else "meanwhile",
        len(ms) / took,
        percentile(ms, 50),
        percentile(ms, 99),
        max(ms),
        sum(sample < 0 for sample in ms),
        len(ms),
    )


async def _send_before(mq: postroom.Connection, count: int) -> float:
    """One each millisecond, from a second after all are sent on; returns how long they last."""
    first = time.time() + count / 5_000 + 1
    for at in range(0, count, 64):
        dues = [int(first * 1000 + number) / 1000 for number in range(at, min(at + 64, count))]
        await asyncio.gather(*(mq.send("bench", _body(due), at=due) for due in dues))
    if time.time() > first:
        raise RuntimeError("this machine is too slow: the first were due before the last were sent")
    return count / RATE


async def _send_later(mq: postroom.Connection) -> None:
    due = time.time() + random.uniform(0.2, 2)
    due = int(due * 1000) / 1000
    await mq.send("bench", _body(due), at=due)


def _body(due: float) -> bytes:
    return f"{due:.3f}".encode().ljust(SIZE, b".")


async def _receive(consumer: postroom.Consumer, samples: list[float], count: int) -> None:
    async for message in consumer:
        samples.append(time.time() - float(message.value.rstrip(b".")))
        if len(samples) == count:
            return


async def _paced(one: Callable[[], Awaitable[None]], seconds: float) -> None:
    start = time.perf_counter()
    tasks: set[asyncio.Future[None]] = set()
    for number in range(int(seconds * RATE)):
        ahead = start + number / RATE - time.perf_counter()
        if ahead > 0:
            await asyncio.sleep(ahead)
        task = asyncio.ensure_future(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


# ---- all at once ----


async def burst(where: Ground, messages: int, a_row: int) -> Burst:
    """They are scheduled in rows of `a_row` messages, all due at one moment, and consumed with ack."""
    value = os.urandom(SIZE // 2).hex().encode()
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        async with postroom.connect(where.fresh(Path(folder)), migrate=True) as mq:
            await mq.create_topic("bench")
            due = int(time.time()) + _LONG
            start = time.perf_counter()
            await _schedule(mq, value, messages, a_row, due)
            scheduled = messages / (time.perf_counter() - start)
            store = mq._endpoint.store  # type: ignore[attr-defined]
            soon = int(store.now_ms()) + 1_000
            await asyncio.to_thread(_bring_forward, store, soon)
            first, took = await _drain(mq, messages, soon, store.now_ms)
    return Burst(where.store, messages, a_row, scheduled, messages / took, first * 1000)


async def _schedule(mq: postroom.Connection, value: bytes, messages: int, a_row: int, due: float) -> None:
    if a_row > 1:
        for _ in range(messages // a_row):
            await mq.send_many("bench", [postroom.Message(value)] * a_row, at=due)
        return
    for at in range(0, messages, 10_000):  # a millisecond each, so that none share a row
        some = [postroom.Message(value, at=due + n / 1000) for n in range(at, min(at + 10_000, messages))]
        await mq.send_many("bench", some)


def _bring_forward(store: object, due: int) -> None:
    """Make all due at one moment; scheduling them takes longer than anybody would wait for it."""
    assert isinstance(store, SqlStore)
    with store.session.write(Area.LOG) as tx:
        tx.run("UPDATE postroom_schedule SET due_at = ?", due)


async def _drain(
    mq: postroom.Connection, messages: int, due: int, now_ms: Callable[[], int]
) -> tuple[float, float]:
    """Seconds from the due moment to the first and to the last of them."""
    first = 0.0
    async with mq.consumer("bench", group="bench", window=20_000) as consumer:
        left = messages
        while left:
            found = await consumer.poll(max_messages=5_000, wait=30)
            assert found, f"{left} did not come"
            first = first or (now_ms() - due) / 1000
            await consumer.ack(found)
            left -= len(found)
    return first, (now_ms() - due) / 1000


# ---- what they cost the others ----


async def others(where: Ground, waiting: int, seconds: float, turns: int = 3) -> Others:
    """Ordinary publish and consume, in turns on a store with so many waiting and on one with none."""
    value = os.urandom(SIZE // 2).hex().encode()
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        for name in ("full", "empty"):
            (Path(folder) / name).mkdir()
        urls = {True: where.fresh(Path(folder) / "full"), False: where.fresh(Path(folder) / "empty")}
        async with postroom.connect(urls[True], migrate=True) as mq:
            await mq.create_topic("bench")
            await _schedule(mq, value, waiting, 1, time.time() + _LONG)
        for turn in range(turns):
            for full in (True, False) if turn % 2 else (False, True):
                found[full].append(await _ordinary(urls[full], value, seconds, f"turn{turn}"))
    rates = {full: [statistics.median(column) for column in zip(*found[full], strict=True)] for full in found}
    (publish, consume), (publish_alone, consume_alone) = rates[True], rates[False]
    return Others(
        where.store, waiting, publish / publish_alone, consume / consume_alone, publish_alone, consume_alone
    )


async def _ordinary(url: str, value: bytes, seconds: float, topic: str) -> tuple[float, float]:
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic(topic, partitions=1)
        await mq.create_group(topic, "bench")

        async def publish() -> int:
            return len(await mq.send_many(topic, [postroom.Message(value)] * 100))

        sent, publishing, _ = await timed(seconds, 10_000_000, publish)
        async with mq.consumer(topic, group="bench", window=2_000) as consumer:

            async def consume() -> int:
                messages = await consumer.poll(max_messages=1_000, wait=1)
                await consumer.ack(messages)
                return len(messages)

            taken, consuming, _ = await timed(seconds * 3, sent, consume)
    return sent / publishing, taken / consuming


# ---- the program ----


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.delayed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="all", choices=["lateness", "burst", "others", "all"])
    parser.add_argument("--store", default="sqlite", choices=STORES)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--messages", type=int, default=200_000, help="due at once")
    parser.add_argument("--waiting", type=int, default=1_000_000, help="while others publish and consume")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    figures: list[dict[str, object]] = []
    with ground(args.store) as where:
        for result in _run(where, args):
            print(result, flush=True)
            figures.append(asdict(result))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def _run(where: Ground, args: argparse.Namespace) -> list[Lateness | Burst | Others]:
    found: list[Lateness | Burst | Others] = []
    if args.part in ("lateness", "all"):
        found += [asyncio.run(lateness(where, args.seconds, before=before)) for before in (True, False)]
    if args.part in ("burst", "all"):
        found += [asyncio.run(burst(where, args.messages, a_row)) for a_row in (1_000, 1)]
    if args.part in ("others", "all"):
        found.append(asyncio.run(others(where, args.waiting, args.seconds / 3)))
    return found


if __name__ == "__main__":
    main()
