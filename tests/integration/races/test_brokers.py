"""Two brokers on one store, put in the order that goes wrong: one gives back what the other hands out (I6).

A client's poll reached broker A, and the client went on to broker B in the moment A looked: A has nobody to
tell and gives back what it was granted, B answers the repetition with the same. Both at once must not hand a
message to two members.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from postroom.address import Address
from postroom.broker.broker import Broker, open_endpoint
from postroom.endpoint.values import PollReply, PollRequest, Settle, Verdict
from postroom.model.messages.batch import BatchBuilder
from postroom.model.policy.settings import GroupWish, TopicSettings
from postroom.testing.store_contract.harness import batch

LIMIT_S = 30
ANN = PollRequest("orders", "billing", "ann", 77, 100, 1 << 20, 0, True)
BOB = PollRequest("orders", "billing", "bob", 88, 100, 1 << 20, 0, True)


@asynccontextmanager
async def brokers(folder: Path, mode: str) -> AsyncIterator[tuple[Broker, Broker, int]]:
    """A and B, and the only partition, which has five messages."""
    address = Address("sqlite", path=folder / "q.db")
    a, b = await open_endpoint(address), await open_endpoint(address)
    try:
        await a.create_topic("orders", TopicSettings(), 1, False)
        wish = GroupWish(mode=mode)  # type: ignore[arg-type]
        await a.subscribe("orders", "billing", wish, "ann", "c")
        place = (await a.route("orders")).ranges[0].partition_id
        builder = BatchBuilder()
        builder.extend(1, [(b"k", b"v", [])] * 5)
        await a.append("orders", place, builder.build())
        yield a, b, place
    finally:
        await a.close()
        await b.close()


async def gone_in_the_moment_of_its_look(
    broker: Broker, verb: str, meanwhile: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The store has granted ann's poll something, nobody is there to be told, and `meanwhile` happens."""
    granted, go_on = asyncio.Event(), threading.Event()
    loop, store_verb = asyncio.get_running_loop(), getattr(broker.store.progress, verb)

    def slow(*args: object, **more: object) -> object:
        result = store_verb(*args, **more)
        loop.call_soon_threadsafe(granted.set)
        assert go_on.wait(LIMIT_S)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(broker._workers, "_at_once", None)  # it is to take its time
        patch.setattr(broker.store.progress, verb, slow)
        polling = asyncio.create_task(broker.poll(ANN))
        await asyncio.wait_for(granted.wait(), LIMIT_S)
        polling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await polling
        answered = await meanwhile()
        go_on.set()
        await asyncio.gather(*broker._polling._background)
    return answered


def spans(reply: PollReply) -> list[tuple[int, int]]:
    return [(lease.first, lease.last) for grant in reply.grants for lease in grant.leases]


