"""Clients that are slow, silent or gone at the wrong moment: bounded, and nothing of theirs is lost."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from typing import Any

import pytest

import postroom
from postroom.broker.deliver.shared import Deliveries
from postroom.endpoint.values import PollReply, PollRequest, Settle, Verdict
from postroom.model.policy.settings import GroupWish
from postroom.wire.server.listening import Listening
from postroom.wire.server.session import Session
from tests.integration.wire.wire_raw import (
    ASK,
    BROKERS,
    ERROR,
    REPLY,
    Raw,
    broker_of,
    eventually,
    frame,
    healthy,
    served,
    settled,
)
from tests.tuned import Tune

TOPIC, FETCH, POLL, SETTLE = 32, 11, 22, 23
QUICK = Listening(port=0, frame_ms=300, silent_ms=1000)
SOON_S = 5  # leases in these tests last for 30


def request(member: str, *, token: int = 1, wait_ms: int = 20_000) -> PollRequest:
    return PollRequest("orders", "g", member, token, 100, 1 << 20, wait_ms, True)


async def polled(endpoint: Any, member: str, token: int) -> PollReply:
    async with asyncio.timeout(SOON_S):
        reply: PollReply = await endpoint.poll(request(member, token=token))
        return reply


@pytest.mark.slow("breaks connections for seconds")
async def test_one_byte_at_a_time_is_too_slow() -> None:
    async with served(QUICK) as (mq, server):
        await mq.create_topic("orders", partitions=1)
        async with Raw.open(server.port) as raw:
            said = iter(frame(TOPIC, ["orders" * 30]))

            async def drip() -> None:
                for byte in said:
                    raw.writer.write(bytes([byte]))
                    await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            assert "not finished within 300 ms" in (await raw.refused()).header[1]
            dripping.cancel()
        await healthy(server)


@pytest.mark.slow("breaks connections for seconds")
async def test_whoever_is_silent_is_let_go_and_whoever_waits_is_not() -> None:
    async with served(QUICK) as (mq, server):
        await mq.create_topic("orders", partitions=1)
        async with Raw.open(server.port) as silent, Raw.open(server.port) as waiting:
            waiting.send(FETCH, ["orders", 1, 0, 10, 1000, 4_000])
            assert "nothing was heard for 1000 ms: send Brokers" in (await silent.refused()).header[1]
            assert await waiting.alive()


@pytest.mark.slow("breaks connections for seconds")
async def test_answers_that_are_not_read_are_bounded() -> None:
    """Thirty requests for 16 MB each, and nothing is read: without a bound that were 480 MB."""
    listening = Listening(port=0, silent_ms=1500, answer_bytes=4 << 20)
    async with served(listening) as (mq, server):
        await mq.create_topic("orders", partitions=1)
        for _ in range(32):
            await mq.send("orders", os.urandom(512 * 1024))
        partition_id = (await mq.route("orders")).ranges[0].partition_id
        async with Raw.open(server.port) as raw:
            (connection,) = server.connections
            for id in range(10, 40):
                raw.send(FETCH, ["orders", partition_id, 0, 1000, 1 << 30, 0], id=id)
            most = 0

            def closed() -> bool:
                nonlocal most
                if connection._transport is not None:
                    most = max(most, connection._transport.get_write_buffer_size())
                return connection not in server.connections

            await eventually(lambda: not closed() and most > 1 << 20)
            await healthy(server)
            await eventually(closed)  # it was let go, since it does not read
            assert most < 64 << 20


@pytest.mark.slow("breaks connections for seconds")
async def test_whoever_is_refused_and_does_not_read_is_let_go(tune: Tune) -> None:
    tune(wire={"refused_s": 0.2})
    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        for _ in range(24):
            await mq.send("orders", os.urandom(512 * 1024))
        partition_id = (await mq.route("orders")).ranges[0].partition_id
        async with Raw.open(server.port) as raw:
            (connection,) = server.connections
            raw.send(FETCH, ["orders", partition_id, 0, 1000, 12 << 20, 0])
            transport = connection._transport
            assert transport is not None
            await eventually(lambda: transport.get_write_buffer_size() > 0)
            connection.refuse(postroom.PostroomError("a fault of the peer"))
            await eventually(lambda: connection not in server.connections)


# ---- many requests ----


async def test_polls_that_wait_leave_room_for_everything_else() -> None:
    async with served(Listening(port=0, requests_at_once=4)) as (mq, server):
        await mq.create_topic("orders", partitions=1)
        async with Raw.open(server.port) as raw:
            for id in range(100, 700):
                raw.send(FETCH, ["orders", 1, 0, 10, 1000, 20_000], id=id)
            assert await raw.alive()
            assert (await raw.ask(TOPIC, ["orders"])).header["name"] == "orders"


async def test_requests_of_others_that_end_make_room() -> None:
    async with served(Listening(port=0, all_request_bytes=2000)) as (mq, server):
        await mq.create_topic("orders", partitions=1)
        async with Raw.open(server.port) as large, Raw.open(server.port) as small:
            large.send(FETCH, ["orders", 1, 0, 10, 1000, 500], body=b"x" * 5000)
            await eventually(lambda: server.held_bytes > 5000)
            small.send(FETCH, ["orders", 1, 0, 10, 1000, 20_000], id=5)
            await eventually(lambda: server.short_of_room)
            small.send(BROKERS, [], id=6)
            assert (await large.receive()).flags == REPLY
            assert (await small.receive()).id == 6  # long before its poll ends


async def test_frames_that_are_begun_hold_so_much_and_no_more() -> None:
    async with served(Listening(port=0, all_request_bytes=3000)) as (mq, server):
        await mq.create_topic("orders", partitions=1)
        begun = frame(TOPIC, ["orders"], body=b"x" * 5000)[:2000]
        async with Raw.open(server.port) as one, Raw.open(server.port) as other:
            one.writer.write(begun)
            await eventually(lambda: server.begun_bytes == 2000)
            other.writer.write(begun)
            assert "short of memory" in (await other.refused()).header[1]
            await eventually(lambda: server.begun_bytes == 2000)
        await eventually(lambda: server.begun_bytes == 0)
        await healthy(server)


# ---- gone at the wrong moment ----


async def subscribed(mq: postroom.Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq._endpoint.subscribe("orders", "g", GroupWish(lease_ms=30_000), "other", "test")


async def test_a_client_that_vanishes_while_its_poll_waits_takes_nothing_along() -> None:
    async with served() as (mq, server):
        await subscribed(mq)
        for round in range(5):
            async with Raw.open(server.port) as raw:
                raw.send(POLL, [request("gone", token=100 + round)])
                raw.send(BROKERS, [], id=3)
                await raw.receive()  # so the poll is there
            await settled(server)  # the broker knows that it has gone
            await mq.send("orders", b"%d" % round)
            reply = await polled(mq._endpoint, "other", 1 + round)
            assert [grant.leases[0].first for grant in reply.grants] == [round]


async def test_what_was_handed_to_a_client_that_has_just_gone_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look is under way in a thread when the connection breaks."""
    looking, go_on = threading.Event(), threading.Event()
    look = Deliveries.poll

    def held_up(self: Deliveries, asked: PollRequest, *more: Any) -> Any:
        found = look(self, asked, *more)
        if asked.member == "gone":
            looking.set()
            go_on.wait(20)
        return found

    monkeypatch.setattr(Deliveries, "poll", held_up)
    async with served() as (mq, server):
        await subscribed(mq)
        await mq.send("orders", b"1")
        async with Raw.open(server.port) as raw:
            raw.send(POLL, [request("gone", token=100)])
            await eventually(looking.is_set)
        await settled(server)
        go_on.set()
        reply = await polled(mq._endpoint, "other", 1)
        assert reply.grants


