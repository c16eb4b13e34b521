"""Changes of routes: the steps that need the catalog, each one flushed transaction (R26).

A change is written down before anything of it is done (`begin`), so that whoever finds it can go on; it
becomes the next version in one transaction (`activate`), or is replaced by another (`turn_back`). All of them
compare the topic's version, or the change's id, with what their caller knows: of two that meet, one goes on
and the other is told. The steps between them are `make`, and `Log.seal`, which is the partition's own.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ....errors import RouteConflict
from ....model.topology.chain import origins_after
from ....model.topology.route import Change, Draft, Range, Route, renew
from ...contract import Topic
from ..session import Area, Session, Transaction, empties, verbs
from .catalog import SqlCatalog, topic_of
from .reserved import NEW, forget_reserved, refuse_shard, reserve

__all__ = ["SqlRoutes"]

_CHANGES = "SELECT plan FROM postroom_changes"
_BEGIN = """INSERT INTO postroom_changes (topic_id, id, plan, begun_at, worked_at) VALUES (?, ?, ?, ?, ?)"""
_REPLACE = "UPDATE postroom_changes SET id = ?, plan = ?, worked_at = ? WHERE topic_id = ?"
_TAKE = "UPDATE postroom_changes SET worked_at = ? WHERE topic_id = ? AND id = ? AND worked_at < ?"
_END = "DELETE FROM postroom_changes WHERE topic_id = ? AND id = ?"
_RANGE = """INSERT INTO postroom_ranges (topic_id, version, first_slot, last_slot, partition_id)
            VALUES (?, ?, ?, ?, ?)"""
_LINEAGE = "INSERT INTO postroom_lineage (topic_id, partition_id, predecessor_id) VALUES (?, ?, ?)"
_FOLLOWERS = "SELECT topic_id, partition_id FROM postroom_lineage WHERE predecessor_id = ?"
_FOLLOWED = "SELECT predecessor_id FROM postroom_lineage WHERE partition_id = ?"
_HISTORY = """SELECT r.version, r.first_slot, r.last_slot, p.number, p.id, p.shard FROM postroom_ranges r
              JOIN postroom_partitions p ON p.id = r.partition_id
              WHERE r.topic_id = ? ORDER BY r.version, r.first_slot"""


_ORIGINS = "SELECT id, origin FROM postroom_partitions WHERE topic_id = ? AND origin > 0"
_ORIGIN = "UPDATE postroom_partitions SET origin = ? WHERE id = ?"


@verbs
class SqlRoutes:
    def __init__(self, session: Session, catalog: SqlCatalog) -> None:
        self._session = session
        self._catalog = catalog

    # ---- looking ----

    def changes(self) -> list[Change]:
        with self._session.read(Area.LOG) as tx:
            return [_decode(row[0]) for row in tx.all(_CHANGES + " ORDER BY begun_at")]

    def change_of(self, topic: str) -> Change | None:
        with self._session.read(Area.LOG) as tx:
            return _change(tx, topic_of(tx, topic).id)

    def history(self, topic: str) -> list[Route]:
        with self._session.read(Area.LOG) as tx:
            topic_id = topic_of(tx, topic).id
            rows = tx.all(_HISTORY, topic_id)
        versions: dict[int, list[list[Any]]] = {}
        for version, *rest in rows:
            versions.setdefault(version, []).append(rest)
        return [
            Route(topic, version, tuple(Range(*found) for found in ranges))
            for version, ranges in versions.items()
        ]

    # ---- steps ----

    def begin(self, draft: Draft) -> Change:
        with self._catalog.changing() as tx:
            topic = topic_of(tx, draft.topic)
            under_way = _change(tx, topic.id)
            if under_way is not None:
                raise _under_way(under_way)
            _refuse_old(topic, draft.version)
            change = self._written(tx, topic, draft)
            now = tx.now_ms()
            tx.do(_BEGIN, topic.id, change.id, _encode(change), now, now)
            return change

    def take(self, change: Change, idle_ms: int) -> bool:
        with self._session.write(Area.LOG) as tx:
            now = tx.now_ms()
            return tx.run(_TAKE, now, change.topic_id, change.id, now - idle_ms) > 0

    def make(self, change: Change) -> None:
        """Idempotent, and a step of its own: making a table commits on some databases (I19)."""
        volatile = self._catalog.topic(change.topic).settings.volatile
        for piece in change.opens:
            self._catalog.make_log(piece, change.topic_id, volatile)

    def activate(self, change: Change, ends: Mapping[int, int] | None = None) -> Topic:
        with self._catalog.changing() as tx:
            topic = topic_of(tx, change.topic)
            _refuse_other(tx, topic, change)
            route = topic.route.after(change)
            tx.many(
                _RANGE,
                [(topic.id, route.version, r.first_slot, r.last_slot, r.partition_id) for r in route.ranges],
            )
            tx.many(
                _LINEAGE,
                [(topic.id, new, old) for new, olds in change.predecessors.items() for old in olds],
            )
            for piece in change.opens:
                tx.do(
                    "UPDATE postroom_partitions SET topic_id = ?, state = 'open' WHERE id = ? AND state = ?",
                    topic.id,
                    piece.partition_id,
                    NEW,
                )
            for piece in change.seals:
                tx.do("UPDATE postroom_partitions SET state = 'sealed' WHERE id = ?", piece.partition_id)
            if ends is not None:
                origins: dict[int, int] = dict(tx.all(_ORIGINS, topic.id))
                tx.many(_ORIGIN, [(at, one) for one, at in origins_after(change, origins, ends).items()])
            tx.do("UPDATE postroom_topics SET route_version = ? WHERE id = ?", route.version, topic.id)
            tx.do(_END, topic.id, change.id)
            return topic_of(tx, change.topic)

    def origins(self, topic_id: int) -> dict[int, int]:
        with self._session.read(Area.LOG) as tx:
            return dict(tx.all(_ORIGINS, topic_id))

    def turn_back(self, change: Change, sealed: Collection[int]) -> Change | None:
        """Renew what was sealed already, leave the rest; None: nothing was, and the change is no more."""
        with self._catalog.changing() as tx:
            topic = topic_of(tx, change.topic)
            _refuse_other(tx, topic, change)
            forget_reserved(tx, [piece.partition_id for piece in change.opens])
            draft = renew(topic.route, sealed)
            if draft is None:
                tx.do(_END, topic.id, change.id)
                return None
            instead = self._written(tx, topic, draft)
            tx.do(_REPLACE, instead.id, _encode(instead), tx.now_ms(), topic.id)
            return instead

    @empties
    def remove(self, partition_id: int) -> None:
        """The emptied log of a sealed partition: the table goes, the row stays as a tombstone (I11).

        The row says so first: whoever looks meanwhile is told that the partition is gone.
        """
        with self._catalog.changing() as tx:
            tx.do(
                "UPDATE postroom_partitions SET state = 'removed' WHERE id = ? AND state = 'sealed'",
                partition_id,
            )
            self._close_ranks(tx, partition_id)
            tx.do("DELETE FROM postroom_starts WHERE partition_id = ?", partition_id)
        self._catalog.remove_log(partition_id)

    def _close_ranks(self, tx: Transaction, partition_id: int) -> None:
        """Link a partition's successors to its predecessors: they may still be there, and be read (I10)."""
        after = tx.all(_FOLLOWERS, partition_id)
        before = tx.all(_FOLLOWED, partition_id)
        tx.do("DELETE FROM postroom_lineage WHERE predecessor_id = ?", partition_id)
        tx.do("DELETE FROM postroom_lineage WHERE partition_id = ?", partition_id)
        for topic_id, successor in after:
            known = {old for (old,) in tx.all(_FOLLOWED, successor)}
            tx.many(_LINEAGE, [(topic_id, successor, old) for (old,) in before if old not in known])

    def _written(self, tx: Transaction, topic: Topic, draft: Draft) -> Change:
        for piece in draft.opens:
            refuse_shard(tx, piece.shard, moves=draft.kind == "move")
        names = reserve(tx, topic.id, topic.settings.volatile, draft.opens)
        return draft.numbered(secrets.randbits(62) + 1, topic.id, names)


