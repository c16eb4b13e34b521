"""Verdicts that the store does not take for longer than a lease: they stay given (I25)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from postroom import (
    ClosedError,
    Consumer,
    LeaseLost,
    Message,
    PermissionDenied,
    PostroomError,
    StoreUnavailable,
    UsageError,
)
from postroom.client.connection import Connection
from postroom.clock import ManualClock
from tests.tuned import Tune
from tests.unit.client.client_endpoint import FakeEndpoint
from tests.unit.client.ordered_endpoint import OrderedEndpoint

pytestmark = pytest.mark.hasty


LEASE = "200ms"
AWAY = StoreUnavailable("the database is away")


class Faulty:
    """Settles fail while `error` is set."""

    def __init__(self, endpoint: FakeEndpoint) -> None:
        self.error: Exception | None = None
        self.tries = 0
        honest: Any = endpoint.settle

        async def settle(*args: Any) -> Any:
            self.tries += 1
            if self.error is not None:
                raise self.error
            return await honest(*args)

        endpoint.settle = settle  # type: ignore[method-assign]


@asynccontextmanager
async def opened(endpoint: FakeEndpoint, count: int, **settings: Any) -> AsyncIterator[Consumer]:
    async with Connection(endpoint, clock=endpoint.clock) as mq:
        await mq.send_many("orders", [Message(b"%d" % i, key="k") for i in range(count)])
        async with mq.consumer("orders", "billing", lease=LEASE, **settings) as consumer:
            yield consumer


@pytest.fixture
async def endpoint() -> FakeEndpoint:
    return FakeEndpoint(ManualClock(), partitions=1)


@pytest.fixture
async def ordered() -> OrderedEndpoint:
    made = OrderedEndpoint(ManualClock(), partitions=1)
    made.group = replace(made.group, mode="ordered")
    return made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def verdicts(endpoint: FakeEndpoint) -> list[tuple[str, int, int]]:
    return [(v.kind, v.first, v.last) for parts in endpoint.settled for part in parts for v in part.verdicts]


async def late(call: Any) -> PostroomError:
    with pytest.raises(StoreUnavailable, match="tried again in the background") as caught:
        await asyncio.wait_for(call, 30)
    assert caught.value.details["pending"] and caught.value.retriable
    return caught.value


async def test_an_ack_that_failed_is_stored_once_the_store_is_back(endpoint: FakeEndpoint) -> None:
    faulty = Faulty(endpoint)
    async with opened(endpoint, 2) as consumer:
        first, second = await consumer.poll()
        faulty.error = AWAY
        assert "the database is away" in str(await late(first.ack()))
        assert consumer.in_hand == 2  # nobody else gets it as long as its lease can be kept
        faulty.error = None
        await until(lambda: consumer.in_hand == 1)
        assert verdicts(endpoint) == [("ack", 0, 0)]
        await first.ack()  # once more is harmless
        await second.ack()
    assert verdicts(endpoint) == [("ack", 0, 0), ("ack", 1, 1)]


async def test_it_is_renewed_meanwhile_as_something_that_is_decided(endpoint: FakeEndpoint) -> None:
    """A broker that asks before it delivers again is told that it is done (R19)."""
    faulty = Faulty(endpoint)
    async with opened(endpoint, 1) as consumer:
        (message,) = await consumer.poll()
        faulty.error = AWAY
        await late(message.ack())
        assert [held.spans for held in consumer._in_flight.acking()] == [((0, 0),)]
        faulty.error = None


@pytest.mark.parametrize("kind", ["ack", "retry", "release"])
async def test_the_same_verdict_again_waits_for_the_same_try(endpoint: FakeEndpoint, kind: str) -> None:
    faulty = Faulty(endpoint)
    async with opened(endpoint, 1) as consumer:
        (message,) = await consumer.poll()
        faulty.error = AWAY
        await late(getattr(message, kind)())
        await late(getattr(message, kind)())
        again = asyncio.ensure_future(getattr(message, kind)())
        with pytest.raises(UsageError, match="settle each once"):
            await (message.retry() if kind == "ack" else message.ack())
        assert not again.done()
        faulty.error = None
        await asyncio.wait_for(again, 30)
        assert [v for v in verdicts(endpoint) if v[0] == kind] == [(kind, 0, 0)]
        if kind == "release":
            await consumer.ack(await consumer.poll())


@pytest.mark.parametrize("kind", ["ack", "retry", "release"])
async def test_the_same_verdict_again_is_harmless_once_it_is_stored(
    endpoint: FakeEndpoint, ordered: OrderedEndpoint, kind: str
) -> None:
    """Whoever was told to settle it the same way again need not be quicker: seed 500315 of the simulator."""
    for one in (endpoint, ordered):
        faulty = Faulty(one)
        async with opened(one, 1) as consumer:
            (message,) = await consumer.poll()
            faulty.error = AWAY
            await late(getattr(message, kind)())
            faulty.error = None
            await until(lambda one=one: (kind, 0, 0) in verdicts(one))  # type: ignore[misc]
            await asyncio.wait_for(getattr(message, kind)(), 30)
            assert [v for v in verdicts(one) if v[0] == kind] == [(kind, 0, 0)]
            with pytest.raises(UsageError, match="settle each once"):
                await (message.retry() if kind == "ack" else message.ack())
            if kind != "ack":  # it comes again, and is settled anew
                (again,) = await consumer.poll()
                await again.ack()


async def test_a_list_behind_one_that_fails_is_told_as_well(endpoint: FakeEndpoint) -> None:
    faulty = Faulty(endpoint)
    async with opened(endpoint, 4) as consumer:
        first, *others = await consumer.poll()
        faulty.error = AWAY
        calls = asyncio.gather(late(first.ack()), late(consumer.ack(others)))
        await calls
        faulty.error = None
        await until(lambda: consumer.in_hand == 0)
    assert sorted(verdicts(endpoint)) == [("ack", 0, 3)] or len(verdicts(endpoint)) == 2


async def test_one_that_somebody_else_has_by_then_is_lost(
    endpoint: FakeEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(endpoint)
    async with opened(endpoint, 1) as consumer:
        (message,) = await consumer.poll()
        faulty.error = AWAY
        await late(message.ack())
        endpoint.steal(1)
        faulty.error = None
        with pytest.raises(LeaseLost):
            await message.ack()
        assert consumer.in_hand == 0
    assert "in other hands by now" in caplog.text


async def test_what_the_store_refuses_for_good_is_not_renewed_any_more(endpoint: FakeEndpoint) -> None:
    faulty = Faulty(endpoint)
    async with opened(endpoint, 2) as consumer:
        first, _ = await consumer.poll()
        faulty.error = PermissionDenied("not any more")
        with pytest.raises(PermissionDenied):
            await first.ack()
        (held,) = consumer._in_flight.held(endpoint.now_ms(), 3_600_000)
        assert held.spans == ((1, 1),)
        await first.extend()  # the user goes on with it
        (held,) = consumer._in_flight.held(endpoint.now_ms(), 3_600_000)
        assert held.spans == ((0, 1),)
        faulty.error = None
        await first.ack()


async def test_it_is_not_tried_for_longer_than_a_handler_may_hang(endpoint: FakeEndpoint) -> None:
    faulty = Faulty(endpoint)
    async with opened(endpoint, 1, max_handling="500ms") as consumer:
        (message,) = await consumer.poll()
        faulty.error = AWAY
        await late(message.ack())
        await until(lambda: bool(consumer._in_flight.held(endpoint.now_ms(), 3_600_000)) is False)
        faulty.error = None


async def test_leaving_tries_a_last_time(endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Faulty(endpoint)
    async with opened(endpoint, 2) as consumer:
        first, _ = await consumer.poll()
        faulty.error = AWAY
        await late(first.ack())
        faulty.error = None
    assert verdicts(endpoint) == [("ack", 0, 0), ("release", 1, 1)]


async def test_leaving_does_not_wait_for_ever(endpoint: FakeEndpoint, tune: Tune) -> None:
    tune(client={"leave_s": 0.3})
    faulty = Faulty(endpoint)
    async with opened(endpoint, 1) as consumer:
        (message,) = await consumer.poll()
        faulty.error = AWAY
        await late(message.ack())
        waiting = asyncio.ensure_future(message.ack())
        await asyncio.sleep(0)
        tried = faulty.tries
        await asyncio.wait_for(consumer.close(), 30)
        with pytest.raises(ClosedError, match="delivered again"):
            await asyncio.wait_for(waiting, 30)
        assert faulty.tries > tried
        await asyncio.wait_for(consumer._settler.drained(), 30)  # nothing goes on behind it


async def test_acks_after_handling_are_tried_on_as_well(endpoint: FakeEndpoint) -> None:
    faulty = Faulty(endpoint)
    async with opened(endpoint, 2, ack="after") as consumer:
        assert len(await consumer.poll(1)) == 1
        faulty.error = AWAY
        assert len(await consumer.poll(1)) == 1  # the ack of the first is on its way
        await until(lambda: faulty.tries > 8)
        assert await consumer.poll(wait=0) == []  # nothing is raised: it is tried again
        faulty.error = None
        await until(lambda: consumer.in_hand == 0)
    assert {v[0] for v in verdicts(endpoint)} == {"ack"}


# ---- ordered groups ----


@pytest.mark.parametrize("kind", ["ack", "retry"])
async def test_a_key_waits_for_a_verdict_that_failed(ordered: OrderedEndpoint, kind: str) -> None:
    faulty = Faulty(ordered)
    async with opened(ordered, 3) as consumer:
        (first,) = await consumer.poll(1)
        faulty.error = AWAY
        await late(getattr(first, kind)())
        assert await consumer.poll(wait="50ms") == []
        faulty.error = None
        found = await consumer.poll(1, wait=30)
        assert [m.value for m in found] == ([b"1"] if kind == "ack" else [b"0"])
        faulty.error = AWAY
        await late(found[0].ack())
        faulty.error = None
        rest = [m async for m in _next(consumer, 1)]
        assert [m.value for m in rest] == ([b"2"] if kind == "ack" else [b"1"])


async def _next(consumer: Consumer, count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        async with asyncio.timeout(30):
            yield await anext(consumer)


async def test_of_an_ordered_group_the_partition_is_handed_over_instead(ordered: OrderedEndpoint) -> None:
    """The store refuses it for good: after a lease somebody else may try."""
    faulty = Faulty(ordered)
    async with opened(ordered, 2) as consumer:
        (first,) = await consumer.poll(1)
        faulty.error = PermissionDenied("not any more")
        with pytest.raises(PermissionDenied):
            await first.ack()
        await asyncio.wait_for(ordered.gave_up.wait(), 30)
        with pytest.raises(LeaseLost):
            await first.ack()
        faulty.error = None
