"""`once`: each message has one effect, however often it is delivered (R33).

What was let through is written down in the handler's own transaction, under a unique key: a second delivery
at the same time waits there until the first has committed, and is passed over then; if the first is rolled
back, it is the second that is let through. Rows are forgotten after `keep`, in slices, now and then. Must
never be read before it is written (I1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from ...clock import Clock, SystemClock
from ...errors import InvalidSetting
from ...model.policy.guards import digest_of
from ...units import Duration, duration_ms
from ..databases import Kind, Theirs
from ..message import Received
from . import tables
from .apply import Id, id_of, scope_of

__all__ = ["KEEP", "Once", "Seen", "prune"]

KEEP: Duration = "30d"

_ADD: dict[Kind, str] = {
    "sqlite": "INSERT OR IGNORE INTO postroom_guards_seen (id, expires_at) VALUES (?, ?)",
    "postgres": "INSERT INTO postroom_guards_seen (id, expires_at) VALUES (?, ?) ON CONFLICT DO NOTHING",
    "mysql": "INSERT IGNORE INTO postroom_guards_seen (id, expires_at) VALUES (?, ?)",
}
_OLD = "SELECT id FROM postroom_guards_seen WHERE expires_at < ? ORDER BY expires_at LIMIT ?"
_FREE = "SELECT id FROM postroom_guards_seen WHERE id IN ({marks}) FOR UPDATE SKIP LOCKED"
_DELETE = "DELETE FROM postroom_guards_seen WHERE id IN ({marks})"
_SLICE = 500
_EVERY = 500  # messages that are let through between two slices
_turns = count()


class Seen:
    """Ids that were let through, of one guard."""

    def __init__(self, guard: str, id: Id, scope: str | None, keep: Duration, clock: Clock | None) -> None:
        self._guard, self._id, self._scope = guard, id, scope
        self._keep_ms = duration_ms(keep, name="keep")
        if not self._keep_ms:
            raise InvalidSetting(
                'keep=0 would forget at once what was handled: keep it for longer, such as "30d"'
            )
        self._clock = clock or SystemClock()

    def _digest(self, message: Received) -> str:
        return digest_of(self._guard, scope_of(message, self._scope), *id_of(message, self._id))

    def add(self, theirs: Theirs, message: Received) -> bool:
        """Whether it was not there."""
        now = self._clock.now_ms()
        fresh = theirs.run(_ADD[theirs.kind], (self._digest(message), now + self._keep_ms)) == 1
        if fresh and next(_turns) % _EVERY == 0:
            _forget(theirs, now)
        return fresh

    def remove(self, theirs: Theirs, message: Received) -> None:
        """It was added in this transaction, and is not let through after all."""
        theirs.run(_DELETE.format(marks="?"), (self._digest(message),))


class Once:
    def __init__(self, id: Id, scope: str | None, keep: Duration = KEEP, clock: Clock | None = None) -> None:
        self._seen = Seen("once", id, scope, keep, clock)

    def ready(self, theirs: Theirs, connection: Any, message: Received) -> Sequence[Received]:
        return [message] if self._seen.add(theirs, message) else []

    def shown(self, ready: Sequence[Any]) -> bool:
        return bool(ready)


def prune(connection: Any, *, clock: Clock | None = None) -> Any:
    """Forget one slice of what is older than it was to be kept; returns how much that was.

    Guards do so by themselves now and then. Call it until it returns 0 where much has piled up. Commits, and
    is awaited, as `create_tables` is.
    """
    now = (clock or SystemClock()).now_ms()
    return tables.on(connection, lambda theirs: _forget(theirs, now))


def _forget(theirs: Theirs, now: int) -> int:
    """What another transaction is forgetting just now is left to it: nobody waits."""
    found = [row[0] for row in theirs.rows(_OLD, (now, _SLICE))]
    if found and theirs.kind != "sqlite":
        found = [row[0] for row in theirs.rows(_FREE.format(marks=_marks(found)), found)]
    if found:
        theirs.run(_DELETE.format(marks=_marks(found)), found)
    return len(found)


def _marks(found: Sequence[str]) -> str:
    return ", ".join("?" * len(found))
