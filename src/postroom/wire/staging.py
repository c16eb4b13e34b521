"""Requests about what jobs stage and publish (I20). They name every topic that they are about."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from ..model.bounds import MOST_SEGMENTS, ClientName, Label, Offset, PartitionIds, TopicName, TopicNames
from ..model.staging import Wish
from .request import Request

__all__ = ["Decide", "Drop", "Marks", "Publish", "Stage"]


class Stage(Request):
    """The batches are the body, one after the other: one for each partition."""

    most_bytes: ClassVar[int] = 64 * 1024

    topic: TopicName
    query: Label
    batch: Offset
    segment: Label
    number: Offset
    partition_ids: PartitionIds
    producer: ClientName = ""  # whose rate it counts towards (R40), if the broker does not know it better


class Marks(Request):
    most_bytes: ClassVar[int] = 256 * 1024

    topics: TopicNames
    query: Label


class Decide(Request):
    most_bytes: ClassVar[int] = 1024 * 1024

    topics: TopicNames
    query: Label
    batch: Offset
    wish: Wish


class Publish(Request):
    most_bytes: ClassVar[int] = 256 * 1024

    topics: TopicNames
    query: Label
    batch: Offset


class Drop(Request):
    most_bytes: ClassVar[int] = 1024 * 1024

    topics: TopicNames
    query: Label
    batch: Offset
    segments: Annotated[tuple[Label, ...], Meta(max_length=MOST_SEGMENTS)] | None = None
