"""Files that only their owner may read: they hold messages, and hashes of tokens.

A file that Postroom makes has the mode 0600, whatever the umask; one that belongs to another (the lock beside
a database) has the mode of that one, so that an operator who opened a queue to a group need not open each
file again. A file that is there is never changed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["make_private", "open_private", "write_private"]

_MODE = 0o600


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
