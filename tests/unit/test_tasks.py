"""One call for all who ask for the same, and nobody overtakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from postroom.tasks import SingleFlight


class Calls:
    """Calls that end when the test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = asyncio.Event()

    async def run(self, function: Callable[[], int]) -> int:
        self.begun += 1
        await self.go_on.wait()
        return function()


@pytest.fixture
async def calls() -> Calls:
    return Calls()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_many_share_one_call(calls: Calls) -> None:
    flight = SingleFlight(calls.run)
    asking = [asyncio.create_task(flight.look("key", None, lambda: 7)) for _ in range(3)]
    other = asyncio.create_task(flight.look("other", None, lambda: 8))
    await turns(2)
    assert calls.begun == 2 and flight.busy("key")
    calls.go_on.set()
    assert await asyncio.gather(*asking, other) == [7, 7, 7, 8]
    assert not flight.busy("key")
    assert await flight.look("key", 9, lambda: 7) == 9 and calls.begun == 2


@pytest.mark.parametrize("late", range(6))
async def test_nobody_who_waits_is_overtaken(calls: Calls, late: int) -> None:
    """Whenever the next one comes, that knows already: while the call ends, and while others are woken."""
    flight, order = SingleFlight(calls.run), list[int]()

    async def ask(number: int, known: int | None) -> None:
        await flight.look("key", known, lambda: 7)
        order.append(number)

    waiting = [asyncio.create_task(ask(number, None)) for number in range(3)]
    await turns(2)
    calls.go_on.set()
    await turns(late)
    newcomers = [asyncio.create_task(ask(number, 7)) for number in (3, 4)]
    await asyncio.gather(*waiting, *newcomers)
    assert order == [0, 1, 2, 3, 4] and not flight.busy("key")


async def test_all_are_told_that_it_failed_and_the_next_one_asks_again(calls: Calls) -> None:
    def fails() -> int:
        raise ZeroDivisionError

    flight = SingleFlight(calls.run)
    calls.go_on.set()
    failed = await asyncio.gather(
        *(flight.look("key", None, fails) for _ in range(2)), return_exceptions=True
    )
    assert [type(error) for error in failed] == [ZeroDivisionError] * 2
    assert await flight.look("key", None, lambda: 7) == 7


async def test_who_is_cancelled_does_not_end_the_call(calls: Calls) -> None:
    flight = SingleFlight(calls.run)
    gone, stays = (asyncio.create_task(flight.look("key", None, lambda: 7)) for _ in range(2))
    await turns(2)
    gone.cancel()
    await turns(2)
    calls.go_on.set()
    assert await stays == 7 and gone.cancelled() and calls.begun == 1
    assert not flight.busy("key")


async def test_all_who_asked_are_cancelled(calls: Calls) -> None:
    """The call goes on to its end, and is forgotten then."""
    flight = SingleFlight(calls.run)
    gone = asyncio.create_task(flight.look("key", None, lambda: 7))
    await turns(2)
    gone.cancel()
    await turns(2)
    assert flight.busy("key")
    calls.go_on.set()
    await turns(3)
    assert not flight.busy("key") and await flight.look("key", None, lambda: 8) == 8
