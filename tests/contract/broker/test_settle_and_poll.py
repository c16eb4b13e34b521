"""Acks that go with the next poll: one request, and one transaction where the poll finds something."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from postroom import Connection, Message
from postroom.clock import ManualClock
from postroom.endpoint.values import PollReply, PollRequest, Settle, SettleReply, Verdict, released
from postroom.errors import StoreBusy, UnknownGroup
from postroom.model.delivery.delivery import Kind, Settlement
from postroom.model.policy.rate import group_rate
from postroom.model.policy.settings import GroupWish
from tests.contract.brokers import broker_of
from tests.contract.stores import everywhere


class Member:
    """Polls by hand, and keeps what it was told."""

    def __init__(self, mq: Connection) -> None:
        self.mq, self.endpoint, self.told = mq, mq._endpoint, asyncio.Queue[SettleReply]()

    def request(self, *, wait_ms: int = 0, messages: int = 1, acks_wait_ms: int = 0) -> PollRequest:
        token = secrets.randbits(62) + 1
        return PollRequest(
            "orders", "billing", "m", token, messages, 1 << 20, wait_ms, True, acks_wait_ms=acks_wait_ms
        )

    async def poll(self, **how: Any) -> list[Settle]:
        """Poll, and return the acks of what came."""
        request = self.request(**how)
        return acks(request, await self.endpoint.poll(request))

    async def settle_and_poll(self, parts: list[Settle], request: PollRequest) -> PollReply:
        return await self.endpoint.settle_and_poll("orders", "billing", parts, request, self.told.put_nowait)

    async def unsettled(self) -> tuple[int, int]:
        lag = (await self.mq.lag("orders", "billing")).total
        return lag.messages, lag.unsettled


def acks(request: PollRequest, reply: PollReply) -> list[Settle]:
    return [
        Settle(
            g.topic, g.partition_id, request.token, tuple(Verdict("ack", x.first, x.last) for x in g.leases)
        )
        for g in reply.grants
    ]


def spans(reply: PollReply) -> list[tuple[int, int]]:
    return [(lease.first, lease.last) for grant in reply.grants for lease in grant.leases]


@pytest.fixture
async def member(mq: Connection) -> Member:
    await mq.create_topic("orders", partitions=1)
    await mq.create_group("orders", "billing", lease="30s")
    await mq._endpoint.subscribe("orders", "billing", GroupWish(), "m", "c")
    return Member(mq)


async def filled(member: Member, count: int) -> None:
    await member.mq.send_many("orders", [Message(b"%d" % i) for i in range(count)])


@everywhere
async def test_acks_and_what_comes_next_are_one_transaction(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(member, 3)
    done = await member.poll()
    made: list[Any] = []
    progress = broker_of(member.mq).store.progress
    visit = progress.visit
    monkeypatch.setattr(progress, "visit", lambda group, some: made.append(some) or visit(group, some))
    monkeypatch.setattr(progress, "settle", None)
    for following in (1, 2):
        request = member.request()
        reply = await member.settle_and_poll(done, request)
        assert (spans(reply), member.told.get_nowait()) == ([(following, following)], SettleReply())
        ((one,),) = made
        acked = [Settlement(Kind.ACK, following - 1, following - 1)]
        assert one.settles == [(done[0].token, acked)] and one.ask.token == request.token
        made.clear()
        done = acks(request, reply)
    assert await member.unsettled() == (1, 1)


@everywhere
async def test_acks_and_messages_of_several_partitions_are_one_transaction(
    mq: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mq.create_topic("orders", partitions=3)
    await mq.create_group("orders", "billing", lease="30s")
    member = Member(mq)
    progress, made, done = broker_of(mq).store.progress, [], []
    visit = progress.visit
    for _ in range(3):
        await mq.send_many("orders", [Message(b"x", key=f"k{number}") for number in range(30)])
        if done:
            monkeypatch.setattr(
                progress, "visit", lambda group, some: made.append(some) or visit(group, some)
            )
            request = member.request(messages=100)
            done = acks(request, await member.settle_and_poll(done, request))
            monkeypatch.undo()
            assert [(one.settles != (), one.ask is not None) for one in made.pop()] == [(True, True)] * 3
            assert member.told.get_nowait() == SettleReply() and not made
        else:
            done = await member.poll(messages=100)
        assert len({one.partition_id for one in done}) == 3
        assert await member.unsettled() == (30, 30)
    assert not (await member.settle_and_poll(done[:2], member.request())).grants
    left = sum(verdict.last - verdict.first + 1 for verdict in done[2].verdicts)
    assert await member.unsettled() == (left, left)


@everywhere
async def test_acks_that_may_wait_are_stored_with_the_next_messages(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(member, 1)
    done = await member.poll(wait_ms=30_000, messages=9)  # more than there are: nothing is left
    monkeypatch.setattr(broker_of(member.mq)._polling, "_acks_wait_ms", 60_000)
    request = member.request(wait_ms=30_000, acks_wait_ms=60_000)
    polling = asyncio.ensure_future(member.settle_and_poll(done, request))
    queues = broker_of(member.mq)._polling._queues._known
    async with asyncio.timeout(20):
        while not any(queue._line for queue in queues.values()):  # noqa: ASYNC110 - a queue has no event
            await asyncio.sleep(0)  # until it waits
    assert member.told.empty() and await member.unsettled() == (1, 1)
    await filled(member, 1)
    assert spans(await asyncio.wait_for(polling, 20)) == [(1, 1)]
    assert member.told.get_nowait() == SettleReply() and await member.unsettled() == (1, 1)


@everywhere
async def test_acks_wait_no_longer_than_they_may(member: Member) -> None:
    """Whatever their sender says: the broker bounds it."""
    await filled(member, 1)
    done = await member.poll()
    request = member.request(wait_ms=60_000, acks_wait_ms=50_000)
    polling = asyncio.ensure_future(member.settle_and_poll(done, request))
    assert await asyncio.wait_for(member.told.get(), 20) == SettleReply()
    assert not polling.done() and await member.unsettled() == (0, 0)
    await filled(member, 1)
    assert spans(await asyncio.wait_for(polling, 20)) == [(1, 1)]


async def test_only_acks_that_nobody_waits_for_may_wait(
    mq: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(20)])
    real, waits = mq._endpoint.settle_and_poll, []

    def noted(topic: str, group: str, parts: Any, request: PollRequest, settled: Any) -> Any:
        waits.append(request.acks_wait_ms)
        return real(topic, group, parts, request, settled)

    monkeypatch.setattr(mq._endpoint, "settle_and_poll", noted)
    for ack, group in (("manual", "one"), ("after", "two")):
        count = 0
        async with mq.consumer("orders", group=group, start="earliest", window=1, ack=ack) as consumer:
            async for message in consumer:
                if ack == "manual":
                    await message.ack()
                count += 1
                if count == 20:
                    break
        assert waits and {*waits} == ({0} if ack == "manual" else {5})
        waits.clear()


@everywhere
async def test_acks_do_not_wait_for_messages(member: Member) -> None:
    await filled(member, 1)
    request = member.request(wait_ms=30_000)
    done = acks(request, await member.endpoint.poll(request))
    polling = asyncio.ensure_future(member.settle_and_poll(done, member.request(wait_ms=30_000)))
    assert await asyncio.wait_for(member.told.get(), 20) == SettleReply()
    assert not polling.done() and await member.unsettled() == (0, 0)
    await filled(member, 1)
    assert spans(await asyncio.wait_for(polling, 20)) == [(1, 1)]
    assert member.told.empty()


@everywhere
async def test_what_is_in_other_hands_is_told_and_the_poll_goes_on(
    member: Member, clock: ManualClock
) -> None:
    await filled(member, 2)
    late = await member.poll()
    clock.advance(31)
    again = await member.poll()
    assert again[0].verdicts[0].first == 0
    reply = await member.settle_and_poll(late, member.request())
    assert spans(reply) == [(1, 1)]
    assert member.told.get_nowait().lost == ((late[0], ((0, 0),)),)


@everywhere
async def test_it_may_be_repeated_if_its_answer_was_lost(member: Member) -> None:
    """I6, I7: the acks are harmless, and what was handed out is handed out again."""
    await filled(member, 3)
    done, request = await member.poll(), member.request()
    first = await member.settle_and_poll(done, request)
    again = await member.settle_and_poll(done, replace(request, repeated=True))
    assert spans(first) == spans(again) == [(1, 1)]
    assert [member.told.get_nowait() for _ in range(2)] == [SettleReply(), SettleReply()]


async def test_nothing_is_polled_if_the_acks_cannot_be_stored(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(member, 2)
    done = await member.poll(messages=2)

    def busy(*_: Any, **__: Any) -> None:
        raise StoreBusy("busy")

    for verb in ("visit", "poll"):
        monkeypatch.setattr(broker_of(member.mq).store.progress, verb, busy)
    with pytest.raises(StoreBusy):
        await member.settle_and_poll(done, member.request(wait_ms=60_000))
    monkeypatch.undo()
    assert member.told.empty() and await member.unsettled() == (2, 2)
    assert not (await member.settle_and_poll(done, member.request())).grants
    assert await member.unsettled() == (0, 0)


async def test_an_error_of_the_poll_comes_after_the_acks_are_told(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(member, 1)
    done = await member.poll()
    polling = asyncio.ensure_future(member.settle_and_poll(done, member.request(wait_ms=30_000)))
    await asyncio.wait_for(member.told.get(), 20)
    await member.mq.delete_group("orders", "billing", force=True)
    with pytest.raises(UnknownGroup):
        await asyncio.wait_for(polling, 20)


@everywhere
async def test_verdicts_that_are_no_acks_go_before_the_poll(member: Member) -> None:
    await filled(member, 2)
    held = await member.poll()
    retry = [replace(held[0], verdicts=(Verdict("retry", 0, 0, delay_ms=60_000),))]
    assert spans(await member.settle_and_poll(retry, member.request())) == [(1, 1)]
    assert member.told.get_nowait() == SettleReply()
    assert await member.unsettled() == (2, 2)


async def test_acks_of_a_group_that_is_paused_or_over_its_rate_are_stored(member: Member) -> None:
    """I17: limits hold up what is handed out, and never acks."""
    await filled(member, 4)
    for hold_up in (
        lambda: member.mq.pause("orders", "billing"),
        lambda: member.endpoint.set_rate(group_rate("orders", "billing", 0.001)),
    ):
        done = await member.poll()
        await hold_up()
        polling = asyncio.ensure_future(member.settle_and_poll(done, member.request(wait_ms=30_000)))
        assert await asyncio.wait_for(member.told.get(), 20) == SettleReply()
        await member.mq.resume("orders", "billing")
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


@everywhere
async def test_a_cancelled_one_gives_back_what_it_was_handed(member: Member) -> None:
    await filled(member, 40)
    for _ in range(10):  # whenever that is
        request = member.request()
        done = acks(request, await member.endpoint.poll(request))
        following = member.request()
        polling = asyncio.ensure_future(member.settle_and_poll(done, following))
        for _ in range(secrets.randbelow(5)):
            await asyncio.sleep(0)
        polling.cancel()
        for one in await asyncio.gather(polling, return_exceptions=True):
            if isinstance(one, PollReply):
                await member.endpoint.settle("orders", "billing", released(following, one.grants))
        await member.endpoint.settle("orders", "billing", done)
    left: list[Settle] = []
    while sum(v.last - v.first + 1 for one in left for v in one.verdicts) < 30:
        found = await member.poll(wait_ms=30_000, messages=100)
        assert found, "it waits for its lease to end"
        left += found


@everywhere
async def test_partitions_take_turns_however_acks_come(mq: Connection) -> None:
    """Acks of a partition do not make it the first to be asked."""
    await mq.create_topic("orders", partitions=2)
    await mq.create_group("orders", "billing")
    member = Member(mq)
    keys = [f"k{number}" for number in range(40)]
    await mq.send_many("orders", [Message(b"x", key=key) for key in keys])
    done, seen = await member.poll(), []
    while done:
        seen.append(done[0].partition_id)
        request = member.request()
        done = acks(request, await member.settle_and_poll(done, request))
    changes = sum(one != other for one, other in pairwise(seen))
    assert len(seen) == 40 and len({*seen}) == 2 and changes >= 20
    assert await member.unsettled() == (0, 0)


async def test_a_consumer_acks_with_its_polls(mq: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message at a time, its window as small as can be: one request for each."""
    await mq.create_topic("orders", partitions=1)
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(20)])
    asked: list[str] = []
    for name in ("settle", "settle_and_poll"):
        real = getattr(mq._endpoint, name)
        monkeypatch.setattr(mq._endpoint, name, _noted(asked, name, real))
    got = []
    async with mq.consumer("orders", group="billing", start="earliest", window=1) as consumer:
        async for message in consumer:
            await message.ack()
            got.append(message.value)
            if len(got) == 20:
                break
    assert got == [b"%d" % i for i in range(20)]
    assert asked.count("settle_and_poll") >= 19
    assert (await mq.lag("orders", "billing")).total.messages == 0


def _noted(asked: list[str], name: str, real: Any) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        asked.append(name)
        return real(*args, **named)

    return call
