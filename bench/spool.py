"""The spool: how fast messages land in its file, and how fast they are forwarded from there.

python -m bench.spool [--messages 100000] [--seconds 1] [--json FILE]

Every message is flushed before it counts. The same sends without a spool are measured beside it, in turn, in
the same process and into the same queue, a SQLite file. Goal: well over 20,000 messages a second forwarded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import postroom

__all__ = ["Forwarding", "Landing", "forwarding", "landing", "main", "show"]

SIZE = 100
KEYS = 1000
SENDERS = (1, 64, 1000)  # at once
_NOBODY = "postroom://127.0.0.1:1"


@dataclass(frozen=True)
class Landing:
    senders: int
    spooled_per_s: float  # into the file, confirmed, while the queue is away
    plain_per_s: float  # into the queue, without a spool

    @property
    def ratio(self) -> float:
        return self.spooled_per_s / self.plain_per_s


@dataclass(frozen=True)
class Forwarding:
    messages: int
    partitions: int
    forwarded_per_s: float  # from a file that was full before, into a queue in the same process
    beside_per_s: float  # landed and forwarded at once: posted into the spool until the queue has all


Send = Callable[[bytes], Awaitable[object]]


async def _rate(send: Send, senders: int, seconds: float) -> float:
    """Confirmed sends a second, of so many who each wait for one before the next."""
    end, done = time.perf_counter() + seconds, 0

    async def work(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await send(b"%d" % (number % KEYS))
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*(work(number) for number in range(senders)))
    return done / (time.perf_counter() - start)


async def landing(senders: int, seconds: float, turns: int = 3) -> Landing:
    value = b"x" * SIZE
    spooled, plain = 0.0, 0.0
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        async with (
            postroom.connect(f"sqlite:///{folder}/queue.db") as mq,
            postroom.Spool(f"{folder}/orders.spool", _NOBODY) as spool,
        ):
            await mq.create_topic("orders")
            for _ in range(turns):
                spooled += await _rate(
                    lambda key: spool.send("orders", value, key=key), senders, seconds / turns
                )
                plain += await _rate(lambda key: mq.send("orders", value, key=key), senders, seconds / turns)
    return Landing(senders, spooled / turns, plain / turns)


async def forwarding(messages: int, partitions: int = 4) -> Forwarding:
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        path, some = f"{folder}/orders.spool", 1000
        async with postroom.Spool(path, _NOBODY) as spool:
            for first in range(0, messages, some):
                await spool.send_many("orders", _messages(first, min(some, messages - first)))
        async with postroom.connect(f"sqlite:///{folder}/queue.db") as mq:
            await mq.create_topic("orders", partitions=partitions)
            start = time.perf_counter()
            async with mq.producer("orders", spool=path) as producer:
                await producer.forwarded()
                forwarded_s = time.perf_counter() - start
                start = time.perf_counter()
                for number in range(messages):
                    await producer.post(b"x" * SIZE, key=b"%d" % (number % KEYS))
                await producer.forwarded()
                beside_s = time.perf_counter() - start
            assert (await mq.topic("orders")).messages == 2 * messages, "each once"
    return Forwarding(messages, partitions, messages / forwarded_s, messages / beside_s)


def _messages(first: int, count: int) -> list[postroom.Message]:
    return [postroom.Message(b"x" * SIZE, key=b"%d" % (n % KEYS)) for n in range(first, first + count)]


def show(messages: int, seconds: float) -> dict[str, object]:
    """Measure, and print tables; the figures."""
    console = Console(width=150)
    landed = [asyncio.run(landing(senders, seconds)) for senders in SENDERS]
    table = Table("senders at once", title="Sends into a spool, each waiting for its commit")
    for name in ("spooled msg/s", "without a spool", "ratio"):
        table.add_column(name, justify="right")
    for one in landed:
        table.add_row(
            str(one.senders), f"{one.spooled_per_s:,.0f}", f"{one.plain_per_s:,.0f}", f"{one.ratio:.2f}"
        )
    console.print(table)
    moved = [asyncio.run(forwarding(messages, partitions)) for partitions in (1, 4)]
    table = Table("partitions", "messages", title="Forwarded from a spool into a queue on SQLite")
    for name in ("forwarded msg/s", "posted and forwarded msg/s"):
        table.add_column(name, justify="right")
    for other in moved:
        table.add_row(
            str(other.partitions),
            f"{other.messages:,}",
            f"{other.forwarded_per_s:,.0f}",
            f"{other.beside_per_s:,.0f}",
        )
    console.print(table)
    return {"landing": [asdict(one) for one in landed], "forwarding": [asdict(one) for one in moved]}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.spool", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    figures = show(args.messages, args.seconds)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
