"""What jobs have staged, decided and published, at rest (I20).

A staged batch is a row; its segment and its number in it say where it belongs. Whoever decides, or drops what
was not decided, locks the row of the query first: so one of the two sees the other (I1). That row also says
whose the query is, from the first time that anything of it is staged or decided (I23). Whoever publishes
locks the row of the decision, and changes nothing if its step is not the one that was looked at. Rows of a
decided segment are touched by publishers alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ...errors import StagingConflict
from ...model.messages.batch import read_header
from ...model.moves import schedule, staging
from ...model.moves.schedule import DelayedRow
from ...model.moves.staging import (
    Decision,
    OpenMove,
    Progress,
    PublishedSpan,
    Segment,
    Span,
    StagedQuery,
    Wish,
)
from ..contract import Finished, Staged
from .lists import blanks, padded
from .session import Area, Row, Session, Transaction, verbs

__all__ = ["SqlStaging"]

_STAGED = "SELECT number FROM postroom_staged WHERE query = ? AND batch = ? AND segment = ? AND number >= ?"
_INSERT = """INSERT INTO postroom_staged
             (query, batch, segment, number, topic_id, partition_id, staged_at, records, bytes, data)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_SEGMENTS = """SELECT segment, topic_id, SUM(records) FROM postroom_staged WHERE query = ? AND batch = ?
               GROUP BY segment, topic_id"""
_LEFT = "SELECT DISTINCT segment FROM postroom_staged WHERE query = ? AND batch = ?"
_HEADS = """SELECT id, records, bytes FROM postroom_staged WHERE query = ? AND batch = ? AND segment = ?
            ORDER BY number LIMIT ?"""
_ROWS = "SELECT id, topic_id, partition_id, records, data FROM postroom_staged WHERE id IN ({marks})"
_CHANGE = "UPDATE postroom_staged SET records = ?, bytes = ?, data = ? WHERE id = ?"
_SLICE = """SELECT id, records FROM postroom_staged
            WHERE query = ? AND batch = ? AND segment = ? AND topic_id = ? LIMIT ?"""
_OLDEST = "SELECT MIN(staged_at) FROM postroom_staged"
_OLD = "SELECT query, batch FROM postroom_staged GROUP BY query, batch HAVING MAX(staged_at) < ?"

_QUERY = "SELECT batch, marks, owner FROM postroom_queries WHERE query = ?"
_NEW_QUERY = "INSERT INTO postroom_queries (query, batch, marks, decided_at, owner) VALUES (?, ?, ?, ?, ?)"
_OWN = "UPDATE postroom_queries SET owner = ? WHERE query = ?"
_NEWER = "UPDATE postroom_queries SET batch = ?, marks = ?, decided_at = ? WHERE query = ?"

_DECISION = """SELECT query, batch, revision, decided_at, published_at, producer_id, step, wish, progress,
               plan FROM postroom_decisions"""
_NEWEST = f"{_DECISION} WHERE query = ? AND batch = ? ORDER BY revision DESC LIMIT 1"
_OPEN = f"{_DECISION} WHERE published_at = 0"
_DECIDE = """INSERT INTO postroom_decisions
             (query, batch, revision, decided_at, published_at, producer_id, step, wish, progress, plan)
             VALUES (?, ?, ?, ?, 0, ?, 0, ?, ?, NULL)"""
_STEP = "SELECT step FROM postroom_decisions WHERE query = ? AND batch = ? AND revision = ?"
_STAMP = """UPDATE postroom_decisions SET step = ?, plan = ?
            WHERE query = ? AND batch = ? AND revision = ?"""
_GO_ON = """UPDATE postroom_decisions SET step = ?, plan = ?, progress = ?, producer_id = ?, published_at = ?
            WHERE query = ? AND batch = ? AND revision = ?"""
_FORGET = """SELECT d.query, d.batch, d.revision FROM postroom_decisions d
             JOIN postroom_queries q ON q.query = d.query
             WHERE d.published_at > 0 AND d.published_at < ? AND (d.batch = 0 OR d.batch < q.batch)
             LIMIT ?"""
_OLD_QUERIES = """SELECT q.query FROM postroom_queries q
                  WHERE (q.decided_at < ? OR (q.decided_at < ? AND q.batch <= 0))
                  AND NOT EXISTS (SELECT 1 FROM postroom_staged s WHERE s.query = q.query)
                  AND NOT EXISTS (SELECT 1 FROM postroom_decisions d
                                  WHERE d.query = q.query AND d.published_at = 0) LIMIT ?"""

_AT_ONCE = 64  # rows that are looked at, or dropped, together
_SIZES = (1, 8, _AT_ONCE)  # of lists of ids


