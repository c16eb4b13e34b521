"""Whose database is it? Checked whenever a queue is opened, before anything is read or written (R6, I11).

Every database has a UUID of its own. The first shard lists the others by name and UUID; each of those
remembers whose it is, and under which name. A new one is claimed first and listed then: whoever is cut off in
between finds it as it left it. Whatever does not fit is refused, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import InvalidSetting, StoreCorrupt, StoreError
from ..sharded.table import SqlShards
from .session import Area, Session, Transaction, verbs

__all__ = ["check", "check_alone", "check_pair", "join", "uuid_of"]


_SETTING = "SELECT value FROM postroom_settings WHERE name = ?"
_OWN = ("topics", "shards")  # tables that are empty on every shard but the first


def uuid_of(session: Session) -> str:
    return _setting(session, "uuid")


def _setting(session: Session, name: str) -> str:
    with session.read(Area.LOG) as tx:
        row = tx.one(_SETTING, name)
    return str(row[0]) if row else ""


def check_alone(session: Session, given: frozenset[str] = frozenset()) -> None:
    """InvalidSetting if a database is not the first of its queue, or a shard is missing that is needed."""
    if _setting(session, "queue"):
        name = _setting(session, "shard")
        raise InvalidSetting(
            f"this database is shard {name!r} of a queue, and no queue of its own: connect to that queue's "
            f"first database, with shards={{{name!r}: …}}"
        )
    _check_missing(session, given)


def _check_missing(session: Session, given: frozenset[str]) -> None:
    """Check that no shard of the queue is left out, unless it is empty or never had anything."""
    table = SqlShards(session)
    known = table.known()
    left_out = known.keys() - given
    if not left_out:
        return
    used = table.ever_used()
    needed = sorted(name for name in left_out if name in used and known[name][1] != "empty")
    if needed:
        raise InvalidSetting(
            f"shard {needed[0]!r} of this queue holds partitions or delayed messages, and is missing: "
            f"connect with shards={{{needed[0]!r}: 'its address'}} as well, or drain it first "
            f"(`postroom shard drain {needed[0]}`)"
        )


def check(first: Session, others: Mapping[str, Session]) -> None:
    """InvalidSetting if one of these databases cannot be the shard of that name; changes nothing."""
    queue, known = uuid_of(first), SqlShards(first).known()
    names = {uuid: name for name, (uuid, _) in known.items()}
    for name, session in others.items():
        mine = uuid_of(session)
        if mine == queue:
            raise InvalidSetting(
                f"shard {name!r} is the queue's first database itself: name another one, or leave it out"
            )
        if name in known and known[name][0] != mine:
            raise InvalidSetting(
                f"shard {name!r} of this queue is another database (its UUID is {known[name][0]}, and this "
                f"one's is {mine}): correct the address, or give a new database a new name"
            )
        if names.setdefault(mine, name) != name:
            raise InvalidSetting(
                f"shard {name!r} is the same database as shard {names[mine]!r}: give each name a database of "
                "its own"
            )
        with session.read(Area.LOG) as tx:
            _refuse_foreign(tx, queue, name, listed=name in known)


def join(first: Session, session: Session, name: str) -> None:
    """Make a database that was checked the shard of that name, if it is not that already."""
    queue, mine = uuid_of(first), uuid_of(session)
    known = SqlShards(first).known()
    _Claim(session).claim(queue, name, listed=name in known)
    if name not in known:
        SqlShards(first).add(name, mine)
        if SqlShards(first).known()[name][0] != mine:
            raise InvalidSetting(
                f"shard {name!r} of this queue was just made of another database: give this one another name"
            )


def _refuse_foreign(tx: Transaction, queue: str, name: str, *, listed: bool) -> None:
    owner, called = tx.one(_SETTING, "queue"), tx.one(_SETTING, "shard")
    if owner is not None and owner[0] != queue:
        raise InvalidSetting(
            f"the database of shard {name!r} is shard {called[0] if called else '?'!r} of another queue: "
            "give this queue a database of its own"
        )
    if not listed and any(tx.one(f"SELECT 1 FROM postroom_{table} LIMIT 1") for table in _OWN):
        raise InvalidSetting(
            f"the database of shard {name!r} is a queue of its own, with topics or shards: give this queue "
            "an empty database"
        )


@verbs
class _Claim:
    def __init__(self, session: Session) -> None:
        self._session = session

    def claim(self, queue: str, name: str, *, listed: bool) -> None:
        """Write down whose the database is: once, since others may want it at the same moment (I1)."""
        with self._session.write(Area.LOG) as tx:
            tx.locked(_SETTING, "catalog_version")
            _refuse_foreign(tx, queue, name, listed=listed)
            upsert = self._session.dialect.upsert("postroom_settings", ("name",), ("value",))
            tx.many(upsert, [("queue", queue), ("shard", name)])


# Progress belongs to one log. SQLite keeps them in two files, which people copy, restore and delete.
#
# With another log, or with an older copy of its own, a cursor lies beyond messages that were never handed
# out, and they would be skipped without a trace. So the two are compared when a store is opened, and one
# that does not fit is refused: nothing is changed until somebody has decided (R6).

_ENDS = "SELECT id, next_offset FROM postroom_partitions WHERE volatile = 0"
_CURE = (
    "restore log and progress from the same backup, or remove the progress (on SQLite the file that ends in "
    "'.progress'): every group then starts again from its start"
)


def check_pair(session: Session) -> None:
    """Claim new progress for this log; StoreCorrupt if it belongs to another, or is ahead of this one."""
    with session.read(Area.LOG) as tx:
        mine = str((tx.one("SELECT value FROM postroom_settings WHERE name = 'uuid'") or ("",))[0])
    owner = _owner(session) or _claim(session, mine)
    if owner != mine:
        raise StoreCorrupt(f"the progress kept here belongs to another log; {_CURE}", owner=owner, log=mine)
    with session.read(Area.PROGRESS) as tx:  # before the ends, which only grow
        cursors = tx.all("SELECT partition_id, MAX(next_new) FROM postroom_progress GROUP BY partition_id")
    with session.read(Area.LOG) as tx:
        ends: dict[int, int] = dict(tx.all(_ENDS))
    for partition_id, cursor in cursors:
        if cursor > ends.get(partition_id, cursor):
            raise StoreCorrupt(
                f"the log is older than its progress: a group is at offset {cursor} of a partition that ends "
                f"at {ends[partition_id]}; {_CURE}",
                partition_id=partition_id,
            )


def _owner(session: Session) -> str | None:
    with session.read(Area.PROGRESS) as tx:
        row = tx.one("SELECT uuid FROM postroom_owner")
    return str(row[0]) if row else None


def _claim(session: Session, mine: str) -> str:
    try:
        with session.write(Area.PROGRESS) as tx:
            row = tx.one("SELECT uuid FROM postroom_owner")
            if row is None:
                tx.do("INSERT INTO postroom_owner (uuid) VALUES (?)", mine)
    except StoreError as error:  # another one who came first did so at the same moment
        owner = _owner(session) if error.undone else None
        if owner is None:
            raise
        return owner
    return str(row[0]) if row else mine
