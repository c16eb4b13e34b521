"""A task reads its spans: on an executor, over a connection of its own, or in the database itself.

Every offset of a span is read once, and reading it again gives the same rows: what is stored is served, never
what is current. Offsets that are not there any more, and batches that cannot be read, are an error, or, with
failOnDataLoss=false, a warning.

A task of a small micro-batch reads for a millisecond. So it opens what it reads with, and no more: no broker
of its own, with threads and duties, that is made known to others and withdrawn again. Through brokers it is a
client as any other. Must never write anything but what a fetch by a broker writes.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from ..address import Address, parse, parse_shards
from ..broker.deliver.fetch import fetch_stored
from ..endpoint.values import Fetched
from ..errors import CorruptBatch, DataLoss, UnknownPartition
from ..store import open_store
from ..store.contract import StoredBatch
from .columns import Columns
from .options import Reach
from .planning import Offsets, Snapshot, Span, TopicPartition
from .queue import AHEAD, FETCH_BYTES, FETCH_MESSAGES, Queue, check_file, patiently

__all__ = [
    "Losses",
    "TaskLog",
    "read_spans",
    "set_apart",
    "shown",
    "task_log",
    "uncollected",
]


_DATABASES = ("sqlite", "postgresql", "mysql")
# ---- the Python processes that Spark keeps for its tasks ----
# After every task Spark looks for garbage in all that its process has imported, 40 ms for nothing, and a
# micro-batch from topic to topic is four such runs. What is imported stays: it is set apart, and not
# looked at again. Must never do so in a process that is not Spark's.

_REUSED = "SPARK_REUSE_WORKER"  # Spark sets it for processes that serve one task after another

_imported = 0  # modules, when they were set apart


class TaskLog(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def fetch_ahead(self, span: Span, offset: int) -> Future[Fetched]:
        """What is stored from the offset on, up to the end of the span or less."""


def task_log(reach: Reach) -> TaskLog:
    address = parse(reach.url)
    return _StoredLog(address, reach) if address.kind in _DATABASES else Queue(reach)


class _StoredLog:
    def __init__(self, address: Address, reach: Reach) -> None:
        check_file(address)
        shards = parse_shards(dict(reach.shards))
        self._store = patiently(lambda: open_store(address, shards=shards), reach.wait_ms)
        self._ahead = ThreadPoolExecutor(AHEAD, "postroom-ahead")
        self._wait_ms = reach.wait_ms

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ahead.shutdown(cancel_futures=True)
        self._store.close()

    def fetch_ahead(self, span: Span, offset: int) -> Future[Fetched]:
        return self._ahead.submit(self._fetch, span, offset)

    def _fetch(self, span: Span, offset: int) -> Fetched:
        most = min(FETCH_MESSAGES, span.end - offset)
        return patiently(
            lambda: fetch_stored(self._store, span.partition_id, offset, most, FETCH_BYTES), self._wait_ms
        )


def set_apart() -> None:
    """Call it at the start of a task: it does something only if modules were imported since the last one."""
    global _imported
    if _REUSED in os.environ and len(sys.modules) != _imported:
        gc.collect()  # garbage is not kept
        gc.freeze()
        _imported = len(sys.modules)


@contextmanager
def uncollected() -> Iterator[None]:
    """Records are many and refer to nothing: to look for cycles among them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- the reader of a task ----

log = logging.getLogger("postroom.spark")

