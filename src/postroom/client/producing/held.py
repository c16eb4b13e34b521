"""Messages that cannot be placed now, in the order they were sent.

Decides nothing about when they go on; only that each fails at its own deadline, surely not stored. Must never
let one out before its turn: what a partition gives back was sent before whatever is held (I4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...errors import PostroomError
from .parcel import Parcel

__all__ = ["Held"]


class Held:
    __slots__ = ("_expires_at", "_parcels", "_timer", "_too_late")

    def __init__(self, too_late: Callable[[], PostroomError]) -> None:
        self._too_late = too_late  # what those are told whose time is over
        self._parcels: list[Parcel] = []
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at = 0.0  # a timer of uvloop that is due at once does not know

    def __len__(self) -> int:
        return len(self._parcels)

    def add(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._wake_at(parcel.call.deadline)

    def add_first(self, parcels: Sequence[Parcel]) -> None:
        if parcels:
            self._parcels[:0] = parcels
            self._wake_at(min(parcel.call.deadline for parcel in parcels))

    def take(self) -> list[Parcel]:
        """All of them; none is held any more."""
        taken, self._parcels = self._parcels, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return taken

    def _wake_at(self, deadline: float) -> None:
        if self._timer is not None:
            if self._expires_at <= deadline:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)
        self._expires_at = deadline

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        late: list[Parcel] = []
        kept: list[Parcel] = []
        for parcel in self.take():
            (late if parcel.call.deadline <= now else kept).append(parcel)
        self.add_first(kept)
        if late:
            error = self._too_late()
            for parcel in late:
                parcel.failed(error)
