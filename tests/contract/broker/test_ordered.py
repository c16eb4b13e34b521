"""Polls of ordered groups at the broker: who gets which partition, and what is told of it (R14, R23, I6)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from postroom.address import parse
from postroom.broker.broker import Broker, open_endpoint
from postroom.clock import ManualClock
from postroom.endpoint.values import Beat, Held, PollReply, PollRequest, Settle, Verdict
from postroom.model.messages.batch import BatchBuilder
from postroom.model.policy.settings import GroupWish, Start, TopicSettings

LEASE_MS = 30_000


@pytest.fixture
async def broker(any_url: str, clock: ManualClock) -> AsyncIterator[Broker]:
    opened = await open_endpoint(parse(any_url), clock=clock, migrate=True)
    await opened.create_topic("orders", TopicSettings(), 4, False)
    yield opened
    await opened.close()


class Member:
    """A consumer reduced to what it tells the broker."""

    def __init__(self, broker: Broker, name: str, token: int) -> None:
        self.broker, self.name, self.token = broker, name, token
        self.positions: dict[int, int] = {}
        self.started_ms = 0

    async def join(self, **settings: Any) -> Member:
        wish = GroupWish(mode="ordered", lease_ms=LEASE_MS, **settings)
        await self.broker.subscribe("orders", "billing", wish, self.name, "c")
        return self

    async def poll(self, messages: int = 100, wait_ms: int = 0, giving_up: tuple[int, ...] = ()) -> PollReply:
        positions = tuple(self.positions.items())
        reply = await self.broker.poll(
            PollRequest(
                "orders", "billing", self.name, self.token, messages, 1 << 20, wait_ms, True,
                positions=positions, giving_up=giving_up, started_ms=self.started_ms,
            )
        )  # fmt: skip
        if not self.positions:
            self.started_ms = reply.started_ms
        self.positions.update((grant.partition_id, grant.position) for grant in reply.grants)
        return reply

    async def hand_over(self, *partition_ids: int) -> None:
        await self.broker.hand_over("orders", "billing", self.token, partition_ids)
        for partition_id in partition_ids:
            self.positions.pop(partition_id, None)

    async def ack(self, partition_id: int, first: int, last: int) -> None:
        part = Settle("orders", partition_id, self.token, (Verdict("ack", first, last),))
        assert not (await self.broker.settle("orders", "billing", [part])).lost


async def fill(broker: Broker, partition_id: int, count: int) -> None:
    builder = BatchBuilder()
    builder.extend(1, [(b"k", b"v", [])] * count)
    await broker.append("orders", partition_id, builder.build(-1, -1, -1))


async def partitions(broker: Broker) -> list[int]:
    return [piece.partition_id for piece in (await broker.route("orders")).ranges]


def leases(reply: PollReply) -> list[tuple[int, int]]:
    return [(lease.first, lease.last) for grant in reply.grants for lease in grant.leases]


# ---- taking partitions ----


async def test_a_member_takes_its_share_and_no_more(broker: Broker) -> None:
    one, two = Member(broker, "one", 1), Member(broker, "two", 2)
    await one.join()
    await two.join()
    assert len((await one.poll()).grants) == 2
    assert len((await two.poll()).grants) == 2
    assert set(one.positions) | set(two.positions) == set(await partitions(broker))


async def test_a_partition_without_messages_is_held_once_and_then_nothing_is_written(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await Member(broker, "one", 1).join()
    first = await one.poll()
    assert len(first.grants) == 4 and leases(first) == []
    await one.poll()  # where it stands is known now
    assert set(one.positions.values()) == {0}
    monkeypatch.setattr(broker.store.progress, "poll_ordered", None)
    assert (await one.poll()).grants == ()
    monkeypatch.undo()
    await fill(broker, min(one.positions), 3)
    assert leases(await one.poll()) == [(0, 2)]


async def test_a_backlog_does_not_keep_a_partition_free(broker: Broker) -> None:
    """What is free is taken before more is handed out of what is held."""
    ids = await partitions(broker)
    one = await Member(broker, "one", 1).join()
    for partition_id in ids:
        await fill(broker, partition_id, 50)
    for _ in ids:
        await one.poll(messages=10)
    assert set(one.positions) == set(ids)


async def test_what_a_lost_reply_had_comes_again(broker: Broker) -> None:
    ids = await partitions(broker)
    await fill(broker, ids[0], 3)
    one = await Member(broker, "one", 1).join()
    lost = await one.poll()
    one.positions.clear()
    again = await one.poll()
    assert leases(lost) == leases(again) == [(0, 2)]
    assert leases(await one.poll()) == []


# ---- giving them up ----


async def test_a_revoked_partition_is_told_once(broker: Broker) -> None:
    one, two = Member(broker, "one", 1), Member(broker, "two", 2)
    await one.join()
    await one.poll()
    await one.poll()
    await two.join()
    revoked = (await one.poll()).revoked
    assert len(revoked) == 2
    assert (await one.poll(giving_up=revoked)).revoked == ()
    await fill(broker, revoked[0], 1)
    assert (await one.poll(giving_up=revoked)).grants == ()
    assert (await two.poll()).grants == ()
    await one.hand_over(*revoked)
    assert {grant.partition_id for grant in (await two.poll()).grants} == set(revoked)
    assert (await one.poll()).revoked == ()


async def test_whoever_asks_for_nothing_is_still_told(broker: Broker) -> None:
    one, two = Member(broker, "one", 1), Member(broker, "two", 2)
    await one.join()
    await one.poll()
    await two.join()
    reply = await one.poll(messages=0)
    assert len(reply.revoked) == 2 and reply.grants == ()


async def test_a_partition_that_is_lost_is_told(broker: Broker, clock: ManualClock) -> None:
    one, two = Member(broker, "one", 1), Member(broker, "two", 2)
    await one.join()
    await one.poll()
    clock.advance(LEASE_MS / 1000 + 1)
    await two.join()
    assert len((await two.poll()).grants) == 4  # whoever lets its lease pass is not counted on
    assert set((await one.poll(messages=0)).lost) == set(one.positions)


async def test_who_lives_but_lets_its_leases_pass_is_not_counted_on(
    broker: Broker, clock: ManualClock
) -> None:
    one, two = Member(broker, "one", 1), Member(broker, "two", 2)
    await one.join()
    await one.poll()
    clock.advance(LEASE_MS / 1000 + 1)
    await asyncio.to_thread(broker.beat, [Beat("orders", "billing", "one", "c", ())])
    await two.join()
    assert len((await two.poll()).grants) == 4


async def test_a_heartbeat_keeps_what_is_held(broker: Broker, clock: ManualClock) -> None:
    one, two = Member(broker, "one", 1), Member(broker, "two", 2)
    await one.join()
    await one.poll()
    held = tuple(Held("orders", partition_id, 1, ((0, 0),)) for partition_id in one.positions)
    clock.advance(LEASE_MS / 1000 - 1)
    assert await asyncio.to_thread(broker.beat, [Beat("orders", "billing", "one", "c", held)]) == []
    clock.advance(LEASE_MS / 1000 - 1)
    await two.join()
    assert (await two.poll()).grants == ()
    lost = await asyncio.to_thread(broker.beat, [Beat("orders", "billing", "two", "c", (held[0],))])
    assert lost == []  # the token decides, not the name
    stranger = Held("orders", held[0].partition_id, 2, ((0, 0),))
    assert await asyncio.to_thread(broker.beat, [Beat("orders", "billing", "two", "c", (stranger,))])


async def test_leaving_hands_over_what_is_held_still(broker: Broker) -> None:
    one, two = Member(broker, "one", 1), Member(broker, "two", 2)
    await one.join()
    await one.poll()
    await two.join()
    waiting = asyncio.create_task(two.poll(wait_ms=10_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    async with asyncio.timeout(5):
        await broker.unsubscribe("orders", "billing", "one")
        while len(two.positions) < 4:
            await waiting
            waiting = asyncio.create_task(two.poll(wait_ms=10_000))
    waiting.cancel()


async def test_a_cancelled_poll_gives_back_what_it_took(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still: no lease can pass."""
    one, two = Member(broker, "one", 1), Member(broker, "two", 2)
    await one.join()
    taken, go_on = asyncio.Event(), threading.Event()
    loop, honest = asyncio.get_running_loop(), broker.store.progress.poll_ordered

    def slow(*args: Any, **more: Any) -> Any:
        result = honest(*args, **more)
        loop.call_soon_threadsafe(taken.set)
        assert go_on.wait(10)
        return result

    monkeypatch.setattr(broker.store.progress, "poll_ordered", slow)
    polling = asyncio.create_task(one.poll())
    await taken.wait()
    polling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await polling
    go_on.set()
    monkeypatch.undo()
    await two.join()
    async with asyncio.timeout(10):
        while len(two.positions) < 2:
            await two.poll(wait_ms=200)


