"""A link over a transport that only remembers: asked, answered, cancelled and lost at chosen moments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS
from postroom.endpoint.values import Grant, Lease, PollReply, PollRequest
from postroom.errors import BrokerUnavailable, MessageTooLarge, ProtocolError, UnknownTopic
from postroom.store.contract import Appended
from postroom.wire import messages as m
from postroom.wire.client.link import Link, LinkLost
from postroom.wire.frames import ERROR, REPLY, Frame, FrameParser, encode
from postroom.wire.messages import failure_of
from postroom.wire.replies import packed
from tests.tuned import Tune

POLL = r.Poll(PollRequest("t", "g", "m", 1, 10, 1000, 5000, True))
GIVEN = PollReply((Grant("t", 0, 1, (Lease(0, 4, 1, False),), ()),), 30_000)


class Transport:
    def __init__(self) -> None:
        self.sent: list[Frame] = []
        self.parser = FrameParser(1 << 30)
        self.aborted = False
        self.unsent = self.step = 0

    def set_write_buffer_limits(self, high: int) -> None: ...

    def writelines(self, pieces: list[bytes]) -> None:
        self.sent += self.parser.feed(b"".join(pieces))

    def get_write_buffer_size(self) -> int:
        self.unsent -= self.step
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


class Peer:
    """The link, and the broker's end of it."""

    def __init__(self, max_frame_bytes: int = 1 << 20) -> None:
        self.link = Link("broker:7070")
        self.transport = Transport()
        self.late: list[Any] = []
        self.link.on_late = lambda request, reply: self.late.append((request, reply))
        self.link.connection_made(cast(asyncio.BaseTransport, self.transport))
        self.link.welcome = m.Welcome(1, "b", "me", 0, max_frame_bytes)

    async def asked(self, name: str, request: r.Request, body: bytes = b"") -> asyncio.Task[Any]:
        """Under way: it has been sent."""
        before = len(self.transport.sent)
        task = asyncio.ensure_future(self.link.call(OPERATIONS[name], request, (body,) if body else ()))
        while len(self.transport.sent) == before and not task.done():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        return task

    def answer(self, frame: Frame, reply: Any) -> None:
        header, body = packed(m.operation(frame.kind), reply)
        self.give(frame.kind, frame.id, header, body)

    def give(self, kind: int, id: int, header: Any, body: Any = (), flags: int = REPLY) -> None:
        self.link.data_received(b"".join(encode(kind, id, m.encode_header(header), body, flags)))

    @property
    def cancelled(self) -> list[int]:
        return [m.decode(f.header, m.Cancel).id for f in self.transport.sent if f.kind == m.CANCEL]


async def ended(task: asyncio.Task[Any]) -> BaseException | None:
    await asyncio.wait([task])
    return None if task.cancelled() else task.exception()


async def test_answers_come_in_any_order() -> None:
    peer = Peer()
    one, two = await peer.asked("topic", r.Named("a")), await peer.asked("purge", r.Named("b"))
    first, second = peer.transport.sent
    peer.answer(second, 5)
    assert await two == 5
    assert not one.done()
    peer.give(first.kind, first.id, failure_of(UnknownTopic("no")), flags=REPLY | ERROR)
    assert isinstance(await ended(one), UnknownTopic)


# ---- cancel and answer ----


async def _cancel_first(peer: Peer, task: asyncio.Task[Any], answer: Callable[[], None]) -> None:
    """The asker has come to know that it is cancelled before the answer comes."""
    task.cancel()
    await ended(task)
    answer()


async def _cross(peer: Peer, task: asyncio.Task[Any], answer: Callable[[], None]) -> None:
    """Cancelled, and the answer comes before the asker runs again."""
    task.cancel()
    answer()


async def _answer_first(peer: Peer, task: asyncio.Task[Any], answer: Callable[[], None]) -> None:
    """Answered, and cancelled before the asker runs again."""
    answer()
    task.cancel()


Order = Callable[[Peer, "asyncio.Task[Any]", Callable[[], None]], Awaitable[None]]


@pytest.mark.parametrize("order", [_cancel_first, _cross, _answer_first])
async def test_what_a_cancelled_poll_was_given_is_given_back_once(order: Order) -> None:
    peer = Peer()
    task = await peer.asked("poll", POLL)
    asked = peer.transport.sent[0]
    await order(peer, task, lambda: peer.answer(asked, GIVEN))
    assert await ended(task) is None
    assert task.cancelled()
    assert peer.late == [(POLL, GIVEN)]
    await asyncio.wait_for(peer.link.no_more_late(20), 5)
    assert peer.cancelled == ([asked.id] if order is _cancel_first else [])


async def test_a_poll_that_the_broker_ended_gives_nothing_back() -> None:
    peer = Peer()
    task = await peer.asked("poll", POLL)
    task.cancel()
    await ended(task)
    asked = peer.transport.sent[0]
    peer.give(asked.kind, asked.id, failure_of(BrokerUnavailable("cancelled")), flags=REPLY | ERROR)
    assert peer.late == []
    await asyncio.wait_for(peer.link.no_more_late(20), 5)


async def test_a_late_answer_that_cannot_be_read_ends_the_link_and_not_the_asker() -> None:
    peer = Peer()
    task = await peer.asked("poll", POLL)
    asked = peer.transport.sent[0]
    task.cancel()
    peer.give(asked.kind, asked.id, "no answer to a poll")
    assert await ended(task) is None
    assert task.cancelled()
    assert "answered with something else" in peer.link.why


