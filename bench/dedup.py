"""Dedup by message id (R32): what it costs a producer, and the table of ids by itself.

python -m bench.dedup [publish|table|all] [--store sqlite|postgresql|mariadb] [--seconds 1] [--turns 12]
                      [--ids short|long] [--partitions 1] [--keyed] [--json FILE]

Goal: with a window at least 0.7 of the messages a second without one (batches of 1000, 100 bytes, ids given).
The two take turns on one store, so that a slow moment of the machine hits both; the window grows all along.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import postroom
from postroom.model.messages.ids import IdTable, digests, split

from .grounds import STORES, Ground, ground

__all__ = ["Publish", "Table", "publish", "table"]

SIZE, BATCH, AT_ONCE = 100, 1_000, 4
_IDS = {"short": "order-{:09d}", "long": "6f1c2a34-0b5e-4d7a-9c3e-{:012d}"}
_TOPICS = {"without": None, "with": "1d"}  # name → window


@dataclass(frozen=True)
class Publish:
    store: str
    ids: str  # how long they are
    partitions: int
    keyed: bool
    remembered: int  # in the window at the end
    without_per_s: float
    with_per_s: float
    ratio: float  # of messages a second: the median of the turns
    least: float  # the worst turn
    cpu_ratio: float  # of CPU seconds a message: less noisy where others use the machine


@dataclass(frozen=True)
class Table:
    ids: int
    bytes_an_id: float  # as the process grew
    new_ns: float  # to find out that an id is new
    known_ns: float  # to find one that is known
    add_ns: float
    longest_add_ms: float  # of a thousand: the table was made anew


# ---- publishing ----


async def publish(
    where: Ground, seconds: float, turns: int, ids: str, partitions: int, *, keyed: bool
) -> Publish:
    rates: dict[str, list[tuple[float, float]]] = {topic: [] for topic in _TOPICS}
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        async with postroom.connect(where.fresh(Path(folder)), migrate=True) as mq:
            for topic, window in _TOPICS.items():
                await mq.create_topic(topic, partitions=partitions, dedup_window=window)
            senders = {topic: _Sender(mq, topic, _IDS[ids], keyed) for topic in _TOPICS}
            for turn in range(turns + 1):
                for topic in reversed(_TOPICS) if turn % 2 else _TOPICS:
                    rates[topic].append(await senders[topic].run(seconds))
    without, with_window = rates["without"][1:], rates["with"][1:]  # the first turn is to warm up
    ratios = [w[0] / o[0] for w, o in zip(with_window, without, strict=True)]
    return Publish(
        where.store,
        ids,
        partitions,
        keyed,
        senders["with"].sent,
        statistics.median(rate for rate, _ in without),
        statistics.median(rate for rate, _ in with_window),
        statistics.median(ratios),
        min(ratios),
        statistics.median(cpu for _, cpu in without) / statistics.median(cpu for _, cpu in with_window),
    )


class _Sender:
    """Some calls at once, each of a batch; every id is sent once."""

    def __init__(self, mq: postroom.Connection, topic: str, pattern: str, keyed: bool) -> None:
        self._mq, self._topic, self._id, self._keyed = mq, topic, pattern.format, keyed
        self._value = os.urandom(SIZE // 2).hex().encode()
        self.sent = 0

    async def run(self, seconds: float) -> tuple[float, float]:
        """Messages a second, and CPU seconds a message."""
        before = self.sent
        cpu, start = time.process_time(), time.perf_counter()
        await asyncio.gather(*(self._send(start + seconds) for _ in range(AT_ONCE)))
        count = self.sent - before
        return count / (time.perf_counter() - start), (time.process_time() - cpu) / count

    async def _send(self, until: float) -> None:
        while time.perf_counter() < until:
            first, self.sent = self.sent, self.sent + BATCH
            await self._mq.send_many(
                self._topic, [self._message(number) for number in range(first, first + BATCH)]
            )

    def _message(self, number: int) -> postroom.Message:
        key = f"{number % 251}" if self._keyed else None
        return postroom.Message(self._value, key=key, id=self._id(number))


# ---- the table ----


def table(count: int, ids: str) -> Table:
    """Filled by thousands, as appends do; then asked."""
    pattern = _IDS[ids].format

    def batch(first: int) -> bytes:
        return digests([pattern(number) for number in range(first, first + BATCH)])

    gc.collect()
    before, known, adding = _resident(), IdTable(), list[float]()
    for first in range(0, count, BATCH):
        joined = batch(first)
        adding.append(_timed(partial(known.add, joined, split(joined))))
    gc.collect()
    grown = _resident() - before
    new = [_asked(known, batch(count + n * BATCH), 0) for n in range(200)]
    old = [_asked(known, batch(n * BATCH % count), BATCH) for n in range(0, 200 * 37, 37)]
    per_id = 1e9 / BATCH
    return Table(
        count,
        grown / count,
        statistics.median(new) * per_id,
        statistics.median(old) * per_id,
        statistics.median(adding) * per_id,
        max(adding) * 1000,
    )


def _asked(known: IdTable, joined: bytes, expected: int) -> float:
    cut = split(joined)

    def ask() -> None:
        assert len(known.known(cut)) == expected

    return _timed(ask)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- the command ----


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="all", choices=("publish", "table", "all"))
    parser.add_argument("--store", default="sqlite", choices=STORES)
    parser.add_argument("--seconds", type=float, default=1, help="of a turn")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--ids", default="long", choices=tuple(_IDS))
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--keyed", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    results: list[Publish | Table] = []
    if asked.what != "publish":
        results += [table(count, asked.ids) for count in (100_000, 1_000_000, 6_000_000)]
    if asked.what != "table":
        with ground(asked.store) as where:
            shape = (asked.seconds, asked.turns, asked.ids, asked.partitions)
            results.append(asyncio.run(publish(where, *shape, keyed=asked.keyed)))
    for result in results:
        print(type(result).__name__.lower(), json.dumps(asdict(result), default=str))
    if asked.json:
        asked.json.write_text(json.dumps([asdict(result) for result in results], indent=2))


if __name__ == "__main__":
    main()
