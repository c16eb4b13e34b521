"""Figures for the console: the overview, live or once, and the charts of the last hour.

A stream is server-sent events: the overview whenever the queue was measured, written once for all who see the
same. It ends after a while, and the browser asks for the next by itself; so a log-in that has ended, or a
permission that is gone, is noticed, and a broker that stops does not wait for those who only watch.

A principal is shown the topics that it has a permission on, and totals of these alone. A page has a fixed
number of topics, so that an answer is small whatever the size of the queue.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from ..config import DEFAULTS
from ..errors import BrokerUnavailable
from ..http.service import Caller, Who
from ..model.access import Principal, allows, visible
from .measuring import GroupFigures, Measured, TopicFigures
from .sampling import Sampler, TooManyViewers

__all__ = ["View", "Wish", "figures_router"]

PAGE = 50  # topics

_MOST_ATTENTION = 20
SORTS = ("attention", "name", "in", "lag", "dead")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a viewer wants to see."""

    sort: str = "attention"
    contains: str = ""
    page: int = 0


figures_router = APIRouter(prefix="/console/data", include_in_schema=False)

_encode = msgspec.json.Encoder().encode


def _wish(
    sort: str = "attention",
    contains: Annotated[str, Query(max_length=120)] = "",
    page: Annotated[int, Query(ge=0, le=100_000)] = 0,
) -> Wish:
    return Wish(sort if sort in SORTS else "attention", contains, page)


Wished = Annotated[Wish, Depends(_wish)]


@figures_router.get("/overview")
async def once(who: Who, wish: Wished, request: Request) -> Response:
    sampler = _sampler(request)
    if not sampler.number:
        await sampler.measure()
    return Response(_written(sampler, who, wish), media_type="application/json")


@figures_router.get("/live")
async def live(who: Who, wish: Wished, request: Request) -> Response:
    """The overview, again and again."""
    sampler = _sampler(request)
    stream = _events(sampler, who, wish)
    try:
        first = await anext(stream)  # whether there is room is said before the answer begins
    except TooManyViewers:
        raise BrokerUnavailable(
            "too many view this broker's console: close a few, or open that of another broker"
        ) from None
    return StreamingResponse(_after(first, stream), media_type="text/event-stream")


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for one in rest:
        yield one


async def _events(sampler: Sampler, who: Caller, wish: Wish) -> AsyncIterator[bytes]:
    ends_at, number = time.monotonic() + DEFAULTS.tuning.console.stream_s, sampler.number
    with sampler.viewing():
        yield b"retry: 1000\n\n" + (_event(sampler, who, wish) if number else b"")
        while time.monotonic() < ends_at and not who.service.stopping:
            newest = await sampler.next(number)
            if newest != number:
                number = newest
                yield _event(sampler, who, wish)


def _event(sampler: Sampler, who: Caller, wish: Wish) -> bytes:
    return b"data: " + _written(sampler, who, wish) + b"\n\n"


def _written(sampler: Sampler, who: Caller, wish: Wish) -> bytes:
    allowed = who.principal.permissions

    def write() -> bytes:
        seen = sampler.once(allowed, lambda: View(sampler.last, who.principal))
        return _encode({**seen.overview(wish), "stale": sampler.stale})

    return sampler.once((wish, allowed), write)


@figures_router.get("/charts")
async def charts(
    who: Who, request: Request, topic: Annotated[str | None, Query(max_length=250)] = None
) -> Any:
    """The last hour of a topic, or of the queue as a whole."""
    found = _sampler(request).charts
    who.broker.permit("topic" if topic else "rates", topic)
    series: dict[str, Any] = found.whole() if topic is None else dict(found.topic(topic))
    return {"times": list(found.times), "series": series}


def _sampler(request: Request) -> Sampler:
    return cast(Sampler, request.app.state.sampler)


# ---- what the overview shows: pure ----


