"""The consumer of an ordered group: keys in order, partitions held and given up (R14, R22, R23, I5, I6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from postroom import LeaseLost, Message, Received, StoreBusy, StoreFull, StoreUnavailable, UsageError
from postroom.client.connection import Connection
from postroom.client.consumer.ordered import fetch as ordered
from postroom.clock import ManualClock, SystemClock
from postroom.endpoint.values import PollRequest
from tests.tuned import Tune
from tests.unit.client.client_endpoint import failing, waiting
from tests.unit.client.ordered_endpoint import STOPPED, OrderedEndpoint, Unsettled


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def endpoint(clock: ManualClock) -> OrderedEndpoint:
    made = OrderedEndpoint(clock, partitions=1)
    made.group = replace(made.group, mode="ordered")
    return made


@pytest.fixture
async def mq(endpoint: OrderedEndpoint, clock: ManualClock) -> AsyncIterator[Connection]:
    async with Connection(endpoint, clock=clock) as connection:
        yield connection


async def fill(mq: Connection, keys: str, **settings: Any) -> None:
    """One message for each letter, its value the letter and its number; "-" has no key."""
    await mq.send_many(
        "orders",
        [
            Message(b"%s%d" % (key.encode(), at), key=None if key == "-" else key, **settings)
            for at, key in enumerate(keys)
        ],
    )


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def values(messages: list[Received]) -> str:
    return " ".join(m.value.decode() for m in messages)


def polls(endpoint: OrderedEndpoint) -> list[PollRequest]:
    return [asked for verb, asked in endpoint.calls if verb == "poll" and isinstance(asked, PollRequest)]


async def heartbeat(mq: Connection) -> None:
    await asyncio.to_thread(mq._heartbeat.beat_once)
    await turns()


# ---- keys ----


async def test_poll_hands_out_runs_and_no_second_run_of_a_key(
    mq: Connection, endpoint: OrderedEndpoint
) -> None:
    await fill(mq, "aabac")
    async with mq.consumer("orders", "billing") as consumer:
        first = await consumer.poll(3)
        assert values(first) == "a0 a1 b2"
        assert values(await consumer.poll()) == "c4"
        await consumer.ack(first[:2])
        assert values(await consumer.poll()) == "a3"
    assert endpoint.open_offsets(1) == [2, 3, 4]


async def test_async_for_goes_on_with_a_key_once_its_ack_is_on_its_way(
    mq: Connection, endpoint: OrderedEndpoint
) -> None:
    await fill(mq, "aab")
    gate = asyncio.Event()
    endpoint.on["settle"].append(waiting(gate))
    async with mq.consumer("orders", "billing") as consumer:
        first = await anext(consumer)
        other = await anext(consumer)
        assert values([first, other]) == "a0 b2"  # a1 waits for a0
        waits = asyncio.ensure_future(anext(consumer))
        await turns()
        assert not waits.done()
        acking = asyncio.ensure_future(first.ack())
        assert values([await waits]) == "a1"
        assert not acking.done()
        gate.set()
        await acking


async def test_messages_without_a_key_are_one_key(mq: Connection) -> None:
    await fill(mq, "-a-")
    async with mq.consumer("orders", "billing") as consumer:
        assert values([await anext(consumer), await anext(consumer)]) == "-0 a1"
        assert await consumer.poll(wait=0) == []


async def test_order_partition_is_one_message_at_a_time(mq: Connection, endpoint: OrderedEndpoint) -> None:
    endpoint.group = replace(endpoint.group, order="partition")
    await fill(mq, "abc")
    async with mq.consumer("orders", "billing") as consumer:
        first = await anext(consumer)
        assert await consumer.poll(wait=0) == []
        await first.retry(60)
        assert await consumer.poll(wait=0) == []  # a failing one stops the partition (R22)
        endpoint.clock.advance(60)
        again = await anext(consumer)
        assert (again.value, again.attempt) == (b"a0", 2)
        await again.ack()
        assert values([await anext(consumer)]) == "b1"


async def test_partitions_take_turns(clock: ManualClock) -> None:
    endpoint = OrderedEndpoint(clock, partitions=2)
    endpoint.group = replace(endpoint.group, mode="ordered")
    async with Connection(endpoint, clock=clock) as mq:
        for slot in (0, 1023):
            await mq.send_many("orders", [Message(b"%d" % n, key=str(n)) for n in range(10)], slot=slot)
        async with mq.consumer("orders", "billing") as consumer:
            found = [(await consumer.poll(1))[0].partition for _ in range(10)]
    assert found.count(0) == found.count(1) == 5


# ---- retry, release, dead ----


async def test_a_retried_message_holds_its_key_until_it_is_due(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    await fill(mq, "aab")
    async with mq.consumer("orders", "billing") as consumer:
        first = await anext(consumer)
        await first.retry(60, reason="later")
        assert values(await consumer.poll(wait=0)) == "b2"
        clock.advance(59)
        assert await consumer.poll(wait=0) == []
        polling = asyncio.ensure_future(consumer.poll(wait=30))
        await turns()
        clock.advance(1)
        again = await polling
        assert [(m.value, m.attempt) for m in again] == [(b"a0", 2), (b"a1", 1)]
        await consumer.ack(again)
        with pytest.raises(UsageError, match="handed back"):
            await first.ack()
        assert consumer.in_hand == 1


async def test_a_due_retry_wakes_whoever_waits_without_a_heartbeat() -> None:
    """By the clock of the machine, which nobody moves."""
    endpoint = OrderedEndpoint(SystemClock(), partitions=1)  # type: ignore[arg-type]
    endpoint.group = replace(endpoint.group, mode="ordered")
    async with Connection(endpoint) as mq:
        await fill(mq, "aa")
        async with mq.consumer("orders", "billing") as consumer:
            await (await anext(consumer)).retry("30ms")
            async with asyncio.timeout(5):
                assert values(await consumer.poll(wait=60)) == "a0 a1"


async def test_later_messages_of_a_retried_key_are_taken_back(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    await fill(mq, "abaa")
    async with mq.consumer("orders", "billing") as consumer:
        a0, b1, a2, a3 = await consumer.poll()
        await a2.retry(10)
        for settling in (a3.ack(), a3.retry(), a3.extend()):
            with pytest.raises(LeaseLost, match="taken back"):
                await settling
        with pytest.raises(LeaseLost, match="taken back") as caught:
            await consumer.ack([a0, b1, a3])
        assert caught.value.details["offsets"] == [3]
        assert endpoint.open_offsets(1) == [2, 3]  # a0 and b1 were acked all the same
        clock.advance(10)
        again = await consumer.poll()
        assert [(m.value, m.attempt) for m in again] == [(b"a2", 2), (b"a3", 1)]
        await consumer.ack(again)
    assert endpoint.open_offsets(1) == []


async def test_what_is_retried_together_is_not_taken_back(mq: Connection, endpoint: OrderedEndpoint) -> None:
    await fill(mq, "aaa")
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        runs = ordered.runs_of(messages[:2])
        assert consumer._settler.submit(runs, "retry") is not None
        again = await consumer.poll()
        assert [(m.value, m.attempt) for m in again] == [(b"a0", 2), (b"a1", 2), (b"a2", 1)]


async def test_a_released_message_comes_again_without_counting(mq: Connection, clock: ManualClock) -> None:
    await fill(mq, "aa")
    async with mq.consumer("orders", "billing") as consumer:
        await (await anext(consumer)).release()
        first = await anext(consumer)
        assert (first.value, first.attempt) == (b"a0", 1)
        await first.release(5)
        assert await consumer.poll(wait=0) == []
        clock.advance(5)
        assert values(await consumer.poll()) == "a0 a1"


async def test_dead_and_exhausted_messages_let_their_key_go_on(
    mq: Connection, endpoint: OrderedEndpoint
) -> None:
    endpoint.group = replace(endpoint.group, max_attempts=1)
    await fill(mq, "aaa")
    async with mq.consumer("orders", "billing") as consumer:
        await (await anext(consumer)).dead("hopeless")
        second = await anext(consumer)
        await second.retry(60)
        assert values([await anext(consumer)]) == "a2"
    assert endpoint.dead == [0, 1]


async def test_a_stopped_message_holds_its_key_until_it_is_restarted(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    endpoint.group = replace(endpoint.group, max_attempts=1, exhausted="stop")
    await fill(mq, "aab")
    async with mq.consumer("orders", "billing") as consumer:
        await (await anext(consumer)).retry()
        assert values(await consumer.poll()) == "b2"
        clock.advance(10**9)  # b2 is beyond max_handling: it may come again, before or after
        assert await consumer.poll(wait=0) == []
        assert list(endpoint.kept[1].parked) == [1]  # what waits behind it waits in the store
        endpoint.restart(1)
        seen = ""
        while len(seen) < 4:
            again = [message for message in await consumer.poll(wait=30) if message.key == b"a"]
            seen += values(again)
            await consumer.ack(again)
        assert seen == "a0a1"
    assert endpoint.open_offsets(1) == [2]


async def test_a_verdict_that_was_not_stored_leaves_the_message_out(
    mq: Connection, endpoint: OrderedEndpoint
) -> None:
    await fill(mq, "aab")
    endpoint.on["settle"].append(failing(UsageError("no")))
    endpoint.on["settle"].append(failing(UsageError("no")))
    async with mq.consumer("orders", "billing") as consumer:
        a0, a1, b2 = await consumer.poll()
        with pytest.raises(UsageError):
            await a0.ack()
        with pytest.raises(UsageError):
            await a0.retry()
        assert await consumer.poll(wait=0) == []  # a1 was taken back, and waits for a0
        with pytest.raises(LeaseLost):
            await a1.ack()
        await a0.ack()
        assert values(await consumer.poll()) == "a1"
        await b2.ack()


# ---- what is asked for (I6) ----


async def test_a_poll_names_the_partitions_and_what_is_expected_next(
    mq: Connection, endpoint: OrderedEndpoint
) -> None:
    await fill(mq, "abcd")
    async with mq.consumer("orders", "billing", window=4) as consumer:
        messages = await consumer.poll()
        await consumer.ack(messages)
        await turns()
        assert [p.positions for p in polls(endpoint)] == [(), ((1, 4),)]
        assert len({p.token for p in polls(endpoint)}) == 1
        assert [p.empty_handed for p in polls(endpoint)] == [True, True]


async def test_what_a_lost_reply_had_comes_again(mq: Connection, endpoint: OrderedEndpoint) -> None:
    await fill(mq, "abab")
    endpoint.after["poll"].append(failing(StoreUnavailable("the reply is lost")))
    async with mq.consumer("orders", "billing", window=2) as consumer:
        seen = ""
        for _ in range(2):
            messages = await consumer.poll()
            seen += values(messages) + " "
            endpoint.after["poll"].append(failing(StoreBusy("lost once more")))
            await consumer.ack(messages)
        assert seen.split() == ["a0", "b1", "a2", "b3"]
    assert endpoint.open_offsets(1) == []


async def test_a_full_window_asks_only_whether_partitions_are_to_be_shared(
    mq: Connection, endpoint: OrderedEndpoint, tune: Tune
) -> None:
    tune(client={"give_up_check_s": 0.01})
    await fill(mq, "abcdef")
    async with mq.consumer("orders", "billing", window=2) as consumer:
        await consumer.poll()
        for _ in range(2):
            endpoint.polled.clear()
            await endpoint.polled.wait()
        assert [p.messages for p in polls(endpoint)[:3]] == [2, 0, 0]
        assert consumer.in_hand == 2


async def test_a_suspect_is_settled_before_more_is_asked_for(
    mq: Connection, endpoint: OrderedEndpoint
) -> None:
    await fill(mq, "ab")
    endpoint.kept[1].cursor = 1
    endpoint.kept[1].unsettled[0] = Unsettled(attempt=2, received=False, alone=True)
    async with mq.consumer("orders", "billing", window=1) as consumer:
        (first,) = await consumer.poll()
        await turns()
        assert first.attempt == 2 and len(polls(endpoint)) == 1
        await first.retry(60)  # it waits, and is not handled
        assert values(await consumer.poll()) == "b1"
        assert polls(endpoint)[1].empty_handed


async def test_a_suspect_is_handled_at_once_though_the_clock_here_is_behind(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    """I14: its time is when its last holder was gone. One that was released because of it was never counted,
    and innocents were instead: seed 200761 of the simulator."""
    await fill(mq, "ab")
    endpoint.kept[1].cursor = 1
    endpoint.kept[1].unsettled[0] = Unsettled(2, clock.now_ms() + 20, received=False, alone=True)
    async with mq.consumer("orders", "billing", window=1) as consumer:
        (suspect,) = await consumer.poll()
        assert suspect.value == b"a0" and not endpoint.settled
        await suspect.ack()


async def test_a_suspect_is_handled_while_nothing_else_is(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    await fill(mq, "abcb")
    endpoint.kept[1].cursor = 2
    waiting_retry = Unsettled(2, clock.now_ms() + 5_000, received=False)
    endpoint.kept[1].unsettled = {0: waiting_retry, 1: Unsettled(2, received=False, alone=True)}
    async with mq.consumer("orders", "billing", window=2) as consumer:
        (suspect,) = await consumer.poll()
        assert suspect.value == b"b1"
        clock.advance(5)
        assert await consumer.poll(wait="20ms") == []  # a0 is due, and waits for the suspect
        await suspect.ack()
        assert values(await consumer.poll(1)) == "a0"


async def test_a_suspect_is_handled_while_no_other_partition_is(clock: ManualClock) -> None:
    endpoint = OrderedEndpoint(clock, partitions=2)
    endpoint.group = replace(endpoint.group, mode="ordered")
    async with Connection(endpoint, clock=clock) as mq:
        await mq.send_many("orders", [Message(b"a0", key="a")], slot=0)
        await mq.send_many("orders", [Message(b"b0", key="b")], slot=1023)
        waiting_retry = Unsettled(2, clock.now_ms() + 5_000, received=False)
        endpoint.kept[1].cursor = endpoint.kept[2].cursor = 1
        endpoint.kept[1].unsettled = {0: Unsettled(2, received=False, alone=True)}
        endpoint.kept[2].unsettled = {0: waiting_retry}
        async with mq.consumer("orders", "billing") as consumer:
            (suspect,) = await consumer.poll()
            assert suspect.value == b"a0"
            clock.advance(5)
            assert await consumer.poll(wait="20ms") == []
            await suspect.ack()
            assert values(await consumer.poll()) == "b0"


async def test_a_suspect_is_not_begun_before_the_rest_is_settled(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    await fill(mq, "ab")
    endpoint.kept[1].cursor = 1
    endpoint.kept[1].unsettled = {0: Unsettled(2, clock.now_ms() + 5_000, received=False)}
    gate = asyncio.Event()
    async with mq.consumer("orders", "billing") as consumer:
        await consumer.ack(await consumer.poll())  # b1; a0 waits
        endpoint.after["poll"].append(waiting(gate))  # asked with empty hands, answered late
        endpoint.kept[1].unsettled[2] = Unsettled(2, received=False, alone=True)
        endpoint.kept[1].cursor = 3
        await mq.send("orders", b"c2", key="c")
        clock.advance(5)
        (first,) = await consumer.poll(1)
        assert first.value == b"a0"
        gate.set()
        await turns()
        assert await consumer.poll(wait="20ms") == []
        await first.ack()
        assert values(await consumer.poll()) == "c2"


async def test_what_of_a_suspect_cannot_begin_is_released(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    await fill(mq, "aabc")
    endpoint.kept[1].cursor = 2
    waiting_retry = Unsettled(2, clock.now_ms() + 5_000, received=False)
    endpoint.kept[1].unsettled = {0: waiting_retry, 1: Unsettled(2, received=False, alone=True)}
    async with mq.consumer("orders", "billing") as consumer:
        assert values(await consumer.poll()) == "b2 c3"
        found = [(v.kind, v.first) for parts in endpoint.settled for part in parts for v in part.verdicts]
        assert ("release", 1) in found
        clock.advance(5)
        assert values(await consumer.poll()) == "a0 a1"


async def test_a_blocked_key_does_not_starve_the_others(mq: Connection, endpoint: OrderedEndpoint) -> None:
    """What waits behind a retry does not count towards the window."""
    await fill(mq, "a" * 50 + "b" + "a" * 50 + "c")
    async with mq.consumer("orders", "billing", window=10) as consumer:
        await (await anext(consumer)).retry(3600)
        others = [await anext(consumer), await anext(consumer)]
        assert values(others) == "b50 c101"
        assert consumer.in_hand == 102
        assert max(p.messages for p in polls(endpoint)) == 10


async def test_what_waits_is_bounded_too(
    mq: Connection, endpoint: OrderedEndpoint, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    monkeypatch.setattr(ordered, "_MOST_WAITING", 30)
    await fill(mq, "a" * 100 + "b")
    async with mq.consumer("orders", "billing", window=10) as consumer:
        await (await anext(consumer)).retry(3600)
        assert await consumer.poll(wait="50ms") == []
        assert 30 <= consumer.in_hand <= 40
        clock.advance(3600)
        seen = []
        while len(seen) < 101:
            messages = await consumer.poll()
            seen += messages
            await consumer.ack(messages)
        assert values(seen[-1:]) == "b100"


# ---- leases (I5, I14, I16) ----


async def test_nothing_is_handed_out_after_the_lease(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    await fill(mq, "ab")
    async with mq.consumer("orders", "billing", lease=10) as consumer:
        first = await anext(consumer)
        clock.advance(11)
        endpoint.take_over(1)
        assert await consumer.poll(wait=0) == []
        await turns()
        assert consumer.in_hand == 0
        with pytest.raises(LeaseLost):
            await first.ack()


async def test_a_lease_that_passed_is_renewed_if_nobody_else_has_the_partition(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    await fill(mq, "ab")
    async with mq.consumer("orders", "billing", lease=10) as consumer:
        first = await anext(consumer)
        clock.advance(11)
        assert values(await consumer.poll()) == "b1"
        await first.ack()


async def test_what_cannot_be_renewed_is_not_handed_out_before_it_is(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    honest = endpoint.beat

    def away(_: object) -> Any:
        raise StoreUnavailable("away")

    await fill(mq, "ab")
    async with mq.consumer("orders", "billing", lease=10) as consumer:
        await anext(consumer)
        endpoint.beat = away  # type: ignore[method-assign]
        clock.advance(11)
        assert await consumer.poll(wait=0) == []
        polling = asyncio.ensure_future(consumer.poll(wait=30))
        await turns()
        endpoint.beat = honest  # type: ignore[method-assign]
        await heartbeat(mq)
        assert values(await polling) == "b1"


@pytest.mark.parametrize("told_by", ["heartbeat", "settling", "poll"])
async def test_a_lost_partition_is_lost_as_a_whole(
    mq: Connection, endpoint: OrderedEndpoint, told_by: str
) -> None:
    await fill(mq, "abcd")
    async with mq.consumer("orders", "billing", window=4) as consumer:
        a0, b1 = await consumer.poll(2)
        endpoint.take_over(1)
        if told_by == "heartbeat":
            await heartbeat(mq)
        elif told_by == "settling":
            with pytest.raises(LeaseLost):
                await a0.ack()
        else:
            consumer._fetcher._asked_at = -1e9  # type: ignore[attr-defined]
            consumer._in_flight.changed.set()
            await turns()
        assert consumer.in_hand == 0
        assert await consumer.poll(wait=0) == []
        with pytest.raises(LeaseLost, match="safe to repeat"):
            await b1.ack()
        endpoint.take_over(1, token=0)  # the other one hands it over
        endpoint.news.set()
        assert values(await consumer.poll()) == "a0 b1 c2 d3"


async def test_a_hung_handler_is_retried_and_others_go_on(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    await fill(mq, "aabb")
    async with mq.consumer("orders", "billing", lease=10, max_handling=60) as consumer:
        a0, b2 = await anext(consumer), await anext(consumer)
        for _ in range(6):
            clock.advance(9)
            await heartbeat(mq)
        await b2.extend()
        clock.advance(9)
        await heartbeat(mq)
        with pytest.raises(LeaseLost, match="max_handling"):
            await a0.ack()
        await b2.ack()
        assert values(await consumer.poll()) == "b3"
        clock.advance(1)
        again = await consumer.poll()
        assert [(m.value, m.attempt) for m in again] == [(b"a0", 2), (b"a1", 1)]


async def test_a_loop_that_hangs_loses_the_partition(
    mq: Connection, endpoint: OrderedEndpoint, clock: ManualClock
) -> None:
    await fill(mq, "ab")
    async with mq.consumer("orders", "billing", lease=10, max_handling=60) as consumer:
        await consumer.poll()
        held = consumer._in_flight.held(clock.now_ms() + 70_000, 60_000)
        assert not held  # nobody retried it: the loop does not run
        assert consumer._in_flight.held(clock.now_ms() + 69_000, 60_000)


# ---- giving up partitions (R14) ----


async def test_a_revoked_partition_is_handed_over_once_nothing_is_at_work(
    mq: Connection, endpoint: OrderedEndpoint, tune: Tune
) -> None:
    tune(client={"give_up_check_s": 0.01, "give_up_poll_ms": 5})
    await fill(mq, "abcd")
    gate = asyncio.Event()
    async with mq.consumer("orders", "billing", member="one") as consumer:
        first, second = await consumer.poll(2)
        endpoint.allowed["one"] = set()
        endpoint.news.set()
        await turns()
        assert await consumer.poll(wait=0) == [] and endpoint.handed_over == []
        await first.ack()
        endpoint.on["settle"].append(waiting(gate))
        acking = asyncio.ensure_future(second.ack())
        await asyncio.sleep(0.05)
        assert endpoint.handed_over == []  # its ack is not stored yet
        gate.set()
        await acking
        await endpoint.gave_up.wait()
        assert consumer.in_hand == 0 and endpoint.open_offsets(1) == [2, 3]
        endpoint.allowed["one"] = {1}
        endpoint.news.set()
        again = await consumer.poll()
        assert [(m.value, m.attempt) for m in again] == [(b"c2", 1), (b"d3", 1)]


async def test_a_revoked_partition_is_handed_over_after_a_lease_at_the_latest(
    mq: Connection, endpoint: OrderedEndpoint, tune: Tune
) -> None:
    tune(client={"give_up_check_s": 0.01})
    await fill(mq, "ab")
    async with mq.consumer("orders", "billing", member="one", lease="100ms") as consumer:
        (first, _) = await consumer.poll()
        endpoint.allowed["one"] = set()
        endpoint.news.set()
        await endpoint.gave_up.wait()
        with pytest.raises(LeaseLost):
            await first.ack()


async def test_a_revocation_that_is_taken_back_goes_on(
    mq: Connection, endpoint: OrderedEndpoint, tune: Tune
) -> None:
    """Whoever was to get the partition has left again meanwhile."""
    tune(client={"give_up_check_s": 0.01})
    await fill(mq, "ab")
    async with mq.consumer("orders", "billing", member="one") as consumer:
        first = await anext(consumer)
        endpoint.allowed["one"] = set()
        endpoint.news.set()
        await turns()
        assert await consumer.poll(wait=0) == []
        del endpoint.allowed["one"]
        await mq.send("orders", b"c2", key="c")
        assert values(await consumer.poll()) == "b1 c2"
        await first.ack()
    assert endpoint.handed_over == [1]  # only when it closed


async def test_a_partition_taken_by_a_reply_that_was_lost_can_be_given_up(
    mq: Connection, endpoint: OrderedEndpoint
) -> None:
    await fill(mq, "ab")
    taken = asyncio.Event()

    async def lost() -> None:
        endpoint.allowed["one"] = set()
        taken.set()
        raise StoreUnavailable("the reply is lost")

    endpoint.after["poll"].append(lost)
    async with mq.consumer("orders", "billing", member="one"):
        await taken.wait()
        await endpoint.gave_up.wait()
        assert endpoint.kept[1].token == 0


async def test_polls_say_what_a_failed_hand_over_left(
    mq: Connection, endpoint: OrderedEndpoint, tune: Tune
) -> None:
    """Or each is answered at once that it is revoked: on a full disk, thousands of times a second."""
    tune(client={"give_up_check_s": 0.01, "give_up_poll_ms": 5})
    await fill(mq, "a")
    async with mq.consumer("orders", "billing", member="one") as consumer:
        (message,) = await consumer.poll()
        endpoint.on["hand_over"] += [failing(StoreFull("full"))] * 3
        endpoint.allowed["one"] = set()
        endpoint.news.set()
        await message.ack()
        await endpoint.gave_up.wait()
        left = [request.giving_up for request in polls(endpoint) if not request.positions]
        assert (1,) in left


async def test_a_hand_over_that_failed_is_repeated(
    mq: Connection, endpoint: OrderedEndpoint, tune: Tune
) -> None:
    tune(client={"give_up_check_s": 0.01})
    await fill(mq, "ab")
    endpoint.on["hand_over"].append(failing(StoreBusy("busy")))
    async with mq.consumer("orders", "billing", member="one") as consumer:
        await consumer.ack(await consumer.poll())
        endpoint.allowed["one"] = set()
        endpoint.news.set()
        await endpoint.gave_up.wait()


async def test_closing_hands_over_at_once_and_settles_nothing(
    mq: Connection, endpoint: OrderedEndpoint
) -> None:
    await fill(mq, "abc")
    async with mq.consumer("orders", "billing") as consumer:
        first, _, _ = await consumer.poll()
        await first.ack()
    assert endpoint.handed_over == [1] and endpoint.open_offsets(1) == [1, 2]
    assert [len(part.verdicts) for parts in endpoint.settled for part in parts] == [1]
    assert endpoint.members == set()


async def test_offsets_without_a_batch_are_asked_for_again(mq: Connection, endpoint: OrderedEndpoint) -> None:
    await mq.send("orders", b"a0", key="a")
    await mq.send("orders", b"b1", key="b")
    hidden = endpoint.partitions[1].batches.pop(1)
    endpoint.kept[1].cursor = 2
    endpoint.kept[1].unsettled = {0: Unsettled(received=False), 1: Unsettled(received=False)}
    async with mq.consumer("orders", "billing") as consumer:
        await endpoint.gave_up.wait()
        endpoint.partitions[1].batches.append(hidden)
        assert values(await consumer.poll()) == "a0 b1"


# ---- acks (R16) ----


async def test_ack_up_to_takes_what_was_handed_out(mq: Connection, endpoint: OrderedEndpoint) -> None:
    await fill(mq, "abac")
    async with mq.consumer("orders", "billing") as consumer:
        handed = [await anext(consumer) for _ in range(3)]
        assert values(handed) == "a0 b1 c3"
        await consumer.ack(up_to=handed[2])
        assert endpoint.open_offsets(1) == [2]  # it was not handed out
        assert values(await consumer.poll()) == "a2"


async def test_after(mq: Connection, endpoint: OrderedEndpoint) -> None:
    await fill(mq, "aab")
    seen: list[Received] = []
    async with mq.consumer("orders", "billing", ack="after") as consumer:
        async for message in consumer:
            seen.append(message)
            if len(seen) == 3:
                break
    assert sorted(values(seen).split()) == ["a0", "a1", "b2"]
    assert endpoint.open_offsets(1) == []


async def test_after_retries_what_raised_and_hands_over_the_rest(
    mq: Connection, endpoint: OrderedEndpoint
) -> None:
    await fill(mq, "aab")

    async def body() -> None:
        async with mq.consumer("orders", "billing", ack="after") as consumer:
            async for _ in consumer:
                raise KeyError

    with pytest.raises(KeyError):
        await body()
    assert endpoint.kept[1].unsettled[0].attempt == 2
    assert endpoint.handed_over == [1] and endpoint.open_offsets(1) == [0, 1, 2]


async def test_on_delivery(mq: Connection, endpoint: OrderedEndpoint) -> None:
    await fill(mq, "aabc")
    async with mq.consumer("orders", "billing", ack="on_delivery") as consumer:
        assert values(await consumer.poll(3)) == "a0 a1 b2"
        assert endpoint.open_offsets(1) == [] and endpoint.kept[1].cursor == 3
        assert values([await anext(consumer)]) == "c3"
    assert endpoint.count("settle") == 0 and endpoint.handed_over == [1]


async def test_a_group_that_is_ordered_already_need_not_be_asked_for(mq: Connection) -> None:
    async with mq.consumer("orders", "billing") as consumer:
        assert type(consumer._fetcher) is ordered.OrderedFetcher


def test_what_stopped_means_is_agreed_upon() -> None:
    assert ordered.FAR == STOPPED
