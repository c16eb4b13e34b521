"""Topics, routes and groups. Every change is one flushed transaction that bumps the catalog's version.

A group's start is turned into offsets in the transaction that makes or resets the group (I9); progress is
made from them when a partition is first polled. Ids are never used again (I11).

This is the catalog of one database. What a queue on several does differently is in methods of their own
(`_place`, `make_log`, `_elsewhere`, …), which `shard_catalog` overrides.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from ....config import DEFAULTS
from ....errors import GroupExists, InvalidSetting, PostroomError, TopicExists, UnknownGroup
from ....model.policy.settings import GroupSettings, Start, TopicSettings
from ....model.topology.names import is_internal, unknown_topic
from ....model.topology.route import Change, Range, Route, even_ranges
from ...contract import Group, Origin, Topic
from ..lists import blanks, parts
from ..log.lookups import area_of, first_row
from ..log.volatile import place_log
from ..schema import create_log, log_table
from ..session import Area, Session, Transaction, empties, verbs
from .reserved import reserve

__all__ = ["SqlCatalog", "encode_settings", "offset_of", "topic_of"]

_VERSION = "SELECT value FROM postroom_settings WHERE name = 'catalog_version'"
_TOPIC = "SELECT id, name, settings, route_version, created_at FROM postroom_topics"
_RANGES = """SELECT r.topic_id, r.version, r.first_slot, r.last_slot, p.number, r.partition_id, p.shard
             FROM postroom_ranges r JOIN postroom_partitions p ON p.id = r.partition_id
             JOIN postroom_topics t ON t.id = r.topic_id AND t.route_version = r.version"""
_SEALED = """SELECT topic_id, first_slot, last_slot, number, id, shard FROM postroom_partitions
             WHERE state = 'sealed'"""
_LINEAGE = "SELECT topic_id, partition_id, predecessor_id FROM postroom_lineage"
_GROUP = """SELECT g.id, g.topic_id, t.name, g.name, g.settings, g.generation, g.paused, g.created_at
            FROM postroom_groups g JOIN postroom_topics t ON t.id = g.topic_id"""
_NUMBERS = """SELECT id, number, shard FROM postroom_partitions
              WHERE topic_id = ? AND state IN ('open', 'sealed') ORDER BY number"""
_EDGES = """SELECT p.next_offset, COALESCE(s.log_start, 0) FROM postroom_partitions p
            LEFT JOIN postroom_trims s ON s.partition_id = p.id WHERE p.id = ?"""
_INSERT_TOPIC = "INSERT INTO postroom_topics (name, settings, route_version, created_at) VALUES (?, ?, 1, ?)"
_GROUPS_AT = """SELECT g.id, g.name, g.settings, COALESCE(s.start_offset, 0), COALESCE(s.since, 0)
                FROM postroom_partitions p JOIN postroom_groups g ON g.topic_id = p.topic_id
                LEFT JOIN postroom_starts s ON s.group_id = g.id AND s.partition_id = p.id WHERE p.id = ?"""
_LINEAGE_AT = """SELECT l.partition_id, l.predecessor_id FROM postroom_lineage l
                 JOIN postroom_partitions p ON p.topic_id = l.topic_id WHERE p.id = ?"""
_INCARNATION = "SELECT name, value FROM postroom_settings WHERE name IN ('uuid', 'incarnation')"
_STARTS = """SELECT group_id, partition_id, start_offset, since FROM postroom_starts
             WHERE group_id IN ({marks})"""
_INSERT_START = (
    "INSERT INTO postroom_starts (group_id, partition_id, start_offset, since) VALUES (?, ?, ?, ?)"
)
_INSERT_RANGE = """INSERT INTO postroom_ranges (topic_id, version, first_slot, last_slot, partition_id)
                   VALUES (?, 1, ?, ?, ?)"""
_OPEN = "UPDATE postroom_partitions SET topic_id = ?, state = 'open' WHERE id = ?"
_DROPPED = """SELECT id FROM postroom_partitions
              WHERE state = 'dropped' OR (state = 'new' AND appended_at < ?) ORDER BY id"""
_PLANNED = "SELECT plan FROM postroom_changes"
_FORGET_STARTS = """DELETE FROM postroom_starts
                    WHERE group_id IN (SELECT id FROM postroom_groups WHERE topic_id = ?)"""
_FORGET_START = "DELETE FROM postroom_starts WHERE group_id = ? AND partition_id = ?"
_NAMES = "SELECT name FROM postroom_topics"
_NEAR = """SELECT name FROM {table} WHERE LENGTH(name) BETWEEN ? AND ?{more}
           ORDER BY CASE WHEN SUBSTR(name, 1, ?) = ? THEN 0 WHEN SUBSTR(name, 1, 3) = ? THEN 1 ELSE 2 END,
           name LIMIT 50"""
_MOST_BEGINNINGS = 50  # that are looked for in one statement; if there are more, all names are read
_FORGET_RATES = "DELETE FROM postroom_rates WHERE name = ? OR SUBSTR(name, 1, ?) = ?"  # its and its groups'


@verbs
class SqlCatalog:
    def __init__(self, session: Session) -> None:
        self._session = session

    @contextmanager
    def changing(self) -> Iterator[Transaction]:
        """A change of the catalog: one at a time, locked before anything is looked at (I1)."""
        with self._session.write(Area.LOG) as tx:
            row = tx.locked(_VERSION)
            yield tx
            version = int(row[0]) + 1 if row else 1
            tx.do("UPDATE postroom_settings SET value = ? WHERE name = 'catalog_version'", str(version))
            tx.announce(Area.LOG)

    def version(self) -> int:
        with self._session.read(Area.LOG) as tx:
            row = tx.one(_VERSION)
        return int(row[0]) if row else 0

    def incarnation(self) -> str:
        with self._session.read(Area.LOG) as tx:
            found: dict[str, str] = dict(tx.all(_INCARNATION))
        return str(found.get("incarnation") or found.get("uuid", ""))

    def restored(self) -> str:
        made = str(uuid.uuid4())
        with self.changing() as tx:
            upsert = self._session.dialect.upsert("postroom_settings", ("name",), ("value",))
            tx.do(upsert, "incarnation", made)
        return made

    # ---- topics ----

    def create_topic(self, name: str, settings: TopicSettings, partitions: int) -> Topic:
        """Three steps, since making a table commits on some databases: reserve ids, make logs, publish."""
        slots = even_ranges(partitions)
        with self._session.write(Area.LOG) as tx:
            _refuse_topic(tx, name)
            reserved, shards = self._place(tx, len(slots))
            pieces = [Range(*edges, -1, -1, shard) for edges, shard in zip(slots, shards, strict=True)]
            names = reserve(tx, 0, settings.volatile, pieces)
        ids = [partition_id for _, partition_id in names]
        for piece, (number, partition_id) in zip(pieces, names, strict=True):
            made = replace(piece, partition=number, partition_id=partition_id)
            self.make_log(made, reserved, settings.volatile)
        with self.changing() as tx:
            _refuse_topic(tx, name)
            self._check_placed(tx, shards)
            topic_id = self._insert_topic(tx, reserved, name, settings)
            pairs = zip(slots, ids, strict=True)
            tx.many(_INSERT_RANGE, [(topic_id, *edges, partition_id) for edges, partition_id in pairs])
            tx.many(_OPEN, [(topic_id, partition_id) for partition_id in ids])
            return topic_of(tx, name)

    def _place(self, tx: Transaction, count: int) -> tuple[int, list[str]]:
        """The shards of that many new partitions, and the id of their topic if it is needed already."""
        return 0, [""] * count

    def _check_placed(self, tx: Transaction, shards: Sequence[str]) -> None:
        """RouteConflict if one of them takes no partitions any more."""

    def _insert_topic(self, tx: Transaction, reserved: int, name: str, settings: TopicSettings) -> int:
        return tx.insert(_INSERT_TOPIC, name, encode_settings(settings), tx.now_ms())

    def make_log(self, piece: Range, topic_id: int, volatile: bool) -> None:
        """The log of a partition that was reserved; may be there already."""
        if volatile:
            place_log(self._session, piece.partition_id)
        else:
            create_log(self._session, piece.partition_id)

    def topic(self, name: str) -> Topic:
        with self._session.read(Area.LOG) as tx:
            return topic_of(tx, name)

    def topics(self, only: Collection[str] | None = None) -> list[Topic]:
        with self._session.read(Area.LOG) as tx:
            if only is None:
                return _topics(tx)
            found = [topic for some in parts(sorted(only)) for topic in _topics(tx, some)]
        return sorted(found, key=lambda topic: topic.name)

    def names(self, beginnings: Collection[str] | None = None) -> list[str]:
        if beginnings is not None and not beginnings:
            return []
        wanted = sorted({*beginnings}) if beginnings is not None else []
        if "" in wanted or len(wanted) > _MOST_BEGINNINGS:
            wanted = []  # whoever asks leaves out what it does not want
        where = " OR ".join("SUBSTR(name, 1, ?) = ?" for _ in wanted)
        args = [value for one in wanted for value in (len(one), one)]
        with self._session.read(Area.LOG) as tx:
            return sorted(row[0] for row in tx.all(f"{_NAMES} WHERE {where}" if where else _NAMES, *args))

    def count_topics(self, prefix: str, suffix: str) -> int:
        like = f"{_escaped(prefix)}%{_escaped(suffix)}"
        with self._session.read(Area.LOG) as tx:
            row = tx.one("SELECT COUNT(*) FROM postroom_topics WHERE name LIKE ? ESCAPE '!'", like)
        return int(row[0]) if row else 0

    def alter_topic(self, name: str, settings: TopicSettings) -> Topic:
        with self.changing() as tx:
            topic = topic_of(tx, name)
            tx.run(
                "UPDATE postroom_topics SET settings = ? WHERE id = ?", encode_settings(settings), topic.id
            )
            return topic_of(tx, name)

    @empties
    def delete_topic(self, name: str) -> list[int]:
        with self.changing() as tx:
            topic = topic_of(tx, name)
            ids = [row[0] for row in tx.all(_NUMBERS, topic.id)]
            tx.run("UPDATE postroom_partitions SET state = 'dropped' WHERE topic_id = ?", topic.id)
            tx.run(_FORGET_STARTS, topic.id)
            tx.run("DELETE FROM postroom_groups WHERE topic_id = ?", topic.id)
            for table in ("ranges", "lineage", "changes"):
                tx.run(f"DELETE FROM postroom_{table} WHERE topic_id = ?", topic.id)
            tx.run("DELETE FROM postroom_schedule WHERE topic_id = ?", topic.id)
            tx.run("DELETE FROM postroom_delayed WHERE topic_id = ?", topic.id)
            tx.run("DELETE FROM postroom_topics WHERE id = ?", topic.id)
            tx.do(_FORGET_RATES, f"topic:{name}", len(f"group:{name}/"), f"group:{name}/")
        if topic.settings.volatile and Area.VOLATILE in self._session.dialect.areas:
            with self._session.write(Area.VOLATILE) as tx:
                tx.many("UPDATE postroom_partitions SET state = 'dropped' WHERE id = ?", [(i,) for i in ids])
        return ids

    def dropped(self) -> list[int]:
        with self._session.read(Area.LOG) as tx:
            plans = [_decode_change(row[0]) for row in tx.all(_PLANNED)]
            wanted = {piece.partition_id for plan in plans for piece in plan.opens}
            rows = tx.all(_DROPPED, tx.now_ms() - self._session.tuning.reserved_ms)
        return [row[0] for row in rows if row[0] not in wanted]

    def drop_table(self, partition_id: int) -> Area:
        area = area_of(self._session, partition_id)
        with self._session.write(area) as tx:
            tx.do(f"DROP TABLE IF EXISTS {log_table(partition_id)}")
        return area

    def remove_log(self, partition_id: int) -> None:
        """The log of a sealed partition, and all progress in it; its row stays."""
        area = area_of(self._session, partition_id)
        if area is not Area.LOG and area in self._session.dialect.areas:
            with self._session.write(area) as tx:  # it has a row beside its log
                tx.do("UPDATE postroom_partitions SET state = 'removed' WHERE id = ?", partition_id)
        self.drop_table(partition_id)
        with self._session.write(Area.PROGRESS) as tx:
            for table in ("progress", "deliveries", "parked"):
                tx.do(f"DELETE FROM postroom_{table} WHERE partition_id = ?", partition_id)

    @empties
    def drop_log(self, partition_id: int) -> None:
        self._forget_partition(partition_id, self.drop_table(partition_id))

    def _forget_partition(self, partition_id: int, area: Area = Area.LOG) -> None:
        for place in dict.fromkeys((area, Area.LOG)):
            with self._session.write(place) as tx:
                for table, column in (
                    ("sequences", "partition_id"),
                    ("trims", "partition_id"),
                    ("partitions", "id"),
                ):
                    tx.do(f"DELETE FROM postroom_{table} WHERE {column} = ?", partition_id)

    # ---- groups ----

    def create_group(self, topic: str, name: str, settings: GroupSettings) -> Group:
        elsewhere = self._elsewhere(topic, settings.start)
        with self.changing() as tx:
            topic_id = topic_of(tx, topic).id
            if tx.one("SELECT 1 FROM postroom_groups WHERE topic_id = ? AND name = ?", topic_id, name):
                raise GroupExists(
                    f"topic {topic!r} has a group {name!r} already; pass exist_ok=True if that is fine, or "
                    "use alter_group to change it"
                )
            tx.insert(
                """INSERT INTO postroom_groups (topic_id, name, settings, generation, paused, created_at)
                   VALUES (?, ?, ?, 1, 0, ?)""",
                topic_id,
                name,
                encode_settings(settings),
                tx.now_ms(),
            )
            made = _group(tx, topic, name)
            self._resolve(tx, made, settings.start, elsewhere)
            return made

    def group(self, topic: str, name: str) -> Group:
        with self._session.read(Area.LOG) as tx:
            return _group(tx, topic, name)

    def groups(self, topic: str) -> list[Group]:
        with self._session.read(Area.LOG) as tx:
            topic_id = topic_of(tx, topic).id
            return [_make_group(row) for row in tx.all(_GROUP + " WHERE t.id = ? ORDER BY g.name", topic_id)]

    def groups_of(self, topic_ids: Collection[int] | None = None) -> list[Group]:
        order = " ORDER BY t.name, g.name"
        with self._session.read(Area.LOG) as tx:
            if topic_ids is None:
                return [_make_group(row) for row in tx.all(_GROUP + order)]
            rows = [
                row
                for some in parts(sorted(topic_ids))
                for row in tx.all(f"{_GROUP} WHERE t.id IN ({', '.join('?' * len(some))}){order}", *some)
            ]
        return [_make_group(row) for row in rows]

    def alter_group(self, topic: str, name: str, settings: GroupSettings, paused: bool) -> Group:
        with self.changing() as tx:
            group = _group(tx, topic, name)
            tx.run(
                "UPDATE postroom_groups SET settings = ?, paused = ? WHERE id = ?",
                encode_settings(settings),
                int(paused),
                group.id,
            )
            return _group(tx, topic, name)

    @empties
    def delete_group(self, topic: str, name: str, *, only: int | None = None) -> Group:
        with self.changing() as tx:
            group = _group(tx, topic, name)
            if only is not None and group.id != only:
                raise UnknownGroup(f"group {name!r} of topic {topic!r} was made anew; look again")
            tx.run("DELETE FROM postroom_starts WHERE group_id = ?", group.id)
            tx.run("DELETE FROM postroom_groups WHERE id = ?", group.id)
            tx.do("DELETE FROM postroom_rates WHERE name = ?", f"group:{topic}/{name}")
        return group

    def reset_group(self, topic: str, name: str, start: Start) -> Group:
        elsewhere = self._elsewhere(topic, start, all_of_them=True)
        with self.changing() as tx:
            group = _group(tx, topic, name)
            partly = start.kind == "offsets"  # what is fenced waits in the generation between (I10)
            again = replace(group, generation=group.generation + (2 if partly else 1))
            if not partly:
                tx.run("DELETE FROM postroom_starts WHERE group_id = ?", group.id)
            self._resolve(tx, again, start, elsewhere, only_named=partly)
            tx.run("UPDATE postroom_groups SET generation = ? WHERE id = ?", again.generation, group.id)
            return again

    def start_of(self, group_id: int, partition_id: int) -> tuple[int, int]:
        origin = self.origin_of(group_id, partition_id)
        return origin.generation, origin.start

    def origin_of(self, group_id: int, partition_id: int) -> Origin:
        with self._session.read(Area.LOG) as tx:
            row = tx.one(
                """SELECT g.generation, COALESCE(s.start_offset, 0), COALESCE(s.since, 0)
                   FROM postroom_groups g
                   LEFT JOIN postroom_starts s ON s.group_id = g.id AND s.partition_id = ? WHERE g.id = ?""",
                partition_id,
                group_id,
            )
        if row is None:
            raise UnknownGroup("the group was deleted; create it again, or stop its consumers")
        return Origin(*row)

    def starts(self, group_ids: Sequence[int]) -> dict[tuple[int, int], tuple[int, int]]:
        """Where these groups start and since which generation, by group and partition."""
        with self._session.read(Area.LOG) as tx:
            rows = tx.all(_STARTS.format(marks=blanks(len(group_ids))), *group_ids)
        return {(group_id, partition_id): (offset, since) for group_id, partition_id, offset, since in rows}

    def groups_at(self, partition_id: int) -> list[tuple[int, str, GroupSettings, int, int]]:
        """The groups of the partition's topic: id, name, settings, start there, and since when it counts."""
        with self._session.read(Area.LOG) as tx:
            rows = tx.all(_GROUPS_AT, partition_id)
        return [
            (group_id, name, group_settings(settings), start, since)
            for group_id, name, settings, start, since in rows
        ]

    def lineage_at(self, partition_id: int) -> list[tuple[int, int]]:
        """In the partition's topic, what follows what: pairs of a partition and one before it."""
        with self._session.read(Area.LOG) as tx:
            return [(one, before) for one, before in tx.all(_LINEAGE_AT, partition_id)]

    def _elsewhere(self, topic: str, start: Start, *, all_of_them: bool = False) -> Mapping[int, int]:
        """Start offsets in partitions on other shards, read before the catalog is locked (I9)."""
        return {}

    def _missed(self, topic: str, partition_id: int) -> None:
        """A partition is on another shard, and its start was not looked for."""
        area_of(self._session, partition_id)  # says so

    def _resolve(
        self,
        tx: Transaction,
        group: Group,
        start: Start,
        elsewhere: Mapping[int, int],
        *,
        only_named: bool = False,
    ) -> None:
        """Write a start offset for each partition there is (I9), clamped to what is kept (I19).

        `only_named`: for those that the start names.
        """
        places, topic = tx.all(_NUMBERS, group.topic_id), group.topic
        named = dict(start.offsets)
        unknown = set(named) - {number for _, number, _ in places}
        if unknown:
            raise InvalidSetting(
                f"topic {topic!r} has no partition {min(unknown)}; it has "
                f"{', '.join(str(number) for _, number, _ in places)}"
            )
        rows = []
        for partition_id, number, shard in places:
            if only_named and number not in named:
                continue
            if shard and partition_id not in elsewhere:
                self._missed(topic, partition_id)
            elif shard:
                rows.append((group.id, partition_id, elsewhere[partition_id], group.generation))
                continue
            with self._logs_of(tx, partition_id) as logs:
                offset = offset_of(logs, partition_id, start, named.get(number))
            rows.append((group.id, partition_id, offset, group.generation))
        if only_named:
            tx.many(_FORGET_START, [row[:2] for row in rows])
        tx.many(_INSERT_START, rows)

    @contextmanager
    def _logs_of(self, tx: Transaction, partition_id: int) -> Iterator[Transaction]:
        """Where the partition's edges are: in this transaction, unless its place is another."""
        area = area_of(self._session, partition_id, within=tx)
        if area is Area.LOG or area not in self._session.dialect.areas:
            yield tx
        else:
            with self._session.read(area) as apart:
                yield apart


