"""Requests about what jobs stage and publish (I20). They name every topic that they are about."""

from __future__ import annotations

from ..model.staging import Wish
from .request import Request

__all__ = ["Decide", "Drop", "Marks", "Publish", "Stage"]


class Stage(Request):
    """The batches are the body, one after the other: one for each partition."""

    topic: str
    query: str
    batch: int
    segment: str
    number: int
    partition_ids: tuple[int, ...]
    producer: str = ""  # whose rate it counts towards (R40), if the broker does not know it better


class Marks(Request):
    topics: tuple[str, ...]
    query: str


class Decide(Request):
    topics: tuple[str, ...]
    query: str
    batch: int
    wish: Wish


class Publish(Request):
    topics: tuple[str, ...]
    query: str
    batch: int


class Drop(Request):
    topics: tuple[str, ...]
    query: str
    batch: int
    segments: tuple[str, ...] | None = None
