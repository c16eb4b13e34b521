"""A producer that follows I4: it repeats what is unresolved to the old partition, and only then goes on.

Several batches are on their way at once; each request, and each answer, may be lost. The real one is
`postroom.client.producer`; this one has no event loop, so that a machine can stop it between any two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from postroom.config import DEFAULTS
from postroom.errors import AppendError, PartitionSealed, PostroomError, UnknownPartition
from postroom.model.messages.batch import BatchBuilder
from postroom.model.messages.slot import slot_of
from postroom.model.topology.route import Route
from postroom.store.contract import Append, Appended, Store
from tests.model.route_truth import Message, Truth

__all__ = ["Parcel", "Producer", "slot"]

MOST_BEHIND = DEFAULTS.remembered_batches - 1


def slot(key: int) -> int:
    return slot_of(b"%d" % key)


@dataclass
class Parcel:
    partition_id: int
    number: int  # of the partition's batches
    sequence: int
    messages: list[Message]
    batch: bytes
    refused: bool = False  # the partition was sealed without it

    def has(self, key: int) -> bool:
        return any(key == one for one, _ in self.messages)


class Producer:
    def __init__(self, store: Store, topic: str, number: int, truth: Truth) -> None:
        self.id = number
        self._store, self._topic, self._truth = store, topic, truth
        self.waiting: list[Message] = []  # in no batch yet, in order
        self.parcels: list[Parcel] = []  # not resolved; of each partition in order
        self.confirmed: list[Message] = []
        self._past: list[Parcel] = []
        self._sequences: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._sealed: set[int] = set()
        self.route = self.fetch_route()

    def fetch_route(self) -> Route:
        self.route = self._store.catalog.topic(self._topic).route
        return self.route

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.parcels

    def pack(self, most: int) -> None:
        """Put what may go now into one batch: of one partition, and no key that is on its way elsewhere."""
        held: set[int] = set()
        target, chosen = None, list[Message]()
        for message in self.waiting:
            key = message[0]
            there = self.route.of_slot(slot(key)).partition_id
            free = key not in held and self._takes_more(there) and self._may_go(key, there)
            if free and target in (None, there) and len(chosen) < most:
                target = there
                chosen.append(message)
            else:
                held.add(key)  # later ones of the key stay behind it
        if target is not None:
            self.waiting = [message for message in self.waiting if message not in chosen]
            self._send(target, chosen)

    def _takes_more(self, partition_id: int) -> bool:
        """Not sealed; and the oldest batch of unknown fate there is one that the store remembers (I3)."""
        oldest = [parcel.number for parcel in self.parcels if parcel.partition_id == partition_id][:1]
        sent = self._sent.get(partition_id, 0)
        return partition_id not in self._sealed and all(sent - number < MOST_BEHIND for number in oldest)

    def _may_go(self, key: int, partition_id: int) -> bool:
        """I4."""
        return all(parcel.partition_id == partition_id for parcel in self.parcels if parcel.has(key))

    def _send(self, partition_id: int, messages: list[Message]) -> None:
        sequence = self._sequences.get(partition_id, 0)
        number = self._sent[partition_id] = self._sent.get(partition_id, 0) + 1
        self._sequences[partition_id] = sequence + len(messages)
        builder = BatchBuilder()
        for key, ordinal in messages:
            builder.append(1_000, b"%d" % key, b"%d" % ordinal, [])
        batch = builder.build(self.id, 0, sequence)
        self.parcels.append(Parcel(partition_id, number, sequence, messages, batch))

    def transmit(self, which: int, *, answered: bool = True) -> None:
        """One request; the store does what it does, whether or not the answer arrives."""
        open_ones = [parcel for parcel in self.parcels if not parcel.refused]
        if open_ones:
            parcel = open_ones[which % len(open_ones)]
            result = self._append(parcel)
            if answered:
                self._answered(parcel, result)

    def _append(self, parcel: Parcel) -> Appended | PostroomError:
        (result,) = self._store.log.append([Append(parcel.partition_id, parcel.batch)])
        if isinstance(result, Appended):
            if result.duplicate:
                place = (parcel.partition_id, result.base_offset)
                assert self._truth.stored[parcel.messages[0]] == place, "a repeat is told another offset (I3)"
            else:
                self._truth.store(parcel.partition_id, result.base_offset, parcel.messages)
        return result

    def _answered(self, parcel: Parcel, result: Appended | PostroomError) -> None:
        if isinstance(result, Appended):
            self.parcels.remove(parcel)
            self._past.append(parcel)
            self.confirmed += parcel.messages
        elif isinstance(result, PartitionSealed | UnknownPartition):
            # Without it those behind it cannot be stored either: only the exact next one is (I3).
            for one in self.parcels:
                if one.partition_id == parcel.partition_id and one.sequence >= parcel.sequence:
                    one.refused = True
            self._sealed.add(parcel.partition_id)
        else:
            assert isinstance(result, AppendError), result  # one before it is missing: again
        self._reroute(parcel.partition_id)

    def _reroute(self, partition_id: int) -> None:
        """Once nothing is unresolved there, what was refused waits for the next route, in front."""
        there = [parcel for parcel in self.parcels if parcel.partition_id == partition_id]
        if there and all(parcel.refused for parcel in there):
            self.parcels = [parcel for parcel in self.parcels if parcel not in there]
            self.waiting = [message for parcel in there for message in parcel.messages] + self.waiting
            self._past += there

    def ghost(self, which: int) -> None:
        """A request that was thought lost arrives at last: it is known, or refused; it is never stored."""
        if self._past:
            parcel = self._past[which % len(self._past)]
            result = self._append(parcel)
            assert not isinstance(result, Appended) or result.duplicate, "stored, after its end was told"

    def flush(self) -> None:
        """One round without faults."""
        self.fetch_route()
        for _ in range(len(self.parcels)):
            self.transmit(0)
        self.pack(100)
