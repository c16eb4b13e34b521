"""Who has a spool file: one process at a time, by an advisory lock on a side file.

The lock ends with the process, however it ends; the side file stays, and says who has, or had, the lock. Must
never take a lock that another has: two who forward from one file would not know of each other.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from pathlib import Path

import msgspec

from ...errors import InvalidSetting, StoreBusy, StoreUnavailable
from ...store.private import open_private

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Owner", "Ownership", "owner_of"]

_MOST_BYTES = 1000


class Owner(msgspec.Struct, frozen=True):
    pid: int
    host: str
    since_ms: int

    def __str__(self) -> str:
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        mine = " (this one)" if not where and self.pid == os.getpid() else ""
        return f"process {self.pid}{where}{mine}"


class Ownership:
    """Holds the lock until `release`. A child process after fork does not hold it."""

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
        return msgspec.json.decode(os.pread(descriptor, _MOST_BYTES, 0), type=Owner)
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
