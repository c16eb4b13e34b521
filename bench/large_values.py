"""What bulk of 1 KB values costs on SQLite, and what other ways to store it would bring.

    python -m bench.large_values [ROUNDS]

Each way stores pieces of a megabyte, each flushed: in pages of several sizes; with SQLite's own checkpoints,
which a commit makes, and with those of a thread, as Postroom has them; in a file beside the database, which
has a row for each piece then; and in a bare file, which is the floor. All in turn, each in a new folder; the
medians count. Beside it, with the same pages, a commit of three rows of a few bytes: what a lone message
pays for them. Nothing of Postroom runs here.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.table import Table

from tests.servers.places import base_folder

_PIECE, _PIECES, _FIRST = 1_000_000, 300, 40
_LONE = 500
_STEP = 4_000_000  # bytes after which a thread copies
_SHORT, _LONG = 8_192_000, 16_384_000  # bytes of a log that a commit copies: alone, and beside that thread

Store = Callable[[bytes], object]


def _database(folder: Path, page: int, ahead: int) -> sqlite3.Connection:
    db = sqlite3.connect(folder / "large.db", isolation_level=None, check_same_thread=False)
    for pragma in (
        f"page_size={page}",
        "journal_mode=WAL",
        "synchronous=FULL",
        f"wal_autocheckpoint={ahead // page}",
    ):
        db.execute(f"PRAGMA {pragma}")
    db.execute("CREATE TABLE log (id INTEGER PRIMARY KEY, at INTEGER, batch BLOB)")
    for name in ("ends", "sequences"):
        db.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, state BLOB)")
        db.execute(f"INSERT INTO {name} VALUES (1, x'00')")
    return db


def _row(db: sqlite3.Connection, batch: bytes, at: int = 0) -> None:
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO log (at, batch) VALUES (?, ?)", (at, batch))
    for name in ("ends", "sequences"):
        db.execute(f"UPDATE {name} SET state = ? WHERE id = 1", (os.urandom(50),))
    db.execute("COMMIT")


@contextmanager
def _sqlite(page: int, *, beside: bool = False) -> Iterator[Store]:
    """`beside`: a thread makes the checkpoints."""
    jobs: SimpleQueue[bool] = SimpleQueue()
    stored = 0

    def copy(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "large.db", isolation_level=None)) as own:
            while jobs.get():
                own.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def store(piece: bytes) -> None:
        nonlocal stored
        _row(db, piece)
        stored += len(piece)
        if beside and stored >= _STEP:
            stored = 0
            jobs.put(True)

    with tempfile.TemporaryDirectory(prefix="postroom-bench-", dir=base_folder()) as name:
        folder = Path(name)
        with closing(_database(folder, page, _LONG if beside else _SHORT)) as db:
            thread = threading.Thread(target=copy, args=(folder,))
            thread.start()
            yield store
            jobs.put(False)
            thread.join()


@contextmanager
def _side_file() -> Iterator[Store]:
    with (
        tempfile.TemporaryDirectory(prefix="postroom-bench-", dir=base_folder()) as name,
        closing(_database(Path(name), 8192, _SHORT)) as db,
        (Path(name) / "side").open("wb", buffering=0) as side,
    ):

        def store(piece: bytes) -> None:
            if len(piece) < 1000:
                return _row(db, piece)
            at = side.tell()
            side.write(piece)
            os.fdatasync(side.fileno())
            return _row(db, b"", at)

        yield store


@contextmanager
def _bare_file() -> Iterator[Store]:
    with tempfile.TemporaryFile(dir=base_folder(), buffering=0) as file:

        def store(piece: bytes) -> None:
            file.write(piece)
            os.fdatasync(file.fileno())

        yield store


Way = Callable[[], AbstractContextManager[Store]]

WAYS: dict[str, Way] = {
    "pages of 8 KiB": lambda: _sqlite(8192),
    "pages of 8 KiB, checkpoints by a thread": lambda: _sqlite(8192, beside=True),
    "pages of 16 KiB": lambda: _sqlite(16384),
    "pages of 32 KiB": lambda: _sqlite(32768),
    "pages of 64 KiB": lambda: _sqlite(65536),
    "a file beside the database": _side_file,
    "a bare file": _bare_file,
}


def _measured(way: Way) -> tuple[float, float, float]:
    """MB a second, CPU seconds for a GB, and milliseconds of a lone commit (the median)."""
    piece = os.urandom(_PIECE)
    with way() as store:
        for _ in range(_FIRST):
            store(piece)
        began, used = time.perf_counter(), time.process_time()
        for _ in range(_PIECES):
            store(piece)
        took, used = time.perf_counter() - began, time.process_time() - used
        lone = []
        for _ in range(_LONE):
            before = time.perf_counter()
            store(piece[:150])
            lone.append(1000 * (time.perf_counter() - before))
    size = _PIECE * _PIECES
    return size / took / 1e6, used / size * 1e9, statistics.median(lone)


def main(rounds: int) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, way in WAYS.items():
            found[name].append(_measured(way))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    table = Table(title="Bulk of large values: pieces of 1 MB, each flushed")
    for heading in ("way", "MB/s", "CPU s per GB", "a lone commit, ms"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for name, figures in found.items():
        rate, cpu, lone = (statistics.median(column) for column in zip(*figures, strict=True))
        table.add_row(name, f"{rate:,.0f}", f"{cpu:.2f}", f"{lone:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