async def test_a_verdict_counts_if_its_sender_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, permit = asyncio.Event(), Session._permit

    async def held_up(self: Session, operation: Any, asked: Any) -> None:
        await permit(self, operation, asked)
        if operation.name == "settle":
            await allowed.wait()

    monkeypatch.setattr(Session, "_permit", held_up)
    async with served() as (mq, server):
        await subscribed(mq)
        await mq.send("orders", b"1")
        async with Raw.open(server.port) as raw:
            (grant,) = (await raw.ask(POLL, [request("m", token=100)])).header[0]
            part = Settle("orders", grant[2], 100, (Verdict("ack", 0, 0),))
            raw.send(SETTLE, ["orders", "g", [part]])
            await eventually(lambda: server.held_bytes > 0)
        await eventually(lambda: not server.connections)
        allowed.set()
        await settled(server)
        assert (await mq.lag("orders", "g")).total.messages == 0


async def test_a_poll_cancelled_at_any_moment_loses_nothing() -> None:
    async with served() as (mq, server), postroom.connect(server.url) as remote:
        await subscribed(mq)
        local, endpoint = mq._endpoint, remote._endpoint
        partition_id = (await mq.route("orders")).ranges[0].partition_id
        for round in range(40):
            polling = asyncio.ensure_future(endpoint.poll(request("fickle", token=1000 + round)))
            await asyncio.sleep(0.002)
            sending = asyncio.ensure_future(mq.send("orders", b"%d" % round))
            for _ in range(round):  # from well before the answer until after it
                await asyncio.sleep(0)
            await asyncio.sleep(0.0002 * (round % 20))
            token, member = 1 + round, "other"
            if polling.cancel():
                await asyncio.wait([polling])
            if polling.cancelled():
                reply = await polled(local, member, token)
            else:
                reply, token = polling.result(), 1000 + round
            await sending
            assert [grant.leases[0].first for grant in reply.grants] == [round]
            part = Settle("orders", partition_id, token, (Verdict("ack", round, round),))
            assert not (await local.settle("orders", "g", [part])).lost


