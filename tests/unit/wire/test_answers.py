"""Room for answers: bounded for all, for a principal and for a connection, and given in turn."""

from __future__ import annotations

import asyncio

import pytest

from postroom.errors import BrokerUnavailable
from postroom.wire.server.answers import Answers, Share


def room(all_bytes: int = 100, connection_bytes: int = 40, wait_ms: int = 20_000) -> Answers:
    return Answers(all_bytes, connection_bytes, wait_ms)


async def asked(share: Share, size: int) -> asyncio.Task[None]:
    task = asyncio.create_task(share.room(size))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_a_connection_a_principal_and_all_have_limits() -> None:
    answers = room()
    a, b, c = (answers.share(name) for name in ("ann", "ann", "bob"))
    assert a.fits(40)
    a.hold(30)
    assert a.fits(10) and not a.fits(11)  # of a connection
    b.hold(15)
    assert b.fits(5) and not b.fits(6)  # of a principal: half of all
    c.hold(40)
    answers.share("cat").hold(10)
    other = answers.share("dan")
    assert other.fits(5) and not other.fits(6)  # of all
    assert answers.held == 95


async def test_what_is_alone_always_fits() -> None:
    answers = room()
    share = answers.share("ann")
    assert share.fits(1000)
    share.hold(10)
    assert not share.fits(1000) and share.fits(1000, mine=10)


async def test_principals_take_turns_and_none_barges_in() -> None:
    answers = room(100, 100)
    full = answers.share("old")
    full.hold(100)
    order: list[str] = []

    async def ask(name: str) -> None:
        share = answers.share(name)
        await share.room(40)
        order.append(name)

    tasks = [asyncio.create_task(ask(name)) for name in ("evil", "evil", "evil", "evil", "ann", "bob")]
    await asyncio.sleep(0)
    assert answers.waiting == 6
    for _ in range(3):
        full.hold(-30)
        await asyncio.sleep(0.01)
    assert sorted(order) == ["ann", "evil"]  # not evil twice, and there is no room for a third
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert answers.waiting == 0


async def test_who_waits_for_its_own_room_does_not_hold_up_others() -> None:
    answers = room()
    slow = answers.share("ann")
    slow.hold(40)
    waiting = await asked(answers.share("ann"), 20)
    assert not waiting.done()
    served = await asked(answers.share("bob"), 30)
    assert served.done()
    assert slow.wanted and not answers.share("bob").wanted
    slow.hold(-40)
    await asyncio.wait_for(waiting, 5)


async def test_nobody_waits_for_ever_and_whoever_leaves_holds_nothing() -> None:
    answers = room(wait_ms=20)
    full = answers.share("old")
    full.hold(100)
    share = answers.share("ann")
    with pytest.raises(BrokerUnavailable, match="ask again in a moment"):
        await share.room(10)
    gone = await asked(share, 10)
    gone.cancel()
    full.hold(-100)  # at the very moment
    await asyncio.gather(gone, return_exceptions=True)
    assert (share.held, answers.held, answers.waiting) == (0, 0, 0)


async def test_granted_and_cancelled_at_once_holds_nothing() -> None:
    answers = room()
    full = answers.share("old")
    full.hold(100)
    share = answers.share("ann")
    gone = await asked(share, 10)
    full.hold(-100)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (share.held, answers.held) == (0, 0)


async def test_unread_bytes_are_held() -> None:
    answers = room()
    share = answers.share("ann")
    share.saw_unread(30)
    share.saw_unread(10)
    assert (share.held, answers.held, answers.held_by("ann")) == (10, 10, 10)
    share.saw_unread(0)
    assert (answers.held, answers.held_by("ann")) == (0, 0)
