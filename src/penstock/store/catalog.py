"""Topics, routes and groups. Every change is one flushed transaction that bumps the catalog's version.

A group's start is turned into offsets in the transaction that makes or resets the group (I9); progress is
made from them when a partition is first polled. Ids are never used again (I11).
"""

from __future__ import annotations

import difflib

import msgspec

from ..errors import GroupExists, InvalidSetting, PenstockError, TopicExists, UnknownGroup, UnknownTopic
from ..model.route import Range, Route, even_ranges
from ..model.settings import GroupSettings, Start, TopicSettings
from .contract import Group, Topic
from .lookups import first_row
from .schema import create_log, log_table
from .session import Lane, Session, Transaction

__all__ = ["SqlCatalog"]

_TOPIC = "SELECT id, name, settings, route_version, created_at FROM penstock_topics"
_RANGES = """SELECT r.topic_id, r.first_slot, r.last_slot, p.number, r.partition_id
             FROM penstock_ranges r JOIN penstock_partitions p ON p.id = r.partition_id
             JOIN penstock_topics t ON t.id = r.topic_id AND t.route_version = r.version"""
_GROUP = """SELECT g.id, g.topic_id, t.name, g.name, g.settings, g.generation, g.paused, g.created_at
            FROM penstock_groups g JOIN penstock_topics t ON t.id = g.topic_id"""
_PARTITIONS = """SELECT p.id, p.number, p.next_offset, COALESCE(s.log_start, 0) FROM penstock_partitions p
                 LEFT JOIN penstock_trims s ON s.partition_id = p.id
                 WHERE p.topic_id = ? AND p.state <> 'dropped' ORDER BY p.number"""
_INSERT_TOPIC = "INSERT INTO penstock_topics (name, settings, route_version, created_at) VALUES (?, ?, 1, ?)"
_INSERT_RANGE = """INSERT INTO penstock_ranges (topic_id, version, first_slot, last_slot, partition_id)
                   VALUES (?, 1, ?, ?, ?)"""
_RESERVED = "new"  # a partition whose topic is being made
_RESERVE = """INSERT INTO penstock_partitions (topic_id, number, state, next_offset, next_bytes, appended_at)
              VALUES (0, ?, ?, 0, 0, ?)"""
_OPEN = "UPDATE penstock_partitions SET topic_id = ?, state = 'open' WHERE id = ?"
_DROPPED = """SELECT id FROM penstock_partitions
              WHERE state = 'dropped' OR (state = 'new' AND appended_at < ?) ORDER BY id"""
_RESERVED_MS = 3_600_000  # whoever has not finished making a topic by then never will
_FORGET_STARTS = """DELETE FROM penstock_starts
                    WHERE group_id IN (SELECT id FROM penstock_groups WHERE topic_id = ?)"""


