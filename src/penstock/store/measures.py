"""How far behind a group is, from a few look-ups by primary key: no scan (R43)."""

from __future__ import annotations

from ..model.delivery import Span
from .contract import Backlog
from .locked import Row
from .lookups import first_row, row_at
from .session import Transaction

__all__ = ["measure"]

_ARRIVAL_MS = 60_000


def measure(
    tx: Transaction, partition_id: int, row: Row, committed: int, unsettled: int, spans: tuple[Span, ...]
) -> Backlog:
    """Backlog from a few look-ups by primary key."""
    now = tx.now_ms()
    end, total = tx.one(
        "SELECT next_offset, next_bytes FROM penstock_partitions WHERE id = ?", partition_id
    ) or (0, 0)
    at = row_at(tx, partition_id, committed, "base_offset, records, bytes, bytes_before, appended_at")
    size = age = 0
    if at is not None and committed < end:
        base, records, length, before, appended_at = at
        size = total - before - length * (min(committed, base + records) - base) // records
        age = max(0, now - appended_at)
    window = max(1, min(_ARRIVAL_MS, now - first_appended(tx, partition_id, now)))
    arrived = end - first_row(tx, partition_id, "appended_at", now - _ARRIVAL_MS)
    return Backlog(
        partition_id=partition_id,
        committed=committed,
        cursor=row.cursor,
        end=end,
        unsettled=unsettled,
        bytes=size,
        oldest_age_ms=age,
        first_wait_ms=row.first_wait_ms,
        arrival_per_s=1000 * arrived / max(window, 1000),
        drain_per_s=row.drain_per_s(now),
        open=spans,
    )


def first_appended(tx: Transaction, partition_id: int, otherwise: int) -> int:
    """When the oldest batch that is kept was appended."""
    row = tx.one(f"SELECT appended_at FROM penstock_log_{partition_id:d} ORDER BY base_offset LIMIT 1")
    return int(row[0]) if row else otherwise
