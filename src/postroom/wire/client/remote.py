"""The endpoint of a served queue: the same verbs as the broker in this process, asked over the network.

Decides nothing about messages. What it adds is the way there: which broker is asked, what may be repeated,
and what becomes of an answer that nobody waits for any more: deliveries in it are given back, as the broker
gives back what a cancelled poll was given.

Heartbeats come from a thread, since a handler may block the loop for minutes. The loop is asked first, which
costs no second connection; if it does not take the beat within a moment, the thread connects by itself and
beats there from then on, until the loop turns again. A beat that was sent twice is harmless. By a socket of
its own alone, a beat took half the time, and a broker had twice the connections (`bench.mechanisms`): those
are what it has a limit of (`max_connections`), and a client beats a few times a lease.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from ...clock import Clock, ToldClock, wall_ms
from ...config import DEFAULTS, Limits, WireTuning
from ...endpoint import requests as r
from ...endpoint.asking import AskingEndpoint
from ...endpoint.endpoint import Endpoint, OnSettled, Told
from ...endpoint.operations import OPERATIONS, Operation
from ...endpoint.requests import Beats
from ...endpoint.values import (
    Beat,
    Fetched,
    Held,
    PollReply,
    PollRequest,
    Settle,
    SettleReply,
    UnparkRequest,
    Verdict,
    released,
)
from ...errors import (
    BrokerUnavailable,
    InvalidName,
    InvalidSetting,
    MessageTooLarge,
    PostroomError,
    ProtocolError,
    UsageError,
)
from ...model.delivery.delivery import Span
from ...model.delivery.reason import as_reason
from ...model.policy.bounds import MOST_PARTS, MOST_SPOTS
from ...store.contract import Appended
from .. import messages as m
from ..frames import ERROR, Frame, FrameParser, encode
from ..messages import HELLO, Failure, Hello, Welcome, decode, encode_header, raised
from ..replies import unpacked
from .link import NotOfferedError
from .pool import Pool

__all__ = ["Beater", "RemoteEndpoint", "beatings", "open_remote", "settles"]


_MAX_BYTES = 2**31 - 1
_GONE = (OSError, EOFError, BrokerUnavailable, ProtocolError)  # then the next one is asked


class Beater:
    """`through_loop` makes the call a link makes; `addresses` are where brokers may be found now."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        through_loop: Callable[[Beats], Coroutine[Any, Any, Any]],
        addresses: Callable[[], Sequence[str]],
        hello: Hello,
        tls: ssl.SSLContext | None,
        tuning: WireTuning = DEFAULTS.tuning.wire,
    ) -> None:
        self._turn_s, self._answer_s = tuning.beat_taken_s, tuning.beat_answer_s
        self._loop, self._through_loop, self._addresses = loop, through_loop, addresses
        self._hello, self._tls = hello, tls
        self._own: _BlockingLink | None = None
        self._lock = threading.Lock()

    def beat(self, beats: Beats) -> Any:
        """Blocking; from any thread but the loop's."""
        taken, given_up = threading.Event(), threading.Event()

        async def ask() -> Any:
            if given_up.is_set():
                return None
            taken.set()
            return await self._through_loop(beats)

        asking = ask()
        try:
            answer = asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError:  # the loop was closed
            asking.close()
            raise BrokerUnavailable("the event loop of this connection is closed") from None
        if taken.wait(self._turn_s) and self._turns_until(answer):
            self._drop()
            return answer.result()
        given_up.set()
        answer.cancel()
        with self._lock:
            return self._beat_alone(beats)

    def _turns_until(self, answer: concurrent.futures.Future[Any]) -> bool:
        """Wait for the answer, while the loop turns: a handler may block it right after it took the beat."""
        while not answer.done():
            turned = threading.Event()
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # it was closed meanwhile
                return False
            if not turned.wait(self._turn_s):
                return False
            concurrent.futures.wait([answer], timeout=self._turn_s)
        return True

    def _beat_alone(self, beats: Beats) -> Any:
        why: Exception | None = None
        if self._own is not None:
            with suppress(*_GONE):
                return self._own.call(beats)
            self._forget()
        for address in self._addresses():
            try:
                self._own = _BlockingLink(address, self._hello, self._tls, self._answer_s)
                return self._own.call(beats)
            except _GONE as error:
                why = error
                self._forget()
        raise BrokerUnavailable(f"no broker could be reached for a heartbeat ({why})")

    def _drop(self) -> None:
        if self._own is not None:
            with self._lock:
                self._forget()

    def _forget(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    def close(self) -> None:
        with self._lock:
            self._forget()


class _BlockingLink:
    """One request at a time, without an event loop."""

    def __init__(self, address: str, hello: Hello, tls: ssl.SSLContext | None, answer_s: float) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        self._socket = socket.create_connection((host, int(port)), timeout=answer_s)
        try:
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
            self._parser = FrameParser(_MAX_BYTES)
            decode(self._ask(HELLO, encode_header(hello)).header, Welcome)
        except BaseException:
            self._socket.close()
            raise

    def call(self, beats: Beats) -> Any:
        operation = OPERATIONS["beat"]
        return unpacked(operation, self._ask(operation.kind, encode_header(beats)))

    def _ask(self, kind: int, header: bytes) -> Frame:
        self._socket.sendall(b"".join(encode(kind, 1, header)))
        while True:
            data = self._socket.recv(65536)
            if not data:
                raise EOFError("the broker closed the connection")
            for frame in self._parser.feed(data):
                if frame.flags & ERROR:
                    raise raised(decode(frame.header, Failure))
                if frame.kind == kind:
                    return frame

    def close(self) -> None:
        self._socket.close()


# ---- portions ----
# A request has room for so many deliveries, and its header for so many bytes (`endpoint.requests`). A
# consumer may hold more: what it says of them then goes in several requests, each of which stands for itself.
# Almost always there is one, and it is passed on as it is.

T = TypeVar("T")

_ROOM = 256 * 1024  # bytes of a header, reckoned high; it may have twice as many
_FEW = 200  # deliveries and verdicts together, or spans: if none has a long reason they fit
_SHORT = 200  # characters of a reason
_PART_BYTES = 320  # a delivery, with the name of its topic
_VERDICT_BYTES = 120
_SPAN_BYTES = 20


def settles(parts: Sequence[Settle]) -> Iterator[Sequence[Settle]]:
    """Yields what is settled in one request, in the order in which it came."""
    if len(parts) + sum(len(part.verdicts) for part in parts) <= _FEW and not any(
        len(verdict.reason) > _SHORT for part in parts for verdict in part.verdicts
    ):
        yield parts
        return
    pieces = (piece for part in parts for piece in _cut(part))
    yield from _portions(pieces, MOST_PARTS)


def _cut(part: Settle) -> Iterator[tuple[Settle, int]]:
    """The part in pieces, with their sizes; whole if it parks: what a line claims is acked with it (I27)."""
    verdicts = [(_shorter(verdict), _size(verdict)) for verdict in part.verdicts]
    if any(verdict.kind == "park" for verdict in part.verdicts):
        whole = tuple(verdict for verdict, _ in verdicts)
        yield replace(part, verdicts=whole), _PART_BYTES + sum(size for _, size in verdicts)
        return
    for some in _portions(verdicts, _ROOM):
        yield replace(part, verdicts=tuple(some)), _PART_BYTES + sum(map(_size, some))


def _shorter(verdict: Verdict) -> Verdict:
    return replace(verdict, reason=as_reason(verdict.reason)) if len(verdict.reason) > _SHORT else verdict


def _size(verdict: Verdict) -> int:
    key = verdict.line.key if verdict.line is not None else None
    return _VERDICT_BYTES + 4 * len(as_reason(verdict.reason)) + len(key or b"")


def beatings(beats: Sequence[Beat]) -> Iterator[Sequence[Beat]]:
    """Yields heartbeats that go together. A member is heard of in each that has some of its deliveries."""
    if sum(1 + len(held.spans) for beat in beats for held in beat.held) <= _FEW:
        yield beats
        return
    for beat in beats:
        pieces = (
            (replace(held, spans=tuple(some)), _PART_BYTES + _SPAN_BYTES * len(some))
            for held in beat.held
            for some in _portions(((span, _SPAN_BYTES) for span in held.spans), _ROOM)
        )
        for held in list(_portions(pieces, MOST_PARTS)) or [[]]:
            yield [replace(beat, held=tuple(held))]


def _portions(items: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Items that come with their sizes, as many together as there is room for."""
    some: list[T] = []
    used = 0
    for item, size in items:
        if some and (used + size > _ROOM or len(some) >= most):
            yield some
            some, used = [], 0
        some.append(item)
        used += size
    if some:
        yield some


# ---- the endpoint ----

_log = logging.getLogger("postroom.wire")


async def open_remote(
    addresses: Sequence[str],
    *,
    client: str,
    token: str = "",
    tls: ssl.SSLContext | None = None,
    zone: str = "",
    clock: Clock | None = None,
    limits: Limits = DEFAULTS,
) -> Endpoint:
    """Returns an endpoint that is connected to one of these brokers; BrokerUnavailable if none answers."""
    endpoint = RemoteEndpoint(
        addresses, client=client, token=token, tls=tls, zone=zone, clock=clock, limits=limits
    )
    try:
        await endpoint.open()
    except BaseException:
        await endpoint.close()
        raise
    return endpoint


def _check(operation: Operation, request: r.Request) -> None:
    """InvalidSetting if the broker could not read it: that were a fault of the whole connection."""
    try:
        m.decode(m.encode_header(request), operation.request)
    except MessageTooLarge:
        raise
    except (UsageError, ProtocolError, TypeError, ValueError, OverflowError) as error:
        values = ", ".join(f"{name}={getattr(request, name)!r}" for name in request.__struct_fields__)
        why = str(error).removeprefix("the header of a frame cannot be read: ")
        raise (InvalidName if isinstance(error, InvalidName) else InvalidSetting)(
            f"{operation.name}({values:.200}): a value is not what it should be ({why})"
        ) from error


class RemoteEndpoint(AskingEndpoint):
    """A served queue. Belongs to one event loop, but for `beat` and `now_ms`."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        client: str,
        token: str,
        tls: ssl.SSLContext | None,
        zone: str,
        clock: Clock | None,
        limits: Limits = DEFAULTS,
    ) -> None:
        tuning = limits.tuning.wire
        hello = m.Hello(m.MIN_VERSION, m.MAX_VERSION, client, token, "postroom-python")
        self.pool = Pool(addresses, hello, tls, zone, tuning)
        self.pool.on_time, self.pool.on_late = self._time_told, self._came_late
        self.pool.on_ask = lambda ask: self.on_ask(ask)
        self.on_ask: Callable[[r.Ask], r.Answer] = lambda ask: r.Answer()
        self._clock = clock  # of tests that move time
        self._loop = asyncio.get_running_loop()
        self._told = ToldClock()
        self._polls_at: dict[tuple[str, str], str] = {}  # by topic and group, where its polls go
        self._background: set[asyncio.Task[None]] = set()
        self._beater = Beater(self._loop, self._beat, lambda: self.pool.addresses, hello, tls, tuning)

    async def open(self) -> None:
        await self.pool.open()

    async def close(self) -> None:
        await self.pool.no_more_late()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.to_thread(self._beater.close)
        await self.pool.close()

    def now_ms(self) -> int:
        if self._clock is not None:
            return self._clock.now_ms()
        known = self._told.latest_ms()
        return wall_ms() if known is None else known

    def reached_ms(self) -> int:
        if self._clock is not None:
            return self._clock.now_ms()
        known = self._told.reached_ms()
        return wall_ms() if known is None else known

    def _time_told(self, now_ms: int, sent_at: float) -> None:
        self._told.told(now_ms, self._told.begin() - (self._loop.time() - sent_at))

    # ---- operations that are asked as they are ----

    async def _ask(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        request = operation.request(**arguments)
        if isinstance(request, r.Spots) and request.spots is not None and len(request.spots) > MOST_SPOTS:
            some = (request.spots[at : at + MOST_SPOTS] for at in range(0, len(request.spots), MOST_SPOTS))
            return sum([await self._ask(operation, {**arguments, "spots": spots}) for spots in some])
        _check(operation, request)
        return await self.pool.call(operation, request)

    # ---- staging ----

    async def stage(
        self,
        topic: str,
        query: str,
        batch: int,
        segment: str,
        number: int,
        partition_ids: Sequence[int],
        data: bytes,
        producer: str = "",
    ) -> None:
        request = r.Stage(topic, query, batch, segment, number, tuple(partition_ids), producer)
        await self.pool.call(OPERATIONS["stage"], request, (data,), key=f"q{query}")

    # ---- the log ----

    async def append(
        self,
        topic: str,
        partition_id: int,
        batch: bytes,
        *,
        due_at: int = 0,
        ids: bytes = b"",
        producer: str = "",
    ) -> Appended:
        request = r.Append(topic, partition_id, due_at, ids, producer)
        answer = await self.pool.call(OPERATIONS["append"], request, (batch,), key=f"p{partition_id}")
        assert isinstance(answer, Appended)
        return answer

    def append_soon(self, topic: str, partition_id: int, batch: bytes, producer: str, told: Told) -> bool:
        request = r.Append(topic, partition_id, 0, b"", producer)
        return self.pool.call_soon(OPERATIONS["append"], request, (batch,), told, key=f"p{partition_id}")

    async def fetch(
        self, topic: str, partition_id: int, offset: int, *, max_messages: int, max_bytes: int, wait_ms: int
    ) -> Fetched:
        request = r.Fetch(topic, partition_id, offset, max_messages, max_bytes, wait_ms)
        answer = await self.pool.call(OPERATIONS["fetch"], request, key=f"p{partition_id}")
        assert isinstance(answer, Fetched)
        return answer

    # ---- deliveries ----

    async def poll(self, request: PollRequest) -> PollReply:
        key = self._polls_at[request.topic, request.group] = f"m{request.member}"
        answer = await self.pool.call(
            OPERATIONS["poll"],
            r.Poll(request),
            key=key,
            again=lambda: r.Poll(replace(request, repeated=True)),
        )
        assert isinstance(answer, PollReply)
        return answer

    async def settle_and_poll(
        self, topic: str, group: str, parts: Sequence[Settle], request: PollRequest, settled: OnSettled
    ) -> PollReply:
        """In one request if it is not long, and the broker is not too old."""
        portions = list(settles(parts))
        if len(portions) > 1:
            return await super().settle_and_poll(topic, group, parts, request, settled)
        key = self._polls_at[request.topic, request.group] = f"m{request.member}"
        asked = r.SettleAndPoll(topic, group, tuple(portions[0]), request)
        told = repeated = False

        def again() -> r.SettleAndPoll:
            nonlocal repeated
            repeated = True
            return r.SettleAndPoll(topic, group, () if told else asked.parts, replace(request, repeated=True))

        def early(reply: SettleReply) -> None:
            nonlocal told
            if not told:
                told = True
                settled(replace(reply, lost=_really_lost(reply)) if repeated else reply)

        operation = OPERATIONS["settle_and_poll"]
        try:
            answer = await self.pool.call(operation, asked, key=key, again=again, early=early)
        except NotOfferedError:
            request = replace(request, repeated=repeated)
            if told:
                return await self.poll(request)
            return await super().settle_and_poll(topic, group, parts, request, settled)
        assert isinstance(answer, PollReply)
        return answer

    async def unpark(self, request: UnparkRequest) -> PollReply:
        key = self._polls_at.get((request.topic, request.group), "")
        answer = await self.pool.call(OPERATIONS["unpark"], r.Unpark(request), key=key)
        assert isinstance(answer, PollReply)
        return answer

    async def unsubscribe(self, topic: str, group: str, member: str) -> None:
        self._polls_at.pop((topic, group), None)  # members of it that stay say so with their next poll
        await super().unsubscribe(topic, group, member)

    def _came_late(self, asked: r.Poll | r.SettleAndPoll, reply: PollReply) -> None:
        """The answer to a poll that was cancelled: what it brings is given back."""
        if reply.grants and not asked.request.on_delivery:
            giving_back = self._loop.create_task(self._give_back(asked.request, reply))
            self._background.add(giving_back)
            giving_back.add_done_callback(self._background.discard)

    async def _give_back(self, request: PollRequest, reply: PollReply) -> None:
        held = {partition_id for partition_id, _ in request.positions}
        taken = [grant for grant in reply.grants if grant.partition_id not in held]
        try:
            if any(grant.position >= 0 for grant in reply.grants):  # an ordered group's
                ids = [grant.partition_id for grant in taken]
                await self.hand_over(request.topic, request.group, request.token, ids)
            else:
                await self.settle(request.topic, request.group, released(request, taken))
        except PostroomError as error:
            _log.warning("what a cancelled poll was given waits for its lease to end: %s", error)

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        """Asks the broker that handed it out, if it can be reached: it knows who has what."""
        found = SettleReply()
        for some in settles(parts):
            reply = await self._settle(topic, group, some)
            found = SettleReply(found.lost + reply.lost, found.kept + reply.kept, found.away + reply.away)
        return found

    async def _settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        request = r.SettleParts(topic, group, tuple(parts))
        key = self._polls_at.get((topic, group), "")
        repeated = False

        def again() -> r.SettleParts:
            nonlocal repeated
            repeated = True
            return request

        answer = await self.pool.call(OPERATIONS["settle"], request, key=key, again=again)
        assert isinstance(answer, SettleReply)
        return replace(answer, lost=_really_lost(answer)) if repeated else answer

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        lost: list[tuple[Held, tuple[Span, ...]]] = []
        for some in beatings(beats):
            lost += self._beater.beat(r.Beats(tuple(some)))
        asked = {(held.topic, held.partition_id, held.token): held for beat in beats for held in beat.held}
        return [(asked[held.topic, held.partition_id, held.token], spans) for held, spans in lost]

    async def _beat(self, beats: r.Beats) -> Any:
        return await self.pool.call(OPERATIONS["beat"], beats, key=f"m{beats.beats[0].member}")


def _really_lost(answer: SettleReply) -> tuple[tuple[Settle, tuple[Span, ...]], ...]:
    """Returns what a repeated settle lost in truth: what the first retried or released is elsewhere."""
    return tuple(
        (part, spans)
        for part, spans in answer.lost
        if any(
            verdict.kind in ("ack", "dead") and verdict.first <= last and first <= verdict.last
            for verdict in part.verdicts
            for first, last in spans
        )
    )
