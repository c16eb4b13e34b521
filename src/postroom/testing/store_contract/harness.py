"""What the suite needs of a store under test, and how its tests are written.

Every test gets a new, empty store and a clock that stands still until the test moves it. A store takes its
time from that clock (`open_store`), so that nothing here sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

from ...errors import PostroomError, StoreUnavailable
from ...model.delivery.delivery import Ask, Delivery, Kind, Settlement, Span, Stamp
from ...model.messages.batch import SEAL, BatchBuilder, build_control, records
from ...model.policy.settings import GroupSettings, TopicSettings
from ...store import SqlStore
from ...store.contract import Append, Appended, Granted, Group, Store, StoredBatch, Topic
from ...store.sql.session import Area

__all__ = [
    "LEASE",
    "MovableClock",
    "StoreHarness",
    "acks",
    "append",
    "ask",
    "batch",
    "in_threads",
    "partitions",
    "read_all",
    "refused",
    "spans",
    "stored",
    "values",
]

LEASE = 1000
T = TypeVar("T")
E = TypeVar("E", bound=PostroomError)


class MovableClock:
    """A clock that stands still; unlike the one for users' tests it can also go back."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self.ms = start_ms

    def now_ms(self) -> int:
        return self.ms

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class StoreHarness:
    """Subclass it and say how your store is opened; the rest has defaults for stores on `SqlStore`."""

    def open_store(self, tmp_path: Path, clock: MovableClock) -> Store:
        """A new, empty store that takes its time from `clock`."""
        raise NotImplementedError

    def reopen(self, tmp_path: Path, clock: MovableClock) -> Store:
        """One more store on what `open_store` made for the same path, as another process would open it."""
        pytest.skip("this store cannot be opened twice")

    def seal(self, store: Store, partition_id: int) -> None:
        """Close a partition for new batches, without a change of its route."""
        store.log.seal(partition_id, build_control(SEAL))

    def failing_commits(
        self, store: Store, meanwhile: Callable[[], object] = bool
    ) -> AbstractContextManager[None]:
        """Until the block ends, every transaction does all its work and then cannot be committed.

        `meanwhile` is called when the work is done and not yet undone.
        """
        assert isinstance(store, SqlStore), "override `failing_commits` for a store of another kind"
        return _failing_commits(store, meanwhile)

    @pytest.fixture
    def clock(self) -> MovableClock:
        return MovableClock()

    @pytest.fixture
    def store(self, tmp_path: Path, clock: MovableClock) -> Iterator[Store]:
        opened = self.open_store(tmp_path, clock)
        yield opened
        opened.close()

    @pytest.fixture
    def other(self, store: Store, tmp_path: Path, clock: MovableClock) -> Iterator[Store]:
        """Return another store on the same data."""
        opened = self.reopen(tmp_path, clock)
        yield opened
        opened.close()

    @pytest.fixture
    def topic(self, store: Store) -> Topic:
        return store.catalog.create_topic("orders", TopicSettings(), 1)

    @pytest.fixture
    def place(self, topic: Topic) -> int:
        """The only partition of `topic`."""
        return topic.route.ranges[0].partition_id

    @pytest.fixture
    def group(self, store: Store, topic: Topic) -> Group:
        return store.catalog.create_group(
            topic.name, "billing", GroupSettings(lease_ms=LEASE, max_attempts=3)
        )


@contextmanager
def _failing_commits(store: SqlStore, meanwhile: Callable[[], object]) -> Iterator[None]:
    dialect = store.session.dialect
    original = dialect.end

    def end(connection: Any, area: Area, *, commit: bool) -> None:
        if commit:
            meanwhile()
        original(connection, area, commit=False)
        if commit:
            raise StoreUnavailable("the commit fails: the test wants it so")

    with (
        mock.patch.object(dialect, "end", end),
        mock.patch.object(dialect, "append_lone", return_value=None),  # which has no `end`
    ):
        yield


# ---- the log ----------------------------------------------------------------------------------------


def batch(
    messages: int = 1,
    *,
    producer: int = -1,
    epoch: int = 0,
    sequence: int = 0,
    value: bytes = b"value",
    timestamp: int = 1_000,
) -> bytes:
    """A batch whose values end in their place in it. Without a producer it carries no sequence."""
    builder = BatchBuilder()
    for number in range(messages):
        assert builder.append(timestamp + number, b"key", b"%b-%d" % (value, number), [])
    return builder.build() if producer < 0 else builder.build(producer, epoch, sequence)


def append(store: Store, partition_id: int, *batches: bytes) -> list[Appended]:
    return [stored(result) for result in store.log.append([Append(partition_id, b) for b in batches])]


def stored(result: Appended | PostroomError) -> Appended:
    if isinstance(result, PostroomError):
        raise result
    return result


def refused(result: Appended | PostroomError, kind: type[E]) -> E:
    assert isinstance(result, kind), f"{kind.__name__} expected, not {result!r}"
    return result


def read_all(store: Store, partition_id: int) -> list[StoredBatch]:
    """Return all that is kept, checked: offsets are dense, and those in the batches are the same."""
    offset, found = store.log.bounds([partition_id])[partition_id].start, list[StoredBatch]()
    while batches := store.log.read(partition_id, offset, max_messages=7, max_bytes=5_000):
        for piece in batches:
            assert piece.base_offset <= offset if not found else piece.base_offset == offset
            if piece.data[:8] != piece.base_offset.to_bytes(8, "big"):
                raise AssertionError("the offset in the batch is not the one it is stored at")
            offset = piece.last_offset + 1
        found += batches
    assert offset == store.log.bounds([partition_id])[partition_id].end
    return found


def values(batches: Sequence[StoredBatch]) -> list[bytes]:
    return [record.value or b"" for piece in batches for record in records(piece.data)]


def partitions(topic: Topic) -> list[int]:
    return [piece.partition_id for piece in topic.route.ranges]


# ---- progress ---------------------------------------------------------------------------------------


def ask(
    token: int,
    end: int,
    *,
    messages: int = 1000,
    member: str = "ann",
    empty_handed: bool = True,
    on_delivery: bool = False,
    dead: Stamp | None = None,
) -> Ask:
    return Ask(member, token, messages, end, empty_handed, on_delivery, dead)


def spans(deliveries: Granted | Sequence[Delivery]) -> list[Span]:
    found = deliveries.deliveries if isinstance(deliveries, Granted) else deliveries
    return [(d.first, d.last) for d in found]


def acks(*wanted: Span) -> list[Settlement]:
    return [Settlement(Kind.ACK, first, last) for first, last in wanted]


# ---- threads ----------------------------------------------------------------------------------------


def in_threads(*calls: Callable[[], T], limit_s: float = 30) -> list[T]:
    """Run all at once; their results in order, or the first error."""
    start = threading.Barrier(len(calls))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            start.wait(limit_s)
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), f"a thread is stuck for {limit_s} s"
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(calls))]
