"""Sending, polling and settling over HTTP.

Sending takes a list of messages as JSON, or one message as the body itself: `Content-Type: application/json`
means a list; with any other the body is the value of one message, and headers that begin with `X-Postroom-`
say the rest. 202 comes once the messages are stored, with a receipt for each; if one is wrong, none is sent.
They go through the principal's connection, so concurrent requests share batches.

Polling is for shared groups, and stateless: what a poll hands out is the member's under the group's lease,
and settled by its handle, on any broker. Nobody sends heartbeats for an HTTP client: it settles within the
lease, or extends. A client that goes away while it waits takes nothing. Must never forget an offset it was
given: what holds no message for the user (control batches, I18; expired messages) is acked at once, what no
batch came for is looked after, a batch that cannot be read is given up, and what does not fit into the
answer (`ANSWER_BYTES` of JSON, whatever the batches unpack to) is given back: it comes with the next poll,
and was no attempt. A consumer of the SDK for each request, which keeps the same rules, would answer a fifth
as many (`bench.mechanisms`): it joins, fetches ahead, beats and leaves.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError

from ..client.codec import Expiry, unpack
from ..client.consumer.opened import GIVEN_UP, Browsed, told_of
from ..client.message import Kind, Message, Receipt, Received
from ..config import DEFAULTS
from ..endpoint.endpoint import Endpoint
from ..endpoint.values import Beat, Grant, Held, Lease, PollReply, PollRequest, Settle, Verdict
from ..errors import CorruptBatch, GroupConflict, LeaseLost, StoreUnavailable
from ..model.delivery.delivery import Span
from ..model.messages.batch import stored_records
from ..model.policy.settings import GroupWish
from ..units import Duration, duration_ms
from ..wire.server.answers import Share, no_room
from .failures import BadRequest
from .models import (
    ANSWER_BYTES,
    Handle,
    OutMessage,
    Poll,
    Polled,
    Send,
    SendMessage,
    Sent,
    SentReceipt,
    SettleBody,
    Settled,
    from_base64,
    json_bytes,
    merged,
    spans_of,
    text_or_base64,
    texts,
)
from .service import Caller, Who

__all__ = ["SCHEMAS", "polling_router", "sending_router"]


sending_router = APIRouter(tags=["messages"])

_LONGEST = 2 * DEFAULTS.send_timeout_ms / 1000
_LONGEST = 2 * DEFAULTS.send_timeout_ms / 1000  # of a send
_OWN = {"key": "x-postroom-key", "id": "x-postroom-id", "source": "x-postroom-source",
        "delay": "x-postroom-delay", "at": "x-postroom-at", "expires": "x-postroom-expires"}  # fmt: skip
_HEADER = "x-postroom-header-"
_LARGE = 128 * 1024
_SCHEMA = Send.model_json_schema(ref_template="#/components/schemas/{model}")
SCHEMAS: dict[str, Any] = _SCHEMA.pop("$defs")
"""What the page about the API needs besides what FastAPI finds by itself."""

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _SCHEMA},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


# ---- send ----


@sending_router.post("/topics/{topic}/messages", status_code=202, openapi_extra=_BODY)
async def send(
    who: Who,
    topic: str,
    request: Request,
    timeout: Annotated[float, Query(gt=0, le=_LONGEST)] = DEFAULTS.http_send_ms / 1000,
) -> Sent:
    """Send messages, and wait until they are stored."""
    who.broker.permit("append", topic)
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        messages = [_single(body, request.headers)]
    elif len(body) > _LARGE:  # reading it takes long, and others wait for the loop
        messages = await asyncio.to_thread(_listed, body)
    else:
        messages = _listed(body)
    receipts = await who.mq.send_many(topic, messages, timeout=timeout)
    return Sent(list(map(_receipt, receipts)))


def _listed(body: bytes) -> list[Message]:
    try:
        wish = Send.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(
            f'{where}: {first["msg"]}; a list of messages is written {{"messages": [{{"value": "paid"}}]}}, '
            "and one message as it is takes another Content-Type"
        ) from None
    return [_message(at, one) for at, one in enumerate(wish.messages)]


def _message(at: int, one: SendMessage) -> Message:
    if (one.value is None) == (one.value_b64 is None):
        raise BadRequest(f"messages.{at}: give it a value, or value_b64; one of them", index=at)
    if one.value_b64 is not None:
        value = from_base64(one.value_b64, f"messages.{at}.value_b64")
    elif isinstance(one.value, str):
        value = one.value.encode(errors="surrogatepass")
    else:
        value = _json(at, one.value.content)  # type: ignore[union-attr]
    named = one.model_dump(include={"key", "headers", "id", "source", "delay", "at", "expires"})
    return Message(value, **named)


def _json(at: int, content: Any) -> bytes:
    try:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise BadRequest(
            f"messages.{at}.value: NaN and Infinity are no JSON; write null, or a text", index=at
        ) from None


def _single(body: bytes, headers: Mapping[str, str]) -> Message:
    named: dict[str, Any] = {name: headers[header] for name, header in _OWN.items() if header in headers}
    own = {name[len(_HEADER) :]: value for name, value in headers.items() if name.startswith(_HEADER)}
    return Message(body, headers=own or None, **named)


def _receipt(receipt: Receipt) -> SentReceipt:
    due = None if receipt.due is None else receipt.due.isoformat()
    return SentReceipt(receipt.partition, receipt.offset, receipt.id, receipt.duplicate, due)


# ---- poll and settle ----


polling_router = APIRouter(prefix="/topics/{topic}/groups/{group}", tags=["messages"])

_MANY = 500  # handles: to read more of them takes long, and others wait for the loop
_Place = tuple[str, int, int]  # of a delivery: where it is, and its token


@dataclass(slots=True)
class _Opened:
    """The messages of a reply, as far as they fit into an answer, and what becomes of the rest."""

    base64: bool = False  # all values are shown so
    size: int = 0  # of what is shown, as JSON
    full: bool = False
    messages: list[tuple[Received, Handle]] = field(default_factory=list)
    left: list[tuple[Handle, Verdict]] = field(default_factory=list)  # to be given back
    empty: list[Handle] = field(default_factory=list)  # offsets that hold nothing for the user
    missing: list[Handle] = field(default_factory=list)  # offsets for which no batch came
    unread: list[tuple[Handle, str]] = field(default_factory=list)  # in batches that cannot be read: why

    def fits(self, message: Received) -> bool:
        """The first always does (I17)."""
        size = json_bytes(message.value, message.key, message.headers, always_base64=self.base64)
        self.full = self.full or (bool(self.messages) and self.size + size > ANSWER_BYTES)
        self.size += 0 if self.full else size
        return not self.full

    def give_back(self, grant: Grant, token: int, first: int, last: int) -> None:
        self.left.append(
            (Handle(grant.topic, grant.partition_id, token, first), Verdict("release", first, last))
        )


# ---- poll ----


@polling_router.post("/poll")
async def poll(who: Who, topic: str, group: str, wish: Poll, request: Request) -> Polled:
    """Take messages; they are yours for `lease_s`. Settle each by its handle. Makes the group if need be."""
    await _join(who, topic, group, wish.member or who.member)
    share = cast(Share, request.scope["state"]["share"])
    return await who.service.waiting(request, _poll(who, topic, group, wish, share))


async def _join(who: Caller, topic: str, group: str, member: str) -> None:
    endpoint = who.broker
    try:
        await endpoint.subscribe(topic, group, GroupWish(mode="shared"), member, who.mq.client_id)
    except GroupConflict:
        raise GroupConflict(
            f"group {group!r} of topic {topic!r} is not a shared one: over HTTP nobody holds a partition "
            "from one request to the next, so ordered and broadcast groups are for the SDK",
            topic=topic,
            group=group,
        ) from None


async def _poll(who: Caller, topic: str, group: str, wish: Poll, share: Share) -> Polled:
    loop, endpoint = asyncio.get_running_loop(), who.broker
    deadline = loop.time() + wish.wait_s
    while True:
        token = secrets.randbits(63) | 1
        wait_ms = max(0, round((deadline - loop.time()) * 1000))
        reply = await endpoint.poll(
            PollRequest(
                topic,
                group,
                wish.member or who.member,
                token,
                wish.max_messages,
                ANSWER_BYTES,
                wait_ms,
                empty_handed=True,
            )
        )
        opened = _open(reply, token, endpoint.now_ms(), base64=wish.base64)
        room = share.fits(opened.size)
        if not room:
            opened.left += [(handle, _release(handle)) for _, handle in opened.messages]
        await _account_for(endpoint, topic, group, opened)
        if not room:
            raise no_room()
        if opened.messages or loop.time() >= deadline:
            share.hold(opened.size)  # until it is sent: `app.Door`
            shown = [_shown(message, handle, wish.base64) for message, handle in opened.messages]
            return Polled(shown, reply.lease_ms / 1000)


def _release(handle: Handle) -> Verdict:
    return Verdict("release", handle.offset, handle.offset)


def _open(reply: PollReply, token: int, now_ms: int, *, base64: bool = False) -> _Opened:
    opened, expiry = _Opened(base64), Expiry(now_ms)
    for grant in reply.grants:
        for lease in grant.leases:
            _open_lease(opened, grant, lease, token, expiry)
    return opened


def _open_lease(opened: _Opened, grant: Grant, lease: Lease, token: int, expiry: Expiry) -> None:
    delivery = Browsed(grant.topic, grant.partition, grant.partition_id, lease.attempt)
    left = set(range(lease.first, lease.last + 1))
    covered: set[int] = set()
    end = lease.last  # what is behind it does not fit
    for batch in grant.batches:
        here = left.intersection(range(batch.base_offset, batch.last_offset + 1))
        if here and opened.full:
            end = min(end, min(here) - 1)
            break
        if here:
            covered |= here
            try:
                opened_batch = stored_records(batch)
            except CorruptBatch as error:
                told_of(grant, [(batch, error)], GIVEN_UP)
                handles = (Handle(grant.topic, grant.partition_id, token, offset) for offset in sorted(here))
                opened.unread += [(handle, str(error)[:300]) for handle in handles]
                left -= here
                continue
            found = unpack([r for r in opened_batch if r.offset in here], delivery, expiry)
            for message in found:
                if not opened.fits(message):
                    end = message._position - 1
                    break
                handle = Handle(grant.topic, grant.partition_id, token, message._position)
                opened.messages.append((message, handle))
                left.discard(message._position)
    if end < lease.last:
        opened.give_back(grant, token, end + 1, lease.last)
    for offset in sorted(offset for offset in left if offset <= end):
        handle = Handle(grant.topic, grant.partition_id, token, offset)
        (opened.empty if offset in covered else opened.missing).append(handle)


async def _account_for(endpoint: Endpoint, topic: str, group: str, opened: _Opened) -> None:
    """Done with what holds nothing; of what no batch came for, what the log no longer has is gone."""
    settling = [(handle, Verdict("ack", handle.offset, handle.offset)) for handle in opened.empty]
    settling += [
        (handle, Verdict("dead", handle.offset, handle.offset, reason=f"the batch could not be read: {why}"))
        for handle, why in opened.unread
    ]
    settling += opened.left
    for handle in opened.missing:
        fetched = await endpoint.fetch(
            handle.topic, handle.partition_id, handle.offset, max_messages=1, max_bytes=1, wait_ms=0
        )
        gone = handle.offset < fetched.start
        settling.append((handle, Verdict("ack" if gone else "release", handle.offset, handle.offset)))
    if settling:
        await endpoint.settle(topic, group, _parts(settling))


def _shown(message: Received, handle: Handle, always_base64: bool) -> OutMessage:
    value, value_b64 = text_or_base64(message.value, always_base64=always_base64)
    key, key_b64 = (None, None) if message.key is None else text_or_base64(message.key)
    return OutMessage(
        handle.encode(), message.topic, message.partition, message.offset, message.id, key, key_b64, value,
        value_b64, texts(message.headers), message.timestamp, message.attempt,
    )  # fmt: skip


# ---- settle ----


@polling_router.post("/settle")
async def settle(who: Who, topic: str, group: str, wish: SettleBody) -> Settled:
    """Ack, retry, release or give up messages, or extend their lease.

    409 `lease_lost` names those that were in other hands by then; the rest is settled.
    """
    who.broker.permit("settle", topic)  # also if nothing is named
    if _handles(wish) > _MANY:
        given, held = await asyncio.to_thread(_read, wish)
    else:
        given, held = _read(wish)
    named = [*(handle for handle, _ in given), *held]
    await who.broker.check_places("settle", {(handle.topic, handle.partition_id) for handle in named})
    lost = await _settle(who, topic, group, given)
    lost += await _extend(who, topic, group, held, wish.member or who.member)
    if lost:
        raise LeaseLost(
            f"the lease on {len(lost)} of these messages ended before: somebody else may handle them again, "
            "so make handling safe to repeat; a longer lease helps, or extending it. The rest is done",
            lost=[handle.encode() for handle in lost],
            settled=len(given) + len(held) - len(lost),
        )
    return Settled(len(given), len(held))


def _handles(wish: SettleBody) -> int:
    handled = len(wish.retries) + len(wish.releases) + len(wish.dead)
    return len(wish.acks) + len(wish.extends) + handled


def _read(wish: SettleBody) -> tuple[list[tuple[Handle, Verdict]], list[Handle]]:
    """Returns what is to be settled, and how; and what is to be extended."""
    given, held = _verdicts(wish), [Handle.decode(text) for text in wish.extends]
    _refuse_twice([*(handle for handle, _ in given), *held])
    return given, held


def _verdicts(wish: SettleBody) -> list[tuple[Handle, Verdict]]:
    found: list[tuple[Handle, Kind, Duration, str]] = [
        (Handle.decode(one), "ack", 0, "") for one in wish.acks
    ]
    found += [(Handle.decode(one.handle), "retry", one.delay_s, one.reason) for one in wish.retries]
    found += [(Handle.decode(one.handle), "release", one.delay_s, "") for one in wish.releases]
    found += [(Handle.decode(one.handle), "dead", 0, one.reason) for one in wish.dead]
    return [
        (
            handle,
            Verdict(kind, handle.offset, handle.offset, duration_ms(delay, name="delay_s"), None, reason),
        )
        for handle, kind, delay, reason in found
    ]


def _refuse_twice(handles: list[Handle]) -> None:
    if len(set(handles)) < len(handles):
        raise BadRequest("a handle is named twice: say one thing about each message")


async def _settle(who: Caller, topic: str, group: str, given: list[tuple[Handle, Verdict]]) -> list[Handle]:
    """Returns those that were lost."""
    if not given:
        return []
    reply = await who.broker.settle(topic, group, _parts(given))
    if reply.away:
        away = {(part.topic, part.partition_id, part.token) for part in reply.away}
        raise StoreUnavailable(
            "some of these messages are on a shard that is away: settle them again; the rest is settled",
            away=[handle.encode() for handle, _ in given if handle.place in away],
        )
    lost = _offsets(((p.topic, p.partition_id, p.token), spans) for p, spans in reply.lost)
    return [handle for handle, _ in given if (handle.place, handle.offset) in lost]


async def _extend(who: Caller, topic: str, group: str, held: list[Handle], member: str) -> list[Handle]:
    if not held:
        return []
    places: dict[tuple[str, int, int], list[int]] = {}
    for handle in held:
        places.setdefault(handle.place, []).append(handle.offset)
    beat = Beat(
        topic, group, member, who.mq.client_id,
        tuple(Held(*place, spans_of(offsets)) for place, offsets in places.items()),
    )  # fmt: skip
    found = await who.service.broker.in_thread(who.broker.beat, [beat])
    lost = _offsets(((one.topic, one.partition_id, one.token), spans) for one, spans in found)
    if any(not spans for _, spans in found):
        raise StoreUnavailable("their shard is away: some leases were not extended, and last as before")
    return [handle for handle in held if (handle.place, handle.offset) in lost]


def _offsets(lost: Iterable[tuple[_Place, Iterable[Span]]]) -> set[tuple[_Place, int]]:
    """Spans as offsets: no more than there are handles, since they are of ranges that handles make up."""
    return {
        (place, offset) for place, spans in lost for first, last in spans for offset in range(first, last + 1)
    }


def _parts(given: Iterable[tuple[Handle, Verdict]]) -> list[Settle]:
    found: dict[tuple[str, int, int], list[Verdict]] = {}
    for handle, verdict in given:
        found.setdefault(handle.place, []).append(verdict)
    return [Settle(*place, merged(verdicts)) for place, verdicts in found.items()]
