"""What is written down about shards: their names on the first one, and on each the partitions it has (R6).

The first shard has a row for every partition, with the name of its shard; on that shard a row with the same
id has its end, its lock and its sequences. On a shard every partition is "here": the column `shard` is empty.
Addresses are in the configuration alone, never in a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ...model.topology.route import Range
from ..sql.lists import blanks
from ..sql.log.volatile import place_log
from ..sql.schema import create_log, log_table
from ..sql.session import Area, Session, verbs

__all__ = ["SqlPlaces", "SqlShards"]

_PLACE = """INSERT INTO postroom_partitions
            (id, topic_id, number, state, next_offset, next_bytes, appended_at, volatile, first_slot,
             last_slot)
            VALUES (?, ?, ?, 'open', 0, 0, 0, ?, ?, ?)"""
_COUNTS = """SELECT shard, state, COUNT(*) FROM postroom_partitions
             WHERE state IN ('new', 'open', 'sealed', 'dropped') GROUP BY shard, state"""
_OF_PARTITION = ("sequences", "trims", "schedule", "delayed")


@verbs
class SqlShards:
    """The table of shards, and of which partition is where: on the first shard."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def known(self) -> dict[str, tuple[str, str]]:
        """By name: UUID and state."""
        with self._session.read(Area.LOG) as tx:
            rows = tx.all("SELECT name, uuid, state FROM postroom_shards ORDER BY name")
        return {name: (uuid, state) for name, uuid, state in rows}

    def add(self, name: str, uuid: str) -> None:
        """Two at once: one meets the other's row, and looks again."""
        with self._session.write(Area.LOG) as tx:
            row = tx.one("SELECT uuid FROM postroom_shards WHERE name = ?", name)
            if row is None:
                tx.do(
                    "INSERT INTO postroom_shards (name, uuid, state, added_at) VALUES (?, ?, 'open', ?)",
                    name,
                    uuid,
                    tx.now_ms(),
                )

    def set_state(self, name: str, state: str) -> None:
        with self._session.write(Area.LOG) as tx:
            tx.do("UPDATE postroom_shards SET state = ? WHERE name = ?", state, name)

    def shard_of(self, partition_id: int) -> str | None:
        with self._session.read(Area.LOG) as tx:
            row = tx.one("SELECT shard FROM postroom_partitions WHERE id = ?", partition_id)
        return None if row is None else str(row[0])

    def counts(self) -> dict[str, dict[str, int]]:
        """By shard and state, how many partitions have a log there."""
        with self._session.read(Area.LOG) as tx:
            rows = tx.all(_COUNTS)
        found: dict[str, dict[str, int]] = {}
        for shard, state, count in rows:
            found.setdefault(shard, {})[state] = int(count)
        return found

    def ever_used(self) -> set[str]:
        """Shards that have, or had, a partition."""
        with self._session.read(Area.LOG) as tx:
            return {str(row[0]) for row in tx.all("SELECT DISTINCT shard FROM postroom_partitions")}


@verbs
class SqlPlaces:
    """The partitions of a shard that is not the first: on that shard."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def place(self, piece: Range, topic_id: int, volatile: bool) -> None:
        """A partition's row and log, as far as they are missing."""
        with self._session.write(Area.LOG) as tx:
            if tx.one("SELECT 1 FROM postroom_partitions WHERE id = ?", piece.partition_id) is None:
                row = (piece.partition_id, topic_id, piece.partition, int(volatile))
                tx.do(_PLACE, *row, piece.first_slot, piece.last_slot)
                tx.do(
                    "INSERT INTO postroom_trims (partition_id, log_start) VALUES (?, 0)", piece.partition_id
                )
        if volatile:
            place_log(self._session, piece.partition_id)
        else:
            create_log(self._session, piece.partition_id)

    def here(self, partition_ids: Sequence[int]) -> set[int]:
        """Return those of these partitions that were ever made."""
        marks = blanks(len(partition_ids))
        with self._session.read(Area.LOG) as tx:
            rows = tx.all(f"SELECT id FROM postroom_partitions WHERE id IN ({marks})", *partition_ids)
        return {int(row[0]) for row in rows}

    def forget_topic(self, topic_id: int) -> None:
        """Forget a topic that was deleted: its logs are to be dropped, and its delayed messages are gone."""
        for place in self._places():
            with self._session.write(place) as tx:
                if place is Area.LOG:
                    ids = [
                        r[0]
                        for r in tx.all("SELECT id FROM postroom_partitions WHERE topic_id = ?", topic_id)
                    ]
                    tx.do("DELETE FROM postroom_schedule WHERE topic_id = ?", topic_id)
                    tx.do("DELETE FROM postroom_delayed WHERE topic_id = ?", topic_id)
                tx.many("UPDATE postroom_partitions SET state = 'dropped' WHERE id = ?", [(i,) for i in ids])

    def note_sealed(self, partition_id: int) -> None:
        """Seal a volatile partition where it outlives its log too: it is not made anew, and takes nothing."""
        with self._session.read(Area.LOG) as tx:
            if tx.one("SELECT 1 FROM postroom_partitions WHERE id = ? AND state = 'sealed'", partition_id):
                return
        with self._session.write(Area.LOG) as tx:
            tx.do("UPDATE postroom_partitions SET state = 'sealed' WHERE id = ?", partition_id)

    def remove(self, partition_id: int) -> None:
        """Remove the log of a sealed partition, and all progress in it; its row and sequences stay (I11)."""
        for place in self._places():
            with self._session.write(place) as tx:
                tx.do("UPDATE postroom_partitions SET state = 'removed' WHERE id = ?", partition_id)
        self._drop_table(partition_id)
        self._delete(("progress", "deliveries", "parked"), partition_id)

    def drop(self, partition_id: int) -> None:
        """All that there is of a partition."""
        self._drop_table(partition_id)
        self._delete(_OF_PARTITION, partition_id)
        for place in self._places():
            with self._session.write(place) as tx:
                tx.do("DELETE FROM postroom_partitions WHERE id = ?", partition_id)

    def delayed(self) -> int:
        """How many messages wait here."""
        with self._session.read(Area.LOG) as tx:
            row = tx.one("SELECT SUM(messages) FROM postroom_delayed")
            moves = tx.one("SELECT COUNT(*) FROM postroom_moves")
        return max(int(row[0] or 0) if row else 0, int(moves[0]) if moves else 0)

    def _places(self) -> Iterable[Area]:
        """Where partitions have rows; the catalog's first."""
        return [area for area in (Area.LOG, Area.VOLATILE) if area in self._session.dialect.areas]

    def _drop_table(self, partition_id: int) -> None:
        for place in self._places():
            with self._session.write(place) as tx:
                tx.do(f"DROP TABLE IF EXISTS {log_table(partition_id)}")

    def _delete(self, tables: Collection[str], partition_id: int) -> None:
        for place in self._session.dialect.areas:
            with self._session.write(place) as tx:
                for table in tables:
                    if self._session.dialect.has_table(tx, f"postroom_{table}"):
                        tx.do(f"DELETE FROM postroom_{table} WHERE partition_id = ?", partition_id)
