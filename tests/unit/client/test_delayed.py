"""Delayed messages in the producer: their moments, their batches and their order (R35, I3, I4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from postroom import InvalidSetting, Message, StoreUnavailable
from postroom.client.codec import due_at, new_id
from postroom.client.connection import Connection
from postroom.model.messages.batch import read_header, records
from postroom.model.messages.ids import digest
from postroom.model.messages.slot import slot_of
from postroom.model.moves.schedule import SLOT_HEADER
from postroom.model.topology.route import Range, Route
from tests.unit.client.client_endpoint import FakeEndpoint, Partition, failing, waiting

NOW = 1_700_000_000_000


@pytest.fixture
async def endpoint() -> FakeEndpoint:
    return FakeEndpoint(partitions=1)


@pytest.fixture
async def mq(endpoint: FakeEndpoint) -> AsyncIterator[Connection]:
    async with Connection(endpoint) as connection:
        yield connection


def values(endpoint: FakeEndpoint, partition_id: int | None = None) -> list[bytes]:
    chosen = [batch for place, _, batch, _ in endpoint.delayed if partition_id in (None, place)]
    return [record.value or b"" for batch in chosen for record in records(batch)]


def as_moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


async def turns(count: int = 20) -> None:
    """Let everything that can run without an event run."""
    for _ in range(count):
        await asyncio.sleep(0)


# ---- when it is due ----


@pytest.mark.parametrize(
    ("delay", "at", "due"),
    [
        (None, None, 0),
        (0, None, 0),
        (1.5, None, NOW + 1_500),
        ("10m", None, NOW + 600_000),
        (timedelta(days=400), None, NOW + 400 * 86_400_000),
        (0.0001, None, NOW + 1),
        (None, NOW / 1000, 0),
        (None, 1_000, 0),
        (None, as_moment(NOW + 1), NOW + 1),
        (None, "2099-01-31T08:00:00Z", 4_073_529_600_000),
    ],
)
def test_the_moment(delay: float | None, at: datetime | None, due: int) -> None:
    """Now, or before: not delayed at all."""
    assert due_at(delay, at, NOW) == due


def test_a_moment_is_said_once() -> None:
    with pytest.raises(InvalidSetting, match="not both"):
        due_at(1, NOW, NOW)


def test_ids_made_here_are_short_and_differ() -> None:
    ids = [new_id() for _ in range(1_000)]
    assert len(set(ids)) == 1_000
    assert all(len(id) == 15 and id.isalnum() for id in ids)


# ---- sending ----


async def test_a_delayed_message_has_a_due_receipt(mq: Connection, endpoint: FakeEndpoint) -> None:
    receipt = await mq.send("orders", b"a", key="k", id="o-1", delay=30)
    assert (receipt.topic, receipt.partition, receipt.offset, receipt.id) == ("orders", 0, -1, "o-1")
    assert receipt.due == as_moment(NOW + 30_000)
    assert not receipt.duplicate
    assert [(place, due, ids) for place, due, _, ids in endpoint.delayed] == [
        (1, NOW + 30_000, digest("o-1"))
    ]
    assert endpoint.values() == []


async def test_one_without_an_id_is_given_one_that_travels_with_it(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    receipt = await mq.send("orders", b"a", delay=30)
    (record,) = records(endpoint.delayed[0][2])
    assert record.headers == [("postroom-id", receipt.id.encode())]
    assert endpoint.delayed[0][3] == digest(receipt.id)


async def test_without_a_delay_it_is_an_ordinary_message(mq: Connection, endpoint: FakeEndpoint) -> None:
    for receipt in (
        await mq.send("orders", b"a", delay=0),
        await mq.send("orders", b"b", at=1_000),
        (await mq.send_many("orders", [Message(b"c", delay=0)], delay=30))[0],
    ):
        assert (receipt.due, receipt.offset >= 0) == (None, True)
    assert endpoint.values() == [b"a", b"b", b"c"]
    assert endpoint.delayed == []


async def test_expiry_counts_from_the_due_moment(mq: Connection, endpoint: FakeEndpoint) -> None:
    await mq.send("orders", b"a", delay=30, expires=10)
    await mq.send("orders", b"b", delay=30, expires=as_moment(NOW + 7))
    found = [dict(record.headers) for _, _, batch, _ in endpoint.delayed for record in records(batch)]
    expires = [b"%d" % (NOW + 40_000), b"%d" % (NOW + 7)]
    assert [headers["postroom-expires"] for headers in found] == expires


async def test_a_named_slot_travels_with_a_delayed_message(mq: Connection, endpoint: FakeEndpoint) -> None:
    await mq.send("orders", b"a", delay=30, slot=17)
    await mq.send("orders", b"b", slot=17)
    (record,) = records(endpoint.delayed[0][2])
    assert dict(record.headers)[SLOT_HEADER] == b"17"
    assert endpoint.values() == [b"b"]


async def test_wrong_delays_are_refused_before_anything_is_sent(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    with pytest.raises(InvalidSetting, match="delay"):
        await mq.send("orders", b"", delay=-1)
    with pytest.raises(InvalidSetting, match="time zone"):
        await mq.send("orders", b"", at=datetime(2040, 1, 1))
    with pytest.raises(InvalidSetting, match=r"messages\[1\].*delay"):
        await mq.send_many("orders", [Message(b"a", delay=1), Message(b"b", delay="soon")])
    with pytest.raises(InvalidSetting, match="slot"):
        await mq.send_many("orders", [Message(b"a")], delay=1, slot=5_000)
    assert endpoint.delayed == []


# ---- batches ----


async def test_a_list_with_one_delay_is_one_batch(mq: Connection, endpoint: FakeEndpoint) -> None:
    receipts = await mq.send_many("orders", [Message(b"%d" % i) for i in range(500)], delay=30)
    assert len(endpoint.delayed) == 1
    assert len({receipt.id for receipt in receipts}) == 500
    assert {receipt.due for receipt in receipts} == {as_moment(NOW + 30_000)}


async def test_a_batch_has_one_due_moment_only(mq: Connection, endpoint: FakeEndpoint) -> None:
    messages = [Message(b"%d" % i, id=f"id-{i}", delay=1 + i % 3) for i in range(9)] + [Message(b"now")]
    receipts = await mq.send_many("orders", messages)
    assert sorted((due - NOW, values_of(batch)) for _, due, batch, _ in endpoint.delayed) == [
        (1_000, [b"0", b"3", b"6"]),
        (2_000, [b"1", b"4", b"7"]),
        (3_000, [b"2", b"5", b"8"]),
    ]
    assert endpoint.values() == [b"now"]
    assert [receipt.id for receipt in receipts[:9]] == [f"id-{i}" for i in range(9)]
    assert [receipt.due for receipt in receipts[:3]] == [as_moment(NOW + 1_000 * (i + 1)) for i in range(3)]
    assert (receipts[9].due, receipts[9].offset) == (None, 0)


def values_of(batch: bytes) -> list[bytes]:
    return [record.value or b"" for record in records(batch)]


async def test_sends_of_one_moment_share_a_batch(mq: Connection, endpoint: FakeEndpoint) -> None:
    await asyncio.gather(*(mq.send("orders", b"%d" % i, delay=30) for i in range(50)))
    assert len(endpoint.delayed) == 1
    assert values(endpoint) == [b"%d" % i for i in range(50)]


async def test_a_message_for_now_does_not_wait_for_delayed_ones(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    """They have identities of their own: the store may keep the two apart."""
    gate = asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    later = asyncio.ensure_future(mq.send("orders", b"later", delay=30))
    await turns()
    await mq.send("orders", b"now")
    assert not later.done()
    gate.set()
    await later
    producers = [read_header(endpoint.delayed[0][2]).producer_id, endpoint.headers()[0].producer_id]
    assert len(set(producers)) == 2


async def test_as_many_small_batches_are_under_way_as_the_store_remembers(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    gate = asyncio.Event()
    endpoint.on["append"] += [waiting(gate)] * 20
    messages = [Message(b"%d" % i, delay=7 * (1 + i)) for i in range(20)]  # on one strand
    sending = asyncio.ensure_future(mq.send_many("orders", messages))
    await turns(100)
    assert endpoint.count("append") == 8
    gate.set()
    await sending
    assert values(endpoint) == [b"%d" % i for i in range(20)]


async def test_other_moments_need_not_wait_for_them(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()
    endpoint.on["append"] += [waiting(gate)] * 40
    sending = asyncio.ensure_future(
        mq.send_many("orders", [Message(b"%d" % i, delay=1 + i) for i in range(40)])
    )
    await turns(100)
    assert endpoint.count("append") == 40
    gate.set()
    assert len({receipt.id for receipt in await sending}) == 40


async def test_a_lost_receipt_schedules_once(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.after["append"].append(failing(StoreUnavailable("away")))
    receipt = await mq.send("orders", b"a", delay=30)
    assert (receipt.offset, receipt.duplicate, len(endpoint.delayed)) == (-1, False, 1)
    assert endpoint.count("append") == 2


async def test_one_way_receipts_know_the_id(mq: Connection, endpoint: FakeEndpoint) -> None:
    async with mq.producer("orders", confirm=False) as producer:
        receipt = await (await producer.post(b"a", delay=30))
        plain = await (await producer.post(b"b"))
    assert (receipt.offset, receipt.due) == (-1, as_moment(NOW + 30_000))
    assert endpoint.delayed[0][3] == digest(receipt.id)
    assert (plain.id, plain.due) == ("", None)


# ---- a partition that takes no more (I4) ----


def split(endpoint: FakeEndpoint) -> Route:
    endpoint.partitions[1].sealed = True
    for number in (1, 2):
        endpoint.partitions[number + 1] = Partition("orders", number)
    ranges = (Range(0, 511, 1, 2), Range(512, 1023, 2, 3))
    endpoint.routes["orders"] = Route("orders", 2, ranges)
    return endpoint.routes["orders"]


async def test_delayed_messages_follow_the_route_in_order(mq: Connection, endpoint: FakeEndpoint) -> None:
    await mq.send("orders", b"first", key="k", delay=30)
    split(endpoint)
    receipts = await asyncio.gather(*(mq.send("orders", b"%d" % i, key="k", delay=30) for i in range(20)))
    target = endpoint.routes["orders"].of_slot(slot_of(b"k"))
    assert {receipt.partition for receipt in receipts} == {target.partition}
    assert values(endpoint, target.partition_id) == [b"%d" % i for i in range(20)]


async def test_later_ones_wait_for_those_that_the_old_partition_has_not_answered(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    """A message for now learns of the split first; delayed ones of a key stay in order all the same."""
    gate = asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    old = asyncio.ensure_future(mq.send("orders", b"old", key="k", delay=30))
    await turns()
    route = split(endpoint)
    await mq.send("orders", b"now", key="k")
    new = asyncio.ensure_future(mq.send("orders", b"new", key="k", delay=30))
    await turns()
    assert endpoint.delayed == []
    gate.set()
    await asyncio.gather(old, new)
    assert values(endpoint, route.of_slot(slot_of(b"k")).partition_id) == [b"old", b"new"]


async def test_they_go_on_when_the_old_partition_took_them_after_all(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    gate = asyncio.Event()
    endpoint.after["append"].append(waiting(gate))
    old = asyncio.ensure_future(mq.send("orders", b"old", key="k", delay=30))
    await turns()
    route = split(endpoint)
    await mq.send("orders", b"now", key="k")
    new = asyncio.ensure_future(mq.send("orders", b"new", key="k", delay=30))
    await turns()
    assert not new.done()
    gate.set()
    await asyncio.gather(old, new)
    assert values(endpoint, 1) == [b"old"]
    assert values(endpoint, route.of_slot(slot_of(b"k")).partition_id) == [b"new"]
