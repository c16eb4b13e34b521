"""What the verbs of the store contract take and return. Frozen values, nothing that acts.

Exported by `contract`: import them from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..model.delivery import Delivery, Span, Terms
from ..model.route import Route
from ..model.settings import GroupSettings, TopicSettings

__all__ = [
    "Append",
    "Appended",
    "Backlog",
    "Bounds",
    "Granted",
    "Group",
    "Member",
    "News",
    "Peek",
    "Settled",
    "StoredBatch",
    "Topic",
]


@dataclass(frozen=True, slots=True)
class Topic:
    id: int
    name: str
    settings: TopicSettings
    route: Route
    created_at: int


@dataclass(frozen=True, slots=True)
class Group:
    id: int
    topic_id: int
    topic: str
    name: str
    settings: GroupSettings
    generation: int  # grows with every reset; verbs of another generation are refused
    paused: bool
    created_at: int

    @property
    def terms(self) -> Terms:
        return Terms(self.settings.lease_ms, self.settings.max_attempts)


@dataclass(frozen=True, slots=True)
class Append:
    partition_id: int
    batch: bytes  # a verified RecordBatch v2; its base offset is overwritten


@dataclass(frozen=True, slots=True)
class Appended:
    base_offset: int
    appended_at: int
    duplicate: bool = False  # the producer had sent this very batch before


@dataclass(frozen=True, slots=True)
class StoredBatch:
    base_offset: int
    records: int
    appended_at: int
    data: bytes

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.records - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    start: int  # lowest offset that is kept
    end: int  # the next offset to be given
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class News:
    """What somebody else may have changed."""

    catalog_version: int
    ends: Mapping[int, int]  # partition id → next offset


@dataclass(frozen=True, slots=True)
class Peek:
    cursor: int
    next_due: int | None  # no delivery is due before this moment


@dataclass(frozen=True, slots=True)
class Granted:
    deliveries: tuple[Delivery, ...]
    leaving: tuple[Delivery, ...] = ()  # stamped: the caller moves them now (I12)
    unplaced: tuple[Span, ...] = ()  # exhausted, but `Ask.dead` was not given: ask again with it
    next_due: int | None = None
    draining: bool = False  # a suspect waits until the member holds nothing: it should ask no more till then


@dataclass(frozen=True, slots=True)
class Settled:
    lost: tuple[Span, ...] = ()  # unsettled, and not in the asker's hands
    leaving: tuple[Delivery, ...] = ()  # stamped: the caller moves them now (I12)
    unplaced: tuple[Span, ...] = ()  # that was the last attempt: settle again, with a stamp


@dataclass(frozen=True, slots=True)
class Member:
    group_id: int
    name: str
    client: str
    joined_at: int
    until: int  # live until then


@dataclass(frozen=True, slots=True)
class Backlog:
    """Where a group is in one partition, found without scanning (R43)."""

    partition_id: int
    committed: int
    cursor: int
    end: int
    unsettled: int  # handed out, or waiting to be again
    bytes: int
    oldest_age_ms: int
    first_wait_ms: int
    arrival_per_s: float
    drain_per_s: float
    open: tuple[Span, ...] = field(default=(), repr=False)
