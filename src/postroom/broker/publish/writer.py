"""The writer: one thread that gathers what waits into one flushed transaction (group commit, R37).

Appends that arrive while a commit is under way go into the next one together, so the cost of a flush is
shared by all that wait for it. If the transaction fails, each append is run again by itself, in order:
one that fails does not take its neighbours with it (I2), and one that was stored after all is recognised
by its sequence (I3). If the store cannot be reached, all fail alike, and their senders repeat them.

What is more than one commit takes turns: topics, and in a topic its producers (`model.turns`, R41). The
queue is bounded in bytes, in whole and for each of those lines: a full one slows its own callers, in their
order, and drops nothing (I17). A line of which nothing waits takes one batch, whatever others have filled.
While somebody sends a little beside others that send more than can be stored, commits are smaller: it waits
for the one under way, and for its own.

What comes while nothing is under way, and is little, is stored in the event loop, where the store can do that
and its commits are quick: to hand it to the thread and back costs more than to store it. A commit that takes
its time sends the next ones to the thread, for longer each time: a slow disk holds up the loop once a second.
Where batches have come one at a time for a while, the next is stored in the very call of its sender, who need
not wait for a turn of the loop; not a second one in the same turn: those who send together share a commit.
Where the store is a server, a batch that is alone is sent in the event loop, which is told when the answer
comes; where batches have come one at a time, as soon as it is queued. What arrives meanwhile waits for it;
then it is one commit, in the thread. What fails on either way is given to the thread, which finds out
whether it was stored (I3).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from ...config import Limits
from ...endpoint.endpoint import Told
from ...errors import ClosedError, PostroomError, StoreBusy, StoreError, StoreUnavailable
from ...model.messages.batch import read_header
from ...model.policy.fair_queue import TURN_BYTES, FairQueue
from ...store.contract import Append, Appended, Log, SentAppend, StoredBatch
from ..deliver.readable import TailCache

__all__ = ["LineKey", "Writer"]


_SMALLER = 4
_LATE = 4  # times as long as a quick commit: too late to be forgiven
_FEW, _LITTLE_BYTES = 16, 64 * 1024  # batches that may be stored in the event loop, and their bytes
_ALONE = 8  # commits of one batch each, in a row: the next is expected to come alone, too

LineKey = tuple[int, int]
"""A topic, and a producer of it."""


@dataclass(slots=True, eq=False)
class _ProducerLine:
    """Used in the event loop only, but for its key."""

    key: LineKey
    bytes: int = 0  # in the queue, or being stored
    callers: deque[_PendingAppend] = field(default_factory=deque)  # not in the queue yet


@dataclass(slots=True)
class _PendingAppend:
    append: Append
    line: _ProducerLine
    told: Told
    gone: Callable[[], bool] | None = None  # whether its caller has gone; None: it does not wait


@dataclass(slots=True)
class _Sending:
    """A batch whose answer the event loop waits for."""

    group: list[_PendingAppend]
    sent: SentAppend
    began: float
    ended: asyncio.Future[None]


class Writer:
    """`appended` is called in the event loop with the new ends of partitions, by id.

    `scheduled` is called in the writer's thread with the due moment of a delayed batch.
    """

    def __init__(
        self,
        log: Log,
        tail: TailCache,
        limits: Limits,
        appended: Callable[[dict[int, int]], None],
        *,
        at_once: bool = False,
    ) -> None:
        """`at_once`: the store can append at once."""
        self._log = log
        self._tail = tail
        self._limits = limits
        self._considerate_s = limits.tuning.broker.considerate_s
        self._quick_s, self._pauses = limits.tuning.broker.commit_quick_s, limits.tuning.broker.commit_pauses
        self._slow, self._slow_until = 0, 0.0  # commits in the loop, in a row
        self._at_once = at_once
        self._lone = 0  # commits of one batch each, in a row
        self._just_stored = False  # one was stored in its sender's call, in this turn of the loop
        self._lone_ends: dict[int, int] = {}
        self._arrived: list[_PendingAppend] = []  # in this turn of the loop, or while one is being sent
        self._sending: _Sending | None = None  # then the thread has nothing to do
        self._watch: asyncio.TimerHandle | None = None  # the next look at it
        self._appended = appended
        self.scheduled: Callable[[int], None] = lambda due_at: None
        self.committed: Callable[[int, int, float], None] | None = None  # likewise: batches, bytes, seconds
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[list[_PendingAppend] | None] = SimpleQueue()
        self._lines: dict[LineKey, _ProducerLine] = {}
        self._crowded: dict[LineKey, _ProducerLine] = {}  # those with callers that are not let in
        self._pending_bytes = 0
        self._closed = False
        self._turns: FairQueue[_PendingAppend] = (
            FairQueue()
        )  # the writer's thread: what did not fit into a commit
        self._small_until = 0.0  # commits are smaller, by the monotonic clock
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="postroom-writer", daemon=True)
        self._thread.start()

    def append(self, append: Append, line: LineKey | None = None) -> asyncio.Future[Appended]:
        """Is done once the batch is stored. `line`: whose turns it counts against; without one, those of its
        partition."""
        done: asyncio.Future[Appended] = self._loop.create_future()
        self.queue(append, line or (-append.partition_id, 0), partial(_resolve, done), done.done)
        return done

    def queue(
        self, append: Append, line: LineKey, told: Told, gone: Callable[[], bool] | None = None
    ) -> None:
        """Store a batch; `told` is called in the event loop with what became of it, unless its caller has
        `gone` by then. What waits for room is dropped if its caller has."""
        if self._closed:
            raise _closed()
        mine = self._lines.get(line)
        if mine is None:
            mine = self._lines[line] = _ProducerLine(line)
        pending = _PendingAppend(append, mine, told, gone)
        if mine.callers or (mine.bytes and self._is_full(mine)):
            mine.callers.append(pending)
            self._crowded[line] = mine
        else:
            self._let_in(pending)

    def queue_soon(
        self, append: Append, line: LineKey, told: Told, gone: Callable[[], bool] | None = None
    ) -> None:
        """Queue it a turn of the loop later: it is one commit then with what other clients send just now, and
        those who poll get a turn, too. One that cannot be queued is told so."""
        self._loop.call_soon(self._queue_or_tell, append, line, told, gone)

    def _queue_or_tell(
        self, append: Append, line: LineKey, told: Told, gone: Callable[[], bool] | None
    ) -> None:
        try:
            self.queue(append, line, told, gone)
        except PostroomError as error:
            told(error)

    @property
    def queued_bytes(self) -> int:
        return self._pending_bytes

    def _is_full(self, line: _ProducerLine) -> bool:
        limits = self._limits
        return line.bytes > limits.writer_line_bytes or self._pending_bytes > limits.writer_queue_bytes

    def _let_in(self, pending: _PendingAppend) -> None:
        size, pending_bytes = len(pending.append.batch), self._pending_bytes
        pending.line.bytes += size
        self._pending_bytes += size
        if self._arrived or not pending_bytes or self._sending is not None:
            self._arrived.append(pending)
            if len(self._arrived) == 1 and self._sending is None:
                if self._at_once or self._lone < _ALONE:
                    self._loop.call_soon(self._store_arrived)
                else:
                    self._store_arrived()  # what comes meanwhile waits for the answer of the server
        else:
            self._queue.put([pending])

    def _store_arrived(self) -> None:
        """Store what came in this turn, or leave it to the thread: all of it, which is one commit then."""
        if self._sending is not None:
            return  # since this turn began: what came after it waits for its answer
        group, self._arrived = self._arrived, []
        self._lone = self._lone + 1 if len(group) == 1 else 0
        if group and (self._store_here(group) if self._at_once else self._send(group)):
            return
        self._queue.put(group)

    def _store_here(self, group: list[_PendingAppend]) -> bool:
        """Store them in the event loop. False: the thread is to do it, and finds out what became of them."""
        if len(group) > _FEW or self._pending_bytes > _LITTLE_BYTES:
            return False
        appends = [pending.append for pending in group]
        results = self._stored_here(appends)
        if results is None:
            return False
        self._answer(group, results, self._remember(appends, results))
        return True

    def alone(self) -> bool:
        """Return whether the next batch need not wait for others: for a while each has come by itself."""
        if self._lone < _ALONE or self._closed:
            return False
        if self._just_stored or self._pending_bytes:
            self._lone = 0
            return False
        return True

    def store_alone(self, partition_id: int, batch: bytes) -> Appended | None:
        """Store a batch of this process before anything else happens, if it is `alone`. None: it is to be
        queued, as it is: that finds out what became of it (I3), or sends it to a server."""
        if not self._at_once:
            return None
        header = read_header(batch)
        append = Append(partition_id, batch, producer_id=header.producer_id, header=header)
        results = self._stored_here([append]) if len(batch) <= _LITTLE_BYTES else None
        stored = results[0] if results is not None else None
        if results is None or not isinstance(stored, Appended):
            self._lone = 0
            return None
        self._just_stored, self._lone_ends = True, self._remember([append], results)
        return stored

    def yielded(self) -> None:
        """Called by the sender after `store_alone`: only now those who poll are told of what it stored."""
        self._just_stored = False
        self._appended(self._lone_ends)

    def _stored_here(self, appends: list[Append]) -> list[Appended | PostroomError] | None:
        """Return what became of them; None: the thread is to store them, or finds out what became of them."""
        began = time.perf_counter()
        if began < self._slow_until:
            return None
        try:
            results = self._log.append_at_once(appends)
        except Exception:
            results = None  # the thread meets it again, and tells
        took = time.perf_counter() - began
        if took <= self._quick_s:
            self._slow = 0
        else:  # one that is a little late is forgiven: in the thread all wait for the interpreter
            self._slow += 1 if took <= _LATE * self._quick_s else 2
            if self._slow > 1:
                self._slow_until = began + took + self._pauses.after(self._slow - 1)
        if results is not None:
            self._count(appends, took)
        return results

    # ---- to a server ----

    def _send(self, group: list[_PendingAppend]) -> bool:
        """Send a batch that is alone, and have the loop told of its answer. False: the thread is to do it."""
        if len(group) > 1 or self._pending_bytes > _LITTLE_BYTES or self._closed:
            return False
        began = time.perf_counter()
        try:
            sent = self._log.send(group[0].append)
        except Exception:
            sent = None  # the thread meets it again, and tells
        if sent is None:
            return False
        self._sending = _Sending(group, sent, began, self._loop.create_future())
        if self._watch is None:
            self._watch = self._loop.call_later(sent.patience_s, self._give_up)
        self._loop.add_reader(sent.fileno(), self._go_on_sending)
        if sent.unsent:
            self._loop.add_writer(sent.fileno(), self._go_on_sending)
        return True

    def _go_on_sending(self) -> None:
        assert self._sending is not None, "the socket is watched only while one is"
        sent = self._sending.sent
        if sent.answered():
            self._stop_watching(self._sending)
            try:
                result = sent.result()
            except Exception:
                result = None  # the thread meets it again, and tells
            self._sent(self._sending, result)
        elif not sent.unsent:
            self._loop.remove_writer(sent.fileno())

    def _give_up(self) -> None:
        """One that is not answered for long; the timer is set for one after the other, not for each."""
        self._watch, sending = None, self._sending
        if sending is None:
            return
        left = sending.sent.patience_s - (time.perf_counter() - sending.began)
        if left > 0:
            self._watch = self._loop.call_later(left, self._give_up)
            return
        self._stop_watching(sending)
        with suppress(Exception):
            sending.sent.abandon()
        self._sent(sending, None)

    def _stop_watching(self, sending: _Sending) -> None:
        """Before the socket is used by another, or closed by whoever reads no more of it."""
        self._loop.remove_reader(sending.sent.fileno())
        self._loop.remove_writer(sending.sent.fileno())

    def _sent(self, sending: _Sending, result: Appended | None) -> None:
        """It is stored, or the thread finds out what became of it; then comes what arrived meanwhile."""
        self._sending, group = None, sending.group
        sending.ended.set_result(None)
        if result is None:
            self._queue.put(group + self._arrived)
            self._arrived = []
            return
        appends = [pending.append for pending in group]
        self._count(appends, time.perf_counter() - sending.began)
        self._answer(group, [result], self._remember(appends, [result]))
        if self._arrived:
            self._lone = 0
            self._store_arrived()

    def _count(self, appends: Sequence[Append], seconds: float) -> None:
        if self.committed is not None:
            self.committed(len(appends), sum([len(append.batch) for append in appends]), seconds)

    async def close(self) -> None:
        """Store what waits in the queue, then end."""
        if not self._closed:
            self._closed = True
            if self._sending is not None:
                await self._sending.ended
            if self._watch is not None:
                self._watch.cancel()
            self._queue.put(self._arrived)
            self._arrived = []
            for line in self._crowded.values():
                for pending in line.callers:
                    self._tell(pending, _closed())
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # ---- in the writer's thread ----

    def _run(self) -> None:
        while not self._ended or self._turns:
            group = self._gather()
            if group:
                began, appends = time.perf_counter(), [pending.append for pending in group]
                results = self._store(appends)
                self._count(appends, time.perf_counter() - began)
                stored = self._remember(appends, results)
                self._loop.call_soon_threadsafe(self._answer, group, results, stored)

    def _gather(self) -> list[_PendingAppend]:
        """Wait for one, then take what is there already; in turn, if that is more than one commit."""
        arrived: list[_PendingAppend] = []
        size, limits = 0, self._limits
        while not self._ended and not (self._queue.empty() and (arrived or self._turns)):
            group = self._queue.get()
            if group is None:
                self._ended = True
            else:
                arrived += group
                size += sum([len(pending.append.batch) for pending in group])
        if not self._turns and size <= limits.commit_bytes and len(arrived) <= limits.commit_batches:
            return arrived
        for pending in arrived:
            self._turns.add(pending.line.key, len(pending.append.batch), pending)
            if pending.line.bytes <= TURN_BYTES:
                self._small_until = time.monotonic() + self._considerate_s
        size = limits.commit_bytes // (_SMALLER if time.monotonic() < self._small_until else 1)
        return self._turns.take(size=size, count=limits.commit_batches)

    def _store(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        try:
            return self._log.append(appends)
        except PostroomError as error:
            self._tail.forget({append.partition_id for append in appends})  # who knows what is stored now
            if len(appends) == 1 or isinstance(error, StoreUnavailable):
                return [error] * len(appends)
        except Exception as error:
            return [_unexpected(error)] * len(appends)
        return self._store_each(appends)

    def _store_each(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        """One by one. Whoever holds a partition's lock for long is waited for once, not once for each."""
        results: list[Appended | PostroomError] = []
        busy: dict[int, StoreBusy] = {}
        for append in appends:
            result = busy.get(append.partition_id) or self._store([append])[0]
            if isinstance(result, StoreBusy):
                busy[append.partition_id] = result
            results.append(result)
        return results

    def _remember(
        self, appends: Sequence[Append], results: Sequence[Appended | PostroomError]
    ) -> dict[int, int]:
        """Keep what was stored for readers, and return the new ends of partitions."""
        ends: dict[int, int] = {}
        for append, result in zip(appends, results, strict=True):
            if isinstance(result, Appended) and append.due_at:
                self.scheduled(append.due_at)
            elif isinstance(result, Appended) and not result.duplicate and result.base_offset >= 0:
                partition_id, header = append.partition_id, append.header or read_header(append.batch)
                records = header.records - len(result.repeats)
                if not result.repeats:  # else what is stored is another batch
                    data = append.at(result.base_offset)
                    stored = StoredBatch(result.base_offset, records, result.appended_at, data)
                    self._tail.add(partition_id, stored)
                ends[partition_id] = result.base_offset + records
        return ends

    # ---- in the event loop ----

    def _answer(
        self, group: list[_PendingAppend], results: list[Appended | PostroomError], stored: dict[int, int]
    ) -> None:
        for pending, result in zip(group, results, strict=True):
            size, line = len(pending.append.batch), pending.line
            self._pending_bytes -= size
            line.bytes -= size
            if not line.bytes and not line.callers:
                del self._lines[line.key]
            self._tell(pending, result)
        if self._crowded and not self._closed:
            self._make_room()
        if stored:  # a turn later, when senders have their answers: a poll would hold these up
            self._loop.call_soon(self._appended, stored)

    def _tell(self, pending: _PendingAppend, result: Appended | PostroomError) -> None:
        try:
            pending.told(result)
        except Exception as error:  # a fault of whoever is told: the others are told all the same
            self._loop.call_exception_handler({"message": "the answer to an append", "exception": error})

    def _make_room(self) -> None:
        """Let in whom there is room for now, each line in its order."""
        for line in tuple(self._crowded.values()):
            while line.callers and not (line.bytes and self._is_full(line)):
                pending = line.callers.popleft()
                if pending.gone is None or not pending.gone():
                    self._let_in(pending)
            if not line.callers:
                del self._crowded[line.key]
                if not line.bytes:
                    del self._lines[line.key]


def _resolve(done: asyncio.Future[Appended], result: Appended | PostroomError) -> None:
    if done.done():  # its caller was cancelled
        return
    if isinstance(result, Appended):
        done.set_result(result)
    else:
        done.set_exception(result)


def _closed() -> ClosedError:
    return ClosedError("this connection is closed; call postroom.connect again")


def _unexpected(error: Exception) -> StoreError:
    failure = StoreError(f"the store failed in an unexpected way ({error!r}); nothing was confirmed")
    failure.__cause__ = error
    return failure
