"""Copies of SQLite files: one moment of a file that is in use, the check of a copy, and who has a file open.

A copy keeps one read transaction open from its first page to its last. In WAL mode that is one moment and
holds up no writer. Without it SQLite begins the copy anew after every commit of another process: on a busy
queue it would never end. The price is a `-wal` file that grows meanwhile.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from ..config import DEFAULTS
from ..errors import StoreCorrupt
from ..files import make_private

__all__ = [
    "Contents",
    "check_file",
    "contents",
    "copy_database",
    "faults",
    "flush",
    "schema_version",
    "settle",
    "users_of",
]

_STEP_PAGES = 1000
_FAULTS = 3  # as many are told
_VERSION = "SELECT MAX(version) FROM postroom_schema"
_HAS_SCHEMA = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'postroom_schema'"
_MESSAGES = """SELECT COALESCE(SUM(p.next_offset - COALESCE(t.log_start, 0)), 0) FROM postroom_partitions p
               LEFT JOIN postroom_trims t ON t.partition_id = p.id WHERE p.state <> 'dropped'"""

Told = Callable[[int, int], None]  # bytes that are done, of how many


class Contents(NamedTuple):
    """What is in a log: figures that people can compare with what they expect."""

    topics: int  # Postroom's own, too
    messages: int  # durable ones, without delayed ones


def copy_database(source: Path, target: Path, told: Told) -> None:
    """Copy a database in use to a new file, as it is at one moment; flushed."""
    make_private(target)
    with closing(_open(source)) as from_, closing(_open(target)) as to:
        to.execute("PRAGMA journal_mode=OFF")  # what is cut off is thrown away
        to.execute("PRAGMA synchronous=OFF")  # all of it is flushed at the end
        page: int = from_.execute("PRAGMA page_size").fetchone()[0]
        from_.execute("BEGIN")
        from_.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()  # the moment: BEGIN alone is none

        def step(status: int, remaining: int, total: int) -> None:
            told((total - remaining) * page, total * page)

        from_.backup(to, pages=_STEP_PAGES, progress=step)
    flush(target)


def check_file(file: Path) -> None:
    """StoreCorrupt if SQLite finds a fault anywhere in a file."""
    try:
        found = faults(file, "integrity_check", "rw")
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    if found:
        raise StoreCorrupt(f"{file.name} is not a sound database ({'; '.join(found)})", file=file.name)


def faults(file: Path, check: str, mode: str = "ro") -> list[str]:
    """Return the first that SQLite finds; `check`: `integrity_check`, or `quick_check`, which reads less.

    `mode`: a copy is opened to be written, which leaves no files beside it; of a queue nothing may change.
    """
    with closing(_open(file, mode)) as connection:
        found = [str(row[0]) for row in connection.execute(f"PRAGMA {check}({_FAULTS})")]
    return [] if found == ["ok"] else found


def schema_version(file: Path) -> int:
    """Return the version of Postroom's tables in a file; 0 if it has none. Changes nothing in it."""
    with closing(_open(file)) as connection:
        if connection.execute(_HAS_SCHEMA).fetchone() is None:
            return 0
        return int(connection.execute(_VERSION).fetchone()[0] or 0)


def contents(log: Path) -> Contents:
    with closing(_open(log)) as connection:
        topics = connection.execute("SELECT COUNT(*) FROM postroom_topics").fetchone()[0]
        return Contents(int(topics), int(connection.execute(_MESSAGES).fetchone()[0]))


def flush(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    if path.is_dir() and os.name != "posix":  # pragma: no cover - folders cannot be flushed there
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(file: Path) -> None:
    """Put what a `-wal` beside a file has into it, flushed: only then may it be moved alone."""
    with closing(_open(file)) as connection:
        busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    if busy:
        raise sqlite3.OperationalError(f"{file} is in use")
    flush(file)


def users_of(files: Iterable[Path]) -> list[int]:
    """Return the processes that have one of these files open, also one that was removed under them.

    As far as it can be seen: on Linux, on this machine and in this container, of users whose processes ours
    may look into.
    """
    paths = [str(file.resolve()) for file in files]
    wanted = {*paths, *(f"{path} (deleted)" for path in paths)}
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            for number in os.listdir(process / "fd"):
                with suppress(OSError):  # it was closed
                    if os.readlink(process / "fd" / number) in wanted:
                        found.add(int(process.name))
    return sorted(found)


def _open(file: Path, mode: str = "rw") -> sqlite3.Connection:
    """Must never make a file: a mistyped path is an error."""
    return sqlite3.connect(
        f"{file.resolve().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=DEFAULTS.busy_timeout_ms / 1000,
    )
