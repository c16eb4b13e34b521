"""Messages about slow lanes (R42)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from ..model.bounds import GroupName, TopicName, Whole
from ..model.lanes import MOST_SOURCES, Seen
from .request import Request

__all__ = ["Report"]


class Report(Request):
    most_bytes: ClassVar[int] = 512 * 1024

    topic: TopicName
    group: GroupName
    seen: Annotated[tuple[Seen, ...], Meta(max_length=MOST_SOURCES)]
    version: Whole = 0
