"""Producers while the route changes: only keys of a replaced partition wait, and none is overtaken (I4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom import Message, PartitionSealed, SendTimeout, StoreBusy
from postroom.backoff import Pauses
from postroom.client.connection import Connection
from tests.model.examples import examples
from tests.unit.client.changing_endpoint import AWAY, HIGH, LIMIT, LOW, Changing, turns
from tests.unit.client.client_endpoint import Fault, failing, waiting

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


# ---- a sealed partition ----


async def test_what_cannot_be_read_after_a_seal_is_read_again(mq: Connection, endpoint: Changing) -> None:
    await mq.send("orders", b"0", key=LOW)
    endpoint.seal(1)
    endpoint.on["route"].extend([failing(AWAY), failing(BUSY), failing(AWAY)])
    sending = [asyncio.ensure_future(mq.send("orders", b"%d" % i, key=LOW)) for i in (1, 2)]
    await endpoint.until_called("route")
    endpoint.split(1)
    await asyncio.wait_for(asyncio.gather(*sending), LIMIT)
    assert endpoint.log == [b"0", b"1", b"2"]
    assert endpoint.values(endpoint.at(LOW)) == [b"1", b"2"]


@pytest.mark.parametrize("hangs", [True, False])
async def test_each_message_fails_at_its_own_deadline(
    mq: Connection, endpoint: Changing, hangs: bool
) -> None:
    async with mq.producer("orders") as producer:
        await producer.send(b"0", key=LOW)
        endpoint.seal(1)
        gate = asyncio.Event()
        if hangs:
            endpoint.on["route"].append(waiting(gate))
        endpoint.route_away = not hangs
        patient = await producer.post(b"patient", key=LOW, timeout=LIMIT)
        hasty = await producer.post(b"hasty", key=LOW, timeout="30ms")
        await turns()
        later = await producer.post(b"later", key=LOW, timeout="80ms")
        for future in (hasty, later):
            with pytest.raises(SendTimeout, match="nothing was stored") as caught:
                await asyncio.wait_for(future, LIMIT)
            assert caught.value.details["stored"] is False
        with pytest.raises(SendTimeout) as caught:
            await producer.send(b"nor this", key=LOW, timeout="10ms")
        assert caught.value.details["stored"] is False
        assert not patient.done()
        endpoint.split(1)
        endpoint.route_away = False
        gate.set()
        await asyncio.wait_for(patient, LIMIT)
    assert endpoint.log == [b"0", b"patient"]


async def test_a_refused_message_is_surely_not_stored(mq: Connection, endpoint: Changing) -> None:
    await mq.send("orders", b"0", key=LOW)
    endpoint.seal(1)
    with pytest.raises(SendTimeout, match="does not name the successor") as caught:
        await mq.send("orders", b"1", key=LOW, timeout="30ms")
    assert caught.value.details["stored"] is False
    gate = asyncio.Event()
    endpoint.on["append"].append(waiting(gate))
    with pytest.raises(SendTimeout, match="not known whether") as caught:
        await mq.send("orders", b"2", key=HIGH, timeout="30ms")
    assert "stored" not in caught.value.details


async def test_a_batch_of_unknown_fate_behind_a_refused_one_leaves_again(
    mq: Connection, endpoint: Changing
) -> None:
    """The first of this producer was refused: the second cannot be there, though nobody answered it."""
    gate = asyncio.Event()
    endpoint.on["append"].extend([waiting(gate), failing(AWAY)])
    async with mq.producer("orders") as producer:
        first = await producer.post(b"1", key=LOW)
        await turns()
        second = await producer.post(b"2", key=LOW)
        await turns()
        endpoint.seal(1)
        endpoint.split(1)
        gate.set()
        await asyncio.wait_for(asyncio.gather(first, second), LIMIT)
    assert endpoint.log == [b"1", b"2"]


async def test_other_partitions_go_on_while_the_route_is_read(mq: Connection, endpoint: Changing) -> None:
    await mq.send("orders", b"0", key=LOW)
    endpoint.seal(1)
    gate = asyncio.Event()
    endpoint.on["route"].append(waiting(gate))
    held = asyncio.ensure_future(mq.send("orders", b"held", key=LOW))
    await endpoint.until_called("route")
    for i in range(3):
        await asyncio.wait_for(mq.send("orders", b"high", key=HIGH), LIMIT)
        await asyncio.wait_for(mq.send("orders", b"high", slot=1000), LIMIT)
        assert (await asyncio.wait_for(mq.send("orders", b"keyless"), LIMIT)).partition == 1
        receipts = await asyncio.wait_for(mq.send_many("orders", [Message(b"%d" % i)] * 5), LIMIT)
        assert {receipt.partition for receipt in receipts} == {1}
    assert not held.done()
    endpoint.split(1)
    gate.set()
    await held
    assert endpoint.values(endpoint.at(LOW)) == [b"held"]


async def test_a_list_waits_only_for_its_part_of_the_partition(mq: Connection, endpoint: Changing) -> None:
    await mq.send("orders", b"0", key=LOW)
    endpoint.seal(1)
    gate = asyncio.Event()
    endpoint.on["route"].append(waiting(gate))
    first = asyncio.ensure_future(mq.send("orders", b"first", key=LOW))
    await endpoint.until_called("route")
    keys = [LOW, HIGH, None, LOW, HIGH, LOW]
    messages = [Message(b"%d" % i, key=key) for i, key in enumerate(keys)]
    listed = asyncio.ensure_future(mq.send_many("orders", messages))
    await turns()
    last = asyncio.ensure_future(mq.send("orders", b"last", key=LOW))
    await turns()
    assert endpoint.values(2) == [b"1", b"2", b"4"]
    endpoint.split(1)
    gate.set()
    receipts = await listed
    await asyncio.gather(first, last)
    assert endpoint.values(endpoint.at(LOW)) == [b"first", b"0", b"3", b"5", b"last"]
    places = [(receipt.partition, receipt.offset) for receipt in receipts]
    low = endpoint.partitions[endpoint.at(LOW)].number
    assert places == [(low, 1), (1, 0), (1, 1), (low, 2), (1, 2), (low, 3)]


async def test_a_route_with_more_than_the_one_change(mq: Connection, endpoint: Changing) -> None:
    """Partition 2 was replaced as well, and has not answered yet: its keys wait for that, no others."""
    await mq.send_many("orders", [Message(b"0", key=LOW), Message(b"0", key=HIGH)])
    gate = asyncio.Event()
    endpoint.on["append"].extend([waiting(gate), waiting(gate)])
    async with mq.producer("orders", linger=0) as producer:
        futures = [await producer.post(b"1", key=HIGH)]
        await turns()
        futures.append(await producer.post(b"2", key=HIGH))
        await turns()
        futures += [await producer.post(b"%d" % i, key=HIGH) for i in (3, 4)]  # these have not left yet
        await turns()
        assert endpoint.count("append") == 4
        endpoint.seal(1, 2)
        endpoint.merge(1, 2)
        await asyncio.wait_for(producer.send(b"low", key=LOW), LIMIT)
        futures.append(await producer.post(b"5", key=HIGH))
        await turns()
        assert endpoint.values(3) == [b"low"]
        gate.set()
        await asyncio.wait_for(asyncio.gather(*futures), LIMIT)
    assert endpoint.values(3) == [b"low", b"1", b"2", b"3", b"4", b"5"]


async def test_what_the_replaced_partition_took_after_all_stays_there(
    mq: Connection, endpoint: Changing
) -> None:
    await mq.send_many("orders", [Message(b"0", key=LOW), Message(b"0", key=HIGH)])
    gate = asyncio.Event()
    endpoint.after["append"].append(waiting(gate))
    old = asyncio.ensure_future(mq.send("orders", b"old", key=HIGH))
    await turns()
    endpoint.seal(1, 2)
    endpoint.merge(1, 2)
    await mq.send("orders", b"low", key=LOW)
    new = asyncio.ensure_future(mq.send("orders", b"new", key=HIGH))
    await turns()
    assert not new.done() and endpoint.values(3) == [b"low"]
    gate.set()
    await asyncio.gather(old, new)
    assert endpoint.values(2) == [b"0", b"old"] and endpoint.values(3) == [b"low", b"new"]


async def test_two_seals_at_once_do_not_wait_for_each_other(mq: Connection, endpoint: Changing) -> None:
    await mq.send_many("orders", [Message(b"0", key=LOW), Message(b"0", key=HIGH)])
    endpoint.seal(1, 2)
    low = asyncio.ensure_future(mq.send("orders", b"low", key=LOW))
    high = asyncio.ensure_future(mq.send("orders", b"high", key=HIGH))
    keyless = asyncio.ensure_future(mq.send("orders", b"keyless"))  # nobody takes it
    await endpoint.until_called("route", 2)
    assert not keyless.done()
    endpoint.split(1)
    await asyncio.wait_for(asyncio.gather(low, keyless), LIMIT)
    again = asyncio.ensure_future(mq.send("orders", b"again", key=HIGH))
    await turns()
    assert not high.done()
    endpoint.split(2)
    await asyncio.wait_for(asyncio.gather(high, again), LIMIT)
    assert endpoint.values(endpoint.at(HIGH)) == [b"high", b"again"]
    assert mq._shared["orders"]._router._loading.under_way is False  # and nobody reads the route any more


async def test_a_successor_that_is_sealed_meanwhile(mq: Connection, endpoint: Changing) -> None:
    await mq.send("orders", b"0", key=LOW)
    endpoint.seal(1)
    sending = [asyncio.ensure_future(mq.send("orders", b"%d" % i, key=LOW)) for i in range(1, 5)]
    await endpoint.until_called("route")
    lower, _ = endpoint.split(1)
    endpoint.seal(lower)
    await endpoint.until_called("route", 3)
    endpoint.split(lower)
    await asyncio.wait_for(asyncio.gather(*sending), LIMIT)
    assert endpoint.log == [b"%d" % i for i in range(5)]


async def test_a_partition_that_takes_messages_again_is_asked_again(
    mq: Connection, endpoint: Changing
) -> None:
    """The store decides: should the route never change, the producer is not stuck."""
    await mq.send("orders", b"0", key=LOW)
    endpoint.on["append"].append(failing(PartitionSealed("for a moment")))
    with patch("postroom.client.producer.router.ROUTE", Pauses(0.0, 0.0)):
        await asyncio.wait_for(mq.send("orders", b"1", key=LOW), LIMIT)
    assert endpoint.values(1) == [b"0", b"1"]


async def test_what_moved_does_not_linger_again(mq: Connection, endpoint: Changing) -> None:
    producer = mq.producer("orders", linger="1h")
    futures = [await producer.post(b"1", key=LOW), await producer.post(b"2", key=LOW)]
    endpoint.seal(1)
    flushing = asyncio.ensure_future(producer.flush())
    await endpoint.until_called("route")
    endpoint.split(1)
    await asyncio.wait_for(flushing, LIMIT)
    assert all(future.done() for future in futures) and endpoint.log == [b"1", b"2"]
    await producer.close()


async def test_what_lingers_on_a_replaced_partition_follows_at_once(
    mq: Connection, endpoint: Changing
) -> None:
    async with mq.producer("orders", linger="1h", batch_messages=2) as producer:
        lingering = await producer.post(b"1", key=HIGH)
        endpoint.seal(1, 2)
        endpoint.merge(1, 2)
        await asyncio.gather(*[await producer.post(b"low", key=LOW) for _ in range(2)])
        await asyncio.wait_for(lingering, LIMIT)
    assert endpoint.values(3).count(b"1") == 1
    assert 2 not in endpoint.tried  # it is known to take no more


async def test_one_way_messages_follow_the_route(mq: Connection, endpoint: Changing) -> None:
    async with mq.producer("orders", confirm=False) as producer:
        await producer.post(b"0", key=LOW)
        await producer.flush()
        endpoint.seal(1)
        await producer.post(b"1", key=LOW)
        await endpoint.until_called("route")
        await producer.post(b"2", key=LOW)
        endpoint.split(1)
    assert endpoint.log == [b"0", b"1", b"2"] and producer.failed == 0


async def test_one_way_messages_that_find_no_route_are_counted(mq: Connection, endpoint: Changing) -> None:
    async with mq.producer("orders", confirm=False, timeout="40ms") as producer:
        await producer.post(b"0", key=LOW)
        await producer.flush()
        endpoint.seal(1)
        for _ in range(3):
            await producer.post(b"1", key=LOW)
    assert producer.failed == 3
    assert endpoint.log == [b"0"]


# ---- the pause ----


async def pause_of_a_change() -> float:
    """Under load one of two partitions is sealed, and 20 ms later the route names its successors.

    How long it takes from then on until a message of a key of that partition is stored, in seconds.
    """
    endpoint, over = Changing(), asyncio.Event()
    stored: dict[str, list[float]] = {LOW: [], HIGH: []}

    async def load(mq: Connection, key: str) -> None:
        while not over.is_set():
            value = b"%s-%d" % (key.encode(), len(stored[key]))
            await mq.send("orders", value, key=key, timeout=LIMIT)
            stored[key].append(time.monotonic())
            await asyncio.sleep(0.0005)

    async def change() -> float:
        await endpoint.until(lambda: min(map(len, stored.values())) >= 20)
        endpoint.seal(1)
        await endpoint.until_called("route")
        low, high = len(stored[LOW]), len(stored[HIGH])
        await endpoint.until(lambda: len(stored[HIGH]) >= high + 5)  # these do not wait for the route
        await asyncio.sleep(0.02)
        assert len(stored[LOW]) == low
        activated = time.monotonic()
        endpoint.split(1)
        await endpoint.until(lambda: len(stored[LOW]) >= low + 20)
        over.set()
        return stored[LOW][low] - activated

    async with asyncio.timeout(LIMIT), Connection(endpoint) as mq:
        pause, *_ = await asyncio.gather(change(), load(mq, LOW), load(mq, HIGH))
    for key, times in stored.items():
        of_key = [value for value in endpoint.log if value.startswith(key.encode() + b"-")]
        assert of_key == [b"%s-%d" % (key.encode(), i) for i in range(len(times))]
    return pause


async def test_a_change_is_felt_only_by_keys_of_its_partition_and_not_for_long() -> None:
    assert min([await pause_of_a_change() for _ in range(3)]) < 0.06  # the best: the machine may be busy


# ---- whatever happens ----

DELAYED = 8  # delayed messages of a key are in order among themselves

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 7)),
        st.tuples(st.just("list"), st.integers(0, 7)),
        st.tuples(st.just("later"), st.integers(0, 7)),
        st.tuples(st.just("seal"), st.integers(0, 7)),
        st.tuples(st.just("split"), st.integers(0, 7)),
        st.tuples(st.just("merge"), st.integers(0, 7)),
        st.tuples(st.sampled_from(["busy", "away", "lost", "no route", "slow", "slow route"]), st.just(0)),
        st.tuples(st.just("turns"), st.integers(1, 12)),
    ),
    max_size=60,
)


class Scenario:
    """Steps on an endpoint under a producer; afterwards all changes are finished."""

    def __init__(self) -> None:
        self.endpoint = Changing(partitions=3)
        self.sent: list[tuple[bytes, int]] = []
        self.futures: list[asyncio.Future[object]] = []
        self.gates: list[asyncio.Event] = []

    async def run(self, steps: list[tuple[str, int]], batch_messages: int) -> None:
        async with (
            Connection(self.endpoint) as mq,
            mq.producer("orders", batch_messages=batch_messages) as producer,
        ):
            for what, number in steps:
                if what == "send":
                    future = await producer.post(self._value(number), key=f"k{number}")
                    self.futures.append(future)  # type: ignore[arg-type]
                elif what == "later":
                    future = await producer.post(self._value(number + DELAYED), key=f"k{number}", delay=30)
                    self.futures.append(future)  # type: ignore[arg-type]
                elif what == "list":
                    keys = [number, (number + 3) % 8, number]
                    listed = [Message(self._value(key), key=f"k{key}") for key in keys]
                    self.futures.append(asyncio.ensure_future(producer.send_many(listed)))
                    await turns(1)  # it is placed now, before what follows
                else:
                    await self._happens(what, number)
            for piece in self.endpoint.ranges:
                if self.endpoint.partitions[piece.partition_id].sealed:
                    self.endpoint.split(piece.partition_id)
            for gate in self.gates:
                gate.set()
            async with asyncio.timeout(LIMIT):
                await asyncio.gather(*self.futures)

    def _value(self, key: int) -> bytes:
        value = b"%d" % len(self.sent)
        self.sent.append((value, key))
        return value

    async def _happens(self, what: str, number: int) -> None:
        endpoint, ranges = self.endpoint, self.endpoint.ranges
        piece, after = ranges[number % len(ranges)], ranges[min(number % len(ranges) + 1, len(ranges) - 1)]
        if what == "seal":
            endpoint.seal(piece.partition_id)
        elif what == "split" and piece.first_slot < piece.last_slot:
            endpoint.seal(piece.partition_id)
            endpoint.split(piece.partition_id)
        elif what == "merge" and piece is not after:
            endpoint.seal(piece.partition_id, after.partition_id)
            endpoint.merge(piece.partition_id, after.partition_id)
        elif what == "turns":
            await turns(number)
        elif what in ("slow", "slow route"):
            self.gates.append(asyncio.Event())
            verb = "append" if what == "slow" else "route"
            endpoint.on[verb].append(waiting(self.gates[-1]))
        else:
            self._fails(what)

    def _fails(self, what: str) -> None:
        before: dict[str, tuple[str, Fault]] = {
            "busy": ("append", failing(BUSY)),
            "away": ("append", failing(AWAY)),
            "no route": ("route", failing(AWAY)),
        }
        if what in before:
            verb, fault = before[what]
            self.endpoint.on[verb].append(fault)
        elif what == "lost":
            self.endpoint.after["append"].append(failing(AWAY))


@settings(max_examples=examples(300), deadline=None)
@given(STEPS, st.integers(1, 3))
def test_whatever_changes_each_message_is_stored_once_and_keys_stay_in_order(
    steps: list[tuple[str, int]], batch_messages: int
) -> None:
    scenario = Scenario()
    with (
        patch("postroom.backoff.SOON", Pauses(0.0, 0.0)),
        patch("postroom.client.producer.router.ROUTE", Pauses(0.0, 0.0)),
    ):
        asyncio.run(scenario.run(steps, batch_messages))
    log = scenario.endpoint.log
    assert sorted(log) == sorted(value for value, _ in scenario.sent)
    for key in [*range(8), *range(DELAYED, DELAYED + 8)]:
        of_key = [value for value, of in scenario.sent if of == key]
        assert [value for value in log if value in set(of_key)] == of_key
