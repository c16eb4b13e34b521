"""The store contract: what survives, in domain verbs. Any database that keeps it can carry Penstock.

Four small interfaces, one per concern, gathered in `Store`. All of it is synchronous and safe to call
from any thread; each verb is one short transaction on one shard. A verb raises a `PenstockError` from
the tree and then has changed nothing. Times are the store's own clock, in milliseconds.

`penstock.testing.store_contract` holds the suite that every implementation passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..errors import PenstockError
from ..model.delivery import Ask, Settlement, Span
from ..model.settings import GroupSettings, Start, TopicSettings
from .values import (
    Append,
    Appended,
    Backlog,
    Bounds,
    Granted,
    Group,
    Member,
    News,
    Peek,
    Settled,
    StoredBatch,
    Topic,
)

__all__ = [
    "Append",
    "Appended",
    "Backlog",
    "Bounds",
    "Catalog",
    "Duties",
    "Granted",
    "Group",
    "Log",
    "Member",
    "News",
    "Peek",
    "Progress",
    "Settled",
    "Store",
    "StoredBatch",
    "Topic",
    "Watcher",
]


class Log(Protocol):
    """Batches of a partition: dense offsets, in the order of commits."""

    def append(self, appends: Sequence[Append]) -> list[Appended | PenstockError]:
        """Store batches in one flushed transaction, in the given order.

        Durable when this returns (R1). Offsets are dense and given under the partition's lock, so no
        reader ever sees a hole that fills later. A batch that carries a producer's sequence is stored
        at most once: a repeat returns its first offset, also on a sealed partition (I3). A refused batch
        has its error in its place in the list; the others are stored. If the database itself fails,
        nothing is stored and the error is raised.
        """

    def read(self, partition_id: int, offset: int, *, max_messages: int, max_bytes: int) -> list[StoredBatch]:
        """Batches from the one that contains `offset` on; at least one if there is any.

        Below what is kept it begins with the first batch that is. What was trimmed but not swept yet is
        still read: `bounds` tell where the log starts. UnknownPartition if the log is gone.
        """

    def bounds(self, partition_ids: Iterable[int]) -> dict[int, Bounds]:
        """What is kept of each partition. UnknownPartition for one that is gone."""

    def offset_at(self, partition_id: int, time_ms: int) -> int:
        """The offset of the first batch appended at `time_ms` or later; the end if there is none."""

    def trim(self, partition_id: int, below: int) -> int:
        """Raise the start of the log; never lowers it. Returns the start. Deletes nothing yet (I19)."""

    def sweep(self, partition_id: int, *, rows: int) -> int:
        """Delete up to `rows` batches that lie wholly below the start. Returns how many."""

    def expire_by_limits(self, partition_id: int, *, before_ms: int, keep_bytes: int) -> int:
        """The start this partition would have if only age and size decided."""

    def forget_producers(self, idle_since_ms: int) -> int:
        """Drop the sequences of producers silent since then. Returns how many."""

    def news(self) -> News:
        """The version of the catalog and the ends of all partitions, in one cheap read."""


class Catalog(Protocol):
    """Topics, routes and groups. Every change is flushed and bumps the catalog's version."""

    def version(self) -> int:
        """Grows with every change; one cheap read."""

    def create_topic(self, name: str, settings: TopicSettings, partitions: int) -> Topic:
        """TopicExists if there is one of that name."""

    def topic(self, name: str) -> Topic:
        """UnknownTopic if there is none."""

    def topics(self) -> list[Topic]: ...

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

    def alter_group(self, topic: str, name: str, settings: GroupSettings, paused: bool) -> Group: ...

    def delete_group(self, topic: str, name: str) -> Group: ...

    def reset_group(self, topic: str, name: str, start: Start) -> Group:
        """New start offsets under a new generation; progress follows when it is next touched."""

    def start_of(self, group_id: int, partition_id: int) -> tuple[int, int]:
        """The group's generation and its start in the partition (0 for partitions made later).

        UnknownGroup if the group is gone.
        """


