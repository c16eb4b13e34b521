"""Batches: append under the partition's lock, read, trim.

A partition's log is in the area of its topic: `LOG`, or `VOLATILE`. What is remembered of message ids follows
the commits; nothing is cached here that could run ahead of one (I2).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ....config import DEFAULTS, Limits
from ....errors import CorruptBatch, PostroomError, StoreCorrupt, StoreError, StoreFull
from ....model.messages.batch import mark_of
from ....model.messages.sequence import shifted
from ....model.policy.bounds import make_room
from ...contract import Append, Appended, Bounds, News, SentAppend, StoredBatch
from ..catalog.catalog import SqlCatalog
from ..lists import blanks, each, parts
from ..schema import log_table
from ..session import Area, Session, Transaction, empties, verbs
from .append import Appending, PartitionKey, header_of, line_of, seal
from .dedup_append import DedupPass
from .id_window import NotPreparedError, Windows
from .lone_append import KnownEnds, LoneAppend, OtherwiseError, SentLone
from .lookups import (
    GONE,
    area_of,
    first_kept,
    first_row,
    log_of,
    reading_log,
    unknown_partition,
)

__all__ = ["Ends", "SqlLog"]


_MOST = 100_000  # partitions; of one that was not used for long nothing is noticed
_MOST_ASKED = 1000  # sets of partitions, as they are asked for together


class Ends:
    """Where partitions ended when this process last saw them: offsets never go back (R6).

    A failover to a server that lacks the last commits, or a file restored under a running process, loses
    messages that were confirmed, and would give their offsets to others. Whoever has seen the higher end
    notices, and stops: nothing is stored there or handed out until somebody has decided.

    InnoDB shows a commit to others before it is flushed, and a crash may take that back: nobody was told yet
    that it is stored. There an end that was only read counts when it is read again a while later.

    Any thread may use it. `expected` is asked before the database is, `saw` after the commit (I2).
    """

    def __init__(self, flushed_s: float) -> None:
        """`flushed_s`: a commit that others saw so long ago is on the disk."""
        self._flushed_s = flushed_s
        self._highest: dict[PartitionKey, int] = {}
        self._read: dict[PartitionKey, tuple[int, float]] = {}  # ends that may not be flushed, and since when

    def expected(self, keys: Iterable[PartitionKey]) -> dict[PartitionKey, int]:
        """Return the highest end that was seen of each; 0: none was."""
        return {key: self._highest.get(key, 0) for key in keys}

    def highest(self, key: PartitionKey) -> int:
        """Return the highest end that was seen of one; 0: none was."""
        return self._highest.get(key, 0)

    def saw(self, ends: Mapping[PartitionKey, int]) -> None:
        for key, end in ends.items():
            known = self._highest.get(key, 0)
            if not known:
                make_room(self._highest, _MOST)
            if end > known:
                self._highest[key] = end

    def read(self, ends: Mapping[PartitionKey, int], *, flushed: bool) -> None:
        """They were read. `flushed`: this database shows nothing that a crash could take back."""
        if flushed:
            self.saw(ends)
            return
        now = time.monotonic()
        for key, end in ends.items():
            before, since = self._read.get(key, (0, now))
            if end < before or not before:  # a crash took it back, or it is new here
                make_room(self._read, _MOST)
                self._read[key] = (end, now)
            elif now - since >= self._flushed_s:
                self.saw({key: before})
                self._read[key] = (end, now)

    @staticmethod
    def check(expected: Mapping[PartitionKey, int], found: Mapping[PartitionKey, int]) -> None:
        """StoreCorrupt if one of them ends before an offset that was given."""
        for key, end in found.items():
            if end < expected.get(key, 0):
                raise StoreCorrupt(
                    f"a partition ends at offset {end}, and offsets up to {expected[key] - 1} were given "
                    "before: the database is older than it was (a failover that lost commits, or a restored "
                    "copy), so confirmed messages are missing. Nothing more is stored or handed out there: "
                    "bring the newer database back; or accept the loss and start every process anew",
                    partition_id=key[1],
                )


_BoundsOf = tuple[tuple[Area, list[int], list[PartitionKey], str], ...]
"""By tables: the partitions that are in them, those whose ends no crash sets back (R3), and the statement."""

_BOUNDS = """SELECT p.id, COALESCE(t.log_start, 0), p.next_offset, p.state FROM postroom_partitions p
             LEFT JOIN postroom_trims t ON t.partition_id = p.id WHERE p.id IN ({marks})"""
_VERSION_AND_DUE = """SELECT value, (SELECT MIN(due_at) FROM postroom_schedule) FROM postroom_settings
                      WHERE name = 'catalog_version'"""
_ENDS = """SELECT id, next_offset FROM postroom_partitions WHERE state IN ('new', 'open', 'sealed')"""
_EDGES = """SELECT p.id, COALESCE(t.log_start, 0), p.next_offset, p.state FROM postroom_partitions p
            LEFT JOIN postroom_trims t ON t.partition_id = p.id WHERE p.next_offset > 0
            AND p.state IN ('new', 'open', 'sealed')"""
_HERE = " AND shard = ''"  # of those on other shards the first one knows nothing but the names
# `?` four times: from the batch at `start` on, below an offset, and no more bytes than asked for
_BATCHES = """SELECT base_offset, records, appended_at, batch FROM {log}
              WHERE base_offset >= ? AND base_offset < ? AND (base_offset = ? OR bytes_before + bytes <= ?)
              ORDER BY base_offset"""
_AT = "SELECT base_offset, bytes_before FROM {log} WHERE base_offset <= ? ORDER BY base_offset DESC LIMIT 1"
_FROM = "SELECT base_offset, bytes_before FROM {log} WHERE base_offset >= ? ORDER BY base_offset LIMIT 1"
# `?` once: the batch that holds an offset, or the last one before it; the CRC as `model.batch` has it
_MARK = """SELECT * FROM (SELECT {id} AS id, base_offset, records, SUBSTR(batch, 18, 4) AS crc FROM {log}
           WHERE base_offset <= ? ORDER BY base_offset DESC LIMIT 1) AS log_{id}"""
_MARKS_AT_ONCE = 50  # partitions of one statement
_REMOVED = "SELECT id, next_offset FROM postroom_partitions WHERE state IN ('sealed', 'removed')"
_MOVING = """SELECT producer_id FROM postroom_moves
             UNION SELECT producer_id FROM postroom_decisions WHERE published_at = 0"""
# `?`: from this offset on; with a message of this time or later
_STAMPED = """SELECT base_offset, records, appended_at, batch FROM {log}
              WHERE base_offset + records > ? AND last_ts >= ? ORDER BY base_offset LIMIT 1"""
_NEWEST_STAMP = """SELECT base_offset, records, appended_at, batch FROM {log}
                   WHERE base_offset + records > ? ORDER BY last_ts DESC, base_offset LIMIT 1"""
_KAFKA_SEQUENCES = """SELECT producer_id, state FROM postroom_sequences
                      WHERE partition_id = ? AND producer_id < 0"""
_INHERIT = "INSERT INTO postroom_sequences (producer_id, partition_id, state, seen_at) VALUES (?, ?, ?, ?)"
_NEVER = 2**62
_FEW = 16  # batches on the short way


class _Sent:
    """A lone append under way. Implements `contract.SentAppend`."""

    def __init__(self, log: SqlLog, lone: LoneAppend, connection: Any, sent: SentLone) -> None:
        self._log, self._lone, self._connection, self._sent = log, lone, connection, sent
        self.patience_s, self.fileno = sent.patience_s, sent.fileno
        self._failed = False

    @property
    def unsent(self) -> bool:
        return self._sent.unsent and not self._failed

    def answered(self) -> bool:
        try:
            return self._sent.answered()
        except Exception:  # the connection is lost, most likely: `append` finds out
            self._failed = True
            return True

    def result(self) -> Appended | None:
        try:
            stored = not self._failed and self._sent.stored()
        except Exception:
            stored = False
        return self._log._answered(self._lone, self._connection, self._sent.at if stored else None)

    def abandon(self) -> None:
        self._log._answered(self._lone, self._connection, None)


@verbs
class SqlLog:
    def __init__(self, session: Session, catalog: SqlCatalog, limits: Limits = DEFAULTS) -> None:
        self._session = session
        self._windows = self.windows = Windows(session, catalog, limits)
        self._ends = Ends(limits.tuning.store.flushed_s)
        self._bounds_known: dict[tuple[int, ...], _BoundsOf] = {}  # how to ask, by what is asked for
        self._remembered = limits.remembered_batches
        self._known = KnownEnds(limits.remembered_batches)

    # ---- append ----

    def append(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        found: dict[int, Appended | PostroomError] = {}
        try:
            self._session.dialect.admit()
            if short := self._short(appends):
                stored = self._append_short(short)
                if stored is not None:
                    return stored
            areas = self._by_area(appends)
            if len(areas) == 1:
                return self._append(next(iter(areas)), appends)
            for area, mine in areas.items():  # each in a transaction of its own
                found.update(zip(mine, self._append(area, [appends[at] for at in mine]), strict=True))
        except StoreError as error:
            if found and isinstance(error, StoreFull):
                error.undone = False
            if error.nothing_done and not found:  # else one area has been committed
                error.details["stored"] = False
            raise
        return [found[at] for at in range(len(appends))]

    def _short(self, appends: Sequence[Append]) -> list[LoneAppend]:
        """Return what the batches need for the short way: one, or where they can be one transaction a few of
        different partitions. Empty: they go the long way."""
        if len(appends) == 1:
            alone = self._planned(appends[0])
            return [] if alone is None else [alone]
        if len(appends) > _FEW or self._session.dialect.commits_lone:
            return []
        found: dict[int, LoneAppend] = {}
        for append in appends:
            lone = self._planned(append)
            if lone is None or lone.partition_id in found:
                return []
            found[lone.partition_id] = lone
        return [*found.values()]

    def _planned(self, append: Append) -> LoneAppend | None:
        """Return what a batch needs for the short way; None: it is none for it."""
        partition_id = append.partition_id
        if append.ids or append.due_at or append.drawn is not None:
            return None
        if self._windows.kept(partition_id) is not None:
            return None
        header = append.header or header_of(append)
        if isinstance(header, CorruptBatch):
            return None  # it is refused on the long way
        line = line_of(append, header)
        if line is None or self._session.partition_areas.get(partition_id) is not Area.LOG:
            return None
        return self._known.plan(header, line, append.at, self._ends.highest((Area.LOG, partition_id)))

    def append_at_once(self, appends: Sequence[Append]) -> list[Appended | PostroomError] | None:
        session = self._session
        if not session.dialect.quick:
            return None
        short = self._short(appends)
        area = Area.LOG if short else self._area_at_once(appends)
        if area is None:
            return None
        with session.at_once():
            try:
                session.dialect.admit()
                return self._append_short(short) if short else self._append(area, appends)
            except StoreError:
                return None

    def send(self, append: Append) -> SentAppend | None:
        session, dialect = self._session, self._session.dialect
        lone = self._planned(append) if dialect.commits_lone else None
        connection = None if lone is None else session.lend(Area.LOG)
        if lone is None or connection is None:
            return None
        try:
            sent = None if dialect.seems_gone(connection) else dialect.send_lone(connection, lone)
        except Exception:  # whatever it is, `append` meets it again, and tells
            self._known.doubt(lone.partition_id)
            sent = None
        if sent is None:
            session.take_back(Area.LOG, connection)
            return None
        return _Sent(self, lone, connection, sent)

    def _answered(self, lone: LoneAppend, connection: Any, at: int | None) -> Appended | None:
        """`at`: when it was stored; None: it is not known to be."""
        self._session.take_back(Area.LOG, connection)
        if at is None:
            self._known.doubt(lone.partition_id)
            return None
        self._known.stored(lone, at)
        self._ends.saw({(Area.LOG, lone.partition_id): lone.next_offset})
        self._session.dialect.announce(Area.LOG)
        return Appended(lone.offset, at)

    def _area_at_once(self, appends: Sequence[Append]) -> Area | None:
        """Return the area that all of them go to; None: a thread is to append them, also one alone that is
        durable and none for the short way."""
        partitions = {append.partition_id for append in appends}
        areas = {self._session.partition_areas.get(one) for one in partitions}
        area = areas.pop() if len(areas) == 1 else None
        if (area is Area.LOG and len(appends) == 1) or not all(map(_repeatable, appends)):
            return None
        if any(self._windows.kept(one) is not None for one in partitions):  # ids may have to be read
            return None
        return area

    def _append_short(self, short: Sequence[LoneAppend]) -> list[Appended | PostroomError] | None:
        """Return what became of them; None: something is not as it was known, and nothing is written."""
        session, dialect = self._session, self._session.dialect
        try:
            by_itself = dialect.commits_lone
            with session.read(Area.LOG) if by_itself else session.write(Area.LOG, brief=True) as tx:
                if by_itself and dialect.seems_gone(tx.connection):
                    raise OtherwiseError  # the long way knows that nothing was stored; this one would not
                times: list[int] = []
                for lone in short:
                    at = dialect.append_lone(tx.connection, lone)
                    if at is None:
                        raise OtherwiseError
                    times.append(at)
                tx.announce(Area.LOG)
        except BaseException as error:
            for lone in short:
                self._known.doubt(lone.partition_id)
            if isinstance(error, OtherwiseError):
                return None
            raise
        stored: list[Appended | PostroomError] = []
        ends: dict[PartitionKey, int] = {}
        size = 0
        for lone, at in zip(short, times, strict=True):
            self._known.stored(lone, at)
            ends[Area.LOG, lone.partition_id] = lone.next_offset
            size += lone.header.size
            stored.append(Appended(lone.offset, at))
        self._ends.saw(ends)
        dialect.stored(Area.LOG, size)
        return stored

    def _by_area(self, appends: Sequence[Append]) -> dict[Area, list[int]]:
        """Return the areas that the appends go to, and which of them go there."""
        areas: dict[Area, list[int]] = {}
        for at, append in enumerate(appends):
            area = Area.LOG if append.due_at else area_of(self._session, append.partition_id)
            areas.setdefault(area, []).append(at)
        return areas

    def _append(self, area: Area, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        tables, windows = self._session.stored_in(area), self._windows
        appending = Appending(area, self._session, appends, self._remembered)
        ids = None  # of rows without ids a window need not be told: it reads what it has not seen
        for append in appends:
            if append.ids or windows.kept(append.partition_id) is not None:
                ids = DedupPass(windows, appends)
                break
        while True:
            if ids is not None:
                ids.prepare()
            expected = self._ends.expected([(tables, append.partition_id) for append in appends])
            try:
                with self._session.write(area, flush=area is Area.LOG, brief=True) as tx:
                    appending.begin(tx, ids, expected)
                    self._ends.check(expected, appending.ends())
                    results = appending.run()
            except NotPreparedError:
                continue
            if ids is not None:
                ids.committed()
            self._ends.saw(appending.ends())
            if area is Area.LOG:
                appending.tell(self._known)
            self._session.dialect.stored(area, sum([len(append.batch) for append in appends]))
            return results

    def seal(self, partition_id: int, batch: bytes) -> int:
        area = area_of(self._session, partition_id)
        with self._session.write(area, flush=area is Area.LOG) as tx:
            return seal(tx, partition_id, batch)

    # ---- sequences of Kafka's producers (I28) ----

    def hand_down(self, partition_id: int) -> dict[int, bytes]:
        with reading_log(self._session, partition_id) as tx:
            end = tx.one("SELECT next_offset FROM postroom_partitions WHERE id = ?", partition_id)
            rows = tx.all(_KAFKA_SEQUENCES, partition_id)
        if end is None:
            raise unknown_partition(partition_id)
        return {producer_id: shifted(bytes(state), 1 - int(end[0])) for producer_id, state in rows}

    def inherit(self, partition_id: int, sequences: Mapping[int, bytes]) -> None:
        with self._session.write(area_of(self._session, partition_id), flush=True) as tx:
            tx.locked("SELECT id FROM postroom_partitions WHERE id = ?", partition_id)  # nobody appends yet
            known = {producer_id for producer_id, _ in tx.all(_KAFKA_SEQUENCES, partition_id)}
            now = tx.now_ms()
            rows = [(one, partition_id, state, now) for one, state in sequences.items() if one not in known]
            tx.many(_INHERIT, rows)

    # ---- read ----

    def read(self, partition_id: int, offset: int, *, max_messages: int, max_bytes: int) -> list[StoredBatch]:
        self._session.takes_time()
        log = log_table(partition_id)
        with reading_log(self._session, partition_id) as tx:
            at = tx.one(_AT.format(log=log), offset)
            rows = _batches(tx, log, at, offset, max_messages, max_bytes)
            if not rows:  # at the end, or below what is kept
                at = tx.one(_FROM.format(log=log), offset)
                rows = _batches(tx, log, at, offset, max_messages, max_bytes)
        return [StoredBatch(*row) for row in rows]

    def bounds(self, partition_ids: Iterable[int]) -> dict[int, Bounds]:
        ids = tuple(partition_ids)
        found: dict[int, Bounds] = {}
        for tables, some, durable, sql in self._bounds_of(ids):
            expected = self._ends.expected(durable)
            with self._session.read(tables) as tx:
                rows = tx.all(sql, *some)
            ends: dict[PartitionKey, int] = {}
            for partition_id, start, end, state in rows:
                ends[tables, partition_id] = end
                if state not in GONE:
                    found[partition_id] = Bounds(start, end, sealed=state == "sealed")
            self._ends.check(expected, ends)
            self._ends.read(ends, flushed=self._session.dialect.shows_flushed)
        if len(found) < len(ids):
            for partition_id in ids:
                if partition_id not in found:
                    raise unknown_partition(partition_id)
        return found

    def _bounds_of(self, ids: tuple[int, ...]) -> _BoundsOf:
        """Return how to ask for the bounds of these, once for each of their tables. Where a partition is kept
        never changes."""
        known = self._bounds_known.get(ids)
        if known is None:
            mine: dict[Area, list[int]] = {}
            durable: dict[Area, list[PartitionKey]] = {}
            for one in ids:
                area = area_of(self._session, one)
                tables = self._session.stored_in(area)
                mine.setdefault(tables, []).append(one)
                if area is not Area.VOLATILE:
                    durable.setdefault(tables, []).append((tables, one))
            known = tuple(
                (tables, some, durable.get(tables, []), _BOUNDS.format(marks=blanks(len(some))))
                for tables, some in mine.items()
            )
            if self._session.partition_areas.keys() >= {*ids}:  # else it was not found
                make_room(self._bounds_known, _MOST_ASKED)
                self._bounds_known[ids] = known
        return known

    def marks(self, at: Mapping[int, int]) -> dict[int, str]:
        found: dict[int, str] = {}
        wanted = [partition_id for partition_id, offset in at.items() if offset > 0]
        areas: dict[Area, list[int]] = {}
        for one in wanted:
            areas.setdefault(area_of(self._session, one), []).append(one)
        for area, mine in areas.items():
            for some in parts(mine, _MARKS_AT_ONCE):
                for one, base, records, crc in self._marks(area, some, at):
                    if base + records >= at[one]:
                        found[one] = mark_of(base, bytes(crc))
        return found

    def _marks(self, area: Area, some: Sequence[int], at: Mapping[int, int]) -> list[tuple[Any, ...]]:
        sql = " UNION ALL ".join(_MARK.format(id=int(one), log=log_table(one)) for one in some)
        with ExitStack() as logs:  # whichever of them is gone is named
            for one in some:
                logs.enter_context(log_of(self._session, one))
            with self._session.read(area) as tx:
                return tx.all(sql, *(at[one] - 1 for one in some))

    def removed(self, partition_ids: Collection[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        areas: dict[Area, list[int]] = {}
        for one in partition_ids:
            areas.setdefault(self._session.stored_in(area_of(self._session, one)), []).append(one)
        for area, mine in areas.items():
            with self._session.read(area) as tx:
                found.update(each(tx, _REMOVED, "id", mine))
        return found

    def offset_at(self, partition_id: int, time_ms: int) -> int:
        with reading_log(self._session, partition_id) as tx:
            return first_row(tx, partition_id, "appended_at", time_ms)

    def stamped(self, partition_id: int, at_least: int | None, start: int) -> StoredBatch | None:
        self._session.takes_time()
        log = log_table(partition_id)
        with reading_log(self._session, partition_id) as tx:
            if at_least is None:
                row = tx.one(_NEWEST_STAMP.format(log=log), start)
            else:
                row = tx.one(_STAMPED.format(log=log), start, at_least)
        return None if row is None else StoredBatch(*row)

    def edges(
        self, partition_ids: Collection[int] | None = None, *, sealed: bool = False
    ) -> dict[int, Bounds]:
        found: dict[int, Bounds] = {}
        sql = _EDGES + (" AND p.state = 'sealed'" if sealed else "")
        for area in (Area.LOG, Area.VOLATILE):
            if area not in self._session.dialect.areas:
                continue
            with self._session.read(area) as tx:
                rows = each(tx, sql + (_HERE if area is Area.LOG else ""), "p.id", partition_ids)
            found |= {one: Bounds(start, end, state == "sealed") for one, start, end, state in rows}
        return found

    def news(self, of: Collection[int] | None = None) -> News:
        with self._session.read(Area.LOG) as tx:
            ends: dict[int, int] = dict(each(tx, _ENDS + _HERE, "id", of))
            version = tx.one(_VERSION_AND_DUE)
        if Area.VOLATILE in self._session.dialect.areas:
            with self._session.read(Area.VOLATILE) as tx:
                ends.update(each(tx, _ENDS, "id", of))
        return News(int(version[0]), ends, version[1]) if version else News(0, ends)

    # ---- trim ----

    @empties
    def trim(self, partition_id: int, below: int) -> int:
        with self._session.write(area_of(self._session, partition_id)) as tx:
            row = tx.locked("SELECT log_start FROM postroom_trims WHERE partition_id = ?", partition_id)
            part = tx.one("SELECT next_offset FROM postroom_partitions WHERE id = ?", partition_id)
            if part is None:
                raise unknown_partition(partition_id)
            start = max(row[0] if row else 0, min(below, part[0]))
            upsert = self._session.dialect.upsert("postroom_trims", ("partition_id",), ("log_start",))
            tx.do(upsert, partition_id, start)
            return int(start)

    def is_volatile(self, partition_id: int) -> bool:
        return area_of(self._session, partition_id) is Area.VOLATILE

    def skip_lost(self, partition_id: int) -> int:
        with reading_log(self._session, partition_id) as tx:
            # the end first: what is appended between the two looks is above it
            end = tx.one("SELECT next_offset FROM postroom_partitions WHERE id = ?", partition_id)
            row = first_kept(tx, partition_id, "base_offset")
        lowest = row or end
        if lowest is None:
            raise unknown_partition(partition_id)
        return self.trim(partition_id, lowest[0])

    @empties
    def sweep(self, partition_id: int, *, rows: int, appended_before: int | None = None) -> int:
        log = log_table(partition_id)
        area = area_of(self._session, partition_id)
        with log_of(self._session, partition_id), self._session.write(area) as tx:
            start = tx.one("SELECT log_start FROM postroom_trims WHERE partition_id = ?", partition_id)
            if start is None:
                return 0
            old = tx.all(
                f"SELECT base_offset FROM {log} WHERE base_offset < ? AND base_offset + records <= ? "
                "AND appended_at < ? ORDER BY base_offset LIMIT ?",
                start[0],
                start[0],
                _NEVER if appended_before is None else appended_before,
                rows,
            )
            return tx.run(f"DELETE FROM {log} WHERE base_offset <= ?", old[-1][0]) if old else 0

    def expire_by_limits(self, partition_id: int, *, before_ms: int, keep_bytes: int) -> int:
        with reading_log(self._session, partition_id) as tx:
            by_age = first_row(tx, partition_id, "appended_at", before_ms) if before_ms > 0 else 0
            if not keep_bytes:
                return by_age
            total = tx.one("SELECT next_bytes FROM postroom_partitions WHERE id = ?", partition_id)
            excess = (total[0] if total else 0) - keep_bytes
            by_size = first_row(tx, partition_id, "bytes_before", excess) if excess > 0 else 0
            return max(by_age, by_size)

    def forget_producers(self, idle_since_ms: int, *, moving: Iterable[int] = ()) -> int:
        """Not those of open moves: only their sequences tell whether they were stored (I12).

        `moving`: the producers of open moves on other shards.
        """
        count = 0
        with self._session.read(Area.LOG) as tx:
            moving = {*moving} | {int(row[0]) for row in tx.all(_MOVING)}
        others = f" AND producer_id NOT IN ({', '.join(map(str, sorted(moving)))})" if moving else ""
        for area in (Area.LOG, Area.VOLATILE):
            if area in self._session.dialect.areas:
                with self._session.write(area) as tx:
                    count += tx.run(
                        f"DELETE FROM postroom_sequences WHERE seen_at < ?{others}", idle_since_ms
                    )
        return count


def _repeatable(append: Append) -> bool:
    """Whether a batch is recognised by its sequence alone, should it come again."""
    if append.ids or append.due_at or append.drawn is not None:
        return False
    header = append.header or header_of(append)
    return not isinstance(header, CorruptBatch) and line_of(append, header) is not None


def _batches(
    tx: Transaction, log: str, at: Any, offset: int, max_messages: int, max_bytes: int
) -> list[tuple[Any, ...]]:
    """Return the batches from `at` on that reach behind the offset, until a limit is reached."""
    if at is None:
        return []
    base, before = at
    below = max(offset, base) + max_messages
    found = tx.all(_BATCHES.format(log=log), base, max(below, base + 1), base, before + max_bytes)
    while found and found[0][0] + found[0][1] <= offset:
        del found[0]
    return found
