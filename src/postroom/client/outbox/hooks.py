"""What is done when the caller commits, where the caller's library tells us of it.

SQLAlchemy's `after_commit` also comes for a savepoint that is released while the transaction around it may
still be rolled back, and a connection's `commit` comes just before: so from here the relay is woken, and
nothing is ever sent (I21). Plain DB-API connections tell nobody: `outbox.transaction` does, or the relay
looks by itself. A send that was begun on an async session and not awaited is found here too: its commit is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ...errors import UsageError
from .. import databases

__all__ = ["Hooks"]


class Hooks:
    """Of one outbox. `wake` is harmless, quick, and may be called from any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._begun: WeakKeyDictionary[Any, set[object]] = WeakKeyDictionary()  # sends, by session

    def wrote(self, connection: Any) -> None:
        """A message was written on it."""
        library = databases.library(connection)
        if library == "sqlalchemy":
            self._listen(connection)
        elif library == "django" and connection.in_atomic_block:
            connection.on_commit(self._wake)

    def begin(self, connection: Any) -> Callable[[], None]:
        """A send on an async session or connection is about to be awaited; returns what ends it."""
        inner = getattr(connection, "sync_session", None) or getattr(connection, "sync_connection", None)
        if inner is None:
            return lambda: None  # not started: awaiting it says so
        begun, send = self._listen(inner), object()
        begun.add(send)
        return lambda: begun.discard(send)

    def _listen(self, inner: Any) -> set[object]:
        known = self._begun.get(inner)
        if known is not None:
            return known
        from sqlalchemy import event

        begun = self._begun[inner] = set()
        wake = self._wake

        def refuse(it: Any) -> None:
            if begun:
                begun.clear()
                if not hasattr(it, "flush"):  # it thinks itself done with after an error here
                    it.connection.rollback()
                raise UsageError(
                    "a message was not awaited before the commit: write `await outbox.send(…)` for an async "
                    "session or connection"
                )

        if hasattr(inner, "flush"):  # a session
            event.listen(inner, "before_commit", refuse)
            event.listen(inner, "after_commit", lambda _: wake())
            event.listen(inner, "after_rollback", lambda _: begun.clear())
        else:
            event.listen(inner, "commit", refuse)
            event.listen(inner, "commit", lambda _: wake())
            event.listen(inner, "rollback", lambda _: begun.clear())
        return begun
