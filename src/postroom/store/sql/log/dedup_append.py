"""Sorting repeats out of the batches of one call of append, by message id (R32).

Under the partition's lock each id is looked up: among those stored before in this transaction, in the window,
and in the schedule. What this transaction stores is known to it alone until it is committed (I2). Decides
nothing by itself that `model.window` could decide; must never open a batch that has no repeats.

A batch that its producer sends again because the answer was lost gets the same answer: what is stored of it
tells which of its messages were dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ....errors import CorruptBatch, UnknownPartition
from ....model.messages.ids import DIGEST_SIZE, NO_FLOOR, NO_ID, places, split, without
from ...contract import Append
from ..schema import log_table
from ..session import Area, Transaction
from .id_window import Kept, NotPreparedError, StoredIds, Windows, ids_of

__all__ = ["DedupPass", "Repeats", "check_ids", "kept_of"]

Repeats = tuple[tuple[int, int], ...]
"""(place in the batch, offset of the message that has the id): messages that are not stored."""

_NOWHERE = -1  # offset of a message that waits in the schedule, or is not known any more
_IDS = "SELECT ids FROM {log} WHERE base_offset = ?"
_TRIES = 3  # then whatever is missing is read under the lock


def check_ids(append: Append, records: int) -> None:
    if len(append.ids) != DIGEST_SIZE * records:
        raise CorruptBatch(
            f"ids has {len(append.ids)} bytes for {records} messages: send {DIGEST_SIZE} for each, or none"
        )


def kept_of(append: Append, repeats: Repeats) -> Append | None:
    """Return what is left of a batch without these messages; None if nothing is."""
    if DIGEST_SIZE * len(repeats) == len(append.ids):
        return None
    dropped = {place for place, _ in repeats}
    ids = b"".join([one for place, one in enumerate(split(append.ids)) if place not in dropped])
    return replace(append, batch=without(append.batch, dropped), ids=ids, header=None)


@dataclass(slots=True)
class _PartitionPass:
    """A partition in one transaction."""

    end: int  # what was stored before
    kept: Kept | None = None  # its window, once it is needed
    rows: list[StoredIds] = field(default_factory=list)  # stored now
    cut: tuple[bytes, Sequence[bytes]] = (b"", ())  # the ids that were looked at last, cut apart
    seen: set[bytes] = field(default_factory=set)  # ids that came so far, whatever became of them
    delayed: set[bytes] = field(default_factory=set)  # ids that wait from now on

    _offsets: dict[bytes, int] = field(default_factory=dict)  # of ids in the first rows
    _listed: int = 0  # how many rows that are

    def offset(self, digest: bytes) -> int:
        """Where this transaction stores that id; -1 if it does not."""
        for row in self.rows[self._listed :]:
            if row.ids:
                offsets = range(row.base, row.base + row.records)
                self._offsets.update(zip(split(row.ids), offsets, strict=True))
        self._listed = len(self.rows)
        return self._offsets.get(digest, _NOWHERE)


class DedupPass:
    """Over as many transactions as the call takes: each begins with `prepare`, then `begin`."""

    def __init__(self, windows: Windows, appends: Sequence[Append]) -> None:
        self._windows = windows
        self._wanted: dict[int, int] = {}  # partitions whose windows are needed, and how long they are
        for append in appends:
            if append.ids and append.dedup_ms:
                longest = max(append.dedup_ms, self._wanted.get(append.partition_id, 0))
                self._wanted[append.partition_id] = longest
        self._behind: set[int] = set()  # windows that have to catch up
        self._asked: set[int] = set()  # partitions of which must be known how far the groups are,
        self._floors: dict[int, int] = {}  # and where that is known
        self._tries = 0

    def prepare(self) -> None:
        """Before the partitions are locked."""
        for partition_id, window_ms in self._wanted.items():
            try:
                self._windows.prepare(partition_id, window_ms)
                if partition_id in self._behind:
                    self._windows.catch_up(partition_id)
            except UnknownPartition:
                pass  # it is refused under the lock, and harms no other
        for partition_id in self._asked:
            self._floors[partition_id] = self._windows.at(partition_id).look_at_groups(partition_id)
        self._tries += 1

    def begin(self, tx: Transaction, area: Area, ends: Mapping[int, int]) -> None:
        """The partitions are locked, and end there."""
        self._tx, self._area = tx, area
        self._places = {partition_id: _PartitionPass(end) for partition_id, end in ends.items()}
        self._waiting: dict[int, Sequence[bytes]] = {}  # ids of rows of the schedule, as they are now

    # ---- under the lock ----

    def repeats(self, append: Append, base: int, now: int) -> Repeats:
        """Which messages of a batch are not to be stored; the others would be from `base` on."""
        if not append.dedup_ms:
            return ()
        place, kept = self._look(append.partition_id)
        digests = split(append.ids)
        place.cut = append.ids, digests
        named = [one for one in digests if one != NO_ID] if NO_ID in append.ids else digests
        before = len(place.seen)
        place.seen.update(named)
        if len(place.seen) == before + len(named):  # not twice in this transaction
            with self._windows.lock:
                known = bool(kept.window.known(named) or kept.waiting.known(named))
            if not known and not self._known_before(kept, named):
                return ()
        found, mine = [], dict[bytes, int]()
        for number, one in enumerate(digests):
            earlier = mine.get(one)
            if earlier is None and one != NO_ID:
                earlier = self._earlier(append, place, kept, one, now)
            if earlier is not None:
                found.append((number, earlier))
            elif one != NO_ID:
                mine[one] = _NOWHERE if append.due_at else base + number - len(found)
        return tuple(found)

    def stored(self, append: Append, base: int, records: int, appended_at: int) -> None:
        """A batch goes into the log, with its ids."""
        ids = append.ids or None
        place = self._places[append.partition_id]
        digests = place.cut[1] if ids is place.cut[0] else None
        place.rows.append(StoredIds(base, records, appended_at, ids, digests))
        if ids and not append.dedup_ms:  # not looked at (it was when it was scheduled), but there now
            place.seen.update(split(ids))

    def scheduled(self, append: Append) -> None:
        """A batch goes into the schedule."""
        if append.ids and append.dedup_ms:
            self._places[append.partition_id].delayed.update(split(append.ids))

    def were_repeats(self, append: Append, offset: int, now: int) -> Repeats:
        """Return which messages of a batch that was stored earlier were left out then.

        `offset`: where the batch begins; -1 if nothing of it was stored.
        """
        if append.due_at:
            return ()
        sent = split(append.ids)
        dropped: Sequence[int] = range(len(sent))
        if offset >= 0:
            ids = self._ids_at(append.partition_id, offset)
            if ids is None or ids == append.ids:
                return ()
            dropped = places(sent, split(ids))
        return tuple((number, self._first(append, sent[number], now)) for number in dropped)

    def _look(self, partition_id: int) -> tuple[_PartitionPass, Kept]:
        place = self._places[partition_id]
        if place.kept is None:
            patient = self._tries > _TRIES
            try:
                kept = self._windows.top_up(self._tx, self._area, partition_id, place.end, patient=patient)
            except NotPreparedError:
                self._behind.add(partition_id)
                raise
            place.kept = kept
        return place, place.kept

    def _earlier(
        self, append: Append, place: _PartitionPass, kept: Kept, digest: bytes, now: int
    ) -> int | None:
        """Where the message with that id is; None: it is new, or was sent long ago."""
        offset = place.offset(digest)
        if offset >= 0:
            return offset
        with self._windows.lock:
            offset = kept.window.offset(digest)
        if offset >= 0 and self._counts(append.partition_id, append.dedup_ms, kept, offset, now):
            return offset
        if digest in place.delayed or self._waits(self._windows, kept, digest):
            return _NOWHERE
        return _NOWHERE if self._came_before(append, kept, digest, now) else None

    def _known_before(self, kept: Kept, digests: Sequence[bytes]) -> bool:
        """Return whether a partition that this one follows may have seen one of these ids (I13)."""
        for one in kept.before:
            windows, old = self._kept(one)
            with windows.lock:
                if old.window.known(digests) or old.waiting.known(digests):
                    return True
        return False

    def _came_before(self, append: Append, kept: Kept, digest: bytes, now: int) -> bool:
        for one in kept.before:
            windows, old = self._kept(one)
            with windows.lock:
                offset = old.window.offset(digest)
            if offset >= 0 and self._counts(one, append.dedup_ms, old, offset, now):
                return True
            if self._waits(windows, old, digest):
                return True
        return False

    def _kept(self, partition_id: int) -> tuple[Windows, Kept]:
        windows = self._windows.at(partition_id)
        kept = windows.kept(partition_id)
        if kept is None:  # it was forgotten since it was prepared
            raise NotPreparedError
        return windows, kept

    def _waits(self, windows: Windows, kept: Kept, digest: bytes) -> bool:
        """Return whether a message with that id is in the schedule; what was cancelled or moved is not."""
        with windows.lock:
            row_id = kept.waiting.row_of(digest)
        if row_id < 0:
            return False
        if windows is not self._windows:  # on another database
            with windows.session.read(Area.LOG) as tx:
                return digest in ids_of(tx, row_id)
        if not windows.sees_schedule(self._area):
            return False
        if row_id not in self._waiting:
            self._waiting[row_id] = ids_of(self._tx, row_id)
        return digest in self._waiting[row_id]

    def _counts(self, partition_id: int, window_ms: int, kept: Kept, offset: int, now: int) -> bool:
        """Return whether what is stored at that offset is remembered."""
        floor = self._floors.get(partition_id)
        with self._windows.at(partition_id).lock:
            if kept.window.remembered(offset, now, window_ms, NO_FLOOR if floor is None else floor):
                return True
        if floor is None and offset >= kept.floor:  # it is old; have all groups settled it meanwhile?
            self._asked.add(partition_id)
            raise NotPreparedError
        return False

    def _ids_at(self, partition_id: int, offset: int) -> bytes | None:
        for stored in self._places[partition_id].rows:
            if stored.base == offset:
                return stored.ids
        row = self._tx.one(_IDS.format(log=log_table(partition_id)), offset)
        return None if row is None or row[0] is None else bytes(row[0])

    def _first(self, append: Append, digest: bytes, now: int) -> int:
        """Where the message is that a repeat was told of; it may have been forgotten since."""
        if not append.dedup_ms:
            return _NOWHERE
        place, kept = self._look(append.partition_id)
        earlier = self._earlier(append, place, kept, digest, now)
        if earlier is not None:
            return earlier
        with self._windows.lock:
            return kept.window.offset(digest)

    # ---- after the commit ----

    def committed(self) -> None:
        for partition_id, place in self._places.items():
            self._windows.committed(partition_id, place.rows)
