"""Message ids where a topic looks at them (R32, I13): what stands for an id, and what is left of a batch.

Decides the 16 bytes that stand for a message id, and what becomes of a batch some of whose messages were
sent before. Must never read a clock or keep state. Equal ids have equal digests for ever: they are stored.
Digests of different ids differ; those of long ids as surely as BLAKE2 is sound.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from ..topology.names import HEADER_PREFIX
from .batch import BatchBuilder, read_header, records

__all__ = [
    "DIGEST_SIZE",
    "ID_HEADER",
    "NO_FLOOR",
    "NO_ID",
    "IdTable",
    "Window",
    "digest",
    "digests",
    "digests_of",
    "places",
    "split",
    "without",
]


DIGEST_SIZE = 16
NO_ID = bytes(DIGEST_SIZE)
"""In the place of a message without an id: it is never a repeat. No id has this digest."""

ID_HEADER = f"{HEADER_PREFIX}id"
"""The record header that holds the id its sender gave a message."""

_SHORT = DIGEST_SIZE - 1
_ENDS = tuple(bytes(_SHORT - size) + bytes((size,)) for size in range(DIGEST_SIZE))
_LONG = b"\xff"
_HASHER = blake2b(digest_size=_SHORT)  # copied for each id: a new one takes longer to make
_WHOLE = 2**31 - 1  # less of a batch that was let in is let in, whatever its size (I17)


def digest(id: str) -> bytes:
    """16 bytes: a short id (15 bytes of UTF-8) as it is, padded, and its length; of a long one a hash of 15
    bytes, and 0xFF."""
    return _digest(id.encode())


def _digest(text: bytes) -> bytes:
    if len(text) <= _SHORT:
        return text + _ENDS[len(text)]
    hasher = _HASHER.copy()
    hasher.update(text)
    return hasher.digest() + _LONG


def digests(ids: Iterable[str | None]) -> bytes:
    """16 bytes for each message of a batch."""
    return b"".join([NO_ID if id is None else _digest(id.encode()) for id in ids])


def digests_of(batch: bytes) -> bytes:
    """Compute the digests from the batch itself, for senders that send none; empty if it has no ids."""
    found = []
    for record in records(batch):
        ids = [value for name, value in record.headers if name == ID_HEADER]
        found.append(_digest(ids[0]) if ids and ids[0] else NO_ID)
    return b"".join(found) if any(one != NO_ID for one in found) else b""


def split(joined: bytes) -> Sequence[bytes]:
    """The digests of a batch, one by one. Six times as fast as slicing."""
    return _splitter(len(joined) // DIGEST_SIZE).unpack(joined)


@lru_cache(maxsize=64)
def _splitter(count: int) -> struct.Struct:
    return struct.Struct(f"{DIGEST_SIZE}s" * count)


def without(batch: bytes, dropped: Collection[int]) -> bytes:
    """The batch without the messages at these places; at least one is left.

    Its identity stays as it was sent. Sequences count the messages that were sent, offsets those that are
    stored: the two no longer agree, and nobody compares them again.
    """
    header = read_header(batch)
    builder = BatchBuilder(header.compression, max_bytes=_WHOLE)
    for place, record in enumerate(records(batch)):
        if place not in dropped:
            builder.append(record.timestamp, record.key, record.value, record.headers)
    return builder.build(header.producer_id, header.epoch, header.base_sequence)


def places(sent: Sequence[bytes], stored: Sequence[bytes]) -> list[int]:
    """Return which messages of a batch were dropped, given the digests that are stored of it.

    Whose id was known when the batch came is missing at every place it had, and messages without an id are
    never missing: so the first place where a stored digest fits is the place it was at.
    """
    missing, at = [], 0
    for place, one in enumerate(sent):
        if at < len(stored) and stored[at] == one:
            at += 1
        else:
            missing.append(place)
    return missing


# ---- digests of ids, numbered in the order they came: compact, and fast to search (I13) ----
# A Python set of six million ids is 600 MB. Here a digest is kept once, 16 bytes beside the others, and
# found through slots in the manner of a hash table: its hash says where to begin, and it is in one of the
# slots from there to the next empty one. Of most slots only a byte is looked at. The byte has some bits
# of the hash, so that one seldom looks further in vain, and the generation of the id: the old leave
# generation by generation, which `translate` does for all slots at once.
#
# Decides nothing about time: whoever uses it says which numbers are of no interest any more. Must never
# be used by two threads at once.

_EMPTY, _LEFT = 0, 1  # bytes of slots: never used, and used by an id that has gone
_GENERATIONS = 7  # at a time; their numbers, from 1 on, are the upper three bits of a byte,
_HASH = 31  # the upper five bits of the hash are the lower ones
_HASH_AT = 59  # in a hash of 64 bits; others choose the slot
_NUMBERS = 2**32  # a slot has the lower 32 bits of a number

_SLOTS = 1024  # of an empty table; when they do not suffice there are four times as many,
_MANY = 2**22  # and from here on twice as many
_SHARE = 6  # a generation has a sixth of the ids,
_LEAST = 1024  # but not fewer
_PAGE = 4096  # digests that are kept in one piece


class IdTable:
    __slots__ = ("_borders", "_mask", "_numbers", "_pages", "_room", "_tags", "end", "start")

    def __init__(self, expected: int = 0, first: int = 0) -> None:
        self.start = first  # numbers below are of no interest
        self.end = first  # the next number
        self._pages: deque[bytearray] = deque()  # digests; the first page has that of `start`
        self._borders = deque([(first, 1)])  # of generations: the first number, and the generation's
        self._make(_slots(expected))

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def size(self) -> int:
        """Bytes of memory, nearly."""
        return len(self._tags) * (1 + self._numbers.itemsize) + len(self._pages) * _PAGE * DIGEST_SIZE

    def known(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return those of the digests that have a number."""
        tags, mask = self._tags, self._mask
        maybe = [one for one in digests if tags[hash(one) & mask]]
        return [one for one in maybe if self.number(one) >= 0]

    def number(self, digest: bytes) -> int:
        """The newest number of a digest; -1 if it has none."""
        tags, mask = self._tags, self._mask
        hashed = hash(digest)
        part, at = hashed >> _HASH_AT & _HASH, hashed & mask
        while tag := tags[at]:
            if tag & _HASH == part and tag > _HASH:
                number = self._number_at(at, digest)
                if number >= 0:
                    return number
            at = (at + 1) & mask
        return -1

    def add(self, joined: bytes, digests: Sequence[bytes] | None = None) -> int:
        """Give digests the next numbers; returns the first. What stands for no id is not found again.

        `digests`: the same one by one, from whoever has them so: then their hashes are known.
        """
        first = self.end
        self._keep(joined)
        if self._has_room(self.end - first):
            self._place(joined, digests or split(joined), first, self._borders[-1][1])
        else:
            self._rebuild()
        if len(self._borders) < _GENERATIONS and self.end - self._borders[-1][0] >= self._share:
            self._borders.append((self.end, self._borders[-1][1] % _GENERATIONS + 1))
        return first

    def forget_below(self, number: int) -> None:
        """Numbers below are not known any more."""
        number = min(number, self.end)
        if number <= self.start:
            return
        for _ in range(min(number // _PAGE - self.start // _PAGE, len(self._pages))):
            self._pages.popleft()
        self.start = number
        while len(self._borders) > 1 and self._borders[1][0] <= number:
            self._leave(self._borders.popleft()[1])

    # ---- digests by number ----

    def _keep(self, joined: bytes) -> None:
        at = 0
        while at < len(joined):
            used = self.end % _PAGE
            if not used or not self._pages:
                self._pages.append(bytearray(DIGEST_SIZE * used))
            piece = joined[at : at + DIGEST_SIZE * (_PAGE - used)]
            self._pages[-1] += piece
            self.end += len(piece) // DIGEST_SIZE
            at += len(piece)

    def _number_at(self, slot: int, digest: bytes) -> int:
        """The number in a slot, if it is this digest's and of interest; else -1."""
        number = (self._numbers[slot] - self.start) % _NUMBERS + self.start
        if number >= self.end:
            return -1
        page, at = self._pages[number // _PAGE - self.start // _PAGE], DIGEST_SIZE * (number % _PAGE)
        return number if page[at : at + DIGEST_SIZE] == digest else -1

    def _kept(self, first: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Digests from one number to another, in pieces."""
        while first < end:
            until = min(end, first - first % _PAGE + _PAGE)
            page = self._pages[first // _PAGE - self.start // _PAGE]
            at = first % _PAGE
            yield first, bytes(page[DIGEST_SIZE * at : DIGEST_SIZE * (at + until - first)])
            first = until

    # ---- slots ----

    def _make(self, slots: int) -> None:
        self._tags = bytearray(slots)
        self._numbers = array("I", bytes(4 * slots))
        self._mask = slots - 1
        self._room = slots // 2  # the others stay empty, or one would have to look at many

    def _has_room(self, added: int) -> bool:
        self._room -= added
        if self._room < 0:  # some may have become empty since they were counted
            room = self._tags.count(_EMPTY) - len(self._tags) // 2 - added
            self._room = room if room > len(self._tags) // 16 else -1
        return self._room >= 0

    def _place(self, joined: bytes, digests: Sequence[bytes], first: int, generation: int) -> None:
        tags, numbers, mask, new = self._tags, self._numbers, self._mask, _TAGS[generation]
        numbered: Iterable[tuple[int, bytes]] = enumerate(digests, first % _NUMBERS)
        if NO_ID in joined or first % _NUMBERS + len(digests) > _NUMBERS:
            numbered = [(number % _NUMBERS, one) for number, one in numbered if one != NO_ID]
        for number, one in numbered:
            hashed = hash(one)
            at, tag = hashed & mask, new[hashed >> _HASH_AT]
            while (there := tags[at]) > _LEFT:
                if not (there ^ tag) & _HASH and self._number_at(at, one) >= 0:
                    break  # it came before: of an id only the newest number is kept
                at = (at + 1) & mask
            tags[at] = tag
            numbers[at] = number

    def _rebuild(self) -> None:
        """Build the table anew, with more slots if they run short: tenths of a second for a million ids."""
        self._make(_slots(len(self)))
        self._room -= len(self)
        ends = [*[begin for begin, _ in self._borders][1:], self.end]
        for (begin, generation), end in zip(self._borders, ends, strict=True):
            for first, joined in self._kept(max(begin, self.start), end):
                self._place(joined, split(joined), first, generation)

    # ---- generations ----

    @property
    def _share(self) -> int:
        return max(_LEAST, len(self) // _SHARE)

    def _leave(self, generation: int) -> None:
        """The ids of a generation go. Whoever looks for others still has to pass their slots …"""
        tags = self._tags.translate(_LEAVING[generation])
        self._tags = tags.replace(bytes((_LEFT, _EMPTY)), bytes((_EMPTY, _EMPTY)))  # … but not the last ones


def _slots(ids: int) -> int:
    """Return how many slots a table needs for so many ids and as many again."""
    slots = _SLOTS
    while slots < 4 * ids:
        slots *= 4 if slots < _MANY else 2
    return slots


_TAGS = [tuple(generation << 5 | part for part in range(_HASH + 1)) for generation in range(_GENERATIONS + 1)]
"""By generation and part of the hash; a negative one counts from the end, as it should."""

_LEAVING = [
    bytes(_LEFT if tag >> 5 == number else tag for tag in range(256)) for number in range(_GENERATIONS + 1)
]
"""By generation: what becomes of each byte of a slot when it leaves."""


# ---- the ids that a partition remembers (R32): those of its newest messages, and when they were stored ----
# Decides whether a message that was stored earlier still counts: for as long as the topic's window says,
# and in any case until every group has settled it; but of the newest `limit` messages only, so that
# memory has a bound (I13). It is told of rows in the order of their offsets, and must never be told of
# one that is not committed (I2). What it no longer needs it forgets by and by.
#
# The window covers this partition alone. When partitions have predecessors, it also has to cover those
# that were sealed within it (I13).

NO_FLOOR = 2**62
"""Where no group has anything to settle."""

_TRIM = 4096  # marks that are dropped at once


class Window:
    """A window remembers the ids of one partition. It is not for several threads at once."""

    __slots__ = ("_limit", "_numbers", "_offsets", "_table", "_times", "end", "start")

    def __init__(self, start: int, limit: int, expected: int = 0) -> None:
        self.start = start  # the ids of messages from here on are known,
        self.end = start  # up to here
        self._limit = limit
        self._table = IdTable(min(expected, limit))
        # marks: from a number of the table on, messages have consecutive offsets and were stored at one time
        self._numbers = array("q")
        self._offsets = array("q")
        self._times = array("q")  # never falls (I16)

    @property
    def size(self) -> int:
        """Bytes of memory, nearly."""
        return self._table.size + 3 * self._times.itemsize * len(self._times)

    def see(
        self, base: int, records: int, appended_at: int, ids: bytes, digests: Sequence[bytes] | None = None
    ) -> None:
        """A stored row, and its ids if it has any. One that was seen before changes nothing."""
        if base < self.end:
            return
        if ids:
            number = self._table.add(ids, digests)
            if not self._continues(number, base, appended_at):
                self._numbers.append(number)
                self._offsets.append(base)
                self._times.append(appended_at)
        self.end = base + records
        if self.end - self.start > self._limit:
            self.forget_below(self.end - self._limit)

    def _continues(self, number: int, base: int, appended_at: int) -> bool:
        if not self._times or self._times[-1] != appended_at:
            return False
        return base - self._offsets[-1] == number - self._numbers[-1]

    def known(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return those of the digests that may be remembered."""
        return self._table.known(digests)

    def offset(self, digest: bytes) -> int:
        """Return the offset of the newest message with that id; -1 if none is known."""
        number = self._table.number(digest)
        if number < 0:
            return -1
        mark = bisect_right(self._numbers, number) - 1
        return self._offsets[mark] + number - self._numbers[mark]

    def remembered(self, offset: int, now: int, window_ms: int, floor: int) -> bool:
        """Tell whether the message at that offset counts. From `floor` on some group has not settled it."""
        if offset < self.end - self._limit:
            return False
        stored_at = self._times[bisect_right(self._offsets, offset) - 1]
        return offset >= floor or now - stored_at < window_ms

    def needed(self, now: int, window_ms: int, floor: int) -> int:
        """The first offset whose id counts, as far as this window knows the times."""
        mark = bisect_right(self._times, now - window_ms)
        by_time = self._offsets[mark] if mark < len(self._offsets) else self.end
        return max(min(by_time, floor), self.end - self._limit)

    def forget_below(self, offset: int) -> None:
        if offset <= self.start:
            return
        self.start = offset
        mark = bisect_right(self._offsets, offset) - 1  # this one is still needed, those before it are not
        if mark < 0:
            return
        until = self._numbers[mark + 1] if mark + 1 < len(self._numbers) else self._table.end
        self._table.forget_below(min(self._numbers[mark] + offset - self._offsets[mark], until))
        if mark >= _TRIM:
            del self._numbers[:mark], self._offsets[:mark], self._times[:mark]
