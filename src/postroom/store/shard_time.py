"""Times of a shard as the rest of the queue counts them (I16).

Leases, due times and holders are decided by the clock of the shard they are on. Whoever asks counts by the
first shard's clock: so moments that go to a shard, or come from it, are moved by how far the two are apart.
Clocks that agree within a quarter of a second are left alone: that much is lost on the way anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..model.delivery import Delivery, Holder, Settlement
from ..model.ordered import FAR
from .contract import Append, Granted, Peek, Settled

__all__ = ["Skew"]

_NEAR_MS = 250


class Skew:
    """How far a shard's clock is ahead."""

    __slots__ = ("_ms",)

    def __init__(self, shard_ms: int | None, first_ms: int | None) -> None:
        apart = 0 if shard_ms is None or first_ms is None else shard_ms - first_ms
        self._ms = apart if abs(apart) > _NEAR_MS else 0

    def __bool__(self) -> bool:
        return self._ms != 0

    # ---- to the shard ----

    def there(self, moment: int) -> int:
        return moment + self._ms if 0 < moment < FAR else moment

    def appends(self, appends: Sequence[Append]) -> Sequence[Append]:
        if not self or not any(append.due_at for append in appends):
            return appends
        return [replace(append, due_at=self.there(append.due_at)) for append in appends]

    def settlements(self, settlements: Sequence[Settlement]) -> Sequence[Settlement]:
        if not self:
            return settlements
        return [replace(one, visible_at=self.there(one.visible_at)) for one in settlements]

    def delivery_there(self, delivery: Delivery) -> Delivery:
        return replace(delivery, visible_at=self.there(delivery.visible_at)) if self else delivery

    # ---- from the shard ----

    def here(self, moment: int) -> int:
        return moment - self._ms if 0 < moment < FAR else moment

    def due(self, moment: int | None) -> int | None:
        return None if moment is None else self.here(moment)

    def delivery(self, delivery: Delivery) -> Delivery:
        return replace(delivery, visible_at=self.here(delivery.visible_at)) if self else delivery

    def peek(self, peek: Peek) -> Peek:
        if not self:
            return peek
        return replace(peek, next_due=self.due(peek.next_due), holder=self._holder(peek.holder))

    def granted(self, granted: Granted) -> Granted:
        if not self:
            return granted
        return replace(
            granted,
            deliveries=tuple(self.delivery(one) for one in granted.deliveries),
            leaving=tuple(self.delivery(one) for one in granted.leaving),
            next_due=self.due(granted.next_due),
            holder=None if granted.holder is None else self._holder(granted.holder),
        )

    def settled(self, settled: Settled) -> Settled:
        if not self:
            return settled
        return replace(
            settled,
            leaving=tuple(self.delivery(one) for one in settled.leaving),
            kept=tuple(self.delivery(one) for one in settled.kept),
        )

    def _holder(self, holder: Holder) -> Holder:
        return replace(holder, until=self.here(holder.until))
