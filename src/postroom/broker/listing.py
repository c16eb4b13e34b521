"""All topics and groups, for background work: read again only when the catalog's version has moved.

So what runs every few seconds costs one small read on a queue of ten thousand topics, while nobody changes
them. A cache, never the truth: whoever acts on it asks the store's verbs, which know better. Blocking; any
thread may call it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ..store.contract import Catalog, Group, Topic

__all__ = ["Listed", "Listing"]


@dataclass(frozen=True, slots=True)
class Listed:
    """What the catalog held at one version."""

    version: int
    topics: tuple[Topic, ...]
    groups: dict[int, list[Group]] = field(default_factory=dict)  # by topic id; those without are missing
    by_partition: dict[int, Topic] = field(default_factory=dict)


class Listing:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._last: Listed | None = None

    def look(self) -> Listed:
        with self._lock:
            version = self._catalog.version()  # first: what changes meanwhile is read again the next time
            if self._last is None or self._last.version != version:
                self._last = self._read(version)
            return self._last

    def _read(self, version: int) -> Listed:
        topics, groups = tuple(self._catalog.topics()), dict[int, list[Group]]()
        for group in self._catalog.groups_of():
            groups.setdefault(group.topic_id, []).append(group)
        places = {piece.partition_id: topic for topic in topics for piece in topic.route.partitions}
        return Listed(version, topics, groups, places)
