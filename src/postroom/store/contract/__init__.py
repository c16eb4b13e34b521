"""The store contract: what survives, in domain verbs. Any database that keeps it can carry Postroom.

Small interfaces, one per concern, gathered in `Store`. All of it is synchronous and safe to call
from any thread; each verb is one short transaction on one shard. A verb raises a `PostroomError` from
the tree and then has changed nothing. Times are the store's own clock, in milliseconds.

`postroom.testing.store_contract` holds the suite that every implementation passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from ...address import Address
from ...errors import PostroomError, StoreUnavailable
from ...model.delivery.delivery import Ask, Delivery, Line, OrderedAsk, Settlement, Span, Stamp
from ...model.moves.schedule import DelayedRow
from ...model.policy.settings import GroupSettings, Start, TopicSettings
from ...model.topology.route import Change, Draft, Route
from .kafka import KafkaGroups
from .services import (
    Access,
    Audit,
    Brokers,
    Duties,
    Lanes,
    Rates,
    Schedule,
    SentAppend,
    Staged,
    Staging,
    Usage,
    Watcher,
)  # fmt: skip
from .values import (
    Append,
    Appended,
    AtOnce,
    Backlog,
    Bounds,
    Finished,
    Granted,
    Group,
    KafkaNode,
    Member,
    Move,
    News,
    Origin,
    Peek,
    Process,
    ServedBroker,
    Settled,
    ShardState,
    StoredBatch,
    Topic,
    Visit,
    Visited,
)  # fmt: skip

__all__ = [
    "Access", "Append", "Appended", "Audit",
    "Backlog",
    "Bounds",
    "Brokers",
    "Catalog",
    "DelayedRow",
    "Duties",
    "Finished",
    "Granted",
    "Group",
    "KafkaNode",
    "Lanes",
    "Log",
    "Member",
    "Move",
    "News",
    "Origin",
    "Peek", "Process", "Progress",
    "Rates", "Routes",
    "Schedule", "SentAppend", "ServedBroker", "Settled", "ShardState", "Staged", "Staging", "Store",
    "StoredBatch",
    "Topic",
    "Usage",
    "Visit", "Visited",
    "Watcher",
]  # fmt: skip


class Log(Protocol):
    """Batches of a partition: dense offsets, in the order of commits."""

    def append(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        """Store batches in one flushed transaction, in the given order.

        Durable when this returns (R1). Offsets are dense and given under the partition's lock, so no
        reader ever sees a hole that fills later. A batch that carries a producer's sequence is stored
        at most once: a repeat returns its first offset, also on a sealed partition (I3). The sequence is
        that of `Append.producer_id`, and of the id in the batch only if there is none (I23). A refused batch
        has its error in its place in the list; the others are stored. If the database itself fails,
        nothing is stored and the error is raised.

        With `dedup_ms`, messages are left out whose id this partition has stored within that time, or has
        stored and some group has not settled, or that wait in the schedule (R32), and maybe all of a batch.
        Of ids, the newest `Limits.dedup_ids` are remembered. A repeat of the batch is answered alike.
        """

    def append_at_once(self, appends: Sequence[Append]) -> list[Appended | PostroomError] | None:
        """Store a few batches of sequences as `append` does, waiting for the disk and for nobody. None: they
        are not known to be stored, or would have to wait: give them to `append`, which finds out (I3)."""

    def send(self, append: Append) -> SentAppend | None:
        """Begin to store a batch of a sequence on a server as `append` does, without waiting for the answer.
        None: that takes more than to send it: give it to `append`."""

    def seal(self, partition_id: int, batch: bytes) -> int:
        """Append a control batch as the last one and take no more; flushed. Returns the end (R26).

        Of a partition that is sealed already nothing changes. UnknownPartition if it is gone.
        """

    def hand_down(self, partition_id: int) -> dict[int, bytes]:
        """Return what is remembered of the sequences of Kafka's producers in a sealed partition, by producer.

        Their offsets are those from the seal on, so below 0 (`Log.inherit`). UnknownPartition if it is gone.
        """

    def inherit(self, partition_id: int, sequences: Mapping[int, bytes]) -> None:
        """Remember these sequences, where the partition does not know the producer; flushed (I28)."""

    def read(self, partition_id: int, offset: int, *, max_messages: int, max_bytes: int) -> list[StoredBatch]:
        """Batches from the one that contains `offset` on; at least one if there is any.

        Below what is kept it begins with the first batch that is. What was trimmed but not swept yet is
        still read: `bounds` tell where the log starts. UnknownPartition if the log is gone.
        """

    def bounds(self, partition_ids: Iterable[int]) -> dict[int, Bounds]:
        """Return what is kept of each partition. UnknownPartition for one that is gone."""

    def marks(self, at: Mapping[int, int]) -> dict[int, str]:
        """By partition id, the mark (`model.marks`) of the batch that holds the offset before this one.

        Partitions are missing of which that batch is not kept. UnknownPartition for one that is gone.
        """

    def removed(self, partition_ids: Collection[int]) -> dict[int, int]:
        """Where those of these partitions ended that were sealed and removed; the others are missing."""

    def offset_at(self, partition_id: int, time_ms: int) -> int:
        """The offset of the first batch appended at `time_ms` or later; the end if there is none."""

    def stamped(self, partition_id: int, at_least: int | None, start: int) -> StoredBatch | None:
        """The first batch from `start` on with a message whose own time is that or later, if there is one.

        `at_least` None: the first with the newest time. Times of messages need not rise: all are looked at.
        """

    def trim(self, partition_id: int, below: int) -> int:
        """Raise the start of the log; never lowers it. Returns the start. Deletes nothing yet (I19)."""

    def is_volatile(self, partition_id: int) -> bool:
        """Return whether the partition's topic is volatile; the database is asked once."""

    def skip_lost(self, partition_id: int) -> int:
        """Raise the start of a volatile log over what a crash has taken; returns the start."""

    def sweep(self, partition_id: int, *, rows: int, appended_before: int | None = None) -> int:
        """Delete up to `rows` batches that lie wholly below the start. Returns how many.

        Batches appended at `appended_before` or later stay, and with them their ids (R32).
        """

    def expire_by_limits(self, partition_id: int, *, before_ms: int, keep_bytes: int) -> int:
        """The start this partition would have if only age and size decided."""

    def forget_producers(self, idle_since_ms: int, *, moving: Iterable[int] = ()) -> int:
        """Drop the sequences of producers silent since then, but not of these. Returns how many."""

    def edges(
        self, partition_ids: Collection[int] | None = None, *, sealed: bool = False
    ) -> dict[int, Bounds]:
        """Return what is kept of these partitions, or of all, in a few cheap reads: a hint.

        Those that never had a message, are gone, or whose shard is away, are missing. `sealed`: those alone
        that are.
        """

    def news(self, of: Collection[int] | None = None) -> News:
        """The version of the catalog and the ends of these partitions, or of all, in one cheap read."""


