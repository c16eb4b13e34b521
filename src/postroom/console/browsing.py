"""Messages for the console: those of a topic by offset, time or key, and those that are due later.

Whatever is in a message goes to the page as base64 and is shown there as text nodes: nothing of it is ever
part of a document. Values in lists are cut, so that a page of 4 MB messages is as small as any; one message
alone is sent whole. A search for a key reads the partition that the key goes to, for a bounded time, and says
how far it came. Reading is an operation of the table, asked in the principal's name.
"""

from __future__ import annotations

import base64
import time
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from ..client.consumer.delayed import page
from ..client.consumer.reading import Position
from ..client.message import DeadLetter, Delayed, Received
from ..config import DEFAULTS
from ..errors import CatalogError
from ..http.failures import BadRequest
from ..http.service import Caller, Who
from ..model.topology.route import Range

__all__ = ["browsing_router", "shown"]

_CUT_BYTES = 2048  # of a value in a list
_MOST = 200  # messages of a page
_HEADER_BYTES = 512

browsing_router = APIRouter(prefix="/console/data/topics/{topic}", include_in_schema=False)

Limit = Annotated[int, Query(ge=1, le=_MOST)]


# ---- partitions ----


@browsing_router.get("/partitions")
async def partitions(who: Who, topic: str) -> list[dict[str, Any]]:
    """What each partition keeps, by their slots; behind them those that take no more messages."""
    route, bounds = await who.mq.route(topic), await who.broker.bounds(topic)
    sealed = {piece.partition_id for piece in route.sealed}
    found = []
    for piece in route.partitions:
        kept = bounds.partitions.get(piece.partition_id)
        start, end = (0, 0) if kept is None else (kept.start, kept.end)
        is_sealed = piece.partition_id in sealed
        one: dict[str, Any] = {
            "partition": piece.partition,
            "first_slot": piece.first_slot,
            "last_slot": piece.last_slot,
        }
        one |= {"shard": piece.shard or "first", "start": start, "end": end, "sealed": is_sealed}
        found.append({**one, "messages": max(0, end - start - int(is_sealed))})
    return sorted(found, key=lambda one: (one["sealed"], one["first_slot"]))


# ---- messages ----


@browsing_router.get("/messages")
async def messages(
    who: Who,
    topic: str,
    partition: Annotated[int | None, Query(ge=0, le=2**31)] = None,
    offset: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    at: Annotated[str | None, Query(max_length=60)] = None,
    key: Annotated[str | None, Query(max_length=1000)] = None,
    limit: Limit = 50,
) -> dict[str, Any]:
    """Messages from an offset or a moment on, or of a key; else the newest."""
    start = None if at is None else _moment(at)
    if start is not None and start.timestamp() * 1000 > who.broker.now_ms():
        who.broker.permit("fetch", topic)
        return {"messages": []}
    if key is not None:
        return await _of_key(who, topic, key.encode(), start, offset, limit)
    if offset is not None:
        if partition is None:
            raise BadRequest("an offset is one of a partition: choose the partition as well")
        found = await _first(who, topic, {partition: offset}, partition, limit)
    elif start is not None:
        found = await _first(who, topic, start, partition, limit)
    else:
        found = await _newest(who, topic, partition, limit)
    return {"messages": [shown(one) for one in found]}


@browsing_router.get("/messages/{partition}/{offset}")
async def message(who: Who, topic: str, partition: int, offset: int) -> dict[str, Any]:
    """One message, whole."""
    found = await _first(who, topic, {partition: offset}, partition, 1)
    if not found or found[0]._position != offset:
        raise CatalogError(f"there is no message at offset {offset} of partition {partition} any more")
    return shown(found[0], whole=True)


async def _first(
    who: Caller, topic: str, start: Position, partition: int | None, limit: int
) -> list[Received]:
    found: list[Received] = []
    async with aclosing(who.mq.read(topic, start=start, partition=partition)) as reading:
        async for one in reading:
            found.append(one)
            if len(found) == limit:
                break
    return found


async def _newest(who: Caller, topic: str, partition: int | None, limit: int) -> list[Received]:
    """Of each partition the last few; the newest of all of them come first."""
    route, bounds = await who.mq.route(topic), await who.broker.bounds(topic)
    found: list[Received] = []
    for piece in route.partitions:
        kept = bounds.partitions.get(piece.partition_id)
        if kept is not None and partition in (None, piece.partition) and kept.end > kept.start:
            first = max(kept.start, kept.end - limit - 1)  # the last may be a seal
            found += await _first(who, topic, {piece.partition: first}, piece.partition, limit + 1)
    found.sort(key=lambda one: (one.timestamp, one._position), reverse=True)
    return found[:limit]


async def _of_key(
    who: Caller, topic: str, key: bytes, start: datetime | None, offset: int | None, limit: int
) -> dict[str, Any]:
    """Search the partitions that the key goes to, predecessors first; `next`: where to go on."""
    route = await who.mq.route(topic)
    slot = route.slot_of(key)
    pieces = [one for one in route.partitions if one.first_slot <= slot <= one.last_slot]
    ends_at, found, read = time.monotonic() + DEFAULTS.tuning.console.search_s, list[Received](), 0
    last: tuple[Range, int] | None = None
    for piece in pieces[-1:] if offset is not None else pieces:
        begin: Position = start or ({piece.partition: offset} if offset is not None else "earliest")
        async with aclosing(who.mq.read(topic, start=begin, partition=piece.partition)) as reading:
            async for one in reading:
                read, last = read + 1, (piece, one._position)
                if one.key == key:
                    found.append(one)
                if len(found) == limit or time.monotonic() > ends_at:
                    goes_on = {"partition": piece.partition, "offset": last[1] + 1}
                    return {"messages": [shown(m) for m in found], "searched": read, "next": goes_on}
    return {"messages": [shown(one) for one in found], "searched": read, "next": None}


def _moment(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"{text!r} is no moment: write one such as 2026-01-31T12:00:00Z") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def shown(one: Received | DeadLetter, *, whole: bool = False) -> dict[str, Any]:
    """Returns a message as the page gets it; its value is cut, unless the `whole` is wanted."""
    at = [one._position] if isinstance(one, Received) else [one._partition_id, one._position]
    return {"partition": one.partition, "offset": one.offset, "at": at, **_content(one, whole=whole)}


def _content(one: Received | DeadLetter | Delayed, *, whole: bool = False) -> dict[str, Any]:
    value = one.value if whole else one.value[:_CUT_BYTES]
    return {
        "id": one.id,
        "key": None if one.key is None else _base64(one.key if whole else one.key[:_HEADER_BYTES]),
        "headers": {
            name: _base64(text if whole else text[:_HEADER_BYTES]) for name, text in one.headers.items()
        },
        "timestamp": one.timestamp,
        "bytes": len(one.value),
        "value": _base64(value),
        "cut": len(value) < len(one.value),
    }


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


# ---- what is due later ----


@browsing_router.get("/delayed")
async def delayed(
    who: Who, topic: str, after: Annotated[str | None, Query(max_length=100)] = None, limit: Limit = 50
) -> dict[str, Any]:
    """A page of delayed messages, the soonest first, and where the next begins."""
    found, following = await page(who.mq, topic, limit, after)
    shown = [{**_content(one), "due_ms": one.due_ms} for one in found]
    return {"messages": shown, "next": following, "now_ms": who.broker.now_ms()}
