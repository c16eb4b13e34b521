"""The mover of the schedule: what is due leaves for the logs of its partitions (R35).

One process at a time does it, under the lease `schedule`; it asks for the lease only when something is due
soon, so that a queue without delayed messages writes nothing. A move has the three steps of `engine`; its
rows and its stamp are removed in one transaction with the next stamp if there is one (I12). Whoever gets the
lease first finishes the moves that are there. So nothing is lost or stored twice, wherever a process is cut
off, and two that both believe to have the lease do no harm.

A partition that was sealed refuses its batch: the rows are free again and are moved to its successors as
soon as the route has them. Meanwhile they hold up only what was sent to its successors since, so that equal
keys keep their order. Moves to another shard that is away hold up nobody else: what became of them is not
known, so they stay open, with their stamp, and are tried again from time to time.

Whoever asks about delayed messages gets a page of a topic's, or takes one back (R35: `DelayedVerbs`). The
broker opens no batch for it: who may consume the topic opens them. Must never wait for the mover there, nor
for a shard that is away.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ...config import Limits
from ...endpoint.values import DelayedBatch
from ...errors import CorruptBatch, LeaseLost, PostroomError, StoreUnavailable
from ...model.messages.batch import verify
from ...model.messages.ids import digest
from ...model.messages.sequence import next_sequence
from ...model.moves import schedule
from ...model.moves.schedule import DUTY, DelayedPosition, DelayedRow, Opening, Planned
from ...store.contract import Appended, Finished, Move, Store, Topic
from ..workers import Workers
from .engine import Moved, MoveEngine

__all__ = ["DelayedVerbs", "ScheduleMover", "ScheduleThread"]


_log = logging.getLogger("postroom.broker")

_FEW = 500  # rows that are finished with the next stamp; more are finished by themselves
_MESSAGES, _BYTES = 10_000, 8 * 1024 * 1024  # of one move
_PAGE, _PAGE_BYTES = 1000, 4 * 1024 * 1024  # of one answer about delayed messages; one batch always fits


class ScheduleMover:
    """Blocking; any thread may call it. `watching` is told whether it has the lease."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        holder: str,
        moved: Moved,
        watching: Callable[[bool], None] = lambda wanted: None,
        shard: str = "",
    ) -> None:
        self._store = store
        self._lease_ms = limits.schedule_lease_ms
        self.tuning = limits.tuning.broker
        self._check_ms = self.tuning.schedule_check_ms
        self._holder = holder
        self._engine = MoveEngine(store, moved)
        self._watching = watching
        self._shard = shard  # whose schedule it is
        self._held_up: set[int] = set()  # rows of open moves to shards that are away
        self._turn = threading.Lock()
        self._stopping = False
        self.refused = False  # another process has the lease: it moves what is due
        self._until = 0  # the lease is ours before this moment
        self._clean = False  # no move is open but the last one
        self._last: Finished | None = None  # the last move: stored, and to be finished with the next stamp
        self._since = 0  # nothing is due before this moment
        self._all_seen_at = 0  # when the whole schedule was looked at
        self._stalled: dict[int, int] = {}  # partitions that take nothing, and until when
        self._new_identity()

    def tick(self) -> int:
        """Move everything that is due; returns after how many milliseconds to come back."""
        with self._turn:
            try:
                return self._tick()
            except LeaseLost:
                self._lost()
                return self._check_ms

    def stop(self) -> None:
        """Begin no further move, and give the lease back: others need not wait for its end."""
        self._stopping = True
        with self._turn:
            if self._store.now_ms() < self._until:
                self._finish_last()
                self._lost()
                self._store.duties.release(DUTY, self._holder)

    def _tick(self) -> int:
        self.refused = False
        while not self._stopping:
            now = self._store.now_ms()
            due = self._next_due(now)
            if due is None or due > now + self._lease_ms:
                if now >= self._until:
                    self._lost()
                return self._pause(now, None if due is None else due - self._lease_ms)
            if not self._lead(now):
                return self._check_ms
            if not self._clean:
                self._resume()
            elif due > now or not self._move_all():
                return self._pause(now, max(due, now + 1))
        return self._check_ms

    def _move_all(self) -> bool:
        """False if there was nothing to move."""
        moved = False
        while not self._stopping and self._lead(self._store.now_ms()) and self._clean and self._move():
            moved = True
        self._finish_last()
        return moved

    def _pause(self, now: int, until: int | None) -> int:
        soonest = min(
            (t for t in (until, *self._stalled.values()) if t is not None), default=now + self._check_ms
        )
        return max(1, min(soonest - now, self._check_ms))

    def _next_due(self, now: int) -> int | None:
        """Rows that are gone make the beginning of the schedule slow to read on some databases (I19)."""
        again = [partition for partition, until in self._stalled.items() if until <= now]
        for partition in again:
            del self._stalled[partition]
        if again:
            self._engine.routes_are_old = True  # they may have successors by now
            self._clean = self._clean and not self._held_up
        if not 0 <= now - self._all_seen_at < self.tuning.schedule_late_ms:
            self._since, self._all_seen_at = 0, now
        due = self._store.schedule.next_due(since=self._since, without=self._left_alone())
        if not self._stalled:
            self._since = max(
                self._since, min(now - self.tuning.schedule_late_ms, now if due is None else due)
            )
        return due

    # ---- the lease ----

    def _lead(self, now: int) -> bool:
        """Take or renew the lease; what another holder left open is to be finished first."""
        if self._until - now > self._lease_ms * 2 // 3:
            return True
        ours = now < self._until
        if not self._store.duties.acquire(DUTY, self._holder, self._lease_ms):
            self._lost()
            self.refused = True
            return False
        self._until = now + self._lease_ms
        if not ours:
            self._clean = False
            self._new_identity()
            self._watching(True)
        return True

    def _lost(self) -> None:
        self._until, self._last, self._clean = 0, None, False
        self._watching(False)

    def _new_identity(self) -> None:
        self._producer_id = secrets.randbits(62)
        self._sequences: dict[int, int] = {}

    # ---- moving ----

    def _resume(self) -> None:
        """Finish what was begun, by another holder or by ourselves."""
        self._held_up = set()
        for move in self._store.schedule.moves():
            wanted = {part.row for planned in move.planned for part in planned.parts}
            rows = self._store.schedule.rows(wanted)
            opening = Opening(max_bytes=math.inf)  # as much as was planned
            sound = {row.id: row for row in self._sound(rows.values(), opening)}
            self._engine.know_topics(sound.values())
            known = [p for p in move.planned if all(part.row in sound for part in p.parts)]
            try:
                done = self._carry_out(replace(move, planned=tuple(known)), sound, opening)
            except StoreUnavailable as error:
                self._hold_up(error, known, sound)
                continue
            self._store.schedule.finish(self._holder, done)
        self._clean, self._last = True, None

    def _hold_up(
        self, error: StoreUnavailable, planned: Sequence[Planned], rows: Mapping[int, DelayedRow]
    ) -> None:
        """A target is on another shard, which is away: the move stays open, the others go on."""
        if error.details.get("shard", self._shard) == self._shard:
            raise error
        self._held_up.update(rows)
        present = self._store.present({one.partition_id for one in planned})
        waiting = [one for one in planned if one.partition_id not in present]
        self._stall(
            (rows[part.row] for one in waiting for part in one.parts), self.tuning.unreachable_pause_ms
        )
        self._new_identity()  # it may or may not have been stored: its sequences are not to be used again

    def _stall(self, rows: Iterable[DelayedRow], pause_ms: int) -> None:
        until = self._store.now_ms() + pause_ms
        self._stalled.update((row.partition_id, until) for row in rows)

    def _left_alone(self) -> set[int]:
        """Partitions that take nothing now, and all that follow them: their rows would overtake."""
        if not self._stalled:
            return set()
        self._engine.routes_are_old = True
        self._engine.know_topics()
        routes = [topic.route for topic in self._engine.topics.values()]
        return {*self._stalled}.union(*(r.descendants(place) for r in routes for place in self._stalled))

    def _move(self) -> bool:
        """Move some of what is due; False if there is nothing that can be moved now."""
        due = self._store.schedule.due(
            messages=_MESSAGES,
            max_bytes=_BYTES,
            since=self._since,
            without=self._left_alone(),
            skip=self._held_up if self._last is None else self._held_up | self._last.gone,
        )
        later = self._left_alone()  # once more: routes that were made meanwhile have rows already
        due = [row for row in due if row.partition_id not in later]
        opening = Opening()
        rows = {row.id: row for row in self._of_topics(self._sound(due, opening))}
        if not rows:
            return len(due) > 0
        planned = self._engine.plan(list(rows.values()), self._sequences, opening)
        taken = {part.row for one in planned for part in one.parts}
        before, self._last, self._clean = self._last, None, False
        move = Move(secrets.randbits(62), self._producer_id, planned)
        if self._store.schedule.stamp(self._holder, move, [rows[row_id] for row_id in taken], before):
            self._last = self._carry_out(move, rows, opening)
        self._clean = True
        if self._last is not None and (len(self._last.gone) > _FEW or self._last.changed):
            self._finish_last()
        return True

    def _finish_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._clean = False
            self._store.schedule.finish(self._holder, last)
            self._clean = True

    def _sound(self, rows: Iterable[DelayedRow], opening: Opening) -> list[DelayedRow]:
        """Those that are not damaged, as far as there is room for them open.

        Damaged ones are kept, and said aloud from time to time.
        """
        found = []
        for row in itertools.takewhile(opening.takes, rows):
            try:
                verify(row.batch) if schedule.is_large(row) else opening(row)
                found.append(row)
            except CorruptBatch as error:
                _log.error("delayed messages in row %d of the schedule cannot be read: %s", row.id, error)
                later = replace(row, due_at=self._store.now_ms() + self.tuning.damaged_row_ms)
                self._store.schedule.finish(self._holder, Finished(None, changed=(later,)))
        return found

    def _of_topics(self, rows: Sequence[DelayedRow]) -> list[DelayedRow]:
        """Those whose topic is there; a deleted one takes its delayed messages with it."""
        self._engine.know_topics(rows)
        gone = frozenset(row.id for row in rows if row.topic_id not in self._engine.topics)
        if gone:
            self._store.schedule.finish(self._holder, Finished(None, gone))
        return [row for row in rows if row.topic_id in self._engine.topics]

    def _carry_out(self, move: Move, rows: Mapping[int, DelayedRow], opening: Opening) -> Finished:
        """The second step; returns what the third one is to do."""
        carried = self._engine.carry_out(
            move.id, move.planned, rows, move.producer_id, opening, with_ids=True
        )
        if move.producer_id == self._producer_id:
            for planned, result in carried.batches:
                if isinstance(result, Appended):
                    after = next_sequence(planned.sequence, planned.records)
                    self._sequences[planned.partition_id] = after
        if carried.refused:
            self._stall(
                (rows[part.row] for one in carried.refused for part in one.parts), self.tuning.sealed_pause_ms
            )
            self._new_identity()
        return carried.finished


