"""What an authenticated client may ask, and the asking of it: permissions, then the broker.

Every operation of the table goes through `call`. Decides by `broker.gatekeeper.ACTIONS` which permission it
needs and on which topics; nothing is done before all of them are there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ...broker.access import ACTIONS, Gatekeeper
from ...broker.broker import Broker
from ...endpoint.values import Beat, Held, Settle, Verdict, released
from ...errors import PostroomError, UnknownTopic, UsageError
from ...model.access import ANONYMOUS, Principal
from ...model.delivery.delivery import Span
from ...model.messages.admission import walk, walk_all
from ...model.topology.names import check_member, reply_topic
from .. import messages as m
from .. import requests as staging
from ..messages import Answer, Ask, Operation, Request
from .answers import Share
from .holdings import Holdings, answered
from .listening import Listening

__all__ = ["SMALL", "Session", "refuse_overlaps"]


# ---- overlaps ----
# Verdicts of one settle are about different messages: whoever says two things about one is refused.
#
# So the work that a settle makes is bounded by what it names and by what its tokens hold, and never by
# the product of both.


def refuse_overlaps(parts: Sequence[Settle]) -> None:
    """UsageError; what parks is left out, since its range has messages of other keys in it (I27)."""
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


# ---- session ----

_log = logging.getLogger("postroom.wire")


_LIMITED = frozenset({"append", "stage"})  # verbs that count towards their producer's rate (R40)
_OWNED = frozenset({"append", "stage", "staged_marks", "decide_staged", "publish_staged", "drop_staged"})
# verbs that are told whose producer or query it is: no client says so itself (I23)

_AT_ONCE_S = 0.004  # for looking into a batch on the loop; the rest is done in a thread
_LEAST_BYTES = 1024 * 1024  # what a poll may bring however many others wait
_LISTED_BYTES = 1024 * 1024  # a list is expected to be no longer, unless the last one was
_MOST_MESSAGES = 20_000  # of one answer, whatever is asked for

SMALL = frozenset({
    "append", "settle", "beat", "hand_over", "unsubscribe", "cancel",
    "stage", "staged_marks", "decide_staged", "publish_staged", "drop_staged",
    "delete_topic", "purge", "route_change", "delete_group", "set_rate", "open_replies", "close_replies",
    "redrive", "discard", "restart_stopped", "skip_stopped", "drop_stopped",
})  # fmt: skip
"""Operations whose answer is no larger than their request, or nearly nothing: no room is looked for."""

_READS = frozenset({
    "fetch", "resolve", "bounds", "topics", "topic", "route", "route_history", "shards", "groups", "lag",
    "lanes", "dead_letters", "stopped", "rates",
})  # fmt: skip


class Session:
    """`share`: what it holds of the broker's room for answers."""

    def __init__(
        self,
        broker: Broker,
        gatekeeper: Gatekeeper,
        principal: Principal,
        client: str,
        share: Share,
        limits: Listening,
    ) -> None:
        self._broker, self._gatekeeper, self._principal = broker, gatekeeper, principal
        self._client, self.share = client, share
        self._holdings = Holdings()
        self._one_bytes = limits.one_answer_bytes
        self._polls_bytes = limits.answer_bytes  # that polls may bring together, without those that wait
        self._usual: dict[str, int] = {}  # how long lists were
        self._careful = False  # it sent a batch that was refused

    @property
    def principal(self) -> Principal:
        return self._principal

    async def call(self, operation: Operation, request: Request, body: bytes) -> Any:
        """PermissionDenied, or whatever the broker has against it."""
        await self._permit(operation, request)
        if isinstance(request, m.Append | staging.Stage):
            await self._admit(request, body)
        named = {field: getattr(request, field) for field in request.__struct_fields__}
        if operation.body:
            named[operation.body] = body
        if operation.name == "beat":  # the only verb that blocks
            return await self._beat(named["beats"])
        if self._principal is not ANONYMOUS:  # who may come without a token is as somebody inside
            if operation.name in _LIMITED:
                named["producer"] = self._principal.name
            if operation.name in _OWNED:
                named["owner"] = self._principal.name
        if operation.name == "topics":
            named["viewer"] = self._principal
        if isinstance(request, m.Requester):
            named["owner"] = self._principal.name
        if operation.name == "settle":
            self._holdings.settled(named["parts"])
        reply = await self._asked(operation.name, named)
        return reply

    def shown(self, error: UnknownTopic) -> UnknownTopic:
        """As the client may see it."""
        return self._gatekeeper.shown(self._principal, error)

    async def _asked(self, name: str, named: dict[str, Any]) -> Any:
        verb = getattr(self._broker, name)
        if name == "poll":
            asked = named["request"]
            share = self._polled(asked.bytes)
            messages = min(asked.messages, _MOST_MESSAGES)
            if (share, messages) != (asked.bytes, asked.messages):
                named["request"] = replace(asked, bytes=share, messages=messages)
        elif name == "fetch":
            share = named["max_bytes"] = self._polled(named["max_bytes"])
            named["max_messages"] = min(named["max_messages"], _MOST_MESSAGES)
        else:
            return await verb(**named)
        self._polls_bytes -= share
        try:
            return await verb(**named)
        finally:
            self._polls_bytes += share

    def _polled(self, wanted: int) -> int:
        """What a poll may bring: less if many others wait."""
        return min(wanted, self._one_bytes, max(self._polls_bytes, _LEAST_BYTES))

    # ---- room for answers ----

    def expected(self, name: str, request: Any) -> int:
        """For how much there must be room first. Who waits for messages holds nothing meanwhile."""
        if name == "poll" or (name == "fetch" and request.wait_ms):
            return 0
        if name == "fetch":
            wanted: int = request.max_bytes
            return max(0, min(wanted, self._one_bytes))
        return self._usual.get(name, _LISTED_BYTES)

    def may_drop(self, name: str, request: Any) -> bool:
        """Whether an answer for which there is no room may be thrown away: it can be asked for again."""
        if name in ("poll", "unpark"):
            return not request.request.on_delivery  # else it is settled, and would be lost
        return name in _READS

    def granted(self, name: str, request: Any, reply: Any, size: int) -> None:
        """It is about to be sent."""
        if name == "poll":
            self._holdings.granted(request.request, reply, self._now_ms())
        elif name != "fetch":
            self._usual[name] = max(_LISTED_BYTES, size, self._usual.get(name, 0) * 7 // 8)

    async def give_back(self, name: str, request: Any, reply: Any) -> None:
        """What a poll was given whose answer is thrown away; a holder of partitions asks for it again."""
        if name == "poll" and reply.grants and all(grant.position < 0 for grant in reply.grants):
            asked = request.request
            await self._broker.settle(asked.topic, asked.group, released(asked, reply.grants))

    async def _admit(self, request: Request, body: bytes) -> None:
        """Refuse batches that could not be read, or hold more than they may: a token is not trust."""
        walking = walk if isinstance(request, m.Append) else walk_all
        steps = walking(body, self._broker.now_ms(), careful=self._careful)
        until = time.perf_counter() + _AT_ONCE_S
        try:
            for _ in steps:
                if time.perf_counter() >= until:
                    await self._broker.in_thread(_rest_of, steps)
        except PostroomError:
            self._careful = True
            raise

    async def _beat(self, beats: Sequence[Beat]) -> Any:
        self._holdings.renewed(beats, self._now_ms())
        return await self._broker.in_thread(self._broker.beat, beats)

    # ---- holders that are asked (R19) ----

    def due(self, before_ms: int) -> list[Ask]:
        """What the client is to be asked about: its lease ends soon."""
        return self._holdings.due(self._now_ms(), before_ms) if len(self._holdings) else []

    @property
    def look_ms(self) -> int:
        """How often `due` is to be asked; 0: the client holds nothing."""
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
        """Of the process: leases are counted from when they were granted here."""
        return int(time.monotonic() * 1000)

    async def _permit(self, operation: Operation, request: Request) -> None:
        self._principal = principal = await self._gatekeeper.current(self._principal)
        need = ACTIONS[operation.name]
        for topic in _topics(operation, request, principal.name):
            self._gatekeeper.check(principal, need, topic)
        if isinstance(request, m.Append | m.Fetch):
            await self._gatekeeper.check_partition(request.topic, request.partition_id)
        elif isinstance(request, m.SettleParts):
            refuse_overlaps(request.parts)
            await self._gatekeeper.check_places({(part.topic, part.partition_id) for part in request.parts})
        elif isinstance(request, m.Beats):
            held = {(held.topic, held.partition_id) for beat in request.beats for held in beat.held}
            await self._gatekeeper.check_places(held)
        for member in _members(request):
            check_member(member)


def _rest_of(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def _topics(operation: Operation, request: Any, who: str) -> Iterable[str | None]:
    """The topics that a request is about; None: the whole queue."""
    if isinstance(request, m.Requester):
        return (reply_topic(request.client, who),)
    if isinstance(request, m.Poll | m.Unpark):
        return (request.request.topic,)
    if isinstance(request, m.SettleParts):
        return {request.topic, *(part.topic for part in request.parts)}
    if isinstance(request, m.Beats):
        held = {held.topic for beat in request.beats for held in beat.held}
        return {beat.topic for beat in request.beats} | held
    if isinstance(request, m.SetRate):
        return (request.rate.subject[0] or None,)
    if isinstance(request, staging.Marks | staging.Decide | staging.Publish | staging.Drop):
        return request.topics or (None,)
    if operation.name in ("topics", "shards", "drain_shard", "open_shard", "rates"):
        return (None,)
    topic = getattr(request, "topic", None)
    return (request.name if topic is None else topic,)


def _members(request: Any) -> Iterable[str]:
    """Who takes part in a group, by what a request says."""
    if isinstance(request, m.Poll | m.Unpark):
        return (request.request.member,)
    if isinstance(request, m.Beats):
        return {beat.member for beat in request.beats}
    return (request.member,) if isinstance(request, m.Subscribe | m.Unsubscribe) else ()


def _acks(held: Held) -> tuple[Verdict, ...]:
    return tuple(Verdict("ack", first, last) for first, last in held.spans)