class View:
    """What a principal may see of one measurement. Pages of it share what they have in common."""

    def __init__(self, measured: Measured, principal: Principal) -> None:
        self._topics = [measured.topics[name] for name in visible(principal, measured.topics)]
        needs = _attention(self._topics)
        everything = allows(principal, "manage", None)
        shards = [{"name": name, "state": state} for name, state in measured.shards]
        self._common = {
            "at": measured.at_ms,
            "totals": _totals(self._topics),
            "attention": needs[:_MOST_ATTENTION],
            "more_attention": max(0, len(needs) - _MOST_ATTENTION),
            "brokers": measured.brokers if everything else [],
            "shards": shards if everything else [],
        }
        self._listed: tuple[tuple[str, str], list[TopicFigures]] | None = None  # the last that was wished

    def overview(self, wish: Wish) -> dict[str, Any]:
        wanted = self._wanted(wish)
        pages = max(1, -(-len(wanted) // PAGE))
        page = min(wish.page, pages - 1)
        topics = [_topic(topic) for topic in wanted[page * PAGE : (page + 1) * PAGE]]
        return {**self._common, "topics": topics, "found": len(wanted), "page": page, "pages": pages}

    def _wanted(self, wish: Wish) -> list[TopicFigures]:
        key, text = (wish.sort, wish.contains), wish.contains.lower()
        if self._listed is None or self._listed[0] != key:
            wanted = [topic for topic in self._topics if text in topic.name.lower()]
            wanted.sort(key=lambda topic: _order(topic, wish.sort))
            self._listed = key, wanted
        return self._listed[1]


def _totals(topics: Sequence[TopicFigures]) -> dict[str, float]:
    groups = [group for topic in topics for group in topic.groups.values()]
    return {
        "topics": len(topics),
        "groups": len(groups),
        "in_per_s": round(sum(topic.in_per_s for topic in topics), 1),
        "out_per_s": round(sum(group.out_per_s for group in groups), 1),
        "lag": sum(group.lag for group in groups),
        "age_ms": max((group.age_ms for group in groups), default=0),
        "dead": sum(group.dead for group in groups),
        "stopped": sum(group.stopped for group in groups),
        "delayed": sum(topic.delayed for topic in topics),
    }


def _topic(topic: TopicFigures) -> dict[str, Any]:
    return {
        "name": topic.name,
        "partitions": topic.partitions,
        "messages": topic.messages,
        "in_per_s": round(topic.in_per_s, 1),
        "delayed": topic.delayed,
        "groups": [_group(group) for group in sorted(topic.groups.values(), key=lambda one: one.name)],
    }


def _group(group: GroupFigures) -> dict[str, Any]:
    return {
        "name": group.name,
        "mode": group.mode,
        "paused": group.paused,
        "lag": group.lag,
        "age_ms": group.age_ms,
        "out_per_s": round(group.out_per_s, 1),
        "members": group.members,
        "dead": group.dead,
        "stopped": group.stopped,
    }


def _order(topic: TopicFigures, sort: str) -> tuple[Any, ...]:
    groups = topic.groups.values()
    dead = sum(group.dead for group in groups)
    if sort == "in":
        return (-topic.in_per_s, topic.name)
    if sort == "lag":
        return (-topic.lag, topic.name)
    if sort == "dead":
        return (-dead, topic.name)
    if sort == "attention":
        return (-sum(group.stopped for group in groups), -dead, -topic.lag, topic.name)
    return (topic.name,)


def _attention(topics: Sequence[TopicFigures]) -> list[dict[str, Any]]:
    """What somebody should see to, the worst first; the page has the words."""
    found: list[tuple[int, int, dict[str, Any]]] = []
    for topic in topics:
        for group in topic.groups.values():
            about = {"topic": topic.name, "group": group.name}
            if group.stopped:
                found.append((0, -group.stopped, {**about, "kind": "stopped", "count": group.stopped}))
            if group.dead:
                found.append((1, -group.dead, {**about, "kind": "dead", "count": group.dead}))
            if group.paused and group.lag:
                found.append((2, -group.lag, {**about, "kind": "paused", "count": group.lag}))
            elif group.lag and not group.members and group.mode != "broadcast":
                found.append((3, -group.lag, {**about, "kind": "unread", "count": group.lag}))
    found.sort(key=lambda one: one[:2])
    return [said for _, _, said in found]
