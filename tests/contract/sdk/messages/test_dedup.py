"""Dedup by message id (R32): whoever sends a message again is told where it is, and nobody gets it twice."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any

import pytest

import postroom
from postroom import Connection, Message, Receipt
from postroom.broker.duties import Retention
from postroom.broker.publish import append as taking
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.errors import InvalidSetting, StoreUnavailable
from postroom.store.contract import Appended
from tests.contract.brokers import broker_of
from tests.contract.stores import Open, everywhere
from tests.tuned import Tune


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=4, dedup_window="10m")
    return connection


def place(receipt: Receipt) -> tuple[int, int]:
    return receipt.partition, receipt.offset


async def there(mq: Connection, topic: str = "orders") -> list[str]:
    return sorted([message.id async for message in mq.read(topic)])


def named(*ids: str, key: str | None = None) -> list[Message]:
    return [Message(id.encode(), id=id, key=key) for id in ids]


# ---- sending twice ----


@everywhere
async def test_a_message_that_is_sent_twice_is_stored_once(mq: Connection) -> None:
    first = [await mq.send("orders", b"v", id=f"o-{number}") for number in range(8)]
    again = [await mq.send("orders", b"v", id=f"o-{number}") for number in range(8)]
    assert not any(receipt.duplicate for receipt in first)
    assert all(receipt.duplicate for receipt in again)
    assert list(map(place, again)) == list(map(place, first))
    assert [receipt.id for receipt in again] == [f"o-{number}" for number in range(8)]
    assert await there(mq) == [f"o-{number}" for number in range(8)]
    assert len({receipt.partition for receipt in first}) > 1


@everywhere
async def test_lists_with_repeats_inside_and_across(mq: Connection) -> None:
    ids = [f"a-long-enough-id-{number}" for number in range(2_500)]
    first = await mq.send_many("orders", named(*ids[:1500], *ids[:500]))
    assert [receipt.duplicate for receipt in first] == [False] * 1500 + [True] * 500
    assert list(map(place, first[1500:])) == list(map(place, first[:500]))
    again = await mq.send_many("orders", named(*ids[1000:]))
    assert [receipt.duplicate for receipt in again] == [True] * 500 + [False] * 1000
    assert list(map(place, again[:500])) == list(map(place, first[1000:1500]))
    by_place = {(m.partition, m.offset): m.id async for m in mq.read("orders")}
    assert sorted(by_place.values()) == sorted(ids)
    for receipt in (*first, *again):
        assert by_place[place(receipt)] == receipt.id


async def test_with_a_key_the_id_counts_where_the_key_is(mq: Connection) -> None:
    first = await mq.send_many("orders", named("a", "b", key="k1"))
    again = await mq.send("orders", b"x", id="b", key="k1")
    assert (again.duplicate, place(again)) == (True, place(first[1]))


async def test_a_named_slot_keeps_an_id_together_too(mq: Connection) -> None:
    first = await mq.send("orders", b"x", id="a", slot=700)
    again = await mq.send("orders", b"x", id="a", slot=700)
    assert (again.duplicate, place(again)) == (True, place(first))


async def test_posts_and_one_way_sends(mq: Connection) -> None:
    async with mq.producer("orders") as producer:
        futures = [await producer.post(b"v", id=f"o-{number % 10}") for number in range(30)]
        receipts = [await future for future in futures]
    assert sum(not receipt.duplicate for receipt in receipts) == 10
    async with mq.producer("orders", confirm=False) as producer:
        for number in range(15):
            await producer.post(b"v", id=f"o-{number}")
    assert await there(mq) == sorted(f"o-{number}" for number in range(15))


async def test_messages_without_an_id_are_as_ever(mq: Connection) -> None:
    for _ in range(2):
        receipts = await mq.send_many(
            "orders", [Message(b"same")] * 10 + named("a") + [Message(b"same")] * 10
        )
        assert sum(not receipt.duplicate for receipt in receipts) >= 20
    assert len(await there(mq)) == 41


async def test_batches_without_ids_are_not_opened(mq: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer knows of the window, and says that there are none."""
    monkeypatch.setattr(taking, "digests_of", None)
    await mq.send_many("orders", [Message(b"v", key=f"{number}") for number in range(20)])
    await mq.send("orders", b"v")
    assert len(await there(mq)) == 21


