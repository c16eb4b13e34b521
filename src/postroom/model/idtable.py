"""Digests of ids, numbered in the order they came: compact, and fast to search (I13).

A Python set of six million ids is 600 MB. Here a digest is kept once, 16 bytes beside the others, and found
through slots in the manner of a hash table: its hash says where to begin, and it is in one of the slots from
there to the next empty one. Of most slots only a byte is looked at. The byte has some bits of the hash, so
that one seldom looks further in vain, and the generation of the id: the old leave generation by generation,
which `translate` does for all slots at once.

Decides nothing about time: whoever uses it says which numbers are of no interest any more. Must never be used
by two threads at once.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from .dedup import DIGEST_SIZE, NO_ID, split

__all__ = ["IdTable"]

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
        """Those of the digests that have a number."""
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
        """With more slots if there are not more than enough; takes some tenths of a second for a million."""
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
    """For so many ids and as many again."""
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
