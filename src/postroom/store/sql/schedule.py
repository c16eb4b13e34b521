"""Delayed messages at rest: they wait in a table of their own, beside the log (R35).

Decides who may touch a row of the schedule. A row that an open move lists is stamped: it belongs to whoever
holds the mover's lease, until the move is finished (I12). Cancel and purge take others only: they lock the
row, then look at the moves (I1); a stamp locks its rows before it is written, so one of the two always sees
the other. Must never hold a partition's lock together with a row's.

How many messages wait is counted per partition as they come and go: rows may be millions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...errors import LeaseLost
from ...model.messages.ids import DIGEST_SIZE
from ...model.moves import schedule
from ...model.moves.schedule import DUTY, DelayedPosition, DelayedRow, Home
from ..contract import Append, Finished, Move
from .brokers import holds
from .lists import blanks, padded
from .session import Area, Row, Session, Transaction, empties, verbs

__all__ = ["Delayed", "SqlSchedule"]

_INSERT = """INSERT INTO postroom_schedule
             (topic_id, partition_id, due_at, records, bytes, id_hash, ids, batch)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
_CHANGE = """UPDATE postroom_schedule SET due_at = ?, records = ?, bytes = ?, id_hash = ?, ids = ?, batch = ?
             WHERE id = ?"""
_DUE = """SELECT id, records, bytes FROM postroom_schedule
          WHERE due_at >= ? AND due_at <= ?{others} ORDER BY due_at, id LIMIT ?"""
_NEXT = "SELECT due_at FROM postroom_schedule WHERE due_at >= ?{others} ORDER BY due_at, id LIMIT 1"
_HEAD = "SELECT id, records, bytes FROM postroom_schedule WHERE topic_id = ?"
_OF_MOMENT = f"{_HEAD} AND due_at = ? AND id >= ? ORDER BY topic_id, due_at, id LIMIT ?"
_LATER = f"{_HEAD} AND due_at > ? ORDER BY topic_id, due_at, id LIMIT ?"
_ROWS = """SELECT id, topic_id, partition_id, due_at, records, batch, COALESCE(ids, id_hash)
           FROM postroom_schedule WHERE id IN ({marks})"""
_LOCK = "SELECT id, records FROM postroom_schedule WHERE id IN ({marks}) ORDER BY id"
_COUNT = """SELECT topic_id, partition_id, SUM(records) FROM postroom_schedule WHERE id IN ({marks})
            GROUP BY topic_id, partition_id"""
_COUNT_ON = "UPDATE postroom_delayed SET messages = messages + ? WHERE topic_id = ? AND partition_id = ?"
_BY_HASH = "SELECT id FROM postroom_schedule WHERE topic_id = ? AND id_hash = ?"
_MANY = """SELECT id, ids FROM postroom_schedule
           WHERE topic_id = ? AND id_hash IS NULL AND id > ? ORDER BY id LIMIT ?"""

_FEW, _HEADS = 500, 10_000  # rows looked at before batches are read
_PAGE = 100  # rows of many messages whose ids are looked at together
_PURGED = 2_000  # rows dropped in one transaction
_SIZES = (1, 8, 64, 512)  # of lists of ids


