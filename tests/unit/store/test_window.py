"""The windows of a store: what is in memory, when it is read, and that it does not stay there (I2, I13)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.config import DEFAULTS, Limits
from postroom.errors import StoreCorrupt, UnknownPartition
from postroom.model.messages.ids import digest, digests
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append
from postroom.store.sql.log import id_window as waiting
from postroom.store.sql.log import id_window as window
from postroom.store.sql.log.id_window import Kept, Windows
from postroom.store.sql.log.log import Ends
from postroom.store.sql.session import Area, Transaction
from postroom.testing.store_contract.harness import MovableClock, refused, stored
from postroom.testing.store_contract.log.ids import named, send
from postroom.testing.store_contract.schedule import all_due, gone, lead

WINDOW = 10_000
LIMITS = Limits(dedup_ids=1_000)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def stores(tmp_path: Path, clock: MovableClock) -> Iterator[tuple[SqlStore, SqlStore]]:
    """Two processes on one file."""
    opened = [open_sqlite(tmp_path / "q.db", clock, LIMITS) for _ in range(2)]
    one, two = opened
    assert isinstance(one, SqlStore) and isinstance(two, SqlStore)
    yield one, two
    for store in opened:
        store.close()


@pytest.fixture
def store(stores: tuple[SqlStore, SqlStore]) -> SqlStore:
    return stores[0]


@pytest.fixture
def other(stores: tuple[SqlStore, SqlStore]) -> SqlStore:
    return stores[1]


@pytest.fixture
def place(store: SqlStore) -> int:
    return store.catalog.create_topic("orders", TopicSettings(), 1).route.ranges[0].partition_id


def windows(store: SqlStore) -> Windows:
    found: Windows = store.log._windows  # type: ignore[attr-defined]
    return found


def kept(store: SqlStore, place: int) -> Kept:
    found = windows(store).kept(place)
    assert found is not None
    return found


class Reads:
    """Which statements of transactions read ids."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        original = Transaction.all

        def counted(tx: Transaction, sql: str, *args: Any) -> list[Any]:
            found = original(tx, sql, *args)
            self.rows += len(found) if "ids FROM postroom_log" in sql else 0
            return found

        monkeypatch.setattr(Transaction, "all", counted)


# --- what is read ----------------------------------------------------------------------------------------


