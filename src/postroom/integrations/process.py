"""One connection without asyncio for each process of a web server.

Decides when it is opened: when it is first asked for, in the process that asks. Pre-fork servers load the
program and then fork; a connection of the parent is of no use in the child, so the child opens its own. Must
never close what belongs to another process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from .. import sync

__all__ = ["PerProcess"]


class PerProcess:
    """`get()` is the connection of this process; threads share it, and their sends share batches."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, self.options = url, dict(options or {})
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Without closing: after a fork it is the parent's, and so may be the lock."""
        self._lock = threading.Lock()
        self._connection: sync.Connection | None = None

    def get(self) -> sync.Connection:
        with self._lock:
            if self._connection is None or self._connection._portal.closed:
                self._connection = sync.connect(self.url, **self.options)
            return self._connection

    def close(self) -> None:
        """A process may end without: what was sent is stored. Asked for once more, it is opened anew."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
