"""Files of a queue: only their owner may read them, and a forked process must not open them again.

They hold messages, and hashes of tokens. A file that Postroom makes has the mode 0600, whatever the umask;
one that belongs to another (the lock beside a database) has that of the other, so that an operator who opened
a queue to a group need not open each file again. A file that is there is never changed.

SQLite remembers in memory what its process has locked. A child inherits that, takes its parent's locks for
its own, and so takes none. When the parent closes the file it finds itself alone and removes the write-ahead
log, into which the child goes on writing: whatever the child commits from then on is lost, and nothing tells.
So which files are open is counted here, and at a fork the child keeps in mind which were. One that the parent
dropped without closing it counts as open.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from .errors import ForkError

__all__ = ["closed", "make_private", "open_private", "opened", "refuse_inherited", "write_private"]

_MODE = 0o600

FileKey = tuple[int, int]
"""Device and inode."""

_lock = threading.Lock()
_open: dict[FileKey, int] = {}  # connections of this process
_inherited: set[FileKey] = set()


def make_private(path: Path, like: Path | None = None) -> None:
    """An empty file, if there is none. Where it cannot be made, whoever opens it says why."""
    with contextlib.suppress(OSError):
        os.close(_new(path, like))


def open_private(path: Path, like: Path | None = None) -> int:
    """A descriptor to read and write; the file is made if it is not there."""
    try:
        return _new(path, like)
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)


def write_private(path: Path, text: str, like: Path | None = None) -> None:
    """Nothing else is in the file afterwards."""
    with open(open_private(path, like), "w", encoding="utf-8") as file:
        file.truncate()
        file.write(text)


def _new(path: Path, like: Path | None) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    mode = _MODE
    if like is not None:
        with contextlib.suppress(OSError):  # it is not there, either
            mode = os.stat(like).st_mode & 0o666
    with contextlib.suppress(OSError, AttributeError):  # Windows, and file systems without modes
        os.fchmod(descriptor, mode)
    return descriptor


# ---- across a fork ----


def refuse_inherited(file: Path) -> None:
    """ForkError if the process that this one was forked from had the file open."""
    if _inherited and _key(file) in _inherited:
        raise ForkError(
            f"{file} was open when this process was forked, and SQLite would lose what is stored here: close "
            "the connection before the fork, or open it only after the fork, in the parent too (servers that "
            "preload a program have a hook for that); or serve the queue with `postroom serve`"
        )


def opened(file: Path) -> FileKey:
    """A connection was opened; returns what `closed` is told."""
    key = _key(file)
    with _lock:
        _open[key] = _open.get(key, 0) + 1
    return key


def closed(key: FileKey) -> None:
    with _lock:
        left = _open.get(key, 0) - 1
        if left > 0:
            _open[key] = left
        else:
            _open.pop(key, None)


def _key(file: Path) -> FileKey:
    try:
        found = os.stat(file)
    except OSError:
        return (-1, -1)
    return (found.st_dev, found.st_ino)


def _forked() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have had it
    _inherited.update(_open)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
