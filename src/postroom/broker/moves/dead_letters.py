"""Dead letters of one group: list them, hand them back to that group alone, throw them away (R20).

A dead-letter topic is an ordinary topic; the progress of the group `_redrive` on it says which letters
are still there. Redrive moves them to the group's own retry topic, which that group alone reads (I17).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...endpoint.values import DeadLetters
from ...errors import UsageError
from ...model.delivery.delivery import Ask, Kind, Settlement, Span
from ...model.topology.names import REDRIVE_GROUP
from ...model.topology.route import Range
from ...store.contract import Granted, Group, Store, StoredBatch, Topic
from ..deliver.handed import Departure, new_stamp
from ..deliver.shared import Deliveries
from ..topology.catalog_cache import CatalogCache
from .departures import make_retry_topic

__all__ = ["DeadLetterOffice"]

_CHUNK = 500  # messages moved in one batch
_PAGE = 1000  # letters in one answer, and
_PAGE_BYTES = 4 * 1024 * 1024  # so much of them; one batch always fits


Spot = tuple[int, int]
"""A letter: partition id and offset."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Letters of one partition, in the hands of whoever redrives or discards them."""

    reader: Group
    piece: Range
    granted: Granted
    token: int
    control: int  # 1 if the control batch that seals the partition is among them: it is no letter


