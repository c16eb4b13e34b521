"""What idle members cost: transactions a second, CPU, and what one message costs that comes after all.

One broker in this process; its members poll and beat as the SDK does, and nothing is sent. Then one message
is sent. Transactions are counted where the store begins them; watching for other processes is counted too.

python -m bench.idle [--store sqlite|postgresql] [--members 5000] [--groups 1] [--seconds 12]
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from postroom.address import parse
from postroom.broker.broker import Broker, open_endpoint
from postroom.broker.deliver.shared import Deliveries
from postroom.endpoint.values import Beat, PollReply, PollRequest
from postroom.model.messages.batch import BatchBuilder
from postroom.model.policy.settings import GroupWish, TopicSettings
from postroom.store.sql.session import Session

from .grounds import Ground, ground

__all__ = ["Idle", "run"]

_WAIT_MS = 15_000  # as the SDK asks for with a lease of 30 s
_BEAT_S = 10.0
_SETTLE_S = 3.0  # until every member polls


@dataclass(frozen=True)
class Idle:
    store: str
    groups: int
    members: int
    transactions_per_s: float
    looks_per_s: float
    cpu_percent: float
    received_ms: float  # one message: from the call to the reply of a poll
    looks: int  # that it cost


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts transactions, reading and writing, and looks of polls of shared groups."""
    counts: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return count

    with (
        patch.object(Session, "read", counted("reads", Session.read)),
        patch.object(Session, "write", counted("writes", Session.write)),
        patch.object(Deliveries, "poll", counted("looks", Deliveries.poll)),
    ):
        yield counts


class _Crew:
    def __init__(self, broker: Broker, groups: int, members: int) -> None:
        self._broker = broker
        self._who = [(f"g{number % groups}", f"m{number}") for number in range(members)]
        self._tasks: list[asyncio.Task[None]] = []
        self.received: asyncio.Queue[PollReply] = asyncio.Queue()

    async def start(self) -> None:
        for group, member in {group: (group, member) for group, member in self._who}.values():
            await self._broker.subscribe("idle", group, GroupWish(), member, "bench")
        await asyncio.to_thread(self._beats, self._who)  # which enter the others
        self._tasks = [asyncio.create_task(self._poll(group, member)) for group, member in self._who]
        self._tasks.append(asyncio.create_task(self._beat()))

    async def _poll(self, group: str, member: str) -> None:
        await asyncio.sleep(secrets.randbelow(1000) / 1000 * _SETTLE_S / 2)
        wait_ms = secrets.randbelow(_WAIT_MS) + 1000  # members do not all come at once
        while True:
            token = secrets.randbits(62) + 1
            request = PollRequest("idle", group, member, token, 1000, 1 << 20, wait_ms, True)
            reply = await self._broker.poll(request)
            wait_ms = _WAIT_MS
            if reply.grants:
                self.received.put_nowait(reply)

    async def _beat(self) -> None:
        """As a server does: each member's beat in a worker thread, all of them within `_BEAT_S`."""
        start, number = time.perf_counter(), 0
        while True:
            due = int((time.perf_counter() - start) / _BEAT_S * len(self._who))
            some = [self._who[i % len(self._who)] for i in range(number, due)]
            number = due
            await asyncio.to_thread(self._beats, some)
            await asyncio.sleep(0.01)

    def _beats(self, some: list[tuple[str, str]]) -> None:
        for group, member in some:
            self._broker.beat([Beat("idle", group, member, "bench", ())])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def run(where: Ground, *, groups: int, members: int, seconds: float) -> Idle:
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder, counting() as counts:
        broker = await open_endpoint(parse(where.fresh(Path(folder))), migrate=True)
        crew = _Crew(broker, groups, members)
        try:
            await broker.create_topic("idle", TopicSettings(), 4, False)
            await crew.start()
            await asyncio.sleep(_SETTLE_S)
            before, cpu, start = counts.copy(), time.process_time(), time.perf_counter()
            await asyncio.sleep(seconds)
            spent, cpu = time.perf_counter() - start, time.process_time() - cpu
            each_s = {name: (counts[name] - before[name]) / spent for name in ("reads", "writes", "looks")}
            received_ms, cost = await _one_message(broker, crew, groups, counts)
        finally:
            await crew.stop()
            await broker.close()
    transactions, percent = each_s["reads"] + each_s["writes"], 100 * cpu / spent
    return Idle(where.store, groups, members, transactions, each_s["looks"], percent, received_ms, cost)


async def _one_message(broker: Broker, crew: _Crew, groups: int, counts: Counter[str]) -> tuple[float, int]:
    builder = BatchBuilder()
    builder.extend(1, [(None, b"at last", [])])
    place = (await broker.route("idle")).ranges[0].partition_id
    before, start = counts["looks"], time.perf_counter()
    await broker.append("idle", place, builder.build())
    for _ in range(groups):
        await crew.received.get()
    received_ms = (time.perf_counter() - start) * 1000
    await asyncio.sleep(1.0)
    return received_ms, counts["looks"] - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", default="sqlite", choices=["sqlite", "postgresql", "mariadb"])
    parser.add_argument("--members", type=int, default=5000)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=12.0)
    args = parser.parse_args()
    with ground(args.store) as where:
        print(
            asyncio.run(partial(run, where)(groups=args.groups, members=args.members, seconds=args.seconds))
        )


if __name__ == "__main__":
    main()