class Catalog(Protocol):
    """Topics, routes and groups. Every change is flushed and bumps the catalog's version."""

    def version(self) -> int:
        """Grows with every change; one cheap read."""

    def incarnation(self) -> str:
        """Tells this queue from others, and from itself before the last `restored`; one cheap read."""

    def restored(self) -> str:
        """Somebody says that the queue was restored from a backup: a new incarnation. Flushed."""

    def create_topic(self, name: str, settings: TopicSettings, partitions: int) -> Topic:
        """TopicExists if there is one of that name."""

    def topic(self, name: str) -> Topic:
        """UnknownTopic if there is none."""

    def topics(self, only: Collection[str] | None = None) -> list[Topic]:
        """All of them, or those of these names that there are, by name."""

    def names(self, beginnings: Collection[str] | None = None) -> list[str]:
        """The names of all topics, or at least of those that begin so; one cheap read."""

    def count_topics(self, prefix: str, suffix: str) -> int:
        """How many there are whose names begin and end so; one cheap read."""

    def alter_topic(self, name: str, settings: TopicSettings) -> Topic: ...

    def delete_topic(self, name: str) -> list[int]:
        """Forget the topic and its groups; returns its partitions, whose logs `drop_log` removes."""

    def dropped(self) -> list[int]:
        """Partitions of deleted topics, and of topics never finished, whose logs are still there."""

    def drop_log(self, partition_id: int) -> None:
        """Remove an emptied log."""

    def create_group(self, topic: str, name: str, settings: GroupSettings) -> Group:
        """Make the group and, in the same transaction, turn its start into offsets (I9)."""

    def group(self, topic: str, name: str) -> Group: ...
    def groups(self, topic: str) -> list[Group]: ...

    def groups_of(self, topic_ids: Collection[int] | None = None) -> list[Group]:
        """Return the groups of these topics, or of all, in a few reads."""

    def alter_group(self, topic: str, name: str, settings: GroupSettings, paused: bool) -> Group: ...

    def delete_group(self, topic: str, name: str, *, only: int | None = None) -> Group:
        """`only`: if it is still the group of that id; else UnknownGroup."""

    def reset_group(self, topic: str, name: str, start: Start) -> Group:
        """New start offsets under a new generation; progress follows when it is next touched.

        Offsets by partition move the partitions that they name. In the others nothing changes: what is
        unsettled there stays so, in the same hands, and goes on under the new generation. There are two
        generations then: what is fenced waits in the one between, in which no verb is asked for.
        """

    def start_of(self, group_id: int, partition_id: int) -> tuple[int, int]:
        """The group's generation and its start in the partition (0 for partitions made later).

        UnknownGroup if the group is gone.
        """

    def origin_of(self, group_id: int, partition_id: int) -> Origin:
        """Return a group's start in a partition, and since which generation it counts (0 if made later)."""


