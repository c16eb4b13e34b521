"""Which messages of a partition may be handed out now, so that each key is handled in order (R22, R23).

A key has at most one run of messages out at a time. Messages whose key is out, or waits, are parked in a line
behind it; everything else goes out in the order it came. A message that comes back (retried, released, taken
back) goes to its place in the line, and the key waits for the message's not-before (I5). Messages without a
key are one key; with `whole` the partition is.

Pure: time is an argument, and nothing is known here of leases, deliveries or stores. Must never hand out a
message before every earlier one of its key is done with or on its way there, and must cost next to nothing
where no key is in anybody's way: then messages go out and come in by the list, and keys are only counted.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TypeAlias

from ...model.delivery import Span
from ..message import Received

__all__ = ["KeyQueue"]

Key: TypeAlias = bytes | None
_key = attrgetter("key")


class KeyQueue:
    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._fresh: deque[list[Received]] = deque()  # not looked at yet, lowest offset first
        self._at = 0  # messages of the first list that are gone already
        self._lines: dict[Key, deque[Received]] = {}
        self._busy: Counter[Key] = Counter()  # how many are out, by key; never zero
        self._ready: deque[Key] = deque()  # keys whose line may go on: a hint, looked at again when taken
        self._not_before: dict[int, int] = {}  # by offset, of messages in lines
        self._moments: list[tuple[int, int, Key]] = []  # a heap: (not before, number, key that waits for it)
        self._waiting: set[Key] = set()  # keys in nobody's hands whose next message is not due
        self._numbers = 0
        self.fresh = 0  # messages nobody has looked at
        self.out = 0  # handed out, and not done with
        self.parked = 0  # in lines
        self.waiting = 0  # of these, behind a message that is not due

    # ---- coming in ----

    def add(self, messages: list[Received], not_before: int = 0) -> None:
        """Messages that came, above all that came before them."""
        if not messages:
            return
        if not_before:
            self._walk()
            self.back(messages, not_before)
        else:
            self._fresh.append(messages)
            self.fresh += len(messages)

    def back(self, messages: Iterable[Received], not_before: int = 0) -> None:
        """Messages to be handed out again, none of which is out now; each goes to its place in the line."""
        for message in messages:
            key = self._key_of(message)
            line = self._lines.setdefault(key, deque())
            at = len(line)
            while at and line[at - 1]._position > message._position:
                at -= 1
            line.insert(at, message)
            self.parked += 1
            self.waiting += key in self._waiting
            if not_before:
                self._not_before[message._position] = not_before
            if at == 0:
                self._offer(key)

    # ---- going out ----

    def take(
        self, limit: int, now_ms: int, *, one_per_key: bool = False, within: Span | None = None
    ) -> list[Received]:
        """Messages that may be handled now; they are out from then on.

        `within`: of what was looked at before, only these offsets; keys with others first are left alone.
        """
        out: list[Received] = []
        self._wake(now_ms)
        passed: list[Key] = []
        while self._ready and len(out) < limit:
            key = self._ready.popleft()
            if within is not None and not self._begins(key, within):
                passed.append(key)
            else:
                self._take_line(key, 1 if one_per_key else limit - len(out), now_ms, out)
        self._ready.extend(passed)
        if self._fresh and len(out) < limit:
            if one_per_key:
                self._take_singly(limit, out)
            else:
                out = self._take_fresh(limit - len(out), out)
        return out

    def _take_line(self, key: Key, limit: int, now_ms: int, out: list[Received]) -> None:
        line = self._lines.get(key)
        if line is None or key in self._busy:
            return
        if self._not_before.get(line[0]._position, 0) > now_ms:
            self._offer(key)
            return
        before = len(out)
        while line and len(out) - before < limit:
            if self._not_before.get(line[0]._position, 0) > now_ms:
                break
            message = line.popleft()
            self._left_line(key, message)
            out.append(message)
        if not line:
            self._close_line(key)
        self._busy[key] = len(out) - before
        self.out += len(out) - before

    def _take_fresh(self, limit: int, out: list[Received]) -> list[Received]:
        """From the lists. Keys that are out, or have a line, are passed over: their messages are parked."""
        found: list[Received] = []
        while self._fresh and len(found) < limit:
            part = self._next_part(limit - len(found))
            if self._busy or self._lines:
                part = self._unblocked(part)
            found = found + part if found else part
        self._went_out(found)
        return out + found if out else found

    def _unblocked(self, part: list[Received]) -> list[Received]:
        if self._whole:
            self._park(None, part)
            return []
        busy, lines = self._busy, self._lines
        free = [message for message in part if message.key not in busy and message.key not in lines]
        if len(free) < len(part):
            for message in part:
                if message.key in busy or message.key in lines:
                    self._park(message.key, (message,))
        return free

    def _take_singly(self, limit: int, out: list[Received]) -> None:
        while self._fresh and len(out) < limit:
            for message in self._next_part(limit - len(out)):
                key = self._key_of(message)
                if key in self._busy or key in self._lines:
                    self._park(key, (message,))
                else:
                    self._busy[key] = 1
                    self.out += 1
                    out.append(message)

    def _walk(self) -> None:
        """Bring every message into its key's line, so that others can be put in their places among them."""
        while self._fresh:
            for message in self._next_part(len(self._fresh[0])):
                key = self._key_of(message)
                idle = key not in self._busy and key not in self._lines
                self._park(key, (message,))
                if idle:
                    self._ready.append(key)

    def _next_part(self, limit: int) -> list[Received]:
        first = self._fresh[0]
        part = first if not self._at and len(first) <= limit else first[self._at : self._at + limit]
        self._at += len(part)
        if self._at >= len(first):
            self._fresh.popleft()
            self._at = 0
        self.fresh -= len(part)
        return part

    # ---- done with ----

    def done(self, messages: Sequence[Received]) -> None:
        """These are out no more: settled, or on their way there. Their keys may go on."""
        if len(messages) == self.out:
            freed: Iterable[Key] = self._busy
            self._busy = Counter()
        else:
            freed = self._less_busy(messages)
        self.out -= len(messages)
        if self._lines:
            for key in freed:
                self._offer(key)

    def _less_busy(self, messages: Sequence[Received]) -> list[Key]:
        busy, freed = self._busy, []
        for key in [None] * len(messages) if self._whole else map(_key, messages):
            if busy[key] > 1:
                busy[key] -= 1
            else:
                del busy[key]
                freed.append(key)
        return freed

    def undone(self, messages: Sequence[Received]) -> None:
        """What was on its way there did not arrive: these are out again."""
        self._went_out(messages)

    def run_of(self, message: Received) -> int:
        """How many messages of this one's key are out."""
        return self._busy[self._key_of(message)]

    def same_key(self, one: Received, other: Received) -> bool:
        return self._whole or one.key == other.key

    # ---- when there is more ----

    def has_more(self, now_ms: int, within: Span | None = None) -> bool:
        """Whether `take` may find something."""
        if within is not None:
            self._wake(now_ms)
            return bool(self.fresh) or any(self._begins(key, within) for key in self._ready)
        return bool(self.fresh or self._ready or (self._moments and self._moments[0][0] <= now_ms))

    def _begins(self, key: Key, within: Span) -> bool:
        """Whether the next message of a key lies there."""
        line = self._lines.get(key)
        return line is not None and key not in self._busy and within[0] <= line[0]._position <= within[1]

    @property
    def next_at(self) -> int | None:
        """When a key that waits may go on, if nothing happens before."""
        while self._moments and self._moments[0][2] not in self._waiting:
            heapq.heappop(self._moments)
        return self._moments[0][0] if self._moments else None

    # ---- lines ----

    def _key_of(self, message: Received) -> Key:
        return None if self._whole else message.key

    def _went_out(self, messages: Sequence[Received]) -> None:
        self.out += len(messages)
        if self._whole:
            if messages:
                self._busy[None] += len(messages)
        else:
            self._busy.update(map(_key, messages))

    def _park(self, key: Key, messages: Sequence[Received]) -> None:
        self._lines.setdefault(key, deque()).extend(messages)
        self.parked += len(messages)
        if key in self._waiting:
            self.waiting += len(messages)

    def _left_line(self, key: Key, message: Received) -> None:
        self.parked -= 1
        self.waiting -= key in self._waiting
        self._not_before.pop(message._position, None)

    def _close_line(self, key: Key) -> None:
        del self._lines[key]
        self._waiting.discard(key)

    def _offer(self, key: Key) -> None:
        """A key may have become able to go on: now, or when its next message is due."""
        line = self._lines.get(key)
        if line is None or key in self._busy:
            return
        moment = self._not_before.get(line[0]._position, 0)
        if moment:
            if key not in self._waiting:
                self._waiting.add(key)
                self.waiting += len(line)
            self._numbers += 1
            heapq.heappush(self._moments, (moment, self._numbers, key))
        else:
            self._no_longer_waits(key)
            self._ready.append(key)

    def _wake(self, now_ms: int) -> None:
        while self._moments and self._moments[0][0] <= now_ms:
            _, _, key = heapq.heappop(self._moments)
            if key in self._waiting and self._not_before.get(self._lines[key][0]._position, 0) <= now_ms:
                self._no_longer_waits(key)
                self._ready.append(key)

    def _no_longer_waits(self, key: Key) -> None:
        if key in self._waiting:
            self._waiting.discard(key)
            self.waiting -= len(self._lines[key])
