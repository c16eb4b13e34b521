"""What all acts share: how much happens, where, who tells it, and the figures so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import PostroomError
from .figures import Figures
from .stage import Stage

__all__ = ["LOOK_S", "PATIENCE_S", "Scale", "Scene", "until"]

LOOK_S = 0.1
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How much happens, and how fast."""

    messages: int = 100_000
    watch_s: float = 4.0  # about how long handling takes
    lease: str = "2s"  # of the groups in the second act
    payments: int = 12
    poison_lease: str = "500ms"
    accounts: int = 20
    bookings: int = 50  # of each account
    order_lease: str = "1500ms"
    trade_keys: int = 40
    between_s: float = 0.6  # two changes of the route
    reminders: int = 200
    latest_s: float = 2.0  # the last reminder is due after so long

    @staticmethod
    def fast() -> Scale:
        return Scale(
            messages=4_000, watch_s=1.0, lease="500ms", payments=4, poison_lease="300ms",
            accounts=10, bookings=20, order_lease="700ms", between_s=0.2, reminders=50, latest_s=0.6,
        )  # fmt: skip

    def pause(self, processes: int) -> str:
        """What each handler waits per message, so that the whole takes about `watch_s`."""
        return f"pause={self.watch_s * processes / self.messages:.9f}"


@dataclass(frozen=True, slots=True)
class Scene:
    folder: Path
    scale: Scale
    stage: Stage
    figures: Figures
    prefix: str = ""  # of topics: on somebody's own database they are told from his

    def topic(self, name: str) -> str:
        return f"{self.prefix}{name}"


async def until(holds: Callable[[], Coroutine[Any, Any, bool]], failure: str) -> None:
    """Look again and again; a demo that hangs says what did not happen."""
    give_up = time.monotonic() + PATIENCE_S
    while not await holds():
        if time.monotonic() > give_up:
            raise PostroomError(f"{failure} within {PATIENCE_S:.0f} s")
        await asyncio.sleep(LOOK_S)