class Routes(Protocol):
    """Changes of routes: one at a time for a topic, each resumable by anybody (R26, I11).

    The steps of a change: `begin`, `make`, `Log.seal` for each partition it seals, `activate`. All but the
    first may be repeated. Instead of being activated it may be turned back.
    """

    def changes(self) -> list[Change]:
        """Return the changes that are under way."""

    def change_of(self, topic: str) -> Change | None: ...

    def history(self, topic: str) -> list[Route]:
        """Every version of the topic's route, the oldest first; partitions of them may be gone."""

    def begin(self, draft: Draft) -> Change:
        """Write down what is going to be done. Partitions that open get their numbers and ids.

        RouteConflict if a change is under way, or the route's version is not the draft's; InvalidSetting
        if there is no such shard.
        """

    def take(self, change: Change, idle_ms: int) -> bool:
        """Take over a change that nobody has worked on for so long; return whether it is the caller's now."""

    def make(self, change: Change) -> None:
        """Make the logs of the partitions that open, as far as they are missing."""

    def activate(self, change: Change, ends: Mapping[int, int] | None = None) -> Topic:
        """The next version, with the lineage of what opens; the change is no more.

        `ends`: of what is sealed, as `Log.seal` said, if the topic is one for Kafka clients: what opens gets
        its origin by that (I28). RouteConflict if it was finished or replaced by somebody else.
        """

    def origins(self, topic_id: int) -> dict[int, int]:
        """Return the origin of every partition of the topic that has another than 0, by id (I28)."""

    def turn_back(self, change: Change, sealed: Collection[int]) -> Change | None:
        """Replace the change by one that renews these partitions, and them alone (I11).

        None if none of them is in the route: then no change is under way any more. RouteConflict as above.
        """

    def remove(self, partition_id: int) -> None:
        """Remove the emptied log of a sealed partition; its row and sequences stay (I11)."""