class Progress(Protocol):
    """Cursors and deliveries. Every verb locks the progress row of its group and partition first (I1)."""

    def peek(self, group: Group, partition_ids: Sequence[int]) -> dict[int, Peek]:
        """Where the group is, without a lock: a hint. Partitions never polled since a reset are missing."""

    def dues(self) -> dict[int, int]:
        """By group, the moment before which none of its deliveries is due; one cheap read."""

    def held_by(self, group_id: int, token: int) -> set[int]:
        """Partitions of which this token holds something: a hint, without a lock."""

    def poll(
        self, group: Group, partition_id: int, ask: Ask, *, log_start: int = 0, waited_ms: int | None = None
    ) -> Granted:
        """Hand out what is due and then new messages, as `model.delivery.poll` decides.

        What lies below `log_start` is gone, and passed over. `waited_ms` is how long the first new
        message has waited, for the measures.

        A repeated poll with the same token returns the same deliveries under a new lease (I6). A first
        hand-out may be unflushed; a redelivery, a stamp, and a hand-out that settles at once are flushed
        (I8). GenerationChanged once the progress is of a newer generation than `group`: from `rewind`, or
        from the first verb of the reset group on. UnknownGroup if the group and its progress are gone.
        """

    def settle(
        self, group: Group, partition_id: int, token: int, settlements: Sequence[Settlement]
    ) -> Settled:
        """Settle what `token` holds. What is settled already is no error (I7).

        What is not settled and not held by `token` comes back as lost: it is in other hands, waits, or
        was handed out by a poll that a crash forgot (I8).
        """

    def extend(self, group: Group, partition_id: int, token: int, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Renew leases; returns the spans that are lost."""

    def seize(self, group: Group, partition_id: int, ask: Ask, spans: Sequence[Span]) -> Granted:
        """Take exactly these offsets, as far as they are unsettled and in nobody's hands; flushed."""

    def backlog(self, group: Group, partition_ids: Sequence[int], *, open_spans: int = 0) -> list[Backlog]:
        """Measures without a scan. `open_spans`: list up to so many unsettled ranges below the cursor.

        What lies below the start of the log no longer counts.
        """

    def committed(self, group_id: int, partition_id: int) -> int | None:
        """The lowest unsettled offset; None if the group never polled the partition in its generation.

        Then its start counts (`start_of`). UnknownGroup if there is progress but no group any more.
        """

    def rewind(self, group: Group, partition_ids: Sequence[int]) -> None:
        """Bring progress to the group's generation and start now, flushed."""

    def forget(self, group_id: int) -> None:
        """Remove all progress, deliveries and members of a deleted group."""

    def join(self, group_id: int, member: str, client: str, ttl_ms: int) -> None:
        """Enter or renew a member."""

    def leave(self, group_id: int, member: str) -> None: ...

    def members(self, group_id: int) -> list[Member]:
        """Live members. Those whose time has passed are removed by and by."""


class Duties(Protocol):
    """Leases for background work: at most one holder each (I12)."""

    def acquire(self, duty: str, holder: str, lease_ms: int) -> bool: ...

    def release(self, duty: str, holder: str) -> None: ...


class Watcher(Protocol):
    """Tells whether anybody has committed: other processes, and this store's own threads too.

    A hint that may come without cause, but never fails to come: whoever looks after `changed` said so
    sees what was committed. For one thread. Its owner closes it, before the store.
    """

    def changed(self) -> tuple[bool, bool]:
        """Since the last call: (log, catalog or duties; progress). The first call says yes to both."""

    def close(self) -> None: ...


class Store(Protocol):
    log: Log
    catalog: Catalog
    progress: Progress
    duties: Duties

    def now_ms(self) -> int:
        """The store's clock."""

    def watch(self) -> Watcher: ...

    def close(self) -> None: ...