async def test_without_a_window_ids_are_not_looked_at(mq: Connection) -> None:
    await mq.create_topic("plain")
    for _ in range(2):
        assert not (await mq.send("plain", b"v", id="a")).duplicate
    assert await there(mq, "plain") == ["a", "a"]


async def test_a_group_gets_it_once_and_waits_for_no_other(mq: Connection) -> None:
    """A batch some of whose messages are left out wakes those who wait, like any other."""
    await mq.send("orders", b"v", id="a", key="k")
    async with mq.consumer("orders", group="billing") as consumer:
        await consumer.ack(await consumer.poll(wait=10))
        waiting = asyncio.create_task(consumer.poll(wait=30))
        await asyncio.sleep(0)
        receipts = await mq.send_many("orders", named("a", "b", key="k"))
        assert [receipt.duplicate for receipt in receipts] == [True, False]
        (message,) = await waiting
        assert message.id == "b"
        await message.ack()
        assert await consumer.poll(wait=0) == []
    assert (await mq.lag("orders", "billing")).total.messages == 0


# ---- how long ----


@everywhere
async def test_after_the_window_it_is_stored_again(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"v", id="a")
    clock.advance(599.999)
    assert (await mq.send("orders", b"v", id="a")).duplicate
    clock.advance(0.001)
    assert not (await mq.send("orders", b"v", id="a")).duplicate


@everywhere
async def test_but_not_before_every_group_has_settled_it(mq: Connection, clock: ManualClock) -> None:
    await mq.create_group("orders", "slow")
    await mq.send("orders", b"v", id="a")
    clock.advance(100_000)
    assert (await mq.send("orders", b"v", id="a")).duplicate
    async with mq.consumer("orders", group="slow") as consumer:
        await consumer.ack(await consumer.poll(wait=10))
    assert not (await mq.send("orders", b"v", id="a")).duplicate


async def test_the_window_is_a_setting(mq: Connection) -> None:
    assert (await mq.topic("orders")).settings.dedup_ms == 600_000
    assert (await mq.alter_topic("orders", dedup_window=1.5)).settings.dedup_ms == 1_500
    assert (await mq.alter_topic("orders", retention="1d")).settings.dedup_ms == 1_500
    assert (await mq.alter_topic("orders", dedup_window=0)).settings.dedup_ms == 0
    with pytest.raises(InvalidSetting, match="dedup_window"):
        await mq.create_topic("wrong", dedup_window="soon")


async def test_a_window_that_is_set_later_reaches_producers_that_are_there(
    mq: Connection, tune: Tune
) -> None:
    tune(client={"ids_fresh_s": 0.0})  # else it takes a second
    await mq.create_topic("later", partitions=4)
    async with mq.producer("later") as producer:
        await producer.send(b"v", id="a")
        await mq.alter_topic("later", dedup_window="1h")
        assert [(await producer.send(b"v", id="b")).duplicate for _ in range(4)] == [False, True, True, True]
        await mq.alter_topic("later", dedup_window=0)
        assert [(await producer.send(b"v", id="b")).duplicate for _ in range(4)] == [False] * 4


async def test_a_sender_that_knows_of_no_window_is_helped(mq: Connection, tune: Tune) -> None:
    """The broker reads the ids from the batch: so may do clients that never heard of windows."""
    tune(client={"ids_fresh_s": 1e9})
    await mq.create_topic("later", partitions=1)
    async with mq.producer("later", compression="lz4") as producer:
        await producer.send(b"v", id="before")
        await mq.alter_topic("later", dedup_window="1h")
        first = await producer.send_many(named("a", "an id of more than sixteen bytes", "a"))
        assert [receipt.duplicate for receipt in first] == [False, False, True]
        again = await producer.send_many([Message(b"-"), *named("an id of more than sixteen bytes", "b")])
        assert [(receipt.duplicate, receipt.offset) for receipt in again] == [
            (False, 3),
            (True, 2),
            (False, 4),
        ]


# ---- uncertainty ----


