"""Which partition of a topic a message goes to.

By its slot (named, or of its key); without a key, the partitions in turn, each for a batch. Messages of one
key are stored in the order they were placed. When a partition takes no more, the route is read again and
what was refused is placed first (I4); whatever is placed meanwhile waits behind it. Must never place a
message on a successor while an earlier one of its key is unresolved: accumulators report a moved partition
only once all their batches are resolved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...errors import PenstockError
from ...model.route import Range, Route
from ...model.slot import slot_of
from ..ending import end
from .accumulator import Accumulator
from .appending import pause
from .parcel import Parcel

__all__ = ["Router"]


class Router:
    def __init__(
        self,
        find: Callable[[], Awaitable[Route]],
        open_accumulator: Callable[[Range], Accumulator],
        batch_messages: int,
    ) -> None:
        self._find, self._open, self._batch_messages = find, open_accumulator, batch_messages
        self._accumulators: dict[int, Accumulator] = {}  # by partition id
        self._by_slot: list[Accumulator] = []
        self._in_turn: list[Accumulator] = []
        self._turn = 0
        self._version = -1
        self._loading: asyncio.Task[None] | None = None
        self._refused: list[Parcel] = []  # placed first
        self._held: list[Parcel] = []  # came while the route was read

    @property
    def ready(self) -> bool:
        return bool(self._by_slot)

    @property
    def accumulators(self) -> list[Accumulator]:
        return list(self._accumulators.values())

    def place(self, parcel: Parcel) -> None:
        if self._loading is not None or not self._by_slot:
            self._held.append(parcel)
        elif parcel.slot is not None:
            self._by_slot[parcel.slot].add(parcel)
        elif len(parcel.entries) == 1:
            key = parcel.entries[0][0]
            (self._in_turn[self._turn] if key is None else self._by_slot[slot_of(key)]).add(parcel)
        elif not parcel.keyed:
            self._place_in_turn(parcel)
        else:
            self._place_by_key(parcel)

    def _place_in_turn(self, parcel: Parcel) -> None:
        """A list without keys: a batch to each partition in turn (R22)."""
        count, most = len(parcel.entries), self._batch_messages
        batches = [range(at, min(at + most, count)) for at in range(0, count, most)]
        for part in parcel.divide(batches):
            self._in_turn[self._turn].add(part)
            self._turn = (self._turn + 1) % len(self._in_turn)

    def _place_by_key(self, parcel: Parcel) -> None:
        places: dict[Accumulator, list[int]] = {}
        sticky, by_slot = self._in_turn[self._turn], self._by_slot
        for at, (key, _, _) in enumerate(parcel.entries):
            places.setdefault(sticky if key is None else by_slot[slot_of(key)], []).append(at)
        for target, part in zip(places, parcel.divide(list(places.values())), strict=True):
            target.add(part)

    def batch_left(self, where: Range) -> None:
        """Keyless messages stay with a partition until a batch has left it."""
        if self._in_turn and self._in_turn[self._turn].where.partition_id == where.partition_id:
            self._turn = (self._turn + 1) % len(self._in_turn)

    async def load(self) -> None:
        """Read the route, once for all who wait for it."""
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load())
        await asyncio.shield(self._loading)

    def moved_away(self, where: Range, parcels: list[Parcel]) -> None:
        """A partition takes no more: place these by the new route, before anything that comes later."""
        self._accumulators.pop(where.partition_id, None)
        self._refused.extend(parcels)
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load())
            self._loading.add_done_callback(_retrieved)

    async def _load(self) -> None:
        try:
            route = await self._find()
            if route.version == self._version:
                await asyncio.sleep(pause(8))  # the change is not finished yet
        except Exception as error:
            self._give_up(error)
            raise
        finally:
            self._loading = None
        self._apply(route)

    def _apply(self, route: Route) -> None:
        self._version = route.version
        self._in_turn = [self._accumulator(piece) for piece in route.ranges]
        self._by_slot = []
        for piece, accumulator in zip(route.ranges, self._in_turn, strict=True):
            self._by_slot.extend([accumulator] * (piece.last_slot - piece.first_slot + 1))
        self._turn %= len(self._in_turn)
        waiting = [*self._refused, *self._held]
        self._refused, self._held = [], []
        for parcel in waiting:
            self.place(parcel)

    def _accumulator(self, where: Range) -> Accumulator:
        found = self._accumulators.get(where.partition_id)
        if found is None:
            found = self._accumulators[where.partition_id] = self._open(where)
        return found

    def _give_up(self, error: Exception) -> None:
        """The topic is gone or cannot be found: what waits for it fails, and the next send asks again."""
        waiting = [*self._refused, *self._held]
        self._by_slot, self._refused, self._held, self._version = [], [], [], -1
        failure = error if isinstance(error, PenstockError) else PenstockError(f"no route: {error!r}")
        for parcel in waiting:
            parcel.failed(failure)

    async def stop(self) -> None:
        tasks = [task for accumulator in self.accumulators for task in accumulator.stop()]
        await end(tasks if self._loading is None else [self._loading, *tasks])


def _retrieved(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
