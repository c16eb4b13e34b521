"""Checks of a queue in a SQLite file: the files, the schema, flushing, integrity, space.

Files are opened for reading, except where the check is how the store itself opens them.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ...clock import STEP_MS, SteadyClock, SystemClock
from ...config import DEFAULTS
from ...errors import SchemaMismatch, StoreCorrupt, how_to_update
from ...store.admin import VERSION, Area, Row, SqliteDialect, read_pace, refuse_former
from ...store.copies import faults
from ...units import format_bytes
from . import Checks, Finding, made

__all__ = ["damaged_end", "examine_file"]


# ---- the end of a write-ahead log: whether its last commit is whole ----
# SQLite leaves out what it finds damaged at the end of its log, without a word: most often that is a
# commit that a crash cut off, and nobody was told that it was done. A disk that loses what it had flushed
# looks the same. So this is a hint, and no proof; a log cut exactly between two commits cannot be told
# from a whole one.

_HEADER, _FRAME = 32, 24
_MAGIC = (0x377F0682, 0x377F0683)  # the second: checksums of big-endian words


def damaged_end(wal: Path) -> bool:
    """Tell whether the log ends in a frame of its present run that is cut short or has a wrong checksum."""
    with wal.open("rb") as file:
        header = file.read(_HEADER)
        if len(header) < _HEADER or struct.unpack(">I", header[:4])[0] not in _MAGIC:
            return False
        page, salts = struct.unpack(">I", header[8:12])[0], header[16:24]
        order = ">" if header[3] & 1 else "<"
        before, at, last = header[24:32], _HEADER, b""
        while True:
            file.seek(at)
            found = file.read(_FRAME)
            if len(found) < _FRAME or found[8:16] != salts:  # the end, or left from an earlier run
                break
            if last:
                before = last[16:24]
            last, at = found, at + _FRAME + page
        if not last:
            return False
        file.seek(at - page)
        data = file.read(page)
    return len(data) < page or _sum(order, last[:8] + data, before) != last[16:24]


def _sum(order: str, data: bytes, before: bytes) -> bytes:
    one, two = struct.unpack(">II", before)
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for at in range(0, len(words), 2):
        one = (one + words[at] + two) & 0xFFFFFFFF
        two = (two + words[at + 1] + one) & 0xFFFFFFFF
    return struct.pack(">II", one, two)


# ---- the examination ----

_MB, _GB = 1024 * 1024, 1024**3
_FLUSHES = 20
_LARGE_WAL = 256 * _MB
_SYNCHRONOUS = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}
_WANTED = {Area.LOG: 2, Area.PROGRESS: 1, Area.VOLATILE: 0}


def examine_file(path: Path, begin: Callable[[str, int], None]) -> list[Finding]:
    if not path.exists():
        advice = "name the right one with --url or POSTROOM_URL, or make it: postroom topic create NAME"
        return [Finding("file", "fail", f"there is no queue {path.absolute()}", advice)]
    exam, found = Examination(path), list[Finding]()
    for name, check in CHECKS:
        begin(name, len(CHECKS))
        found += made(name, check, exam, advice="check that the file is a queue")
    return found


@dataclass(slots=True)
class Examination:
    """The file under examination."""

    path: Path
    dialect: SqliteDialect = field(init=False)

    def __post_init__(self) -> None:
        self.dialect = SqliteDialect(self.path, SystemClock())

    def files(self) -> Iterator[tuple[Area, Path]]:
        """One made by an earlier version has no file for volatile topics yet."""
        for area in Area:
            file = self.dialect.file(area)
            if file is not None and (area is not Area.VOLATILE or file.exists()):
                yield area, file

    def one(self, area: Area, sql: str) -> int:
        """Return a number from an area's file, read-only."""
        return int(self.rows(area, sql)[0][0] or 0)

    def rows(self, area: Area, sql: str) -> list[Row]:
        file = self.dialect.file(area)
        try:
            with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
                return connection.execute(sql).fetchall()
        except sqlite3.Error as error:
            raise StoreCorrupt(f"{file}: {error}") from error

    def refuse_former(self, area: Area) -> None:
        """Raise SchemaMismatch if a file has a queue under the project's former name, and none of ours."""
        tables = {name for (name,) in self.rows(area, "SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "postroom_schema" not in tables:
            refuse_former(tables, self.dialect, area)


def check_writable(exam: Examination) -> Iterator[Finding]:
    for area, file in exam.files():
        name = f"{area.value} file"
        if not file.exists():
            yield Finding(name, "fail", f"{file} is missing", "restore it, or check the path in the URL")
        elif not os.access(file, os.R_OK | os.W_OK):
            advice = f"change its permissions: chmod u+rw {file}"
            yield Finding(name, "fail", f"{file} cannot be written", advice)
        else:
            yield Finding(name, "ok", f"{file}, {format_bytes(file.stat().st_size)}")
    folder = exam.path.absolute().parent
    if not os.access(folder, os.W_OK):
        advice = "SQLite keeps its log beside the file: make the folder writable"
        yield Finding("folder", "fail", f"{folder} cannot be written", advice)


def check_privacy(exam: Examination) -> Iterator[Finding]:
    """Check whether other users of this machine can read what is in the queue."""
    if os.name != "posix" or not exam.path.absolute().parent.stat().st_mode & 0o001:
        yield Finding("privacy", "ok", "other users of this machine cannot reach the files")
        return
    own = [file.name for _, file in exam.files()]
    endings = ("", "-wal", "-shm", ".lock")
    beside = [exam.path.with_name(f"{name}{ending}") for name in own for ending in endings]
    seen = [file for file in beside if file.exists() and file.stat().st_mode & 0o006]
    if seen:
        names = ", ".join(file.name for file in seen)
        advice = f"they hold messages, and hashes of tokens: chmod o-rwx {' '.join(map(str, seen))}"
        yield Finding("privacy", "warn", f"other users of this machine can read {names}", advice)
    else:
        yield Finding("privacy", "ok", "other users of this machine cannot read the files")


def check_wal_end(exam: Examination) -> Iterator[Finding]:
    """First of all: SQLite leaves a damaged end out as soon as somebody writes."""
    for area, file in exam.files():
        ahead = file.with_name(f"{file.name}-wal")
        if area is Area.VOLATILE or not ahead.exists() or not damaged_end(ahead):
            continue
        time.sleep(DEFAULTS.tuning.cli.wal_written_s)  # somebody may be writing it just now
        if ahead.exists() and damaged_end(ahead):
            said = f"{ahead} ends in a damaged frame, which SQLite leaves out"
            advice = "after a crash it is most likely a commit nobody was told of; else check the disk"
            yield Finding(f"wal end ({area.value})", "warn", said, advice)


def check_schema(exam: Examination) -> Iterator[Finding]:
    for area, _ in exam.files():
        name = f"schema ({area.value})"
        try:
            exam.refuse_former(area)
        except SchemaMismatch as error:
            yield Finding(name, "fail", str(error))
            continue
        found = exam.one(area, "SELECT MAX(version) FROM postroom_schema")
        if found == VERSION:
            yield Finding(name, "ok", f"version {found}")
        elif found < VERSION:
            advice = "it is brought up to date when a program connects"
            yield Finding(name, "warn", f"version {found}, this postroom has {VERSION}", advice)
        else:
            advice = how_to_update()
            yield Finding(name, "fail", f"version {found} is newer than this postroom's {VERSION}", advice)


def check_areas(exam: Examination) -> Iterator[Finding]:
    """WAL, and how a commit that asks for nothing special is flushed, on connections the store made."""
    for area, _ in exam.files():
        with closing(exam.dialect.connect(area)) as connection:
            exam.dialect.begin(connection, area, flush=False)
            exam.dialect.end(connection, area, commit=False)
            journal = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
            flush = int(connection.execute("PRAGMA synchronous").fetchone()[0])
        name, said = f"{area.value} lane", f"journal {journal}, synchronous {_SYNCHRONOUS.get(flush, flush)}"
        if journal == "wal" and flush >= _WANTED[area]:
            yield Finding(name, "ok", said)
        else:
            wanted = f"wal and {_SYNCHRONOUS[_WANTED[area]]}"
            yield Finding(name, "fail", said, f"it must be {wanted}: put the file on a local disk (no NFS)")


def check_integrity(exam: Examination) -> Iterator[Finding]:
    for area, file in exam.files():
        problems = _problems(file)
        if not problems:
            yield Finding(f"integrity ({area.value})", "ok", "quick_check found no fault")
        else:
            advice = "stop all programs, copy the files away, restore from a backup"
            yield Finding(f"integrity ({area.value})", "fail", "; ".join(problems), advice)


def _problems(file: Path) -> list[str]:
    try:
        return faults(file, "quick_check")
    except sqlite3.Error as error:
        raise StoreCorrupt(f"{file}: {error}") from error


def check_space(exam: Examination) -> Iterator[Finding]:
    free = shutil.disk_usage(exam.path.absolute().parent).free
    used = sum(file.stat().st_size for _, file in exam.files() if file.exists())
    said = f"{format_bytes(free)} free, the queue has {format_bytes(used)}"
    if free < 100 * _MB:
        yield Finding("disk", "fail", said, "free some space now: sends fail when the disk is full")
    elif free < max(_GB, used // 10):
        yield Finding("disk", "warn", said, "free some space, or shorten a retention")
    else:
        yield Finding("disk", "ok", said)


def check_flush(exam: Examination) -> Iterator[Finding]:
    """Measure how long a commit waits for the disk, beside the queue, in a file of its own."""
    times = []
    with tempfile.TemporaryFile(dir=exam.path.absolute().parent) as file:
        for _ in range(_FLUSHES):
            file.write(b"\0" * 4096)
            file.flush()
            before = time.perf_counter()
            os.fsync(file.fileno())
            times.append((time.perf_counter() - before) * 1000)
    typical, worst = statistics.median(times), max(times)
    said = f"{typical:.2f} ms typically, {worst:.2f} ms at worst ({_FLUSHES} measured)"
    if typical > DEFAULTS.tuning.cli.slow_flush_ms:
        advice = "every send waits that long: use a faster disk, or send several at a time"
        yield Finding("flush", "warn", said, advice)
    else:
        yield Finding("flush", "ok", said)


def check_write_ahead(exam: Examination) -> Iterator[Finding]:
    for area, file in exam.files():
        ahead = file.with_name(f"{file.name}-wal")
        size = ahead.stat().st_size if ahead.exists() else 0
        if size > _LARGE_WAL:
            advice = "a program keeps an old transaction open: find it and restart it"
            yield Finding(f"wal ({area.value})", "warn", f"{ahead} has {format_bytes(size)}", advice)


def check_clock(exam: Examination) -> Iterator[Finding]:
    """The queue's time against this machine's, and what was stored in a time that is still to come."""
    clock = SteadyClock()
    rows = exam.rows(Area.LOG, "SELECT value FROM postroom_settings WHERE name = 'clock'")
    pace = read_pace(str(rows[0][0])) if rows else None
    behind_ms = 0 if pace is None else clock.wall() - pace.at(clock.steady())
    where = "behind" if behind_ms > 0 else "ahead of"
    said = f"the queue's time is {abs(behind_ms) / 1000:,.1f} s {where} this machine's"
    if abs(behind_ms) <= STEP_MS:
        yield Finding("clock", "ok", "the queue's time is this machine's")
    else:
        hours = abs(behind_ms) * 4 / 3_600_000
        advice = (
            f"the machine's clock was set, and is followed slowly: within {hours:.1f} hours; due moments, "
            "schedules and retention go by the queue's time until then. Set the clock by NTP"
        )
        yield Finding("clock", "warn", said, advice)
    newest = exam.one(Area.LOG, "SELECT MAX(appended_at) FROM postroom_partitions")
    ahead_ms = newest - clock.wall() - max(0, -behind_ms)
    if ahead_ms > DEFAULTS.tuning.cli.future_ms:
        said = f"messages were stored {ahead_ms / 1000:,.0f} s in the future"
        advice = "the clock was wrong then: they are kept, and count as new, for that much longer"
        yield Finding("stored times", "warn", said, advice)


def check_dropped(exam: Examination) -> Iterator[Finding]:
    left = exam.one(Area.LOG, "SELECT COUNT(*) FROM postroom_partitions WHERE state = 'dropped'")
    if left:
        advice = "they are removed while any program is connected for a while"
        yield Finding("dropped logs", "warn", f"{left} logs of deleted topics still take space", advice)
    else:
        yield Finding("dropped logs", "ok", "none left behind")


CHECKS: Checks[Examination] = (
    ("write-ahead logs' ends", check_wal_end),
    ("files", check_writable),
    ("privacy", check_privacy),
    ("schema", check_schema),
    ("lanes", check_areas),
    ("integrity", check_integrity),
    ("disk", check_space),
    ("flush", check_flush),
    ("write-ahead logs", check_write_ahead),
    ("dropped logs", check_dropped),
    ("clock", check_clock),
)