@pytest.mark.parametrize(("mode", "verb"), [("shared", "visit"), ("ordered", "poll_ordered")])
async def test_what_the_other_broker_handed_out_is_not_given_back(
    mode: str, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with brokers(tmp_path, mode) as (a, b, place):

        async def repeated() -> PollReply:
            return await b.poll(replace(ANN, repeated=True))

        answered = await gone_in_the_moment_of_its_look(a, verb, repeated, monkeypatch)
        assert spans(answered) == [(0, 4)]
        await b.subscribe("orders", "billing", GroupWish(), "bob", "c")
        assert spans(await b.poll(BOB)) == []  # they are in good hands
        acks = Settle("orders", place, ANN.token, (Verdict("ack", 0, 4),))
        assert not (await b.settle("orders", "billing", [acks])).lost


@pytest.mark.parametrize(("mode", "verb"), [("shared", "visit"), ("ordered", "poll_ordered")])
async def test_what_nobody_asked_for_again_is_given_back_at_once(
    mode: str, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would wait for the lease to end."""
    async with brokers(tmp_path, mode) as (a, b, _):

        async def nothing() -> None:
            pass

        await gone_in_the_moment_of_its_look(a, verb, nothing, monkeypatch)
        group = b.store.catalog.group("orders", "billing")
        assert b.store.progress.held_by(group.id, ANN.token) == set()
        reply = await b.poll(replace(ANN, token=99))
        assert [(lease.first, lease.last, lease.attempt) for g in reply.grants for lease in g.leases] == [
            (0, 4, 1)
        ]


@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_what_is_sent_after_a_pause_stays_though_a_poll_began_before_it(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with brokers(tmp_path, mode) as (a, _, place):
        first = await a.poll(ANN)
        await a.settle("orders", "billing", [Settle("orders", place, ANN.token, (Verdict("ack", 0, 4),))])
        looking, go_on = asyncio.Event(), threading.Event()
        loop, bounds = asyncio.get_running_loop(), a.store.log.bounds

        def slow(ids: Iterable[int]) -> object:
            loop.call_soon_threadsafe(looking.set)
            assert go_on.wait(LIMIT_S)
            return bounds(ids)

        ask = ANN
        if mode == "ordered":
            ask = replace(ANN, positions=((place, 5),), started_ms=first.started_ms)
        with monkeypatch.context() as patch:
            patch.setattr(a._workers, "_at_once", None)  # it is to take its time
            patch.setattr(a.store.log, "bounds", slow)
            polling = asyncio.create_task(a.poll(ask))
            await asyncio.wait_for(looking.wait(), LIMIT_S)
            await a.pause("orders", "billing", True)
            builder = BatchBuilder()
            builder.extend(1, [(b"k", b"later", [])])
            await a.append("orders", place, builder.build())
            go_on.set()
            assert spans(await polling) == []
        assert spans(await a.poll(ask)) == []
        await a.pause("orders", "billing", False)
        assert spans(await a.poll(ask)) == [(5, 5)]


async def test_what_is_sent_after_a_pause_stays_though_a_send_woke_a_poll_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll that a send woke looks at nothing but what came, and then whether the group is paused."""
    async with brokers(tmp_path, "shared") as (a, _, place):

        async def send(value: bytes) -> None:
            builder = BatchBuilder()
            builder.extend(1, [(b"k", value, [])])
            await a.append("orders", place, builder.build())

        assert spans(await a.poll(ANN)) == [(0, 4)]
        caught_up = a._polling._deliveries._caught_up
        looking, go_on = asyncio.Event(), threading.Event()
        loop, since = asyncio.get_running_loop(), caught_up.since

        def slow(*asked: Any) -> object:
            loop.call_soon_threadsafe(looking.set)
            assert go_on.wait(LIMIT_S)
            return since(*asked)

        with monkeypatch.context() as patch:
            patch.setattr(a._workers, "_at_once", None)  # it is to take its time
            patch.setattr(caught_up, "since", slow)
            polling = asyncio.create_task(a.poll(replace(ANN, token=99, wait_ms=500)))
            async with asyncio.timeout(LIMIT_S):
                while not any(queue._line for queue in a._polling._queues._known.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await send(b"before")
                await looking.wait()
            await a.pause("orders", "billing", True)
            await send(b"later")
            go_on.set()
            assert spans(await polling) == []
        await a.pause("orders", "billing", False)
        assert spans(await a.poll(replace(ANN, token=99))) == [(5, 6)]


@asynccontextmanager
async def caught_up(folder: Path) -> AsyncIterator[tuple[Broker, Broker, Callable[[], Awaitable[None]]]]:
    """A has handed out all there was, somebody else waits there, and the next message is one of its own."""
    async with brokers(folder, "shared") as (a, b, place):
        numbers = count()

        async def send() -> None:
            await a.append("orders", place, batch(producer=7, sequence=next(numbers)))

        await a.create_topic("quiet", TopicSettings(), 1, False)
        await a.subscribe("quiet", "billing", GroupWish(), "ann", "c")
        waiting = asyncio.create_task(a.poll(replace(ANN, topic="quiet", wait_ms=60_000)))
        try:
            await send()
            assert spans(await a.poll(ANN)) == [(0, 5)]
            await send()
            assert spans(await a.poll(replace(ANN, token=78))) == [(6, 6)]
            yield a, b, send
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_a_poll_that_comes_after_a_send_reads_no_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with caught_up(tmp_path) as (a, _, send):
        monkeypatch.setattr(a.store.log, "bounds", None)
        for number in range(7, 10):
            await send()
            assert spans(await a.poll(replace(ANN, token=100 + number))) == [(number, number)]
        assert spans(await a.poll(replace(ANN, token=99))) == []


async def test_a_poll_that_comes_after_another_broker_purged_gets_nothing_of_before(tmp_path: Path) -> None:
    async with caught_up(tmp_path) as (a, b, send):
        await send()
        assert await b.purge("orders") > 0
        assert spans(await a.poll(replace(ANN, token=99))) == []
        await send()
        assert spans(await a.poll(replace(ANN, token=99))) == [(8, 8)]


async def test_a_poll_that_waits_gets_nothing_of_what_was_purged_before_it_came(tmp_path: Path) -> None:
    async with caught_up(tmp_path) as (a, b, send):
        await send()
        assert await b.purge("orders") > 0
        polling = asyncio.create_task(a.poll(replace(ANN, token=99, wait_ms=60_000)))
        async with asyncio.timeout(LIMIT_S):
            while len([queue for queue in a._polling._queues._known.values() if queue._line]) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await send()
        assert spans(await polling) == [(8, 8)]


async def test_a_poll_finds_what_another_broker_gave_back_or_stored_before_it(tmp_path: Path) -> None:
    async with caught_up(tmp_path) as (a, b, send):
        await send()
        await b.subscribe("orders", "billing", GroupWish(), "bob", "c")
        assert spans(await b.poll(BOB)) == [(7, 7)]
        assert spans(await a.poll(replace(ANN, token=99))) == []
        place = (await a.route("orders")).ranges[0].partition_id
        release = Settle("orders", place, BOB.token, (Verdict("release", 7, 7),))
        assert not (await b.settle("orders", "billing", [release])).lost
        assert spans(await a.poll(replace(ANN, token=99))) == [(7, 7)]
        await b.append("orders", place, batch(producer=8, sequence=0))
        assert spans(await a.poll(replace(ANN, token=100))) == [(8, 8)]
