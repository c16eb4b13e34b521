"""Ordered groups through the SDK (R14, R22, R23, I5, I6, I10): keys in order whatever happens to members.

Time is moved, never waited for, except where processes are killed. The ledger knows only what was sent and
what members began and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import Connection, Consumer, GroupConflict, LeaseLost, Message, Received, StoreUnavailable
from postroom.clock import ManualClock
from postroom.endpoint.values import PollReply, PollRequest
from tests.contract.stores import Open, everywhere

LEASE = 30


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=4)
    await connection.create_group("orders", "billing", mode="ordered", lease=LEASE)
    return connection


async def send(mq: Connection, keys: str, start: int = 0) -> None:
    """One message for each letter, its value the letter and its number; "-" has no key."""
    for at, key in enumerate(keys):
        await mq.send("orders", b"%s%d" % (key.encode(), start + at), key=None if key == "-" else key)


def values(messages: list[Received]) -> list[str]:
    return [m.value.decode() for m in messages]


async def take(consumer: Consumer, count: int, *, ack: bool = True) -> list[Received]:
    found: list[Received] = []
    while len(found) < count:
        messages = await consumer.poll(wait=20)
        assert messages, f"only {values(found)} of {count} came"
        found += messages
        if ack:
            await consumer.ack(messages)
    return found


async def holders(mq: Connection, group: str = "billing") -> list[str]:
    return [lag.holder for lag in (await mq.lag("orders", group)).partitions]


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


async def settle_down(mq: Connection, share: dict[str, int]) -> None:
    """Wait until each member holds so many partitions."""

    async def settled() -> bool:
        held = await holders(mq)
        return {name: held.count(name) for name in share} == share

    await until(settled)


async def crash(mq: Connection, consumer: Consumer) -> None:
    """As if its process were gone: it asks no more, and its heart has stopped."""
    assert consumer._fetching is not None
    consumer._fetcher.clear()
    mq._heartbeat.remove(consumer._heart)
    task, consumer._fetching = consumer._fetching, None
    await asyncio.sleep(0.05)  # a poll under way is answered, and nobody hears it
    await postroom.tasks.end((task,))
    mq._consumers.remove(consumer)


class Ledger:
    """What was begun and ended, by key."""

    def __init__(self) -> None:
        self.begun: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, set[int]] = defaultdict(set)
        self.at_work: dict[str, int] = {}

    def begin(self, message: Received) -> tuple[str, int]:
        value = message.value.decode()
        key, number = value.rstrip("0123456789"), int(value.lstrip("abcdefghijklmnopqrstuvwxyz-"))
        assert key not in self.at_work, f"{value} begins while {key}{self.at_work[key]} is at work"
        earlier = {n for n in self.sent[key] if n < number} - self.ended[key]
        assert not earlier, f"{value} begins before {earlier} ended"
        self.begun[key].append(number)
        self.at_work[key] = number
        return key, number

    def end(self, work: tuple[str, int], *, done: bool) -> None:
        key, number = work
        del self.at_work[key]
        if done:
            self.ended[key].add(number)

    sent: dict[str, list[int]]

    def knows(self, keys: str, rounds: int) -> list[Message]:
        """Messages to send: for each key a number of them, one round after the other."""
        self.sent = {key: list(range(rounds)) for key in keys}
        return [Message(b"%s%d" % (key.encode(), n), key=key) for n in range(rounds) for key in keys]

    @property
    def complete(self) -> bool:
        return all(self.ended[key] == set(numbers) for key, numbers in self.sent.items())


# ---- keys ----


@everywhere
async def test_keys_run_side_by_side_and_each_in_order(mq: Connection) -> None:
    ledger = Ledger()
    await mq.send_many("orders", ledger.knows("abcdefgh", 40))
    most = 0

    async def handle(message: Received) -> None:
        nonlocal most
        work = ledger.begin(message)
        most = max(most, len(ledger.at_work))
        await asyncio.sleep(random.choice([0, 0, 0.001]))
        ledger.end(work, done=True)
        await message.ack()

    async with mq.consumer("orders", "billing") as consumer, asyncio.timeout(60):
        tasks = set()
        while not ledger.complete:
            if len(tasks) < 8:
                try:
                    async with asyncio.timeout(0.2):
                        tasks.add(asyncio.create_task(handle(await anext(consumer))))
                except TimeoutError:
                    pass
            done, tasks = await asyncio.wait(tasks, timeout=0) if tasks else (set(), tasks)
            for task in done:
                task.result()
        await asyncio.gather(*tasks)
    assert most > 2 and (await mq.lag("orders", "billing")).total.messages == 0


@everywhere
async def test_a_failing_key_holds_only_itself(mq: Connection, clock: ManualClock) -> None:
    await send(mq, "abab")
    async with mq.consumer("orders", "billing") as consumer:
        first, other = sorted([await anext(consumer), await anext(consumer)], key=lambda m: m.value)
        await first.retry(60, reason="later")
        await other.ack()
        assert values(await take(consumer, 1)) == ["b3"] and await consumer.poll(wait=0) == []
        clock.advance(60)
        again = await take(consumer, 2)
        assert [(v, m.attempt) for v, m in zip(values(again), again, strict=True)] == [("a0", 2), ("a2", 1)]


async def test_order_partition(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        await mq.create_topic("orders", partitions=1)
        await send(mq, "abc")
        async with mq.consumer("orders", "strict", mode="ordered", order="partition") as consumer:
            first = await anext(consumer)
            assert await consumer.poll(wait=0) == []
            await first.retry(5)
            assert await consumer.poll(wait=0) == []
            clock.advance(5)
            assert values(await take(consumer, 3)) == ["a0", "b1", "c2"]


async def test_messages_without_a_key_are_one_key_of_their_partition(opened: Open) -> None:
    async with opened() as mq:
        await mq.create_topic("orders", partitions=1)
        await send(mq, "-a-")
        async with mq.consumer("orders", "billing", mode="ordered") as consumer:
            assert values([await anext(consumer), await anext(consumer)]) == ["-0", "a1"]
            assert await consumer.poll(wait=0) == []


# ---- after the last attempt (R23, I10) ----


@everywhere
async def test_exhausted_messages_leave_and_their_key_goes_on(mq: Connection) -> None:
    await mq.alter_group("orders", "billing", max_attempts=2)
    await send(mq, "aa")
    async with mq.consumer("orders", "billing") as consumer:
        for attempt in (1, 2):
            message = await anext(consumer)
            assert (message.value, message.attempt) == (b"a0", attempt)
            await message.retry(reason="boom")
        assert values(await take(consumer, 1)) == ["a1"]
        (letter,) = await mq.dead_letters("orders", "billing")
        assert (letter.value, letter.reason, letter.attempts) == (b"a0", "boom", 2)
        assert await mq.redrive("orders", "billing") == 1
        again = await take(consumer, 1)
        assert (values(again), again[0].attempt, again[0].topic) == (["a0"], 1, "orders")
        assert len(await holders(mq)) == 5  # the retry topic's partition is held like any other
        assert set(await holders(mq)) == {consumer.member}
    (info,) = await mq.groups("orders.billing.retry")
    assert (info.settings.mode, info.settings.max_attempts) == ("ordered", 2)


async def test_a_message_holds_its_key_no_longer_than_max_hold(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        await mq.create_topic("orders", partitions=1)
        await send(mq, "aa")
        async with mq.consumer("orders", "billing", mode="ordered", max_hold="1m") as consumer:
            await (await anext(consumer)).retry(50)
            clock.advance(50)
            await (await anext(consumer)).retry(50)
            assert values(await take(consumer, 1)) == ["a1"]
        assert [letter.value for letter in await mq.dead_letters("orders", "billing")] == [b"a0"]


@everywhere
async def test_stop_and_restart(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        await mq.create_topic("orders", partitions=1)
        await send(mq, "aabb")
        settings: dict[str, Any] = {"mode": "ordered", "exhausted": "stop", "max_attempts": 1}
        async with mq.consumer("orders", "billing", **settings) as consumer:
            a0, b2 = await anext(consumer), await anext(consumer)
            await a0.retry(reason="boom")
            await b2.ack()
            assert values(await take(consumer, 1)) == ["b3"]
            lag = await mq.lag("orders", "billing")
            assert lag.total.stopped == lag.partitions[0].stopped == 1 and lag.total.messages == 2
            clock.advance(10 * LEASE)
            assert await consumer.poll(wait=0) == []
        async with opened() as other, other.consumer("orders", "billing") as consumer:
            assert await consumer.poll(wait="50ms") == []  # every holder holds the key
            polling = asyncio.create_task(consumer.poll(wait=20))
            await asyncio.sleep(0)
            assert await mq.redrive("orders", "billing") == 1
            (again,) = await polling
            assert (again.value, again.attempt) == (b"a0", 2)
            await again.ack()
            assert values(await take(consumer, 1)) == ["a1"]  # it had waited in the store
            assert (await mq.lag("orders", "billing")).total.messages == 0
            assert consumer.in_hand == 0


# ---- members come and go (R14) ----


@everywhere
async def test_closing_hands_over_at_once(mq: Connection, opened: Open) -> None:
    """The clock stands still: no lease can pass."""
    await send(mq, "aabb")
    async with opened() as other:
        async with mq.consumer("orders", "billing", member="first") as consumer:
            handed = await take(consumer, 4, ack=False)
            await consumer.ack([m for m in handed if m.value in (b"a0", b"b2")])
            following = await other.consumer("orders", "billing", member="next").__aenter__()
            polling = asyncio.create_task(take(following, 2))
            began = asyncio.get_running_loop().time()
        got = await polling
        assert asyncio.get_running_loop().time() - began < 0.8, "it does not wait to be looked at again"
        assert sorted(values(got)) == ["a1", "b3"] and {m.attempt for m in got} == {1}
        await following.close()


@pytest.mark.slow("works for seconds")
async def test_a_member_that_joins_gets_its_share_and_gives_it_back(mq: Connection, opened: Open) -> None:
    async with mq.consumer("orders", "billing", member="one"):
        await settle_down(mq, {"one": 4})
        async with opened() as other:
            async with other.consumer("orders", "billing", member="two"):
                await settle_down(mq, {"one": 2, "two": 2})
                async with mq.consumer("orders", "billing", member="three"):
                    await settle_down(mq, {"one": 2, "two": 1, "three": 1})
            await settle_down(mq, {"one": 4})


async def test_more_members_than_partitions_stand_by(opened: Open) -> None:
    async with opened() as mq, AsyncExitStack() as members:
        await mq.create_topic("orders", partitions=1)
        first = mq.consumer("orders", "billing", member="one", mode="ordered")
        await first.__aenter__()
        await settle_down(mq, {"one": 1})
        second = await members.enter_async_context(mq.consumer("orders", "billing", member="two"))
        await send(mq, "ab")
        assert values(await take(first, 2)) == ["a0", "b1"]
        await first.close()
        await send(mq, "c")
        assert values(await take(second, 1)) == ["c0"]


@everywhere
async def test_takeover_when_the_holders_lease_has_passed(
    mq: Connection, opened: Open, clock: ManualClock
) -> None:
    await send(mq, "aaabbb")
    gone = await mq.consumer("orders", "billing").__aenter__()
    handed = await take(gone, 6, ack=False)
    await handed[0].ack()
    await crash(mq, gone)
    async with opened() as other, other.consumer("orders", "billing") as consumer:
        assert await consumer.poll(wait="50ms") == []
        clock.advance(LEASE + 1)
        got = await take(consumer, 1, ack=False)
        with pytest.raises(LeaseLost):  # somebody else holds what it had
            await gone.ack([m for m in handed if m.value in {g.value for g in got}])
        await consumer.ack(got)
        got += await take(consumer, 5 - len(got))
        for key in "ab":
            mine = [v for v in values(got) if v.startswith(key)]
            assert mine == sorted(mine), "each key from its lowest on"
        assert sorted(values([*got, handed[0]])) == sorted(values(handed))
        assert {m.attempt for m in got} == {2}  # suspects (I14)
    assert (await mq.lag("orders", "billing")).total.messages == 0


async def test_a_poisonous_message_ends_alone_in_the_dead_letters(opened: Open, clock: ManualClock) -> None:
    """I14: it kills whoever handles it. No innocent goes with it, and no key goes out of order."""
    handled: list[str] = []
    async with opened() as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.create_group("orders", "billing", mode="ordered", lease=LEASE, max_attempts=2)
        await mq.send_many(
            "orders", [Message(b"%s%d" % (b"ab"[n % 2 :][:1], n), key="ab"[n % 2]) for n in range(20)]
        )
        deaths = 0
        while (await mq.lag("orders", "billing")).total.messages:
            consumer = await mq.consumer("orders", "billing").__aenter__()
            while messages := await consumer.poll(wait="200ms"):
                if "a8" in values(messages):
                    await crash(mq, consumer)
                    clock.advance(LEASE + 1)
                    deaths += 1
                    break
                handled += values(messages)
                await consumer.ack(messages)
            else:
                await consumer.close()
        assert [letter.value for letter in await mq.dead_letters("orders", "billing")] == [b"a8"]
    assert 3 <= deaths < 12
    for key in "ab":
        mine = [int(v[1:]) for v in handled if v.startswith(key)]
        assert mine == [n for n in range(20) if "ab"[n % 2] == key and n != 8]


async def test_a_waiting_retry_keeps_its_time_at_the_next_holder(
    mq: Connection, opened: Open, clock: ManualClock
) -> None:
    """I5: nothing of the key overtakes it."""
    await send(mq, "aa")
    async with mq.consumer("orders", "billing") as consumer:
        await (await anext(consumer)).retry(20)
    async with opened() as other, other.consumer("orders", "billing") as consumer:
        assert await consumer.poll(wait="50ms") == []
        clock.advance(20)
        got = await take(consumer, 2)
        assert [(v, m.attempt) for v, m in zip(values(got), got, strict=True)] == [("a0", 2), ("a1", 1)]


@pytest.mark.slow("works for seconds")
@everywhere
async def test_members_join_leave_and_crash_and_every_key_stays_in_order(
    mq: Connection, opened: Open, clock: ManualClock
) -> None:
    ledger = Ledger()
    await mq.send_many("orders", ledger.knows("abcdefghij", 40))
    rng = random.Random(7)

    async def handle(consumer: Consumer, message: Received) -> None:
        work = ledger.begin(message)
        await asyncio.sleep(rng.choice([0, 0.002]))
        fate = rng.random()
        ledger.end(work, done=fate >= 0.1)
        try:
            if fate < 0.05:
                await message.retry()
            elif fate < 0.1:
                await message.release()
            else:
                await message.ack()
        except (LeaseLost, postroom.ClosedError):
            ledger.ended[work[0]].discard(work[1])  # it was handed to somebody else, who handles it again

    async def member(connection: Connection, seconds: float, *, crashes: bool) -> None:
        consumer = await connection.consumer("orders", "billing", window=20).__aenter__()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await handle(consumer, await anext(consumer))
        except TimeoutError:
            ledger.at_work.clear()
        if crashes:
            await crash(connection, consumer)
        else:
            await consumer.close()

    async with opened() as other, asyncio.timeout(100):
        turn = 0
        while not ledger.complete:
            turn += 1
            await member(mq, 0.1, crashes=turn % 2 == 0)
            await member(other, 0.1, crashes=False)
            if turn % 2 == 0:
                clock.advance(LEASE + 1)
    assert turn > 3
    assert (await mq.lag("orders", "billing")).total.messages == 0


@pytest.mark.slow("works for seconds")
async def test_members_at_once_never_handle_a_key_at_once(mq: Connection, opened: Open) -> None:
    """Nobody crashes here, so no key may ever be in two hands, nor anything be handled twice."""
    ledger = Ledger()
    await mq.send_many("orders", ledger.knows("abcdefghij", 60))

    async def member(connection: Connection, count: int) -> None:
        async with connection.consumer("orders", "billing", window=20) as consumer:
            for _ in range(count):
                try:
                    async with asyncio.timeout(0.4):
                        message = await anext(consumer)
                except TimeoutError:
                    return
                work = ledger.begin(message)
                await asyncio.sleep(0.001)
                ledger.end(work, done=True)
                await message.ack()

    async with opened() as other, asyncio.timeout(100):
        while not ledger.complete:
            await asyncio.gather(
                *(member(random.choice([mq, other]), random.randint(5, 60)) for _ in range(3))
            )
    assert all(numbers == sorted(set(numbers)) for numbers in ledger.begun.values())
    assert (await mq.lag("orders", "billing")).total.messages == 0


async def test_lost_poll_replies_lose_nothing_and_double_nothing(mq: Connection) -> None:
    """I6: every other reply is lost."""
    await mq.send_many(
        "orders", [Message(b"%s%d" % (k.encode(), n), key=k) for n in range(50) for k in "abcd"]
    )
    honest, count = mq._endpoint.poll, 0

    async def dropping(request: PollRequest) -> PollReply:
        nonlocal count
        reply = await honest(request)
        count += 1
        if count % 2:
            raise StoreUnavailable("the reply is lost")
        return reply

    mq._endpoint.poll = dropping  # type: ignore[method-assign]
    async with mq.consumer("orders", "billing", window=15) as consumer:
        got = values(await take(consumer, 200))
    assert len(got) == 200 and count > 10
    for key in "abcd":
        assert [v for v in got if v.startswith(key)] == [f"{key}{n}" for n in range(50)]


async def test_a_reset_under_a_consumers_hands(mq: Connection) -> None:
    await send(mq, "ab")
    async with mq.consumer("orders", "billing") as consumer:
        first = await take(consumer, 2)
        late = await mq.send("orders", b"c2", key="c")
        (third,) = await take(consumer, 1, ack=False)
        await mq.reset("orders", "billing", to="earliest", force=True)
        with contextlib.suppress(LeaseLost):  # unless it holds the partition again by now
            await third.ack()
        again = await take(consumer, 3)
        assert sorted(values(again)) == sorted(values([*first, third])) and late.offset >= 0


async def test_pause_and_resume(mq: Connection) -> None:
    async with mq.consumer("orders", "billing") as consumer:
        await mq.pause("orders", "billing")
        await send(mq, "a")
        assert await consumer.poll(wait="50ms") == []
        await mq.resume("orders", "billing")
        assert values(await take(consumer, 1)) == ["a0"]


async def test_on_delivery(mq: Connection) -> None:
    await send(mq, "aab")
    async with mq.consumer("orders", "billing", ack="on_delivery") as consumer:
        got = await take(consumer, 3, ack=False)
        assert [v for v in values(got) if v.startswith("a")] == ["a0", "a1"]
    assert (await mq.lag("orders", "billing")).total.messages == 0


# ---- settings ----


async def test_settings_of_an_ordered_group(mq: Connection) -> None:
    made = await mq.create_group(
        "orders", "audit", mode="ordered", order="partition", exhausted="stop", max_hold="2h", expires="7d"
    )
    found = made.settings
    assert (found.exhausted, found.max_hold_ms, found.expires_ms) == ("stop", 7_200_000, 604_800_000)
    changed = await mq.alter_group("orders", "audit", exhausted="dead", max_hold="10m")
    assert (changed.settings.exhausted, changed.settings.max_hold_ms) == ("dead", 600_000)
    with pytest.raises(GroupConflict, match="mode='ordered'"):
        async with mq.consumer("orders", "audit", mode="shared"):
            pass


# ---- processes ----


PROCESS = """
import asyncio, os, sys
import postroom

