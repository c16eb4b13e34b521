"""What the headers of all requests are.

A header has a limit by its kind, so that nobody can make a broker read megabytes before it knows what they
are about. Fields that a newer client adds have room in it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from ..model.moves.staging import Wish
from ..model.policy.bounds import (
    MOST_SEGMENTS,
    ClientName,
    GroupName,
    Label,
    Offset,
    PartitionIds,
    TopicName,
    TopicNames,
    Whole,
)
from ..model.policy.slow_lane import MOST_SOURCES, Seen

__all__ = ["Decide", "Drop", "Marks", "Publish", "Report", "Request", "Stage"]


class Request(msgspec.Struct, array_like=True):
    """The header of a request."""

    most_bytes: ClassVar[int] = 8 * 1024


# ---- lanes ----
# Messages about slow lanes (R42).


class Report(Request):
    most_bytes: ClassVar[int] = 512 * 1024

    topic: TopicName
    group: GroupName
    seen: Annotated[tuple[Seen, ...], Meta(max_length=MOST_SOURCES)]
    version: Whole = 0


# ---- staging ----
# Requests about what jobs stage and publish (I20). They name every topic that they are about.


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