class Progress(Protocol):
    """Cursors and deliveries. Every verb locks the progress row of its group and partition first (I1)."""

    def peek(self, group: Group, partition_ids: Sequence[int]) -> dict[int, Peek]:
        """Where the group is, without a lock: a hint. Partitions never polled since a reset are missing."""

    def dues(self, of: Collection[int] | None = None) -> dict[int, int]:
        """By group, the moment before which none of its deliveries is due; one cheap read.

        `of`: of these groups alone.
        """

    def started_ms(self) -> int:
        """When the database was started, if acks may have been lost then (I8); else 0."""

    def held_by(self, group_id: int, token: int) -> set[int]:
        """Partitions of which this token holds something: a hint, without a lock."""

    def poll(
        self, group: Group, partition_id: int, ask: Ask, *, log_start: int = 0, waited_ms: int | None = None
    ) -> Granted:
        """Hand out what is due and new messages, as `model.delivery.poll` decides.

        What lies below `log_start` is gone, and passed over. `waited_ms` is how long the first new
        message has waited, for the measures.

        A repeated poll with the same token returns the same deliveries under a new lease (I6), whose end is
        never that of the one before: so `give_back` can tell them apart. A first hand-out may be unflushed;
        a redelivery, a stamp, and a hand-out that settles at once are flushed (I8). GenerationChanged once
        the progress is of a newer generation than `group`: from `rewind`, or from the first verb of the reset
        group on. UnknownGroup if the group and its progress are gone.
        """

    def settle(
        self, group: Group, partition_id: int, token: int, settlements: Sequence[Settlement]
    ) -> Settled:
        """Settle what `token` holds. What is settled already is no error (I7).

        What is not settled and not held by `token` comes back as lost: it is in other hands, waits, or
        was handed out by a poll that a crash forgot (I8).
        """

    def visit(self, group: Group, visits: Sequence[Visit]) -> list[Visited | StoreUnavailable]:
        """Settle for several tokens, and then poll, in several partitions of a group, each named once.

        All of it is one transaction on each shard. Where there are several shards and one is away, the visits
        meant for it have its error. A visit polls only for groups that are not ordered.
        """

    def extend(self, group: Group, partition_id: int, token: int, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Renew leases; returns the spans that are not held any more: lost, or settled by whomever."""

    def give_back(self, group: Group, partition_id: int, token: int, until: int) -> int:
        """Take back what a poll granted and nobody received; returns how many messages. Not an attempt.

        Only what nobody has renewed since: `until` is what that very poll said (`Granted.until`). A repeated
        poll renews what its token holds, so what another broker has answered with meanwhile stays (I6). In
        an ordered group the partition is handed over as a whole, or not at all.
        """

    def poll_ordered(
        self,
        group: Group,
        partition_id: int,
        ask: OrderedAsk,
        *,
        log_start: int = 0,
        waited_ms: int | None = None,
    ) -> Granted:
        """Poll for a group in mode "ordered", as `model.ordered` decides (I5, I6).

        An asker that expects nothing takes the partition if nobody holds it, or if its holder's lease has
        passed: what that one had received then comes as suspects. If it is refused, nothing is granted and
        `Granted.holder` says who holds it. That may be nobody, if the asker expects an offset and is not the
        holder (any more): it drops what it has of the partition and asks anew. `settle` and `extend` take
        the holder's token; `extend` renews the holder's lease, whatever the spans, and all of them are lost
        if it is not the holder.

        A delivery's `visible_at` is its not-before: its key waits until then; that of a stopped message is
        `model.ordered.FAR`. When somebody restarts, skips or drops a stopped message that the holder has
        received, it is told to hand the partition over (`Granted.recall`, and nothing else; `Peek.recalled`),
        in every poll until it does: the next one receives everything.

        While a message of a delivery that is `alone` can be handled, its holder begins nothing else and asks
        for nothing: once it asks for more, what it had alone is in company. What waits for its time, or is
        behind such a one of its key, leaves the hands empty.
        """

    def hand_over(self, group: Group, partition_id: int, token: int) -> None:
        """End this holder's lease on the partition; flushed. Nothing happens if it is not the holder.

        What it has not settled goes to the next holder as it is: no attempt is counted.
        """

    def lines(self, group: Group, partition_id: int) -> list[Line]:
        """Return what is parked behind failing messages of its key, lowest first; without a lock (I27).

        A line is made, and claims more, by a settlement of kind PARK of the holder's; the offsets that it
        claims are acked in the same call, and are unsettled for as long as the line has them: they count for
        `committed`, `backlog` and `drain`. A holder that expects nothing is told the lines with its poll.
        """

    def unpark(
        self,
        group: Group,
        partition_id: int,
        token: int,
        member: str,
        line_id: int,
        spans: Sequence[Span],
        upto: int,
        *,
        on_delivery: bool = False,
    ) -> Granted:
        """Take messages out of a line, into the holder's hands: all of its key's up to the offset `upto`.

        The store cannot see keys: the caller looked for them in the log, and names their offsets. All are
        below the one that the holder expects next: from there on `poll_ordered` would send them again.
        Repeated, it returns the same deliveries (I6). `Granted.holder` says who holds the partition if it is
        another, and `draining` that the holder has to receive what comes before the line first (I5).
        """

    def stopped(self, group: Group, partition_id: int, *, limit: int, after: int = -1) -> list[Delivery]:
        """Ordered groups: what stopped its key, lowest offset first, of the offsets behind `after`.

        At most `limit` deliveries; the first may begin before. Without a lock. `failing_since` says since
        when it holds its key, `spent` how often it was tried.
        """

    def restart_stopped(self, group: Group, partition_id: int, spans: Sequence[Span] | None = None) -> int:
        """Ordered groups: stopped messages count their attempts anew and come again now; flushed.

        With `spans`, those alone. What is not stopped (any more) stays as it is, so once more is harmless.
        Returns how many messages that were.
        """

    def skip_stopped(
        self, group: Group, partition_id: int, stamp: Stamp, spans: Sequence[Span] | None = None
    ) -> tuple[Delivery, ...]:
        """Ordered groups: let stopped messages leave for another topic: stamped, and the caller moves
        them now (I12). With `spans`, those alone.

        Their keys go on: a holder that has received them is told to hand the partition over.
        """

    def drop_stopped(self, group: Group, partition_id: int, spans: Sequence[Span] | None = None) -> int:
        """Ordered groups: settle stopped messages, of these spans or all; return how many they were."""

    def drain(self, group: Group, partition_id: int) -> bool:
        """Return whether the group has settled all of a sealed partition, or it is gone; flushed if so (I10).

        An ordered group begins in a partition, by whatever verb, once it has drained those that the
        partition follows; until then the verb raises GateClosed.
        """

    def restamp(self, group: Group, partition_id: int, leaving: Delivery, stamp: Stamp) -> Delivery | None:
        """Give a stamped delivery another stamp: its target was sealed without it (I12); flushed.

        Returns it as it is now; None if it was moved, or stamped again, by somebody else.
        """

    def leaving(self, group: Group, partition_id: int, token: int) -> list[Delivery]:
        """All that is stamped with this identity, lowest offset first; without a lock."""

    def fence(self, group: Group, partition_ids: Sequence[int]) -> None:
        """Refuse verbs of earlier generations there from now on (I10).

        What earlier generations did is forgotten where the group starts anew. Where a reset has left it, it
        stays, in nobody's hands, until the gate opens again. What the group's own generation has begun stays.
        """

    def seize(self, group: Group, partition_id: int, ask: Ask, spans: Sequence[Span]) -> Granted:
        """Take exactly these offsets, as far as they are unsettled and in nobody's hands; flushed."""

    def backlog(
        self, group: Group, partition_ids: Sequence[int], *, open_spans: int = 0, open_from: int = 0
    ) -> list[Backlog]:
        """Measures without a scan. `open_spans`: list up to so many unsettled ranges below the cursor, and of
        these only what ends at the offset `open_from` or behind it.

        What lies below the start of the log no longer counts.
        """

    def committed(self, group_id: int, partition_id: int) -> int | None:
        """The lowest unsettled offset; None if the group never polled the partition since its last start.

        Then its start counts (`start_of`). UnknownGroup if there is progress but no group any more.
        """

    def rewind(self, group: Group, partition_ids: Sequence[int]) -> None:
        """Bring progress to the group's generation now, flushed: to its start, or as a reset has left it."""

    def cut_leases(self, group: Group, partition_ids: Sequence[int]) -> int:
        """Leases that end later than any given now are of a clock that was set back: cut them to that.

        Those of members too. Returns how many of messages and partitions there were.
        """

    def forget(self, group_id: int) -> None:
        """Remove all progress, deliveries and members of a deleted group."""

    def join(self, group_id: int, member: str, client: str, ttl_ms: int) -> None:
        """Enter or renew a member."""

    def renew_each(self, members: Sequence[tuple[int, str, int]]) -> list[tuple[int, str]]:
        """Renew (group id, member, ttl in ms) each, in one transaction; returns those that are not there."""

    def leave(self, group_id: int, member: str) -> None: ...

    def members(self, group_id: int) -> list[Member]:
        """Live members. Those whose time has passed are removed by and by."""

    def members_of(self, group_ids: Collection[int]) -> dict[int, list[Member]]:
        """Return the live members of many groups, in a few reads. Groups without any are missing."""

    def forget_dead(self, since_ms: int) -> int:
        """Remove members whose time had passed at that moment, of all groups. Returns how many."""


class Store(Protocol):
    log: Log
    catalog: Catalog
    routes: Routes
    progress: Progress
    usage: Usage
    schedule: Schedule
    duties: Duties
    brokers: Brokers
    access: Access
    audit: Audit
    rates: Rates
    lanes: Lanes
    staging: Staging
    kafka_groups: KafkaGroups

    @property
    def at_once(self) -> AtOnce | None:
        """Runs verbs that may not wait; None: every verb may have to."""

    def version(self) -> Hashable | None:
        """Return what is another value once anybody else has changed a durable log, a topic or progress: who
        is to wait for nothing, and has seen it before, need not read again. None: that takes a query."""

    def others_version(self) -> Hashable | None:
        """Return the same of all that there is, volatile topics too. None: it cannot be told."""

    def now_ms(self) -> int:
        """The store's clock."""

    def watch(self) -> Watcher: ...
    def close(self) -> None: ...

    # Shards. A store on one database has one, whose name is "".
    def parts(self) -> Mapping[str, Store]:
        """The store as each shard sees it, by name: its own schedule, duties, clock, news and dues, for who
        works on one shard by itself (writers, watchers, movers). All else in a part is that of the whole."""

    def shards(self) -> list[ShardState]:
        """Return what each shard holds; the first comes first."""

    def set_shard(self, name: str, state: str) -> None:
        """ "open": it takes new partitions; "draining": it takes none. Flushed."""

    def shard_of(self, partition_id: int) -> str: ...

    def known_shard(self, partition_id: int) -> str | None:
        """Return a partition's shard from memory; None if it has to be asked for."""

    def present(self, partition_ids: Iterable[int]) -> list[int]:
        """Return those of these partitions whose shard answers, as far as is known."""

    def on_return(self, told: Callable[[], None]) -> None:
        """Is called, in any thread, when a shard that was away answers again."""

    def add_shard(self, name: str, address: Address) -> None:
        """One more, while the store is in use; it may be away. InvalidSetting if it cannot be that shard."""
