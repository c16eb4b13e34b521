"""Breaks Postroom on purpose: every break must be found by a seed, or the simulator proves little.

    python -m tests.simulation --break flush --seeds 500
    python -m tests.simulation --breaks --seeds 2000

Each break is an invariant and a few lines that undo what keeps it; applied in the simulator's processes only.
What no simulated world can reach is named, with the tests that can.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from postroom.broker.deliver import readable
from postroom.broker.topology.route_changes import RouteChanges
from postroom.client.consumer import consumer, fetch
from postroom.client.forward.outbox_source import OutboxSource
from postroom.client.forward.spool_file import SpoolFile
from postroom.client.producer import appending
from postroom.clock import SteadyClock
from postroom.errors import StoreUnavailable
from postroom.model.delivery import delivery, ordered
from postroom.model.kafka_group import ClassicGroup, Generation, GroupError
from postroom.model.messages import batch, sequence
from postroom.store.contract import Append, Appended, Origin
from postroom.store.dialects import sqlite
from postroom.store.sql import staging
from postroom.store.sql.catalog.catalog import SqlCatalog
from postroom.store.sql.log.dedup_append import DedupPass
from postroom.store.sql.log.log import SqlLog
from postroom.store.sql.progress import ordered as ordered_store
from postroom.store.sql.progress.locked import Locked
from postroom.store.sql.progress.progress import SqlProgress
from postroom.store.sql.schedule import SqlSchedule
from postroom.store.sql.session import Area

from .plan import Plan
from .standard import Over
from .world import current_world

__all__ = ["BREAKS", "OUT_OF_REACH", "Break"]


class Break(NamedTuple):
    invariant: str
    what: str
    apply: Callable[[], None]
    needs: str = ""  # what a plan must have for its world to come near; words of `Plan.kinds`, or faults

    @property
    def on_shards(self) -> bool:
        return "two shards" in self.needs

    def concerns(self, plan: Plan) -> bool:
        """Whether a world of this plan can find it. Of the words between bars one is enough."""
        there = {*plan.kinds, *(fault.kind for fault in plan.faults)}
        return all(not there.isdisjoint(some.split("|")) for some in self.needs.split(", ") if some)


def _put(owner: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(owner, name, value)


# ---- sending ----


def _memory_goes_first() -> None:
    real = SqlLog.append

    def append(self: SqlLog, appends: Sequence[Append]) -> list[Any]:
        known = current_world().keep("known", set[tuple[int, ...]])
        (one, *more) = appends
        header = batch.read_header(one.batch)
        key = (header.producer_id, header.epoch, one.partition_id, header.base_sequence)
        if more or header.producer_id < 0:
            return real(self, appends)
        if key in known:
            return [Appended(0, 0, duplicate=True)]
        known.add(key)  # and only then is it stored
        return real(self, appends)

    _put(SqlLog, append=append)


def _repeats_are_new() -> None:
    _put(sequence, check=lambda state, epoch, first, count: None)


def _gaps_are_let_through() -> None:
    _put(sequence, _check_next=lambda expected, first: None, _check_start=lambda first: None)


def _route_is_followed_at_once() -> None:
    real = appending._outcome

    def outcome(one: Any, error: Any) -> Any:
        if isinstance(error, StoreUnavailable):  # nobody knows whether it is stored
            one.moved = True
            return appending.Refused()
        return real(one, error)

    _put(appending, _outcome=outcome)


def _forwarded_unstamped() -> None:
    for source in (SpoolFile, OutboxSource):
        _put(source, stamp=lambda self, batches: None)


def _every_relay_leads() -> None:
    """Each for itself: with its own stamps, in memory."""

    @contextmanager
    def leading(self: OutboxSource) -> Iterator[Any]:
        with self._begun() as theirs:
            yield theirs, []

    def take(self: OutboxSource, messages: int, size: int, without: Any) -> Any:
        with self._reading() as theirs:
            return self._oldest(theirs, messages, size, without)

    _put(OutboxSource, take=take, _leading=leading)


# ---- groups ----


def _new_holders_begin_at_the_cursor() -> None:
    real = ordered_store._unreceived

    def unreceived(locked: Locked, ask: Any, looks: bool) -> Any:
        return ([], True) if ask.expects is None else real(locked, ask, looks)

    _put(ordered_store, _unreceived=unreceived)


def _lost_replies_are_skipped() -> None:
    real = ordered_store._unreceived

    def unreceived(locked: Locked, ask: Any, looks: bool) -> Any:
        known = ask if ask.expects is None else replace(ask, expects=locked.row.cursor)
        return real(locked, known, looks)

    _put(ordered_store, _unreceived=unreceived)


def _tokens_are_counted() -> None:
    counted = Over(secrets, randbits=lambda bits: next(current_world().keep("tokens", itertools.count)) % 3)
    _put(fetch, secrets=counted)
    _put(consumer, secrets=counted)


def _expiries_count() -> None:
    real = delivery.expire

    def expire(one: Any) -> Any:
        return replace(real(one), failures=one.failures + 1, suspect=False)

    _put(delivery, expire=expire)
    _put(ordered, expire=expire)


def _start_is_looked_up_late() -> None:
    real = SqlCatalog.origin_of

    def origin_of(self: SqlCatalog, group_id: int, partition_id: int) -> Origin:
        with self._session.read(Area.LOG) as tx:
            row = tx.one("SELECT settings FROM postroom_groups WHERE id = ?", group_id)
            end = tx.one("SELECT next_offset FROM postroom_partitions WHERE id = ?", partition_id)
        found = real(self, group_id, partition_id)
        late = row is not None and "latest" in str(row[0]) and end is not None
        return replace(found, start=int(end[0])) if late and end is not None else found

    _put(SqlCatalog, origin_of=origin_of)


def _gate_is_open() -> None:
    """For brokers, which ask first, and for the store, which has the last word."""
    _put(SqlProgress, _pass_gate=lambda self, group, partition_id: None)
    unread = readable.Unread
    _put(unread, _open=lambda self, route, group, bounds, peeks: frozenset(bounds) - self._of(group))


def _control_batches_are_messages() -> None:
    real = batch.read_header
    _put(batch, read_header=lambda data: replace(real(data), control=False))


def _anybody_may_commit() -> None:
    _put(Generation, check_commit=lambda self, who: GroupError.NONE)
    _put(ClassicGroup, check_commit=lambda self, who, now: GroupError.NONE)


# ---- what survives ----


def _log_is_lazy() -> None:
    sqlite._SYNCHRONOUS[Area.LOG, True] = sqlite._SYNCHRONOUS[Area.LOG, False] = "NORMAL"


def _start_is_not_told() -> None:
    sqlite.SqliteDialect.started_ms = lambda self, connection: 0  # type: ignore[method-assign]


def _nothing_must_be_flushed() -> None:
    _put(Locked, must_flush=lambda self: None)


def _moves_are_not_resumed() -> None:
    _put(SqlSchedule, moves=lambda self: [])


def _ids_are_not_looked_at() -> None:
    _put(DedupPass, repeats=lambda self, append, base, now: ())


def _ids_end_with_a_partition() -> None:
    _put(DedupPass, _known_before=lambda self, kept, digests: False)


def _wall_clock_counts() -> None:
    _put(SteadyClock, now_ms=lambda self: current_world().wall_ns() // 1_000_000)


def _sealed_first_and_for_good() -> None:
    real = RouteChanges._activate

    def activate(self: RouteChanges, change: Any, ends: Any) -> Any:
        self._store.routes.make(change)
        return real(self, change, ends)

    nothing: Callable[..., Any] = lambda self, *args: []  # noqa: E731
    _put(RouteChanges, _prepare=nothing, _activate=activate, _sealed=nothing)


def _decisions_are_forgotten() -> None:
    _put(staging, _newest=lambda tx, query, batch: None, _decided=lambda tx, query, batch: set())


BREAKS = {
    "memory": Break(
        "I2",
        "a sequence is remembered before its batch is committed",
        _memory_goes_first,
        "failing|reply|cut",
    ),
    "repeats": Break("I3", "a repeated batch is stored again", _repeats_are_new, "commit|reply"),
    "gaps": Break(
        "I3",
        "a batch may come before the one before it",
        _gaps_are_let_through,
        "post|stream, glitch|failing|reply|commit",
    ),
    "reroute": Break(
        "I4",
        "an unresolved batch goes to the successor",
        _route_is_followed_at_once,
        "route changes, failing|reply|commit",
    ),
    "unsettled": Break(
        "I5",
        "a new holder is not handed what the last one left unsettled",
        _new_holders_begin_at_the_cursor,
        "ordered, kill|pause|cut",
    ),
    "reply": Break(
        "I6",
        "what a lost reply handed out is passed over",
        _lost_replies_are_skipped,
        "ordered, reply",
    ),
    "tokens": Break(
        "I7", "tokens are small numbers, which come again", _tokens_are_counted, "several members"
    ),
    "flush": Break("I8", "a send is confirmed before its batch is flushed", _log_is_lazy, "power"),
    "start": Break(
        "I8", "members are not told that the database was started again", _start_is_not_told, "power, served"
    ),
    "lazy": Break(
        "I8",
        "a change of holder and a redelivery are not flushed",
        _nothing_must_be_flushed,
        "power, ordered",
    ),
    "latest": Break(
        "I9", "where a group starts is looked up at its first poll", _start_is_looked_up_late, "latest"
    ),
    "gate": Break(
        "I10",
        "a successor is read before its predecessor is settled",
        _gate_is_open,
        "ordered, route changes",
    ),
    "resume": Break(
        "I12", "a move that was stamped is not resumed", _moves_are_not_resumed, "delayed, commit|kill"
    ),
    "ids": Break("I13", "ids are not looked at", _ids_are_not_looked_at, "ids, kill|commit|cut|pause"),
    "window": Break(
        "I13",
        "the window of ids ends with its partition",
        _ids_end_with_a_partition,
        "ids, route changes, kill|commit|cut|pause",
    ),
    "suspects": Break(
        "I14",
        "every expiry counts as an attempt, for all messages",
        _expiries_count,
        "poison|kill|pause|cut",
    ),
    "stamps": Break(
        "I12",
        "what is forwarded is not stamped before it is sent",
        _forwarded_unstamped,
        "spool|outbox, kill|commit|power",
    ),
    "leader": Break("I21", "every relay of an outbox sends", _every_relay_leads, "several relays"),
    "generation": Break(
        "I28",
        "whoever is no member any more may commit",
        _anybody_may_commit,
        "kafka, several members, pause|cut",
    ),
    "clock": Break("I16, I26", "leases count by the wall clock", _wall_clock_counts, "clock"),
    "control": Break(
        "I18", "a control batch is taken for a message", _control_batches_are_messages, "route changes"
    ),
    "probe": Break(
        "I11",
        "partitions are sealed before their successors are there, and stay so if those cannot be made",
        _sealed_first_and_for_good,
        "two shards, route changes, away",
    ),
    "decision": Break(
        "I20",
        "what a job has decided is forgotten",
        _decisions_are_forgotten,
        "staged, reply|commit|kill",
    ),
}
"""By name."""

OUT_OF_REACH = {
    "I1": "SQLite has one writer, who locks everything: two that look first fail, and are repeated. "
    "On servers: `tests/contract/store`, `testing/store_contract/concurrency.py`",
    "I15": "a stopped process keeps SQLite's lock, and nobody can take it: `tests/integration/servers`",
    "I17": "no rates, and no batch near a limit: `tests/unit/model`, `tests/model`",
    "I19": "is about speed: `bench`",
}
"""By invariant, why no simulated world can find a break of it, and what can."""
