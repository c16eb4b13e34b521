"""Heartbeats of a consumer whose partitions are on several shards, of which one is away (R6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from postroom.client.consumer.heartbeat import Heart, Heartbeat
from postroom.client.consumer.in_flight import Membership
from postroom.client.owner_check import Guard
from postroom.clock import SystemClock
from postroom.endpoint.values import Beat, Held
from postroom.model.delivery.delivery import Span

pytestmark = pytest.mark.hasty


HERE, THERE = (Held("orders", number, 7, ((0, 3),)) for number in (1, 2))


class Endpoint:
    """The shard of one partition is away."""

    def __init__(self, told: list[tuple[Held, tuple[Span, ...]]]) -> None:
        self.told = told

    def reached_ms(self) -> int:
        return 1000

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        return self.told


class Leased:
    """A partition of an ordered group: held as a whole, or not at all."""

    until = 5.0

    def loses(self, spans: Iterable[Span]) -> bool:
        return True


class Deliveries:
    def __init__(self) -> None:
        self.leased = {HERE: Leased(), THERE: Leased()}
        self.lost: list[Any] = []

    def held(self, now_ms: int, max_handling_ms: int) -> Mapping[Held, Sequence[Leased]]:
        return {held: [one] for held, one in self.leased.items()}

    def lose(self, key: Any, spans: Any) -> None:
        self.lost.append(key)


@pytest.mark.parametrize("lost", [False, True])
async def test_what_is_away_is_neither_renewed_nor_lost(lost: bool) -> None:
    guard, in_flight = Guard(), Deliveries()
    told: list[tuple[Held, tuple[Span, ...]]] = [(THERE, ((0, 3),) if lost else ())]
    beating = Heartbeat(Endpoint(told), guard, SystemClock())  # type: ignore[arg-type]
    heart = Heart(Membership("orders", "line", "ann", "me", 60_000, 30_000), in_flight)  # type: ignore[arg-type]
    beating.beat_for(heart)
    ticked = guard.loop.create_future()
    guard.loop.call_soon(ticked.set_result, None)  # what the heartbeat tells the loop comes before this
    await ticked
    assert in_flight.leased[HERE].until == 31_000
    assert in_flight.leased[THERE].until == 5.0
    assert in_flight.lost == ([("orders", 2, 7)] if lost else [])
