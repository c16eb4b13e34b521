"""Requests: the arguments of each operation, as they are checked and as they travel.

The fields of a request are the arguments of a method of `Endpoint`, in their order, but for a body. A request
is an array, so that fields can be added at its end: who does not know them leaves them out, and they have a
default. Values in it are maps, whose unknown keys are ignored. Its header has a limit by its kind, so that
nobody can make a broker read megabytes before it knows what they are about; fields that a newer client adds
have room in it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from ..model.moves.staging import Wish
from ..model.policy.bounds import (
    MOST_PARTS,
    MOST_SEGMENTS,
    AnyGroupName,
    ClientName,
    Count,
    GroupName,
    Ids,
    Label,
    MemberName,
    MessageId,
    Millis,
    Moment,
    Number,
    Offset,
    PartitionId,
    PartitionIds,
    Position,
    Positions,
    ShardName,
    Size,
    SpotList,
    Token,
    TopicName,
    TopicNames,
    Whole,
)
from ..model.policy.rate import Rate
from ..model.policy.settings import GroupWish, Mode, Start, TopicSettings
from ..model.policy.slow_lane import MOST_SOURCES, Seen
from .values import Beat, Held, PollRequest, Settle, UnparkRequest

__all__ = [
    "AlterTopic", "Answer", "Append", "Ask", "AuditLog", "Beats", "BoundsOf", "CancelDelayed", "CreateTopic",
    "Decide", "DelayedOf", "DeleteGroup", "Drop", "Fetch", "HandOver", "LagOf", "Letters", "Marks", "Merge",
    "MoveTo", "Named", "Nothing", "OfGroup", "OfTopic", "Pause", "Poll", "Publish", "Report", "Request",
    "Requester", "Reset", "Resolve", "SetRate", "SettleAndPoll", "SettleParts", "Split", "Spots", "Stage",
    "StoppedOf", "Subscribe", "Unpark", "Unsubscribe",
]  # fmt: skip

# of headers that have lists; others have room for a few names and numbers
_LONG = 128 * 1024
_LONGER = 256 * 1024
_LONGEST = 512 * 1024


class Request(msgspec.Struct, array_like=True):
    """The header of a request."""

    most_bytes: ClassVar[int] = 8 * 1024


# ---- the audit log ----


class AuditLog(Request):
    limit: Count
    topic: TopicName = ""
    who: ClientName = ""
    since: Moment = 0
    before: Offset = 0
    after: Offset = 0


# ---- topics ----


class CreateTopic(Request):
    name: TopicName
    settings: TopicSettings
    partitions: Number
    exist_ok: bool


class Nothing(Request):
    """No arguments."""


class Named(Request):
    name: TopicName


class OfTopic(Request):
    topic: TopicName


class AlterTopic(Request):
    name: TopicName
    settings: TopicSettings


# ---- routes ----


class Split(Request):
    topic: TopicName
    partition: Number
    at: Number | None = None


class Merge(Request):
    topic: TopicName
    one: Number
    other: Number


class MoveTo(Request):
    topic: TopicName
    partition: Number
    shard: ShardName | None = None


# ---- the log ----


class Append(Request):
    """The batch is the body."""

    most_bytes: ClassVar[int] = _LONGER

    topic: TopicName
    partition_id: PartitionId
    due_at: Moment = 0
    ids: Ids = b""
    producer: ClientName = ""  # whose rate it counts towards (R40), if the broker does not know it better


class BoundsOf(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    at: Positions = ()


class CancelDelayed(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    id: MessageId


class DelayedOf(Request):
    """Asks for a page of delayed messages: from that moment, partition and row on."""

    topic: TopicName
    limit: Count
    since: tuple[Moment, PartitionId, Whole] | None = None


class Fetch(Request):
    topic: TopicName
    partition_id: PartitionId
    offset: Offset
    max_messages: Count
    max_bytes: Size
    wait_ms: Millis


class Resolve(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    start: Start


# ---- groups ----


class OfGroup(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    name: GroupName
    wish: GroupWish


class Pause(Request):
    topic: TopicName
    name: GroupName
    paused: bool


class DeleteGroup(Request):
    topic: TopicName
    name: AnyGroupName
    force: bool


class Reset(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    name: AnyGroupName
    start: Start
    force: bool
    dry_run: bool = False


class Convert(Request):
    topic: TopicName
    name: AnyGroupName
    mode: Mode
    force: bool
    dry_run: bool = False


class LagOf(Request):
    topic: TopicName
    group: AnyGroupName


# ---- deliveries ----


class Subscribe(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    group: GroupName
    wish: GroupWish
    member: MemberName
    client: ClientName
    named: bool = True


class Unsubscribe(Request):
    topic: TopicName
    group: GroupName
    member: MemberName


class Poll(Request):
    most_bytes: ClassVar[int] = _LONG

    request: PollRequest


class SettleParts(Request):
    most_bytes: ClassVar[int] = _LONGEST

    topic: TopicName
    group: GroupName
    parts: Annotated[tuple[Settle, ...], Meta(max_length=MOST_PARTS)]


class SettleAndPoll(Request):
    """The answer comes in two frames: the first is that to the verdicts."""

    most_bytes: ClassVar[int] = _LONGEST

    topic: TopicName
    group: GroupName
    parts: Annotated[tuple[Settle, ...], Meta(max_length=MOST_PARTS)]
    request: PollRequest


class Unpark(Request):
    most_bytes: ClassVar[int] = _LONG  # a key has 32 KB at most

    request: UnparkRequest


class HandOver(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    group: GroupName
    token: Token
    partition_ids: PartitionIds


class Beats(Request):
    most_bytes: ClassVar[int] = _LONGEST

    beats: Annotated[tuple[Beat, ...], Meta(max_length=MOST_PARTS)]


class Report(Request):
    """A report of what became of messages, by source (R42)."""

    most_bytes: ClassVar[int] = _LONGEST

    topic: TopicName
    group: GroupName
    seen: Annotated[tuple[Seen, ...], Meta(max_length=MOST_SOURCES)]
    version: Whole = 0


# ---- dead letters, and what stopped ----


class Letters(Request):
    topic: TopicName
    group: GroupName
    limit: Count
    after: tuple[PartitionId, Position] | None = None


class Spots(Request):
    most_bytes: ClassVar[int] = _LONGER

    topic: TopicName
    group: GroupName
    spots: SpotList | None = None


class StoppedOf(Request):
    topic: TopicName
    group: GroupName
    limit: Count
    after: tuple[PartitionId, Position] | None = None
    behind: bool = True


# ---- limits ----


class SetRate(Request):
    rate: Rate


# ---- staging (I20): these name every topic that they are about ----


class Stage(Request):
    """The batches are the body, one after the other: one for each partition."""

    most_bytes: ClassVar[int] = 64 * 1024

    topic: TopicName
    query: Label
    batch: Offset
    segment: Label
    number: Offset
    partition_ids: PartitionIds
    producer: ClientName = ""  # whose rate it counts towards (R40), if the broker does not know it better


class Marks(Request):
    most_bytes: ClassVar[int] = _LONGER

    topics: TopicNames
    query: Label


class Decide(Request):
    most_bytes: ClassVar[int] = 1024 * 1024

    topics: TopicNames
    query: Label
    batch: Offset
    wish: Wish


class Publish(Request):
    most_bytes: ClassVar[int] = _LONGER

    topics: TopicNames
    query: Label
    batch: Offset


class Drop(Request):
    most_bytes: ClassVar[int] = 1024 * 1024

    topics: TopicNames
    query: Label
    batch: Offset
    segments: Annotated[tuple[Label, ...], Meta(max_length=MOST_SEGMENTS)] | None = None


# ---- replies ----


class Requester(Request):
    """The client whose reply topic it is; the broker adds the principal's name."""

    client: ClientName


# ---- what a broker asks a client (R19) ----


class Ask(Request):
    """From a broker to a client: the leases on these end soon; are they at work, or done (R19)?"""

    topic: str
    group: str
    member: str
    held: tuple[Held, ...]
    lease_ms: int  # what is at work is held for so long again


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """A client answers `Ask` with it. What is in neither list is delivered again when its lease ends."""

    most_bytes: ClassVar[int] = _LONGEST

    working: Annotated[tuple[Held, ...], Meta(max_length=MOST_PARTS)] = ()
    done: Annotated[tuple[Held, ...], Meta(max_length=MOST_PARTS)] = ()
