"""The duty that cuts leases of a clock that was set back (I26): see `store.strays`.

It looks when it first runs, since the clock may have been set while nobody was there, and whenever the
store's time goes on by less than the steady clock has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..clock import STEP_MS, steady_ms
from ..errors import DeliveryError, UnknownGroup, UnknownPartition, UnknownTopic
from ..store.contract import Store

__all__ = ["CutStrays"]

_log = logging.getLogger("postroom.broker")


class CutStrays:
    name: str = "cut-strays"
    every_s: float = 10

    def __init__(self, store: Store, steady: Callable[[], int] = steady_ms) -> None:
        self._store, self._steady = store, steady
        self._last: tuple[int, int] | None = None  # the steady clock's time, and the store's

    def run_once(self) -> None:
        steady, now = self._steady(), self._store.now_ms()
        if self._last is not None:
            ran = steady - self._last[0]
            if now >= self._last[1] + ran - ran // 4 - STEP_MS:  # a quarter: it follows a step (`clock.Pace`)
                self._last = (steady, now)
                return
        found = sum(self._cut(topic.name) for topic in self._store.catalog.topics())
        if found:
            _log.warning("%d leases were of a clock that was set back: they end within a lease now", found)
        self._last = (steady, now)

    def _cut(self, topic: str) -> int:
        found = 0
        try:
            route = self._store.catalog.topic(topic).route
            places = self._store.present(piece.partition_id for piece in route.partitions)
            for group in self._store.catalog.groups(topic):
                found += self._store.progress.cut_leases(group, places)
        except (UnknownTopic, UnknownGroup, UnknownPartition, DeliveryError):
            pass  # deleted or reset meanwhile: then nothing is held
        return found
