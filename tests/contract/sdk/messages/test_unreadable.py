"""A stored batch that nobody can read stops no group: its bytes become a dead letter, and what is behind it
is handled (R20, R22, I17).

The batches here have a right checksum and garbage behind their header, as a damaged writer leaves them; one
test turns bytes over in the table itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
from typing import Any

import pytest

import postroom
from postroom import App, Connection, Consumer
from postroom.broker.metrics import Figures
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.model.messages.batch import records
from postroom.store.sql.session import Area
from tests.contract.brokers import broker_of
from tests.contract.stores import everywhere, only_file
from tests.damage import garbage

REST = [f"m{at}" for at in range(6)]


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    return connection


async def place_of(mq: Connection, topic: str = "orders") -> int:
    return (await mq.route(topic)).ranges[0].partition_id


async def damaged(mq: Connection, batch: bytes | None = None) -> bytes:
    """Three messages, an unreadable batch of three at offset 3, three messages; returns its bytes."""
    batch = batch or garbage()
    await send(mq, *REST[:3])
    await broker_of(mq).append("orders", await place_of(mq), batch)
    await send(mq, *REST[3:])
    return batch


async def send(mq: Connection, *values: str) -> None:
    for value in values:
        await mq.send("orders", value.encode(), key="k")


async def handled(consumer: Consumer, count: int = 6) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        messages = await consumer.poll(max_messages=1, wait=20)
        assert messages, f"only {found} of {count} came"
        found += [message.value.decode() for message in messages]
        await consumer.ack(messages)
    return found


async def letter_of(mq: Connection, group: str = "g") -> postroom.DeadLetter:
    (letter,) = await mq.dead_letters("orders", group)
    return letter


MODES: dict[str, dict[str, Any]] = {
    "shared": {},
    "ordered": {"mode": "ordered"},
    "by partition": {"mode": "ordered", "order": "partition"},
}


@everywhere
@pytest.mark.parametrize("mode", MODES)
async def test_a_group_goes_past_it(mq: Connection, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    figures = Figures()
    broker_of(mq).watch(figures)
    data = await damaged(mq)
    async with mq.consumer("orders", "g", member="ann", **MODES[mode]) as ann:
        assert await handled(ann) == REST
        assert not await ann.poll(wait=0)
    assert (await mq.lag("orders", "g")).total.messages == 0
    letter = await letter_of(mq)
    assert (letter.topic, letter.partition, letter.offset) == ("orders", 0, 3)
    assert letter.value[8:] == data[8:]  # its offset was given when it was stored
    assert "offsets 3 to 5" in letter.reason
    assert "3 messages" in letter.reason
    assert figures.unreadable.items() == [(("orders", "delivery"), 1)]
    assert "orders:0:3" in caplog.text


@pytest.mark.parametrize("mode", MODES)
async def test_a_small_window_makes_one_letter_of_it(mq: Connection, mode: str) -> None:
    """Each lease has a part of the batch; the letter has all of it, once."""
    await damaged(mq, garbage(50))
    async with (
        mq.consumer("orders", "g", member="ann", window=4, **MODES[mode]) as ann,
        mq.consumer("orders", "g", member="ben", window=4, **MODES[mode]) as ben,
    ):
        both = asyncio.gather(*(until_idle(one) for one in (ann, ben)))
        assert sorted(functools.reduce(operator.iadd, await both, [])) == REST
    assert (await letter_of(mq)).offset == 3
    assert (await mq.lag("orders", "g")).total.messages == 0


async def until_idle(consumer: Consumer) -> list[str]:
    found: list[str] = []
    while (await consumer._endpoint.lag("orders", "g")).total.messages:
        messages = await consumer.poll(wait=0.1)
        found += [message.value.decode() for message in messages]
        await consumer.ack(messages)
    return found


async def test_every_member_of_a_broadcast_group_goes_past_it(mq: Connection) -> None:
    await damaged(mq)
    for name in ("ann", "ben"):
        async with mq.consumer("orders", "all", mode="broadcast", start="earliest", member=name) as consumer:
            assert await handled(consumer) == REST
    assert len(await mq.dead_letters("orders", "all")) == 2


async def test_what_is_settled_on_delivery_goes_past_it_too(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """It was settled as it was handed out: nothing is left to move, and the log says so."""
    await damaged(mq)
    for group, mode in (("g", "shared"), ("o", "ordered")):
        caplog.clear()
        async with mq.consumer("orders", group, ack="on_delivery", **MODES[mode]) as ann:
            found: list[str] = []
            while len(found) < 6:
                found += [message.value.decode() for message in await ann.poll(wait=20)]
            assert found == REST
        assert "orders:0:3" in caplog.text


@only_file
async def test_a_byte_that_was_turned_over_in_the_table(mq: Connection) -> None:
    """Where the batch is, is known from its row: its own offset has no checksum."""
    await mq.send_many("orders", [postroom.Message(value.encode()) for value in REST[:3]])
    await mq.send_many("orders", [postroom.Message(b"x%d" % at) for at in range(3)])
    await mq.send_many("orders", [postroom.Message(b"y%d" % at) for at in range(3)])
    await mq.send_many("orders", [postroom.Message(value.encode()) for value in REST[3:]])
    broker, place = broker_of(mq), await place_of(mq)
    with broker.store.session.write(Area.LOG) as tx:  # type: ignore[attr-defined]
        for offset, at in ((3, 7), (6, 70)):
            table = f"postroom_log_{place}"
            (data,) = tx.one(f"SELECT batch FROM {table} WHERE base_offset = ?", offset)
            changed = bytes(data[:at]) + bytes((data[at] ^ 1,)) + bytes(data[at + 1 :])
            tx.run(f"UPDATE {table} SET batch = ? WHERE base_offset = ?", changed, offset)
    broker._tail.forget([place])
    async with mq.consumer("orders", "g", mode="ordered") as ann:
        assert await handled(ann) == REST
    assert [letter.offset for letter in await mq.dead_letters("orders", "g")] == [3, 6]


async def test_a_batch_that_is_larger_than_a_message_is_cut(mq: Connection) -> None:
    await damaged(mq, garbage(2, 3 << 20))
    async with mq.consumer("orders", "g") as ann:
        assert await handled(ann) == REST
    letter = await letter_of(mq)
    assert len(letter.value) == DEFAULTS.max_message_bytes
    assert f"first {DEFAULTS.max_message_bytes:,}" in letter.reason


async def test_handlers_of_an_app_never_see_it(mq: Connection) -> None:
    await damaged(mq)
    app, seen, done = App(mq), list[str](), asyncio.Event()

    @app.subscribe("orders", group="g", mode="ordered")
    async def handle(message: postroom.Received) -> None:
        seen.append(message.value.decode())
        if len(seen) == 6:
            done.set()

    await app.start()
    async with asyncio.timeout(60):
        await done.wait()
    await app.stop()
    assert seen == REST
    assert (await letter_of(mq)).offset == 3


async def test_a_reader_skips_it_and_says_so(mq: Connection, caplog: pytest.LogCaptureFixture) -> None:
    await damaged(mq)
    assert [message.value.decode() async for message in mq.read("orders")] == REST
    assert "orders:0:3" in caplog.text
    assert [r.levelno for r in caplog.records if "orders:0:3" in r.message] == [logging.WARNING]


# ---- what comes later ----


async def test_redrive_does_not_hand_it_to_anybody(mq: Connection) -> None:
    """It is no message: it stays a dead letter, and the others come back."""
    await damaged(mq)
    async with mq.consumer("orders", "g") as ann:
        messages = await ann.poll(wait=20)
        await messages[0].dead("on purpose")
        await ann.ack(messages[1:])
        await handled(ann, 6 - len(messages))
        await mq.redrive("orders", "g")
        assert await handled(ann, 1) == ["m0"]
        assert not await ann.poll(wait=0)
    letter = await letter_of(mq)
    assert (letter.offset, len(letter.value)) == (3, len(garbage()))
    assert await mq.discard_dead_letters("orders", "g", ids=[letter.id]) == 1
    assert await mq.dead_letters("orders", "g") == []


async def test_dead_letters_that_cannot_be_read(mq: Connection, caplog: pytest.LogCaptureFixture) -> None:
    """Those around them are listed, and redriven; their bytes become a letter of their own then."""
    await send(mq, "m0", "m1")
    async with mq.consumer("orders", "g") as ann:
        for _ in range(2):
            (message,) = await ann.poll(max_messages=1, wait=20)
            await message.dead("on purpose")
        await broker_of(mq).append("orders.g.dead", await place_of(mq, "orders.g.dead"), garbage())
        assert [letter.value for letter in await mq.dead_letters("orders", "g")] == [b"m0", b"m1"]
        assert "orders.g.dead:0:2" in caplog.text
        await mq.redrive("orders", "g")
        assert sorted(await handled(ann, 2)) == ["m0", "m1"]
    assert "unreadable" in (await letter_of(mq)).reason


async def test_far_retries_that_cannot_be_read(mq: Connection) -> None:
    """The group's own retry topic is read like any other."""
    await send(mq, "m0")
    async with mq.consumer("orders", "g") as ann:
        (message,) = await ann.poll(wait=20)
        await message.dead("on purpose")
        await mq.redrive("orders", "g")
        assert await handled(ann, 1) == ["m0"]
        await broker_of(mq).append("orders.g.retry", await place_of(mq, "orders.g.retry"), garbage())
        while not await mq.dead_letters("orders", "g"):
            assert not await ann.poll(wait=0.1)
    assert "orders.g.retry" in (await letter_of(mq)).reason


