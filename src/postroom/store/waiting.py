"""The ids of delayed messages: one that waits in the schedule is a repeat for whoever sends it again (I13).

Kept in memory per partition and topped up under its lock, as the window is. A row of the schedule leaves it
when it is moved to a log, or cancelled: so what is found here is looked up in the schedule before it counts,
and an id that was cancelled may be sent again. Rows of one partition are made under its lock, so their
numbers grow in the order of the commits.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from ..model.dedup import split
from ..model.idtable import IdTable
from .session import Lane, Row, Session, Transaction

__all__ = ["WaitingIds", "ids_of"]

_ROWS = """SELECT id, COALESCE(ids, id_hash) FROM postroom_schedule
           WHERE partition_id = ? AND id > ? ORDER BY id LIMIT ?"""
_ROW = "SELECT COALESCE(ids, id_hash) FROM postroom_schedule WHERE id = ?"
_COUNT = "SELECT SUM(messages) FROM postroom_delayed WHERE partition_id = ?"

_PAGE = 200  # rows whose ids are read at once
_STALE = 10_000  # ids of rows that are gone, and as many again as wait: then all are read anew


def ids_of(tx: Transaction, row_id: int) -> Sequence[bytes]:
    """The ids that a row of the schedule has now; none if it is gone."""
    row = tx.one(_ROW, row_id)
    return () if row is None or row[0] is None else split(bytes(row[0]))


class WaitingIds:
    """Of one partition. The lock it is given is the windows'."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._table = IdTable()
        self._numbers = array("q")  # from a number of the table on …
        self._rows = array("q")  # … ids are of this row

    def __len__(self) -> int:
        return len(self._table)

    @property
    def _seen(self) -> int:
        return self._rows[-1] if self._rows else 0

    def known(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those that may wait."""
        return self._table.known(digests) if len(self._table) else []

    def row_of(self, digest: bytes) -> int:
        """The row of the schedule that has, or had, a message with that id; -1 if none is known."""
        number = self._table.number(digest)
        return self._rows[bisect_right(self._numbers, number) - 1] if number >= 0 else -1

    # ---- without the partition's lock ----

    def load(self, session: Session, partition_id: int, lock: threading.Lock) -> None:
        full = True
        while full:
            with session.read(Lane.LOG) as tx:
                rows = tx.all(_ROWS, partition_id, self._seen, _PAGE)
            with lock:
                self._see(rows)
            full = len(rows) == _PAGE

    def tidy(self, session: Session, partition_id: int, lock: threading.Lock) -> None:
        """Read all anew once most of it is of rows that are gone."""
        if len(self._table) <= _STALE:
            return
        with session.read(Lane.LOG) as tx:
            row = tx.one(_COUNT, partition_id)
        if len(self._table) > 2 * int(row[0] or 0 if row else 0) + _STALE:
            fresh = WaitingIds(self._limit)
            fresh.load(session, partition_id, lock)
            with lock:
                self._table, self._numbers, self._rows = fresh._table, fresh._numbers, fresh._rows

    # ---- under the partition's lock ----

    def top_up(self, tx: Transaction, partition_id: int, lock: threading.Lock) -> bool:
        """Read what was scheduled since; False if there is more than can be read here."""
        rows = tx.all(_ROWS, partition_id, self._seen, _PAGE)
        with lock:
            self._see(rows)
        return len(rows) < _PAGE

    def _see(self, rows: Sequence[Row]) -> None:
        for row_id, ids in rows:
            if row_id > self._seen:
                self._numbers.append(self._table.add(bytes(ids or b"")))
                self._rows.append(int(row_id))
        if len(self._table) > self._limit:  # the newest count
            self._table.forget_below(self._table.end - self._limit)
            gone = bisect_right(self._numbers, self._table.start) - 1
            del self._numbers[:gone], self._rows[:gone]
