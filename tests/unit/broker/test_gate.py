"""One rate limit in a broker: who passes when, in which order, and what is asked of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from postroom.broker.publish.rates import Claim, RateGate
from postroom.endpoint.values import NEVER_STORED
from postroom.errors import ClosedError
from postroom.model.policy.rate import NOTHING, Rate, Spent, give_back, spend, topic_rate


@dataclass
class FakeStore:
    """`store.rates` and its clock, in memory."""

    ms: int = 1_700_000_000_000
    spent: Spent = NOTHING
    asked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rates(self) -> FakeStore:
        return self

    def now_ms(self) -> int:
        return self.ms

    def spend(
        self, rate: Rate, messages: int, size: int, *, owed_messages: int = 0, owed_bytes: int = 0
    ) -> int:
        self.asked.append((messages, size))
        self.spent, _ = spend(self.spent, rate, self.ms * 1000, owed_messages, owed_bytes)
        self.spent, usable = spend(self.spent, rate, self.ms * 1000, messages, size)
        return -(-usable // 1000)

    def give_back(self, rate: Rate, messages: int, size: int) -> None:
        self.asked.append((-messages, -size))
        self.spent = give_back(self.spent, rate, messages, size)


async def at_once(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def make(messages_per_s: float = 10, bytes_per_s: int = 0) -> tuple[RateGate, FakeStore]:
    store = FakeStore()
    return RateGate(topic_rate("orders", messages_per_s, bytes_per_s), store, at_once, idle_s=1.0), store  # type: ignore[arg-type]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Crowd:
    """Batches of some sizes, that come one after the other; who passed, in order."""

    def __init__(self, gate: RateGate, *sizes: int) -> None:
        self.passed: list[int] = []
        self.tasks = [
            asyncio.ensure_future(self._pass(gate, number, size)) for number, size in enumerate(sizes)
        ]

    async def _pass(self, gate: RateGate, number: int, size: int) -> None:
        await gate.pass_through(size, 0)
        self.passed.append(number)


async def moved(gate: RateGate, store: FakeStore, ms: int) -> None:
    store.ms += ms
    gate.clock_moved()
    await settled()


async def test_nobody_overtakes_one_that_wants_more() -> None:
    """Something is in hand that would do for the small ones behind it."""
    gate, store = make(30)  # slices of 3
    crowd = Crowd(gate, 40, 1, 40, 1, 1)
    await settled()
    assert crowd.passed == [0]
    await moved(gate, store, 400)  # the first slice for the small one: 2 stay in hand
    assert crowd.passed == [0, 1]
    await moved(gate, store, 33)
    assert crowd.passed == [0, 1]
    await moved(gate, store, 1)
    assert crowd.passed == [0, 1, 2]
    await moved(gate, store, 1266)
    assert crowd.passed == [0, 1, 2]
    await moved(gate, store, 1)
    assert crowd.passed == [0, 1, 2, 3, 4]


async def test_who_comes_later_waits_behind_those_who_are_told_just_now() -> None:
    gate, store = make(10)
    crowd = Crowd(gate, 20, 1)
    await settled()
    store.ms += 1000
    gate.clock_moved()  # the second is told, and has not run yet
    late = Claim(1, 0)
    assert gate.take(late) is None
    await settled()
    assert crowd.passed == [0, 1]


async def test_one_that_is_cancelled_leaves_its_place_and_was_never_stored() -> None:
    gate, store = make(10)
    crowd = Crowd(gate, 20, 500, 1)
    await settled()
    crowd.tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await crowd.tasks[1]
    assert caught.value.args == (NEVER_STORED,)
    await moved(gate, store, 1000)
    assert crowd.passed == [0, 2]
    await gate.close()
    assert store.spent.messages_at == store.ms * 1000 + 100_000  # the 500 were given back


async def test_a_slice_is_reserved_or_what_is_wanted() -> None:
    gate, store = make(1000, 100_000)
    for _ in range(100):
        await gate.pass_through(1, 10)
    assert store.asked == [(100, 10_000)]
    await gate.pass_through(1, 500)
    assert store.asked[1:] == [(100, 0)]
    await gate.pass_through(300, 10_000)
    assert store.asked[2:] == [(201, 10_000)]


async def test_a_poll_takes_what_there_is() -> None:
    gate, _ = make(100)
    place = Claim(1000, 5000, whole=False)
    assert gate.take(place) is None
    await settled()
    share = gate.take(place)
    assert share is not None and (share.messages, share.bytes) == (10, 5000)
    gate.put_back(share, 4, 0)  # 6 were not used
    again = gate.take(place)
    assert again is not None and again.messages == 6


async def test_what_was_used_beyond_the_share_is_paid_first() -> None:
    gate, store = make(100)
    place = Claim(1000, 5000, whole=False)
    gate.take(place)
    await settled()
    share = gate.take(place)
    assert share is not None
    gate.put_back(share, 210, 0)
    assert gate.take(place) is None
    await settled()
    await moved(gate, store, 1099)
    assert gate.take(place) is None
    await moved(gate, store, 1)
    assert gate.take(place) is not None


async def test_a_change_frees_those_who_wait_and_forgets_what_was_in_hand() -> None:
    gate, store = make(10)
    crowd = Crowd(gate, 20, 1, 1)
    await settled()
    gate.change(topic_rate("orders", 1000))
    store.spent = NOTHING  # as the store does
    await settled()
    assert crowd.passed == [0, 1, 2]
    share = await gate.pass_through(1, 0)
    gate.change(None)
    gate.put_back(share, 0, 0)
    await gate.pass_through(10**9, 10**9)


async def test_a_closed_gate_lets_nobody_pass() -> None:
    gate, _ = make(10)
    crowd = Crowd(gate, 20, 1)
    await settled()
    await gate.close()
    with pytest.raises(ClosedError):
        await crowd.tasks[1]
    with pytest.raises(ClosedError):
        await gate.pass_through(1, 0)
