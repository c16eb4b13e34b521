"""A store in trouble: the disk, the files and the locks are not as they should be.

Whatever happens, the answer is an error of our tree that says what to do, nothing is stored half, and
the same call succeeds once the trouble is over.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postroom.config import DEFAULTS
from postroom.errors import CorruptBatch, StoreBusy, StoreCorrupt, StoreError, StoreFull, StoreUnavailable
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append, Group, Peek, Store
from postroom.store.sql.session import Area, Session
from postroom.testing.store_contract.harness import (
    acks,
    append,
    ask,
    batch,
    in_threads,
    partitions,
    read_all,
    refused,
    spans,
)
from tests.integration.store.pooled import pooled

IMPATIENT = replace(DEFAULTS, busy_timeout_ms=200, side_lock_ms=100)
KIB = 1024


KEPT = (Area.LOG, Area.PROGRESS)  # the files of which nothing may be thrown away


def make(path: Path) -> int:
    """A store with a topic, a group that has come to offset 3, and 5 messages; returns the partition.

    Beside it a volatile topic with 2 messages.
    """
    with closing(open_sqlite(path)) as store:
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        group = store.catalog.create_group("orders", "billing", GroupSettings())
        append(store, place, batch(2), batch(3, producer=7))
        store.progress.poll(group, place, ask(1, 5, messages=3))
        store.progress.settle(group, place, 1, acks((0, 2)))
        (ticks,) = partitions(store.catalog.create_topic("ticks", TopicSettings(storage="volatile"), 1))
        append(store, ticks, batch(2))
    return place


def file_of(path: Path, area: Area) -> Path:
    return path if area is Area.LOG else path.with_name(f"{path.name}.{area.value}")


def progress_file(path: Path) -> Path:
    return file_of(path, Area.PROGRESS)


def volatile_place(store: Store) -> int:
    (ticks,) = partitions(store.catalog.topic("ticks"))
    return ticks


def remove(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A small disk of its own."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "postroom-test", str(folder)]
    if os.name != "posix" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- files that are no database -------------------------------------------------------------------------


CONTENTS = pytest.mark.parametrize("content", [b"hello\n" * 400, b"\0" * 5000], ids=["text", "zeros"])


@pytest.mark.parametrize("area", KEPT)
@CONTENTS
def test_a_file_that_is_no_database_is_refused_and_left_alone(
    tmp_path: Path, area: Area, content: bytes
) -> None:
    path = tmp_path / "orders.db"
    make(path)
    broken = file_of(path, area)
    remove(broken)
    broken.write_bytes(content)
    with pytest.raises(StoreCorrupt, match=f"{broken} is not a sound database"):
        open_sqlite(path)
    assert broken.read_bytes() == content


def damage(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(file.read_bytes())
    for at in range(4096, len(data), 4096):  # every page but the first, which holds the schema
        data[at : at + 200] = b"\xff" * 200
    file.write_bytes(data)


@pytest.mark.parametrize("area", KEPT)
def test_a_damaged_database_is_named(tmp_path: Path, area: Area) -> None:
    path = tmp_path / "orders.db"
    place = make(path)
    broken = file_of(path, area)
    damage(broken)

    def use() -> None:
        with closing(open_sqlite(path)) as store:
            read_all(store, place)
            group = store.catalog.group("orders", "billing")
            store.progress.poll(group, place, ask(2, 5))

    with pytest.raises(StoreCorrupt, match=f"{broken} is not a sound database"):
        use()


def check_volatile_began_anew(path: Path, place: int) -> None:
    """What is durable is as it was; what was volatile is gone, and the topic goes on."""
    with closing(open_sqlite(path)) as store:
        assert len(read_all(store, place)) == 2
        ticks = volatile_place(store)
        assert read_all(store, ticks) == []
        group = store.catalog.create_group("ticks", "charts", GroupSettings())
        end = append(store, ticks, batch(3))[0].base_offset
        assert end > 2
        assert spans(store.progress.poll(group, ticks, ask(1, end + 3), log_start=end)) == [(end, end + 2)]


@CONTENTS
def test_a_volatile_file_that_is_no_database_is_thrown_away_and_said_so(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """R3: its messages may be lost with a crash, and nobody is kept from starting by what a crash left."""
    path = tmp_path / "orders.db"
    place = make(path)
    broken = file_of(path, Area.VOLATILE)
    remove(broken)
    broken.write_bytes(content)
    open_sqlite(path).close()
    assert "the messages of volatile topics are lost" in caplog.text
    check_volatile_began_anew(path, place)


def test_a_damaged_volatile_file_is_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    place = make(path)
    damage(file_of(path, Area.VOLATILE))
    check_volatile_began_anew(path, place)


def test_a_volatile_file_of_before_the_machine_was_started_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "orders.db"
    place = make(path)
    monkeypatch.setattr("postroom.store.sql.log.volatile.boot_id", lambda: "another start")
    check_volatile_began_anew(path, place)


def test_of_two_that_start_after_it_only_the_first_throws_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second found the file old, and comes to it when the first has stored something in it."""
    path = tmp_path / "orders.db"
    place = make_volatile(path)
    monkeypatch.setattr("postroom.store.sql.log.volatile.boot_id", lambda: "another start")
    write, first = Session.write, []

    def write_after_the_other(session: Session, area: Area, **how: Any) -> Any:
        if area is Area.VOLATILE and not first:
            first.append(None)
            other = open_sqlite(path)
            first[0] = other
            append(other, place, batch(3))
        return write(session, area, **how)

    monkeypatch.setattr(Session, "write", write_after_the_other)
    with closing(open_sqlite(path)) as second, closing(first[0]) as other:
        assert len(read_all(second, place)) == len(read_all(other, place)) == 1