_ROWS = 10_000  # of an Arrow batch, about, and
_BYTES = 64 << 20  # what its batches unpack to
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Losses:
    """What is done about messages that are gone."""

    fail: bool
    aside: Callable[[Span, StoredBatch, CorruptBatch], None] | None = None  # takes batches nobody can read

    def meet(self, what: str) -> None:
        if self.fail:
            raise DataLoss(
                f"{what}. To go on without what is lost, set the option failOnDataLoss to false; to keep "
                "messages until they are read, give the stream a group (option group), or the topic a longer "
                "retention"
            )
        log.warning("%s; reading goes on without it, as failOnDataLoss=false says", what)

    def meet_set_back(self, at: Offsets, now: Snapshot, places: Sequence[TopicPartition]) -> None:
        """The log is not the one that was read."""
        listed = "; ".join(
            f"topic {topic!r} partition {number}: offsets up to {at.at[topic, number] - 1} were read, and "
            f"the log now ends at {now.partitions[topic, number].end - 1}"
            for topic, number in places[:_SHOWN]
        )
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        what = (
            "the queue was restored from an older backup (or is another one, or a crash took volatile "
            f"messages), so that the log is not the one that was read: {listed}{more}"
        )
        if self.fail:
            raise DataLoss(
                f"{what}. To read again all that is there, set the option failOnDataLoss to false for one "
                "run (an archive: --allow-data-loss), or begin with a new checkpointLocation (an archive: in "
                "a new folder)"
            )
        log.warning("%s; these begin again at the oldest message, as failOnDataLoss=false says", what)

    def meet_unreadable(self, span: Span, batch: StoredBatch, error: CorruptBatch) -> None:
        if self.aside is not None:
            self.aside(span, batch, error)
            return
        what = shown([_part(span, batch.base_offset, batch.last_offset + 1)])
        said = f"a batch of {batch.records:,} messages cannot be read ({error}): {what}"
        if self.fail:
            raise DataLoss(
                f"{said}. Restore it, or set the option failOnDataLoss to false to go on without it"
            )
        log.warning("%s; reading goes on without it, as failOnDataLoss=false says", said)

    def meet_spans(self, lost: Sequence[Span]) -> None:
        if lost:
            self.meet(
                f"{sum(s.rows for s in lost):,} offsets were dropped before they were read: {shown(lost)}"
            )


def shown(spans: Sequence[Span]) -> str:
    listed = [f"topic {s.topic!r} partition {s.partition}, {s.first} to {s.end - 1}" for s in spans[:_SHOWN]]
    return "; ".join(listed) + (f" and {len(spans) - _SHOWN} more" if len(spans) > _SHOWN else "")


def read_spans(reach: Reach, spans: Iterable[Span], columns: Columns, losses: Losses) -> Iterator[Any]:
    """Arrow batches."""
    with uncollected(), task_log(reach) as queue:
        for span, first in _begun(queue, spans):
            unreadable = partial(losses.meet_unreadable, span)
            for fetched in _fetched(queue, span, first, losses):
                for batch in fetched.batches:
                    try:
                        columns.add(batch, span)
                    except CorruptBatch as error:
                        unreadable(batch, error)
                    if columns.rows >= _ROWS or columns.bytes >= _BYTES:
                        yield columns.flush(span, unreadable)
            if columns.rows:
                yield columns.flush(span, unreadable)


def _begun(queue: TaskLog, spans: Iterable[Span]) -> Iterator[tuple[Span, Future[Fetched]]]:
    """The spans, each with its first part; those of the next ones are on their way, too.

    There may be hundreds of short ones, and a round trip for each would add up.
    """
    coming: deque[tuple[Span, Future[Fetched]]] = deque()
    for span in spans:
        coming.append((span, queue.fetch_ahead(span, span.first)))
        if len(coming) > AHEAD:
            yield coming.popleft()
    yield from coming


def _fetched(queue: TaskLog, span: Span, coming: Future[Fetched], losses: Losses) -> Iterator[Fetched]:
    """All that is stored in the span; the next part is on its way while this one is decoded."""
    offset = span.first
    while offset < span.end:
        try:
            fetched = coming.result()
        except UnknownPartition:
            losses.meet_spans([_part(span, offset, span.end)])
            return
        there = fetched.batches[0].base_offset if fetched.batches else span.end
        if there > offset:
            losses.meet_spans([_part(span, offset, min(there, span.end))])
        if not fetched.batches:
            return
        offset = fetched.batches[-1].last_offset + 1
        if offset < span.end:
            coming = queue.fetch_ahead(span, offset)
        yield fetched


def _part(span: Span, first: int, end: int) -> Span:
    return replace(span, first=first, end=end)