def offset_of(tx: Transaction, partition_id: int, start: Start, named: int | None) -> int:
    """Return the offset that a start means in a partition whose log is here."""
    row = tx.one(_EDGES, partition_id)
    end, log_start = row or (0, 0)
    if start.kind == "latest":
        offset = end
    elif start.kind == "time":
        offset = first_row(tx, partition_id, "appended_at", start.time_ms)
    else:
        offset = log_start if named is None else named
    return int(min(max(offset, log_start), end))


def topic_of(tx: Transaction, name: str) -> Topic:
    row = tx.one(_TOPIC + " WHERE name = ?", name)
    if row is None:
        raise _unknown_topic(tx, name)
    ranges = tx.all(_RANGES + " WHERE r.topic_id = ? ORDER BY r.first_slot", row[0])
    if not ranges:  # deleted since the first statement
        raise _unknown_topic(tx, name)
    past = _Past(tx, row[0]) if row[3] > 1 else None
    return _make_topic(row, [tuple(rest) for _, *rest in ranges], past)


def _topics(tx: Transaction, only: Sequence[str] | None = None) -> list[Topic]:
    """All of them, or those of these names that there are; by name."""
    where, args = ("", ()) if only is None else (f" WHERE {{}}name IN ({', '.join('?' * len(only))})", only)
    ranges: dict[int, list[tuple[Any, ...]]] = {}
    for topic_id, *rest in tx.all(_RANGES + where.format("t.") + " ORDER BY r.topic_id, r.first_slot", *args):
        ranges.setdefault(topic_id, []).append(tuple(rest))
    rows = tx.all(_TOPIC + where.format("") + " ORDER BY name", *args)
    changed = [row[0] for row in rows if row[3] > 1]
    past = _Past(tx, changed[0] if len(changed) == 1 else None) if changed else None
    return [_make_topic(row, ranges[row[0]], past) for row in rows if row[0] in ranges]