async def test_restarted_messages_recall_their_partition(broker: Broker) -> None:
    ids = await partitions(broker)
    await fill(broker, ids[0], 2)
    one = await Member(broker, "one", 1).join(exhausted="stop", max_attempts=1)
    await one.poll()
    failed = Settle("orders", ids[0], 1, (Verdict("retry", 0, 0),))
    ((_, kept),) = (await broker.settle("orders", "billing", [failed])).kept
    assert kept[0].not_before >= 2**61
    assert await broker.redrive("orders", "billing", None) == 1
    reply = await one.poll(wait_ms=5_000)
    assert reply.revoked == (ids[0],) and leases(reply) == []
    assert (await one.poll(giving_up=(ids[0],))).revoked == ()
    await one.hand_over(ids[0])
    assert leases(await one.poll()) == [(0, 0), (1, 1)]


async def test_a_reset_takes_partitions_from_their_holders(broker: Broker) -> None:
    ids = await partitions(broker)
    await fill(broker, ids[0], 2)
    one = await Member(broker, "one", 1).join()
    await one.poll()
    await one.ack(ids[0], 0, 1)
    await broker.reset("orders", "billing", Start(), True)
    assert set((await one.poll()).lost) == set(one.positions)
    one.positions.clear()
    assert leases(await one.poll()) == [(0, 1)]