class Delayed:
    """The delayed batches of one append transaction."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._counts: Counter[Home] = Counter()

    def add(self, append: Append, topic_id: int, records: int, now: int) -> None:
        """None is due before it came: so whoever looks for due ones need not look far back."""
        due_at = max(append.due_at, now)
        known = _ids(append.ids, records)
        self._rows.append(
            (topic_id, append.partition_id, due_at, records, len(append.batch), *known, append.batch)
        )
        self._counts[topic_id, append.partition_id] += records

    def write(self, tx: Transaction, counted: set[Home]) -> None:
        """`counted`: homes that have a row for their number."""
        tx.many(_INSERT, self._rows)
        _count_more(tx, self._counts, counted)


@verbs
class SqlSchedule:
    def __init__(self, session: Session) -> None:
        self._session = session

    # ---- for the mover ----

    def next_due(self, *, since: int = 0, without: Collection[int] = ()) -> int | None:
        with self._session.read(Area.LOG) as tx:
            row = tx.one(_NEXT.format(others=_others(without)), since)
        return None if row is None else int(row[0])

    def due(
        self,
        *,
        messages: int,
        max_bytes: int,
        since: int = 0,
        without: Collection[int] = (),
        skip: Collection[int] = (),
    ) -> list[DelayedRow]:
        sql = _DUE.format(others=_others(without))
        with self._session.read(Area.LOG) as tx:
            now = tx.now_ms()
            for limit in (_FEW, _HEADS):
                heads = tx.all(sql, since, now, limit + len(skip))
                chosen = _within([head for head in heads if head[0] not in skip], messages, max_bytes)
                if len(chosen) < limit:
                    break
            found = _read(tx, chosen)
        return [found[row_id] for row_id in chosen if row_id in found]

    def rows(self, ids: Iterable[int]) -> dict[int, DelayedRow]:
        with self._session.read(Area.LOG) as tx:
            return _read(tx, sorted(set(ids)))

    def stamp(
        self,
        holder: str,
        move: Move,
        rows: Iterable[DelayedRow],
        before: Finished | None = None,
    ) -> bool:
        expected = {row.id: row.records for row in rows}
        with self._session.write(Area.LOG) as tx:
            _check_lease(tx, holder)
            found = self._lock(tx, expected)
            if before is not None:
                _finish(tx, before)
            if found != expected:  # some were cancelled, in whole or in part
                return False
            tx.do(
                "INSERT INTO postroom_moves (id, producer_id, plan) VALUES (?, ?, ?)",
                move.id,
                move.producer_id,
                schedule.encode(move.planned),
            )
            return True

    def moves(self) -> list[Move]:
        with self._session.read(Area.LOG) as tx:
            rows = tx.all("SELECT id, producer_id, plan FROM postroom_moves ORDER BY id")
        return [Move(row[0], row[1], tuple(schedule.decode(row[2]))) for row in rows]

    def finish(self, holder: str, finished: Finished) -> None:
        with self._session.write(Area.LOG) as tx:
            _check_lease(tx, holder)
            _finish(tx, finished)

    def _lock(self, tx: Transaction, ids: Iterable[int]) -> dict[int, int]:
        """Lock these rows, in id order (I1); how many messages each has."""
        sql = _LOCK + self._session.dialect.for_update
        found: dict[int, int] = {}
        for some in padded(sorted(ids), _SIZES):
            found.update(tx.all(sql.format(marks=blanks(len(some))), *some))
        return found

    # ---- for others ----

    def listed(
        self, topic_id: int, *, since: DelayedPosition | None = None, messages: int, max_bytes: int
    ) -> list[DelayedRow]:
        limit = min(messages, _HEADS)
        with self._session.read(Area.LOG) as tx:
            heads = _heads(tx, topic_id, since, min(limit, _FEW))
            chosen = _within(heads, messages, max_bytes)
            if len(chosen) == _FEW < limit:
                chosen = _within(_heads(tx, topic_id, since, limit), messages, max_bytes)
            found = _read(tx, chosen)
        return [found[row_id] for row_id in chosen if row_id in found]

    def cancel(self, topic_id: int, digest: bytes) -> bool:
        ids = self._find(topic_id, digest)
        return sum([self._cancel(row_id, digest) for row_id in ids]) > 0

    def _find(self, topic_id: int, digest: bytes) -> list[int]:
        """Rows with that id. Those of many messages are not indexed: their ids are read, page by page."""
        with self._session.read(Area.LOG) as tx:
            found = [int(row[0]) for row in tx.all(_BY_HASH, topic_id, digest)]
            after = 0
            while page := tx.all(_MANY, topic_id, after, _PAGE):
                found += [int(row[0]) for row in page if _places(row[1], digest)]
                after = page[-1][0]
        return sorted(found)

    def _cancel(self, row_id: int, digest: bytes) -> int:
        with self._session.write(Area.LOG) as tx:
            if not self._lock(tx, [row_id]) or row_id in _stamped(tx):
                return 0
            row = _read(tx, [row_id])[row_id]
            places = _places(row.ids, digest)
            if len(places) == row.records:
                _delete(tx, [row_id])
            elif places:
                _change(tx, schedule.left_of(row, places))
            _count_less(tx, {row.home: len(places)})
            return len(places)

    @empties
    def purge(self, topic_id: int) -> int:
        dropped = 0
        while True:
            with self._session.read(Area.LOG) as tx:
                limit = _PURGED + len(_stamped(tx))
                page = tx.all("SELECT id FROM postroom_schedule WHERE topic_id = ? LIMIT ?", topic_id, limit)
            count = self._drop([int(row[0]) for row in page])
            dropped += count
            if not count:
                return dropped

    def _drop(self, ids: Sequence[int]) -> int:
        with self._session.write(Area.LOG) as tx:
            locked = self._lock(tx, ids)
            gone = sorted(locked.keys() - _stamped(tx))
            counts = _counted(tx, gone)
            _delete(tx, gone)
            _count_less(tx, counts)
            return counts.total()

    def delayed(self) -> dict[int, int]:
        with self._session.read(Area.LOG) as tx:
            rows = tx.all("SELECT topic_id, SUM(messages) FROM postroom_delayed GROUP BY topic_id")
        return {int(topic_id): int(messages) for topic_id, messages in rows}


def _heads(tx: Transaction, topic_id: int, since: DelayedPosition | None, limit: int) -> list[Row]:
    """Read in two ranges of one index: a million may be due at one moment, and databases differ in `OR`."""
    due_at, _, row_id = since or (-1, 0, 0)
    heads = tx.all(_OF_MOMENT, topic_id, due_at, row_id, limit) if since is not None else []
    if len(heads) < limit:
        heads += tx.all(_LATER, topic_id, due_at, limit - len(heads))
    return heads


def _check_lease(tx: Transaction, holder: str) -> None:
    if not holds(tx, DUTY, holder):
        raise LeaseLost("the lease on the schedule has ended: another process moves what is due now")


def _finish(tx: Transaction, finished: Finished) -> None:
    move_id = finished.move_id
    if move_id is not None and not tx.run("DELETE FROM postroom_moves WHERE id = ?", move_id):
        return  # another mover has finished it meanwhile
    _delete(tx, finished.gone)
    for row in finished.changed:
        _change(tx, row)
    _count_less(tx, finished.messages)


def _stamped(tx: Transaction) -> set[int]:
    """Rows that open moves list; to be asked after the rows are locked."""
    plans = [schedule.decode(row[0]) for row in tx.all("SELECT plan FROM postroom_moves")]
    return {part.row for planned in plans for one in planned for part in one.parts}


def _within(heads: Sequence[Row], messages: int, max_bytes: int) -> list[int]:
    """The first rows up to a limit; one at least (I17)."""
    chosen: list[int] = []
    for row_id, records, size in heads:
        messages -= records
        max_bytes -= size
        if chosen and (messages < 0 or max_bytes < 0):
            break
        chosen.append(row_id)
    return chosen


def _read(tx: Transaction, ids: Sequence[int]) -> dict[int, DelayedRow]:
    found = {}
    for some in padded(ids, _SIZES):
        for row_id, topic_id, partition_id, due_at, records, batch, known in tx.all(
            _ROWS.format(marks=blanks(len(some))), *some
        ):
            found[row_id] = DelayedRow(
                row_id, topic_id, partition_id, due_at, records, bytes(batch), bytes(known or b"")
            )
    return found


def _change(tx: Transaction, row: DelayedRow) -> None:
    known = _ids(row.ids, row.records)
    tx.do(_CHANGE, row.due_at, row.records, len(row.batch), *known, row.batch, row.id)


def _delete(tx: Transaction, ids: Collection[int]) -> None:
    for some in padded(sorted(ids), _SIZES):
        tx.do(f"DELETE FROM postroom_schedule WHERE id IN ({blanks(len(some))})", *some)


def _counted(tx: Transaction, ids: Collection[int]) -> Counter[Home]:
    found: Counter[Home] = Counter()
    for some in padded(sorted(ids), _SIZES):
        for topic_id, partition_id, messages in tx.all(_COUNT.format(marks=blanks(len(some))), *some):
            found[topic_id, partition_id] += int(messages)
    return found


def _count_more(tx: Transaction, counts: Mapping[Home, int], counted: set[Home]) -> None:
    """Last in a transaction, and in order: these rows are locked by all who schedule, move or cancel.

    Where a row was found once nobody waits for the answer: it goes with its topic only.
    """
    for home, messages in sorted(counts.items()):
        if home in counted:
            tx.do(_COUNT_ON, messages, *home)
        elif tx.run(_COUNT_ON, messages, *home):
            counted.add(home)
        else:
            tx.do(
                "INSERT INTO postroom_delayed (topic_id, partition_id, messages) VALUES (?, ?, ?)",
                *home,
                messages,
            )


def _count_less(tx: Transaction, counts: Mapping[Home, int]) -> None:
    """Last in a transaction, and in order, as `_count_more`; nothing is counted of a topic that is gone."""
    for home, messages in sorted(counts.items()):
        tx.do(_COUNT_ON, -messages, *home)


def _ids(ids: bytes, records: int) -> tuple[bytes | None, bytes | None]:
    """The columns id_hash (of a row of one message, indexed) and ids (of a row of many)."""
    if not ids.strip(b"\0"):
        return None, None
    return (ids, None) if records == 1 else (None, ids)


def _places(ids: bytes | None, digest: bytes) -> list[int]:
    """Where among the ids of a row this one is."""
    found: list[int] = []
    at = -1
    while ids and (at := bytes(ids).find(digest, at + 1)) >= 0:
        if at % DIGEST_SIZE == 0:
            found.append(at // DIGEST_SIZE)
    return found


def _others(partition_ids: Collection[int]) -> str:
    """Not of these partitions: they take nothing just now."""
    listed = ", ".join(str(int(partition_id)) for partition_id in sorted(partition_ids))
    return f" AND partition_id NOT IN ({listed})" if listed else ""