class _Past:
    """Return what is left of the earlier routes of topics whose route was changed."""

    def __init__(self, tx: Transaction, topic_id: int | None = None) -> None:
        only = () if topic_id is None else (topic_id,)
        self.sealed: dict[int, list[Range]] = {}
        self.predecessors: dict[int, dict[int, tuple[int, ...]]] = {}
        for of, *rest in tx.all(_SEALED + (" AND topic_id = ?" if only else "") + " ORDER BY id", *only):
            self.sealed.setdefault(of, []).append(Range(*rest))
        for of, one, before in tx.all(_LINEAGE + (" WHERE topic_id = ?" if only else ""), *only):
            known = self.predecessors.setdefault(of, {})
            known[one] = (*known.get(one, ()), before)


def _make_topic(row: tuple[Any, ...], ranges: list[tuple[Any, ...]], past: _Past | None) -> Topic:
    """The version is that of the ranges: the topic's own may have moved between two statements."""
    topic_id, name, settings, _, created_at = row
    decoded = _topic_settings(settings)
    pieces = tuple(Range(*rest) for _, *rest in ranges)
    here = {piece.partition_id for piece in pieces}  # one that is sealed and has no successor yet is here too
    sealed = tuple(p for p in past.sealed.get(topic_id, ()) if p.partition_id not in here) if past else ()
    lineage = past.predecessors.get(topic_id, {}) if past else {}
    return Topic(
        topic_id,
        name,
        decoded,
        Route(name, ranges[0][0], pieces, decoded.dedup_ms > 0, sealed, lineage, keys=decoded.keys),
        created_at,
    )


