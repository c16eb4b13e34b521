"""A connection for each process: for programs that fork, and for threads that share one.

Decides when a connection is opened: when it is first asked for, in the process that asks. Pre-fork servers
load the program and then fork; a connection of the parent is of no use in the child, so the child opens its
own, and with SQLite the parent does, too. Must never close what belongs to another process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import Connection

__all__ = ["PerProcess"]


class PerProcess:
    """`get()` is the connection of this process; threads share it, and their sends share batches."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, self.options = url, dict(options or {})
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before_fork, after_in_child=self._forget)

    def _before_fork(self) -> None:
        """A SQLite file that is open at a fork cannot be opened in the child: it is opened anew in both."""
        if self.url.startswith("sqlite"):
            self.close()

    def _forget(self) -> None:
        """Without closing: after a fork it is the parent's, and so may be the lock."""
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def get(self) -> Connection:
        from . import connect  # it knows the whole client, and parts of that know this module

        with self._lock:
            if self._connection is None or self._connection._portal.closed:
                self._connection = connect(self.url, **self.options)
            return self._connection

    def close(self) -> None:
        """A process may end without: what was sent is stored. Asked for once more, it is opened anew."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