class SqlCatalog:
    def __init__(self, session: Session) -> None:
        self._session = session

    def version(self) -> int:
        with self._session.read(Lane.LOG) as tx:
            row = tx.one("SELECT value FROM penstock_settings WHERE name = 'catalog_version'")
        return int(row[0]) if row else 0

    # ---- topics ----

    def create_topic(self, name: str, settings: TopicSettings, partitions: int) -> Topic:
        """Three steps, since making a table commits on some databases: reserve ids, make logs, publish."""
        slots = even_ranges(partitions)
        with self._session.write(Lane.LOG) as tx:
            _refuse_topic(tx, name)
            now = tx.now_ms()
            ids = [tx.insert(_RESERVE, number, _RESERVED, now) for number in range(partitions)]
        for partition_id in ids:
            create_log(self._session, partition_id)
        with self._session.write(Lane.LOG) as tx:
            _refuse_topic(tx, name)
            topic_id = tx.insert(_INSERT_TOPIC, name, _encode(settings), tx.now_ms())
            pairs = zip(slots, ids, strict=True)
            tx.many(_INSERT_RANGE, [(topic_id, *edges, partition_id) for edges, partition_id in pairs])
            tx.many(_OPEN, [(topic_id, partition_id) for partition_id in ids])
            _bump(tx)
            return _topic(tx, name)

    def topic(self, name: str) -> Topic:
        with self._session.read(Lane.LOG) as tx:
            return _topic(tx, name)

    def topics(self) -> list[Topic]:
        with self._session.read(Lane.LOG) as tx:
            ranges: dict[int, list[Range]] = {}
            for topic_id, *rest in tx.all(_RANGES + " ORDER BY r.topic_id, r.first_slot"):
                ranges.setdefault(topic_id, []).append(Range(*rest))
            rows = tx.all(_TOPIC + " ORDER BY name")
        return [_make_topic(row, ranges[row[0]]) for row in rows if row[0] in ranges]

    def alter_topic(self, name: str, settings: TopicSettings) -> Topic:
        with self._session.write(Lane.LOG) as tx:
            topic = _topic(tx, name)
            tx.run("UPDATE penstock_topics SET settings = ? WHERE id = ?", _encode(settings), topic.id)
            _bump(tx)
            return _topic(tx, name)

    def delete_topic(self, name: str) -> list[int]:
        with self._session.write(Lane.LOG) as tx:
            topic = _topic(tx, name)
            ids = [row[0] for row in tx.all(_PARTITIONS, topic.id)]
            tx.run("UPDATE penstock_partitions SET state = 'dropped' WHERE topic_id = ?", topic.id)
            tx.run(_FORGET_STARTS, topic.id)
            tx.run("DELETE FROM penstock_groups WHERE topic_id = ?", topic.id)
            tx.run("DELETE FROM penstock_ranges WHERE topic_id = ?", topic.id)
            tx.run("DELETE FROM penstock_topics WHERE id = ?", topic.id)
            _bump(tx)
        return ids

    def dropped(self) -> list[int]:
        with self._session.read(Lane.LOG) as tx:
            return [row[0] for row in tx.all(_DROPPED, tx.now_ms() - _RESERVED_MS)]

    def drop_log(self, partition_id: int) -> None:
        with self._session.write(Lane.LOG) as tx:
            tx.run(f"DROP TABLE IF EXISTS {log_table(partition_id)}")
        with self._session.write(Lane.LOG) as tx:
            for table, column in (
                ("sequences", "partition_id"),
                ("trims", "partition_id"),
                ("partitions", "id"),
            ):
                tx.run(f"DELETE FROM penstock_{table} WHERE {column} = ?", partition_id)

    # ---- groups ----

    def create_group(self, topic: str, name: str, settings: GroupSettings) -> Group:
        with self._session.write(Lane.LOG) as tx:
            topic_id = _topic(tx, topic).id
            if tx.one("SELECT 1 FROM penstock_groups WHERE topic_id = ? AND name = ?", topic_id, name):
                raise GroupExists(
                    f"topic {topic!r} has a group {name!r} already; use alter_group to change it"
                )
            group_id = tx.insert(
                """INSERT INTO penstock_groups (topic_id, name, settings, generation, paused, created_at)
                   VALUES (?, ?, ?, 1, 0, ?)""",
                topic_id,
                name,
                _encode(settings),
                tx.now_ms(),
            )
            _resolve(tx, group_id, topic_id, topic, settings.start)
            _bump(tx)
            return _group(tx, topic, name)

    def group(self, topic: str, name: str) -> Group:
        with self._session.read(Lane.LOG) as tx:
            return _group(tx, topic, name)

    def groups(self, topic: str) -> list[Group]:
        with self._session.read(Lane.LOG) as tx:
            topic_id = _topic(tx, topic).id
            return [_make_group(row) for row in tx.all(_GROUP + " WHERE t.id = ? ORDER BY g.name", topic_id)]

    def alter_group(self, topic: str, name: str, settings: GroupSettings, paused: bool) -> Group:
        with self._session.write(Lane.LOG) as tx:
            group = _group(tx, topic, name)
            tx.run(
                "UPDATE penstock_groups SET settings = ?, paused = ? WHERE id = ?",
                _encode(settings),
                int(paused),
                group.id,
            )
            _bump(tx)
            return _group(tx, topic, name)

    def delete_group(self, topic: str, name: str) -> Group:
        with self._session.write(Lane.LOG) as tx:
            group = _group(tx, topic, name)
            tx.run("DELETE FROM penstock_starts WHERE group_id = ?", group.id)
            tx.run("DELETE FROM penstock_groups WHERE id = ?", group.id)
            _bump(tx)
        return group

    def reset_group(self, topic: str, name: str, start: Start) -> Group:
        with self._session.write(Lane.LOG) as tx:
            group = _group(tx, topic, name)
            tx.run("DELETE FROM penstock_starts WHERE group_id = ?", group.id)
            _resolve(tx, group.id, group.topic_id, topic, start)
            tx.run("UPDATE penstock_groups SET generation = generation + 1 WHERE id = ?", group.id)
            _bump(tx)
            return _group(tx, topic, name)

    def start_of(self, group_id: int, partition_id: int) -> tuple[int, int]:
        with self._session.read(Lane.LOG) as tx:
            row = tx.one(
                """SELECT g.generation, COALESCE(s.start_offset, 0) FROM penstock_groups g
                   LEFT JOIN penstock_starts s ON s.group_id = g.id AND s.partition_id = ? WHERE g.id = ?""",
                partition_id,
                group_id,
            )
        if row is None:
            raise UnknownGroup("the group was deleted; create it again, or stop its consumers")
        return row[0], row[1]


