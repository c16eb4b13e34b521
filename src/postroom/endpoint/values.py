"""Values of the endpoint: what a queue is asked with, and what it answers.

Every side has the same words: the broker, the wire, the client, HTTP. A request's values bound themselves by
their types (`model.policy.bounds`): whoever decodes one refuses what is beyond before anybody reads it.
Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta

from ..model.delivery.delivery import Line, Span
from ..model.frozen import dataclass
from ..model.moves.staging import Segment
from ..model.policy.bounds import (
    MOST_PARTS,
    MOST_SPANS,
    ClientName,
    Count,
    GroupName,
    Key,
    MemberName,
    Millis,
    Moment,
    Offset,
    PartitionId,
    PartitionIds,
    Position,
    Positions,
    Reason,
    Size,
    Spans,
    Token,
    TopicName,
    Whole,
)
from ..model.policy.settings import GroupSettings, TopicSettings
from ..model.policy.slow_lane import LaneView
from ..store.contract import StoredBatch

__all__ = [
    "NEVER_STORED", "Beat", "DeadLetters", "Decided", "DelayedBatch", "Fetched", "Grant", "GroupInfo", "Held",
    "Lag", "Lease", "MemberInfo", "PartitionLag", "PartitionReset", "PollReply", "PollRequest",
    "PrincipalInfo", "Published", "PublishedPlace", "RateInfo", "ResetPlan", "Settle", "SettleReply",
    "ShardInfo", "StoppedMessage", "TopicInfo", "UnparkRequest", "Verdict", "released",
]  # fmt: skip


# ---- catalog ----


@dataclass(frozen=True, slots=True)
class TopicInfo:
    name: str
    partitions: int
    settings: TopicSettings
    created_at: int
    messages: int  # kept now, over all partitions
    groups: tuple[str, ...]
    internal: bool  # a group's own topic: dead letters, retries
    delayed: int = 0  # sent, and not due yet

    @property
    def created_at_ms(self) -> int:
        """When it was created, in milliseconds since 1970."""
        return self.created_at


@dataclass(frozen=True, slots=True)
class MemberInfo:
    name: str
    client: str
    joined_at: int
    until: int

    @property
    def since_ms(self) -> int:
        """Since when it is a member (`joined_at`), in milliseconds since 1970."""
        return self.joined_at

    @property
    def until_ms(self) -> int:
        """When it is forgotten unless it is heard of, in milliseconds since 1970."""
        return self.until


@dataclass(frozen=True, slots=True)
class GroupInfo:
    topic: str
    name: str
    settings: GroupSettings
    paused: bool
    generation: int
    created_at: int
    members: tuple[MemberInfo, ...]  # live ones; none: nobody uses the group now
    idle_ms: int | None = None  # nobody has used it for so long; None: it is in use
    made: bool = False  # by the very call that this answers
    fresh: bool = False  # the member begins anew: its own group was made just now, or has settled nothing yet

    @property
    def created_at_ms(self) -> int:
        """When it was created, in milliseconds since 1970."""
        return self.created_at


@dataclass(frozen=True, slots=True)
class PartitionReset:
    """What a reset does in one partition."""

    group: str  # in mode "broadcast" the member's own
    partition: int
    before: int  # everything below it was settled
    after: int  # where the group goes on
    again: int  # messages that were settled, and are delivered once more
    skipped: int  # messages that were not settled, and are passed over
    moved: bool = True  # False: the group stays, with what is in flight or waits for a retry


@dataclass(frozen=True, slots=True)
class ResetPlan(GroupInfo):
    """The group, and what a reset has done, or (`dry_run`) would do."""

    partitions: tuple[PartitionReset, ...] = ()
    dry_run: bool = False

    @property
    def again(self) -> int:
        return sum(line.again for line in self.partitions)

    @property
    def skipped(self) -> int:
        return sum(line.skipped for line in self.partitions)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    name: str  # "first": where topics and groups are kept
    kind: str  # of its address
    state: str  # "open", "draining", "empty" (drained: it may be left out), or "away"
    partitions: int  # that take messages
    sealed: int  # partitions that groups have to read to their end
    delayed: int  # messages that wait there; 0 if it is away


@dataclass(frozen=True, slots=True)
class RateInfo:
    """A limit on a topic, a group or a producer; the names that it is not about are empty."""

    kind: str  # "topic", "group" or "producer"
    topic: str
    group: str
    producer: str
    messages_per_s: float  # 0: no limit
    bytes_per_s: int
    debt_ms: int = 0  # whoever comes now waits for so long


@dataclass(frozen=True, slots=True)
class PrincipalInfo:
    """Somebody who may use served brokers, and for what; never its token."""

    name: str
    permissions: tuple[str, ...]  # such as "send:orders"
    created_at: int
    token: bool  # else it comes with a client certificate of that name


# ---- reading ----

NEVER_STORED = "never stored"
"""The first argument of the CancelledError of an append that was cancelled while it waited for its turn."""


@dataclass(frozen=True, slots=True)
class Fetched:
    batches: tuple[StoredBatch, ...]
    start: int
    end: int
    sealed: bool = False  # nothing will come after `end`


# ---- deliveries ----


@dataclass(frozen=True, slots=True)
class PollRequest:
    topic: TopicName
    group: GroupName
    member: MemberName
    token: Token  # random, drawn by the asker; a repeated request with the same token is answered the same
    messages: Count
    bytes: Size
    wait_ms: Millis
    empty_handed: bool  # the asker holds nothing of this group
    on_delivery: bool = False
    repeated: bool = False  # asked before under this token, without an answer (I6)
    positions: Positions = ()  # ordered groups: (partition id, offset expected next) (I6)
    giving_up: PartitionIds = ()  # ordered groups: of these, those revoked that are not handed over yet
    started_ms: Whole = 0  # ordered groups: as the reply had it from which on `positions` are held
    lane_messages: Count = 0  # of these, so many of the slow lane (R42)
    lane_version: Whole = 0  # of what the asker knows of slow sources
    acks_wait_ms: Millis = 0  # acks that come along may wait so long for messages, to be stored with them

    # In an ordered group the token is the holder's, the same for as long as the consumer lives; `positions`
    # names the partitions it holds (offset -1: it has received nothing yet), and a poll for 0 messages only
    # asks whether that is still so.


@dataclass(frozen=True, slots=True)
class Lease:
    first: int
    last: int
    attempt: int
    alone: bool  # to be settled before anything else is asked for (I14)
    not_before: int = 0  # ordered groups: its key waits until then (I5)


@dataclass(frozen=True, slots=True)
class Grant:
    """Offsets of one partition now held under the request's token, and the batches they are in."""

    topic: str  # where it is stored: the topic itself, or the group's retry topic, or its slow lane
    partition: int
    partition_id: int
    leases: tuple[Lease, ...]
    batches: tuple[StoredBatch, ...]
    position: int = -1  # ordered groups: the offset to expect next; no leases: it is held, and read so far
    lines: tuple[Line, ...] = ()  # ordered groups: what is parked, if the partition is newly held (I27)


