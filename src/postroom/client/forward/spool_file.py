"""The file of a spool: messages that wait, and what was stamped of them, in SQLite, flushed at every commit.

Decides nothing about topics: it is a `Source` that the forwarder empties, and that a producer fills. Belongs
to one process (`Ownership`). Two connections, one to fill and one to empty it; they take turns. A new file is
made aside and appears whole, so that a file is ours, or another's and left as it is. Must never be written to
before it is known to be ours. Ids only grow, also when the file was empty.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...config import DEFAULTS, ClientTuning
from ...errors import (
    InvalidSetting,
    PostroomError,
    SchemaMismatch,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ...files import make_private, open_private
from ...model.moves.forwarding import Batch, ForwardRow, Stamp
from .forwarder import Trouble

__all__ = ["Owner", "Ownership", "SpoolFile", "Spooled", "look", "owner_of"]


try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None  # type: ignore[assignment]


_MOST_BYTES = 1000


class Owner(msgspec.Struct, frozen=True):
    pid: int
    host: str
    since_ms: int

    def __str__(self) -> str:
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        mine = " (this one)" if not where and self.pid == os.getpid() else ""
        return f"process {self.pid}{where}{mine}"


_decode_owner = msgspec.json.Decoder(Owner).decode


class Ownership:
    """The lock on a spool's file, which one process has at a time: advisory, on a side file, until `release`.

    It ends with the process, however that ends; the side file stays, and says who has, or had, the lock. A
    child process after fork does not have it. Must never take a lock that another has: two who forward from
    one file would not know of each other.
    """

    def __init__(self, path: Path) -> None:
        """StoreBusy if another has the file; it names that one."""
        if fcntl is None:  # pragma: no cover - not on Windows
            raise InvalidSetting(
                "a spool needs a system whose files can be locked (fcntl): this one has none"
            )
        side = lock_file(path)
        self._descriptor: int | None = None
        try:
            descriptor = open_private(side, like=path)
        except OSError as error:
            raise StoreUnavailable(
                f"{side}, the lock of a spool, cannot be opened ({error.strerror}): check that the folder "
                "is there and writable"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            me = Owner(os.getpid(), socket.gethostname(), time.time_ns() // 1_000_000)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(me), 0)
        except OSError as error:
            os.close(descriptor)
            raise _taken(path, error) from error
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        """Also where a child that was forked just now has the lock's file open still."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Let go of the lock's file, not of the lock: it is the parent's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_held: weakref.WeakSet[Ownership] = weakref.WeakSet()