def test_what_this_process_has_stored_is_not_read_again(
    store: SqlStore, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    for number in range(20):
        send(store, place, f"{number}", f"x{number}")
    assert kept(store, place).window.end == 40
    assert reads.rows == 0


def test_of_others_only_what_is_new_is_read(
    store: SqlStore, other: SqlStore, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(store, place, "a")
    for number in range(5):
        send(other, place, f"{number}")
    reads = Reads(monkeypatch)
    send(store, place, "b")
    send(store, place, "c")
    assert reads.rows == 5


def test_what_nobody_looks_at_is_not_kept(store: SqlStore, place: int) -> None:
    stored(store.log.append([Append(place, named(place, "ab").batch)])[0])
    assert windows(store).kept(place) is None


def test_far_behind_it_reads_before_it_locks(
    store: SqlStore, other: SqlStore, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process stored so much that reading it under the lock would hold up all."""
    monkeypatch.setattr(window, "_NEAR", 10)
    monkeypatch.setattr(window, "_SLICE", 7)
    send(store, place, "a")
    for number in range(30):
        send(other, place, f"{number}", f"x{number}", f"y{number}")
    locked: list[int] = []
    top_up = Windows._top_up_log

    def noted(self: Windows, tx: Transaction, partition: int, kept: Kept, end: int, patient: bool) -> None:
        locked.append(end - kept.window.end)
        top_up(self, tx, partition, kept, end, patient)

    monkeypatch.setattr(Windows, "_top_up_log", noted)
    assert dict(send(store, place, "x7", "new", "29").repeats) == {0: 1 + 3 * 7 + 1, 2: 1 + 3 * 29}
    assert locked == [90, 0]  # the first transaction was given up


def test_whoever_never_catches_up_is_served_nevertheless(
    store: SqlStore, other: SqlStore, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others store so fast that it is always far behind: then it reads under the lock."""
    monkeypatch.setattr(window, "_NEAR", 0)
    send(store, place, "a")
    catch_up, number = Windows.catch_up, iter(range(100))

    def overtaken(self: Windows, partition_id: int) -> None:
        catch_up(self, partition_id)
        if self is windows(store):
            send(other, place, f"{next(number)}")

    send(other, place, "b")
    monkeypatch.setattr(Windows, "catch_up", overtaken)
    assert dict(send(store, place, "b", "0", "c").repeats) == {0: 1, 1: 2}


def test_a_hole_in_the_offsets_is_stepped_over(store: SqlStore, other: SqlStore, place: int) -> None:
    """A volatile log that was lost goes on far above: in steps of a slice that would take for ever."""
    send(store, place, "a")
    with store.session.write(Area.LOG) as tx:
        tx.run("UPDATE postroom_partitions SET next_offset = ? WHERE id = ?", 2**40, place)
    send(other, place, "b")
    assert dict(send(store, place, "b").repeats) == {0: 2**40}


def test_an_older_copy_of_the_database_is_noticed(store: SqlStore, place: int) -> None:
    send(store, place, "a", "b")
    with store.session.write(Area.LOG) as tx:
        tx.run(f"DELETE FROM postroom_log_{place}")
        tx.run("UPDATE postroom_partitions SET next_offset = 0 WHERE id = ?", place)
    with pytest.raises(StoreCorrupt):  # who has given the offsets (R6)
        send(store, place, "b", "c")
    store.log._ends = Ends(DEFAULTS.tuning.store.flushed_s)  # type: ignore[attr-defined] # who has only read them
    done = send(store, place, "b", "c")
    assert (done.base_offset, done.repeats) == (0, ())


def test_a_partition_that_is_gone_is_refused_alone(store: SqlStore, place: int) -> None:
    doomed = store.catalog.create_topic("doomed", TopicSettings(), 1).route.ranges[0].partition_id
    send(store, doomed, "a")
    for step in (store.catalog.delete_topic, lambda name: store.catalog.drop_log(doomed)):
        step("doomed")
        gone_one, fine = store.log.append([named(doomed, "b"), named(place, "b")])
        refused(gone_one, UnknownPartition)
        stored(fine)
        windows(store).forget(doomed)
        send(store, place, f"{step}")


# --- what is forgotten -----------------------------------------------------------------------------------


def test_no_more_ids_are_remembered_than_the_limit(store: SqlStore, other: SqlStore, place: int) -> None:
    """The same for who was there all the time, and for who comes now; even while a group has settled none."""
    store.catalog.create_group("orders", "slow", GroupSettings())
    for first in range(0, 3_000, 100):
        send(store, place, *(f"{number}" for number in range(first, first + 100)))
    for through in (store, other):
        assert dict(send(through, place, "2500", "2999").repeats) == {0: 2500, 1: 2999}
    assert kept(store, place).window.size < 150 * LIMITS.dedup_ids
    assert kept(other, place).window.size < 150 * LIMITS.dedup_ids
    assert send(store, place, "1999").repeats == ()
    assert send(other, place, "1998").repeats == ()


def test_what_nobody_needs_is_forgotten_by_and_by(store: SqlStore, place: int, clock: MovableClock) -> None:
    for number in range(500):
        send(store, place, f"{number}")
        clock.ms += 1_000
    assert kept(store, place).window.start > 450


def test_a_window_that_is_not_used_is_forgotten(store: SqlStore, place: int, clock: MovableClock) -> None:
    second = store.catalog.create_topic("second", TopicSettings(), 1).route.ranges[0].partition_id
    send(store, place, "a", window_ms=10**9)
    clock.ms += 601_000
    send(store, second, "a")
    assert windows(store).kept(place) is None
    assert dict(send(store, place, "a", window_ms=10**9).repeats) == {0: 0}


# --- ids that wait ---------------------------------------------------------------------------------------


def schedule(store: SqlStore, place: int, due_at: int, *ids: str) -> None:
    stored(store.log.append([named(place, ids, due_at=due_at)])[0])


def test_many_rows_of_the_schedule(
    store: SqlStore, other: SqlStore, place: int, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than are read at once: without the lock, then with it."""
    monkeypatch.setattr(waiting, "_PAGE", 3)
    send(store, place, "a")
    for number in range(10):
        schedule(other, place, clock.ms + 1_000, f"{number}", f"x{number}")
    assert dict(send(store, place, "x3", "9", "new").repeats) == {0: -1, 1: -1}
    monkeypatch.setattr(Windows, "catch_up", lambda *_: None)
    for number in range(10, 20):
        schedule(other, place, clock.ms + 1_000, f"{number}")
    assert dict(send(store, place, "19", "8", "12").repeats) == {0: -1, 1: -1, 2: -1}


def test_ids_of_rows_that_are_gone_do_not_stay_in_memory(
    store: SqlStore, place: int, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_STALE", 5)
    for number in range(30):
        schedule(store, place, clock.ms + 1_000, f"{number}")
    schedule(store, place, clock.ms + 10**9, "far", "away")
    send(store, place, "a")
    assert len(kept(store, place).waiting) == 32
    clock.ms += 20_000
    lead(store)
    store.schedule.finish("ann", gone(all_due(store)))
    assert dict(send(store, place, "away", "7").repeats) == {0: -1}
    assert len(kept(store, place).waiting) == 2


def test_of_ids_that_wait_the_newest_are_remembered(
    store: SqlStore, other: SqlStore, place: int, clock: MovableClock
) -> None:
    for first in range(0, 1_500, 100):
        schedule(store, place, clock.ms + 1_000, *(f"{number}" for number in range(first, first + 100)))
    for through in (store, other):
        assert dict(send(through, place, "1499", "600").repeats) == {0: -1, 1: -1}
        assert len(kept(through, place).waiting) <= LIMITS.dedup_ids
    assert send(store, place, "3").repeats == ()


def test_a_volatile_topic_compares_delayed_ones_among_themselves(
    store: SqlStore, clock: MovableClock
) -> None:
    """On SQLite its log is in another file than the schedule: the two are not compared."""
    topic = store.catalog.create_topic("v", TopicSettings(storage="volatile"), 1)
    place = topic.route.ranges[0].partition_id
    send(store, place, "a")
    for _ in range(2):
        schedule(store, place, clock.ms + 500, "b", "c")
    clock.ms += 500
    assert [row.ids for row in all_due(store)] == [digests("bc")]
    assert kept(store, place).window.offset(digest("a")) >= 0