@dataclass(frozen=True, slots=True)
class PollReply:
    grants: tuple[Grant, ...]
    lease_ms: int
    draining: bool = False  # a suspect waits (I14): ask again once nothing is held, or after a lease
    revoked: tuple[int, ...] = ()  # ordered groups: partitions that are others' turn; `hand_over` them soon
    lost: tuple[int, ...] = ()  # ordered groups: of `positions`, those that the asker does not hold any more
    started_ms: int = 0  # ordered groups: when the database was started, as `Progress.started_ms`
    lanes: LaneView | None = None  # with grants, if the asker does not know it


@dataclass(frozen=True, slots=True)
class UnparkRequest:
    """Ordered groups: the holder of a partition asks for the next messages of a parked line (I27).

    Asked again after a lost answer it is answered the same, so `first` is what the holder knows. `last` is
    below the offset that it expects next: from there on polls send what is in its hands once more (I6). In
    the answer the grant's `position` is where the line begins from then on.
    """

    topic: TopicName
    group: GroupName
    member: MemberName
    token: Token
    partition_id: PartitionId
    line: Offset
    key: Key | None
    first: Offset
    last: Position
    max_messages: Count
    max_bytes: Size
    on_delivery: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Literal["ack", "retry", "release", "dead", "lane", "park"]
    # lane: set aside, untried (R42). park: a line of the store claims more of its key (I27); that is acked in
    # the same part
    first: Offset
    last: Offset
    delay_ms: Millis = 0  # retry, release: from now
    at_ms: Moment | None = None  # retry: at that moment instead
    reason: Reason = ""
    line: Line | None = None  # park


@dataclass(frozen=True, slots=True)
class Settle:
    topic: TopicName  # the grant's
    partition_id: PartitionId
    token: Token
    verdicts: Annotated[tuple[Verdict, ...], Meta(max_length=MOST_SPANS)]


