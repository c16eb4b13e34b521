"""The short way of a lone append: when it is taken. What it answers is in the store contract."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore, open_memory, open_sqlite
from postroom.store.contract import Append
from postroom.store.sql.log.lone_append import LoneAppend
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import batch, read_all, stored


@contextmanager
def short_ways(store: SqlStore) -> Iterator[list[int]]:
    """The offsets of those that took it."""
    taken: list[int] = []
    dialect = store.session.dialect
    real = dialect.append_lone

    def append_lone(connection: object, lone: LoneAppend) -> int | None:
        found = real(connection, lone)
        if found is not None:
            taken.append(lone.offset)
        return found

    with mock.patch.object(dialect, "append_lone", append_lone):
        yield taken


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    opened = open_sqlite(tmp_path / "store.db") if request.param == "file" else open_memory(str(tmp_path))
    yield opened
    opened.close()


@pytest.fixture
def partition(store: SqlStore) -> int:
    return store.catalog.create_topic("orders", TopicSettings(), 1).route.ranges[0].partition_id


def send(store: SqlStore, partition: int, *sequences: int, producer: int = 7) -> list[int]:
    sent = [Append(partition, batch(producer=producer, sequence=number)) for number in sequences]
    return [stored(store.log.append([one])[0]).base_offset for one in sent]


def test_it_is_taken_from_the_second_on(store: SqlStore, partition: int) -> None:
    with short_ways(store) as taken:
        assert send(store, partition, *range(6)) == [0, 1, 2, 3, 4, 5]
    assert taken == [1, 2, 3, 4, 5]


def test_a_second_producer_takes_it_from_its_second_batch(store: SqlStore, partition: int) -> None:
    with short_ways(store) as taken:
        send(store, partition, *range(4))
        send(store, partition, *range(3), producer=8)
    assert taken == [1, 2, 3, 5, 6]


def test_several_batches_of_one_commit_go_the_long_way_and_are_remembered(
    store: SqlStore, partition: int
) -> None:
    with short_ways(store) as taken:
        send(store, partition, *range(3))
        both = [Append(partition, batch(producer=who, sequence=3 * (who == 7))) for who in (7, 8)]
        assert [stored(one).base_offset for one in store.log.append(both)] == [3, 4]
        send(store, partition, 4)
        send(store, partition, 1, producer=8)
    assert taken == [1, 2, 5, 6]


def test_it_is_not_tried_where_others_append_too(tmp_path: Path) -> None:
    store, other = open_sqlite(tmp_path / "store.db"), open_sqlite(tmp_path / "store.db")
    partition = store.catalog.create_topic("orders", TopicSettings(), 1).route.ranges[0].partition_id
    with short_ways(store) as taken, short_ways(other) as theirs:
        send(store, partition, *range(3))
        for number in range(4):
            send(other, partition, number, producer=8)
            send(store, partition, 3 + number)
        assert (taken, theirs) == ([1, 2], [])
        send(store, partition, *range(7, 10))  # the first of them finds that it is alone again
    assert taken == [1, 2, 12, 13]
    assert len(read_all(store, partition)) == 14
    store.close()
    other.close()


def test_a_batch_that_failed_to_commit_is_not_believed(store: SqlStore, partition: int) -> None:
    """I2: what is known is what was committed."""
    send(store, partition, *range(3))
    end = store.session.dialect.end

    def fail(connection: object, area: Area, *, commit: bool) -> None:
        end(connection, area, commit=False)
        if commit:
            raise OSError("the disk is gone")

    with mock.patch.object(store.session.dialect, "end", fail), pytest.raises(OSError, match="gone"):
        store.log.append([Append(partition, batch(producer=7, sequence=3))])
    assert send(store, partition, 3, 4, 5) == [3, 4, 5]


def test_ids_delays_and_outboxes_go_the_long_way(store: SqlStore, partition: int) -> None:
    with short_ways(store) as taken:
        send(store, partition, *range(3))
        delayed = Append(partition, batch(producer=7, sequence=3), due_at=store.now_ms() + 60_000)
        named = Append(partition, batch(producer=7, sequence=4), ids=bytes(16), dedup_ms=1000)
        assert stored(store.log.append([delayed])[0]).base_offset < 0
        assert stored(store.log.append([named])[0]).base_offset == 3
    assert taken == [1, 2]


# ---- a few of different partitions, in one transaction ----


@pytest.fixture
def four(store: SqlStore) -> list[int]:
    return [
        piece.partition_id for piece in store.catalog.create_topic("keyed", TopicSettings(), 4).route.ranges
    ]


def send_each(store: SqlStore, partitions: list[int], sequence: int) -> list[int]:
    sent = [Append(one, batch(producer=7, sequence=sequence)) for one in partitions]
    return [stored(one).base_offset for one in store.log.append(sent)]


def test_batches_of_a_list_take_it_together(store: SqlStore, four: list[int]) -> None:
    with short_ways(store) as taken:
        found = [send_each(store, four, number) for number in range(3)]
    assert found == [[0] * 4, [1] * 4, [2] * 4]
    assert taken == [1] * 4 + [2] * 4
    at_once = [Append(one, batch(producer=7, sequence=3)) for one in four]
    assert [stored(one).base_offset for one in store.log.append_at_once(at_once) or ()] == [3] * 4
    assert [len(read_all(store, one)) for one in four] == [4] * 4


def test_if_one_is_not_as_it_was_known_all_go_the_long_way(tmp_path: Path) -> None:
    """I1, I3: what was written before that was noticed is undone, and everything is stored once."""
    store, other = open_sqlite(tmp_path / "store.db"), open_sqlite(tmp_path / "store.db")
    pieces = store.catalog.create_topic("keyed", TopicSettings(), 4).route.ranges
    four = [piece.partition_id for piece in pieces]
    for number in range(2):
        send_each(store, four, number)
    send(other, four[2], 0, producer=8)
    with short_ways(store) as taken:
        assert send_each(store, four, 2) == [2, 2, 3, 2]
        assert taken == [2, 2]  # both undone when the third was not as it was known
        assert send_each(store, four, 3) == [3, 3, 4, 3]
    assert [len(read_all(store, one)) for one in four] == [4, 4, 5, 4]
    store.close()
    other.close()


def test_a_list_that_failed_to_commit_is_stored_once_when_it_is_repeated(
    store: SqlStore, four: list[int]
) -> None:
    """I2, I3: whether it was stored is found out by the sequences."""
    for number in range(2):
        send_each(store, four, number)
    end = store.session.dialect.end
    for sequence, stored_after_all in ((2, False), (3, True)):

        def fail(connection: object, area: Area, *, commit: bool, done: bool = stored_after_all) -> None:
            end(connection, area, commit=done)
            if commit:
                raise OSError("the disk is gone")

        with mock.patch.object(store.session.dialect, "end", fail), pytest.raises(OSError, match="gone"):
            send_each(store, four, sequence)
        again = store.log.append([Append(one, batch(producer=7, sequence=sequence)) for one in four])
        assert [(stored(one).base_offset, stored(one).duplicate) for one in again] == [
            (sequence, stored_after_all)
        ] * 4
    assert [len(read_all(store, one)) for one in four] == [4] * 4


# ---- at once: without a thread, waiting for the disk and for nobody ----


def at_once(store: SqlStore, partition: int, *sequences: int) -> list[int] | None:
    sent = [Append(partition, batch(producer=7, sequence=number)) for number in sequences]
    found = store.log.append_at_once(sent)
    return None if found is None else [stored(one).base_offset for one in found]


def test_what_is_known_is_stored_at_once(store: SqlStore, partition: int) -> None:
    assert at_once(store, partition, 0) is None  # nothing is known of the partition yet
    send(store, partition, 0)
    assert [at_once(store, partition, number) for number in (1, 2, 3)] == [[1], [2], [3]]
    assert at_once(store, partition, 4, 5, 6) == [4, 5, 6]
    assert at_once(store, partition, 7) == [7]
    assert len(read_all(store, partition)) == 8


def test_it_waits_for_nobody(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path / "store.db")
    partition = store.catalog.create_topic("orders", TopicSettings(), 1).route.ranges[0].partition_id
    send(store, partition, 0, 1)
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert at_once(store, partition, 2) is None
    other.execute("ROLLBACK")
    other.close()
    assert at_once(store, partition, 2) is None  # somebody else may have written
    assert send(store, partition, 2, 3) == [2, 3]
    assert at_once(store, partition, 4) == [4]
    store.close()


def test_what_cannot_be_recognised_by_its_sequence_is_left(store: SqlStore, partition: int) -> None:
    send(store, partition, 0, 1)
    known = batch(producer=7, sequence=2)
    for append in (
        Append(partition, batch()),  # one-way
        Append(partition, known, due_at=store.now_ms() + 60_000),
        Append(partition, known, ids=bytes(16), dedup_ms=1000),
        Append(partition, known[:40]),
        Append(partition + 1000, known),
    ):
        assert store.log.append_at_once([append]) is None
    assert len(read_all(store, partition)) == 2
    assert store.log.append_at_once([]) is None


def test_where_ids_are_remembered_nothing_is_stored_at_once(store: SqlStore, partition: int) -> None:
    """What is remembered of them may have to be read first, and that takes its time."""
    send(store, partition, 0, 1)
    named = Append(partition, batch(producer=7, sequence=2), ids=bytes(16), dedup_ms=60_000)
    assert stored(store.log.append([named])[0]).base_offset == 2
    assert at_once(store, partition, 3) is None
    assert at_once(store, partition, 3, 4) is None
    assert send(store, partition, 3, 4) == [3, 4]


def test_a_commit_that_fails_at_once_is_left_and_not_stored_twice(store: SqlStore, partition: int) -> None:
    """I2, I3: whether it was stored is found out by the sequence."""
    send(store, partition, 0, 1)
    end = store.session.dialect.end

    for sequence, stored_after_all in ((2, False), (3, True)):

        def fail(connection: object, area: Area, *, commit: bool, done: bool = stored_after_all) -> None:
            end(connection, area, commit=done)
            if commit:
                raise sqlite3.OperationalError("disk I/O error")

        with mock.patch.object(store.session.dialect, "end", fail):
            assert at_once(store, partition, sequence) is None
        result = stored(store.log.append([Append(partition, batch(producer=7, sequence=sequence))])[0])
        assert (result.base_offset, result.duplicate) == (sequence, stored_after_all)
    assert len(read_all(store, partition)) == 4