STOP: dict[str, Any] = {"mode": "ordered", "exhausted": "stop", "max_attempts": 1}


async def stopped_in(mq: Connection, clock: ManualClock, consumer: Consumer) -> None:
    """The first of three messages of one batch has stopped; two of its key are parked behind it."""
    await mq.send_many("orders", [postroom.Message(b"a%d" % at, key="a") for at in range(3)])
    (message, *_) = await consumer.poll(max_messages=1, wait=20)
    await message.retry(reason="broken")


@only_file
async def test_what_stopped_can_be_listed_and_skipped_though_it_cannot_be_read(
    mq: Connection, clock: ManualClock
) -> None:
    async with mq.consumer("orders", "g", member="ann", **STOP) as ann:
        await stopped_in(mq, clock, ann)
        await mq.send("orders", b"b", key="b")
        assert await handled(ann, 1) == ["b"]  # the others are parked by now, or will be
        await rot(mq)
        (stopped,) = await mq.stopped("orders", "g")
        assert "cannot be read" in stopped.reason
        assert await mq.skip_stopped("orders", "g", ids=[stopped.id]) == 1
        await mq.send("orders", b"c", key="a")
        found = []
        while "c" not in found:
            found += await handled(ann, 1)
    assert set(found) <= {"a1", "a2", "c"}
    assert len(await mq.dead_letters("orders", "g")) == 1
    assert (await mq.lag("orders", "g")).total.messages == 0