async def main(url, name, notes):
    noted = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    async with postroom.connect(url) as mq:
        async with mq.consumer("orders", "billing", member=name, window=20) as consumer:
            async for message in consumer:
                os.write(noted, message.value + b"\\n")
                await asyncio.sleep(0.002)
                try:
                    await message.ack()
                except postroom.LeaseLost:
                    pass

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow("kills processes for seconds")
async def test_processes_that_are_killed(tmp_path: Path) -> None:
    """kill -9 of one of two members: the other takes over, and no key goes back further than it must."""
    url, notes = f"sqlite:///{tmp_path}/q.db", tmp_path / "notes"
    rounds, keys = 60, "abcdef"

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", PROCESS, url, name, str(notes)])

    def noted() -> list[str]:
        return notes.read_text().split() if notes.exists() else []

    async def begun() -> bool:
        return len(noted()) >= 40

    async def done() -> bool:
        return not (await mq.lag("orders", "billing")).total.messages

    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.create_group("orders", "billing", mode="ordered", lease=1)
        await mq.send_many(
            "orders", [Message(b"%s%d" % (k.encode(), n), key=k) for n in range(rounds) for k in keys]
        )
        processes = [start("one"), start("two")]
        try:
            await until(begun)
            processes[0].send_signal(signal.SIGKILL)
            await until(done)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for key in keys:
            seen = [int(v[1:]) for v in noted() if v.startswith(key)]
            assert set(seen) == set(range(rounds)), "nothing is lost"
            firsts = list(dict.fromkeys(seen))
            assert firsts == sorted(firsts), "nothing begins before an earlier one has"
            back = [a - b for a, b in pairwise(seen) if b <= a]
            assert len(back) <= 1 and all(step <= 20 for step in back), "back once, to what was unsettled"
        assert await mq.dead_letters("orders", "billing") == []
