"""One busy producer, topic or group does not starve the others (R41). Commits and looks wait for the test."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postroom.address import Address
from postroom.broker.broker import Broker, open_endpoint
from postroom.broker.workers import Workers
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.endpoint.values import PollReply, PollRequest, Settle, Verdict
from postroom.errors import ClosedError, PostroomError, StoreBusy
from postroom.model.messages.batch import BatchBuilder, read_header
from postroom.model.policy.settings import GroupWish, TopicSettings
from postroom.store.contract import Append, Appended
from postroom.store.contract.values import WouldWaitError

LIMITS = replace(DEFAULTS, commit_batches=16, writer_line_bytes=100_000)
PATIENCE_S = 20.0


def batch(producer: int = -1, sequence: int = -1, size: int = 1000) -> bytes:
    builder = BatchBuilder(compression="none")
    builder.extend(1, [(None, b"x" * size, [])])
    return builder.build(producer, 0 if producer >= 0 else -1, sequence)


class Gated:
    """Commits, and each waits until the test lets it."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commits: list[list[int]] = []  # producers
        self.begun, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self._append = broker.store.log.append
        monkeypatch.setattr(broker.store.log, "append", self._commit)

    def _commit(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        self.commits.append([read_header(one.batch).producer_id for one in appends])
        self.begun.release()
        assert self._go.acquire(timeout=PATIENCE_S)
        return self._append(appends)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=PATIENCE_S)

    def let(self, commits: int) -> None:
        self._go.release(commits)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    opened = await open_endpoint(
        Address("sqlite", path=tmp_path / "q.db"), limits=LIMITS, clock=ManualClock()
    )
    for topic in ("busy", "quiet"):
        await opened.create_topic(topic, TopicSettings(), 1, False)
    yield opened
    await opened.close()


@pytest.fixture
async def gated(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gated]:
    gate = Gated(broker, monkeypatch)
    yield gate
    gate.let(10_000)


async def place(broker: Broker, topic: str) -> int:
    return (await broker.route(topic)).ranges[0].partition_id


async def sent(broker: Broker, topic: str, *batches: bytes) -> list[asyncio.Task[Appended]]:
    there = await place(broker, topic)
    tasks = [asyncio.create_task(broker.append(topic, there, one)) for one in batches]
    await asyncio.sleep(0)  # each is where it has to wait now
    await asyncio.sleep(0)
    return tasks


# ---- producers ----


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
@pytest.mark.parametrize("topic", ["quiet", "busy"])
async def test_a_newcomer_is_in_the_very_next_commit(broker: Broker, gated: Gated, topic: str) -> None:
    flood = await sent(broker, "busy", *(batch(7, number) for number in range(500)))
    await gated.wait()
    (mine,) = await sent(broker, topic, batch(8, 0))
    gated.let(1)
    await gated.wait()
    assert 8 in gated.commits[1]
    assert len(gated.commits[1]) <= 16
    gated.let(10_000)
    await asyncio.wait_for(asyncio.gather(mine, *flood), PATIENCE_S)
    stored = [(await task).base_offset for task in flood]
    assert stored == sorted(stored)  # I3: nobody was overtaken by its own


async def test_a_full_line_slows_its_own_callers_only(broker: Broker, gated: Gated) -> None:
    """And lets them in in their order: the sequences of a producer have no gap (I3)."""
    flood = await sent(broker, "busy", *(batch(7, number, 40_000) for number in range(30)))
    await gated.wait()
    small = await sent(broker, "quiet", *(batch(8, number) for number in range(3)))
    gated.let(1)
    await gated.wait()
    assert gated.commits[1].count(8) == 3
    assert sum(commit.count(7) for commit in gated.commits) <= 6  # three at a time: more were not let in
    gated.let(10_000)
    found = await asyncio.wait_for(asyncio.gather(*small, *flood), PATIENCE_S)
    assert [one.base_offset for one in found] == [*range(3), *range(30)]


async def test_who_waits_for_room_and_is_cancelled_is_not_stored(broker: Broker, gated: Gated) -> None:
    tasks = await sent(broker, "busy", *(batch(7, number, 150_000) for number in range(3)))
    await gated.wait()
    tasks[2].cancel()
    gated.let(10_000)
    assert (await asyncio.wait_for(tasks[1], PATIENCE_S)).base_offset == 1
    with pytest.raises(asyncio.CancelledError):
        await tasks[2]
    (after,) = await sent(broker, "busy", batch(9, 0))
    assert (await asyncio.wait_for(after, PATIENCE_S)).base_offset == 2


async def test_who_waits_for_room_is_told_that_it_is_closed(broker: Broker, gated: Gated) -> None:
    tasks = await sent(broker, "busy", *(batch(7, number, 150_000) for number in range(3)))
    await gated.wait()
    closing = asyncio.create_task(broker.close())
    with pytest.raises(ClosedError):
        await asyncio.wait_for(tasks[2], PATIENCE_S)
    gated.let(10_000)
    await asyncio.wait_for(closing, PATIENCE_S)
    assert (await tasks[0]).base_offset == 0
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- threads ----


