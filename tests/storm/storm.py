"""A storm: everybody is at work on one queue while the plan's faults strike; then it heals, and is judged.

Two brokers behind proxies; producers with keys, in lists and one by one, with delays and without a key;
shared, ordered and broadcast groups; somebody who splits, merges and moves partitions between two shards.
Those of the topic `plain` are embedded, as is who changes the route; the others are clients of the brokers.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import postroom
from tests.chaos.crew import Crew
from tests.chaos.missed import missed
from tests.chaos.stage import drained, until
from tests.servers import Proxy
from tests.servers.places import free_port

from .plan import PROCESSES, SURROUNDINGS, Fault, plan
from .report import Report
from .stores import Files, OnServer, made
from .strikes import Strikes
from .tally import Flow, Tally
from .verdicts import judged

__all__ = ["Storm"]

TOPICS: Mapping[str, dict[str, bool]] = {
    "orders": {"billing": False, "ledger": True},
    "plain": {"billing": False},
    "later": {"billing": False},
}
"""By topic, its groups, and whether they are ordered."""
LEASE_S = 12.0
_MEMBER = "ann"
_STUCK_S = 300.0  # if work has not gone on so long after it healed, it does not: machines are slow at times
_DRAIN_S = 600.0
_CALM_S = (0.2, 3.0)
_EVERY_S = 5.0  # a line about how it goes

FLOWS = [
    *(Flow(topic, "", "confirmed") for topic in TOPICS),
    *(Flow(topic, group, "settled") for topic, groups in TOPICS.items() for group in groups),
]


class Storm:
    """`pause_s`: the longest between two sends of a producer."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        seed: int,
        seconds: float,
        pause_s: float = 0.5,
        say: Callable[[str], None] = print,
    ) -> None:
        self._kind, self._folder, self._seed, self._seconds = kind, folder, seed, seconds
        self._pause_s, self._say = pause_s, say
        self._tally = Tally(folder)
        self._began = time.monotonic()
        self._report = Report(kind, seed, datetime.now(UTC).isoformat(timespec="seconds"), 0.0, "")

    async def run(self) -> Report:
        """Return what became of it: one that is broken, too, has a report."""
        with ExitStack() as stack:
            store = await asyncio.to_thread(made, self._kind, self._folder, stack)
            ports = [free_port(), free_port()]
            ways = [stack.enter_context(Proxy(port)) for port in ports]
            addresses = [f"127.0.0.1:{way.port}" for way in ways]
            crew = stack.enter_context(
                Crew(
                    store.url,
                    self._folder,
                    store.shards,
                    served=f"postroom://{','.join(addresses)}",
                    embedded=("changer", "plain"),
                )
            )
            try:
                await self._hire(store, crew, dict(zip(ports, addresses, strict=True)))
                await self._rage(Strikes(store, crew, ways), crew)
                await self._end(store, crew)
            except Exception:
                self._report.broken = traceback.format_exc()
                await self._judge_what_is_left(store, crew)
            self._sum_up(crew)
        return self._report

    # ---- its parts ----

    async def _hire(self, store: Files | OnServer, crew: Crew, brokers: Mapping[int, str]) -> None:
        async with postroom.connect(store.safe, shards=store.safe_shards, migrate=True) as mq:
            for topic, groups in TOPICS.items():
                await _make(mq, topic, groups)
        for port, address in brokers.items():
            crew.serve(port, address)
        for topic, groups in TOPICS.items():
            for group, ordered in groups.items():
                crew.consume(topic, group, members=2, ordered=ordered)
        crew.belong("orders", _MEMBER)
        crew.produce("orders", "p0", pause_s=self._pause_s)
        crew.produce("orders", "p1", pause_s=self._pause_s)
        crew.produce("plain", "q0", pause_s=self._pause_s / 4, keyless=True)
        crew.produce("later", "r0", delays=(0.1, 1.5), pause_s=self._pause_s)
        crew.change("orders", "c0", longest_s=8.0)
        await self._goes_on(Counter(), "the beginning")

    async def _rage(self, strikes: Strikes, crew: Crew) -> None:
        """Until its time is over, and every kind of fault has struck or the time has doubled."""
        self._began = time.monotonic()
        lines = asyncio.create_task(self._tell(strikes, crew))
        try:
            await asyncio.gather(self._processes(strikes), self._surroundings(strikes))
        finally:
            lines.cancel()
            self._report.seconds = time.monotonic() - self._began
            self._report.disk, self._report.strikes = strikes.disk, dict(strikes.done)

    @property
    def _over(self) -> bool:
        return time.monotonic() > self._began + self._seconds

    async def _processes(self, strikes: Strikes) -> None:
        for fault in plan(self._seed, PROCESSES, _CALM_S):
            if self._over:
                return
            await strikes.strike(fault)
            await asyncio.sleep(fault.calm)

    async def _surroundings(self, strikes: Strikes) -> None:
        for fault in plan(self._seed, SURROUNDINGS[self._kind], _CALM_S):
            if self._over:
                return
            await strikes.strike(fault)
            await self._recovered(fault)
            await asyncio.sleep(fault.calm)

    async def _recovered(self, fault: Fault) -> None:
        """Every producer's topic takes messages again, and every group settles some."""
        healed = time.monotonic()
        await self._goes_on(self._tally.now(), fault.kind)
        took = time.monotonic() - healed
        self._report.slowest = max(self._report.slowest, (took, fault.kind))

    async def _goes_on(self, before: Counter[Flow], what: str) -> None:
        def all_flow() -> bool:
            now = self._tally.now()
            return all(now[flow] > before[flow] for flow in FLOWS)

        try:
            await until(all_flow, f"work goes on after: {what}", _STUCK_S)
        except TimeoutError as stuck:
            now = self._tally.now()
            still = [flow for flow in FLOWS if now[flow] <= before[flow]]
            raise TimeoutError(f"{stuck}; what stands still: {still}") from None

    async def _tell(self, strikes: Strikes, crew: Crew) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            gone = time.monotonic() - self._began
            self._say(
                f"{self._kind} {gone:5.0f}/{self._seconds:.0f} s  faults {strikes.done.total()}  "
                f"kills {len(crew.killed)}  confirmed {self._tally.total('confirmed')}  "
                f"settled {self._tally.total('settled')}  slowest recovery {self._report.slowest[0]:.1f} s"
            )

    async def _end(self, store: Files | OnServer, crew: Crew) -> None:
        """No more is sent; what was sent is handled; the verdict."""
        await self._goes_on(self._tally.now(), "the storm")
        for role in ("changer", "producer"):
            crew.dismiss(role)
        self._say(f"{self._kind}: the storm is over; what was sent is handled")
        began = time.monotonic()
        async with postroom.connect(store.safe, shards=store.safe_shards) as mq:
            for topic in TOPICS:
                await drained(mq, topic, _DRAIN_S)
            self._report.drained_s = time.monotonic() - began
            left = missed(crew, "orders")
            self._report.missed = {member: len(values) for member, values in left.items()}
            for role in ("consumer", "member", "broker"):
                crew.dismiss(role)
            for topic, groups in TOPICS.items():
                self._report.judged += await judged(mq, crew, topic, groups, LEASE_S)

    async def _judge_what_is_left(self, store: Files | OnServer, crew: Crew) -> None:
        """Of a storm that broke off: what was not handled yet counts as lost, the rest is as it is."""
        try:
            async with postroom.connect(store.safe, shards=store.safe_shards) as mq:
                for topic, groups in TOPICS.items():
                    self._report.judged += await judged(mq, crew, topic, groups, LEASE_S)
        except Exception:
            self._report.broken += traceback.format_exc()

    def _sum_up(self, crew: Crew) -> None:
        dismissed = {worker.job.role for worker in crew.at_work.values()}
        roles = Counter(title.split("-")[0] for title in crew.killed)
        self._report.killed = dict(roles - Counter(_DISMISSED if not dismissed else {}))
        self._report.confirmed = self._tally.total("confirmed")
        self._report.settled = self._tally.total("settled")
        self._report.route_changes = self._tally.total("changed")


async def _make(mq: postroom.Connection, topic: str, groups: Mapping[str, bool]) -> None:
    """On a machine that others use as well a step may take two tries."""
    for last in (False,) * 9 + (True,):
        try:
            await mq.create_topic(topic, partitions=3, exist_ok=True)
            for group, ordered in groups.items():
                mode: Literal["ordered", "shared"] = "ordered" if ordered else "shared"
                await mq.create_group(topic, group, mode=mode, lease=LEASE_S, max_attempts=10, exist_ok=True)
            return
        except postroom.StoreError as error:
            if last or not error.retriable:
                raise


_DISMISSED = {"changer": 1, "producer": 4, "consumer": 8, "member": 1, "broker": 2}
"""Killed at the end, when there was nothing left to do: no fault."""
