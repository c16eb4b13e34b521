"""Polls of a shared group take turns at looking, and no turn is lost."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest
import uvloop

from postroom.broker.deliver.poll_queue import Permit, PollQueue
from postroom.broker.waiters import Key, Waiters
from postroom.client.producer.parcel import Parcel, UnroutedParcels
from postroom.config import DEFAULTS
from postroom.errors import SendTimeout, StoreBusy, UnknownGroup

LONG_S = 1000.0
TUNING = DEFAULTS.tuning.broker


@pytest.fixture
async def crowd() -> PollQueue:
    found = PollQueue(Waiters(), 2)
    found.fresh_s = LONG_S
    return found


def asks(crowd: PollQueue, seconds: float = LONG_S) -> asyncio.Task[Permit | None]:
    return asyncio.create_task(crowd.permit(asyncio.get_running_loop().time() + seconds))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def barren(crowd: PollQueue, seconds: float = LONG_S) -> None:
    turn = crowd.at_once()
    turn.begin()
    turn.found_nothing(seconds)


async def in_line(crowd: PollQueue, count: int) -> list[asyncio.Task[Permit | None]]:
    await barren(crowd)
    tasks = [asks(crowd) for _ in range(count)]
    await settle()
    assert not any(task.done() for task in tasks)
    return tasks


def called(tasks: list[asyncio.Task[Permit | None]]) -> list[bool]:
    return [task.done() for task in tasks]


def turn_of(task: asyncio.Task[Permit | None]) -> Permit:
    turn = task.result()
    assert turn is not None
    turn.begin()
    return turn


async def cancel(*tasks: asyncio.Task[Permit | None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_news_calls_the_first_and_a_find_the_next(crowd: PollQueue) -> None:
    tasks = await in_line(crowd, 4)
    crowd.set()
    crowd.set()
    await settle()
    assert called(tasks) == [True, False, False, False]
    turn_of(tasks[0]).found(rich=False)
    await settle()
    assert called(tasks) == [True, True, False, False]
    turn_of(tasks[1]).found_nothing(LONG_S)
    await settle()
    assert called(tasks) == [True, True, False, False]
    await cancel(*tasks)


async def test_while_looks_bring_all_that_they_ask_for_several_look_at_once(crowd: PollQueue) -> None:
    tasks = await in_line(crowd, 4)
    crowd.set()
    await settle()
    turn_of(tasks[0]).found(rich=True)
    await settle()
    assert called(tasks) == [True, True, True, False]
    await cancel(*tasks)


async def test_news_that_came_during_a_look_was_not_seen_by_it(crowd: PollQueue) -> None:
    tasks = await in_line(crowd, 2)
    crowd.set()
    await settle()
    turn = turn_of(tasks[0])
    crowd.set()
    turn.found_nothing(LONG_S)
    await settle()
    assert called(tasks) == [True, True]


async def test_a_look_beside_one_that_found_something_knows_too_little(crowd: PollQueue) -> None:
    """It may not have seen when the lease ends that the other one was given."""
    one, other = crowd.at_once(), crowd.at_once()
    one.begin()
    other.begin()
    one.found(rich=False)
    other.found_nothing(LONG_S)
    task = asks(crowd)
    await settle()
    assert task.done()


@pytest.mark.parametrize("looked", [False, True])
async def test_who_is_cancelled_passes_its_turn_on(crowd: PollQueue, looked: bool) -> None:
    tasks = await in_line(crowd, 3)
    crowd.set()
    if looked:  # it has its turn, and ends without a look
        await settle()
        permit = tasks[0].result()
        assert permit is not None
        permit.end()
    else:  # it was called, and has not run since
        tasks[0].cancel()
    await settle()
    assert called(tasks) == [True, True, False]
    await cancel(*tasks)


async def test_who_is_called_at_its_deadline_has_its_turn(crowd: PollQueue) -> None:
    await barren(crowd)
    task = asks(crowd, 0.02)
    await settle()
    crowd._loop.call_later(0.01, crowd.set)
    time.sleep(0.05)  # noqa: ASYNC251 - so that both come at once: it is called, and then its time is up
    assert await task is not None
    assert crowd._permits == 1


async def test_at_its_deadline_it_looks_only_if_something_may_be_there(crowd: PollQueue) -> None:
    await barren(crowd)
    assert await crowd.permit(crowd._loop.time() + 0.01) is None
    busy = [crowd.at_once(), crowd.at_once()]
    crowd.set()
    assert await crowd.permit(crowd._loop.time() + 0.01) is not None  # others look, and do not end
    assert len(busy) == 2


async def test_what_is_due_calls_one(crowd: PollQueue) -> None:
    tasks = await in_line(crowd, 2)
    crowd.due(0.01)
    await asyncio.wait_for(tasks[0], 20)
    assert called(tasks) == [True, False]
    await cancel(*tasks)


async def test_what_a_look_says_is_due_calls_one(crowd: PollQueue) -> None:
    await barren(crowd, 0.5)
    tasks = [asks(crowd), asks(crowd)]
    await asyncio.wait_for(tasks[0], 20)
    await settle()
    assert called(tasks) == [True, False]
    await cancel(*tasks)


async def test_nothing_is_known_for_longer_than_is_good(crowd: PollQueue) -> None:
    crowd.fresh_s = 0.01
    await barren(crowd)
    await asyncio.wait_for(asks(crowd), 20)


async def woken(crowd: PollQueue, *news: Key) -> Permit:
    """A poll that stood there when the news came."""
    task = asks(crowd)
    await settle()
    assert not task.done()
    for key in news:
        crowd.told(key)
    await settle()
    return turn_of(task)


async def test_a_poll_is_told_which_partitions_had_news(crowd: PollQueue) -> None:
    await barren(crowd)
    turn = await woken(crowd, ("partition", 7), ("partition", 8), ("partition", 7))
    assert turn.named == {7, 8}
    turn.found(rich=False, nothing_for_s=LONG_S)
    turn = await woken(crowd, ("partition", 9))
    assert turn.named == {9}
    crowd.told(("partition", 7))  # not seen by it
    turn.found_nothing(LONG_S)
    crowd.told(("partition", 8))
    late = await crowd.permit(LONG_S)
    assert late is not None
    late.begin()
    assert late.named == {7, 8} and not late.waited  # it was not there when it came


async def test_news_of_no_partition_may_be_about_any(crowd: PollQueue) -> None:
    await barren(crowd)
    turn = await woken(crowd, ("partition", 7), ("group", 1))
    assert turn.named is None
    turn.found(rich=False)  # there may be more, wherever that is
    tasks = await in_line(crowd, 1)
    crowd.told(("partition", 7))
    await settle()
    assert turn_of(tasks[0]).named == {7}


async def test_what_a_poll_left_or_did_not_see_is_looked_for_everywhere(crowd: PollQueue) -> None:
    await barren(crowd)
    turn = await woken(crowd, ("partition", 7))
    turn.found(rich=False)
    follower = crowd.at_once()
    follower.begin()
    follower.failed(StoreBusy("later"))
    turn = await woken(crowd, ("partition", 8))
    assert turn.named is None


async def test_a_poll_of_some_partitions_learns_nothing_of_the_others(crowd: PollQueue) -> None:
    """Something is due elsewhere: it is looked for when it was to be, however often others have news."""
    await barren(crowd, 0.05)
    turn = await woken(crowd, ("partition", 7))
    assert turn.named == {7}
    turn.found(rich=False, nothing_for_s=LONG_S)
    assert (await asyncio.wait_for(due(crowd), 20)).named is None


async def due(crowd: PollQueue) -> Permit:
    permit = await asks(crowd)
    assert permit is not None
    permit.begin()
    return permit


async def test_nothing_is_known_after_nobody_was_there(crowd: PollQueue) -> None:
    with crowd.attended():
        await barren(crowd)
    with crowd.attended():  # a moment later: the watcher has kept what it would have told
        short = asks(crowd)
        await settle()
        assert not short.done()
        await cancel(short)
    crowd._waiters._left_at -= TUNING.lull_s
    with crowd.attended():
        task = asks(crowd)
        await settle()
        assert task.done()


async def test_whoever_is_back_soon_finds_the_watcher_at_work() -> None:
    waiters, told = Waiters(lull_s=0.05), asyncio.Queue[str]()
    waiters.on_first, waiters.on_none = lambda: told.put_nowait("first"), lambda: told.put_nowait("none")
    for _ in range(3):
        waiters.enter()
        waiters.leave()
    assert (told.qsize(), told.get_nowait()) == (1, "first")
    assert await asyncio.wait_for(told.get(), 20) == "none"
    waiters.enter()
    assert told.get_nowait() == "first"


async def took_all(crowd: PollQueue, seconds: float = LONG_S, *, news: bool = False) -> None:
    turn = crowd.at_once()
    turn.begin()
    if news:
        crowd.set()
    turn.found(rich=False, nothing_for_s=seconds)


async def test_after_one_took_all_the_next_waits_for_news(crowd: PollQueue) -> None:
    await took_all(crowd)
    task = asks(crowd)
    await settle()
    assert not task.done()
    crowd.set()
    await settle()
    assert task.done()


async def test_after_one_took_all_its_lease_calls_the_next(crowd: PollQueue) -> None:
    await took_all(crowd, 0.02)
    assert await asyncio.wait_for(asks(crowd), 20) is not None


async def test_who_took_all_has_not_seen_what_came_meanwhile(crowd: PollQueue) -> None:
    await took_all(crowd, news=True)
    task = asks(crowd)
    await settle()
    assert task.done()


async def test_who_asks_beside_one_that_took_all_does_not_know_its_lease(crowd: PollQueue) -> None:
    beside = crowd.at_once()
    beside.begin()
    await took_all(crowd)
    beside.found_nothing(LONG_S)
    task = asks(crowd)
    await settle()
    assert task.done()


async def test_the_store_failing_one_is_not_asked_by_all(crowd: PollQueue) -> None:
    tasks = await in_line(crowd, 2)
    crowd.set()
    await settle()
    turn_of(tasks[0]).failed(StoreBusy("not now"))
    await settle()
    assert called(tasks) == [True, False]
    await asyncio.wait_for(tasks[1], 20)  # after a while


async def test_that_a_group_is_gone_is_told_to_all(crowd: PollQueue) -> None:
    tasks = await in_line(crowd, 3)
    crowd.set()
    for task in tasks:
        await settle()
        turn_of(task).failed(UnknownGroup("gone"))
    assert called(tasks) == [True, True, True]


async def test_all_are_dismissed(crowd: PollQueue) -> None:
    tasks = await in_line(crowd, 3)
    crowd.dismiss()
    assert await asyncio.wait_for(asyncio.gather(*tasks), 20) == [None, None, None]


async def test_messages_that_come_one_by_one_are_polled_for_one_by_one(crowd: PollQueue) -> None:
    """No timer stands between a message and its poll, however close they come to each other."""
    for _ in range(200):
        task = asks(crowd)
        await settle()
        crowd.set()  # a message
        await settle()
        assert task.done()
        turn_of(task).found(rich=False, nothing_for_s=LONG_S)


def test_timers_of_uvloop_that_are_due_at_once() -> None:
    """They are none, and cannot be asked when they are due."""

    async def due_soon() -> None:
        crowd = PollQueue(Waiters(), 2)
        crowd.fresh_s = LONG_S
        tasks = await in_line(crowd, 2)
        for _ in range(2):
            crowd.due(0.0003)
        await asyncio.wait_for(tasks[0], 20)
        await cancel(*tasks)

    uvloop.run(due_soon())


def test_deadlines_on_uvloop_that_are_there_at_once() -> None:
    async def late() -> list[BaseException]:
        loop, told = asyncio.get_running_loop(), list[BaseException]()
        held = UnroutedParcels(lambda: SendTimeout("too late"))
        for _ in range(2):
            call = SimpleNamespace(deadline=loop.time() + 0.0003)
            held.add(cast(Parcel, SimpleNamespace(call=call, failed=told.append)))
        await asyncio.sleep(0.1)
        return told

    assert [type(error) for error in uvloop.run(late())] == [SendTimeout] * 2
