"""Delayed messages (R35): at any moment, to the millisecond, none skipped or doubled; taken back by id."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import postroom
from postroom import Connection, Message
from postroom.broker.duties import Retention
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from tests.contract.brokers import broker_of
from tests.contract.stores import Open, embedded, everywhere, real_time


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=2)
    await connection.create_group("orders", "billing")
    return connection


async def there(mq: Connection, topic: str = "orders") -> list[bytes]:
    """What can be read now."""
    return [message.value async for message in mq.read(topic)]


async def taken(mq: Connection, count: int) -> list[bytes]:
    """What a consumer is handed and acks."""
    async with mq.consumer("orders", group="billing", window=10_000) as consumer:
        found: list[bytes] = []
        while len(found) < count:
            messages = await consumer.poll(max_messages=1000, wait=10)
            assert messages, f"only {len(found)} of {count} came"
            await consumer.ack(messages)
            found += [message.value for message in messages]
        return found


# ---- when ----


@everywhere
async def test_it_comes_when_it_is_due_and_not_before(mq: Connection, clock: ManualClock) -> None:
    receipt = await mq.send("orders", b"later", key="k", delay=30)
    await mq.send("orders", b"now", key="k")
    assert receipt.due == datetime.fromtimestamp(clock.now_ms() / 1000, UTC) + timedelta(seconds=30)
    assert (await mq.topic("orders")).delayed == 1
    clock.advance(29.999)
    assert await there(mq) == [b"now"]
    clock.advance(0.001)
    assert await there(mq) == [b"now", b"later"]
    assert await taken(mq, 2) == [b"now", b"later"]
    assert (await mq.topic("orders")).delayed == 0


@everywhere
async def test_it_keeps_key_headers_id_and_timestamp(mq: Connection, clock: ManualClock) -> None:
    begin = clock.now_ms()
    await mq.send("orders", b"v", key="k", headers={"h": "1"}, id="o-42", source="web", delay=5)
    mine = await mq.send("orders", b"w", delay=5)
    clock.advance(5)
    found = {message.value: message async for message in mq.read("orders")}
    first, second = found[b"v"], found[b"w"]
    assert (first.key, dict(first.headers), first.id, first.source) == (b"k", {"h": b"1"}, "o-42", "web")
    assert (first.timestamp, second.id) == (begin, mine.id)


async def test_far_away_is_not_too_far(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"old", at="2090-01-31T08:00:00.123Z")
    clock.advance(datetime(2090, 1, 31, 8, tzinfo=UTC).timestamp() - clock.now_ms() / 1000)
    assert await there(mq) == []
    clock.advance(0.122)
    assert await there(mq) == []
    clock.advance(0.001)
    assert await there(mq) == [b"old"]


async def test_a_moment_that_has_passed_is_now(mq: Connection, clock: ManualClock) -> None:
    receipt = await mq.send("orders", b"a", at=clock.now_ms() / 1000 - 100)
    assert (receipt.due, receipt.offset) == (None, 0)
    assert await there(mq) == [b"a"]


@everywhere
async def test_equal_keys_come_by_their_moment_and_then_as_they_were_sent(
    mq: Connection, clock: ManualClock
) -> None:
    delays = [3, 1, 2, 1, 3, 2, 1, 2, 3]
    for number, delay in enumerate(delays):
        await mq.send("orders", b"%d.%d" % (delay, number), key="k", delay=delay)
    clock.advance(10)
    expected = sorted(range(len(delays)), key=lambda number: (delays[number], number))
    assert await taken(mq, len(delays)) == [b"%d.%d" % (delays[number], number) for number in expected]


@everywhere
async def test_thousands_of_one_instant_come_once_each(mq: Connection, clock: ManualClock) -> None:
    """Sent one by one, in lists, and by a producer; due at one millisecond."""
    at = clock.now_ms() / 1000 + 60
    singles = [mq.send("orders", b"s%d" % n, key=str(n), at=at) for n in range(1_000)]
    lists = [
        mq.send_many("orders", [Message(b"l%d.%d" % (n, m), at=at) for m in range(500)]) for n in range(6)
    ]
    await asyncio.gather(*singles, *lists)
    async with mq.producer("orders") as producer:
        for number in range(1_000):
            await producer.post(b"p%d" % number, key=str(number), at=at)
    assert (await mq.topic("orders")).delayed == 5_000
    clock.advance(59.999)
    assert await there(mq) == []
    clock.advance(0.001)
    found = Counter(await taken(mq, 5_000))
    assert (len(found), set(found.values())) == (5_000, {1})


@real_time
async def test_real_time(opened: Open) -> None:
    async with opened() as mq:
        await mq.create_topic("orders")
        async with mq.consumer("orders", group="billing") as consumer:
            due = time.time() + 0.25
            await mq.send("orders", b"b", at=due + 0.1)
            await mq.send("orders", b"a", at=due)
            for expected in (b"a", b"b"):
                (message,) = await consumer.poll(wait=5)
                assert message.value == expected
                assert 0 <= time.time() - due < 2
                due += 0.1


@real_time
@embedded("a broker that serves others has its loop for itself")
async def test_a_blocked_event_loop_does_not_hold_them_back(opened: Open) -> None:
    async with opened() as mq:
        await mq.create_topic("orders", partitions=1)
        receipt = await mq.send("orders", b"a", delay=0.1)
        broker = broker_of(mq)
        place = (await mq.route("orders")).ranges[0].partition_id
        deadline = time.monotonic() + 5
        while not (stored := broker.store.log.read(place, 0, max_messages=1, max_bytes=10_000)):
            assert time.monotonic() < deadline
            time.sleep(0.005)  # noqa: ASYNC251 - a handler that blocks the loop, which is the case tested
        assert receipt.due is not None
        assert stored[0].appended_at >= receipt.due.timestamp() * 1000 - 0.5


# ---- cancel ----


@everywhere
async def test_cancel_takes_a_message_back(mq: Connection, clock: ManualClock) -> None:
    single = await mq.send("orders", b"single", delay=5)
    await mq.send("orders", b"mine", id="o-42", delay=5)
    several = await mq.send_many("orders", [Message(b"m%d" % n) for n in range(5)], delay=5)
    assert await mq.cancel("orders", single.id)
    assert await mq.cancel("orders", id="o-42")
    assert await mq.cancel("orders", several[2].id)
    assert not await mq.cancel("orders", several[2].id)
    assert not await mq.cancel("orders", "never sent")
    assert (await mq.topic("orders")).delayed == 4
    clock.advance(5)
    assert sorted(await taken(mq, 4)) == [b"m0", b"m1", b"m3", b"m4"]
    assert not await mq.cancel("orders", several[0].id)


async def test_an_unknown_topic_is_said_to_be_unknown(mq: Connection) -> None:
    with pytest.raises(postroom.UnknownTopic, match="did you mean 'orders'"):
        await mq.cancel("ordrs", "a")


@real_time
async def test_cancel_and_due_at_once_never_do_both(opened: Open) -> None:
    """Each message is either cancelled or delivered, whatever moves first."""
    async with opened() as mq:
        await mq.create_topic("orders", partitions=1)
        at = time.time() + 0.3
        receipts = await mq.send_many("orders", [Message(b"%d" % n, id=f"id-{n}", at=at) for n in range(10)])
        for number in range(60):
            receipts.append(await mq.send("orders", b"%d" % (10 + number), id=f"id-{10 + number}", at=at))
        await asyncio.sleep(at - time.time() - 0.02)
        cancelled = {r.id for r in receipts if await mq.cancel("orders", r.id)}
        async with mq.consumer("orders", group="billing") as consumer:
            found: list[str] = []
            while len(found) < 70 - len(cancelled):
                messages = await consumer.poll(wait=5)
                assert messages
                found += [message.id for message in messages]
            assert not await consumer.poll(wait=0.05)
        assert sorted(found) == sorted({r.id for r in receipts} - cancelled)


# ---- what else touches them ----


@everywhere
async def test_where_ids_are_looked_at_it_is_not_its_own_repeat(mq: Connection, clock: ManualClock) -> None:
    """Its id is looked at when it is scheduled, not when it is due; from then on it is known (I13)."""
    await mq.create_topic("once", partitions=1, dedup_window="10m")
    assert not (await mq.send("once", b"a", id="o-42", delay=5)).duplicate
    assert (await mq.send("once", b"a", id="o-42", delay=9)).duplicate
    assert (await mq.send("once", b"a", id="o-42")).duplicate
    clock.advance(5)
    assert await there(mq, "once") == [b"a"]
    assert (await mq.send("once", b"a", id="o-42")).duplicate
    clock.advance(10)
    assert await there(mq, "once") == [b"a"]


@everywhere
async def test_they_are_kept_over_a_restart(opened: Open, any_url: str, clock: ManualClock) -> None:
    async with AsyncExitStack() as stack:
        if any_url.startswith("memory"):  # which lasts as long as somebody has it
            await stack.enter_async_context(opened())
        async with opened() as mq:
            await mq.create_topic("orders")
            receipt = await mq.send("orders", b"a", delay=3600)
            await mq.send("orders", b"b", delay=7200)
        clock.advance(3600)
        async with opened() as mq:
            assert (await mq.topic("orders")).delayed <= 2
            async with mq.consumer("orders", group="billing") as consumer:
                (message,) = await consumer.poll(wait=5)
            assert (message.value, message.id) == (b"a", receipt.id)


async def test_a_volatile_topic_has_them_too(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("swift", storage="volatile", partitions=1)
    await mq.send("swift", b"later", key="k", delay=5)
    await mq.send("swift", b"now", key="k")
    await mq.send("swift", b"latest", key="k", delay=6)
    assert await there(mq, "swift") == [b"now"]
    clock.advance(6)
    assert await there(mq, "swift") == [b"now", b"later", b"latest"]


async def test_purge_drops_them(mq: Connection, clock: ManualClock) -> None:
    await mq.send_many("orders", [Message(b"a"), Message(b"b", delay=5), Message(b"c", delay=6)])
    assert await mq.purge("orders") == 3
    clock.advance(6)
    assert (await there(mq), (await mq.topic("orders")).delayed) == ([], 0)


async def test_a_deleted_topic_takes_them_along(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"a", delay=5)
    await mq.delete_topic("orders")
    await mq.create_topic("orders")
    clock.advance(5)
    assert (await there(mq), (await mq.topic("orders")).delayed) == ([], 0)


async def test_they_do_not_hold_back_retention(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("short", retention="1h", partitions=1)
    await mq.send("short", b"later", delay="2h")
    await mq.send("short", b"now")
    clock.advance(3601)
    store = broker_of(mq).store
    await asyncio.to_thread(Retention(store, DEFAULTS).run_once)
    assert (await mq.topic("short")).messages == 0
    clock.advance(3600)
    await asyncio.to_thread(Retention(store, DEFAULTS).run_once)
    assert await there(mq, "short") == [b"later"]


async def test_a_handler_gets_them_in_tests_with_a_clock() -> None:
    queue = postroom.testing.TestQueue()
    app, seen = postroom.App(queue), list[bytes]()

    @app.subscribe("orders", group="billing")
    async def handle(body: bytes) -> None:
        seen.append(body)

    async with queue:
        await queue.create_topics("orders")
        await queue.send("orders", b"a", delay=60)
        await queue.run_until_idle(app)
        assert seen == []
        queue.clock.advance(60)
        await queue.run_until_idle(app)
    assert seen == [b"a"]


def test_without_await(tmp_path: Path) -> None:
    with postroom.sync.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        mq.create_topic("orders")
        receipt = mq.send("orders", b"a", delay=3600)
        assert mq.cancel("orders", receipt.id)
        assert not mq.cancel("orders", receipt.id)


def test_a_connection_left_open_in_a_loop_that_has_ended_holds_up_nobody(tmp_path: Path) -> None:
    """Its mover has the lease, and goes on."""
    url = f"sqlite:///{tmp_path}/q.db"

    async def leave() -> Connection:
        mq = await postroom.connect(url)
        await mq.create_topic("orders", partitions=1)
        for number in range(1, 4):
            await mq.send("orders", b"%d" % number, delay=number / 5)
        return mq

    async def receive() -> list[bytes]:
        async with postroom.connect(url) as mq:
            return await taken(mq, 3)

    left = broker_of(asyncio.run(leave()))
    assert asyncio.run(receive()) == [b"1", b"2", b"3"]
    left._work.stop()
    left.store.close()


# ---- several processes ----

SENDER = """
import asyncio, sys, postroom