def _forked() -> None:
    """A child shares its parent's locks as long as it has their files open."""
    for ownership in list(_held):
        ownership.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def owner_of(path: Path) -> Owner | None:
    """Who has the file now; None: nobody."""
    if fcntl is None:  # pragma: no cover - not on Windows
        return None
    try:
        descriptor = os.open(lock_file(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _written(descriptor)
    finally:
        os.close(descriptor)


def _written(descriptor: int) -> Owner:
    try:
        return _decode_owner(os.pread(descriptor, _MOST_BYTES, 0))
    except (msgspec.MsgspecError, OSError):  # it is just being written
        return Owner(0, "", 0)


def _taken(path: Path, error: OSError) -> StoreBusy | StoreUnavailable:
    if not isinstance(error, BlockingIOError):
        return StoreUnavailable(f"{lock_file(path)}, the lock of a spool, cannot be locked: {error.strerror}")
    owner = owner_of(path)
    return StoreBusy(
        f"the spool {path} is in use by {owner or 'another process'}: a spool file belongs to one process at "
        "a time; give each process a file of its own, and the same one whenever it is started again",
        owner=owner.pid if owner else 0,
    )


_MAGIC = b"SQLite format 3\0"
_APPLICATION = 0x50525350  # says that a database is a spool
_FORMER = 0x50535031  # said so before the project was called Postroom
_VERSION = 1
_HEADER_BYTES = 100
_PAGE_BYTES = 8192
_FREE_PAGES = 1024  # of an emptied file: more are given back

_SCHEMA = f"""
PRAGMA page_size = {_PAGE_BYTES};
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_VERSION};
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, key BLOB, value BLOB NOT NULL,
    headers BLOB NOT NULL, message_id TEXT, timestamp INTEGER NOT NULL, due_at INTEGER NOT NULL, slot INTEGER,
    spooled_at INTEGER NOT NULL);
CREATE TABLE stamps (
    producer_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, sequence INTEGER NOT NULL,
    topic TEXT NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (producer_id, partition_id, sequence)) WITHOUT ROWID;
CREATE TABLE troubles (
    topic TEXT PRIMARY KEY, reason TEXT NOT NULL, stuck INTEGER NOT NULL, since INTEGER NOT NULL);
CREATE TABLE totals (messages INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
"""
_COLUMNS = "id, topic, key, value, headers, message_id, timestamp, due_at, slot"
_INSERT = f"INSERT INTO messages ({_COLUMNS}, spooled_at) VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_COUNT = "UPDATE totals SET messages = messages + ?, bytes = bytes + ?"
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


class Spooled(NamedTuple):
    """What waits in a spool."""

    messages: int
    bytes: int
    oldest_age_ms: int  # 0: nothing waits
    troubles: dict[str, Trouble]  # by topic, why its messages wait; "": all of them
    owner: Owner | None = None  # the process that has the file

    @property
    def stuck(self) -> str:
        """Why messages wait that will not leave before somebody does something; empty: there are none."""
        found = [(topic, one.reason) for topic, one in self.troubles.items() if one.stuck]
        return "; ".join(f"topic {topic!r}: {reason}" if topic else reason for topic, reason in found)


class SpoolFile:
    """Blocking. `add` and `depth` from any thread, the rest from the forwarder's."""

    def __init__(self, path: Path, tuning: ClientTuning = DEFAULTS.tuning.client) -> None:
        """Opens it, or makes it. StoreBusy, StoreCorrupt, SchemaMismatch: it is left as it was."""
        self.path, self._busy_s = path, tuning.spool_busy_s
        self._turn = threading.Lock()
        self._looked = threading.Lock()
        self._owned = Ownership(path)
        self._connections: list[sqlite3.Connection] = []
        self._first = (frozenset[str](), 0)  # rows below that id are of those topics
        self.freed: Callable[[int], None] = lambda size: None  # is told, by the forwarder's thread
        try:
            with self._errors():
                if not _is_ours(path):
                    _make(path)
                self._filling, self._emptying, self._looking = (self._connect() for _ in range(3))
                self._filling.execute("DELETE FROM troubles")  # they may be over
                self.messages, self.bytes = self._filling.execute("SELECT * FROM totals").fetchone()
        except BaseException:
            self.close()
            raise

    # ---- filling ----

    def add(self, rows: Sequence[ForwardRow]) -> None:
        """All of them or none, flushed."""
        size, now_ms = sum([row.size for row in rows]), _now_ms()
        with self._errors(), self._transaction(self._filling) as filling:
            filling.executemany(_INSERT, [(*row[1:9], now_ms) for row in rows])
            self._count(filling, len(rows), size)
        self._counted(len(rows), size)

    def _count(self, connection: sqlite3.Connection, messages: int, size: int) -> None:
        connection.execute(_COUNT, (messages, size))

    def _counted(self, messages: int, size: int) -> None:
        with self._looked:
            self.messages += messages
            self.bytes += size

    # ---- emptying: the forwarder's source ----

    def take(self, messages: int, size: int, without: Collection[str]) -> list[ForwardRow]:
        with self._errors():
            return self._stamped(without) or self._oldest(messages, size, frozenset(without))

    def _stamped(self, without: Collection[str]) -> list[ForwardRow]:
        found: list[ForwardRow] = []
        for *stamp, topic, ids in self._emptying.execute("SELECT * FROM stamps").fetchall():
            if topic not in without:
                for first, last in _decode(ids):
                    found += self._rows(first, last, Stamp(*stamp))
        return found

    def _rows(self, first: int, last: int, stamp: Stamp) -> list[ForwardRow]:
        sql = f"SELECT {_COLUMNS} FROM messages WHERE id BETWEEN ? AND ? ORDER BY id"
        return [ForwardRow._make((*row, stamp)) for row in self._emptying.execute(sql, (first, last))]

    def _oldest(self, messages: int, size: int, without: frozenset[str]) -> list[ForwardRow]:
        """What is held is not looked through again and again."""
        start = self._first[1] if self._first[0] == without else 0
        newest = self._emptying.execute("SELECT max(seq) FROM sqlite_sequence").fetchone()[0] or 0
        marks = ", ".join("?" * len(without))
        sql = f"""SELECT {_COLUMNS} FROM messages WHERE id >= ? AND topic NOT IN ({marks})
                  ORDER BY id LIMIT ?"""
        found: list[ForwardRow] = []
        with closing(self._emptying.execute(sql, (start, *without, messages))) as rows:
            for row in rows:
                found.append(ForwardRow(*row))
                size -= found[-1].size
                if size <= 0:
                    break
        self._first = without, found[0].id if found else newest + 1
        return found

    def stamp(self, batches: Sequence[Batch]) -> None:
        rows = [
            (*batch.stamp, batch.topic, _encode(_runs([row.id for row in batch.rows]))) for batch in batches
        ]
        with self._errors(), self._transaction(self._emptying) as emptying:
            emptying.executemany("INSERT INTO stamps VALUES (?, ?, ?, ?, ?)", rows)

    def finish(self, stored: Sequence[Batch], refused: Sequence[Batch]) -> None:
        rows = list(chain.from_iterable(batch.rows for batch in stored))
        size = sum([row.size for row in rows])
        with self._errors(), self._transaction(self._emptying) as emptying:
            emptying.executemany(
                "DELETE FROM messages WHERE id BETWEEN ? AND ?", _runs(sorted([row.id for row in rows]))
            )
            emptying.executemany(
                "DELETE FROM stamps WHERE producer_id = ? AND partition_id = ? AND sequence = ?",
                [batch.stamp for batch in (*stored, *refused)],
            )
            self._count(emptying, -len(rows), -size)
        if refused:
            self._first = frozenset(), 0
        self._counted(-len(rows), -size)
        if not self.messages:
            self._shrink()
        self.freed(size)

    def tell(self, topic: str, trouble: Trouble | None) -> None:
        with self._errors(), self._transaction(self._emptying) as emptying:
            if trouble is None:
                emptying.execute("DELETE FROM troubles WHERE topic = ?", (topic,))
                return
            emptying.execute(
                """INSERT INTO troubles VALUES (?, ?, ?, ?)
                   ON CONFLICT (topic) DO UPDATE SET reason = excluded.reason, stuck = excluded.stuck""",
                (topic, *trouble, _now_ms()),
            )

    def _shrink(self) -> None:
        with self._errors(), self._turn:
            if self._emptying.execute("PRAGMA freelist_count").fetchone()[0] > _FREE_PAGES:
                self._emptying.executescript("PRAGMA incremental_vacuum")  # `execute` frees one page

    # ---- looking ----

    def depth(self) -> Spooled:
        with self._errors(), self._looked:
            return _depth(self._looking)

    # ---- transactions ----

    @contextmanager
    def _transaction(self, connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
        with self._turn:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=self._busy_s
        )
        self._connections.append(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _worded(self.path, error) from error

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._owned.release()


def look(path: Path) -> Spooled:
    """What waits in a file, whoever has it; it is only read."""
    if not _is_ours(path):
        raise StoreUnavailable(f"there is no spool {path}: check the path")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return _depth(connection)._replace(owner=owner_of(path))
    except sqlite3.Error as error:
        raise _worded(path, error) from error


def _depth(connection: sqlite3.Connection) -> Spooled:
    messages, size = connection.execute("SELECT * FROM totals").fetchone()
    oldest = connection.execute("SELECT spooled_at FROM messages ORDER BY id LIMIT 1").fetchone()
    troubles = connection.execute("SELECT topic, reason, stuck FROM troubles ORDER BY topic").fetchall()
    age_ms = max(_now_ms() - oldest[0], 0) if oldest else 0
    told = {topic: Trouble(reason, bool(stuck)) for topic, reason, stuck in troubles}
    return Spooled(messages, size, age_ms, told)


# ---- the file itself ----


def _is_ours(path: Path) -> bool:
    """False: there is none. It is told by its first bytes, so that another's file is not even opened."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreUnavailable(f"the spool {path} cannot be read: {error.strerror}") from error
    if not head:
        return False
    application, version = int.from_bytes(head[68:72]), int.from_bytes(head[60:64])
    if head[:16] != _MAGIC or len(head) < _HEADER_BYTES:
        raise StoreCorrupt(
            f"{path} is not a spool, or it is damaged: it was left as it is. Name another file; if this one "
            "was a spool, restore it, or move it away and keep it to look into"
        )
    if application == _FORMER:
        raise SchemaMismatch(
            f"{path} is a spool from before this project was called Postroom; it was left as it is, and "
            "there is no upgrade. Name another file, and forward what still waits in this one with the "
            "program that wrote it"
        )
    if application != _APPLICATION:
        raise StoreCorrupt(
            f"{path} is a database of something else, not a spool: it was left as it is; name another file"
        )
    if version != _VERSION:
        raise SchemaMismatch(
            f"the spool {path} has version {version}, and this Postroom knows {_VERSION}: upgrade Postroom"
        )
    return True


def _make(path: Path) -> None:
    """Aside, then moved into place: nobody ever finds half of it. The lock is ours."""
    left = path.with_name(f"{path.name}-wal")
    if left.exists() and left.stat().st_size:
        raise StoreCorrupt(
            f"the spool {path} is not there, but {left.name} is, which holds messages of it: restore the "
            "spool from where it was moved to, or move that file away too"
        )
    aside = path.with_name(f"{path.name}.new")
    aside.unlink(missing_ok=True)
    make_private(aside, like=path)
    with closing(sqlite3.connect(aside, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(_SCHEMA)
    aside.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _worded(path: Path, error: sqlite3.Error) -> PostroomError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"no space left for the spool {path}: free some; nothing of this was stored")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreCorrupt(
            f"the spool {path} is damaged ({error}): move it away and keep it, what can still be read is got "
            "by `sqlite3 FILE .recover`; a new one is made in its place"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusy(
            f"the spool {path} is locked by another program ({error}): end that one, then try again"
        )
    if code in _UNWRITABLE:
        return StoreUnavailable(
            f"the spool {path} cannot be written ({error}): check that file, folder and disk are writable"
        )
    return StoreError(f"the spool {path}: {error}")


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ids in ascending order, as first and last of each run without a gap."""
    runs: list[tuple[int, int]] = []
    first = last = -1
    for id in ids:
        if id != last + 1 or first < 0:
            if first >= 0:
                runs.append((first, last))
            first = id
        last = id
    return [*runs, (first, last)] if first >= 0 else runs


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