async def test_stopping_sends_the_last_answers() -> None:
    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        async with Raw.open(server.port) as raw:
            raw.send(FETCH, ["orders", 1, 0, 10, 1000, 20_000], id=7)
            raw.send(BROKERS, [], id=3)
            await raw.receive()
            await server.stop()
            came = await raw.receive()
            assert (came.id, came.code) == (7, "broker_unavailable")
            assert "stopping: ask another" in came.header[1]
            assert await raw.ended() == b""


async def test_large_answers_are_sent_before_a_broker_stops() -> None:
    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        for _ in range(16):
            await mq.send("orders", os.urandom(512 * 1024))
        async with Raw.open(server.port) as raw:
            (connection,) = server.connections
            raw.send(FETCH, ["orders", 1, 0, 1000, 64 << 20, 0], id=7)
            transport = connection._transport
            assert transport is not None
            await eventually(lambda: transport.get_write_buffer_size() > 0)
            stopping = asyncio.create_task(server.stop())
            came = await raw.receive()
            assert len(came.body) > 8 << 20
            await stopping


async def test_a_repeated_poll_keeps_what_it_is_handed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the poll on the broken connection had is given back first: the token is the same."""
    looking, go_on = threading.Event(), threading.Event()
    look = Deliveries.poll

    def held_up(self: Deliveries, asked: PollRequest, *more: Any) -> Any:
        found = look(self, asked, *more)
        if not looking.is_set():
            looking.set()
            go_on.wait(20)
        return found

    async with served() as (mq, server):
        await subscribed(mq)
        await mq.send("orders", b"1")
        monkeypatch.setattr(Deliveries, "poll", held_up)
        async with Raw.open(server.port) as raw:
            raw.send(POLL, [request("m", token=100)])
            await eventually(looking.is_set)
        await settled(server)
        repeated = asyncio.ensure_future(mq._endpoint.poll(replace(request("m", token=100), repeated=True)))
        await asyncio.sleep(0.1)
        go_on.set()
        async with asyncio.timeout(SOON_S):
            (grant,) = (await repeated).grants
        await eventually(lambda: not broker_of(mq)._polling._background)
        part = Settle("orders", grant.partition_id, 100, (Verdict("ack", 0, 0),))
        assert not (await mq._endpoint.settle("orders", "g", [part])).lost


async def test_a_broker_that_stopped_is_not_entered_again(
    monkeypatch: pytest.MonkeyPatch, tune: Tune
) -> None:
    """It was about to say that it lives."""
    tune(wire={"enter_s": 0.01})
    entering, go_on = threading.Event(), threading.Event()
    async with served() as (mq, server):
        brokers = broker_of(mq).store.brokers
        enter = brokers.enter

        def held_up(*args: Any) -> None:
            entering.set()
            go_on.wait(20)
            enter(*args)

        monkeypatch.setattr(brokers, "enter", held_up)
        await eventually(entering.is_set)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0.1)
        go_on.set()
        await stopping
        assert brokers.live() == []


# ---- holders that are asked (R19) ----


async def asked(raw: Raw) -> Any:
    came = await raw.receive()
    assert (came.kind, came.flags) == (ASK, 0), came
    return came


@pytest.fixture
def soon(tune: Tune) -> None:
    tune(wire={"tick_s": 0.02})


@pytest.mark.slow("breaks connections for seconds")
@pytest.mark.usefixtures("soon")
async def test_a_holder_is_asked_before_its_lease_ends() -> None:
    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        local = mq._endpoint
        await local.subscribe("orders", "g", GroupWish(lease_ms=1000), "other", "test")
        await mq.send_many("orders", [postroom.Message(b"1"), postroom.Message(b"2")])
        async with Raw.open(server.port) as raw:
            assert (await raw.ask(POLL, [request("holder", token=77)])).header[0]
            for _ in range(2):  # held for longer than its lease
                came = await asked(raw)
                (held,) = came.header[3]
                assert (held["token"], held["spans"], came.header[4]) == (77, [[0, 1]], 1000)
                raw.send(ASK, [[held], []], id=came.id, flags=REPLY)
            assert not (await local.poll(request("other", token=1, wait_ms=0))).grants
            came = await asked(raw)
            done = {**held, "spans": [[0, 0]]}
            raw.send(ASK, [[], [done]], id=came.id, flags=REPLY)  # and nothing is said about the other one
            reply = await polled(local, "other", 2)
            assert [(lease.first, lease.last) for lease in reply.grants[0].leases] == [(1, 1)]


@pytest.mark.slow("breaks connections for seconds")
async def test_a_holder_of_a_lease_of_a_second_keeps_it() -> None:
    """As the broker is run: it ticks once a second. A busy machine may be late once or twice."""
    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        await mq._endpoint.subscribe("orders", "g", GroupWish(lease_ms=1000), "other", "test")
        for attempt in (1, 2, 3):
            await mq.send("orders", b"%d" % attempt)
            if await _kept(mq._endpoint, server.port, attempt):
                return
        pytest.fail("it was delivered to somebody else each time")


async def _kept(local: Any, port: int, attempt: int) -> bool:
    """Whether a holder that answers keeps a message for some leases, while somebody else waits for it."""
    async with Raw.open(port) as raw:
        assert (await raw.ask(POLL, [request("holder", token=70 + attempt)])).header[0]
        waiting = asyncio.create_task(local.poll(request("other", token=attempt)))
        for _ in range(5):
            came = await asked(raw)
            raw.send(ASK, [came.header[3], []], id=came.id, flags=REPLY)
            if waiting.done():
                break
        kept = not waiting.done()
        (held,) = came.header[3]
        raw.send(ASK, [[], [held]], id=(await asked(raw)).id, flags=REPLY)  # it is done
        waiting.cancel()
        (found,) = await asyncio.gather(waiting, return_exceptions=True)
        for grant in () if isinstance(found, BaseException) else found.grants:
            verdicts = tuple(Verdict("ack", lease.first, lease.last) for lease in grant.leases)
            await local.settle("orders", "g", [Settle("orders", grant.partition_id, attempt, verdicts)])
        return kept


@pytest.mark.usefixtures("soon")
async def test_a_client_that_never_answers_is_not_remembered_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("postroom.wire.server.connection._ASKED_AT_ONCE", 2)
    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        await mq._endpoint.subscribe("orders", "g", GroupWish(lease_ms=200), "other", "test")
        await mq.send("orders", b"1")
        async with Raw.open(server.port) as raw:
            (connection,) = server.connections
            ids = []
            for token in range(4):
                raw.send(POLL, [request("holder", token=token + 1)], id=token + 10)
                while (came := await raw.receive()).kind != ASK:
                    pass
                ids.append(came.id)
                assert len(connection._asked) <= 2
            raw.send(
                ASK, [[], []], id=ids[0], flags=REPLY
            )  # forgotten: an answer that comes late is no fault
            raw.send(ASK, ["code", "what?", False, {}], id=ids[-1], flags=REPLY | ERROR)
            assert await raw.alive()
