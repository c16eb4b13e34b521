"""The producer: batches that form by themselves, repeats that store once and in order, and nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import randbytes
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom import (
    ClosedError,
    InvalidMessage,
    InvalidName,
    InvalidSetting,
    Message,
    SendTimeout,
    StoreBusy,
    StoreFull,
    StoreUnavailable,
    UnknownFate,
    UnknownTopic,
)
from postroom.backoff import Pauses
from postroom.client.connection import Connection
from postroom.client.producer.accumulator import Accumulator
from postroom.model.messages.slot import slot_of
from postroom.model.topology.route import Range, Route
from tests.model.examples import examples
from tests.tuned import Tune
from tests.unit.client.client_endpoint import FakeEndpoint, Partition, failing, waiting

BUSY, AWAY, FULL = StoreBusy("busy"), StoreUnavailable("away"), StoreFull("full")


@pytest.fixture(params=["long way", "short way", "at once"])
async def endpoint(request: pytest.FixtureRequest) -> FakeEndpoint:
    found = FakeEndpoint(partitions=1)
    found.go(request.param)
    return found


@pytest.fixture
async def mq(endpoint: FakeEndpoint) -> AsyncIterator[Connection]:
    async with Connection(endpoint) as connection:
        yield connection


async def turns(count: int = 20) -> None:
    """Let everything that can run without an event run."""
    for _ in range(count):
        await asyncio.sleep(0)


# ---- batches form by themselves (R37) ----


async def test_a_message_alone_leaves_at_once(mq: Connection, endpoint: FakeEndpoint) -> None:
    receipt = await mq.send("orders", b"a", key="k", id="o-1")
    assert (receipt.topic, receipt.partition, receipt.offset, receipt.id) == ("orders", 0, 0, "o-1")
    assert (receipt.duplicate, receipt.due) == (False, None)
    assert endpoint.values() == [b"a"]


async def test_concurrent_sends_share_a_batch(mq: Connection, endpoint: FakeEndpoint) -> None:
    receipts = await asyncio.gather(*(mq.send("orders", b"%d" % i) for i in range(50)))
    assert [r.offset for r in receipts] == list(range(50))
    assert endpoint.count("append") == 1


async def test_while_a_batch_is_under_way_messages_gather(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()
    endpoint.on["append"] += [waiting(gate), waiting(gate)]
    async with mq.producer("orders") as producer:
        futures = [await producer.post(b"first")]
        await turns()
        futures.append(await producer.post(b"second"))  # the next one, at hand when the commit ends
        await turns()
        futures += [await producer.post(b"%d" % i) for i in range(10)]
        await turns()
        assert endpoint.count("append") == 2
        gate.set()
    assert [f.result().offset for f in futures] == list(range(12))
    assert sorted(h.records for h in endpoint.headers()) == [1, 1, 10]


async def test_full_batches_leave_while_few_are_under_way(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()
    endpoint.on["append"].extend([waiting(gate)] * 4)
    async with mq.producer("orders", batch_messages=2) as producer:
        for i in range(20):
            await producer.post(b"%d" % i)
        await turns()
        assert endpoint.count("append") == 4  # and no more than `in_flight_batches`
        gate.set()
    assert endpoint.values() == [b"%d" % i for i in range(20)]


async def test_a_list_is_one_append(mq: Connection, endpoint: FakeEndpoint) -> None:
    receipts = await mq.send_many("orders", [Message(b"%d" % i) for i in range(1000)])
    assert [r.offset for r in receipts] == list(range(1000))
    assert endpoint.count("append") == 1
    assert await mq.send_many("orders", []) == []


async def test_a_long_list_is_split_by_the_limits(mq: Connection, endpoint: FakeEndpoint) -> None:
    async with mq.producer("orders", batch_messages=100, batch_bytes="1KB", compression="none") as producer:
        receipts = await producer.send_many(Message(b"x" * 100, id=str(i)) for i in range(50))
    assert [(r.offset, r.id) for r in receipts] == [(i, str(i)) for i in range(50)]
    assert all(h.size <= 1024 for h in endpoint.headers())


async def test_linger_waits_for_more(mq: Connection, endpoint: FakeEndpoint) -> None:
    async with mq.producer("orders", linger="1h", batch_messages=3) as producer:
        await producer.post(b"a")
        await turns()
        assert endpoint.count("append") == 0
        await producer.post(b"b")
        await producer.post(b"c")  # full: no more lingering
        await turns()
        assert [h.records for h in endpoint.headers()] == [3]
        await producer.post(b"d")
        await producer.flush()  # nor when it is flushed
        assert [h.records for h in endpoint.headers()] == [3, 1]


async def test_linger_ends_by_itself(mq: Connection, endpoint: FakeEndpoint) -> None:
    async with mq.producer("orders", linger="5ms") as producer:
        first, second = await producer.post(b"a"), await producer.post(b"b")
        await asyncio.wait_for(asyncio.gather(first, second), 10)
    assert [h.records for h in endpoint.headers()] == [2]


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_compression(mq: Connection, endpoint: FakeEndpoint, compression: str) -> None:
    async with mq.producer("orders", compression=compression) as producer:
        await producer.send(b"x" * 1000)
    assert [h.compression for h in endpoint.headers()] == [compression]
    assert endpoint.values() == [b"x" * 1000]


async def test_a_list_of_large_values_is_compressed_if_that_pays(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    text, noise = [b"%d, " % n * 300 for n in range(100)], [randbytes(1200) for _ in range(100)]
    for values in (text, noise, [b"x" * 100] * 1000, [b"x" * 5000]):
        await mq.send_many("orders", values)
    async with mq.producer("orders", compression="auto") as producer:
        await producer.send_many(text)
    assert [h.compression for h in endpoint.headers()] == ["lz4", "none", "none", "none", "lz4"]
    assert endpoint.values() == [*text, *noise, *[b"x" * 100] * 1000, b"x" * 5000, *text]


async def test_a_topic_of_kafka_clients_is_not_compressed_unasked(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    endpoint.routes["orders"] = replace(endpoint.routes["orders"], keys="java")
    await mq.send_many("orders", [b"x" * 5000] * 100)
    async with mq.producer("orders") as producer:
        await producer.send_many([b"x" * 5000] * 100)
    assert [h.compression for h in endpoint.headers()] == ["none", "lz4"]


# ---- where messages go ----


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("without", [0, 3], ids=["all have keys", "some have none"])
async def test_receipts_are_in_the_order_of_the_list(partitions: int, without: int) -> None:
    endpoint = FakeEndpoint(partitions=partitions)
    async with Connection(endpoint) as mq:
        texts = [f"customer-{i}" for i in range(40)]
        keys = [None if without and i % without == 0 else text for i, text in enumerate(texts)]
        many = [Message(text.encode(), key=key) for text, key in zip(texts, keys, strict=True)]
        receipts = await mq.send_many("orders", many)
        route = await mq.route("orders")
        assert {r.partition for r in receipts} == set(range(partitions))
        for receipt, text, key in zip(receipts, texts, keys, strict=True):
            stored = endpoint.values(route.of_partition(receipt.partition).partition_id)
            assert stored[receipt.offset] == text.encode()
            assert key is None or route.of_slot(slot_of(key.encode())).partition == receipt.partition


async def test_keys_go_where_their_slot_is() -> None:
    endpoint = FakeEndpoint(partitions=4)
    async with Connection(endpoint) as mq:
        keys = [f"customer-{i}" for i in range(40)]
        receipts = await mq.send_many("orders", [Message(k.encode(), key=k) for k in keys])
        route = await mq.route("orders")
        assert [r.partition for r in receipts] == [route.of_slot(slot_of(k.encode())).partition for k in keys]
        assert {r.partition for r in receipts} == {0, 1, 2, 3}
        for receipt, key in zip(receipts, keys, strict=True):  # receipts are in the order of the list
            stored = endpoint.values(route.of_partition(receipt.partition).partition_id)
            assert stored[receipt.offset] == key.encode()
        alone = [await mq.send("orders", b"", key=k) for k in keys]
        assert [r.partition for r in alone] == [r.partition for r in receipts]


async def test_without_a_key_partitions_take_turns() -> None:
    endpoint = FakeEndpoint(partitions=4)
    async with Connection(endpoint) as mq:
        lists = [await mq.send_many("orders", [Message(b"")] * 10) for _ in range(8)]
        assert [{r.partition for r in receipts} for receipts in lists] == [{0}, {1}, {2}, {3}] * 2
        singles = [(await mq.send("orders", b"")).partition for _ in range(8)]
        assert sorted(singles) == [0, 0, 1, 1, 2, 2, 3, 3]
        together = await asyncio.gather(*(mq.send("orders", b"") for _ in range(30)))
        assert len({r.partition for r in together}) == 1  # one batch


async def test_a_named_slot() -> None:
    async with Connection(FakeEndpoint(partitions=4)) as mq:
        assert (await mq.send("orders", b"", slot=1023)).partition == 3
        receipts = await mq.send_many("orders", [Message(b"", key=str(i)) for i in range(9)], slot=300)
        assert {r.partition for r in receipts} == {1}
        for wrong in (-1, 1024, True, "1"):
            with pytest.raises(InvalidSetting, match="0 to 1023"):
                await mq.send("orders", b"", slot=wrong)  # type: ignore[arg-type]


# ---- refused before anything is stored ----


async def test_one_wrong_message_refuses_the_list(mq: Connection, endpoint: FakeEndpoint) -> None:
    with pytest.raises(InvalidMessage, match=r"messages\[2\]"):
        await mq.send_many("orders", [Message(b"a"), b"b", Message(object())])
    assert endpoint.values() == []


async def test_an_unknown_topic_is_answered_with_close_names(mq: Connection) -> None:
    with pytest.raises(UnknownTopic, match=r"did you mean 'orders'.*create_topic\('ordrs'\)"):
        await mq.send("ordrs", b"")
    with pytest.raises(UnknownTopic, match=r"create_topic\('nothing-like-it'\)"):
        await mq.send("nothing-like-it", b"")
    with pytest.raises(UnknownTopic):
        async with mq.producer("ordrs"):
            pass
    with pytest.raises(InvalidName, match="reserved"):
        await mq.send("orders.billing.dead", b"")


async def test_a_topic_that_was_made_again_takes_messages(mq: Connection, endpoint: FakeEndpoint) -> None:
    await mq.send("orders", b"a")
    await endpoint.delete_topic("orders")
    with pytest.raises(UnknownTopic):
        await mq.send("orders", b"b")
    endpoint.add_topic("orders", 1)
    assert (await mq.send("orders", b"c")).offset == 0


# ---- repeats (I3) ----


async def test_a_repeat_has_the_same_bytes(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.on["append"].extend([failing(BUSY), failing(AWAY), failing(BUSY)])
    receipt = await mq.send("orders", b"a")
    sent = [batch for verb, batch in endpoint.calls if verb == "append"]
    assert len(sent) == 4 and len(set(map(bytes, sent))) == 1  # type: ignore[call-overload]
    assert (receipt.offset, receipt.duplicate, endpoint.values()) == (0, False, [b"a"])


async def test_a_lost_receipt_does_not_store_twice(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.after["append"].append(failing(AWAY))
    receipt = await mq.send("orders", b"a")
    assert (receipt.offset, receipt.duplicate) == (0, False)
    assert endpoint.values() == [b"a"]


async def test_later_batches_wait_for_the_earlier(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.on["append"].extend([failing(BUSY), failing(BUSY)])
    async with mq.producer("orders", batch_messages=1) as producer:
        futures = [await producer.post(b"%d" % i) for i in range(8)]
    assert [f.result().offset for f in futures] == list(range(8))
    assert endpoint.values() == [b"%d" % i for i in range(8)]


async def test_no_batch_is_overtaken_by_more_than_the_store_remembers(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    """Stored, its receipt lost: were it repeated after many others, nobody could tell its fate."""
    endpoint.after["append"].append(failing(AWAY))
    async with mq.producer("orders", batch_messages=1) as producer:
        futures = [await producer.post(b"%d" % i) for i in range(30)]
    assert [f.result().offset for f in futures] == list(range(30))


async def test_full_is_told_at_once_and_the_sequence_goes_on(mq: Connection, endpoint: FakeEndpoint) -> None:
    await mq.send("orders", b"a")
    endpoint.on["append"].append(failing(FULL))
    with pytest.raises(StoreFull):
        await mq.send("orders", b"b")
    await mq.send("orders", b"c")
    assert endpoint.values() == [b"a", b"c"]
    assert [(h.epoch, h.base_sequence) for h in endpoint.headers()] == [(0, 0), (0, 1)]


async def test_batches_behind_a_failed_one_are_stored(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.on["append"].append(failing(FULL))
    async with mq.producer("orders", batch_messages=1) as producer:
        futures = [await producer.post(b"%d" % i) for i in range(6)]
        with pytest.raises(StoreFull):
            await futures[0]
    assert endpoint.values() == [b"%d" % i for i in range(1, 6)]
    epoch = int(endpoint.short_way)  # the next one had left before it was told
    assert [(h.epoch, h.base_sequence) for h in endpoint.headers()] == [(epoch, i) for i in range(5)]


async def test_giving_up_begins_a_new_epoch(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()  # never set: no answer comes
    await mq.send("orders", b"a")
    endpoint.on["append"].append(waiting(gate))
    with pytest.raises(SendTimeout, match="not known whether") as caught:
        await mq.send("orders", b"b", timeout="1s")
    assert isinstance(caught.value, UnknownFate)
    await mq.send("orders", b"c")
    assert endpoint.values() == [b"a", b"c"]
    assert [(h.epoch, h.base_sequence) for h in endpoint.headers()] == [(0, 0), (1, 0)]


async def test_what_was_given_up_is_fenced_when_it_comes_late(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    with pytest.raises(SendTimeout):
        await mq.send("orders", b"late", timeout="1s")  # time enough for a busy machine to begin it
    (late,) = [batch for verb, batch in endpoint.calls if verb == "append"]
    await mq.send("orders", b"next")
    with pytest.raises(Exception, match="epoch 0 of this producer was replaced"):
        await endpoint.append("orders", 1, late)  # type: ignore[arg-type]
    assert endpoint.values() == [b"next"]


async def test_batches_behind_one_given_up_are_stamped_anew_in_order(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    gate = asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    async with mq.producer("orders", batch_messages=1) as producer:
        first = await producer.post(b"0", timeout="20ms")
        rest = [await producer.post(b"%d" % i) for i in range(1, 6)]
        with pytest.raises(SendTimeout):
            await first
    assert [f.result().offset for f in rest] == list(range(5))
    assert endpoint.values() == [b"%d" % i for i in range(1, 6)]
    assert [(h.epoch, h.base_sequence) for h in endpoint.headers()] == [(1, i) for i in range(5)]


async def test_whoever_has_less_time_is_not_kept_by_others(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    patient = asyncio.ensure_future(mq.send("orders", b"a", timeout="60s"))
    for value in (b"b", b"c"):  # the first is in one batch with it
        with pytest.raises(SendTimeout):
            async with asyncio.timeout(20):
                await mq.send("orders", value, timeout="20ms")
    gate.set()
    await patient


async def test_an_unknown_fate_fails_that_batch_alone(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.on["append"].append(failing(UnknownFate("who knows")))
    with pytest.raises(UnknownFate):
        await mq.send("orders", b"a")
    await mq.send("orders", b"b")
    assert [(h.epoch, h.base_sequence) for h in endpoint.headers()] == [(1, 0)]


async def test_a_foreign_error_leaves_nobody_waiting(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.short_way = False  # there the store itself says what it was
    endpoint.on["append"].append(failing(RuntimeError("bug")))
    with pytest.raises(UnknownFate, match="bug"):
        await mq.send("orders", b"a")


async def test_a_producer_the_store_forgot_begins_anew(mq: Connection, endpoint: FakeEndpoint) -> None:
    await mq.send("orders", b"a")
    endpoint.partitions[1].producers.clear()
    await mq.send("orders", b"b")
    assert endpoint.values() == [b"a", b"b"]


FAULTS = st.sampled_from(["fine", "fine", "busy", "away", "lost"])


@settings(max_examples=examples(200))
@given(st.lists(FAULTS, max_size=40), st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 4))
def test_whatever_fails_on_the_way_each_message_is_stored_once_and_in_order(
    faults: list[str], keys: list[int], batch_messages: int
) -> None:
    async def scenario() -> FakeEndpoint:
        endpoint = FakeEndpoint(partitions=2)
        for fault in faults:
            before = {"busy": failing(BUSY), "away": failing(AWAY)}.get(fault, _nothing)
            endpoint.on["append"].append(before)
            if before is _nothing:
                endpoint.after["append"].append(failing(AWAY) if fault == "lost" else _nothing)
        async with (
            Connection(endpoint) as mq,
            mq.producer("orders", batch_messages=batch_messages) as producer,
        ):
            futures = []
            for number, key in enumerate(keys):
                futures.append(await producer.post(b"%d" % number, key=str(key)))
                if number % 7 == 6:
                    await turns(3)
            receipts = await asyncio.gather(*futures)
        for number, receipt in enumerate(receipts):
            partition_id = endpoint.routes["orders"].of_partition(receipt.partition).partition_id
            assert endpoint.values(partition_id)[receipt.offset] == b"%d" % number
        return endpoint

    with patch("postroom.backoff.SOON", Pauses(0.0, 0.0)):
        endpoint = asyncio.run(scenario())
    assert sorted(map(int, endpoint.values())) == list(range(len(keys)))
    for partition_id in endpoint.partitions:
        stored = list(map(int, endpoint.values(partition_id)))
        for key in set(keys):
            of_key = [n for n in stored if keys[n] == key]
            assert of_key == sorted(of_key)


async def _nothing() -> None:
    pass


# ---- a partition that takes no more (I4) ----


async def test_a_sealed_partition_is_left_in_order(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()
    async with mq.producer("orders", batch_messages=2) as producer:
        await producer.send(b"before", key="k")
        endpoint.on["append"].append(waiting(gate))
        futures = [await producer.post(b"%d" % i, key="k") for i in range(9)]
        await turns()
        _split(endpoint)
        gate.set()
    assert endpoint.values(1) == [b"before"]
    successor = endpoint.routes["orders"].of_slot(slot_of(b"k"))
    assert endpoint.values(successor.partition_id) == [b"%d" % i for i in range(9)]
    assert {f.result().partition for f in futures} == {successor.partition}


async def test_what_was_stored_before_the_seal_stays_there(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.after["append"].append(failing(AWAY))  # stored, but the receipt is lost; then it is sealed
    sending = asyncio.ensure_future(mq.send("orders", b"a", key="k"))
    await turns(6)
    _split(endpoint)
    receipt = await sending
    assert (receipt.partition, receipt.offset) == (0, 0)
    assert endpoint.values() == [b"a"]


def _split(endpoint: FakeEndpoint) -> None:
    endpoint.partitions[1].sealed = True
    endpoint.partitions[8], endpoint.partitions[9] = Partition("orders", 1), Partition("orders", 2)
    endpoint.routes["orders"] = Route("orders", 2, (Range(0, 511, 1, 8), Range(512, 1023, 2, 9)))


# ---- one-way ----


async def test_one_way_sends_carry_no_sequence_and_count_failures(
    mq: Connection, endpoint: FakeEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.on["append"].extend([failing(BUSY), failing(AWAY)])
    async with mq.producer("orders", confirm=False, batch_messages=2) as producer:
        futures = [await producer.post(b"%d" % i) for i in range(6)]
        assert all(f.done() and f.result().offset == -1 for f in futures)
    assert producer.failed == 4
    assert endpoint.values() == [b"4", b"5"]
    assert [h.producer_id for h in endpoint.headers()] == [-1]
    assert len([r for r in caplog.records if "one-way" in r.message]) == 1


# ---- back-pressure (R40, I17) ----


async def test_post_waits_while_the_buffer_is_full(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    async with mq.producer("orders", buffer_bytes=100) as producer:
        await producer.post(b"x" * 1000)  # an empty buffer takes any message
        posting = [asyncio.ensure_future(producer.post(b"%d" % i * 40)) for i in range(5)]
        await turns()
        assert not any(p.done() for p in posting)
        posting[0].cancel()
        gate.set()
        await asyncio.gather(*posting[1:])
    assert [v[:1] for v in endpoint.values()] == [b"x", b"1", b"2", b"3", b"4"]


async def test_waiting_for_room_ends_with_the_timeout(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    async with mq.producer("orders", buffer_bytes=10) as producer:
        await producer.post(b"x" * 10)
        with pytest.raises(SendTimeout, match="nothing was stored"):
            await producer.post(b"y" * 10, timeout="10ms")
        gate.set()
    assert endpoint.values() == [b"x" * 10]


async def test_a_cancelled_send_that_has_not_left_is_not_sent(mq: Connection, endpoint: FakeEndpoint) -> None:
    gate = asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    first = asyncio.ensure_future(mq.send("orders", b"a"))
    await turns()
    second = asyncio.ensure_future(mq.send("orders", b"b"))
    await turns()
    second.cancel()
    await turns()
    gate.set()
    await first
    await mq.send("orders", b"c")
    assert endpoint.values() == [b"a", b"c"]


# ---- leaving ----


async def test_leaving_raises_what_nobody_awaited(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.on["append"].append(failing(FULL))
    with pytest.raises(StoreFull):
        async with mq.producer("orders") as producer:
            await producer.post(b"a")
    endpoint.on["append"].extend([failing(FULL), failing(StoreFull("again"))])
    producer = mq.producer("orders")
    await producer.post(b"a")
    await turns()
    await producer.post(b"b")
    with pytest.raises(ExceptionGroup, match="2 posts"):
        await producer.close()


async def test_leaving_does_not_raise_what_was_awaited(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.on["append"].append(failing(FULL))
    async with mq.producer("orders") as producer:
        future = await producer.post(b"a")
        with pytest.raises(StoreFull):
            await future


async def test_an_error_in_the_block_is_kept(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.on["append"].append(failing(FULL))

    async def block() -> None:
        async with mq.producer("orders") as producer:
            await producer.post(b"a")
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        await block()
    assert "posts to topic 'orders' failed" in caught.value.__notes__[0]


async def test_leaving_flushes(mq: Connection, endpoint: FakeEndpoint) -> None:
    async with mq.producer("orders", linger="1h") as producer:
        await producer.post(b"a")
    assert endpoint.values() == [b"a"]
    with pytest.raises(ClosedError):
        await producer.post(b"b")
    with pytest.raises(ClosedError):
        await producer.send_many([Message(b"b")])


async def test_the_connection_flushes_what_is_open(endpoint: FakeEndpoint) -> None:
    async with Connection(endpoint) as mq:
        producer = mq.producer("orders", linger="1h")
        await producer.post(b"a")
    assert endpoint.values() == [b"a"] and endpoint.closed


@pytest.mark.parametrize(
    "wrong",
    [
        {"compression": "brotli"},
        {"linger": "soon"},
        {"batch_messages": 0},
        {"batch_messages": 10**9},
        {"batch_bytes": "1 lightyear"},
        {"buffer_bytes": 0},
    ],
)
async def test_wrong_settings(mq: Connection, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        mq.producer("orders", **wrong)


# ---- the short way: an endpoint that queues batches, and tells ----


async def test_what_is_not_answered_in_time_goes_on_by_the_long_way(
    mq: Connection, endpoint: FakeEndpoint, tune: Tune
) -> None:
    tune(client={"silent_s": 0.01})
    endpoint.short_way, gate = True, asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    sending = asyncio.ensure_future(mq.send("orders", b"a", timeout="20s"))
    (accumulator,) = await _accumulators(mq)
    await eventually(lambda: accumulator._tasks == 1)
    assert endpoint.count("append") == 1  # it waits for the very same try
    gate.set()
    assert (await sending).offset == 0
    assert (accumulator._tasks, accumulator.busy) == (0, False)


async def test_a_batch_does_not_overtake_one_on_the_long_way(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.short_way, gate = False, asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    async with mq.producer("orders", batch_messages=1) as producer:
        await producer.post(b"a")
        await turns()
        endpoint.short_way = True
        await producer.post(b"b")
        await turns()
        assert endpoint.count("queue") == 0
        gate.set()
        await producer.flush()
        await producer.post(b"c")
    assert endpoint.count("queue") == 2  # what was refused behind the first leaves again; and the last
    assert endpoint.values() == [b"a", b"b", b"c"]


async def test_an_endpoint_that_is_closed_is_told_to_those_who_wait(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    await mq.send("orders", b"a")
    endpoint.on["append"].append(failing(ClosedError("this connection is closed")))

    def closed(*args: Any) -> bool:
        raise ClosedError("this connection is closed")

    with patch.object(endpoint, "append_soon", closed), pytest.raises(ClosedError):
        await mq.send("orders", b"b", timeout="20s")


async def test_batches_of_one_list_are_made_before_the_first_is_handed_over() -> None:
    """So that the writer finds them all, and one commit is enough."""
    endpoint = FakeEndpoint(partitions=4)
    endpoint.short_way, made = True, list[int]()
    queue = endpoint.append_soon

    def queued(*args: Any) -> bool:
        made.append(sum(len(one._in_flight) for one in mq._shared["orders"]._router.accumulators))
        return queue(*args)

    async with Connection(endpoint) as mq:
        with patch.object(endpoint, "append_soon", queued):
            await mq.send_many("orders", [Message(b"x", key=str(i)) for i in range(100)])
    assert made == [4, 4, 4, 4]


async def test_an_answer_that_comes_after_the_end_is_nobodys(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.short_way, gate = True, asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    sending = asyncio.ensure_future(mq.send("orders", b"a"))
    (accumulator,) = await _accumulators(mq)
    assert accumulator.stop() == []
    with pytest.raises(UnknownFate, match="closed before the receipt"):
        await sending
    gate.set()
    await turns()
    assert endpoint.values() == [b"a"]


# ---- at once: an endpoint that stores in the call what comes alone ----


async def test_a_message_alone_is_stored_in_the_call(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.go("at once")
    await mq.send("orders", b"a")  # the route is read
    queued = endpoint.count("queue")
    sending = asyncio.ensure_future(mq.send("orders", b"b", key="k", headers={"x": "y"}, timeout=8))
    await asyncio.sleep(0)
    assert endpoint.values() == [b"a", b"b"]
    assert endpoint.turn_used and not sending.done()  # others have their turn
    receipt = await sending
    assert (receipt.partition, receipt.offset, receipt.duplicate) == (0, 1, False)
    assert (endpoint.count("queue"), endpoint.turn_used) == (queued, False)
    await mq.send("orders", b"c")
    assert [header.base_sequence for header in endpoint.headers()] == [0, 1, 2]


async def test_what_was_tried_in_the_call_goes_on_as_it_is(mq: Connection, endpoint: FakeEndpoint) -> None:
    """It may have been stored: the same bytes are sent again, under the same sequence (I3)."""
    endpoint.go("at once")
    await mq.send("orders", b"a")
    store = endpoint.store_alone

    def lost(partition_id: int, batch: bytes) -> None:
        store(partition_id, batch)

    with patch.object(endpoint, "store_alone", lost):
        receipt = await mq.send("orders", b"b")
    assert (receipt.offset, receipt.duplicate) == (1, True)
    after = await mq.send("orders", b"c")
    assert (after.offset, endpoint.values()) == (2, [b"a", b"b", b"c"])
    assert mq._shared["orders"]._room.taken == 0 and mq._shared["orders"]._at_rest


@pytest.mark.parametrize("fault", [RuntimeError("a fault"), KeyboardInterrupt()])
async def test_a_fault_behind_the_commit_loses_nothing_that_comes_later(
    mq: Connection, endpoint: FakeEndpoint, fault: BaseException
) -> None:
    """Its sequence is not given to another message, which would be taken for a repeat (I3)."""
    endpoint.go("at once")
    await mq.send("orders", b"a")
    store = endpoint.store_alone

    def faulty(partition_id: int, batch: bytes) -> None:
        store(partition_id, batch)
        raise fault

    with patch.object(endpoint, "store_alone", faulty):
        sending = mq.send("orders", b"b")
        if isinstance(fault, Exception):
            assert (await sending).offset == 1
        else:
            with pytest.raises(KeyboardInterrupt):
                sending.send(None)
            sending.close()
    assert not endpoint.turn_used
    later = await mq.send("orders", b"c")
    assert (later.offset, later.duplicate, endpoint.values()) == (2, False, [b"a", b"b", b"c"])


async def test_whoever_goes_away_in_the_turn_has_sent(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.go("at once")
    await mq.send("orders", b"a")
    sending = asyncio.ensure_future(mq.send("orders", b"b"))
    await asyncio.sleep(0)
    assert endpoint.turn_used
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert not endpoint.turn_used and endpoint.values() == [b"a", b"b"]
    assert (await mq.send("orders", b"c")).offset == 2


async def test_only_a_plain_message_is_stored_in_the_call(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.go("at once")
    await mq.send("orders", b"a")
    with patch.object(endpoint, "store_alone", None):
        await mq.send("orders", b"b", id="o-1")
        await mq.send("orders", b"c", slot=3)
        await mq.send("orders", b"d", delay=3600)
        await mq.send("orders", b"e", timeout="20s")
        for wrong in (-1, "soon", True):
            with pytest.raises(InvalidSetting):
                await mq.send("orders", b"f", timeout=wrong)
        with pytest.raises(SendTimeout):
            await mq.send("orders", b"g", timeout=0)
        async with mq.producer("orders", confirm=False) as producer:
            await producer.send(b"h")
        async with mq.producer("orders", linger=0.01) as producer:
            await producer.send(b"i")
        async with mq.producer("orders") as producer:
            posted = await producer.post(b"j")
            await producer.send(b"k")  # behind what is under way
            assert posted.done()
    with pytest.raises(ClosedError):
        await producer.send(b"l")
    assert endpoint.values()[-4:] == [b"h", b"i", b"j", b"k"]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)


async def _accumulators(mq: Connection) -> list[Accumulator]:
    """Those of the shared producer, once something is in flight."""
    await eventually(lambda: "orders" in mq._shared)
    router = mq._shared["orders"]._router
    await eventually(lambda: any(one._in_flight for one in router.accumulators))
    return router.accumulators