def make_volatile(path: Path) -> int:
    with closing(open_sqlite(path)) as store:
        topic = store.catalog.create_topic("fast", TopicSettings(storage="volatile"), 1)
        return topic.route.ranges[0].partition_id


def test_a_truncated_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    make(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StoreCorrupt), closing(open_sqlite(path)) as store:
        store.catalog.topics()


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    path.touch()
    place = make(path)
    with closing(open_sqlite(path)) as store:
        assert len(read_all(store, place)) == 2


# ---- paths ------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=f"folder {tmp_path / 'nowhere'} does not exist") as caught:
        open_sqlite(tmp_path / "nowhere" / "orders.db")
    assert caught.value.retriable
    (tmp_path / "nowhere").mkdir()
    make(tmp_path / "nowhere" / "orders.db")


def test_a_path_through_a_file_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "orders.db", tmp_path / "file" / "below" / "orders.db"):
        with pytest.raises(StoreUnavailable):
            open_sqlite(path)


@pytest.mark.parametrize("area", list(Area))
def test_a_folder_in_place_of_the_file_cannot_be_opened(tmp_path: Path, area: Area) -> None:
    path = tmp_path / "orders.db"
    taken = file_of(path, area)
    taken.mkdir()
    with pytest.raises(StoreUnavailable, match=f"{taken} cannot be opened"):
        open_sqlite(path)


