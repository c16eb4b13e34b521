"""Volatile topics where they have a place of their own: SQLite's third file, never flushed (R3).

What an append touches is in that file: the partition's row, the sequences and the log. The catalog stays
in the log's file. When the file is lost, or the machine was started again, a new one begins a new
*life*: its partitions continue far above every offset that was ever given, so that no cursor lies beyond
what is to come.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ..schema import create_log, log_table
from ..session import Area, Session

__all__ = ["LIFE_OFFSETS", "boot_id", "check_volatile", "place_log"]

_log = logging.getLogger("postroom.store")

LIFE_OFFSETS = 2**40
"""Offsets that one life of the place may give."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LAST_BOOT = "SELECT value FROM postroom_settings WHERE name = 'boot'"
_PLACED = """INSERT INTO postroom_partitions
             (id, topic_id, number, state, next_offset, next_bytes, appended_at)
             VALUES (?, 0, 0, 'open', ?, 0, 0)"""


def check_volatile(session: Session) -> None:
    """Make what the catalog knows and the place does not: after its loss, that is everything."""
    if Area.VOLATILE not in session.dialect.areas:
        return
    _empty_old(session)
    life = _life(session)
    with session.read(Area.LOG) as tx:
        known = [
            row[0]
            for row in tx.all(
                "SELECT id FROM postroom_partitions WHERE volatile = 1 AND state IN ('open', 'new')"
            )
        ]
    with session.read(Area.VOLATILE) as tx:
        there = {row[0] for row in tx.all("SELECT id FROM postroom_partitions")}
    for partition_id in known:
        if partition_id not in there:
            place_log(session, partition_id, life)


def _empty_old(session: Session) -> None:
    """What was not flushed when the machine went down may be spoilt, or older than its cursors: it is lost.

    In one transaction: of many processes that start at once one empties the place, before it is used.
    """
    boot = boot_id()
    with session.read(Area.VOLATILE) as tx:
        row = tx.one(_LAST_BOOT)
    if row is None or row[0] == boot:
        return
    with session.write(Area.VOLATILE) as tx:
        row = tx.one(_LAST_BOOT)
        if row is None or row[0] == boot:
            return
        _log.warning("the machine was started again: the messages of volatile topics are lost")
        for (partition_id,) in tx.all("SELECT id FROM postroom_partitions"):
            tx.do(f"DROP TABLE IF EXISTS {log_table(partition_id)}")
        for table in ("partitions", "trims", "sequences", "settings"):
            tx.do(f"DELETE FROM postroom_{table}")


def place_log(session: Session, partition_id: int, life: int | None = None) -> None:
    """The table of a volatile partition, and its row beside it where the place is apart."""
    create_log(session, partition_id, Area.VOLATILE)
    if Area.VOLATILE not in session.dialect.areas:
        return
    start = LIFE_OFFSETS * (_life(session) if life is None else life)
    with session.write(Area.VOLATILE) as tx:
        if tx.one("SELECT 1 FROM postroom_partitions WHERE id = ?", partition_id) is None:
            tx.do(_PLACED, partition_id, start)
            tx.do("INSERT INTO postroom_trims (partition_id, log_start) VALUES (?, ?)", partition_id, start)


def _life(session: Session) -> int:
    """Which life of the place this is: counted in the log, where it survives, before the place is used."""
    mine = "SELECT value FROM postroom_settings WHERE name = 'life'"
    with session.read(Area.VOLATILE) as tx:
        row = tx.one(mine)
    if row is not None:
        return int(row[0])
    with session.write(Area.LOG) as tx:
        last = tx.one("SELECT value FROM postroom_settings WHERE name = 'volatile_life'")
        life = int(last[0]) + 1 if last else 0
        upsert = session.dialect.upsert("postroom_settings", ("name",), ("value",))
        tx.do(upsert, "volatile_life", str(life))
    with session.write(Area.VOLATILE) as tx:  # the first who comes decides for all
        row = tx.one(mine)
        if row is None:
            tx.many(
                "INSERT INTO postroom_settings (name, value) VALUES (?, ?)",
                [("life", str(life)), ("boot", boot_id())],
            )
    return life if row is None else int(row[0])


def boot_id() -> str:
    """Which start of the machine this is; "" where that cannot be told."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