async def rot(mq: Connection) -> None:
    """The first batch cannot be read from now on."""
    broker, place = broker_of(mq), await place_of(mq)
    with broker.store.session.write(Area.LOG) as tx:  # type: ignore[attr-defined]
        table = f"postroom_log_{place}"
        (data,) = tx.one(f"SELECT batch FROM {table} WHERE base_offset = 0")
        tx.run(
            f"UPDATE {table} SET batch = ? WHERE base_offset = 0", bytes(data[:61]) + bytes(len(data) - 61)
        )
    broker._tail.forget([place])


@only_file
async def test_a_parked_line_that_cannot_be_read_holds_its_key_no_longer(
    mq: Connection, clock: ManualClock
) -> None:
    """What is parked is looked for in the log: an unreadable batch among it goes to the dead letters."""
    async with mq.consumer("orders", "g", member="ann", **STOP) as ann:
        await stopped_in(mq, clock, ann)
        await handled_nothing(ann)
    await rot(mq)
    await mq.send("orders", b"a3", key="a")
    async with mq.consumer("orders", "g", member="ben", **STOP) as ben:
        await mq.skip_stopped("orders", "g")
        assert await handled(ben, 1) == ["a3"]
        assert not await ben.poll(wait=0)
    assert len(await mq.dead_letters("orders", "g")) == 1
    assert (await mq.lag("orders", "g")).total.messages == 0


async def handled_nothing(consumer: Consumer) -> None:
    assert not await consumer.poll(wait=0)


def test_the_letter_says_in_headers_where_it_was() -> None:
    """For whoever reads the topic of the letters itself."""
    from postroom.broker.moves.unreadable import letter_of
    from postroom.store.contract import StoredBatch

    batch = StoredBatch(3, 3, 17, garbage())
    (record,) = records(letter_of(batch, ValueError("broken"), ("orders", 0, 9), 5, 99).build(8))
    headers = dict(record.headers)
    assert headers["postroom-topic"] == b"orders"
    assert headers["postroom-partition"] == b"0"
    assert (headers["postroom-offset"], headers["postroom-last-offset"]) == (b"3", b"5")
    assert headers["postroom-messages"] == b"3"
    assert headers["postroom-unreadable"] == b"%d" % len(batch.data)
    assert b"broken" in (headers["postroom-reason"] or b"")
