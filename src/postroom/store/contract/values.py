"""What the verbs of the store contract take and return. Frozen values, nothing that acts.

Exported by `contract`: import them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field

from ...errors import StoreError
from ...model.delivery.delivery import Ask, Delivery, Holder, Line, Settlement, Span, Terms
from ...model.frozen import dataclass
from ...model.messages.batch import BatchHeader, with_base_offset
from ...model.moves.schedule import DelayedRow, Home, Planned
from ...model.policy.settings import GroupSettings, TopicSettings
from ...model.topology.route import Route

__all__ = [
    "Append",
    "Appended",
    "AtOnce",
    "Backlog",
    "Bounds",
    "Drawn",
    "Finished",
    "Granted",
    "Group",
    "KafkaNode",
    "Member",
    "Move",
    "News",
    "Peek",
    "Process",
    "ServedBroker",
    "Settled",
    "ShardState",
    "StoredBatch",
    "Topic",
    "WouldWaitError",
]

AtOnce = Callable[[], AbstractContextManager[None]]
"""Within it, verbs of this thread wait for nothing: those that would have to raise WouldWaitError."""


class WouldWaitError(StoreError):
    """Others are at work, or it takes its time. The verb's transaction is undone: leave it to a thread."""


@dataclass(frozen=True, slots=True)
class Topic:
    id: int
    name: str
    settings: TopicSettings
    route: Route
    created_at: int


@dataclass(frozen=True, slots=True)
class Group:
    id: int
    topic_id: int
    topic: str
    name: str
    settings: GroupSettings
    generation: int  # grows with every reset; verbs of another generation are refused
    paused: bool
    created_at: int
    _terms: Terms = field(init=False, repr=False, compare=False)  # made once: every poll and ack asks

    def __post_init__(self) -> None:
        s = self.settings
        terms = Terms(s.lease_ms, s.max_attempts, stop=s.exhausted == "stop", max_hold_ms=s.max_hold_ms)
        object.__setattr__(self, "_terms", terms)

    @property
    def terms(self) -> Terms:
        return self._terms


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a group begins in a partition, and since when: older progress there does not count any more."""

    generation: int  # the group's
    start: int
    since: int = 0  # the generation in which the start was set


@dataclass(frozen=True, slots=True)
class Drawn:
    """Rows of an outbox in this very database, that leave in the transaction of the append (R30)."""

    table: str
    holder: str  # who leads the outbox: LeaseLost, and nothing is stored, if it is another by now
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Append:
    partition_id: int
    batch: bytes  # a verified RecordBatch v2; its base offset is overwritten
    due_at: int = 0  # a delayed batch: it waits in the schedule until then; 0: it is stored now
    ids: bytes = b""  # 16 bytes for each message (`model.dedup.digest`); stored with the batch (R32)
    dedup_ms: int = 0  # the topic's window: repeats by id are left out; 0: ids are not looked at
    drawn: Drawn | None = None  # where its messages come from; only for stores that have `outboxes`
    producer_id: int | None = None  # whose sequence it counts in (I23); None: that of the batch's header
    header: BatchHeader | None = None  # of the batch, if somebody has read it; None: it is read there
    _stored: dict[int, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, offset: int) -> bytes:
        """Return the batch as it is stored at that offset. It is made once: the store writes it, and readers
        are given the same."""
        stored = self._stored.get(offset)
        if stored is None:
            self._stored.clear()  # another try
            stored = self._stored[offset] = with_base_offset(self.batch, offset)
        return stored


@dataclass(frozen=True, slots=True)
class Appended:
    base_offset: int
    appended_at: int
    duplicate: bool = False  # the producer had sent this very batch before
    repeats: tuple[tuple[int, int], ...] = ()  # (place in the batch, offset): ids stored before, dropped now

    # Messages that were not repeats follow each other from `base_offset` on; it is -1 if there are none, and
    # of a delayed batch, whose offsets are not known yet. So is the offset of a repeat whose first message
    # waits in the schedule.


@dataclass(frozen=True, slots=True)
class StoredBatch:
    base_offset: int
    records: int
    appended_at: int
    data: bytes

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.records - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    start: int  # lowest offset that is kept
    end: int  # the next offset to be given
    sealed: bool = False

    @property
    def messages(self) -> int:
        """How many are kept. The control batch that seals a partition is no message."""
        return max(0, self.end - int(self.sealed) - self.start)


@dataclass(frozen=True, slots=True)
class News:
    """Things that somebody else may have changed."""

    catalog_version: int
    ends: Mapping[int, int]  # partition id → next offset
    next_due: int | None = None  # when the next delayed message is due


@dataclass(frozen=True, slots=True)
class Move:
    """Due messages on their way into logs: the stamp of whoever moves them (I12)."""

    id: int
    producer_id: int
    planned: tuple[Planned, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a move, or of rows that need none (`move_id` is None then)."""

    move_id: int | None
    gone: frozenset[int] = frozenset()  # rows that are in their logs, or nowhere
    changed: tuple[DelayedRow, ...] = ()  # to be put in the place of the rows with their ids
    messages: Mapping[Home, int] = field(default_factory=dict)  # how many fewer wait by that


