"""The store contract beside log, progress and catalog: what background work and served queues need.

Background work has the schedule, the staging, and the leases that say who may do what. Served queues have
brokers, those who may use them, and how fast; all of that is kept on the first shard. Exported by `contract`:
import them from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...model.access import Permission, Principal
from ...model.audit import Asker, AuditEntry, State
from ...model.moves.schedule import DelayedPosition, DelayedRow
from ...model.moves.staging import Decision, OpenMove, Progress, StagedQuery, Wish
from ...model.policy.rate import Rate
from ...model.policy.slow_lane import LaneState, Seen
from .values import Appended, Finished, Group, KafkaNode, Move, Process, ServedBroker

__all__ = [
    "Access",
    "Audit",
    "Brokers",
    "Duties",
    "Lanes",
    "Rates",
    "Schedule",
    "SentAppend",
    "Staged",
    "Staging",
    "Usage",
    "Watcher",
]


class Schedule(Protocol):
    """Delayed messages until they are due; what `Log.append` was given with `due_at` waits here (R35).

    Whoever holds the lease `model.schedule.DUTY` moves them, in three steps (I12): `stamp`, `Log.append`
    under the stamp's identity, `finish`, which may be one with the next `stamp`. Each step may be repeated
    by the next holder.
    """

    def next_due(self, *, since: int = 0, without: Collection[int] = ()) -> int | None:
        """When the next one is due that is due from `since` on; not of partitions in `without`. Cheap."""

    def due(
        self,
        *,
        messages: int,
        max_bytes: int,
        since: int = 0,
        without: Collection[int] = (),
        skip: Collection[int] = (),
    ) -> list[DelayedRow]:
        """Rows that are due now by the store's clock, up to these limits, but one at least.

        The longest due first, those of one moment in the order they came. `skip`: rows to leave out.
        """

    def rows(self, ids: Iterable[int]) -> dict[int, DelayedRow]:
        """Return those of these rows that are still there."""

    def stamp(
        self,
        holder: str,
        move: Move,
        rows: Iterable[DelayedRow],
        before: Finished | None = None,
    ) -> bool:
        """Write down what is going to be stored where; flushed. The move's id is the caller's choice.

        False if any of the rows was cancelled meanwhile, in whole or in part: then nothing is stamped.
        `before`: finish that move first, in any case. LeaseLost if `holder` does not hold the lease.
        """

    def moves(self) -> list[Move]:
        """Moves that are not finished, the oldest first."""

    def finish(self, holder: str, finished: Finished) -> None:
        """Remove and change rows, and end the move; flushed.

        Nothing happens if the move was finished by somebody else. LeaseLost as in `stamp`.
        """

    def listed(
        self, topic_id: int, *, since: DelayedPosition | None = None, messages: int, max_bytes: int
    ) -> list[DelayedRow]:
        """Return rows of the topic, the soonest first, up to these limits, but one if there is any.

        `since`: from that position on, the row there included. Costs what it returns, however many wait.
        Of several databases those that answer; of one moment, database by database.
        """

    def cancel(self, topic_id: int, digest: bytes) -> bool:
        """Remove every waiting message of the topic with that id (`model.dedup.digest`); flushed.

        False if there is none that is not stamped.
        """

    def purge(self, topic_id: int) -> int:
        """Remove all waiting messages of the topic that are not stamped; returns how many."""

    def delayed(self) -> dict[int, int]:
        """By topic, how many messages wait; without a scan."""


class Duties(Protocol):
    """Leases for background work: at most one holder each (I12)."""

    def acquire(self, duty: str, holder: str, lease_ms: int) -> bool: ...

    def release(self, duty: str, holder: str) -> None: ...


# For jobs that publish exactly once: staging, decisions and how far they are (I20). All of it is kept on the
# first shard.


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch of messages that waits to be published. A partition of the newest route: it may be another."""

    topic_id: int
    partition_id: int
    batch: bytes = field(repr=False)  # a verified RecordBatch v2