class Lossy:
    """An endpoint whose answers to appends get lost after they were carried out."""

    def __init__(self, endpoint: Any, losses: int) -> None:
        self._endpoint, self.losses = endpoint, losses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    def append_soon(self, *args: Any) -> bool:
        return False  # all of them go the way on which answers get lost

    def lone_append(self, *args: Any) -> None:
        return None

    async def append(self, *args: Any, **named: Any) -> Appended:
        appended: Appended = await self._endpoint.append(*args, **named)
        if self.losses:
            self.losses -= 1
            raise StoreUnavailable("the answer is lost")
        return appended


@everywhere
async def test_receipts_are_the_same_when_an_answer_was_lost(mq: Connection) -> None:
    """R34: the very batch is sent again; what it stored, and what it did not, shows in the log."""
    old = await mq.send_many("orders", named("a", "b", key="k"))
    producer = mq.producer("orders")
    lossy = Lossy(mq._endpoint, 2)
    producer._router._endpoint = lossy
    async with producer:
        receipts = await producer.send_many(named("x", "a", "y", "x", "b", "z", key="k"))
        again = await producer.send_many(named("z", "a", key="k"))
    assert lossy.losses == 0
    assert [receipt.duplicate for receipt in receipts] == [False, True, False, True, True, False]
    x, y, z = receipts[0], receipts[2], receipts[5]
    assert [r.offset for r in (x, y, z)] == [2, 3, 4]
    assert [r.offset for r in (receipts[1], receipts[3], receipts[4])] == [
        old[0].offset,
        x.offset,
        old[1].offset,
    ]
    assert [(r.duplicate, r.offset) for r in again] == [(True, 4), (True, 0)]
    assert await there(mq) == ["a", "b", "x", "y", "z"]


@everywhere
async def test_a_restart_forgets_nothing(opened: Open) -> None:
    async with opened() as mq:
        keeper = opened()
        async with keeper as other:  # memory lasts as long as somebody has it
            await mq.create_topic("orders", partitions=4, dedup_window="10m")
            first = await mq.send_many("orders", named(*(f"o-{n}" for n in range(300))))
            await mq.close()
            again = await other.send_many("orders", named(*(f"o-{n}" for n in range(300))))
            assert all(receipt.duplicate for receipt in again)
            assert list(map(place, again)) == list(map(place, first))


async def test_dropping_what_is_settled_forgets_no_ids(opened: Open, clock: ManualClock) -> None:
    """R44, R32: a restart finds them in the log, so they stay there for the window."""

    async def retained(mq: Connection) -> None:
        await asyncio.to_thread(Retention(broker_of(mq).store, DEFAULTS).run_once)

    async with opened() as mq, opened() as other:
        await mq.create_topic("orders", partitions=1, dedup_window="10m", drop_settled=True)
        await mq.create_group("orders", "billing")
        await mq.send_many("orders", named("a", "b"))
        async with mq.consumer("orders", group="billing") as consumer:
            await consumer.ack(await consumer.poll(wait=10))
        await retained(mq)
        assert await there(mq) == []
        assert (await other.send("orders", b"v", id="a")).duplicate
        clock.advance(600)
        await retained(mq)
        assert not (await other.send("orders", b"v", id="b")).duplicate


# ---- many ----


@everywhere
async def test_connections_that_send_the_same_at_once(opened: Open) -> None:
    async with opened() as one, opened() as two:
        await one.create_topic("orders", partitions=3, dedup_window="10m")

        async def send(mq: Connection, start: int) -> list[Receipt]:
            found: list[Receipt] = []
            for first in range(0, 600, 100):
                ids = [f"o-{(start + number) % 600}" for number in range(first, first + 100)]
                found += await mq.send_many("orders", named(*ids))
            return found

        receipts = await asyncio.gather(send(one, 0), send(two, 0), send(one, 300), send(two, 500))
        places: dict[str, set[tuple[int, int]]] = {}
        for receipt in (receipt for found in receipts for receipt in found):
            places.setdefault(receipt.id, set()).add(place(receipt))
        assert len(places) == 600 and all(len(found) == 1 for found in places.values())
        assert sum(not receipt.duplicate for found in receipts for receipt in found) == 600
        assert await there(one) == sorted(places)


