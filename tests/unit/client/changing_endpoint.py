"""The endpoint in memory, with partitions that are sealed and replaced, and stores that are away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from postroom import StoreError, StoreUnavailable
from postroom.model.messages.batch import records
from postroom.model.messages.slot import slot_of
from postroom.model.topology.route import Range, Route
from postroom.store.contract import Appended
from tests.unit.client.client_endpoint import FakeEndpoint, Partition

AWAY = StoreUnavailable("the database is away")  # whether a batch was stored is not known
REFUSED = StoreUnavailable("the connection was refused", stored=False, reason="refused", shard="b")
LIMIT = 20  # seconds; for whatever must come


class Changing(FakeEndpoint):
    """With partitions that are sealed and replaced, and a log of what was stored when."""

    def __init__(self, partitions: int = 2) -> None:
        super().__init__(partitions=partitions)
        self.log: list[bytes] = []
        self.away: set[int] = set()  # partitions whose store is away
        self.error: StoreError = AWAY  # that they raise
        self.route_away = False
        self.tried: list[int] = []  # partitions of appends
        self._called = asyncio.Event()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Until that is so; looked at whenever a call has come."""
        async with asyncio.timeout(LIMIT):
            while not reached():
                self._called.clear()
                await self._called.wait()

    async def until_called(self, verb: str, more: int = 1) -> None:
        wanted = self.count(verb) + more
        await self.until(lambda: self.count(verb) >= wanted)

    def _append(self, partition_id: int, batch: bytes, due_at: int = 0, ids: bytes = b"") -> Appended:
        self._called.set()
        self.tried.append(partition_id)
        if partition_id in self.away:
            raise self.error
        appended = super()._append(partition_id, batch, due_at, ids)
        if not appended.duplicate:
            self.log += [record.value or b"" for record in records(batch)]
        return appended

    async def route(self, topic: str) -> Route:
        self._called.set()
        found = await super().route(topic)
        if self.route_away:
            raise AWAY
        return found

    def seal(self, *partition_ids: int) -> None:
        for partition_id in partition_ids:
            self.partitions[partition_id].sealed = True

    def split(self, partition_id: int) -> tuple[int, int]:
        """Activate a route with two successors; returns their ids."""
        old = next(piece for piece in self.ranges if piece.partition_id == partition_id)
        middle = (old.first_slot + old.last_slot) // 2
        lower, upper = (
            self._open(first, last) for first, last in ((old.first_slot, middle), (middle + 1, old.last_slot))
        )
        self._activate((old,), (lower, upper))
        return lower.partition_id, upper.partition_id

    def merge(self, first_id: int, second_id: int) -> int:
        old = tuple(piece for piece in self.ranges if piece.partition_id in (first_id, second_id))
        new = self._open(old[0].first_slot, old[-1].last_slot)
        self._activate(old, (new,))
        return new.partition_id

    @property
    def ranges(self) -> tuple[Range, ...]:
        return self.routes["orders"].ranges

    def _open(self, first: int, last: int) -> Range:
        number = partition_id = len(self.partitions) + 1
        self.partitions[partition_id] = Partition("orders", number)
        return Range(first, last, number, partition_id)

    def _activate(self, old: tuple[Range, ...], new: tuple[Range, ...]) -> None:
        kept = [piece for piece in self.ranges if piece not in old]
        ranges = tuple(sorted((*kept, *new), key=lambda piece: piece.first_slot))
        self.routes["orders"] = Route("orders", self.routes["orders"].version + 1, ranges)

    def at(self, key: str) -> int:
        return self.routes["orders"].of_slot(slot_of(key.encode())).partition_id


def key_in(first: int, last: int) -> str:
    return next(f"k{i}" for i in range(10_000) if first <= slot_of(b"k%d" % i) <= last)


LOW, HIGH = key_in(0, 255), key_in(768, 1023)  # keys of partition 1 and 2, when there are two


async def turns(count: int = 20) -> None:
    """Let everything that can run without an event run."""
    for _ in range(count):
        await asyncio.sleep(0)
