"""Progress belongs to one log. SQLite keeps them in two files, which people copy, restore and delete.

With another log, or with an older copy of its own, a cursor lies beyond messages that were never handed
out, and they would be skipped without a trace. So the two are compared when a store is opened, and one
that does not fit is refused: nothing is changed until somebody has decided (R6).
"""

from __future__ import annotations

from ..errors import StoreCorrupt, StoreError
from .session import Lane, Session

__all__ = ["check_pair"]

_ENDS = "SELECT id, next_offset FROM postroom_partitions WHERE volatile = 0"
_CURE = (
    "restore log and progress from the same backup, or remove the progress (on SQLite the file that ends in "
    "'.progress'): every group then starts again from its start"
)


def check_pair(session: Session) -> None:
    """Claim new progress for this log; StoreCorrupt if it belongs to another, or is ahead of this one."""
    with session.read(Lane.LOG) as tx:
        mine = str((tx.one("SELECT value FROM postroom_settings WHERE name = 'uuid'") or ("",))[0])
    owner = _owner(session) or _claim(session, mine)
    if owner != mine:
        raise StoreCorrupt(f"the progress kept here belongs to another log; {_CURE}", owner=owner, log=mine)
    with session.read(Lane.PROGRESS) as tx:  # before the ends, which only grow
        cursors = tx.all("SELECT partition_id, MAX(next_new) FROM postroom_progress GROUP BY partition_id")
    with session.read(Lane.LOG) as tx:
        ends: dict[int, int] = dict(tx.all(_ENDS))
    for partition_id, cursor in cursors:
        if cursor > ends.get(partition_id, cursor):
            raise StoreCorrupt(
                f"the log is older than its progress: a group is at offset {cursor} of a partition that ends "
                f"at {ends[partition_id]}; {_CURE}",
                partition_id=partition_id,
            )


def _owner(session: Session) -> str | None:
    with session.read(Lane.PROGRESS) as tx:
        row = tx.one("SELECT uuid FROM postroom_owner")
    return str(row[0]) if row else None


def _claim(session: Session, mine: str) -> str:
    try:
        with session.write(Lane.PROGRESS) as tx:
            row = tx.one("SELECT uuid FROM postroom_owner")
            if row is None:
                tx.do("INSERT INTO postroom_owner (uuid) VALUES (?)", mine)
    except StoreError as error:  # another one who came first did so at the same moment
        owner = _owner(session) if error.undone else None
        if owner is None:
            raise
        return owner
    return str(row[0]) if row else mine