async def test_groups_take_turns_in_the_threads() -> None:
    workers, order = Workers(1, "test"), []
    began, go = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        assert go.wait(PATIENCE_S)

    jobs = [asyncio.create_task(workers.run_for("busy", first))]
    await asyncio.to_thread(began.wait, PATIENCE_S)
    jobs += [asyncio.create_task(workers.run_for("busy", order.append, n)) for n in range(50)]
    jobs += [asyncio.create_task(workers.run_for("quiet", order.append, "quiet"))]
    jobs += [asyncio.create_task(workers.run(order.append, "nobody's"))]
    await asyncio.sleep(0)
    closing = asyncio.create_task(workers.close())
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait_for(asyncio.gather(closing, *jobs), PATIENCE_S)
    assert order[:4] == [0, "quiet", "nobody's", 1]
    assert [n for n in order if isinstance(n, int)] == list(range(50))


# ---- polls ----


class Looks:
    """Counts looks; one may have to wait for the test, and all may fail."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: list[str] = []
        self.holding, self.failing = False, False
        self.begun, self.go = threading.Event(), threading.Event()
        self._poll = broker._deliveries.poll
        monkeypatch.setattr(broker._deliveries, "poll", self._look)

    async def held(self) -> str:
        """Who looks, as soon as somebody does."""
        assert await asyncio.to_thread(self.begun.wait, PATIENCE_S)
        return self.by[-1]

    def _look(self, request: PollRequest, *more: Any) -> object:
        if self.holding and threading.current_thread() is threading.main_thread():
            raise WouldWaitError("it waits for the test: in a thread, please")
        self.by.append(request.member)
        if self.failing:
            raise StoreBusy("as the test wants it")
        if self.holding:
            self.holding = False
            self.begun.set()
            assert self.go.wait(PATIENCE_S)
        return self._poll(request, *more)


@pytest.fixture
async def looks(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Looks:
    await broker.create_group("quiet", "own", GroupWish())
    return Looks(broker, monkeypatch)


def poll(
    broker: Broker, member: str, *, wait_ms: int = 30_000, messages: int = 10, held: bool = False
) -> asyncio.Task[PollReply]:
    token = secrets.randbits(62) + 1
    request = PollRequest("quiet", "own", member, token, messages, 1 << 20, wait_ms, not held)
    return asyncio.create_task(broker.poll(request), name=f"{member}/{token}")


async def idle(broker: Broker, members: int, looks: Looks) -> list[asyncio.Task[PollReply]]:
    """Polls that wait, in their order; what they found out is known."""
    polls = [poll(broker, f"m{number}") for number in range(members)]
    await until_quiet(broker, members)
    looks.by.clear()
    return polls


async def until_quiet(broker: Broker, waiting: int) -> None:
    """Until so many polls wait in line, and nobody looks."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            crowd = broker._polling._queues._known.get(("quiet", "own", "quiet"))
            if crowd and len(crowd._line) == waiting and not crowd._permits and crowd._empty:
                return
            await asyncio.sleep(0.002)


async def send(broker: Broker) -> None:
    await broker.append("quiet", await place(broker, "quiet"), batch(size=10))


def given(*polls: asyncio.Task[PollReply]) -> list[list[tuple[int, int]]]:
    done = [one.result() if one.done() else None for one in polls]
    return [[(lease.first, lease.last) for g in r.grants for lease in g.leases] for r in done if r]


async def answered(polls: Sequence[asyncio.Task[PollReply]], count: int = 1) -> list[asyncio.Task[PollReply]]:
    async with asyncio.timeout(PATIENCE_S):
        while sum(one.done() for one in polls) < count:
            waiting = [one for one in polls if not one.done()]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    return [one for one in polls if one.done()]


async def end(*polls: asyncio.Task[PollReply]) -> None:
    for one in polls:
        one.cancel()
    await asyncio.gather(*polls, return_exceptions=True)


async def test_a_message_wakes_one_of_many(broker: Broker, looks: Looks) -> None:
    polls = await idle(broker, 200, looks)
    await send(broker)
    done = await answered(polls)
    await until_quiet(broker, 199)
    assert given(*done) == [[(0, 0)]]
    assert len(looks.by) <= 3
    await end(*polls)


async def test_a_poll_that_comes_while_nothing_is_there_does_not_look(broker: Broker, looks: Looks) -> None:
    polls = await idle(broker, 2, looks)
    polls += [poll(broker, "late"), poll(broker, "later")]
    await until_quiet(broker, 4)
    assert looks.by == []
    now = poll(broker, "now", wait_ms=0)  # whoever does not wait wants to know
    await asyncio.wait_for(now, PATIENCE_S)
    assert looks.by == ["now"]
    await end(*polls)


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_a_poll_answers_at_its_deadline_without_a_look(broker: Broker, looks: Looks) -> None:
    polls = await idle(broker, 1, looks)
    short = poll(broker, "short", wait_ms=1100)
    assert not (await asyncio.wait_for(short, PATIENCE_S)).grants
    assert looks.by == []
    await end(*polls)


