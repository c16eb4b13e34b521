"""Look-ups in a partition's log by primary key: no index beside it, no scan.

Reads see what is committed when each statement starts: rows may be swept between two of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ....errors import InvalidSetting, StoreError, UnknownPartition
from ....model.policy.bounds import make_room
from ..schema import log_table
from ..session import Area, Session, Transaction

__all__ = [
    "GONE",
    "area_of",
    "first_kept",
    "first_row",
    "log_of",
    "reading_log",
    "row_at",
    "unknown_partition",
]

_MOST = 100_000  # partitions of which is known where they are

GONE = ("dropped", "removed")
"""States of partitions without a log: that of a deleted topic, and a tombstone."""

_KNOWN = "SELECT 1 FROM postroom_partitions WHERE id = ? AND state IN ('new', 'open', 'sealed')"
_STORAGE = "SELECT volatile, shard FROM postroom_partitions WHERE id = ?"


def area_of(session: Session, partition_id: int, within: Transaction | None = None) -> Area:
    """Where a partition's log is. It never changes, so it is asked once. InvalidSetting: on another shard.

    `within`: a transaction of the log's area that the caller has open. On SQLite a second connection would
    read the whole schema again after each new topic, which takes the longer the more there are.
    """
    area = session.partition_areas.get(partition_id)
    if area is None:
        with session.read(Area.LOG) if within is None else nullcontext(within) as tx:
            row = tx.one(_STORAGE, partition_id)
        if row is None:
            return Area.LOG  # it is gone, and whoever looks there will say so
        if row[1]:
            raise InvalidSetting(
                f"a partition of this topic is on shard {row[1]!r}, which was added after this process had "
                f"connected: connect again, with shards={{{row[1]!r}: 'its address'}}",
                shard=row[1],
                _served=f"a partition of this topic is on shard {row[1]!r}, which this broker was not given; "
                "ask the operator of the brokers",
            )
        make_room(session.partition_areas, _MOST)
        area = session.partition_areas[partition_id] = Area.VOLATILE if row[0] else Area.LOG
    return area


@contextmanager
def log_of(session: Session, partition_id: int) -> Iterator[None]:
    """UnknownPartition, not the database's words about a missing table, if the partition is gone."""
    try:
        yield
    except StoreError:
        with session.read(Area.LOG) as tx:
            if tx.one(_KNOWN, partition_id) is None:
                raise unknown_partition(partition_id) from None
        raise


@contextmanager
def reading_log(session: Session, partition_id: int) -> Iterator[Transaction]:
    with log_of(session, partition_id), session.read(area_of(session, partition_id)) as tx:
        yield tx


def unknown_partition(partition_id: int) -> UnknownPartition:
    return UnknownPartition(
        "the partition is gone: its topic was deleted; fetch the topic again", partition_id=partition_id
    )


def row_at(tx: Transaction, partition_id: int, offset: int, columns: str) -> tuple[Any, ...] | None:
    """The stored batch that contains `offset`, or the last one before it."""
    return tx.one(
        f"SELECT {columns} FROM {log_table(partition_id)} WHERE base_offset <= ? "
        "ORDER BY base_offset DESC LIMIT 1",
        offset,
    )


def first_kept(tx: Transaction, partition_id: int, columns: str) -> tuple[Any, ...] | None:
    return tx.one(f"SELECT {columns} FROM {log_table(partition_id)} ORDER BY base_offset LIMIT 1")


def first_row(tx: Transaction, partition_id: int, column: str, least: int) -> int:
    """The base offset of the first batch whose `column` (which never falls) is at least `least`.

    A binary search over offsets by primary key: a few look-ups, no index, no scan.
    """
    log = log_table(partition_id)
    # the end first: of a log that was empty a moment ago, nothing that came since may be passed over
    end = tx.one("SELECT next_offset FROM postroom_partitions WHERE id = ?", partition_id)
    edges = tx.one(f"SELECT MIN(base_offset) FROM {log}")
    if edges is None or edges[0] is None or end is None:
        return int(end[0]) if end else 0
    low, high = edges[0], int(end[0])
    while low < high:  # batches below `low` are too small or gone, those from `high` on are not
        middle = (low + high) // 2
        found = row_at(tx, partition_id, middle, f"base_offset, records, {column}")
        if found is None:
            low = middle + 1  # swept meanwhile
        elif found[2] >= least:
            high = found[0]
        else:
            low = found[0] + found[1]
    return int(high)