class Staging(Protocol):
    """Every verb is flushed.

    A decision is published in moves of three steps (I12): `stamp`, `Log.append` under the decision's producer
    and the stamp's sequences, `finish`, which may be one with the next stamp. Anybody may go on with it, and
    several at once: each change of it has a number, and whoever does not know the last one changes nothing.
    """

    def put(
        self, query: str, batch: int, segment: str, number: int, rows: Sequence[Staged], owner: str = ""
    ) -> None:
        """Stage batches; they are numbered from `number` on within the segment. A repeat changes nothing.

        The query belongs to the `owner` if it is nobody's yet; PermissionDenied if it is another's, as
        `model.staging.owner_after` says. StagingConflict if the segment was decided: also of a repeat, once
        the rows are published.
        """

    def known(self, query: str) -> StagedQuery:
        """How far the query is, and whose."""

    def give(self, query: str, owner: str) -> bool:
        """Give a query to this owner from now on; False if there is no such query."""

    def decision(self, query: str, batch: int) -> Decision | None:
        """The newest revision."""

    def unfinished(self, query: str | None = None) -> list[Decision]:
        """Return the decisions that are not published, of all queries or of one; the oldest first."""

    def decide(
        self,
        query: str,
        batch: int,
        wish: Wish,
        producer_id: int,
        topics: Collection[int] | None = None,
        owner: str = "",
    ) -> Decision:
        """Write down what the batch consists of, if `model.staging` says so; else the recorded decision.

        The query is the `owner`'s, as in `put`.
        StagingConflict as it says there; if a segment is not there as the wish has it, or has messages for
        other than these topics; or if an earlier decision of the query is not published ("unfinished").
        """

    def next_rows(
        self, decision: Decision, *, messages: int, max_bytes: int, skip: Collection[int] = ()
    ) -> list[DelayedRow]:
        """Return what is to be published next, up to these limits, but one row at least; by segment."""

    def rows(self, ids: Iterable[int]) -> dict[int, DelayedRow]:
        """Return those of these rows that are still there."""

    def stamp(self, decision: Decision, move: OpenMove) -> Decision | None:
        """Write down what is going to be stored where. The decision as it is then.

        None: somebody else has gone on with it; look again.
        """

    def finish(
        self,
        decision: Decision,
        finished: Finished,
        progress: Progress,
        *,
        producer_id: int | None = None,
        move: OpenMove | None = None,
        done: bool = False,
    ) -> Decision | None:
        """Remove and change rows, and end the move; begin the next `move` with that, or none.

        `producer_id`: another one from now on. `done`: nothing is left, it is published. None as in `stamp`.
        """

    def drop(
        self,
        query: str,
        batch: int,
        segments: Collection[str] | None = None,
        topics: Collection[int] | None = None,
        owner: str | None = None,
    ) -> int:
        """Remove these segments of a batch, what they have for these topics, but for those decided.

        None: all. How many messages. PermissionDenied if the query is not the `owner`'s; None: do not ask.
        """

    def age(self, staged_ms: int, decision_ms: int, query_ms: int) -> tuple[int, int]:
        """Drop batches that nobody has staged for, or decided, for so long; forget decisions that are old.

        The newest batch of a query that has several is remembered for `query_ms`. How many messages, and how
        many decisions.
        """


class Brokers(Protocol):
    """Brokers that are served now (R2), and all processes that use the store, whether they serve or not.

    Need not be flushed: each enters itself again and again.
    """

    def enter(self, id: str, address: str, zone: str, started_at: int, ttl_ms: int) -> None:
        """Announce a broker: it lives for so long at least."""

    def leave(self, id: str) -> None: ...

    def live(self) -> list[ServedBroker]:
        """In the order in which they were started."""

    def enter_node(self, id: str, address: str, ttl_ms: int) -> int:
        """Announce that a broker listens for Kafka clients there; returns its number, which no other has."""

    def leave_node(self, id: str) -> None: ...

    def nodes(self) -> list[KafkaNode]:
        """Return the brokers that listen for Kafka clients now, by number."""

    def queue(self) -> str:
        """The UUID of the queue that they serve: no other has it."""

    def announce(self, process: Process, ttl_ms: int) -> None:
        """A process uses the store, for so long at least, and can reach these shards."""

    def withdraw(self, id: str) -> None:
        """Forget a process, which uses the store no more."""

    def announced(self) -> list[Process]:
        """Return the processes that use the store now, by name."""


class Access(Protocol):
    """Principals, each with the hash of a secret, or without one (""): R48. Every change is flushed.

    With `by` a change has its entry in the audit log, in the same transaction.
    """

    def add(self, principal: Principal, secret_hash: str, *, by: Asker | None = None) -> Principal:
        """PrincipalExists if there is one of that name: of two who make it at once, one does."""

    def put(self, principal: Principal, secret_hash: str | None, *, by: Asker | None = None) -> None:
        """Make a principal, or change its permissions; None: its secret stays (UnknownPrincipal if new)."""

    def permit(
        self,
        name: str,
        grant: Sequence[Permission],
        revoke: Sequence[Permission],
        *,
        by: Asker | None = None,
    ) -> Principal:
        """Change some of its permissions and leave the others. UnknownPrincipal if there is none."""

    def remove(self, name: str, *, by: Asker | None = None) -> bool: ...

    def by_secret(self, secret_hash: str) -> Principal | None: ...

    def by_name(self, name: str) -> Principal | None: ...

    def principals(self) -> list[Principal]:
        """By name."""

    def key(self) -> bytes:
        """A random secret of the queue, made when it is first asked for and never changed (I23)."""