async def test_all_members_are_given_some_of_many_messages(broker: Broker, looks: Looks) -> None:
    polls = [poll(broker, f"m{number}", messages=1) for number in range(5)]
    await until_quiet(broker, 5)
    await asyncio.gather(*(send(broker) for _ in range(5)))
    await answered(polls, 5)
    assert sorted(given(*polls)) == [[(n, n)] for n in range(5)]


async def test_news_during_a_look_is_not_lost(broker: Broker, looks: Looks) -> None:
    polls = await idle(broker, 3, looks)
    looks.holding = True
    await send(broker)
    await looks.held()
    await send(broker)
    looks.go.set()
    if given(*await answered(polls)) != [[(0, 1)]]:
        assert sorted(given(*await answered(polls, 2))) == [[(0, 0)], [(1, 1)]]
    await end(*polls)


async def test_what_a_cancelled_poll_was_given_goes_to_the_next_in_line(broker: Broker, looks: Looks) -> None:
    polls = await idle(broker, 3, looks)
    looks.holding = True
    await send(broker)
    looking = await looks.held()
    one = next(one for one in polls if one.get_name().startswith(f"{looking}/"))
    polls.remove(one)
    one.cancel()
    await asyncio.sleep(0)
    looks.go.set()
    assert given(*await answered(polls)) == [[(0, 0)]]
    await end(*polls)


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_the_store_failing_one_poll_does_not_fail_all(broker: Broker, looks: Looks) -> None:
    polls = await idle(broker, 50, looks)
    looks.failing = True
    await send(broker)
    done = await answered(polls)
    assert isinstance(done[0].exception(), StoreBusy)
    looks.failing = False
    failed = [one for one in polls if one.done()]
    left = [one for one in polls if one not in failed]
    assert given(*await answered(left)) == [[(0, 0)]]
    assert len(failed) < 10
    await end(*polls)


async def test_a_suspect_reaches_whoever_has_empty_hands(broker: Broker, looks: Looks) -> None:
    """I14: those that hold something are told to drain, and the next in line is asked."""
    await send(broker)
    first = poll(broker, "dies", wait_ms=0)
    assert given(*await answered([first])) == [[(0, 0)]]
    full = [poll(broker, f"full{number}", held=True) for number in range(3)]
    await until_quiet(broker, 3)
    free = poll(broker, "free")
    await until_quiet(broker, 4)
    clock = broker._clock
    assert isinstance(clock, ManualClock)
    clock.advance(31)
    await answered([free])
    assert given(free) == [[(0, 0)]]
    assert [one.draining for one in await asyncio.gather(*full)] == [True] * 3


async def test_a_lease_that_ends_wakes_one_in_line(broker: Broker, looks: Looks) -> None:
    await send(broker)
    await answered([poll(broker, "dies", wait_ms=0)])
    polls = await idle(broker, 20, looks)
    clock = broker._clock
    assert isinstance(clock, ManualClock)
    clock.advance(31)
    done = await answered(polls)
    assert given(*done) == [[(0, 0)]]
    assert len(looks.by) <= 4
    await end(*polls)


async def test_a_release_wakes_one_in_line(broker: Broker, looks: Looks) -> None:
    await send(broker)
    holder = poll(broker, "holder", wait_ms=0)
    reply = (await answered([holder]))[0].result()
    polls = await idle(broker, 5, looks)
    token, grant = int(holder.get_name().split("/")[1]), reply.grants[0]
    verdict = Verdict("release", grant.leases[0].first, grant.leases[0].last)
    await broker.settle("quiet", "own", [Settle(grant.topic, grant.partition_id, token, (verdict,))])
    done = await answered(polls)
    assert given(*done) == [[(0, 0)]]
    await end(*polls)


async def test_a_repeated_poll_looks_whatever_is_known(broker: Broker, looks: Looks) -> None:
    """I6: its first answer was lost, and with it what it holds."""
    await send(broker)
    lost = poll(broker, "m", wait_ms=0)
    await answered([lost])
    polls = await idle(broker, 2, looks)
    token = int(lost.get_name().split("/")[1])
    again = PollRequest("quiet", "own", "m", token, 10, 1 << 20, 30_000, True, repeated=True)
    reply = await asyncio.wait_for(broker.poll(again), PATIENCE_S)
    assert [(lease.first, lease.last) for grant in reply.grants for lease in grant.leases] == [(0, 0)]
    await end(*polls)


async def test_closing_lets_all_polls_return(broker: Broker, looks: Looks) -> None:
    polls = await idle(broker, 20, looks)
    await asyncio.wait_for(broker.close(), PATIENCE_S)
    replies = await asyncio.wait_for(asyncio.gather(*polls), PATIENCE_S)
    assert not any(reply.grants for reply in replies)
    assert looks.by == []