AS_NOBODY = """
import os, sys
from pathlib import Path
from typing import Any
from postroom.errors import StoreUnavailable
from postroom.store import open_sqlite
from postroom.testing.store_contract.harness import append, batch
os.setgid(65534); os.setuid(65534)
try:
    store = open_sqlite(Path(sys.argv[1]))
    append(store, 1, batch())
except StoreUnavailable as error:
    print("refused:", error)
"""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to become nobody")
@pytest.mark.parametrize("exists", [True, False])
def test_without_permission_to_write_the_store_cannot_be_used(exists: bool) -> None:
    with tempfile.TemporaryDirectory() as name:  # not pytest's, which nobody may look into
        folder = Path(name)
        folder.chmod(0o755)
        if exists:
            make(folder / "orders.db")
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        command = [sys.executable, "-c", AS_NOBODY, str(folder / "orders.db")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.startswith(f"refused: {folder / 'orders.db'} cannot be"), done.stderr
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_disk_that_became_read_only_is_named_and_heals(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "8m") as disk:
        path = disk / "orders.db"
        place = make(path)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

        def use() -> int:
            with closing(open_sqlite(path)) as store:
                return append(store, place, batch())[0].base_offset

        with pytest.raises(StoreUnavailable, match=f"{path} cannot be"):
            use()
        with pytest.raises(StoreUnavailable, match=f"{disk / 'new.db'} cannot be opened"):
            open_sqlite(disk / "new.db")
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert use() == 5


# ---- a full disk ------------------------------------------------------------------------------------------


def fill(folder: Path, name: str) -> Path:
    """A file that takes all the space there is."""
    ballast = folder / name
    with open(ballast, "wb", buffering=0) as file:
        for size in (64 * KIB, 4 * KIB, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    return ballast


def test_a_full_disk_stores_nothing_half_and_heals(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "4m") as disk:
        place = make(disk / "orders.db")
        ballast = disk / "ballast"
        ballast.write_bytes(b"\0" * KIB * KIB)
        with closing(open_sqlite(disk / "orders.db")) as store:
            number, sent = append_until_full(store, place)
            assert number > 5
            check_full(store, place, 5 + 3 * number, sent)
            ballast.unlink()
            done = append(store, place, sent)[0]
            assert (done.base_offset, done.duplicate) == (5 + 3 * number, False)
            enlarge(disk)
        check_sound(disk / "orders.db", place)


def append_until_full(store: Store, place: int) -> tuple[int, bytes]:
    """How many batches were stored, and the one that was not."""
    for number in range(100):
        sent = batch(3, producer=9, sequence=3 * number, value=os.urandom(20 * KIB))
        try:
            append(store, place, sent)
        except StoreFull:
            return number, sent
    raise AssertionError("the disk was not full")


def enlarge(disk: Path) -> None:
    """A checkpoint copies the write-ahead log into the database: both must have room for a while."""
    subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)


def check_full(store: Store, place: int, end: int, sent: bytes) -> None:
    """What was stored is there, and what was not stays out, again and again."""
    for _ in range(3):
        assert store.log.bounds([place])[place].end == end
        assert sum(piece.records for piece in read_all(store, place)) == end
        with pytest.raises(StoreFull, match="no space left") as caught:
            append(store, place, sent)
        assert caught.value.retriable


def check_sound(path: Path, place: int) -> None:
    with closing(open_sqlite(path)) as store:
        read_all(store, place)
    for area in Area:
        with closing(sqlite3.connect(file_of(path, area))) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_progress_on_a_full_disk_is_as_before_and_heals(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "4m") as disk:
        place = make(disk / "orders.db")
        with closing(open_sqlite(disk / "orders.db")) as store:
            group = store.catalog.group("orders", "billing")
            append(store, place, *(batch(200) for _ in range(5)))
            store.progress.poll(group, place, ask(2, 5))
            ballast = fill(disk, "ballast")
            token = poll_until_full(store, place, group)
            (before,) = store.progress.backlog(group, [place], open_spans=2000)
            for _ in range(3):
                with pytest.raises(StoreFull):
                    store.progress.poll(group, place, ask(token, 1005, messages=1))
            (after,) = store.progress.backlog(group, [place], open_spans=2000)
            assert (after.committed, after.cursor, after.open) == (
                before.committed,
                before.cursor,
                before.open,
            )
            ballast.unlink()
            cursor = before.cursor
            granted = store.progress.poll(group, place, ask(token, 1005, messages=1))
            assert spans(granted) == [(cursor, cursor)]
        check_sound(disk / "orders.db", place)


def poll_until_full(store: Store, place: int, group: Group) -> int:
    for token in range(100, 1100):
        try:
            store.progress.poll(group, place, ask(token, 1005, messages=1))
        except StoreFull:
            return token
    raise AssertionError("the disk was not full")


def test_a_new_store_on_a_full_disk_is_refused_and_can_be_made_later(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "2m") as disk:
        ballast = fill(disk, "ballast")
        with pytest.raises(StoreError) as caught:
            open_sqlite(disk / "orders.db")
        assert isinstance(caught.value, StoreFull | StoreUnavailable) and caught.value.retriable
        ballast.unlink()
        make(disk / "orders.db")


def test_a_full_database_without_a_mount(tmp_path: Path) -> None:
    """The same where no disk can be mounted: SQLite's own limit on the size of the file stands in."""
    path = tmp_path / "orders.db"
    place = make(path)
    with closing(open_sqlite(path)) as store:
        assert isinstance(store, SqlStore)
        connection = pooled(store, Area.LOG)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages + 10}")
        sent = batch(3, producer=9, value=os.urandom(90 * KIB))
        with pytest.raises(StoreFull):
            append(store, place, batch(1), sent)
        check_full(store, place, 5, sent)
        connection.execute(f"PRAGMA max_page_count={pages + 1000}")
        done = append(store, place, sent)[0]
        assert (done.base_offset, done.duplicate) == (5, False)
    check_sound(path, place)


