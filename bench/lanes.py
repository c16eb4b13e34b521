"""What the good sources of a group feel of a bad one, with a slow lane and without (R42).

A hundred sources send to one topic, and an app with eight handlers takes them: 5 ms for a message. One source
is bad: it sends twenty messages a second, and each takes a second and fails. Measured is the time from the
send of a good message to the end of its handling: without the bad source, with it and a slow lane once the
source was noticed, and with it and no lane. The goal: the second p99 is at most twice the first.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import postroom
from postroom import Backoff, Connection, Received, SlowLane

from .measure import percentile

__all__ = ["FACTOR", "Felt", "run", "show"]

FACTOR = 2
SOURCES = 100
GOOD_PER_S, BAD_PER_S = 200, 20
_GOOD_S, _BAD_S = 0.005, 1.0
_HANDLERS = 8
_NOTICE_S = 60.0  # longest wait until the source is slow
_LAST_S = 0.5  # longest wait for those that were sent last
_POLICY = SlowLane(failures=0.5, at_least=5)


@dataclass(frozen=True)
class Felt:
    """Milliseconds from the send of a good message to the end of its handling."""

    beside: str
    p50_ms: float
    p99_ms: float
    handled: int  # good ones, of those that were sent meanwhile
    sent: int
    noticed_s: float = 0.0  # after so long the bad source was slow


class _Run:
    def __init__(self, mq: Connection) -> None:
        self.mq = mq
        self.felt: dict[int, float] = {}  # by number
        self.sent: list[int] = []
        self._sent_at: dict[int, float] = {}
        self._numbers = itertools.count()

    async def send(self, per_s: int, *, bad: bool) -> None:
        start = time.perf_counter()
        async with self.mq.producer("orders") as producer:
            for count in itertools.count():
                await asyncio.sleep(max(0.0, start + count / per_s - time.perf_counter()))
                number = next(self._numbers)
                source = "bad" if bad else f"good-{number % (SOURCES - 1)}"
                if not bad:
                    self.sent.append(number)
                    self._sent_at[number] = time.perf_counter()
                await producer.post(b"%d" % number, source=source)

    async def handle(self, message: Received) -> None:
        if message.source == "bad":
            await asyncio.sleep(_BAD_S)
            raise postroom.Dead("bad")
        await asyncio.sleep(_GOOD_S)
        number = int(message.value)
        self.felt[number] = (time.perf_counter() - self._sent_at[number]) * 1000

    async def measured(self, beside: str, seconds: float, noticed_s: float) -> Felt:
        first = len(self.sent)
        await asyncio.sleep(seconds)
        sent = self.sent[first:]
        await self._wait_for(sent)
        now = time.perf_counter()
        found = [self.felt.get(n, (now - self._sent_at[n]) * 1000) for n in sent]
        handled = sum(n in self.felt for n in sent)
        return Felt(beside, percentile(found, 50), percentile(found, 99), handled, len(sent), noticed_s)

    async def _wait_for(self, sent: list[int]) -> None:
        last = time.perf_counter() + _LAST_S
        while time.perf_counter() < last and not all(n in self.felt for n in sent):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _running(lane: bool, *, bad: bool) -> AsyncIterator[_Run]:
    with tempfile.TemporaryDirectory() as folder:
        async with postroom.connect(f"sqlite:///{Path(folder)}/q.db") as mq:
            await mq.create_topic("orders", partitions=1)
            run, app = _Run(mq), postroom.App(mq)
            policy = _POLICY if lane else None
            once_a_minute = Backoff(60, 1, 60)
            subscribe = app.subscribe(
                "orders", group="billing", concurrency=_HANDLERS, retry=once_a_minute, slow_lane=policy
            )
            subscribe(run.handle)
            async with app:
                sending = [asyncio.create_task(run.send(GOOD_PER_S, bad=False))]
                if bad:
                    sending.append(asyncio.create_task(run.send(BAD_PER_S, bad=True)))
                try:
                    yield run
                finally:
                    for one in sending:
                        one.cancel()
                    await asyncio.gather(*sending, return_exceptions=True)
                    await app.stop(grace=0)


async def run(seconds: float = 4.0) -> list[Felt]:
    found = []
    for beside, lane, bad in (
        ("without the bad source", True, False),
        ("a bad source, slow lane", True, True),
        ("a bad source, no lane", False, True),
    ):
        async with _running(lane, bad=bad) as one:
            noticed_s = await _noticed(one.mq) if lane and bad else 0.0
            await asyncio.sleep(1.5 * _BAD_S if bad else 0.5)  # what was begun before ends
            found.append(await one.measured(beside, seconds, noticed_s))
    return found


def show(seconds: float, console: Console) -> list[Felt]:
    """Runs it and prints the table."""
    found = asyncio.run(run(seconds))
    title = f"{SOURCES} sources, {_HANDLERS} handlers: send to end of handling of the good ones"
    table = Table("beside", title=title)
    for name in ("p50 ms", "p99 ms", "ratio", f"allowed: {FACTOR}", "handled", "noticed after s"):
        table.add_column(name, justify="right")
    for one in found:
        ratio = one.p99_ms / found[0].p99_ms
        good = "met" if ratio <= FACTOR else "missed"
        times = (f"{one.p50_ms:.1f}", f"{one.p99_ms:.1f}", f"{ratio:.1f}", good)
        table.add_row(one.beside, *times, f"{one.handled} of {one.sent}", f"{one.noticed_s:.1f}")
    console.print(table)
    return found


async def _noticed(mq: Connection) -> float:
    began = time.perf_counter()
    async with asyncio.timeout(_NOTICE_S):
        while not (await mq.lanes("orders", "billing")).sources:  # noqa: ASYNC110 — the store is asked
            await asyncio.sleep(0.05)
    return time.perf_counter() - began