class _Wished(msgspec.Struct, array_like=True):
    """The part of a decision that never changes."""

    segments: tuple[Segment, ...]
    rows: int
    source: dict[str, Span]
    topics: tuple[int, ...]
    content: bytes = b""  # earlier versions wrote none, and pass over it


class _Progress(msgspec.Struct, array_like=True):
    places: list[tuple[int, int, int, int, int]]
    sequences: dict[int, int]
    dropped: int


_decode_wished, _decode_progress = (
    msgspec.msgpack.Decoder(_Wished).decode,
    msgspec.msgpack.Decoder(_Progress).decode,
)
_decode_counts = msgspec.msgpack.Decoder(dict[str, int]).decode


@verbs
class SqlStaging:
    def __init__(self, session: Session) -> None:
        self._session = session

    # ---- staging ----

    def put(
        self, query: str, batch: int, segment: str, number: int, rows: Sequence[Staged], owner: str = ""
    ) -> None:
        with self._session.write(Area.LOG) as tx:
            _claim(tx, query, owner)
            there = {int(row[0]) for row in tx.all(_STAGED, query, batch, segment, number)}
            now = tx.now_ms()
            new = [
                (query, batch, segment, at, row.topic_id, row.partition_id, now,
                 read_header(row.batch).records, len(row.batch), row.batch)
                for at, row in enumerate(rows, number) if at not in there
            ]  # fmt: skip
            if new:
                tx.many(_INSERT, new)
                _check_open(tx, query, batch, segment)

    def drop(
        self,
        query: str,
        batch: int,
        segments: Collection[str] | None = None,
        topics: Collection[int] | None = None,
        owner: str | None = None,
    ) -> int:
        with self._session.read(Area.LOG) as tx:
            _check_owner(query, _known(tx.one(_QUERY, query)), owner)
            found = {(str(row[0]), int(row[1])) for row in tx.all(_SEGMENTS, query, batch)}
        dropped = 0
        for segment, topic_id in sorted(found):
            wanted = (segments is None or segment in segments) and (topics is None or topic_id in topics)
            while wanted and (count := self._drop_some(query, batch, segment, topic_id, owner)):
                dropped += count
        return dropped

    def _drop_some(self, query: str, batch: int, segment: str, topic_id: int, owner: str | None) -> int:
        with self._session.write(Area.LOG) as tx:
            _lock_query(tx, query, owner)
            if segment in _decided(tx, query, batch):
                return 0
            rows = tx.all(_SLICE, query, batch, segment, topic_id, _AT_ONCE)
            _delete(tx, [int(row[0]) for row in rows])
            return sum(int(row[1]) for row in rows)

    # ---- deciding ----

    def known(self, query: str) -> StagedQuery:
        with self._session.read(Area.LOG) as tx:
            return _known(tx.one(_QUERY, query))

    def decision(self, query: str, batch: int) -> Decision | None:
        with self._session.read(Area.LOG) as tx:
            return _newest(tx, query, batch)

    def unfinished(self, query: str | None = None) -> list[Decision]:
        with self._session.read(Area.LOG) as tx:
            rows = tx.all(_OPEN) if query is None else tx.all(f"{_OPEN} AND query = ?", query)
        return sorted(map(_decision, rows), key=lambda one: (one.decided_at, one.query, one.batch))

    def give(self, query: str, owner: str) -> bool:
        with self._session.write(Area.LOG) as tx:
            if tx.locked(_QUERY, query) is None:
                return False
            tx.do(_OWN, owner, query)
        return True

    def decide(
        self,
        query: str,
        batch: int,
        wish: Wish,
        producer_id: int,
        topics: Collection[int] | None = None,
        owner: str = "",
    ) -> Decision:
        with self._session.write(Area.LOG) as tx:
            known = _lock_query(tx, query, owner)
            recorded = _newest(tx, query, batch)
            revision = staging.revision_for(known, recorded, batch, wish)
            if revision is None:
                assert recorded is not None, "it counts"
                return recorded
            _check_finished(tx, query)
            found = _check_segments(tx, query, batch, wish, topics)
            now = tx.now_ms()
            wished = _Wished(wish.segments, wish.rows, dict(wish.source), found, wish.content)
            tx.do(_DECIDE, query, batch, revision, now, producer_id, _packed(wished), _progress(Progress()))
            marks = _packed(staging.marks_after(known, wish))
            tx.do(_NEWER, max(batch, known.batch), marks, now, query)
        return Decision(
            query, batch, revision, wish.segments, wish.rows, wish.source, now,
            topics=found, producer_id=producer_id, content=wish.content,
        )  # fmt: skip

    # ---- publishing ----

    def next_rows(
        self, decision: Decision, *, messages: int, max_bytes: int, skip: Collection[int] = ()
    ) -> list[DelayedRow]:
        chosen: list[int] = []
        with self._session.read(Area.LOG) as tx:
            left = {row[0] for row in tx.all(_LEFT, decision.query, decision.batch)}
            for segment, _ in decision.segments:
                if segment not in left:
                    continue
                heads = tx.all(_HEADS, decision.query, decision.batch, segment, _AT_ONCE + len(skip))
                for row_id, records, size in heads:
                    if row_id in skip:
                        continue
                    messages -= records
                    max_bytes -= size
                    if chosen and (messages < 0 or max_bytes < 0):
                        break
                    chosen.append(int(row_id))
                if messages <= 0 or max_bytes <= 0 or len(heads) == _AT_ONCE + len(skip):
                    break  # what follows of this segment comes first
            found = _read(tx, chosen)
        return [found[row_id] for row_id in chosen if row_id in found]

    def rows(self, ids: Iterable[int]) -> dict[int, DelayedRow]:
        with self._session.read(Area.LOG) as tx:
            return _read(tx, sorted(set(ids)))

    def stamp(self, decision: Decision, move: OpenMove) -> Decision | None:
        with self._session.write(Area.LOG) as tx:
            if not _is_last(tx, decision):
                return None
            tx.do(_STAMP, decision.step + 1, schedule.encode(move.planned), *_key(decision))
        return replace(decision, step=decision.step + 1, move=move)

    def finish(
        self,
        decision: Decision,
        finished: Finished,
        progress: Progress,
        *,
        producer_id: int | None = None,
        move: OpenMove | None = None,
        done: bool = False,
    ) -> Decision | None:
        producer_id = decision.producer_id if producer_id is None else producer_id
        with self._session.write(Area.LOG) as tx:
            if not _is_last(tx, decision):
                return None
            _delete(tx, sorted(finished.gone))
            for row in finished.changed:
                tx.do(_CHANGE, row.records, len(row.batch), row.batch, row.id)
            plan = None if move is None else schedule.encode(move.planned)
            published_at = tx.now_ms() if done else 0
            step = decision.step + 1
            tx.do(_GO_ON, step, plan, _progress(progress), producer_id, published_at, *_key(decision))
        return replace(
            decision, step=step, progress=progress, producer_id=producer_id, published_at=published_at,
            move=move,
        )  # fmt: skip

    # ---- in the long run ----

    def age(self, staged_ms: int, decision_ms: int, query_ms: int) -> tuple[int, int]:
        with self._session.read(Area.LOG) as tx:
            now = tx.now_ms()
            oldest = tx.one(_OLDEST)
            is_old = oldest is not None and oldest[0] is not None and oldest[0] < now - staged_ms
            old = tx.all(_OLD, now - staged_ms) if is_old else []
        dropped = sum(self.drop(query, batch) for query, batch in old)
        forgotten = 0
        while count := self._forget(now - decision_ms):
            forgotten += count
        while count := self._forget_queries(now - query_ms, now - decision_ms):
            forgotten += count
        return dropped, forgotten

    def _forget(self, before: int) -> int:
        with self._session.write(Area.LOG) as tx:
            keys = tx.all(_FORGET, before, _AT_ONCE)
            for key in keys:
                tx.do(f"DELETE FROM postroom_decisions {_WHERE}", *key)
        return len(keys)

    def _forget_queries(self, before: int, single_before: int) -> int:
        with self._session.read(Area.LOG) as tx:
            queries = [row[0] for row in tx.all(_OLD_QUERIES, before, single_before, _AT_ONCE)]
        return sum(self._forget_query(query, before, single_before) for query in queries)

    def _forget_query(self, query: str, before: int, single_before: int) -> int:
        with self._session.write(Area.LOG) as tx:
            row = tx.locked("SELECT batch, decided_at FROM postroom_queries WHERE query = ?", query)
            if row is None or row[1] >= (single_before if row[0] <= 0 else before):
                return 0
            tx.do("DELETE FROM postroom_decisions WHERE query = ? AND published_at > 0", query)
            tx.do("DELETE FROM postroom_queries WHERE query = ?", query)
        return 1