# ---- locks ------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Somebody else's transaction, left open."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def refuse_busy(call: Callable[[], object]) -> float:
    begin = time.monotonic()
    with pytest.raises(StoreBusy, match=r"was locked by others for more than 0\.2 s") as caught:
        call()
    assert caught.value.retriable
    return time.monotonic() - begin


def test_a_locked_file_is_busy_in_bounded_time_and_heals(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    place = make(path)
    with closing(open_sqlite(path, limits=IMPATIENT)) as store:
        group = store.catalog.group("orders", "billing")
        with locked(path):
            assert 0.15 < refuse_busy(lambda: append(store, place, batch())) < 2
            refuse_busy(lambda: store.catalog.create_topic("more", TopicSettings(), 1))
            assert len(read_all(store, place)) == 2  # readers go on
            assert spans(store.progress.poll(group, place, ask(2, 5))) == [(3, 4)]  # the other file is free
        assert append(store, place, batch())[0].base_offset == 5
        with locked(progress_file(path)):
            refuse_busy(lambda: store.progress.poll(group, place, ask(3, 6)))
            refuse_busy(lambda: store.progress.settle(group, place, 2, acks((3, 4))))
            assert store.progress.peek(group, [place])[place].cursor == 5
            append(store, place, batch())
        assert store.progress.settle(group, place, 2, acks((3, 4))).lost == ()
        ticks = volatile_place(store)
        with locked(file_of(path, Area.VOLATILE)):
            refuse_busy(lambda: append(store, ticks, batch()))
            append(store, place, batch())
        assert append(store, ticks, batch())[0].base_offset == 2


def test_many_threads_before_a_locked_file_wait_together_not_one_after_another(tmp_path: Path) -> None:
    """I15: each of them gets its answer in bounded time."""
    path = tmp_path / "orders.db"
    place = make(path)
    with closing(open_sqlite(path, limits=IMPATIENT)) as store, locked(path):
        waits = in_threads(*[lambda: refuse_busy(lambda: append(store, place, batch()))] * 12)
    assert max(waits) < 2


def test_a_store_can_be_opened_while_somebody_writes(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    place = make(path)
    with (
        locked(path),
        locked(progress_file(path)),
        locked(file_of(path, Area.VOLATILE)),
        closing(open_sqlite(path, limits=IMPATIENT)) as store,
    ):
        assert len(read_all(store, place)) == 2


def test_sqlites_lock_alone_keeps_the_data_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are for fairness: without them nothing is lost or doubled (I19)."""
    monkeypatch.setattr("postroom.store.dialects.sqlite.FileLock.acquire", lambda self, at_once=False: True)
    monkeypatch.setattr("postroom.store.dialects.sqlite.FileLock.release", lambda self: None)
    path = tmp_path / "orders.db"
    place = make(path)
    with closing(open_sqlite(path)) as one, closing(open_sqlite(path)) as two:
        group = one.catalog.group("orders", "billing")

        def work(store: Store, number: int) -> list[tuple[int, int]]:
            for turn in range(15):
                append(store, place, batch(2, producer=50 + number, sequence=2 * turn))
            taken = []
            for turn in range(10):
                taken += spans(store.progress.poll(group, place, ask(1000 * number + turn, 125, messages=2)))
            return taken

        stores = [one, two, one, two]
        found = in_threads(*(lambda s=s, n=n: work(s, n) for n, s in enumerate(stores, 1)))
        assert one.log.bounds([place])[place].end == 5 + 4 * 30
        read_all(one, place)
        offsets = [o for taken in found for first, last in taken for o in range(first, last + 1)]
        assert sorted(offsets) == list(range(3, 83))


# ---- a log and its progress -------------------------------------------------------------------------------


def test_without_its_progress_a_group_starts_again_from_its_start(tmp_path: Path) -> None:
    """R15: it costs redeliveries, no messages. The start is the one resolved when the group was made (I9)."""
    path = tmp_path / "orders.db"
    place = make(path)
    with closing(open_sqlite(path)) as store:
        store.catalog.create_group("orders", "late", GroupSettings(start=Start("latest")))
        append(store, place, batch(4))
    remove(progress_file(path))
    with closing(open_sqlite(path)) as store:
        for name, expected in (("billing", (0, 8)), ("late", (5, 8))):
            group = store.catalog.group("orders", name)
            assert store.progress.committed(group.id, place) is None
            assert spans(store.progress.poll(group, place, ask(9, 9))) == [expected]


def test_late_acks_are_refused_after_the_progress_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    place = make(path)
    with closing(open_sqlite(path)) as store:
        group = store.catalog.group("orders", "billing")
        store.progress.poll(group, place, ask(2, 5))
    remove(progress_file(path))
    with closing(open_sqlite(path)) as store:
        assert store.progress.settle(group, place, 2, acks((3, 4))).lost == ((3, 4),)
        assert spans(store.progress.poll(group, place, ask(3, 5))) == [(0, 4)]


def test_progress_of_another_log_is_refused(tmp_path: Path) -> None:
    """Its cursors would skip what was never handed out: a new log gets the same ids."""
    path = tmp_path / "orders.db"
    make(path)
    remove(path)
    with pytest.raises(StoreCorrupt, match="belongs to another log"):
        open_sqlite(path)
    with pytest.raises(StoreCorrupt, match="belongs to another log"):
        open_sqlite(path)  # still: nothing was claimed
    remove(progress_file(path))
    place = make(path)
    with closing(open_sqlite(path)) as store:
        assert store.progress.peek(store.catalog.group("orders", "billing"), [place]) == {
            place: Peek(3, None)
        }


def test_a_log_older_than_its_progress_is_refused(tmp_path: Path) -> None:
    """R6: offsets went back, after a backup of the log alone was restored."""
    path = tmp_path / "orders.db"
    place = make(path)
    shutil.copy(path, tmp_path / "backup")
    with closing(open_sqlite(path)) as store:
        group = store.catalog.group("orders", "billing")
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(2, 15))
    remove(path)
    shutil.copy(tmp_path / "backup", path)
    with pytest.raises(StoreCorrupt, match="is at offset 15 of a partition that ends at 5"):
        open_sqlite(path)
    remove(progress_file(path))
    with closing(open_sqlite(path)) as store:
        assert spans(store.progress.poll(group, place, ask(3, 5))) == [(0, 4)]


def test_log_and_progress_of_one_backup_fit(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    place = make(path)
    (tmp_path / "elsewhere").mkdir()
    for file in (path, progress_file(path)):
        shutil.copy(file, tmp_path / "elsewhere" / file.name)
    with closing(open_sqlite(tmp_path / "elsewhere" / "orders.db")) as store:
        assert append(store, place, batch(3, producer=7))[0].duplicate
        group = store.catalog.group("orders", "billing")
        assert spans(store.progress.poll(group, place, ask(3, 5))) == [(3, 4)]


def test_an_error_in_one_batch_is_not_the_databases(tmp_path: Path) -> None:
    """What the database says is raised; what is wrong with a batch is returned in its place."""
    path = tmp_path / "orders.db"
    place = make(path)
    with closing(open_sqlite(path, limits=IMPATIENT)) as store:
        refused(store.log.append([Append(place, b"")])[0], CorruptBatch)
        with locked(path), pytest.raises(StoreBusy):
            store.log.append([Append(place, b"")])
