"""Which messages of a partition may be handed out now, so that each key is handled in order (R22, R23).

A key has at most one run of messages out at a time. Messages whose key is out, or waits, stand in a line
behind it; everything else goes out in the order it came. A message that comes back (retried, released, taken
back) goes to its place in the line, and the key waits for the message's not-before (I5). Messages without a
key are one key; with `whole` the partition is.

What waits behind a message that failed may be parked in the store instead (I27): then the line here ends
where the stored one begins, whatever comes of the key is claimed for that, and nothing at or behind the place
where it begins is handed out. `claimed` is what the store is to be told; `hungry` are the keys whose line
here is used up, and which go on with what is stored.

Pure: time is an argument, and nothing is known here of leases, deliveries or stores. Must never hand out a
message before every earlier one of its key is done with or on its way there, and must cost next to nothing
where no key is in anybody's way: then messages go out and come in by the list, and keys are only counted.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias

from ....model.delivery.delivery import Line, Span
from ....model.delivery.ordered import FAR
from ...message import Received

__all__ = ["Key", "KeyQueue", "StoredLine"]

Key: TypeAlias = bytes | None
_key = attrgetter("key")
_position = attrgetter("_position")


class StoredLine:
    """A line in the store, as far as its holder knows it."""

    __slots__ = ("first", "id", "key", "last", "telling")

    def __init__(self, line: Line) -> None:
        self.id, self.key, self.first, self.last = line.id, line.key, line.first, line.last
        self.telling = 0  # claims on their way to the store


class KeyQueue:
    """`keeps`: nothing is claimed for the store, since it is settled there already (R16)."""

    def __init__(self, *, whole: bool = False, keeps: bool = False) -> None:
        self._whole, self._keeps = whole, keeps or whole
        self._stored: dict[Key, StoredLine] = {}
        self._stopped: list[Key] = []  # keys that wait for people: what is behind them is parked at once
        self.claimed: dict[Key, list[Received]] = {}  # to be told to the store, by key
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
        if not (self.fresh or self._ready or self._moments):
            return out
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
        stored = self._stored_of(key)
        before, wall = len(out), FAR if stored is None else stored.first
        while line and len(out) - before < limit:
            if self._not_before.get(line[0]._position, 0) > now_ms or line[0]._position >= wall:
                break
            message = line.popleft()
            self._left_line(key, message)
            out.append(message)
        if not line:
            self._close_line(key)
        if len(out) > before:
            self._busy[key] = len(out) - before
            self.out += len(out) - before

    def _take_fresh(self, limit: int, out: list[Received]) -> list[Received]:
        """From the lists. Keys that are out, or have a line, are passed over: their messages are parked."""
        found: list[Received] = []
        while self._fresh and len(found) < limit:
            part = self._next_part(limit - len(found))
            if self._busy or self._lines or self._stored:
                part = self._unblocked(part)
            found = found + part if found else part
        self._went_out(found)
        return out + found if out else found

    def _unblocked(self, part: list[Received]) -> list[Received]:
        if self._whole:
            if not self._busy and not self._lines:
                self._ready.append(None)
            self._park(None, part)
            return []
        if self._stored:
            return [message for message in part if not self._held_up(message)]
        busy, lines = self._busy, self._lines
        free = [message for message in part if message.key not in busy and message.key not in lines]
        if len(free) < len(part):
            for message in part:
                if message.key in busy or message.key in lines:
                    self._park(message.key, (message,))
        return free

    def _held_up(self, message: Received) -> bool:
        """Whether it has to wait; then it stands in its line, here or in the store."""
        key = self._key_of(message)
        stored = self._stored_of(key)
        behind = stored is not None and message._position >= stored.first
        if behind and stored is not None and not self._keeps:
            stored.last = max(stored.last, message._position)
            self.claimed.setdefault(key, []).append(message)
            return True
        if behind or key in self._busy or key in self._lines:
            self._park(key, (message,))
            return True
        return False

    def _take_singly(self, limit: int, out: list[Received]) -> None:
        while self._fresh and len(out) < limit:
            for message in self._next_part(limit - len(out)):
                key = self._key_of(message)
                if not self._held_up(message):
                    self._busy[key] = 1
                    self.out += 1
                    out.append(message)

    def _walk(self) -> None:
        """Bring every message into its key's line, so that others can be put in their places among them."""
        while self._fresh:
            for message in self._next_part(len(self._fresh[0])):
                key = self._key_of(message)
                idle = key not in self._busy and key not in self._lines
                if not self._held_up(message):
                    self._park(key, (message,))
                if idle and key in self._lines:
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
            freed = list(self._busy)
            self._busy.clear()
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
        elif len(messages) == 1:  # a message at a time
            key = messages[0].key
            self._busy[key] = self._busy.get(key, 0) + 1
        else:
            self._busy.update(map(_key, messages))

    def _park(self, key: Key, messages: Sequence[Received]) -> None:
        self._lines.setdefault(key, deque()).extend(messages)
        self.parked += len(messages)
        if key in self._waiting:
            self.waiting += len(messages)
            if self._not_before.get(self._lines[key][0]._position, 0) >= FAR:
                self._stopped.append(key)

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
            if moment >= FAR:
                self._stopped.append(key)
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

    # ---- lines in the store (I27) ----

    @property
    def behind(self) -> int:
        """Messages that wait here behind others that are not due, or are stopped."""
        return self.waiting - len(self._waiting)

    @property
    def stored(self) -> bool:
        """Whether the store has lines of this partition."""
        return bool(self._stored)

    def has_stored(self, lines: Iterable[Line]) -> None:
        """The partition is newly held: this is what is parked in the store."""
        self._stored = {line.key: StoredLine(line) for line in lines}

    def _stored_of(self, key: Key) -> StoredLine | None:
        """The line whose messages come before what is at its start or behind it."""
        if self._whole and self._stored:  # a line was made while keys went on by themselves
            return min(self._stored.values(), key=lambda line: line.first)
        return self._stored.get(key)

    def park_stopped(self) -> None:
        """What is behind messages that wait for people is claimed for the store."""
        stopped, self._stopped = self._stopped, []
        for key in stopped:
            if key in self._waiting:
                self._store_away(key)

    def park_waiting(self) -> None:
        """What is behind any message that is not due is claimed for the store."""
        for key in list(self._waiting):
            self._store_away(key)

    def _store_away(self, key: Key) -> None:
        """All of the line that was never tried; those that were keep their attempts here."""
        line, tail = self._lines[key], list[Received]()
        while not self._keeps and len(line) > 1 and self._untried(line[-1]):
            tail.append(line.pop())
        if not tail:
            return
        self.parked -= len(tail)
        self.waiting -= len(tail)
        tail.reverse()
        first, last = tail[0]._position, tail[-1]._position
        stored = self._stored.get(key)
        if stored is None:
            self._stored[key] = StoredLine(Line(first, key, first, last, 0))
        else:
            stored.first, stored.last = min(stored.first, first), max(stored.last, last)
        self.claimed[key] = tail + self.claimed.get(key, [])

    def _untried(self, message: Received) -> bool:
        return message._delivery.attempt == 1 and message._position not in self._not_before

    def take_claimed(self) -> Iterator[tuple[StoredLine, list[Received]]]:
        """What is to be told to the store now, lowest offset first."""
        claimed, self.claimed = self.claimed, {}
        for key, messages in claimed.items():
            yield self._stored[key], sorted(messages, key=_position)

    def claim_again(self, messages: Iterable[Received]) -> None:
        """The store could not be told."""
        for message in messages:
            self.claimed.setdefault(self._key_of(message), []).append(message)

    def hungry(self, received: int = FAR) -> StoredLine | None:
        """A line of the store whose messages are next, if everything below `received` has come here."""
        found = self._hungry(received)
        if found is None or not self._fresh:
            return found
        self._walk()  # there may be earlier ones of its key, at which nobody has looked
        return self._hungry(received)

    def _hungry(self, received: int) -> StoredLine | None:
        for key in (None,) if self._whole else self._stored:
            stored, line = self._stored_of(key), self._lines.get(key)
            if stored is None or stored.telling or key in self.claimed or key in self._busy:
                continue
            if stored.first < received and (line is None or line[0]._position >= stored.first):
                return stored
        return None

    def unparked(self, stored: StoredLine, messages: Sequence[Received], first: int) -> None:
        """These came out of a line, which begins at `first` from now on."""
        stored.first = first
        if first > stored.last and self._stored.get(stored.key) is stored:
            del self._stored[stored.key]
        self.back(messages)
        self._offer(None if self._whole else stored.key)