async def main(url, delay, stay):
    async with postroom.connect(url) as mq:
        for number in range(20):
            await mq.send("orders", b"%d" % number, key="k", delay=float(delay))
        print("sent", flush=True)
        if stay == "stay":
            await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/q.db"


def _sent_by_another(url: str, delay: float, stay: str) -> subprocess.Popen[str]:
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER, url, str(delay), stay], stdout=subprocess.PIPE, text=True
    )
    assert sender.stdout is not None
    assert sender.stdout.readline() == "sent\n"
    return sender


@pytest.mark.few(1, "starts programs")
@pytest.mark.parametrize("stay", ["leave", "stay", "die"])
async def test_what_another_process_has_sent_is_delivered(file_url: str, stay: str) -> None:
    """It leaves; it stays, and moves them itself; it is killed while it has the mover's lease."""
    delay = 1.0 if stay == "die" else 0.4
    async with postroom.connect(file_url) as mq:
        await mq.create_topic("orders", partitions=1)
        async with mq.consumer("orders", group="billing") as consumer:
            sender = await asyncio.to_thread(_sent_by_another, file_url, delay, stay)
            sent = time.time()
            try:
                if stay == "die":
                    sender.kill()
                found: list[bytes] = []
                while len(found) < 20:
                    messages = await consumer.poll(wait=15)
                    assert messages
                    found += [message.value for message in messages]
                assert found == [b"%d" % number for number in range(20)]
                assert time.time() - sent < delay + (8 if stay == "die" else 3)
            finally:
                sender.kill()
                await asyncio.to_thread(sender.communicate)