SENDER = """
import asyncio, sys
import postroom

async def main(url):
    async with postroom.connect(url) as mq:
        print("ready", flush=True)
        sys.stdin.readline()
        stored = 0
        for first in range(0, 2000, 50):
            ids = [f"o-{number}" for number in range(first, first + 50)]
            receipts = await mq.send_many("orders", [postroom.Message(b"v", id=id) for id in ids])
            stored += sum(not receipt.duplicate for receipt in receipts)
        print(stored, flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow("works for seconds")
async def test_processes_that_send_the_same_at_once(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=2, dedup_window="10m")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        senders = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", SENDER, url, **pipes) for _ in range(3)
        ]
        for sender in senders:
            assert sender.stdout is not None
            assert await asyncio.wait_for(sender.stdout.readline(), 60) == b"ready\n"
        answers = await asyncio.wait_for(asyncio.gather(*(s.communicate(b"go\n") for s in senders)), 60)
        assert sum(int(out) for out, _ in answers) == 2000
        assert await there(mq) == sorted(f"o-{number}" for number in range(2000))


# ---- delayed messages ----


@everywhere
async def test_a_delayed_message_counts_from_when_it_is_sent(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"v", id="a", delay="1h")
    again = await mq.send("orders", b"v", id="a")
    later = await mq.send("orders", b"v", id="a", delay="2h")
    assert [(r.duplicate, r.offset) for r in (again, later)] == [(True, -1), (True, -1)]
    clock.advance(3600)
    assert await there(mq) == ["a"]
    after = await mq.send("orders", b"v", id="a")
    assert (after.duplicate, after.offset) == (True, 0)


@everywhere
async def test_a_cancelled_one_may_be_sent_again(mq: Connection, clock: ManualClock) -> None:
    await mq.send_many("orders", named("a", "b", "c"), delay="1h")
    assert await mq.cancel("orders", "b")
    again = await mq.send_many("orders", named("a", "b", "c"))
    assert [receipt.duplicate for receipt in again] == [True, False, True]
    clock.advance(3600)
    assert await there(mq) == ["a", "b", "c"]


async def test_a_delayed_list_with_repeats(mq: Connection, clock: ManualClock) -> None:
    first = await mq.send("orders", b"v", id="x")
    receipts = await mq.send_many("orders", named("a", "x", "a", "b"), delay=60)
    assert [receipt.duplicate for receipt in receipts] == [False, True, True, False]
    assert [receipt.offset for receipt in receipts] == [-1, first.offset, -1, -1]
    assert (await mq.topic("orders")).delayed == 2
    clock.advance(60)
    assert await there(mq) == ["a", "b", "x"]


# ---- changes of the route (I13) ----


@everywhere
async def test_ids_are_known_to_the_successors_of_a_partition(opened: Open, clock: ManualClock) -> None:
    """Also to a process that comes later, through several changes, and until the window is over."""
    async with AsyncExitStack() as stack:
        mq = await stack.enter_async_context(opened())  # one in memory lasts as long as somebody has it
        await mq.create_topic("orders", partitions=1, dedup_window="10m")
        await mq.send_many("orders", [Message(b"x", id=f"o-{n}", key=f"k{n}") for n in range(20)])
        await mq.send("orders", b"later", id="late", key="k1", delay="1h")
        await mq.split("orders", 0)
        again = await mq.send_many("orders", [Message(b"y", id=f"o-{n}", key=f"k{n}") for n in range(22)])
        assert [receipt.duplicate for receipt in again] == [True] * 20 + [False] * 2
        mq = await stack.enter_async_context(opened())
        await mq.merge("orders", 1, 2)
        again = await mq.send_many("orders", [Message(b"z", id=f"o-{n}", key=f"k{n}") for n in range(23)])
        assert [receipt.duplicate for receipt in again] == [True] * 22 + [False]
        assert (await mq.send("orders", b"again", id="late", key="k1")).duplicate
        assert await mq.cancel("orders", id="late")
        assert not (await mq.send("orders", b"again", id="late", key="k1")).duplicate
        clock.advance(600_001)
        late = await mq.send_many("orders", [Message(b"w", id=f"o-{n}", key=f"k{n}") for n in range(23)])
        assert not any(receipt.duplicate for receipt in late)
