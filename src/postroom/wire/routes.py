"""Routes as they travel: what a reader needs, and nothing of what a `Route` computes for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import ProtocolError
from ..model.route import Range, Route

__all__ = ["RouteHead", "pack_route", "pack_routes", "route", "routes"]


class RouteHead(msgspec.Struct, frozen=True):
    topic: str
    version: int
    ranges: tuple[Range, ...]
    by_id: bool = False
    sealed: tuple[Range, ...] = ()
    predecessors: Mapping[int, tuple[int, ...]] = {}
    away: tuple[int, ...] = ()  # ids of ranges' partitions whose shard does not answer now


def _head(one: Route) -> RouteHead:
    return RouteHead(one.topic, one.version, one.ranges, one.by_id, one.sealed, one.predecessors, one.away)


def pack_route(reply: Route) -> tuple[Any, Sequence[bytes]]:
    return _head(reply), ()


def pack_routes(reply: Sequence[Route]) -> tuple[Any, Sequence[bytes]]:
    return [_head(one) for one in reply], ()


def route(head: RouteHead, body: bytes = b"") -> Route:
    try:
        return Route(
            head.topic, head.version, head.ranges, head.by_id, head.sealed, dict(head.predecessors), head.away
        )
    except AssertionError as error:
        raise ProtocolError(f"the route of {head.topic!r} is none: {error}") from error


def routes(heads: Sequence[RouteHead], body: bytes = b"") -> list[Route]:
    return [route(head) for head in heads]