# ---- what stopped ----


@pytest.mark.parametrize("verb", ["restart_stopped", "skip_stopped", "drop_stopped"])
async def test_a_holder_that_wants_nothing_is_told_to_hand_over_what_was_decided_about(
    broker: Broker, verb: str
) -> None:
    """Its window is full of messages that wait behind the stopped one, and would be so for ever."""
    there, *_ = await partitions(broker)
    await fill(broker, there, 3)
    one = await Member(broker, "one", 1).join(exhausted="stop", max_attempts=1)
    while there not in one.positions or one.positions[there] < 3:
        await one.poll()
    part = Settle("orders", there, one.token, (Verdict("retry", 1, 1, reason="no"),))
    assert not (await broker.settle("orders", "billing", [part])).lost
    assert (await one.poll(messages=0)).revoked == ()
    assert await getattr(broker, verb)("orders", "billing") == 1
    for _ in range(2):  # told again if the reply is lost
        assert (await one.poll(messages=0)).revoked == (there,)
    assert (await one.poll(messages=0, giving_up=(there,))).revoked == ()
    await one.hand_over(there)
    again = {grant.partition_id: grant for grant in (await one.poll()).grants}[there]
    found = [(lease.first, lease.last) for lease in again.leases]
    assert found == ([(0, 0), (1, 1), (2, 2)] if verb == "restart_stopped" else [(0, 0), (2, 2)])
    assert (await one.poll(messages=0)).revoked == ()
