"""Consumer groups of Kafka clients: leases of coordinators, generations, and committed offsets.

Every verb that changes a group locks its row first (I1), so that a commit is checked against the generation
that is written down, in the transaction that writes it (I28). Rows are found by a digest of the group's name,
which is any text: databases differ in what they take for the same. Decides nothing: `model.kafka_group` does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

import msgspec

from ...model.kafka_group import Generation, GroupError, Who
from ..contract.kafka import KafkaGroup, KafkaOffset, Positions, ShareGroup
from .lists import each, parts
from .session import Area, Row, Session, Transaction, verbs

__all__ = ["SqlKafkaGroups"]

_GROUP = "SELECT name, generation, holder, until_ms FROM postroom_kafka_groups"
_LOCK = _GROUP + " WHERE id = ?"
_NEW = """INSERT INTO postroom_kafka_groups (id, name, generation, holder, until_ms)
          VALUES (?, ?, ?, ?, ?)"""
_HOLD = "UPDATE postroom_kafka_groups SET holder = ?, until_ms = ? WHERE id = ?"
_RENEW = "UPDATE postroom_kafka_groups SET until_ms = ? WHERE holder = ? AND until_ms < ?"
_MINE = "SELECT id, name FROM postroom_kafka_groups WHERE holder = ?"
_WRITE = "UPDATE postroom_kafka_groups SET generation = ? WHERE id = ?"
_RELEASE = "UPDATE postroom_kafka_groups SET holder = '', until_ms = ? WHERE id = ?"
_EMPTY = "UPDATE postroom_kafka_groups SET generation = ?, holder = '' WHERE id = ?"
_OFFSETS = """SELECT topic_id, kafka_partition, committed, leader_epoch, metadata, committed_at
              FROM postroom_kafka_offsets WHERE group_id = ? ORDER BY topic_id, kafka_partition"""
_POSITIONS = """SELECT o.topic_id, g.name, o.kafka_partition, o.committed FROM postroom_kafka_offsets o
                JOIN postroom_kafka_groups g ON g.id = o.group_id WHERE 1 = 1"""
_OF_GROUPS = """SELECT DISTINCT g.name, o.topic_id FROM postroom_kafka_offsets o
                JOIN postroom_kafka_groups g ON g.id = o.group_id"""
_ANY = "SELECT 1 FROM postroom_kafka_offsets WHERE group_id = ? LIMIT 1"
_TOPICS = "SELECT DISTINCT topic_id FROM postroom_kafka_offsets"
_IDLE = "SELECT id FROM postroom_kafka_groups WHERE until_ms < ?"
_DROP_GROUP = "DELETE FROM postroom_kafka_groups WHERE id = ?"
_DROP_OFFSETS = "DELETE FROM postroom_kafka_offsets WHERE group_id = ?"

_SHARED = "SELECT name, configs FROM postroom_share_groups"
_SHARED_COUNT = "SELECT COUNT(*) FROM postroom_share_groups WHERE id <> ?"

_configs = msgspec.msgpack.Decoder(dict[str, str])
_decode = msgspec.msgpack.Decoder(Generation).decode


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def _encode(generation: Generation) -> bytes:
    return msgspec.msgpack.encode(generation)


def _group(row: Row) -> KafkaGroup:
    name, generation, holder, until = row
    return KafkaGroup(bytes(name).decode(), _decode(bytes(generation)), holder, until)


@verbs
class SqlKafkaGroups:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._put = session.dialect.upsert(
            "postroom_kafka_offsets",
            ("group_id", "topic_id", "kafka_partition"),
            ("committed", "leader_epoch", "metadata", "committed_at"),
        )
        self._put_shared = session.dialect.upsert("postroom_share_groups", ("id",), ("name", "configs"))

    # ---- coordinators ----

    def take(self, name: str, holder: str, lease_ms: int, *, make: bool = False) -> KafkaGroup | None:
        id = _digest(name)
        with self._session.write(Area.PROGRESS) as tx:
            row = tx.locked(_LOCK, id)
            until = tx.now_ms() + lease_ms
            if row is None:
                if make:  # two at once: one meets the other's row, and looks again
                    tx.do(_NEW, id, name.encode(), _encode(Generation()), holder, until)
                return KafkaGroup(name, Generation(), holder, until) if make else None
            found = _group(row)
            if found.holder not in ("", holder) and tx.now_ms() < found.until <= until:
                return found  # one that ends later is of a clock that was set back (I26)
            tx.do(_HOLD, holder, until, id)
            return KafkaGroup(name, found.generation, holder, until)

    def renew(self, holder: str, lease_ms: int) -> set[str]:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            until = tx.now_ms() + lease_ms
            tx.do(_RENEW, until, holder, until)
            return {bytes(name).decode() for _, name in tx.all(_MINE, holder)}

    def release(self, holder: str, names: Collection[str] | None = None) -> None:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            mine = tx.all(_MINE, holder)
            now = tx.now_ms()
            for id, name in sorted((bytes(id), bytes(name).decode()) for id, name in mine):
                row = tx.locked(_LOCK, id) if names is None or name in names else None
                if row is None or row[2] != holder:
                    continue
                if not _group(row).generation.number and not tx.one(_ANY, id):
                    tx.do(_DROP_GROUP, id)
                else:
                    tx.do(_RELEASE, now, id)

    def write(self, name: str, holder: str, generation: Generation) -> bool:
        id = _digest(name)
        with self._session.write(Area.PROGRESS) as tx:
            row = tx.locked(_LOCK, id)
            if row is None or row[2] != holder:
                return False
            tx.do(_WRITE, _encode(generation), id)
            return True

    # ---- offsets ----

    def commit(self, name: str, holder: str, who: Who, offsets: Sequence[KafkaOffset]) -> GroupError:
        id = _digest(name)
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            row = tx.locked(_LOCK, id)
            if row is None or row[2] != holder:
                return GroupError.NOT_COORDINATOR
            error = _group(row).generation.check_commit(who)
            if not error:
                self._set(tx, id, offsets)
            return error

    def _set(self, tx: Transaction, id: bytes, offsets: Sequence[KafkaOffset]) -> None:
        now = tx.now_ms()
        rows = {(one.topic_id, one.partition): one for one in offsets}
        tx.many(
            self._put,
            [
                (id, *at, one.offset, one.leader_epoch, one.metadata.encode(), now)
                for at, one in sorted(rows.items())
            ],
        )

    def offsets(self, name: str) -> list[KafkaOffset]:
        with self._session.read(Area.PROGRESS) as tx:
            rows = tx.all(_OFFSETS, _digest(name))
        return [
            KafkaOffset(topic_id, partition, offset, epoch, bytes(metadata).decode(), at)
            for topic_id, partition, offset, epoch, metadata, at in rows
        ]

    def topics(self) -> dict[str, set[int]]:
        with self._session.read(Area.PROGRESS) as tx:
            rows = tx.all(_OF_GROUPS)
        found: dict[str, set[int]] = {}
        for name, topic_id in rows:
            found.setdefault(bytes(name).decode(), set()).add(topic_id)
        return found

    def positions(self, topic_ids: Collection[int] | None = None) -> Positions:
        with self._session.read(Area.PROGRESS) as tx:
            rows = each(tx, _POSITIONS, "o.topic_id", topic_ids)
        found: Positions = {}
        for topic_id, name, partition, offset in rows:
            of_topic = found.setdefault(topic_id, {})
            of_topic.setdefault(bytes(name).decode(), {})[partition] = offset
        return found

    # ---- groups ----

    def group(self, name: str) -> KafkaGroup | None:
        with self._session.read(Area.PROGRESS) as tx:
            row = tx.one(_LOCK, _digest(name))
        return None if row is None else _group(row)

    def groups(self) -> list[KafkaGroup]:
        with self._session.read(Area.PROGRESS) as tx:
            return sorted((_group(row) for row in tx.all(_GROUP)), key=lambda one: one.name)

    def put(self, name: str, offsets: Sequence[KafkaOffset], *, force: bool = False) -> bool:
        id = _digest(name)
        with self._session.write(Area.PROGRESS) as tx:
            if not self._emptied(tx, id, force):
                return False
            if tx.one(_LOCK, id) is None:
                tx.do(_NEW, id, name.encode(), _encode(Generation()), "", tx.now_ms())
            self._set(tx, id, offsets)
            return True

    def _emptied(self, tx: Transaction, id: bytes, force: bool) -> bool:
        """Lock the group; False if it is in use, unless whoever uses it is to begin anew."""
        row = tx.locked(_LOCK, id)
        if row is None:
            return True
        found = _group(row)
        if found.is_live(tx.now_ms()) and not force:
            return False
        if found.generation.members:
            emptied = Generation(found.generation.number + 1, found.generation.protocol_type)
            tx.do(_EMPTY, _encode(emptied), id)
        return True

    def drop(
        self, name: str, topic_id: int | None = None, partitions: Collection[int] | None = None, *,
        force: bool = False,
    ) -> bool:  # fmt: skip
        id = _digest(name)
        with self._session.write(Area.PROGRESS) as tx:
            if partitions is not None:
                tx.locked(_LOCK, id)
                rows = [(id, topic_id, one) for one in sorted(partitions)]
                tx.many(f"{_DROP_OFFSETS} AND topic_id = ? AND kafka_partition = ?", rows)
                return True
            if not self._emptied(tx, id, force):
                return False
            if topic_id is None:
                tx.do(_DROP_OFFSETS, id)
            else:
                tx.do(f"{_DROP_OFFSETS} AND topic_id = ?", id, topic_id)
            if tx.one(_ANY, id) is None:
                tx.do(_DROP_GROUP, id)
            return True

    def expire(self, idle_ms: int, topic_ids: Collection[int]) -> list[str]:
        with self._session.read(Area.PROGRESS) as tx:
            idle = [bytes(row[0]) for row in tx.all(_IDLE, tx.now_ms() - idle_ms)]
            gone = sorted({row[0] for row in tx.all(_TOPICS)} - set(topic_ids))
        found: list[str] = []
        for some in parts(sorted(idle)):
            with self._session.write(Area.PROGRESS) as tx:
                for id in some:
                    row = tx.locked(_LOCK, id)
                    if row is not None and row[3] < tx.now_ms() - idle_ms:
                        tx.do(_DROP_OFFSETS, id)
                        tx.do(_DROP_GROUP, id)
                        found.append(bytes(row[0]).decode())
        for topic_id in gone:
            with self._session.write(Area.PROGRESS) as tx:
                tx.do("DELETE FROM postroom_kafka_offsets WHERE topic_id = ?", topic_id)
        return sorted(found)

    # ---- share groups ----

    def share_group(self, name: str) -> ShareGroup | None:
        with self._session.read(Area.PROGRESS) as tx:
            row = tx.one(f"{_SHARED} WHERE id = ?", _digest(name))
        return None if row is None else _shared(row)

    def share_groups(self) -> list[ShareGroup]:
        with self._session.read(Area.PROGRESS) as tx:
            return sorted((_shared(row) for row in tx.all(_SHARED)), key=lambda group: group.name)

    def put_share_group(self, group: ShareGroup, most: int) -> bool:
        id = _digest(group.name)
        with self._session.write(Area.PROGRESS) as tx:
            row = tx.one(_SHARED_COUNT, id)
            if row is not None and row[0] >= most:
                return False
            tx.many(self._put_shared, [(id, group.name.encode(), msgspec.msgpack.encode(group.configs))])
            return True

    def drop_share_group(self, name: str) -> None:
        with self._session.write(Area.PROGRESS) as tx:
            tx.do("DELETE FROM postroom_share_groups WHERE id = ?", _digest(name))


def _shared(row: Row) -> ShareGroup:
    name, configs = row
    return ShareGroup(bytes(name).decode(), _configs.decode(bytes(configs)))