_WHERE = "WHERE query = ? AND batch = ? AND revision = ?"


def _key(decision: Decision) -> tuple[str, int, int]:
    return decision.query, decision.batch, decision.revision


def _claim(tx: Transaction, query: str, owner: str) -> None:
    """As `_lock_query`, for those who stage, many at once: locked only where the query is nobody's yet."""
    known = _known(tx.one(_QUERY, query))
    if known.owner is None:
        _lock_query(tx, query, owner)
    else:
        _check_owner(query, known, owner)


def _lock_query(tx: Transaction, query: str, owner: str | None) -> StagedQuery:
    """`owner`: whose it is from now on, if it is nobody's; None: that of nobody else, and it stays so."""
    row = tx.locked(_QUERY, query)
    known = _known(row)
    if row is None:  # two at once: one meets the other's row, and looks again
        tx.do(_NEW_QUERY, query, -1, _packed({}), tx.now_ms(), owner)
    elif _check_owner(query, known, owner) != known.owner:
        tx.do(_OWN, owner, query)
    return known


def _check_owner(query: str, known: StagedQuery, owner: str | None) -> str | None:
    return known.owner if owner is None else staging.owner_after(query, known.owner, owner)


def _known(row: Row | None) -> StagedQuery:
    if row is None:
        return StagedQuery(-1)
    return StagedQuery(int(row[0]), _decode_counts(row[1]), row[2])


