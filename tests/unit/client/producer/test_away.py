"""Producers while the store, or one of several, is away: who waits, for how long, and who goes elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from postroom import ClosedError, Message, SendTimeout, StoreBusy
from postroom.client.connection import Connection
from tests.unit.client.changing_endpoint import AWAY, HIGH, LIMIT, LOW, REFUSED, Changing, turns
from tests.unit.client.client_endpoint import failing, waiting

pytestmark = pytest.mark.hasty


BUSY = StoreBusy("busy")


@pytest.fixture(params=["long way", "short way", "at once"])
async def endpoint(request: pytest.FixtureRequest) -> Changing:
    found = Changing()
    found.go(request.param)
    return found


@pytest.fixture
async def mq(endpoint: Changing) -> AsyncIterator[Connection]:
    async with Connection(endpoint) as connection:
        yield connection


# ---- a route that cannot be read now ----


async def test_the_first_send_waits_for_the_route(mq: Connection, endpoint: Changing) -> None:
    endpoint.on["route"].extend([failing(AWAY), failing(BUSY), failing(AWAY)])
    receipts = await asyncio.gather(*(mq.send("orders", b"%d" % i, key=LOW) for i in range(3)))
    assert [receipt.offset for receipt in receipts] == [0, 1, 2]
    assert endpoint.count("route") == 4  # once for all


async def test_it_fails_at_its_own_deadline_and_names_the_cause(mq: Connection, endpoint: Changing) -> None:
    endpoint.route_away = True
    patient = asyncio.ensure_future(mq.send("orders", b"patient", timeout=LIMIT))
    with pytest.raises(SendTimeout, match=r"nothing was stored.*database is away") as caught:
        await mq.send("orders", b"a", timeout="30ms")
    assert caught.value.details["stored"] is False
    assert caught.value.__cause__ is AWAY
    assert not patient.done()
    endpoint.route_away = False
    await patient
    assert endpoint.log == [b"patient"]


async def test_nobody_asks_for_the_route_when_nobody_waits(mq: Connection, endpoint: Changing) -> None:
    endpoint.route_away = True
    with pytest.raises(SendTimeout):
        await mq.send("orders", b"a", timeout="5ms")
    loading = mq._shared["orders"]._router._loading
    await asyncio.wait_for(loading.settle(), LIMIT)
    asked = endpoint.count("route")
    await asyncio.sleep(0.03)
    assert endpoint.count("route") == asked


async def test_entering_a_producer_waits_too(mq: Connection, endpoint: Changing) -> None:
    endpoint.on["route"].append(failing(BUSY))
    async with mq.producer("orders") as producer:
        await producer.send(b"a")
    endpoint.route_away = True
    with pytest.raises(SendTimeout, match="away"):
        async with mq.producer("orders", timeout="20ms"):
            pass


async def test_closing_ends_who_waits_for_the_route(endpoint: Changing) -> None:
    endpoint.route_away = True
    mq = Connection(endpoint)
    sending = asyncio.ensure_future(mq.send("orders", b"a", timeout=LIMIT))
    await endpoint.until_called("route")
    await asyncio.wait_for(mq.close(), LIMIT)
    with pytest.raises(ClosedError, match="nothing was stored"):
        await sending


async def test_a_one_way_post_waits_no_longer_than_its_timeout(mq: Connection, endpoint: Changing) -> None:
    endpoint.route_away = True
    producer = mq.producer("orders", confirm=False, timeout="20ms")
    with pytest.raises(SendTimeout, match="away"):
        await producer.post(b"a")
    await asyncio.wait_for(producer.close(), LIMIT)


# ---- a partition in trouble (R22) ----


async def until_away(mq: Connection, endpoint: Changing) -> asyncio.Future[object]:
    """A message of partition 1 that is being repeated, since its store is away."""
    await mq.send_many("orders", [Message(b"0", key=LOW), Message(b"0", key=HIGH)])
    endpoint.away = {1}
    stuck: asyncio.Future[object] = asyncio.ensure_future(mq.send("orders", b"stuck", key=LOW))
    await endpoint.until_called("append", 2)
    return stuck


async def test_messages_without_a_key_pass_over_a_partition_in_trouble(
    mq: Connection, endpoint: Changing
) -> None:
    stuck = await until_away(mq, endpoint)
    singles = [await asyncio.wait_for(mq.send("orders", b"a"), LIMIT) for _ in range(4)]
    lists = [await asyncio.wait_for(mq.send_many("orders", [Message(b"b")] * 3), LIMIT) for _ in range(4)]
    mixed = [Message(b"c"), Message(b"c", key=HIGH)]
    lists.append(await asyncio.wait_for(mq.send_many("orders", mixed), LIMIT))
    assert {receipt.partition for receipt in [*singles, *(r for one in lists for r in one)]} == {1}
    assert not stuck.done()
    endpoint.away = set()
    await asyncio.wait_for(stuck, LIMIT)
    assert {(await mq.send("orders", b"d")).partition for _ in range(4)} == {0, 1}  # its turn again


async def test_if_all_are_in_trouble_they_take_turns(mq: Connection, endpoint: Changing) -> None:
    stuck = [await until_away(mq, endpoint)]
    endpoint.away = {1, 2}
    stuck.append(asyncio.ensure_future(mq.send("orders", b"stuck too", key=HIGH)))
    await turns()
    keyless = [asyncio.ensure_future(mq.send("orders", b"%d" % i)) for i in range(4)]
    await turns()
    assert not any(future.done() for future in keyless)
    endpoint.away = set()
    await asyncio.wait_for(asyncio.gather(*stuck, *keyless), LIMIT)
    assert sorted(endpoint.log[2:]) == sorted([b"stuck", b"stuck too", *(b"%d" % i for i in range(4))])


async def test_what_is_queued_without_a_key_goes_elsewhere(mq: Connection, endpoint: Changing) -> None:
    gate = asyncio.Event()
    endpoint.away = {1}
    async with mq.producer("orders", batch_messages=10) as producer:
        await producer.send(b"0", key=HIGH)
        endpoint.on["append"].extend([waiting(gate)] * 2)
        tried = []
        for i in range(2):  # two batches under way to partition 1, no more may leave
            tried.append(await producer.post(b"tried %d" % i, key=LOW))
            await turns()
        keyed = await producer.post(b"keyed", key=LOW)
        producer._router._turns._at = 0
        queued = [await producer.post(b"%d" % i) for i in range(3)]
        assert endpoint.count("append") == 3
        gate.set()
        receipts = await asyncio.wait_for(asyncio.gather(*queued), LIMIT)
        assert {receipt.partition for receipt in receipts} == {1}
        assert not any(future.done() for future in [*tried, keyed])
        endpoint.away = set()
    assert endpoint.values(1) == [b"tried 0", b"tried 1", b"keyed"]


# ---- what surely was not stored (R6) ----


async def test_one_after_the_other_they_go_elsewhere_from_the_first_failure_on(
    mq: Connection, endpoint: Changing
) -> None:
    endpoint.away, endpoint.error = {1}, REFUSED
    receipts = [await mq.send("orders", b"%d" % i, timeout=LIMIT) for i in range(10)]
    assert {receipt.partition for receipt in receipts} == {1}
    assert endpoint.tried.count(1) == 1  # and not once for every second message
    assert endpoint.log == [b"%d" % i for i in range(10)]


async def test_what_is_of_unknown_fate_is_repeated_where_it_is(mq: Connection, endpoint: Changing) -> None:
    """I3: a first try that may have been stored, however sure later ones are that they were not."""
    endpoint.away = {1}
    sending = asyncio.ensure_future(mq.send("orders", b"once", timeout=LIMIT))
    await endpoint.until_called("append", 2)
    endpoint.error = REFUSED
    await endpoint.until_called("append", 3)
    assert set(endpoint.tried) == {1}
    endpoint.away = set()
    assert (await sending).partition == 0
    assert endpoint.log == [b"once"]


async def test_a_key_stays_with_its_partition(mq: Connection, endpoint: Changing) -> None:
    endpoint.away, endpoint.error = {1}, REFUSED
    keyed = asyncio.ensure_future(mq.send("orders", b"keyed", key=LOW, timeout=LIMIT))
    await endpoint.until_called("append", 3)
    assert set(endpoint.tried) == {1}
    assert len(endpoint.headers()) == 0
    endpoint.away = set()
    assert (await keyed).partition == 0


async def test_of_a_batch_with_and_without_keys_only_the_keys_wait(
    mq: Connection, endpoint: Changing
) -> None:
    endpoint.away, endpoint.error = {1}, REFUSED
    async with mq.producer("orders") as producer:
        posted = [await producer.post(b"%d" % i, key=LOW if i % 2 else None) for i in range(10)]
        free = await asyncio.wait_for(asyncio.gather(*posted[::2]), LIMIT)
        assert {receipt.partition for receipt in free} == {1}
        assert not any(future.done() for future in posted[1::2])
        endpoint.away = set()
    assert endpoint.values(1) == [b"1", b"3", b"5", b"7", b"9"]
    assert len(endpoint.log) == 10


async def test_the_route_says_when_it_is_back(mq: Connection, endpoint: Changing) -> None:
    endpoint.away, endpoint.error = {1}, REFUSED
    await mq.send_many("orders", [Message(b"a")] * 2)
    await mq.send_many("orders", [Message(b"a")] * 2)
    endpoint.away = set()
    async with asyncio.timeout(LIMIT):
        while (await mq.send("orders", b"b")).partition != 0:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.05)


async def test_a_route_that_says_it_is_away_is_believed_from_the_beginning(
    mq: Connection, endpoint: Changing
) -> None:
    endpoint.away, endpoint.error = {1}, REFUSED
    endpoint.routes["orders"] = replace(endpoint.routes["orders"], away=(1,))
    assert {(await mq.send("orders", b"a", timeout=LIMIT)).partition for _ in range(6)} == {1}
    assert 1 not in endpoint.tried


async def test_what_goes_elsewhere_does_not_linger_there(mq: Connection, endpoint: Changing) -> None:
    endpoint.away, endpoint.error = {1}, REFUSED
    async with mq.producer("orders", linger=LIMIT * 3, batch_messages=2) as producer:
        posted = [await producer.post(b"%d" % i) for i in range(2)]  # a full batch, to the first
        receipts = await asyncio.wait_for(asyncio.gather(*posted), LIMIT)
        assert {receipt.partition for receipt in receipts} == {1}


async def test_a_busy_store_leaves_open_whether_it_was_stored(mq: Connection, endpoint: Changing) -> None:
    """Unless it says so: a commit that took too long may have been one (I2)."""
    endpoint.away, endpoint.error = {1, 2}, BUSY
    with pytest.raises(SendTimeout, match="not known whether anything was stored"):
        await mq.send("orders", b"a", timeout="100ms")
    endpoint.error = StoreBusy("locked", stored=False)
    with pytest.raises(SendTimeout, match="nothing was stored"):
        await mq.send("orders", b"a", timeout="300ms")


async def test_one_way_goes_elsewhere_too(mq: Connection, endpoint: Changing) -> None:
    endpoint.away, endpoint.error = {1}, REFUSED
    async with mq.producer("orders", confirm=False, batch_messages=1) as producer:
        for i in range(6):
            await producer.post(b"%d" % i)
        await producer.flush()
        assert producer.failed == 0
    assert sorted(endpoint.log) == [b"%d" % i for i in range(6)]


# ---- what those are told whose time is over ----


async def test_the_last_error_is_told(mq: Connection, endpoint: Changing) -> None:
    endpoint.away, endpoint.error = {1, 2}, REFUSED
    with pytest.raises(SendTimeout, match="nothing was stored, sending again is safe") as caught:
        await mq.send("orders", b"a", timeout="300ms")
    assert str(caught.value).endswith("last error: connection refused by shard 'b'")
    assert caught.value.__cause__ is REFUSED
    assert caught.value.details["stored"] is False
    endpoint.error = AWAY
    with pytest.raises(SendTimeout, match="not known whether anything was stored") as caught:
        await mq.send("orders", b"a", timeout="300ms")
    assert str(caught.value).endswith("last error: store_unavailable: the database is away")
    assert caught.value.__cause__ is AWAY
    assert "stored" not in caught.value.details


# ---- leaving ----


async def test_closing_while_the_route_is_away_ends_with_the_deadlines(endpoint: Changing) -> None:
    mq = Connection(endpoint)
    producer = mq.producer("orders", timeout="100ms")
    await producer.send(b"0", key=LOW)
    endpoint.seal(1)
    endpoint.route_away, endpoint.away = True, {2}
    futures = [await producer.post(b"1", key=LOW), await producer.post(b"2", key=HIGH)]
    began = time.monotonic()
    with pytest.raises(ExceptionGroup, match="2 posts"):
        await asyncio.wait_for(producer.close(), LIMIT)
    await asyncio.wait_for(mq.close(), LIMIT)
    assert time.monotonic() - began < LIMIT / 2
    assert all(future.done() for future in futures)
