"""The one interface the SDK speaks.

Implemented by the broker in this process (embedded) and, for served brokers, by a remote connection.
Everything above it is the same code. All calls are coroutines, except `beat`: heartbeats come from a
thread of their own, so that a blocking handler does not lose its leases.

Partitions are addressed by `partition_id`, unique in the store; `partition` is the number people see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from msgspec import Meta

from ..model.delivery.delivery import Line, Span
from ..model.messages.batch import TopicBounds
from ..model.messages.requests import ReplyTopic
from ..model.moves.staging import Segment, Wish
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
from ..model.policy.rate import Rate
from ..model.policy.settings import GroupSettings, GroupWish, Start, TopicSettings
from ..model.policy.slow_lane import LaneInfo, LaneView, Seen
from ..model.topology.route import Change, Route
from ..store.contract import Appended, StoredBatch

__all__ = [
    "NEVER_STORED", "Beat", "DeadLetters", "Decided", "Endpoint", "Fetched", "Grant", "GroupInfo", "Held",
    "Lag", "Lease", "MemberInfo", "PartitionLag", "PartitionReset", "PollReply", "PollRequest", "Published",
    "PublishedPlace", "RateInfo", "ResetPlan", "Settle", "SettleReply", "ShardInfo", "StoppedMessage",
    "TopicInfo", "UnparkRequest", "Verdict",
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


@dataclass(frozen=True, slots=True)
class MemberInfo:
    name: str
    client: str
    joined_at: int
    until: int


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
    """What a batch of a query consists of: not always what was asked for just now (I20)."""

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


class Endpoint(Protocol):
    # catalog
    async def create_topic(
        self, name: str, settings: TopicSettings, partitions: int, exist_ok: bool
    ) -> TopicInfo: ...
    async def topics(self) -> list[TopicInfo]: ...
    async def topic(self, name: str) -> TopicInfo: ...
    async def alter_topic(self, name: str, settings: TopicSettings) -> TopicInfo: ...
    async def delete_topic(self, name: str) -> None: ...
    async def purge(self, name: str) -> int: ...
    async def route(self, topic: str) -> Route: ...

    async def route_history(self, topic: str) -> list[Route]:
        """Every version, the oldest first: ranges only, and partitions of them may be gone."""

    async def route_change(self, topic: str) -> Change | None:
        """The change that is under way, if there is one."""

    async def split(self, topic: str, partition: int, at: int | None) -> Route:
        """The newest route then. RouteConflict if another change is under way."""

    async def merge(self, topic: str, one: int, other: int) -> Route: ...

    async def move(self, topic: str, partition: int, shard: str | None) -> Route: ...

    # shards
    async def shards(self) -> list[ShardInfo]: ...

    async def drain_shard(self, name: str) -> ShardInfo:
        """Move every partition off it; it is empty when `shards` says so."""

    async def open_shard(self, name: str) -> ShardInfo:
        """A shard that was drained takes new partitions again."""

    # limits
    async def set_rate(self, rate: Rate) -> None:
        """Make or change a limit; without any amount there is none any more (R40)."""

    async def rates(self) -> list[RateInfo]: ...

    # log
    async def append(
        self,
        topic: str,
        partition_id: int,
        batch: bytes,
        *,
        due_at: int = 0,
        ids: bytes = b"",
        producer: str = "",
    ) -> Appended:
        """Store a batch now, or (`due_at`) when it is due. `ids`: 16 bytes a message, if they are known.

        Waits for as long as a limit on the topic or the `producer` wants it (R40).
        """

    async def cancel(self, topic: str, id: str) -> bool:
        """Take back a delayed message; False if it is not waiting any more."""

    async def fetch(
        self, topic: str, partition_id: int, offset: int, *, max_messages: int, max_bytes: int, wait_ms: int
    ) -> Fetched: ...
    async def resolve(self, topic: str, start: Start) -> dict[int, int]:
        """Offsets by partition id; for `read`."""

    async def bounds(self, topic: str, at: Positions = ()) -> TopicBounds:
        """What is kept, and the marks before these offsets, by partition id (`model.marks`).

        Partitions that were removed are in it if they are named.
        """

    # groups
    async def create_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo: ...
    async def groups(self, topic: str) -> list[GroupInfo]: ...
    async def alter_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo: ...
    async def pause(self, topic: str, name: str, paused: bool) -> GroupInfo: ...
    async def delete_group(self, topic: str, name: str, force: bool) -> None: ...
    async def reset(
        self, topic: str, name: str, start: Start, force: bool, dry_run: bool = False
    ) -> ResetPlan:
        """Offsets move the partitions that they name. `dry_run`: say what would be done."""

    async def lag(self, topic: str, group: str) -> Lag: ...
    async def lanes(self, topic: str, group: str) -> LaneInfo: ...

    # deliveries
    async def subscribe(
        self, topic: str, group: str, wish: GroupWish, member: str, client: str, *, named: bool = True
    ) -> GroupInfo:
        """Make the group if it is not there (GroupConflict if it differs) and enter the member.

        The answer names the group to poll: in mode "broadcast" it is the member's own, which for a member
        that is not `named` begins at the end and is forgotten when it leaves, or is idle (R11).
        """

    async def unsubscribe(self, topic: str, group: str, member: str) -> None: ...
    async def poll(self, request: PollRequest) -> PollReply:
        """Wait for deliveries. A poll that is cancelled gives back what it was given meanwhile."""

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply: ...

    async def unpark(self, request: UnparkRequest) -> PollReply:
        """Ordered groups: the next messages of a parked line, for the holder of its partition."""

    async def hand_over(self, topic: str, group: str, token: int, partition_ids: Sequence[int]) -> None:
        """Ordered groups: hold these partitions no longer; what is unsettled goes to the next holder."""

    async def report_sources(
        self, topic: str, group: str, seen: Sequence[Seen], version: int = 0
    ) -> LaneView | None:
        """What became of messages since the last report, by source (R42); a repeat is counted again.

        The answer is what the member is to know of slow sources, unless `version` says that it does.
        """

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        """Renew members and leases; blocking, from any thread. Returns what is lost.

        Empty spans: the shard is away, and the lease was neither renewed nor lost.
        """

    # dead letters
    async def dead_letters(
        self, topic: str, group: str, limit: int, after: tuple[int, int] | None = None
    ) -> list[DeadLetters]:
        """Dead letters, the oldest first, from the one behind `after` (partition id and offset) on.

        An answer has at most 1,000, and not many megabytes: ask again behind its last, until none comes.
        """

    async def redrive(self, topic: str, group: str, spots: Sequence[tuple[int, int]] | None) -> int:
        """Hand dead letters (by offset in the dead-letter topic; None: all) back to that group alone."""

    async def discard(self, topic: str, group: str, spots: Sequence[tuple[int, int]] | None) -> int:
        """Throw dead letters away."""

    # what stopped (ordered groups, R23)
    async def stopped(
        self, topic: str, group: str, limit: int, after: tuple[int, int] | None = None, behind: bool = True
    ) -> list[StoppedMessage]:
        """Messages that stopped their key, by partition id and offset, from the one behind `after` on.

        An answer has at most 1,000, and not many megabytes: ask again behind its last, until none comes.
        """

    async def restart_stopped(
        self, topic: str, group: str, spots: Sequence[tuple[int, int]] | None = None
    ) -> int:
        """They count their attempts anew (by partition id and offset; None: all). What is not stopped (any
        more) is left alone. Returns how many, as do the next two."""

    async def skip_stopped(
        self, topic: str, group: str, spots: Sequence[tuple[int, int]] | None = None
    ) -> int:
        """They go to the group's dead letters, and their keys go on."""

    async def drop_stopped(
        self, topic: str, group: str, spots: Sequence[tuple[int, int]] | None = None
    ) -> int:
        """The group has nothing to do with them any more, and their keys go on."""

    # staging (I20)
    async def stage(
        self,
        topic: str,
        query: str,
        batch: int,
        segment: str,
        number: int,
        partition_ids: Sequence[int],
        data: bytes,
        producer: str = "",
    ) -> None:
        """Keep batches, invisible, for a batch of a query; `data` has one for each of these partitions.

        They are numbered from `number` on within the segment: repeated, nothing is stored twice. Waits as an
        append does for limits on the topic or the `producer`. PermissionDenied, here and below, if the query
        is another principal's.
        """

    async def staged_marks(self, topics: Sequence[str], query: str) -> dict[str, int]:
        """By source partition, the highest offset that the query has decided. Any topic it writes to."""

    async def decide_staged(self, topics: Sequence[str], query: str, batch: int, wish: Wish) -> Decided:
        """Decide what the batch consists of; what was decided before counts. `topics`: all it writes to.

        StagingConflict as `model.staging` says.
        """

    async def publish_staged(self, topics: Sequence[str], query: str, batch: int) -> Published:
        """Go on publishing what was decided, for a while."""

    async def drop_staged(
        self, topics: Sequence[str], query: str, batch: int, segments: Sequence[str] | None
    ) -> int:
        """Drop these segments (None: all) of these topics, but for what was decided. How many messages."""

    # replies (R38)
    async def open_replies(self, client: str) -> ReplyTopic:
        """The requester's own topic: made, or kept since it lives. Another partition: the first is gone."""

    async def close_replies(self, client: str) -> None: ...

    def now_ms(self) -> int: ...

    async def close(self) -> None: ...
