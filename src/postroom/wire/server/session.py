"""What an authenticated client may ask, and the asking of it: permissions, then the broker.

Every operation of the table goes through `call`. Its row says which permission it needs on which topics;
nothing is done before all of them are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from msgspec.structs import asdict

from ...broker.access import Gatekeeper
from ...broker.served import Servable
from ...endpoint import requests as r
from ...endpoint.asker import asked_by
from ...endpoint.endpoint import Told
from ...endpoint.operations import OPERATIONS, Operation
from ...endpoint.requests import Answer, Ask, Request
from ...endpoint.values import Beat, Held, Settle, Verdict, released
from ...errors import PostroomError, UnknownTopic, UsageError
from ...model.access import Principal
from ...model.audit import Asker
from ...model.delivery.delivery import Span
from ...model.messages.admission import walk, walk_all
from ...model.topology.names import check_member
from .answers import Share
from .holdings import Holdings, answered
from .listening import Listening

__all__ = ["APPEND", "Session", "refuse_overlaps"]

APPEND = OPERATIONS["append"]


def refuse_overlaps(parts: Sequence[Settle]) -> None:
    """UsageError if two verdicts of a settle are about the same message.

    So the work that a settle makes is bounded by what it names and by what its tokens hold, and never by the
    product of both. What parks is left out, since its range has messages of other keys in it (I27).
    """
    if len(parts) == 1 and len(parts[0].verdicts) <= 1:
        return
    spans: dict[tuple[int, int], list[Span]] = {}
    for part in parts:
        here = spans.setdefault((part.partition_id, part.token), [])
        here += ((v.first, v.last) for v in part.verdicts if v.kind != "park")
    for found in spans.values():
        found.sort()
        if any(before[1] >= after[0] for before, after in pairwise(found)):
            raise UsageError("two verdicts of a settle are about the same message: settle each message once")


_log = logging.getLogger("postroom.wire")


_LEAST_BYTES = 1024 * 1024  # what a poll may bring however many others wait
_LISTED_BYTES = 1024 * 1024  # a list is expected to be no longer, unless the last one was
_MOST_MESSAGES = 20_000  # of one answer, whatever is asked for
_POLLS = (r.Poll, r.SettleAndPoll)
_SETTLES = (r.SettleParts, r.SettleAndPoll)
_SENDS, _OF_PARTITION = (r.Append, r.Stage), (r.Append, r.Fetch)
_SHORT_BYTES = 16 * 1024  # of a batch that is checked in one go
_DONE = object()
_OF_MEMBER, _MEMBERSHIP = (*_POLLS, r.Unpark), (r.Subscribe, r.Unsubscribe)


class Session:
    """One client's requests. `share`: what it holds of the broker's room for answers."""

    def __init__(
        self,
        broker: Servable,
        gatekeeper: Gatekeeper,
        principal: Principal,
        client: str,
        share: Share,
        limits: Listening,
    ) -> None:
        self._broker, self._gatekeeper, self._principal = broker, gatekeeper, principal
        self._client, self.share = client, share
        self.peer = "unknown"  # where the client is, for the audit log
        self._holdings = Holdings()
        self._one_bytes = limits.one_answer_bytes
        self._admit_s = limits.tuning.admit_s
        self._polls_bytes = limits.answer_bytes  # that polls may bring together, without those that wait
        self._usual: dict[str, int] = {}  # how long lists were
        self._careful = False  # it sent a batch that was refused
        self._admitting = asyncio.Lock()

    @property
    def principal(self) -> Principal:
        return self._principal

    async def call(
        self, operation: Operation, request: Request, body: bytes, early: Callable[[Any], None] | None = None
    ) -> Any:
        """Returns the broker's answer; raises PermissionDenied, or whatever the broker has against it.

        `early` is called with the first part of an answer that has two.
        """
        await self._permit(operation, request)
        if isinstance(request, _SENDS):
            await self._admit(request, body)
        elif isinstance(request, r.Beats):  # the only operation that blocks
            return await self._beat(request.beats)
        elif isinstance(request, _SETTLES):
            self._holdings.settled(request.parts)
        arguments = asdict(request)
        if operation.body:
            arguments[operation.body] = body
        if operation.early:
            arguments[operation.early] = early
        arguments.update(operation.told(self._principal))
        method = getattr(self._broker, operation.name)
        share = self._fit(arguments) if operation.waits else 0
        self._polls_bytes -= share
        try:
            if operation.changes is None:
                return await method(**arguments)
            with asked_by(Asker(self._principal.name, "wire", self.peer)):
                return await method(**arguments)
        finally:
            self._polls_bytes += share

    def append_soon(
        self, request: r.Append, batch: bytes, told: Told, gone: Callable[[], bool] | None = None
    ) -> bool:
        """The short way of a send: its batch is queued, and `told` what became of it. It is checked as ever.

        False, or an error: it goes by `call`, since something has to be asked or waited for before, or is
        wrong with it. It must not overtake a send that went by `call` (I3).
        """
        principal = self._gatekeeper.known(self._principal)
        if principal is None or request.ids or request.due_at or len(batch) > _SHORT_BYTES:
            return False
        if self._careful or not self._gatekeeper.knows_partition(request.topic, request.partition_id):
            return False
        self._principal = principal
        self._gatekeeper.permit(principal, APPEND, request)
        if next(walk(batch, self._broker.now_ms()), _DONE) is not _DONE:  # it takes more than one step
            return False
        said = {"producer": request.producer, "owner": "", **APPEND.told(principal)}
        return self._broker.append_soon(
            request.topic, request.partition_id, batch, told=told, gone=gone, **said
        )

    def shown(self, error: UnknownTopic) -> UnknownTopic:
        """Returns the error as the client may see it."""
        return self._gatekeeper.shown(self._principal, error)

    def _fit(self, arguments: dict[str, Any]) -> int:
        """Lets a poll or a fetch bring no more than it may; returns how many bytes that is."""
        asked = arguments.get("request")
        if asked is None:
            share = arguments["max_bytes"] = self._polled(arguments["max_bytes"])
            arguments["max_messages"] = min(arguments["max_messages"], _MOST_MESSAGES)
            return share
        share, messages = self._polled(asked.bytes), min(asked.messages, _MOST_MESSAGES)
        if (share, messages) != (asked.bytes, asked.messages):
            arguments["request"] = replace(asked, bytes=share, messages=messages)
        return share

    def _polled(self, wanted: int) -> int:
        """Returns how many bytes a poll may bring: fewer if many others wait."""
        return min(wanted, self._one_bytes, max(self._polls_bytes, _LEAST_BYTES))

    # ---- room for answers ----

    def expected(self, operation: Operation, request: Any) -> int:
        """Returns for how much there must be room first. Who waits for messages holds nothing meanwhile."""
        if isinstance(request, _POLLS) or (isinstance(request, r.Fetch) and request.wait_ms):
            return 0
        if isinstance(request, r.Fetch):
            return max(0, min(request.max_bytes, self._one_bytes))
        return self._usual.get(operation.name, _LISTED_BYTES)

    def may_drop(self, operation: Operation, request: Any) -> bool:
        """Returns whether an answer without room may be thrown away: it can be asked for again."""
        if isinstance(request, _OF_MEMBER):
            return not request.request.on_delivery  # else it is settled, and would be lost
        return operation.reads

    def granted(self, operation: Operation, request: Any, reply: Any, size: int) -> None:
        """Notes what is about to be sent."""
        if isinstance(request, _POLLS):
            self._holdings.granted(request.request, reply, self._now_ms())
        elif not isinstance(request, r.Fetch):
            usual = self._usual.get(operation.name, 0)
            self._usual[operation.name] = max(_LISTED_BYTES, size, usual * 7 // 8)

    async def give_back(self, request: Any, reply: Any) -> None:
        """Gives back what a poll was given whose answer is dropped; a holder of partitions asks again."""
        if isinstance(request, _POLLS) and reply.grants and all(g.position < 0 for g in reply.grants):
            asked = request.request
            await self._broker.settle(asked.topic, asked.group, released(asked, reply.grants))

    async def _admit(self, request: Request, body: bytes) -> None:
        """Refuse batches that could not be read, or hold more than they may: a token is not trust.

        One by one: a batch that overtook an earlier one would be refused for the gap before it, and sent
        again. Work is counted, not time: to wait for a processor holds up nobody else here.
        """
        walking = walk if isinstance(request, r.Append) else walk_all
        async with self._admitting:
            steps = walking(body, self._broker.now_ms(), careful=self._careful)
            until: float | None = None  # the first step is small: a batch that has no other takes no time
            try:
                for _ in steps:
                    now = time.thread_time()
                    until = now + self._admit_s if until is None else until
                    if now >= until:
                        await self._broker.in_thread(_rest_of, steps)
            except PostroomError:
                self._careful = True
                raise

    async def _beat(self, beats: Sequence[Beat]) -> Any:
        self._holdings.renewed(beats, self._now_ms())
        return await self._broker.in_thread(self._broker.beat, beats)

    # ---- holders that are asked (R19) ----

    def due(self, before_ms: int) -> list[Ask]:
        """Returns what the client is to be asked about: its lease ends soon."""
        return self._holdings.due(self._now_ms(), before_ms) if len(self._holdings) else []

    @property
    def look_ms(self) -> int:
        """How often `due` is to be asked; 0 if the client holds nothing."""
        return self._holdings.look_ms

    async def answered(self, ask: Ask, answer: Answer) -> None:
        """At work: extended. Done: settled. What was not answered for is delivered again by and by."""
        working, done = answered(ask, answer.working), answered(ask, answer.done)
        try:
            if done:
                parts = [Settle(h.topic, h.partition_id, h.token, _acks(h)) for h in done]
                await self._broker.settle(ask.topic, ask.group, parts)
            if working:
                beat = Beat(ask.topic, ask.group, ask.member, self._client, tuple(working))
                await self._broker.in_thread(self._broker.beat, [beat])
                self._holdings.kept(ask, working, self._now_ms())
        except PostroomError as error:
            _log.warning("what %s holds could not be kept: %s", ask.member, error)

    def _now_ms(self) -> int:
        """Returns the process's time: leases are counted from when they were granted here."""
        return int(time.monotonic() * 1000)

    async def _permit(self, operation: Operation, request: Request) -> None:
        self._principal = principal = await self._gatekeeper.current(self._principal)
        self._gatekeeper.permit(principal, operation, request)
        if isinstance(request, _OF_PARTITION):
            await self._gatekeeper.check_partition(request.topic, request.partition_id)
        elif isinstance(request, _SETTLES):
            refuse_overlaps(request.parts)
            await self._gatekeeper.check_places({(part.topic, part.partition_id) for part in request.parts})
        elif isinstance(request, r.Beats):
            held = {(held.topic, held.partition_id) for beat in request.beats for held in beat.held}
            await self._gatekeeper.check_places(held)
        for member in _members(request):
            check_member(member)


def _rest_of(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def _members(request: Any) -> Iterable[str]:
    """Returns who takes part in a group, by what a request says."""
    if isinstance(request, _OF_MEMBER):
        return (request.request.member,)
    if isinstance(request, r.Beats):
        return {beat.member for beat in request.beats}
    return (request.member,) if isinstance(request, _MEMBERSHIP) else ()


def _acks(held: Held) -> tuple[Verdict, ...]:
    return tuple(Verdict("ack", first, last) for first, last in held.spans)