# ---- what waits ----


@everywhere
async def test_what_waits_is_listed_the_soonest_first_with_its_id_key_and_moment(
    mq: Connection, clock: ManualClock
) -> None:
    late = await mq.send("orders", b"late", key="k", delay=60, id="o-2", headers={"source": "web"})
    await mq.send("orders", b"soon", delay=30)
    await mq.send("orders", b"now")
    soon, last = await mq.delayed("orders")
    assert (soon.value, soon.key, len(soon.id), soon.size) == (b"soon", None, 15, 4)
    assert (last.id, last.key, last.text, dict(last.headers)) == ("o-2", b"k", "late", {"source": b"web"})
    assert last.due == late.due and last.due_ms == clock.now_ms() + 60_000
    assert soon.due < last.due
    assert await mq.cancel("orders", soon.id)
    assert [one.id for one in await mq.delayed("orders")] == ["o-2"]
    clock.advance(60)
    assert sorted(await taken(mq, 2)) == [b"late", b"now"]
    assert await mq.delayed("orders") == []


@everywhere
async def test_pages_of_what_waits_have_everything_once(mq: Connection) -> None:
    await mq.send_many("orders", [Message(b"%d" % n, key=str(n), delay=60) for n in range(50)])
    for n in range(50, 80):
        await mq.send("orders", b"%d" % n, delay=60 + n)
    found: list[postroom.Delayed] = []
    while page := await mq.delayed("orders", limit=7, after=found[-1] if found else None):
        assert len(page) == 7 or page[-1].value == b"79"
        found += page
    assert sorted(int(one.value) for one in found) == list(range(80))
    assert [one.due_ms for one in found] == sorted(one.due_ms for one in found)
    rest = await mq.delayed("orders", after=found[60].cursor)
    assert [one.id for one in rest] == [one.id for one in found[61:]]


async def test_a_list_of_what_waits_says_what_is_wrong_with_a_question(mq: Connection) -> None:
    for wrong in ("", "1-2-3", "x-1-1-1", "1-1-1-" + "9" * 90, "-".join(["9" * 20] * 4)):
        with pytest.raises(postroom.InvalidSetting, match="or its cursor"):
            await mq.delayed("orders", after=wrong)
    with pytest.raises(postroom.InvalidSetting, match="from 1 up"):
        await mq.delayed("orders", limit=0)
    with pytest.raises(postroom.UnknownTopic, match="did you mean"):
        await mq.delayed("order")


async def test_a_delayed_batch_that_cannot_be_read_hides_no_other(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    from postroom.client.consumer.delayed import _messages
    from postroom.endpoint.values import DelayedBatch

    assert list(_messages("orders", DelayedBatch(7, 1, 5, 1, b"\0" * 90), 0)) == []
    assert "in row 7 cannot be read" in caplog.text
