"""The one interface the SDK speaks.

Implemented by the broker in this process (embedded) and, for served brokers, by a remote connection.
Everything above it is the same code. All calls are coroutines, except `beat`: heartbeats come from a
thread of their own, so that a blocking handler does not lose its leases.

Partitions are addressed by `partition_id`, unique in the store; `partition` is the number people see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..model.delivery import Span
from ..model.route import Route
from ..model.settings import GroupSettings, GroupWish, Start, TopicSettings
from ..store.contract import Appended, StoredBatch

__all__ = [
    "Beat",
    "DeadLetters",
    "Endpoint",
    "Fetched",
    "Grant",
    "GroupInfo",
    "Held",
    "Lag",
    "Lease",
    "MemberInfo",
    "PartitionLag",
    "PollReply",
    "PollRequest",
    "Settle",
    "TopicInfo",
    "Verdict",
]


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


# ---- reading ----


@dataclass(frozen=True, slots=True)
class Fetched:
    batches: tuple[StoredBatch, ...]
    start: int
    end: int


# ---- deliveries ----


@dataclass(frozen=True, slots=True)
class PollRequest:
    topic: str
    group: str
    member: str
    token: int  # random, drawn by the asker; a repeated request with the same token is answered the same
    messages: int
    bytes: int
    wait_ms: int
    empty_handed: bool  # the asker holds nothing of this group
    on_delivery: bool = False
    repeated: bool = False  # asked before under this token, without an answer (I6)


@dataclass(frozen=True, slots=True)
class Lease:
    first: int
    last: int
    attempt: int
    alone: bool  # to be settled before anything else is asked for (I14)


@dataclass(frozen=True, slots=True)
class Grant:
    """Offsets of one partition now held under the request's token, and the batches they are in."""

    topic: str  # where it is stored: the topic itself, or the group's retry topic
    partition: int
    partition_id: int
    leases: tuple[Lease, ...]
    batches: tuple[StoredBatch, ...]


@dataclass(frozen=True, slots=True)
class PollReply:
    grants: tuple[Grant, ...]
    lease_ms: int
    draining: bool = False  # a suspect waits (I14): ask again once nothing is held, or after a lease


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Literal["ack", "retry", "release", "dead"]
    first: int
    last: int
    delay_ms: int = 0  # retry, release: from now
    at_ms: int | None = None  # retry: at that moment instead
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Settle:
    topic: str  # the grant's
    partition_id: int
    token: int
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Held:
    topic: str
    partition_id: int
    token: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """One consumer's heartbeat: it lives, and these are the leases it wants to keep."""

    topic: str
    group: str
    member: str
    client: str
    held: tuple[Held, ...]


# ---- backlog ----


@dataclass(frozen=True, slots=True)
class PartitionLag:
    topic: str  # the topic itself, or the group's retry topic
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

    # log
    async def append(self, topic: str, partition_id: int, batch: bytes) -> Appended: ...
    async def fetch(
        self, partition_id: int, offset: int, *, max_messages: int, max_bytes: int, wait_ms: int
    ) -> Fetched: ...
    async def resolve(self, topic: str, start: Start) -> dict[int, int]:
        """Offsets by partition id; for `read`."""

    # groups
    async def create_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo: ...
    async def groups(self, topic: str) -> list[GroupInfo]: ...
    async def alter_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo: ...
    async def pause(self, topic: str, name: str, paused: bool) -> GroupInfo: ...
    async def delete_group(self, topic: str, name: str, force: bool) -> None: ...
    async def reset(self, topic: str, name: str, start: Start, force: bool) -> GroupInfo: ...
    async def lag(self, topic: str, group: str) -> Lag: ...

    # deliveries
    async def subscribe(self, topic: str, group: str, wish: GroupWish, member: str, client: str) -> GroupInfo:
        """Make the group if it is not there (GroupConflict if it differs) and enter the member."""

    async def unsubscribe(self, topic: str, group: str, member: str) -> None: ...
    async def poll(self, request: PollRequest) -> PollReply:
        """Wait for deliveries. A poll that is cancelled gives back what it was given meanwhile."""

    async def settle(
        self, topic: str, group: str, parts: Sequence[Settle]
    ) -> list[tuple[Settle, tuple[Span, ...]]]:
        """Settle; returns the parts of which something is lost, with the lost spans."""

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        """Renew members and leases; blocking, from any thread. Returns what is lost."""

    # dead letters
    async def dead_letters(self, topic: str, group: str, limit: int) -> list[DeadLetters]: ...
    async def redrive(self, topic: str, group: str, offsets: Sequence[int] | None) -> int:
        """Hand dead letters (by offset in the dead-letter topic; None: all) back to that group alone."""

    async def discard(self, topic: str, group: str, offsets: Sequence[int] | None) -> int:
        """Throw dead letters away."""

    def now_ms(self) -> int: ...

    async def close(self) -> None: ...
