"""Handing out in ordered groups: of all partitions held, what may be handled now (R22, R23).

Keys are decided by each partition's `KeyQueue`. Decided here: whose turn it is, that nothing is handed out of
a partition whose lease has passed (I16) or that is given up, and that a suspect (a delivery that is `alone`,
I14) is handled while nothing else is: it is not begun before the rest is settled, and nothing else is begun
before it is.

`arrived` is set exactly while there may be something to take, so that whoever waits for it neither sleeps too
long nor spins; a timer sets it when a message that waits is due. Must never wait for anything itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ....model.delivery.delivery import Span
from ....model.delivery.ordered import FAR
from ...message import Received
from ..in_flight import LeasedDelivery
from ..settle import runs_of
from .partitions import AssignedPartition, AssignedPartitions

__all__ = ["Outlet"]


class Outlet:
    def __init__(
        self, in_flight: AssignedPartitions, now_ms: Callable[[], int], *, on_delivery: bool
    ) -> None:
        self._in_flight, self._now_ms, self._arrived = in_flight, now_ms, in_flight.arrived
        self._on_delivery = on_delivery
        self.one_per_key = False  # hand out no runs: one message of a key at a time
        self.told_of_handling = False  # settled on delivery: `handled` says when a key may go on
        self._turn = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def _holdings(self) -> list[AssignedPartition]:
        return list(self._in_flight.holdings.values())

    # ---- what there is ----

    @property
    def idle(self) -> bool:
        """Nothing is at work, nor could be: what waits for its time is not handled just now (I14)."""
        return not self.has_more and not any(holding.queue.out for holding in self._holdings)

    @property
    def has_more(self) -> bool:
        """Something could be handled now, whether or not it may be handed out yet."""
        now_ms = self._now_ms()
        return any(h.queue.has_more(now_ms) for h in self._holdings if h.give_up_at is None)

    @property
    def waiting(self) -> int:
        """Messages that wait for their time, and those behind them."""
        return sum(holding.queue.waiting for holding in self._holdings)

    @property
    def parked(self) -> int:
        return sum(holding.queue.parked for holding in self._holdings)

    @property
    def stale(self) -> bool:
        """The lease on what could come next has passed, as far as is known here: the machine slept."""
        now_ms = self._now_ms()
        passed = [h for h in self._in_flight.holdings.values() if h.until <= now_ms and h.give_up_at is None]
        return bool(passed) and any(holding.queue.has_more(now_ms) for holding in passed)

    def look_again(self) -> None:
        """Whether there is something to take may have changed."""
        now_ms = self._now_ms()
        self._tell(self._usable(now_ms), now_ms, self._suspect)

    def _tell(self, usable: list[AssignedPartition], now_ms: int, within: Span | None) -> None:
        """Whether there is something to take from these."""
        next_at = FAR
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for holding in usable:
            if holding.queue.has_more(now_ms, within):
                self._arrived.set()
                return
            next_at = min(next_at, holding.queue.next_at or FAR)
        self._arrived.clear()
        if next_at < FAR:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(1, next_at - now_ms) / 1000, self.look_again)

    # ---- taking ----

    def take(self, limit: int) -> list[Received]:
        """Messages for the user, key by key, none whose lease has passed."""
        out: list[Received] = []
        now_ms, within = self._now_ms(), self._suspect
        usable = self._usable(now_ms)
        self._turn += 1
        at = self._turn % max(1, len(usable))
        for holding in usable[at:] + usable[:at] if at else usable:
            part = holding.queue.take(limit - len(out), now_ms, one_per_key=self.one_per_key, within=within)
            if not part:
                continue
            self._went_out(holding, part, now_ms)
            out = out + part if out else part
            if len(out) >= limit:
                break
        if within is not None:  # what was begun decides what else may be
            usable = self._usable(now_ms)
        self._tell(usable, now_ms, within)
        return out

    def _usable(self, now_ms: int) -> list[AssignedPartition]:
        """Partitions from which something may be handed out."""
        if self._closed:
            return []
        if self._on_delivery:
            return self._holdings
        alone = self._in_flight.solo
        if alone is not None and self._others_at_work(alone[1]):
            return []
        among = self._holdings if alone is None else [alone[0]]
        return [holding for holding in among if holding.give_up_at is None and holding.until > now_ms]

    def _went_out(self, holding: AssignedPartition, messages: list[Received], now_ms: int) -> None:
        if self._on_delivery:
            self._in_flight.changed.set()
            if not self.told_of_handling:
                holding.queue.done(messages)
            return
        for delivery, start, stop in runs_of(messages):
            delivery.hand_out(start, stop, now_ms)

    # ---- suspects ----

    @property
    def _suspect(self) -> Span | None:
        """The offsets that are to be handled while nothing else is."""
        alone = self._in_flight.solo
        return None if alone is None else (alone[1].first, alone[1].last)

    def _others_at_work(self, suspect: LeasedDelivery) -> bool:
        return sum(holding.queue.out for holding in self._holdings) > suspect.at_work

    def stuck(self) -> tuple[AssignedPartition, LeasedDelivery] | None:
        """A suspect of which nothing is at work or can be: earlier messages of its keys wait."""
        alone = self._in_flight.solo
        if alone is None or alone[0].give_up_at is not None:
            return None
        holding, suspect = alone
        more = holding.queue.has_more(self._now_ms(), (suspect.first, suspect.last))
        if more or suspect.at_work or self._others_at_work(suspect) or not suspect.open_runs():
            return None
        return alone

    # ---- coming back ----

    def handled(self, messages: Sequence[Received]) -> None:
        """What was settled on delivery has been handled: its keys may go on."""
        for message in messages:
            holding = self._in_flight.holdings.get(message._delivery.partition_id)
            if holding is not None:
                holding.queue.done((message,))
        self.look_again()

    def put_back(self, messages: Sequence[Received]) -> None:
        """Messages that were taken and are not begun: they are handed out again, in order."""
        by_partition: dict[int, list[Received]] = {}
        for message in messages:
            by_partition.setdefault(message._delivery.partition_id, []).append(message)
        for partition_id, part in by_partition.items():
            holding = self._in_flight.holdings.get(partition_id)
            if holding is None:
                continue
            if self._on_delivery:
                holding.queue.done(part)
                holding.queue.back(part)
            else:
                self._in_flight.take_back(holding, part)
        self.look_again()

    def close(self) -> int:
        """Hand out nothing more; returns how many messages were left."""
        self._closed = True
        self.look_again()
        return sum(holding.queue.fresh for holding in self._holdings) + self.parked
