"""The one interface the SDK speaks.

Implemented by the broker in this process (embedded) and, for served brokers, by a remote connection.
Everything above it is the same code. All calls are coroutines, except `beat`: heartbeats come from a
thread of their own, so that a blocking handler does not lose its leases.

Partitions are addressed by `partition_id`, unique in the store; `partition` is the number people see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from ..errors import PostroomError
from ..model.audit import AuditEntry
from ..model.delivery.delivery import Span
from ..model.messages.batch import TopicBounds
from ..model.messages.requests import ReplyTopic
from ..model.moves.staging import Wish
from ..model.policy.bounds import Positions
from ..model.policy.rate import Rate
from ..model.policy.settings import GroupWish, Mode, Start, TopicSettings
from ..model.policy.slow_lane import LaneInfo, LaneView, Seen
from ..model.topology.route import Change, Route
from ..store.contract import Appended
from .values import (
    Beat,
    DeadLetters,
    Decided,
    DelayedBatch,
    Fetched,
    GroupInfo,
    Held,
    Lag,
    PollReply,
    PollRequest,
    PrincipalInfo,
    Published,
    RateInfo,
    ResetPlan,
    Settle,
    SettleReply,
    ShardInfo,
    StoppedMessage,
    TopicInfo,
    UnparkRequest,
)

__all__ = ["Endpoint", "LoneAppends", "OnSettled", "Told"]

OnSettled: TypeAlias = Callable[[SettleReply], None]
"""Is told what became of verdicts that went with a poll."""

Told: TypeAlias = Callable[[Appended | PostroomError], None]
"""Is told what became of a batch."""


class LoneAppends(Protocol):
    """Stores batches that come one at a time, each in the call of its sender."""

    def store_alone(self, partition_id: int, batch: bytes) -> Appended | None:
        """Store a batch before anything else happens. None: the same bytes go by `append_soon` or `append`,
        which find out what became of them (I3)."""

    def yielded(self) -> None:
        """Called by the sender after each: of what was stored, once others have had a turn of the loop."""


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

    def append_soon(self, topic: str, partition_id: int, batch: bytes, producer: str, told: Told) -> bool:
        """Queue a batch that this process has made, if nothing has to be waited for before.

        `told` is called with what became of it, in the event loop. False: nothing was done, and nobody will
        be told; `append` waits for what there is to wait for.
        """
        return False

    def lone_append(self, topic: str, partition_id: int) -> LoneAppends | None:
        """Return how a batch of this process is stored at once; None: others send just now, or something has
        to be waited for. It is used at once, or not at all."""
        return None

    async def cancel(self, topic: str, id: str) -> bool:
        """Take back a delayed message; False if it is not waiting any more."""

    async def delayed(
        self, topic: str, limit: int, since: tuple[int, int, int] | None = None
    ) -> list[DelayedBatch]:
        """Delayed messages of a topic, the soonest first, from a moment, a partition id and a row on.

        An answer has about as many messages as are asked for, at most 1,000, and not many megabytes; one
        batch at least. Ask again from behind its last, until none comes.
        """

    async def fetch(
        self, topic: str, partition_id: int, offset: int, *, max_messages: int, max_bytes: int, wait_ms: int
    ) -> Fetched: ...
    async def resolve(self, topic: str, start: Start) -> dict[int, int]:
        """Returns the offsets to read from, by partition id."""

    async def bounds(self, topic: str, at: Positions = ()) -> TopicBounds:
        """Returns what is kept, and the marks before these offsets, by partition id (`model.messages.batch`).

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
        """Moves the group; offsets move the partitions that they name. `dry_run`: it only says how."""

    async def convert_group(
        self, topic: str, name: str, mode: Mode, force: bool, dry_run: bool = False
    ) -> ResetPlan:
        """Makes a native group one of Kafka clients, or the other way; it goes on where it was."""

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

    async def settle_and_poll(
        self, topic: str, group: str, parts: Sequence[Settle], request: PollRequest, settled: OnSettled
    ) -> PollReply:
        """Settle, and then poll; few acks and what is there for the poll are stored at once.

        `settled` is called as soon as the verdicts are stored. That waits for messages only if the request
        says that it may (`acks_wait_ms`), and then a few milliseconds at most. What is raised before that is
        about both: each may be asked again by itself, the poll as a repeated one (I6). What is raised
        afterwards is about the poll. Cancelled, it may or may not have settled.
        """

    async def unpark(self, request: UnparkRequest) -> PollReply:
        """Ordered groups: the next messages of a parked line, for the holder of its partition."""

    async def hand_over(self, topic: str, group: str, token: int, partition_ids: Sequence[int]) -> None:
        """Ordered groups: hold these partitions no longer; what is unsettled goes to the next holder."""

    async def report_sources(
        self, topic: str, group: str, seen: Sequence[Seen], version: int = 0
    ) -> LaneView | None:
        """Tells what became of messages since the last report, by source (R42); a repeat is counted again.

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
        """Returns the highest offset that the query has decided, by source partition.

        `topics`: any of those that it writes to.
        """

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

    # administration
    async def audit_log(
        self, limit: int, topic: str = "", who: str = "", since: int = 0, before: int = 0, after: int = 0
    ) -> list[AuditEntry]:
        """Who changed what, the newest first: of this topic, by them, begun since that moment.

        `before` and `after`: entries with a lower or a higher id. An answer has at most 1,000.
        """

    async def principals(self) -> list[PrincipalInfo]:
        """Who may use served brokers, by name."""

    def now_ms(self) -> int:
        """The queue's time, never behind it and ahead by a round trip at most: what is delayed by it comes
        late by so much, and never early (R35)."""

    def reached_ms(self) -> int:
        """What the queue's clock has reached for certain. As more is known it is never put back: a lease that
        is counted by it never lasts longer here than it was granted (I16)."""

    async def close(self) -> None: ...
