"""The store contract, for background work: the schedule, and who may do what.

Exported by `contract`: import them from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from ..model.schedule import Waiting
from .values import Finished, Move

__all__ = ["Duties", "Schedule"]


class Schedule(Protocol):
    """Delayed messages until they are due; what `Log.append` was given with `due_at` waits here (R35).

    Whoever holds the lease `model.schedule.DUTY` moves them, in three steps (I12): `stamp`, `Log.append`
    under the stamp's identity, `finish`, which may be one with the next `stamp`. Each step may be repeated
    by the next holder.
    """

    def next_due(self, *, since: int = 0, without: Collection[int] = ()) -> int | None:
        """When the next one is due that is due from `since` on; not of partitions in `without`. Cheap."""

    def due(
        self,
        *,
        messages: int,
        max_bytes: int,
        since: int = 0,
        without: Collection[int] = (),
        skip: Collection[int] = (),
    ) -> list[Waiting]:
        """Rows that are due now by the store's clock, up to these limits, but one at least.

        The longest due first, those of one moment in the order they came. `skip`: rows to leave out.
        """

    def rows(self, ids: Iterable[int]) -> dict[int, Waiting]:
        """Those of these rows that are still there."""

    def stamp(
        self,
        holder: str,
        move: Move,
        rows: Iterable[Waiting],
        before: Finished | None = None,
    ) -> bool:
        """Write down what is going to be stored where; flushed. The move's id is the caller's choice.

        False if any of the rows was cancelled meanwhile, in whole or in part: then nothing is stamped.
        `before`: finish that move first, in any case. LeaseLost if `holder` does not hold the lease.
        """

    def moves(self) -> list[Move]:
        """Moves that are not finished, the oldest first."""

    def finish(self, holder: str, finished: Finished) -> None:
        """Remove and change rows, and end the move; flushed.

        Nothing happens if the move was finished by somebody else. LeaseLost as in `stamp`.
        """

    def cancel(self, topic_id: int, digest: bytes) -> bool:
        """Remove every waiting message of the topic with that id (`model.dedup.digest`); flushed.

        False if there is none that is not stamped.
        """

    def purge(self, topic_id: int) -> int:
        """Remove all waiting messages of the topic that are not stamped; returns how many."""

    def delayed(self) -> dict[int, int]:
        """By topic, how many messages wait; without a scan."""


class Duties(Protocol):
    """Leases for background work: at most one holder each (I12)."""

    def acquire(self, duty: str, holder: str, lease_ms: int) -> bool: ...

    def release(self, duty: str, holder: str) -> None: ...
