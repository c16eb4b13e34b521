"""Being told that a file was written, by any process of this machine: Linux's inotify.

Where there is none (another system, no more instances for this user) `open_events` returns None, and whoever
waits has to look by itself. So has a caller who finds news of which it was not told: some file systems do not
tell. Must never be needed for anything to be right: it only spares looks.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["FileEvents", "open_events"]

_IN_MODIFY = 0x2
_BUFFER = 64 * 1024


def open_events(files: Iterable[str]) -> FileEvents | None:
    """Return what tells when one of these files is written; None if nothing can."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        system = ctypes.CDLL(None, use_errno=True)
        told = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return None
    if told < 0:
        return None
    events = FileEvents(told)
    if any(system.inotify_add_watch(told, os.fsencode(file), _IN_MODIFY) < 0 for file in files):
        events.close()
        return None
    return events


class FileEvents:
    """For one thread that waits, and others that `wake` it."""

    def __init__(self, told: int) -> None:
        self._told = told
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for descriptor in (self._told, self._woken):
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Return whether a file was written since the last time, once one is; False: the time is over, or
        somebody called `wake`."""
        ready = [descriptor for descriptor, _ in self._poll.poll(seconds * 1000)]
        with suppress(BlockingIOError):
            os.read(self._told, _BUFFER)
        return self._told in ready

    def wake(self) -> None:
        """End the wait, and all that come."""
        with suppress(OSError):  # it is closed: nobody waits
            os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """Linux takes 10 ms to close the first, and nobody is to wait for that."""
        threading.Thread(target=os.close, args=(self._told,), daemon=True).start()
        os.close(self._woken)