class Audit(Protocol):
    """Administrative actions (`model.audit`). Every change is flushed; entries are never given another id."""

    def begin(
        self, by: Asker, action: str, topic: str, group: str, asked: State, before: State | None, most: int
    ) -> int:
        """Note that an action begins; returns its entry's id.

        Of entries there are no more than `most`, or a few: now and then the oldest go. Whoever has more than
        half of them makes room first, so that nobody can push out what others did.
        """

    def end(self, id: int, outcome: str, before: State | None, after: State | None) -> None:
        """Complete an entry. Of one that has gone meanwhile nothing is said."""

    def drop(self, id: int) -> None:
        """Take an entry back: nothing was changed."""

    def entries(
        self, *, limit: int, topic: str = "", who: str = "", since: int = 0, before: int = 0, after: int = 0
    ) -> list[AuditEntry]:
        """The newest entries, the newest first: of this topic, by them, begun since.

        `before`: only those with a lower id; `after`: with a higher one.
        """

    def trim(self, begun_before: int, most: int) -> int:
        """Forget entries that are older, and those beyond `most`; returns how many."""


class Rates(Protocol):
    """Limits in messages and bytes a second, shared by all who use the store (R40).

    What is spent of them need not survive. Of a limit that is changed nothing is spent. With a topic or a
    group its limits are deleted. `model.flow` decides.
    """

    def set(self, rate: Rate) -> None:
        """Make or change a limit, flushed; both 0: there is none any more. Bumps the catalog's version.

        UnknownTopic or UnknownGroup if what it is about is not there.
        """

    def all(self) -> list[Rate]:
        """By name."""

    def spend(
        self, rate: Rate, messages: int, bytes: int, *, owed_messages: int = 0, owed_bytes: int = 0
    ) -> int:
        """Take so much of what the rate gives; returns the moment (ms) from which on it may be used.

        It goes into debt rather than refuse (I17). What is owed was used before, and is counted first.
        `rate` is what the caller knows: it is not looked up.
        """

    def give_back(self, rate: Rate, messages: int, bytes: int) -> None:
        """Taken and not used; less than 0: used and not taken."""

    def debts(self) -> dict[str, int]:
        """By name, how many milliseconds whoever comes now has to wait; those that are open are missing.

        Of a broadcast group, the member that waits longest.
        """


class Lanes(Protocol):
    """Counts of what became of each source's messages, and which sources are slow (R42). Need not survive.

    With a group they are forgotten (`Progress.forget`). `model.lanes` decides.
    """

    def count(self, group: Group, counts: Sequence[tuple[int, Seen]]) -> LaneState:
        """Add what was counted, each at its moment, and decide by the group's policy. Nothing: only decide.

        What is older than the window is not counted. Beyond `MOST_SOURCES`, further sources are left out.
        """

    def state(self, group: Group) -> LaneState:
        """One cheap read."""


class Usage(Protocol):
    """Who uses groups, and how far all of them are."""

    def touch(self, group_id: int) -> bool:
        """Somebody uses the group; need not be flushed. False: it is being forgotten, make it anew."""

    def seen(self, of: Collection[int] | None = None) -> dict[int, int]:
        """By group, of these or of all, when it was last used. Groups that nobody ever used are missing."""

    def retire(self, group_id: int, idle_ms: int) -> bool:
        """Return whether the group may be forgotten: no live member, and not used for so long; flushed.

        From then on `touch` is refused. Of a group that nobody ever used the time begins now.
        """

    def marks(self) -> dict[int, tuple[int, ...]]:
        """By partition, numbers that are others once any group has settled something there, in one read.

        Partitions that nobody polls are missing.
        """

    def committed(self, groups: Sequence[Group], partition_ids: Sequence[int]) -> dict[int, dict[int, int]]:
        """By group and partition, the lowest unsettled offset, or the group's start; two cheap reads.

        `Progress.committed` of many at once. Of a group that is gone meanwhile it means nothing.
        """

    def bytes_from(self, positions: Sequence[Mapping[int, int]]) -> list[int]:
        """Return how many bytes are kept from each position (partition → offset) on, in a few reads.

        Part of a batch counts in part. UnknownPartition if one is gone.
        """


class SentAppend(Protocol):
    """A batch on its way to a server (`Log.send`), for one thread, which waits for nothing but the socket."""

    patience_s: float  # after so long without an answer it is to be abandoned

    @property
    def unsent(self) -> bool:
        """Some of it is still here: `answered` is to be asked also when the socket takes more."""

    def fileno(self) -> int:
        """The socket that can be read when something has come."""

    def answered(self) -> bool:
        """Read what has come, without waiting; return whether that is all. Then `result` is to be called."""

    def result(self) -> Appended | None:
        """Return what became of it. None: it is not known to be stored: give it to `append`, which finds out
        (I3)."""

    def abandon(self) -> None:
        """Nobody waits for the answer any more; whether it is stored is not known."""


class Watcher(Protocol):
    """Tells whether anybody has committed: other processes, and this store's own threads too.

    A hint that may come without cause, but never fails to come: whoever looks after `changed` said so
    sees what was committed. For one thread. Its owner closes it, before the store.
    """

    def changed(self) -> tuple[bool, bool]:
        """Since the last call: (log, catalog or duties; progress). The first call says yes to both.

        It may wait for a commit, for a second at most.
        """

    def wake(self) -> None:
        """End a wait in `changed`, as far as it can be ended; may be called by any thread, until `close`."""

    def close(self) -> None: ...