def _resolve(tx: Transaction, group_id: int, topic_id: int, topic: str, start: Start) -> None:
    """Write one start offset for every partition there is (I9), clamped to what is kept (I19)."""
    partitions = tx.all(_PARTITIONS, topic_id)
    named = dict(start.offsets)
    unknown = set(named) - {number for _, number, _, _ in partitions}
    if unknown:
        raise InvalidSetting(
            f"topic {topic!r} has no partition {min(unknown)}; `topics` and `lag` show which it has"
        )
    rows = []
    for partition_id, number, end, log_start in partitions:
        if start.kind == "latest":
            offset = end
        elif start.kind == "time":
            offset = first_row(tx, partition_id, "appended_at", start.time_ms)
        else:
            offset = named.get(number, log_start)
        rows.append((group_id, partition_id, min(max(offset, log_start), end)))
    tx.many("INSERT INTO penstock_starts (group_id, partition_id, start_offset) VALUES (?, ?, ?)", rows)


def _topic(tx: Transaction, name: str) -> Topic:
    row = tx.one(_TOPIC + " WHERE name = ?", name)
    if row is None:
        raise _unknown_topic(tx, name)
    ranges = tx.all(_RANGES + " WHERE r.topic_id = ? ORDER BY r.first_slot", row[0])
    if not ranges:  # deleted since the first statement
        raise _unknown_topic(tx, name)
    return _make_topic(row, [Range(*rest) for _, *rest in ranges])


def _make_topic(row: tuple[object, ...], ranges: list[Range]) -> Topic:
    topic_id, name, settings, version, created_at = row
    decoded = msgspec.json.decode(str(settings), type=TopicSettings)
    return Topic(
        int(str(topic_id)),
        str(name),
        decoded,
        Route(str(name), int(str(version)), tuple(ranges)),
        int(str(created_at)),
    )


def _unknown_topic(tx: Transaction, name: str) -> PenstockError:
    names = [row[0] for row in tx.all("SELECT name FROM penstock_topics")]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return UnknownTopic(
        f"there is no topic {name!r}; {hint}create it with create_topic({name!r}) or "
        f"`penstock topic create {name}`",
        topic=name,
    )


def _group(tx: Transaction, topic: str, name: str) -> Group:
    row = tx.one(_GROUP + " WHERE t.name = ? AND g.name = ?", topic, name)
    if row is not None:
        return _make_group(row)
    topic_id = _topic(tx, topic).id
    names = [r[0] for r in tx.all("SELECT name FROM penstock_groups WHERE topic_id = ?", topic_id)]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UnknownGroup(
        f"topic {topic!r} has no group {name!r}; {hint}create it with create_group({topic!r}, {name!r}), "
        "or start a consumer in it",
        topic=topic,
        group=name,
    )


def _make_group(row: tuple[object, ...]) -> Group:
    group_id, topic_id, topic, name, settings, generation, paused, created_at = row
    decoded = msgspec.json.decode(str(settings), type=GroupSettings)
    return Group(
        int(str(group_id)), int(str(topic_id)), str(topic), str(name), decoded,
        int(str(generation)), bool(paused), int(str(created_at)),
    )  # fmt: skip


def _refuse_topic(tx: Transaction, name: str) -> None:
    if tx.one("SELECT 1 FROM penstock_topics WHERE name = ?", name):
        raise TopicExists(
            f"there is a topic {name!r} already; pass exist_ok=True if that is fine", topic=name
        )


def _bump(tx: Transaction) -> None:
    row = tx.one("SELECT value FROM penstock_settings WHERE name = 'catalog_version'")
    version = int(row[0]) + 1 if row else 1
    tx.run("UPDATE penstock_settings SET value = ? WHERE name = 'catalog_version'", str(version))


def _encode(settings: TopicSettings | GroupSettings) -> str:
    return msgspec.json.encode(settings).decode()
