"""The log as a task reads it: in the database itself, where that is what the task was given.

A task of a small micro-batch reads for a millisecond. So it opens what it reads with, and no more: no broker
of its own, with threads and duties, that is made known to others and withdrawn again. Through brokers it is a
client as any other. Decides nothing, and writes nothing but what a fetch by a broker writes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

from ..address import Address, parse, parse_shards
from ..broker.deliver.fetch import fetch_stored
from ..endpoint.values import Fetched
from ..store import open_store
from .options import Reach
from .planning import Span
from .queue import AHEAD, FETCH_BYTES, FETCH_MESSAGES, Queue, check_file, patiently

__all__ = ["TaskLog", "task_log"]

_DATABASES = ("sqlite", "postgresql", "mysql")


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
