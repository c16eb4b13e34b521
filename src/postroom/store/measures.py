"""How far behind a group is, from a few look-ups by primary key: no scan (R43)."""

from __future__ import annotations

from ..model.delivery import Span
from .contract import Backlog
from .lookups import first_kept, first_row, row_at
from .row import Row
from .session import Transaction

__all__ = ["log_start_of", "measure"]

_ARRIVAL_MS = 60_000
_EDGE = "SELECT next_offset, next_bytes, state FROM postroom_partitions WHERE id = ?"
_AT = "base_offset, records, bytes, bytes_before, appended_at"


def log_start_of(tx: Transaction, partition_id: int) -> int:
    row = tx.one("SELECT log_start FROM postroom_trims WHERE partition_id = ?", partition_id)
    return int(row[0]) if row else 0


def measure(
    tx: Transaction, partition_id: int, row: Row, committed: int, unsettled: int, spans: tuple[Span, ...]
) -> Backlog:
    now = tx.now_ms()
    partition = tx.one(_EDGE, partition_id)
    end, total, state = partition or (0, 0, "")
    size, age = _behind(tx, partition_id, committed, total, now) if committed < end else (0, 0)
    return Backlog(
        partition_id=partition_id,
        committed=committed,
        cursor=row.cursor,
        end=end,
        unsettled=unsettled,
        bytes=size,
        oldest_age_ms=age,
        first_wait_ms=row.first_wait_ms,
        arrival_per_s=_arrival_per_s(tx, partition_id, end - int(state == "sealed"), now),
        drain_per_s=row.drain_per_s(now),
        open=spans,
        sealed=state == "sealed",
    )


def _behind(tx: Transaction, partition_id: int, committed: int, total: int, now: int) -> tuple[int, int]:
    """Bytes from the committed offset on, and the age of what is there; part of a batch counts in part."""
    at = row_at(tx, partition_id, committed, _AT) or first_kept(tx, partition_id, _AT)
    if at is None:
        return 0, 0
    base, records, length, before, appended_at = at
    done = min(max(committed - base, 0), records)
    return total - before - length * done // records, max(0, now - appended_at)


def _arrival_per_s(tx: Transaction, partition_id: int, end: int, now: int) -> float:
    oldest = first_kept(tx, partition_id, "appended_at")
    window_ms = min(_ARRIVAL_MS, now - oldest[0]) if oldest else 0
    arrived = end - first_row(tx, partition_id, "appended_at", now - _ARRIVAL_MS)
    return 1000 * max(0, arrived) / max(window_ms, 1000)