_ALWAYS, _NEVER = 2**63, -1


class ScheduleThread:
    """The thread in which the mover runs: not the event loop, which a handler may block.

    Decides nothing about messages. It sleeps until the next one is due; it is woken by what this process
    schedules, by news of other processes, and by a test's clock. What fails is tried again, more and more
    slowly.
    """

    def __init__(self, mover: ScheduleMover, now_ms: Callable[[], int]) -> None:
        self._mover = mover
        self._pauses, self._check_ms = mover.tuning.schedule_pauses, mover.tuning.schedule_check_ms
        self._now_ms = now_ms
        self._awake = threading.Event()
        self._stopping = False
        self._failures = 0
        self._next_look = _ALWAYS  # by the store's clock; what is due before that wakes us
        self._thread = threading.Thread(target=self._run, name="postroom-schedule", daemon=True)
        self._thread.start()

    def scheduled(self, due_at: int) -> None:
        """Something is due then. From any thread."""
        if due_at < self._next_look:
            self._awake.set()

    def clock_moved(self) -> None:
        """A test's clock: when this returns, what is due has been moved."""
        if not self._stopping:
            self._tick()
            self._awake.set()

    def stop(self) -> None:
        """Ends soon: at most a move that is under way is finished."""
        self._stopping = True
        self._awake.set()
        try:
            self._mover.stop()
        except PostroomError as error:
            _log.warning("the lease on the schedule is left to run out: %s", error)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._next_look = _ALWAYS
            self._awake.clear()
            pause_ms = self._tick()
            self._next_look = _NEVER if self._mover.refused else self._now_ms() + pause_ms
            self._awake.wait(pause_ms / 1000)

    def _tick(self) -> int:
        try:
            pause_ms = self._mover.tick()
        except PostroomError as error:
            if not self._failures:
                _log.warning("delayed messages wait, trying again: %s", error)
            self._failures += 1
            return int(1000 * self._pauses.after(self._failures))
        except Exception:
            _log.exception("moving delayed messages failed in an unexpected way; it is tried again")
            return self._check_ms
        self._failures = 0
        return pause_ms


class DelayedVerbs:
    """The part of a broker that is about messages that are not due yet."""

    store: Store
    _workers: Workers

    async def _topic(self, name: str) -> Topic:
        raise NotImplementedError  # the broker's

    async def delayed(
        self, topic: str, limit: int, since: DelayedPosition | None = None
    ) -> list[DelayedBatch]:
        topic_id = (await self._topic(topic)).id
        return await self._workers.run(self._page, topic_id, max(1, min(limit, _PAGE)), since)

    def _page(self, topic_id: int, limit: int, since: DelayedPosition | None) -> list[DelayedBatch]:
        rows = self.store.schedule.listed(topic_id, since=since, messages=limit, max_bytes=_PAGE_BYTES)
        return [DelayedBatch(row.id, row.partition_id, row.due_at, row.records, row.batch) for row in rows]

    async def cancel(self, topic: str, id: str) -> bool:
        topic_id = (await self._topic(topic)).id
        return await self._workers.run(self.store.schedule.cancel, topic_id, digest(id))
