"""Dead letters of one group: list them, hand them back to that group alone, throw them away (R20).

A dead-letter topic is an ordinary topic; the progress of the group `_redrive` on it says which letters
are still there. Redrive moves them to the group's own retry topic, which that group alone reads (I17).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ..errors import GateClosed, UnknownPartition, UsageError
from ..model.delivery import Ask, Kind, Settlement, Span
from ..model.names import REDRIVE_GROUP
from ..store.contract import Granted, Group, Store, Topic
from .catalog import CatalogCache
from .deliveries import Deliveries, Departure, new_stamp
from .endpoint import DeadLetters
from .retries import make_retry_topic

__all__ = ["DeadLetterOffice"]

_CHUNK = 500  # messages moved in one batch


class DeadLetterOffice:
    """Blocking; run in worker threads."""

    def __init__(self, store: Store, catalog: CatalogCache, deliveries: Deliveries) -> None:
        self._store = store
        self._catalog = catalog
        self._deliveries = deliveries

    def letters(self, topic: str, group: str, limit: int) -> list[DeadLetters]:
        return [self._letters(box, limit) for _, box in self._boxes(topic, group)]

    def _letters(self, box: Topic, limit: int) -> DeadLetters:
        place = box.route.ranges[0]
        spans = self._open(box, limit)
        batches = [b for span in spans for b in self._deliveries.read_span(place.partition_id, *span)]
        unique = {b.base_offset: b for b in batches}
        return DeadLetters(
            box.name, place.partition, place.partition_id, tuple(spans), tuple(unique.values())
        )

    def _boxes(
        self, topic: str, group: str, offsets: Sequence[int] | None = None
    ) -> list[tuple[Group, Topic]]:
        """The group and its dead-letter topic, if it ever had a dead letter; in a broadcast group many."""
        readers = self._catalog.readers(topic, group)
        if offsets is not None and [reader.name for reader in readers] != [group]:
            raise UsageError(
                f"group {group!r} is a broadcast group, and each member has its own dead letters: name the "
                f"member whose you mean, such as {group + '@ann'!r}; groups() lists them"
            )
        found = ((reader, self._catalog.dead_letters(topic, reader.name)) for reader in readers)
        return [(reader, box) for reader, box in found if box is not None]

    def _open(self, letters: Topic, limit: int) -> list[Span]:
        """Spans of letters still there, up to `limit` messages."""
        place = letters.route.ranges[0].partition_id
        reader = self._store.catalog.group(letters.name, REDRIVE_GROUP)
        backlog = self._store.progress.backlog(reader, [place], open_spans=limit)[0]
        spans: list[Span] = []
        left = limit
        for first, last in (*backlog.open, (backlog.cursor, backlog.end - 1)):
            last = min(last, first + left - 1)
            if first <= last:
                spans.append((first, last))
                left -= last - first + 1
        return spans

    def redrive(self, topic: str, group: str, offsets: Sequence[int] | None) -> tuple[int, list[Departure]]:
        """Stamp the letters for the group's retry topic; the mover does the rest."""
        done = [
            self._redrive(topic, own.name, box, offsets) for own, box in self._boxes(topic, group, offsets)
        ]
        return sum(count for count, _ in done), [leaving for _, leaving in done]

    def _redrive(
        self, topic: str, group: str, letters: Topic, offsets: Sequence[int] | None
    ) -> tuple[int, Departure]:
        target = make_retry_topic(self._catalog, self._store.catalog.group(topic, group))
        reader, place, taken, token = self._take(letters, offsets)
        held = [(d.first, d.last) for d in taken.deliveries]
        moves = [
            Settlement(Kind.MOVE, low, min(low + _CHUNK - 1, last), stamp=new_stamp(target))
            for first, last in held
            for low in range(first, last + 1, _CHUNK)
        ]
        done = self._store.progress.settle(reader, place, token, moves)
        number = letters.route.ranges[0].partition
        leaving = taken.leaving + done.leaving
        return sum(d.size for d in leaving), Departure(reader, number, place, leaving)

    def restart_stopped(self, topic: str, group: str) -> int:
        """Ordered groups: what stopped its key begins anew; returns how many messages that are."""
        return sum(
            self._restart(reader, piece.partition_id)
            for own in self._catalog.readers(topic, group)
            for source, reader in self._catalog.sources(topic, own.name)
            if reader.settings.mode == "ordered"
            for piece in source.route.partitions
        )

    def _restart(self, reader: Group, partition_id: int) -> int:
        try:
            return self._store.progress.restart_stopped(reader, partition_id)
        except (GateClosed, UnknownPartition):  # not begun yet, or gone: nothing has stopped there
            return 0

    def discard(self, topic: str, group: str, offsets: Sequence[int] | None) -> int:
        return sum(self._discard(box, offsets) for _, box in self._boxes(topic, group, offsets))

    def _discard(self, letters: Topic, offsets: Sequence[int] | None) -> int:
        reader, place, taken, token = self._take(letters, offsets)
        acks = [Settlement(Kind.ACK, d.first, d.last) for d in taken.deliveries]
        self._store.progress.settle(reader, place, token, acks)
        return sum(d.size for d in taken.deliveries)

    def _take(self, letters: Topic, offsets: Sequence[int] | None) -> tuple[Group, int, Granted, int]:
        place = letters.route.ranges[0].partition_id
        reader = self._store.catalog.group(letters.name, REDRIVE_GROUP)
        end = self._store.log.bounds([place])[place].end
        spans = [(0, end - 1)] if offsets is None else [(offset, offset) for offset in sorted(set(offsets))]
        token = secrets.randbits(62) + 1
        ask = Ask(member="redrive", token=token, messages=end, end=end)
        taken = self._store.progress.seize(reader, place, ask, spans) if end else Granted(())
        return reader, place, taken, token
