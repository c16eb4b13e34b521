"""Checkpoints of a SQLite file beside its writer: they keep up with it, and nothing depends on them."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from postroom.config import StoreTuning
from postroom.errors import StoreUnavailable
from postroom.model.messages.batch import BatchBuilder
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append, Appended
from postroom.store.dialects.sqlite import SqliteDialect
from postroom.store.dialects.write_ahead import Checkpoints
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import batch

ROOT = Path(__file__).resolve().parents[3]
MB = 1024 * 1024
NAME = "postroom-checkpoints"


def of_bytes(size: int) -> bytes:
    builder = BatchBuilder(max_bytes=2 * size + 1000)
    builder.append(0, None, os.urandom(size), [])
    return builder.build()


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == NAME]


class Filled:
    def __init__(self, store: SqlStore, path: Path) -> None:
        self.store, self.path = store, path
        self.partition = store.catalog.create_topic("orders", TopicSettings(), 1).route.ranges[0].partition_id
        self.stored = 0

    def store_megabytes(self, count: int, size: int = MB) -> None:
        data = of_bytes(size)
        for _ in range(count * MB // size):
            (found,) = self.store.log.append([Append(self.partition, data)])
            assert isinstance(found, Appended)
            self.stored += 1

    @property
    def ahead(self) -> int:
        """Bytes of the write-ahead log."""
        return os.stat(f"{self.path}-wal").st_size


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    path = tmp_path / "queue.db"
    with closing(open_sqlite(path)) as store:
        yield Filled(store, path)


def test_large_commits_are_copied_beside_the_writer(filled: Filled) -> None:
    filled.store_megabytes(100)
    assert len(threads()) == 1
    assert filled.ahead < 64 * MB  # 12 to 24; and 32, if the machine is so busy that the thread is held up
    assert len(filled.store.log.read(filled.partition, 0, max_messages=100, max_bytes=200 * MB)) == 100


def test_those_of_the_event_loop_too(filled: Filled) -> None:
    """They copy nothing themselves, however long the log is: here it would be 60 MB."""
    append = filled.store.log.append_at_once
    sent = (Append(filled.partition, batch(producer=7, sequence=number)) for number in range(2500))
    filled.store.log.append([next(sent)])
    stored = sum(bool(append([one]) or filled.store.log.append([one])) for one in sent)
    assert stored == 2499 and len(threads()) == 1
    assert filled.ahead < 30 * MB


def test_a_few_messages_need_no_thread(filled: Filled) -> None:
    filled.store_megabytes(1, size=MB // 50)
    assert threads() == []


def test_a_queue_that_is_closed_leaves_neither_thread_nor_log(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    with closing(open_sqlite(path)) as store:
        Filled(store, path).store_megabytes(20)
        assert threads()
    assert threads() == []
    assert not Path(f"{path}-wal").exists()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize("error", [StoreUnavailable("no more files"), OSError(24, "Too many open files")])
def test_without_the_thread_commits_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Its connection cannot be had, say: no file may be opened any more."""
    real, refused = SqliteDialect.connect, threading.Event()

    def connect(self: SqliteDialect, *args: object, **how: bool) -> object:
        if threading.current_thread().name == NAME:
            refused.set()
            raise error
        return real(self, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(SqliteDialect, "connect", connect)
    with closing(open_sqlite(tmp_path / "queue.db")) as store:
        filled = Filled(store, tmp_path / "queue.db")
        filled.store_megabytes(60)
        assert refused.is_set() and filled.ahead < 20 * MB
        assert threads()  # and it is tried again
        monkeypatch.undo()
        filled.store_megabytes(10)


def test_what_is_committed_is_so_where_no_thread_can_be_started(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == NAME:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    filled.store_megabytes(60)
    assert filled.stored == 60 and threads() == [] and filled.ahead < 20 * MB
    monkeypatch.undo()
    filled.store_megabytes(5)
    assert len(threads()) == 1


def test_whoever_reads_for_long_holds_up_nobody(filled: Filled) -> None:
    """The log cannot be begun anew meanwhile, and grows; later it is, and grows no more."""
    filled.store_megabytes(4)
    with closing(sqlite3.connect(filled.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM postroom_topics").fetchone()
        filled.store_megabytes(60)
        assert filled.ahead > 60 * MB
        reader.execute("COMMIT")
    before = filled.ahead
    filled.store_megabytes(60)
    assert filled.ahead < before + 32 * MB  # or as good as none, unless the thread is held up


class Copied:
    """A connection that copies nothing, and says how long the log is; and the lock of those who write."""

    def __init__(self) -> None:
        self.pages = 0
        self.full = False
        self.did: list[str] = []

    def execute(self, sql: str) -> Copied:
        assert sql == "PRAGMA wal_checkpoint(PASSIVE)"
        self.did.append("copy")
        return self

    def fetchone(self) -> tuple[int, int, int]:
        return 0, self.pages, 0

    def acquire(self) -> bool:
        self.did.append("lock")
        return self.pages < 5000

    def release(self) -> None:
        self.did.append("unlock")

    def close(self) -> None:
        self.did.append("close")


def test_writers_are_kept_out_for_what_is_left_of_a_long_log() -> None:
    """It is begun anew only when all of it is copied, and beside a writer that goes on it never would be."""
    copied = Copied()
    locks = dict.fromkeys(Area, copied)
    checkpoints = Checkpoints(
        lambda area: cast(sqlite3.Connection, copied), locks, lambda: copied.full, StoreTuning()
    )

    def done_after(pages: int) -> list[str]:
        for _ in range(pages):
            checkpoints.committed(Area.PROGRESS, 1)
        while checkpoints._told:
            time.sleep(0.001)
        done, copied.did = copied.did, []
        return done

    assert [done_after(499), done_after(1), done_after(499)] == [[], ["copy"], []]
    copied.pages = 1500
    assert done_after(1) == ["copy", "lock", "copy", "unlock"]
    copied.pages, copied.full = 0, True  # a disk on which no log should be longer than need be
    assert done_after(500) == ["lock", "copy", "unlock"]
    copied.pages, copied.full = 5000, False  # others are at work there, and do not end
    assert done_after(500) == ["copy", "lock"]
    checkpoints.close()
    assert copied.did == ["close"] and threads() == []


@pytest.mark.parametrize("scarce", [False, True])
def test_whoever_outruns_the_thread_is_held_up(scarce: bool) -> None:
    """Only with megabytes, which no event loop stores; where there is little room, at once."""
    copied, began, go_on = Copied(), threading.Event(), threading.Event()
    tuning = StoreTuning(checkpoint_wait_s=3600.0)

    def connect(area: Area) -> sqlite3.Connection:
        began.set()
        assert go_on.wait(60)
        return cast(sqlite3.Connection, copied)

    checkpoints = Checkpoints(connect, dict.fromkeys(Area, copied), lambda: scarce, tuning)
    checkpoints.committed(Area.LOG, 512)
    assert began.wait(60)
    for _ in range(0 if scarce else 7):
        checkpoints.stored(Area.LOG, 4 * MB, 8192)
    writer = threading.Thread(target=checkpoints.stored, args=(Area.LOG, 4 * MB, 8192), daemon=True)
    writer.start()
    writer.join(0.2)
    for _ in range(10):
        checkpoints.stored(Area.LOG, 64 * 1024, 8192)
        checkpoints.committed(Area.LOG)
    assert writer.is_alive() and copied.did == []
    go_on.set()
    writer.join(60)
    assert not writer.is_alive() and "copy" in copied.did
    checkpoints.close()


_WRITER = """
import sys
from pathlib import Path
from tests.unit.store.test_write_ahead import Filled
from postroom.store import open_sqlite
filled = Filled(open_sqlite(Path(sys.argv[1])), Path(sys.argv[1]))
while True:
    filled.store_megabytes(1)
    print(filled.stored, flush=True)
"""


@pytest.mark.parametrize("after", [9, 23])
def test_a_writer_that_is_killed_has_stored_what_it_said(tmp_path: Path, after: int) -> None:
    path, said = tmp_path / "queue.db", 0
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            said = int(line)
            if said >= after:
                writer.send_signal(signal.SIGKILL)
                break
        said = max([said, *map(int, writer.stdout.read().split())])
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with closing(open_sqlite(path)) as store:
        (piece,) = store.catalog.topic("orders").route.partitions
        found = store.log.read(piece.partition_id, 0, max_messages=1000, max_bytes=1000 * MB)
    assert len(found) >= said
    assert [one.base_offset for one in found] == list(range(len(found)))