async def test_nothing_is_kept_of_what_is_over() -> None:
    peer = Peer()
    for order in (_cancel_first, _cross, _answer_first):
        for name, request, reply in (("poll", POLL, GIVEN), ("purge", r.Named("a"), 1)):
            task = await peer.asked(name, request)
            asked = peer.transport.sent[-1]
            await order(peer, task, lambda asked=asked, reply=reply: peer.answer(asked, reply))  # type: ignore[misc]
            await ended(task)
    link = peer.link
    assert not (link._waiting or link._urgent or link._late or link._crossed)


async def test_an_id_is_not_given_twice_when_they_begin_again() -> None:
    peer = Peer()
    poll = await peer.asked("poll", POLL)
    taken = peer.transport.sent[0].id
    peer.link._last_id = 0xFFFF_FFFF - 1
    tasks = [await peer.asked("purge", r.Named("a")) for _ in range(3)]
    ids = [frame.id for frame in peer.transport.sent]
    assert ids == [taken, 0xFFFF_FFFF, 2, 3]
    for task in (poll, *tasks):
        task.cancel()
        await ended(task)


# ---- without waiting ----

SEND = OPERATIONS["append"], r.Append("t", 1), (b"batch",)


async def test_whoever_does_not_wait_is_told() -> None:
    peer, told = Peer(), list[Any]()
    assert peer.link.call_soon(*SEND, told.append)
    assert peer.link.call_soon(*SEND, told.append)
    first, second = peer.transport.sent
    assert peer.link._urgent.keys() == {first.id, second.id}  # a broker that does not answer is noticed
    peer.answer(second, Appended(7, 1000))
    peer.give(first.kind, first.id, failure_of(UnknownTopic("no")), flags=REPLY | ERROR)
    assert told[0] == Appended(7, 1000)
    assert isinstance(told[1], UnknownTopic)
    assert not (peer.link._told or peer.link._urgent or peer.link.gone)


async def test_an_answer_of_another_kind_is_an_error_of_whoever_is_told() -> None:
    peer, told = Peer(), list[Any]()
    peer.link.call_soon(*SEND, told.append)
    (asked,) = peer.transport.sent
    peer.link.data_received(b"".join(encode(asked.kind, asked.id, b"\xc1", (), REPLY)))
    assert isinstance(told[0], ProtocolError)


async def test_whoever_does_not_wait_is_told_that_the_broker_is_gone() -> None:
    peer, told = Peer(), list[Any]()
    peer.link.call_soon(*SEND, told.append)
    peer.link.connection_lost(None)
    (lost,) = told
    assert isinstance(lost, LinkLost) and lost.sent
    assert not peer.link.call_soon(*SEND, told.append)
    assert len(told) == len(peer.transport.sent) == 1


async def test_what_would_have_to_wait_is_not_sent() -> None:
    peer, told = Peer(max_frame_bytes=1000), list[Any]()
    operation, request, _ = SEND
    assert not peer.link.call_soon(operation, request, (b"x" * 1000,), told.append)
    peer.link.pause_writing()
    assert not peer.link.call_soon(*SEND, told.append)
    assert peer.transport.sent == told == []
    peer.link.resume_writing()
    assert peer.link.call_soon(*SEND, told.append)


async def test_an_id_that_somebody_is_told_under_is_not_given_again() -> None:
    peer = Peer()
    peer.link.call_soon(*SEND, lambda answer: None)
    peer.link._last_id = 0xFFFF_FFFF
    peer.link.call_soon(*SEND, lambda answer: None)
    assert [frame.id for frame in peer.transport.sent] == [1, 2]


# ---- the end ----


async def test_whoever_waits_is_told_when_the_connection_breaks() -> None:
    peer = Peer()
    task = await peer.asked("purge", r.Named("a"))
    peer.link.connection_lost(None)
    lost = await ended(task)
    assert isinstance(lost, LinkLost)
    assert lost.sent
    with pytest.raises(LinkLost) as caught:
        await peer.link.call(OPERATIONS["purge"], r.Named("a"))
    assert not caught.value.sent


async def test_why_the_broker_closes_is_told_to_those_who_wait() -> None:
    peer = Peer()
    task = await peer.asked("purge", r.Named("a"))
    peer.give(0, 0, failure_of(BrokerUnavailable("it has its 5 connections")), flags=REPLY | ERROR)
    assert str(await ended(task)) == "it has its 5 connections"
    assert isinstance(peer.link.fault, BrokerUnavailable)
    assert peer.transport.aborted


async def test_a_request_larger_than_the_broker_takes_is_not_sent() -> None:
    peer = Peer(max_frame_bytes=1000)
    with pytest.raises(MessageTooLarge, match="more than the 1,000 that the broker takes"):
        await peer.link.call(OPERATIONS["append"], r.Append("t", 1), (b"x" * 1000,))
    assert peer.transport.sent == []
    assert not peer.link.gone


@pytest.fixture
def quick(tune: Tune) -> None:
    tune(wire={"late_s": 0.01, "idle_s": 0.02, "silence_s": 0.02})


async def _until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("quick")
async def test_a_broker_that_is_silent_is_gone() -> None:
    peer = Peer()
    task = await peer.asked("poll", POLL)
    watching = asyncio.create_task(peer.link._watch())
    assert isinstance(await ended(task), LinkLost)
    assert peer.link.why == "the broker at broker:7070 does not answer"
    await ended(watching)


@pytest.mark.usefixtures("quick")
async def test_a_long_request_on_its_way_is_no_silence() -> None:
    peer = Peer()
    peer.transport.unsent, peer.transport.step = 1000, 1
    watching = asyncio.create_task(peer.link._watch())
    await _until(lambda: len(peer.cancelled) == 3 or peer.link.gone)  # three signs of life were not answered
    assert not peer.link.gone
    peer.transport.step = 0
    await _until(lambda: peer.link.gone)
    await ended(watching)
