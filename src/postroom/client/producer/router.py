"""Which partition of a topic a message goes to.

By its slot (named, or of its key); without a key, the partitions in turn (`turns`), but for those that are
away; while some are, the route is read again now and then, which says whether they are back. Where the topic
looks at ids (R32) a message without a key goes where its id would go as a key, so that all who send it meet
in one partition; whether the topic does so is asked again after a second, if there are ids.

Messages of one slot are stored in the order they were placed (I4), whatever becomes of the route: those that
are unresolved are all in one accumulator. A slot is held, and what comes for it waits, while its partition
takes no more and the route does not name the successor yet, and while a batch is unresolved on a partition
that had the slot before. All other slots go on meanwhile. What a partition gives back is placed first. Must
never place a message on a successor while an earlier one of its slot is unresolved: accumulators report a
moved partition only once all their batches are resolved. Delayed messages are placed alike, each strand by
itself: those of one moment are on one strand.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from operator import itemgetter
from typing import cast

from ...backoff import ROUTE, SOON
from ...config import DEFAULTS, ClientTuning
from ...endpoint.endpoint import Endpoint
from ...errors import ClosedError, PostroomError, SendTimeout
from ...model.messages.compression import AUTO
from ...model.messages.slot import deal, deal_slots, slot_of
from ...model.topology.route import Range, Route
from ...tasks import SharedTask, end
from ..codec import Packed
from .accumulator import Accumulator, Batching
from .appending import InFlight, last_error
from .parcel import NOT_SENT, Parcel, UnroutedParcels

__all__ = ["PartitionCycle", "Router"]


class PartitionCycle:
    """The partitions in the order in which they get messages without a key, each for a batch (R22, R6).

    One that takes no more is passed over, and so is one that is away, with its shard. That is remembered from
    the first failure on, until something was stored there or the broker says that it is back; and for as long
    as a batch is being repeated there. When all are away they go on as ever, since one of them will answer
    first. Has no clock of its own: moments are arguments.
    """

    __slots__ = ("_all", "_at", "_away", "_looked_at", "_repeating", "_tuning")

    def __init__(self, tuning: ClientTuning = DEFAULTS.tuning.client) -> None:
        self._tuning = tuning
        self._all: Sequence[Accumulator] = ()
        self._at = 0
        self._repeating: set[Accumulator] = set()  # a batch is being repeated there
        self._away: dict[int, float] = {}  # partitions, and from when on they may be said to be back
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def between(self, accumulators: Sequence[Accumulator]) -> None:
        self._all, self._at = accumulators, self._at % len(accumulators)
        here = {one.where.partition_id for one in accumulators}
        self._away = {one: until for one, until in self._away.items() if one in here}

    @property
    def current(self) -> Accumulator:
        return self._all[self._at]

    @property
    def troubled(self) -> bool:
        """Whether some partition is passed over."""
        return bool(self._repeating or self._away)

    def pick(self, gone: AbstractSet[int]) -> Accumulator | None:
        """The one whose turn it is; None: all partitions are `gone`."""
        if not gone and not self.troubled:
            return self.current
        found = self._first_without(gone | self.avoided)
        return found if found is not None else self._first_without(gone)

    def next(self) -> None:
        self._at = (self._at + 1) % len(self._all)

    def batch_left(self, partition_id: int) -> None:
        """Messages stay with a partition until a batch has left it."""
        if self._all and self._all[self._at].where.partition_id == partition_id:
            self.next()

    # ---- who is away ----

    def in_trouble(self, accumulator: Accumulator, now: float, *, silent: bool) -> bool:
        """A batch met a store that is away, or one that does not answer (`silent`), and is being repeated.

        Returns whether it is passed over because of that.
        """
        if silent and not self.many_shards:
            return False  # it is slow, as all the others then are
        self._repeating.add(accumulator)
        until = now + (self._tuning.silent_kept_s if silent else self._tuning.refused_s)
        place = accumulator.where.partition_id
        self._away[place] = max(until, self._away.get(place, 0.0)) if silent else until
        return True

    def quiet(self, accumulator: Accumulator) -> None:
        """No batch is being repeated there any more."""
        self._repeating.discard(accumulator)

    def well(self, where: Range) -> None:
        """Something was stored there: whatever is on its shard is back."""
        if self._away:
            for one in self._mates(where):
                self._away.pop(one, None)

    def told(self, away: Collection[int], now: float) -> None:
        """These are away, as a broker sees it; all others are back, if that can be known by now."""
        self._looked_at = now
        here = {one.where.partition_id for one in self._all}
        kept = {one: until for one, until in self._away.items() if one in away or until > now}
        self._away = kept | {one: now for one in away if one in here and one not in kept}

    def wants_a_look(self, now: float) -> bool:
        """Whether somebody should ask now if those that are away are back; not again for a while then."""
        if not self._away or now - self._looked_at < self._tuning.back_check_s:
            return False
        self._looked_at = now
        return True

    def any_well(self, gone: AbstractSet[int]) -> bool:
        """Whether there is a partition that takes messages and is not away."""
        return self._first_without(gone | self.avoided, look_only=True) is not None

    @property
    def avoided(self) -> set[int]:
        """What is away, and all that is on a shard with it, if there are others (R6)."""
        found = {*self._away, *(accumulator.where.partition_id for accumulator in self._repeating)}
        if not found or not self.many_shards:
            return found
        shards = {one.where.shard for one in self._all if one.where.partition_id in found}
        return found.union(one.where.partition_id for one in self._all if one.where.shard in shards)

    @property
    def many_shards(self) -> bool:
        """Whether there is another shard to go to."""
        return len({one.where.shard for one in self._all}) > 1

    def _mates(self, where: Range) -> list[int]:
        if not self.many_shards:
            return [where.partition_id]
        return [one.where.partition_id for one in self._all if one.where.shard == where.shard]

    def _first_without(self, avoided: AbstractSet[int], *, look_only: bool = False) -> Accumulator | None:
        for step in range(len(self._all)):
            at = (self._at + step) % len(self._all)
            if self._all[at].where.partition_id not in avoided:
                if not look_only:
                    self._at = at
                return self._all[at]
        return None


_STRANDS = 7  # accumulators for delayed messages, per partition; prime, since people like round moments


_CLOSED = "the producer was closed before the message left: nothing was stored"
_KEY = itemgetter(0)  # of an entry

_LOOKS = 20  # so many later the partition itself is asked again: the store decides what it takes


class Router:
    """The partitions of a producer's topic, and the accumulators of its messages, which report here."""

    def __init__(
        self,
        endpoint: Endpoint,
        topic: str,
        find_route: Callable[[str], Awaitable[Route]],
        batching: Batching,
        lost: Callable[[Exception, int], None],
    ) -> None:
        self._endpoint, self._topic, self._find_route, self._batching = endpoint, topic, find_route, batching
        self.lost = lost  # is told of what was sent one-way and not stored, and of how many messages
        self._accumulators: dict[tuple[int, int], Accumulator] = {}  # by partition id and `_strand`
        self._ranges: tuple[Range, ...] = ()  # of the route as last read
        self._by_slot: list[Accumulator] = []
        self._starts: tuple[int, ...] = ()  # the first slot of each range
        self._fresh_s = batching.tuning.ids_fresh_s
        self._turns = PartitionCycle(batching.tuning)
        self._gone: set[int] = set()  # partitions of this route that take no more
        self._awake: list[Accumulator] = []  # those with something to send in this turn of the loop
        self._behind: dict[Accumulator, int] = {}  # unresolved, of partitions not in this route: its strand
        self._unrouted = UnroutedParcels(self.too_late)
        self._loading = SharedTask(self._load, _CLOSED)
        self._waiters = 0  # senders who wait for the first route
        self._looks = 0  # at the route, since a partition was found to take no more
        self.cause: PostroomError | None = None  # why the route cannot be read now
        self.by_id = False  # the topic looks at ids
        self._slot_of = slot_of  # or that of the topic's own rule
        self.compression = batching.compression
        self._looked_at = 0.0
        self._looking = SharedTask(self._look, _CLOSED)

    @property
    def ready(self) -> bool:
        return bool(self._by_slot)

    @property
    def accumulators(self) -> list[Accumulator]:
        return list(self._accumulators.values())

    # ---- placing ----

    def place(self, parcel: Parcel) -> None:
        if not self._by_slot:
            self._hold(parcel)
        elif parcel.slot is not None:
            self._place_at(parcel.slot, parcel)
        elif len(parcel.entries) == 1:
            key = parcel.entries[0][0] if parcel.ids is None else self._keys(parcel)[0]
            if key is not None:
                if self._gone or self._behind or parcel.due_at:
                    self._place_at(self._slot_of(key), parcel)
                else:
                    self._by_slot[self._slot_of(key)].add(parcel)
            else:
                self._add(self._pick(), parcel)
                if parcel.due_at:  # seldom due together with the next: it is a batch by itself
                    self._turns.next()
        elif self.goes_anywhere(parcel):
            self._place_in_turn(parcel)
        else:
            self._place_by_key(parcel)

    def lone(self, packed: Packed) -> Accumulator | None:
        """Return where one message without a slot or an id goes now; None: that is not as simple now."""
        if not self._by_slot or self._gone or self._behind or self._turns.troubled:
            return None
        key = packed.entries[0][0]
        return self._turns.current if key is None else self._by_slot[self._slot_of(key)]

    def _place_at(self, slot: int, parcel: Parcel) -> None:
        held = (self._gone or self._behind) and self._is_held(slot, _strand(parcel))
        self._add(None if held else self._by_slot[slot], parcel)

    def _place_in_turn(self, parcel: Parcel) -> None:
        """A list without keys: a batch to each partition in turn (R22)."""
        count, most = len(parcel.entries), self._batching.batch_messages
        batches = [range(at, min(at + most, count)) for at in range(0, count, most)]
        for part in parcel.divide(batches):
            self._add(self._pick(), part)
            self._turns.next()

    def _place_by_key(self, parcel: Parcel) -> None:
        if len(self._turns) == 1 and not self._gone and not self._behind:
            self._add(self._pick(), parcel)  # it has all slots
            return
        dealt = None if self._gone or self._behind else self._dealt(parcel)
        if dealt is None:
            self._place_apart(parcel, self._keys(parcel))
            return
        there = [(start, chosen) for start, chosen in zip(self._starts, dealt, strict=True) if chosen]
        for (start, _), part in zip(there, parcel.divide([chosen for _, chosen in there]), strict=True):
            self._add(self._by_slot[start], part)

    def _dealt(self, parcel: Parcel) -> list[list[int]] | None:
        """Return which of its messages each range has; None: nothing decides about the slot of some."""
        by_id = parcel.ids is not None and self._ids_decide
        keys = cast("Iterable[bytes]", self._keys(parcel) if by_id else map(_KEY, parcel.entries))
        rule, starts = self._slot_of, self._starts
        try:
            return deal(keys, starts) if rule is slot_of else deal_slots(map(rule, keys), starts)
        except TypeError:  # a key is None
            return None

    def _place_apart(self, parcel: Parcel, keys: list[bytes | None]) -> None:
        """Some have no key, or some slots may be held."""
        places: defaultdict[tuple[Accumulator | None, bool], list[int]] = defaultdict(list)
        changing, strand = bool(self._gone or self._behind), _strand(parcel)
        sticky, by_slot, apart = self._pick(), self._by_slot, self._turns.many_shards
        for at, key in enumerate(keys):
            if key is None:  # where there are several shards, apart from keys: it may go elsewhere later
                places[sticky, not apart].append(at)
            else:
                slot = self._slot_of(key)
                places[None if changing and self._is_held(slot, strand) else by_slot[slot], True].append(at)
        for (target, _), part in zip(places, parcel.divide(list(places.values())), strict=True):
            self._add(target, part)

    def _pick(self) -> Accumulator | None:
        """Whose turn it is. Whether those that are away are back is asked beside it, without waiting."""
        if self._turns.wants_a_look(self._now()):
            self._looking.start()
        return self._turns.pick(self._gone)

    def _keys(self, parcel: Parcel) -> list[bytes | None]:
        """What decides about the slots of its messages; None: nothing does."""
        keys = [key for key, _, _ in parcel.entries]
        if parcel.ids is None or not self._ids_decide:
            return keys
        return [id.encode() if key is None and id else key for key, id in zip(keys, parcel.ids, strict=True)]

    def goes_anywhere(self, parcel: Parcel) -> bool:
        """Whether neither a key, nor a slot, nor an id decides where it goes."""
        return parcel.slot is None and not parcel.keyed and (parcel.ids is None or not self._ids_decide)

    @property
    def _ids_decide(self) -> bool:
        return self.by_id and len(self._turns) > 1

    def _is_held(self, slot: int, strand: int) -> bool:
        if self._by_slot[slot].where.partition_id in self._gone:
            return True
        return any(
            of == strand and one.where.first_slot <= slot <= one.where.last_slot
            for one, of in self._behind.items()
        )

    def _add(self, target: Accumulator | None, parcel: Parcel) -> None:
        if target is None:
            self._hold(parcel)
        elif not parcel.due_at:
            target.add(parcel)
        else:
            self._accumulator(target.where, _strand(parcel)).add(parcel)

    def _accumulator(self, where: Range, strand: int = 0) -> Accumulator:
        found = self._accumulators.get((where.partition_id, strand))
        if found is None:
            found = self._accumulators[where.partition_id, strand] = Accumulator(
                self._endpoint, self._topic, where, self._batching, self, delayed=strand > 0
            )
        return found

    # ---- holding ----

    def _hold(self, parcel: Parcel) -> None:
        self._unrouted.add(parcel)
        if self._gone or not self._by_slot:
            self._reload()

    def _release(self) -> None:
        """Something has changed: place what is held. Whatever still cannot be placed keeps its order."""
        waiting = self._unrouted.take()
        for parcel in waiting:
            self.place(parcel)
        if len(self._unrouted) < len(waiting):
            for accumulator in self.accumulators:
                accumulator.flush()  # it has waited long enough, and somebody may be flushing

    def too_late(self, trouble: PostroomError | None = None) -> SendTimeout:
        """For those whose time is over before they left. `trouble`: what they met before they came back."""
        why = "" if trouble is None else f"; {last_error(trouble)}"
        if self.cause is not None:
            why = f"; the route of the topic could not be read ({self.cause.code}: {self.cause})"
        elif self._gone:
            why = "; its partition takes no more, and the route does not name the successor yet"
        error = SendTimeout(NOT_SENT + why, stored=False)
        error.__cause__ = self.cause or trouble
        return error

    # ---- what accumulators report ----

    def wake_soon(self, accumulator: Accumulator) -> None:
        """It has something to send, and so may others have before this turn of the loop ends."""
        if not self._awake:
            asyncio.get_running_loop().call_soon(self._wake_all)
        self._awake.append(accumulator)

    def _wake_all(self) -> None:
        """A list with keys becomes a batch for each partition: they are handed over together, so that one
        commit can take them all."""
        awake, self._awake = self._awake, []
        leaving: list[tuple[Accumulator, InFlight]] = []
        for accumulator in awake:
            accumulator.wake(leaving)
        for accumulator, batch in leaving:
            accumulator.hand_over(batch)

    def batch_left(self, where: Range) -> None:
        """A batch is on its way: the next messages without a key go to the next partition."""
        self._turns.batch_left(where.partition_id)

    def in_trouble(self, accumulator: Accumulator, error: PostroomError | None) -> bool:
        """What nobody tried to store there, and may go anywhere, goes elsewhere.

        Returns whether there is such a place. `error` is None if it does not answer.
        """
        avoided = self._turns.in_trouble(accumulator, self._now(), silent=error is None)
        if not avoided or not self._turns.any_well(self._gone):
            return False
        self._place_again(accumulator.take_back(self.goes_anywhere))
        return True

    def go_elsewhere(self, parcels: list[Parcel]) -> list[Parcel]:
        """Place those of these, which are surely not stored, that may go anywhere; returns the others."""
        self._place_again([parcel for parcel in parcels if self.goes_anywhere(parcel)])
        return [parcel for parcel in parcels if not self.goes_anywhere(parcel)]

    def _place_again(self, parcels: list[Parcel]) -> None:
        """They have waited long enough where they were: they do not linger elsewhere."""
        for parcel in parcels:
            self.place(parcel)
        if parcels:
            avoided = self._turns.avoided
            for accumulator in self.accumulators:
                if accumulator.where.partition_id not in avoided:
                    accumulator.flush()

    def quiet(self, accumulator: Accumulator) -> None:
        """No batch is being repeated there any more because its store is away."""
        self._turns.quiet(accumulator)

    def well(self, where: Range) -> None:
        """A batch was stored there."""
        self._turns.well(where)

    def resolved(self, accumulator: Accumulator) -> None:
        """One that was left behind has nothing left: what waited for it may go on (I4)."""
        if accumulator in self._behind:
            self._forget(accumulator)
            self._release()

    def moved_away(self, accumulator: Accumulator, parcels: list[Parcel]) -> None:
        """A partition takes no more: place these by the new route, before anything that comes later."""
        self._unrouted.add_first(parcels)
        partition_id = accumulator.where.partition_id
        if any(piece.partition_id == partition_id for piece in self._ranges):
            self._gone.add(partition_id)
            self._looks = 0
            self._reload()
        elif not accumulator.busy:
            self._forget(accumulator)
        self._release()

    def _forget(self, accumulator: Accumulator) -> None:
        self._behind.pop(accumulator, None)
        self._turns.quiet(accumulator)
        self._accumulators = {key: one for key, one in self._accumulators.items() if one is not accumulator}

    # ---- the route ----

    async def load(self) -> None:
        """Read the route, once for all who wait for it; as often as it takes, while somebody waits."""
        self._waiters += 1
        try:
            self._reload()
            await self._loading.result()
        finally:
            self._waiters -= 1

    def _reload(self) -> None:
        if not self._loading.under_way:
            self._looks = 0
            self._loading.start()

    async def _load(self) -> None:
        failures = 0
        try:
            while not await self._look_up():
                failures = failures + 1 if self.cause is not None else 0
                self._looks += 1
                await asyncio.sleep(SOON.after(failures) if failures else ROUTE.after(self._looks))
        except Exception as error:
            self._give_up(error)
            raise

    async def _look_up(self) -> bool:
        """Read it once; False: it has to be read again."""
        try:
            route = await self._find_route(self._topic)
        except PostroomError as error:
            if not error.retriable:
                raise
            self.cause = error
            return not self._waiters and not self._unrouted
        self.cause = None
        self._saw(route)
        asking = bool(self._gone) and self._looks >= _LOOKS
        if asking:
            self._gone.clear()
        changed = route.ranges != self._ranges
        if changed:
            self._change(route.ranges)
        self._turns.told(route.away, self._now())
        if not changed and not asking:
            return not self._gone
        self._release()
        return not self._gone

    def _change(self, ranges: Sequence[Range]) -> None:
        self._ranges = tuple(ranges)
        self._starts = tuple([piece.first_slot for piece in ranges])
        here = {piece.partition_id for piece in ranges}
        self._gone &= here
        in_turn = [self._accumulator(piece) for piece in ranges]
        self._turns.between(in_turn)
        self._by_slot = []
        for piece, accumulator in zip(ranges, in_turn, strict=True):
            self._by_slot.extend([accumulator] * (piece.last_slot - piece.first_slot + 1))
        self._behind = {}
        for (partition_id, strand), accumulator in list(self._accumulators.items()):
            if partition_id not in here:
                self._leave_behind(accumulator, strand)

    def _leave_behind(self, accumulator: Accumulator, strand: int) -> None:
        """Its partition has successors: only what is under way there stays, until its fate is known."""
        self._unrouted.add_first(accumulator.take_back())
        if accumulator.busy:
            self._behind[accumulator] = strand
        else:
            self._forget(accumulator)

    def _give_up(self, error: Exception) -> None:
        """The topic is gone or cannot be found: what waits for it fails, and the next send asks again."""
        self._by_slot, self._ranges, self._gone, self._behind, self.cause = [], (), set(), {}, None
        failure = error if isinstance(error, PostroomError) else PostroomError(f"no route: {error!r}")
        for parcel in self._unrouted.take():
            parcel.failed(failure)

    # ---- whether the topic looks at ids, and who is away ----

    @property
    def stale(self) -> bool:
        """Whether it is some time since anybody looked if the topic looks at ids."""
        return self._now() - self._looked_at > self._fresh_s

    async def look_again(self) -> None:
        """Once for all who wait for it. What cannot be found out now stays as it was."""
        await self._looking.result()

    async def _look(self) -> None:
        with suppress(PostroomError):
            route = await self._find_route(self._topic)
            self._saw(route)
            self._turns.told(route.away, self._now())

    def _saw(self, route: Route) -> None:
        self.by_id, self._looked_at = route.by_id, self._now()
        self._slot_of = slot_of if route.keys == "postroom" else route.slot_of
        if self._batching.compression == AUTO:  # not all Kafka clients can read it
            self.compression = AUTO if route.keys == "postroom" else "none"

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def stop(self) -> None:
        await end([task for accumulator in self.accumulators for task in accumulator.stop()])
        await self._loading.end()
        await self._looking.end()
        for parcel in self._unrouted.take():
            parcel.failed(ClosedError(_CLOSED))


def _strand(parcel: Parcel) -> int:
    """Delayed messages of one moment go one behind the other; those of others need not wait for them."""
    return 1 + parcel.due_at % _STRANDS if parcel.due_at else 0