def _change(tx: Transaction, topic_id: int) -> Change | None:
    row = tx.one(_CHANGES + " WHERE topic_id = ?", topic_id)
    return None if row is None else _decode(row[0])


def _refuse_other(tx: Transaction, topic: Topic, change: Change) -> None:
    found = _change(tx, topic.id)
    if found is None or found.id != change.id:
        raise RouteConflict(
            f"this {change.kind} of topic {change.topic!r} was finished or turned back by somebody else; "
            "look at the route (`postroom route show`) before you try again",
            topic=change.topic,
        )


def _refuse_old(topic: Topic, version: int) -> None:
    if topic.route.version != version:
        raise RouteConflict(
            f"the route of topic {topic.name!r} has version {topic.route.version} by now, and this change is "
            f"one of version {version}; look at it (`postroom route show {topic.name}`) and try again",
            topic=topic.name,
        )


def _under_way(change: Change) -> RouteConflict:
    sealed = " and ".join(str(piece.partition) for piece in change.seals)
    return RouteConflict(
        f"a {change.kind} of partition {sealed} of topic {change.topic!r} is under way, and there is one "
        "change at a time; it takes a moment: try again",
        topic=change.topic,
    )


def _encode(change: Change) -> str:
    return msgspec.json.encode(change).decode()


_decode_change = msgspec.json.Decoder(Change).decode


def _decode(plan: str) -> Change:
    return _decode_change(str(plan))