@dataclass(frozen=True, slots=True)
class Peek:
    cursor: int
    next_due: int | None  # no delivery is due before this moment
    holder: Holder = field(default_factory=Holder)  # ordered groups
    lowest: int = field(default=0, compare=False)  # the lowest unsettled offset; the cursor if there is none
    drained: bool = False  # a sealed partition: all of it is settled, durably
    recalled: bool = False  # ordered groups: the holder is to hand the partition over
    parked: int = field(default=0, compare=False)  # messages that wait in lines (I27)


@dataclass(frozen=True, slots=True)
class Granted:
    deliveries: tuple[Delivery, ...]
    leaving: tuple[Delivery, ...] = ()  # stamped: the caller moves them now (I12)
    unplaced: tuple[Span, ...] = ()  # exhausted, but `Ask.dead` was not given: ask again with it
    next_due: int | None = None
    draining: bool = False  # a suspect waits until the member holds nothing: it should ask no more till then
    holder: Holder | None = None  # ordered groups: the asker was refused; who holds the partition, if anybody
    again: bool = False  # the token held it before: an earlier answer to it was lost, or so it seemed (I6)
    recall: bool = False  # ordered groups: the holder settles what it handles and hands the partition over
    lines: tuple[Line, ...] = ()  # ordered groups: what is parked here, for a holder that expects nothing
    until: int = 0  # the lease as the database has it, on whatever clock: `give_back` names it


@dataclass(frozen=True, slots=True)
class Settled:
    lost: tuple[Span, ...] = ()  # unsettled, and not in the asker's hands
    leaving: tuple[Delivery, ...] = ()  # stamped: the caller moves them now (I12)
    unplaced: tuple[Span, ...] = ()  # that was the last attempt: settle again, with a stamp
    kept: tuple[Delivery, ...] = ()  # ordered groups: retried or released, and still the holder's


@dataclass(frozen=True, slots=True)
class Visit:
    """What one request does in one partition of a group: it settles, by token, and then it polls."""

    partition_id: int
    settles: Sequence[tuple[int, Sequence[Settlement]]] = ()
    ask: Ask | None = None  # None: it settles only
    log_start: int = 0  # as in `Progress.poll`
    waited_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Visited:
    settled: tuple[Settled, ...] = ()  # what became of each of `Visit.settles`
    granted: Granted | None = None  # None: nothing was asked for


@dataclass(frozen=True, slots=True)
class Member:
    group_id: int
    name: str
    client: str
    joined_at: int
    until: int  # live until then


@dataclass(frozen=True, slots=True)
class Backlog:
    """Where a group is in one partition, found without scanning (R43)."""

    partition_id: int
    committed: int
    cursor: int
    end: int
    unsettled: int  # handed out, or waiting to be again
    bytes: int
    oldest_age_ms: int
    first_wait_ms: int
    arrival_per_s: float
    drain_per_s: float
    open: tuple[Span, ...] = field(default=(), repr=False)
    stopped: int = 0  # ordered groups: messages that wait for people to look at them (R23)
    parked: int = 0  # ordered groups: of the unsettled ones, those that wait in lines of the store (I27)
    stopped_age_ms: int = 0  # for how long the oldest of them has held its key
    sealed: bool = False
    first_waits: Mapping[int, int] = field(default_factory=dict, repr=False)  # `model.delivery.first_waits`

    @property
    def messages(self) -> int:
        """Not settled yet. The control batch that seals a partition is no message."""
        return max(0, self.end - int(self.sealed) - self.cursor) + self.unsettled


@dataclass(frozen=True, slots=True)
class ShardState:
    """One database of a queue, and what it holds."""

    name: str  # "" is the first
    kind: str  # of its address
    state: str  # "open", "draining" or "empty"
    away: bool
    partitions: int  # that take messages
    sealed: int  # that are read to their end
    delayed: int  # messages that wait there


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses the store now: a broker that is served, or a program with the queue embedded."""

    id: str
    name: str  # for people
    shards: frozenset[str]  # whose addresses it was given; not the first, which all have

    def knows(self, shard: str) -> bool:
        return not shard or shard in self.shards


@dataclass(frozen=True, slots=True)
class ServedBroker:
    """A broker that clients can connect to."""

    id: str
    address: str  # host:port
    zone: str
    started_at: int


@dataclass(frozen=True, slots=True)
class KafkaNode:
    """A broker that listens for Kafka clients, as these know it."""

    node_id: int
    broker_id: str
    address: str  # host:port