def _unknown_topic(tx: Transaction, name: str) -> PostroomError:
    return unknown_topic(name, () if is_internal(name) else _near(tx, "postroom_topics", name))


def _near(tx: Transaction, table: str, name: str, topic_id: int | None = None) -> list[str]:
    """Names that are near: of a few whose length is about the same, so that it costs little among many."""
    more, args = ("", ()) if topic_id is None else (" AND topic_id = ?", (topic_id,))
    edges = (len(name) // 2, 2 * len(name))
    most = max(1, len(name) - 2)
    found = tx.all(_NEAR.format(table=table, more=more), *edges, *args, most, name[:most], name[:3])
    names = [row[0] for row in found]
    return difflib.get_close_matches(name, names, n=3)


def _group(tx: Transaction, topic: str, name: str) -> Group:
    row = tx.one(_GROUP + " WHERE t.name = ? AND g.name = ?", topic, name)
    if row is not None:
        return _make_group(row)
    topic_id = topic_of(tx, topic).id
    close = [] if "@" in name else _near(tx, "postroom_groups", name, topic_id)
    hint = f"did you mean {close[0]!r}? " if close else ""
    made = f"create it with create_group({topic!r}, {name!r}), or start a consumer in it"
    if "@" in name:  # nobody can make that one
        made = "this member was never there, or was forgotten; it is made when a consumer of its name joins"
    raise UnknownGroup(
        f"topic {topic!r} has no group {name!r}; {hint}{made}",
        topic=topic,
        group=name,
    )


def _make_group(row: tuple[object, ...]) -> Group:
    group_id, topic_id, topic, name, settings, generation, paused, created_at = row
    return Group(
        int(str(group_id)), int(str(topic_id)), str(topic), str(name), group_settings(str(settings)),
        int(str(generation)), bool(paused), int(str(created_at)),
    )  # fmt: skip


_decode_change = msgspec.json.Decoder(Change).decode
_decode_topic, _decode_group = (
    msgspec.json.Decoder(TopicSettings).decode,
    msgspec.json.Decoder(GroupSettings).decode,
)


@lru_cache(1000)  # most topics and groups have the settings that most others have
def _topic_settings(text: str) -> TopicSettings:
    return _decode_topic(text)


@lru_cache(1000)
def group_settings(text: str) -> GroupSettings:
    """As they were stored; a lease that was stored before it had a limit counts as the longest there is."""
    found = _decode_group(text)
    most = DEFAULTS.longest_lease_ms
    return found if found.lease_ms <= most else replace(found, lease_ms=most)


def _refuse_topic(tx: Transaction, name: str) -> None:
    if tx.one("SELECT 1 FROM postroom_topics WHERE name = ?", name):
        raise TopicExists(
            f"there is a topic {name!r} already; pass exist_ok=True if that is fine", topic=name
        )


def encode_settings(settings: TopicSettings | GroupSettings) -> str:
    return msgspec.json.encode(settings).decode()


def _escaped(text: str) -> str:
    """For LIKE."""
    return "".join(f"!{char}" if char in "!%_" else char for char in text)