def _newest(tx: Transaction, query: str, batch: int) -> Decision | None:
    row = tx.one(_NEWEST, query, batch)
    return None if row is None else _decision(row)


def _decided(tx: Transaction, query: str, batch: int) -> set[str]:
    """Segments that belong to a decision; to be asked under the query's lock."""
    rows = tx.all(f"{_DECISION} WHERE query = ? AND batch = ?", query, batch)
    return {name for row in rows for name, _ in _decision(row).segments}


def _check_open(tx: Transaction, query: str, batch: int, segment: str) -> None:
    """A repeat that comes late must not bring back what was published and removed.

    Asked behind the insert: whoever puts the same row meanwhile waits for us.
    """
    if segment in _decided(tx, query, batch):
        raise StagingConflict(f"segment {segment!r} was decided, and takes no more: begin another")


def _is_last(tx: Transaction, decision: Decision) -> bool:
    row = tx.locked(_STEP, *_key(decision))
    return row is not None and row[0] == decision.step


def _check_finished(tx: Transaction, query: str) -> None:
    row = tx.one("SELECT batch FROM postroom_decisions WHERE published_at = 0 AND query = ?", query)
    if row is not None:
        raise StagingConflict(
            f"batch {row[0]} of this query was decided and is not published yet: publish it first",
            unfinished=int(row[0]),
        )


def _check_segments(
    tx: Transaction, query: str, batch: int, wish: Wish, topics: Collection[int] | None
) -> tuple[int, ...]:
    """The topics of these segments, if they are there as the wish has them."""
    wanted, there, found = dict(wish.segments), dict.fromkeys(dict(wish.segments), 0), set[int]()
    for segment, topic_id, records in tx.all(_SEGMENTS, query, batch):
        if segment in wanted:
            there[segment] += int(records)
            found.add(int(topic_id))
    for segment, messages in wanted.items():
        if there[segment] != messages:
            raise StagingConflict(
                f"segment {segment!r} of batch {batch} has {there[segment]} messages, and should have "
                f"{messages}: it was dropped, or staged too long ago (Limits.staged_ms); run the batch again",
                segment=segment,
            )
    if topics is not None and not found <= set(topics):
        raise StagingConflict("the segments have messages for more topics than were named: name them all")
    return tuple(sorted(found))


def _decision(row: Row) -> Decision:
    query, batch, revision, decided_at, published_at, producer_id, step, wish, progress, plan = row
    wished = _decode_wished(wish)
    return Decision(
        query, int(batch), int(revision), wished.segments, wished.rows, wished.source, int(decided_at),
        int(published_at), wished.topics, int(producer_id), int(step), _unpacked(progress),
        None if plan is None else OpenMove(tuple(schedule.decode(plan))), wished.content,
    )  # fmt: skip


def _progress(progress: Progress) -> bytes:
    places = [(p.topic_id, p.partition_id, p.first, p.last, p.messages) for p in progress.places.values()]
    return _packed(_Progress(places, dict(progress.sequences), progress.dropped))


def _unpacked(packed: bytes) -> Progress:
    found = _decode_progress(packed)
    return Progress(
        {place[1]: PublishedSpan(*place) for place in found.places}, found.sequences, found.dropped
    )


def _packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def _read(tx: Transaction, ids: Sequence[int]) -> dict[int, DelayedRow]:
    found = {}
    for some in padded(ids, _SIZES):
        for row_id, topic_id, partition_id, records, data in tx.all(
            _ROWS.format(marks=blanks(len(some))), *some
        ):
            found[row_id] = DelayedRow(row_id, topic_id, partition_id, 0, records, bytes(data))
    return found


def _delete(tx: Transaction, ids: Sequence[int]) -> None:
    for some in padded(ids, _SIZES):
        tx.do(f"DELETE FROM postroom_staged WHERE id IN ({blanks(len(some))})", *some)