def released(request: PollRequest, grants: Iterable[Grant]) -> list[Settle]:
    """Returns the settles that give back everything a poll was given."""
    return [
        Settle(
            grant.topic,
            grant.partition_id,
            request.token,
            tuple(Verdict("release", lease.first, lease.last) for lease in grant.leases),
        )
        for grant in grants
    ]


@dataclass(frozen=True, slots=True)
class SettleReply:
    lost: tuple[tuple[Settle, tuple[Span, ...]], ...] = ()  # what of a part is in other hands
    kept: tuple[tuple[Settle, tuple[Lease, ...]], ...] = ()  # ordered groups: retried, released; still held
    away: tuple[Settle, ...] = ()  # not settled: their shard is away; settle them again


@dataclass(frozen=True, slots=True)
class Held:
    topic: TopicName
    partition_id: PartitionId
    token: Token
    spans: Spans


@dataclass(frozen=True, slots=True)
class Beat:
    """One consumer's heartbeat: it lives, and these are the leases it wants to keep."""

    topic: TopicName
    group: GroupName
    member: MemberName
    client: ClientName
    held: Annotated[tuple[Held, ...], Meta(max_length=MOST_PARTS)]


# ---- backlog ----


@dataclass(frozen=True, slots=True)
class PartitionLag:
    topic: str  # the topic itself, or the group's retry topic, or its slow lane
    partition: int
    committed: int  # everything below it is settled
    end: int
    messages: int  # waiting or unsettled
    bytes: int
    unsettled: int  # handed out, or to be handed out again
    oldest_age_ms: int
    first_wait_ms: int  # arrival to first delivery, as last seen
    arrival_per_s: float
    drain_per_s: float
    drain_eta_s: float | None  # None: not draining at these rates
    holder: str = ""  # ordered groups: the member that holds the partition
    stopped: int = 0  # ordered groups: messages that hold their key until somebody decides (R23)
    parked: int = 0  # ordered groups: of the unsettled ones, those parked behind a failing message (I27)
    sealed: bool = False  # takes no more messages: its successors do
    waits_for: tuple[int, ...] = ()  # ordered groups: partitions to be read to their end before this one
    stopped_age_ms: int = 0  # for how long the oldest stopped message has held its key
    first_wait_p50_ms: int | None = None  # of what was first read in the last minutes, half waited no longer
    first_wait_p95_ms: int | None = None  # and 95 in 100; None: nothing was read


@dataclass(frozen=True, slots=True)
class Lag:
    topic: str
    group: str
    partitions: tuple[PartitionLag, ...]
    total: PartitionLag  # partition -1; ages are the worst, the rest is summed


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters not yet redriven or thrown away, as stored batches and the offsets that count."""

    topic: str  # the dead-letter topic
    partition: int
    partition_id: int
    open: tuple[Span, ...]
    batches: tuple[StoredBatch, ...]


@dataclass(frozen=True, slots=True)
class DelayedBatch:
    """Messages that were sent together and are due at one moment."""

    row: int
    partition_id: int  # it was sent to
    due_at: int
    records: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StoppedMessage:
    """Ordered groups: a message that holds its key until somebody decides (R23)."""

    topic: str  # where it is stored: the topic itself, or the group's retry topic
    partition: int
    partition_id: int
    attempts: int  # how often it was tried there
    reason: str
    since: int  # when it first failed: it holds its key since then
    batch: StoredBatch  # it alone
    behind: int | None = None  # how many messages wait behind it; None: not counted
    more_behind: bool = False  # at least so many: it was not counted to the end

    @property
    def offset(self) -> int:
        return self.batch.base_offset


# ---- staging ----


@dataclass(frozen=True, slots=True)
class Decided:
    """The segments that a batch of a query consists of: not always those asked for just now (I20)."""

    revision: int
    segments: tuple[Segment, ...]
    published: bool


@dataclass(frozen=True, slots=True)
class PublishedPlace:
    """Where messages of a batch are: between these offsets, maybe with others among them."""

    topic: str
    partition: int  # -1: it is gone
    partition_id: int
    first: int
    last: int
    messages: int


@dataclass(frozen=True, slots=True)
class Published:
    done: bool  # else: ask again
    messages: int
    dropped: int = 0  # messages of topics that were deleted
    places: tuple[PublishedPlace, ...] = ()