class DeadLetterOffice:
    """Blocking; run in worker threads."""

    def __init__(self, store: Store, catalog: CatalogCache, deliveries: Deliveries) -> None:
        self._store = store
        self._catalog = catalog
        self._deliveries = deliveries

    def letters(self, topic: str, group: str, limit: int, after: Spot | None = None) -> list[DeadLetters]:
        """A page of them, from the one behind `after` on; none: there are no more."""
        boxes = [(box, piece) for _, box in self._boxes(topic, group) for piece in box.route.partitions]
        if after is not None:
            ids = [piece.partition_id for _, piece in boxes]
            boxes = boxes[ids.index(after[0]) :] if after[0] in ids else []
        found: list[DeadLetters] = []
        left, size = min(limit, _PAGE), _PAGE_BYTES
        for box, piece in boxes:
            first = after[1] + 1 if after is not None and piece.partition_id == after[0] else 0
            here = self._letters(box, piece, first, left, size)
            if here.open or after is None:
                found.append(here)
            left -= sum(last - first + 1 for first, last in here.open)
            size -= sum(len(batch.data) for batch in here.batches)
            if left <= 0 or size <= 0:
                break
        return found

    def _letters(self, box: Topic, piece: Range, first: int, limit: int, size: int) -> DeadLetters:
        """From that offset on, as far as its batches fit into so many bytes; one always does."""
        place, spans, batches = piece.partition_id, list[Span](), dict[int, StoredBatch]()
        for begin, end in self._open(box, place, first, limit):
            upto = begin - 1
            for batch in self._deliveries.walk_span(place, begin, end):
                if batch.base_offset not in batches:
                    size -= len(batch.data)
                    if batches and size < 0:
                        break
                    batches[batch.base_offset] = batch
                upto = min(end, batch.last_offset)
            else:
                upto = end
            if upto >= begin:
                spans.append((begin, upto))
            if upto < end:
                break
        return DeadLetters(box.name, piece.partition, place, tuple(spans), tuple(batches.values()))

    def _boxes(
        self, topic: str, group: str, spots: Sequence[Spot] | None = None
    ) -> list[tuple[Group, Topic]]:
        """The group and its dead-letter topic, if it ever had a dead letter; in a broadcast group many."""
        readers = self._catalog.readers(topic, group)
        if spots is not None and [reader.name for reader in readers] != [group]:
            raise UsageError(
                f"group {group!r} is a broadcast group, and each member has its own dead letters: name the "
                f"member whose you mean, such as {group + '@ann'!r}; groups() lists them"
            )
        found = ((reader, self._catalog.dead_letters(topic, reader.name)) for reader in readers)
        return [(reader, box) for reader, box in found if box is not None]

    def _open(self, letters: Topic, place: int, first: int, limit: int) -> list[Span]:
        """Spans of letters still there from an offset on, up to `limit` messages."""
        reader = self._store.catalog.group(letters.name, REDRIVE_GROUP)
        backlog = self._store.progress.backlog(reader, [place], open_spans=limit, open_from=first)[0]
        open_ones = (*backlog.open, (backlog.cursor, backlog.end - 1))
        spans: list[Span] = []
        left = limit
        for begin, end in open_ones if len(backlog.open) < limit else backlog.open:
            begin = max(begin, first)
            end = min(end, begin + left - 1)
            if begin <= end:
                spans.append((begin, end))
                left -= end - begin + 1
        return spans

    def redrive(self, topic: str, group: str, spots: Sequence[Spot] | None) -> tuple[int, list[Departure]]:
        """Stamp the letters for the group's retry topic; the mover does the rest."""
        done = [
            self._redrive(topic, own.name, taken)
            for own, box in self._boxes(topic, group, spots)
            for taken in self._take(box, spots)
        ]
        return sum(count for count, _ in done), [leaving for _, leaving in done]

    def _redrive(self, topic: str, group: str, taken: _Taken) -> tuple[int, Departure]:
        target = make_retry_topic(self._catalog, self._store.catalog.group(topic, group))
        held = [(d.first, d.last) for d in taken.granted.deliveries]
        moves = [
            Settlement(Kind.MOVE, low, min(low + _CHUNK - 1, last), stamp=new_stamp(target))
            for first, last in held
            for low in range(first, last + 1, _CHUNK)
        ]
        place = taken.piece.partition_id
        done = self._store.progress.settle(taken.reader, place, taken.token, moves)
        leaving = taken.granted.leaving + done.leaving
        count = sum(d.size for d in leaving) - taken.control
        return count, Departure(taken.reader, taken.piece.partition, place, leaving)

    def discard(self, topic: str, group: str, spots: Sequence[Spot] | None) -> int:
        boxes = self._boxes(topic, group, spots)
        return sum(self._discard(taken) for _, box in boxes for taken in self._take(box, spots))

    def _discard(self, taken: _Taken) -> int:
        acks = [Settlement(Kind.ACK, d.first, d.last) for d in taken.granted.deliveries]
        self._store.progress.settle(taken.reader, taken.piece.partition_id, taken.token, acks)
        return sum(d.size for d in taken.granted.deliveries) - taken.control

    def _take(self, letters: Topic, spots: Sequence[Spot] | None) -> Iterator[_Taken]:
        """Of each partition of the box what is asked for, as far as it is there."""
        reader = self._store.catalog.group(letters.name, REDRIVE_GROUP)
        for piece in letters.route.partitions:
            place = piece.partition_id
            edges = self._store.log.bounds([place])[place]
            spans = [(0, edges.end - 1)]
            if spots is not None:
                spans = _spans(sorted({offset for of, offset in spots if of == place}))
            if not edges.end or not spans:
                continue
            token = secrets.randbits(62) + 1
            ask = Ask(member="redrive", token=token, messages=edges.end, end=edges.end)
            granted = self._store.progress.seize(reader, place, ask, spans)
            taken = [*granted.deliveries, *granted.leaving]
            control = edges.sealed and any(d.last == edges.end - 1 for d in taken)
            yield _Taken(reader, piece, granted, token, int(control))


def _spans(offsets: Sequence[int]) -> list[Span]:
    """Neighbours as one: a thousand letters in a row are one delivery, not a thousand."""
    spans: list[Span] = []
    for offset in offsets:
        if spans and spans[-1][1] == offset - 1:
            spans[-1] = (spans[-1][0], offset)
        else:
            spans.append((offset, offset))
    return spans
