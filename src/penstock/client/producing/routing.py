"""Which partition of a topic a message goes to.

By its slot (named, or of its key); without a key, the partitions in turn, each for a batch. Where the topic
looks at ids (R32) a message without a key goes where its id would go as a key, so that all who send it meet
in one partition; whether the topic does so is asked again after a second, if there are ids.

Messages of one key are stored in the order they were placed. When a partition takes no more, the route is
read again and what was refused is placed first (I4); whatever is placed meanwhile waits behind it. Must never
place a message on a successor while an earlier one of its key is unresolved: accumulators report a moved
partition only once all their batches are resolved. Delayed messages are placed alike, among themselves.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

from ...errors import PenstockError
from ...model.route import Range, Route
from ...model.slot import slot_of
from ..ending import end
from .accumulator import Accumulator
from .appending import pause
from .parcel import Parcel

__all__ = ["Router"]

_STRANDS = 7  # accumulators for delayed messages, per partition; prime, since people like round moments

_FRESH_S = 1.0  # a change of the topic's window is seen no later


class Router:
    def __init__(
        self,
        find: Callable[[], Awaitable[Route]],
        open_accumulator: Callable[[Range, bool], Accumulator],
        batch_messages: int,
    ) -> None:
        self._find, self._open, self._batch_messages = find, open_accumulator, batch_messages
        self._accumulators: dict[tuple[int, int], Accumulator] = {}  # by partition id and `_strand`
        self._by_slot: list[Accumulator] = []
        self._in_turn: list[Accumulator] = []
        self._turn = 0
        self._version = -1
        self._loading: asyncio.Task[None] | None = None
        self._refused: list[Parcel] = []  # placed first
        self._held: list[Parcel] = []  # came while the route was read
        self._behind: set[Accumulator] = set()  # delayed, unresolved, of partitions no longer in the route
        self._late: list[Parcel] = []  # delayed ones that wait for those
        self.by_id = False  # the topic looks at ids
        self._looked_at = 0.0
        self._looking: asyncio.Task[None] | None = None

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
            self._add(self._by_slot[parcel.slot], parcel)
        elif len(parcel.entries) == 1:
            key = self._keys(parcel)[0]
            self._add(self._in_turn[self._turn] if key is None else self._by_slot[slot_of(key)], parcel)
            if key is None and parcel.due_at:  # seldom due together with the next: it is a batch by itself
                self._next_turn()
        elif not parcel.keyed and (parcel.ids is None or not self._ids_decide):
            self._place_in_turn(parcel)
        else:
            self._place_by_key(parcel)

    def _place_in_turn(self, parcel: Parcel) -> None:
        """A list without keys: a batch to each partition in turn (R22)."""
        count, most = len(parcel.entries), self._batch_messages
        batches = [range(at, min(at + most, count)) for at in range(0, count, most)]
        for part in parcel.divide(batches):
            self._add(self._in_turn[self._turn], part)
            self._next_turn()

    def _next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self._in_turn)

    def _place_by_key(self, parcel: Parcel) -> None:
        places: defaultdict[Accumulator, list[int]] = defaultdict(list)
        sticky, by_slot = self._in_turn[self._turn], self._by_slot
        for at, key in enumerate(self._keys(parcel)):
            places[sticky if key is None else by_slot[slot_of(key)]].append(at)
        for target, part in zip(places, parcel.divide(list(places.values())), strict=True):
            self._add(target, part)

    def _keys(self, parcel: Parcel) -> list[bytes | None]:
        """What decides about the slots of its messages; None: nothing does."""
        keys = [key for key, _, _ in parcel.entries]
        if parcel.ids is None or not self._ids_decide:
            return keys
        return [id.encode() if key is None and id else key for key, id in zip(keys, parcel.ids, strict=True)]

    @property
    def _ids_decide(self) -> bool:
        return self.by_id and len(self._in_turn) > 1

    def _add(self, target: Accumulator, parcel: Parcel) -> None:
        if not parcel.due_at:
            target.add(parcel)
        elif self._behind:
            self._late.append(parcel)
        else:
            self._accumulator(target.where, _strand(parcel)).add(parcel)

    def resolved(self, accumulator: Accumulator) -> None:
        """One that was left behind has nothing left: what waited for it may go on (I4)."""
        if accumulator in self._behind:
            self._forget(accumulator)
            if not self._behind and self._loading is None:
                late, self._late = self._late, []
                for parcel in late:
                    self.place(parcel)

    def _forget(self, accumulator: Accumulator) -> None:
        self._behind.discard(accumulator)
        self._accumulators = {key: one for key, one in self._accumulators.items() if one is not accumulator}

    def batch_left(self, where: Range) -> None:
        """Keyless messages stay with a partition until a batch has left it."""
        if self._in_turn and self._in_turn[self._turn].where.partition_id == where.partition_id:
            self._next_turn()

    async def load(self) -> None:
        """Read the route, once for all who wait for it."""
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load())
        await asyncio.shield(self._loading)

    @property
    def stale(self) -> bool:
        """Whether it is some time since anybody looked if the topic looks at ids."""
        return asyncio.get_running_loop().time() - self._looked_at > _FRESH_S

    async def look_again(self) -> None:
        """Once for all who wait for it. What cannot be found out now stays as it was."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        try:
            self._saw(await self._find())
        except PenstockError:
            pass
        finally:
            self._looking = None

    def _saw(self, route: Route) -> None:
        self.by_id, self._looked_at = route.by_id, asyncio.get_running_loop().time()

    def moved_away(self, accumulator: Accumulator, parcels: list[Parcel]) -> None:
        """A partition takes no more: place these by the new route, before anything that comes later."""
        self._forget(accumulator)
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
        self._saw(route)
        self._in_turn = [self._accumulator(piece) for piece in route.ranges]
        self._by_slot = []
        for piece, accumulator in zip(route.ranges, self._in_turn, strict=True):
            self._by_slot.extend([accumulator] * (piece.last_slot - piece.first_slot + 1))
        self._turn %= len(self._in_turn)
        here = {piece.partition_id for piece in route.ranges}
        self._behind = {
            accumulator
            for (partition_id, _), accumulator in self._accumulators.items()
            if accumulator.delayed and partition_id not in here and accumulator.busy
        }
        waiting = [*self._refused, *self._late, *self._held]
        self._refused, self._late, self._held = [], [], []
        for parcel in waiting:
            self.place(parcel)

    def _accumulator(self, where: Range, strand: int = 0) -> Accumulator:
        found = self._accumulators.get((where.partition_id, strand))
        if found is None:
            found = self._accumulators[where.partition_id, strand] = self._open(where, strand > 0)
        return found

    def _give_up(self, error: Exception) -> None:
        """The topic is gone or cannot be found: what waits for it fails, and the next send asks again."""
        waiting = [*self._refused, *self._held, *self._late]
        self._by_slot, self._refused, self._held, self._late, self._version = [], [], [], [], -1
        failure = error if isinstance(error, PenstockError) else PenstockError(f"no route: {error!r}")
        for parcel in waiting:
            parcel.failed(failure)

    async def stop(self) -> None:
        tasks = [task for accumulator in self.accumulators for task in accumulator.stop()]
        await end([task for task in (self._loading, self._looking, *tasks) if task is not None])


def _strand(parcel: Parcel) -> int:
    """Delayed messages of one moment go one behind the other; those of others need not wait for them."""
    return 1 + parcel.due_at % _STRANDS if parcel.due_at else 0


def _retrieved(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
