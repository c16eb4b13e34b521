"""The broker remembers topics and groups here, so that a poll does not read them again.

A cache, never the truth: it is thrown away when the catalog's version moves, which is looked at no less
than once a second while it is used. A change made elsewhere is therefore seen within a second (R14).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...config import DEFAULTS
from ...errors import GroupExists, StoreUnavailable, TopicExists, UnknownGroup, UnknownTopic
from ...model.policy.bounds import make_room
from ...model.policy.settings import GroupSettings, TopicSettings
from ...model.topology.names import REDRIVE_GROUP, base_of, dead_topic, retry_topic, slow_topic
from ...store.contract import Catalog, Group, Topic

__all__ = ["CatalogCache", "Key", "Listed", "Listing", "Source", "is_base", "readers", "sources_key"]


T = TypeVar("T")

_MOST = 20_000  # things that are remembered: names that clients make up must not fill the memory

_UNREAD = object()

Key = tuple[str | bool, ...]
"""What is remembered, and of which topic and group."""

Source = tuple[Topic, Group]
"""A topic and the group that reads it."""


def sources_key(topic: str, group: str, lane: bool) -> Key:
    """The key of what `CatalogCache.sources` answers."""
    return "sources", topic, group, lane


def is_base(group: Group) -> bool:
    """A broadcast group itself: it has no progress, the groups of its members have (R11)."""
    return group.settings.mode == "broadcast" and base_of(group.name) is None


def readers(groups: Iterable[Group]) -> list[Group]:
    """The groups that have progress: what they have not settled must be kept (R44)."""
    return [group for group in groups if not is_base(group)]


class CatalogCache:
    """`lasting`: while the catalog cannot be read, what was known last is good enough (R6)."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        lasting: bool = False,
        fresh_s: float = DEFAULTS.tuning.broker.catalog_fresh_s,
    ) -> None:
        self._fresh_s = fresh_s  # what other processes changed is seen no later
        self._catalog = catalog
        self._last: dict[Key, object] | None = {} if lasting else None
        self._lock = threading.Lock()
        self._known: dict[Key, object] = {}
        self._version = -1
        self._looked_at = 0.0
        self._forgotten = 0

    def last(self) -> None:
        """From now on what was known last is good enough."""
        if self._last is None:
            self._last = {}

    def forget(self) -> None:
        """After a change made here. What is being read just now may be old, and is not remembered."""
        with self._lock:
            self._known.clear()
            self._looked_at = 0.0
            self._forgotten += 1

    def saw_version(self, version: int) -> bool:
        """Told the catalog's version; True if what was remembered is out of date."""
        with self._lock:
            moved = version != self._version
            if moved:
                self._known.clear()
            self._version, self._looked_at = version, time.monotonic()
            return moved

    def topic(self, name: str, *, fresh: bool = False) -> Topic:
        """The topic; `fresh`, as it is now: whoever met a sealed partition waits for the next route."""
        if fresh:
            with self._lock:
                self._known.pop(("topic", name), None)
        return self.get(("topic", name), lambda: self._catalog.topic(name))

    def group(self, topic: str, name: str) -> Group:
        return self.get(("group", topic, name), lambda: self._catalog.group(topic, name))

    def sources(self, topic: str, group: str, *, lane: bool = False) -> list[Source]:
        """What a consumer of the group reads: the topic, the group's retry topic if there is one, and with
        `lane` its slow lane, which comes last if there is one (R42)."""
        return self.get(sources_key(topic, group, lane), lambda: self._read_sources(topic, group, lane))

    def lane(self, topic: str, group: str) -> Source | None:
        """The group's slow lane, if it was made already."""
        return self.get(("lane", topic, group), lambda: self._read_source(slow_topic(topic, group), group))

    def readers(self, topic: str, group: str) -> list[Group]:
        """The group; in its place the groups of its members, if it is a broadcast group."""
        return self.get(("readers", topic, group), lambda: self._read_readers(topic, group))

    def dead_letters(self, topic: str, group: str) -> Topic | None:
        """The group's dead-letter topic, if it was made already."""
        return self.get(("dead", topic, group), lambda: self._read_dead_letters(dead_topic(topic, group)))

    def make_dead_letters(self, topic: str, group: str) -> Topic:
        return self.make_internal(dead_topic(topic, group), REDRIVE_GROUP, GroupSettings())

    def known(self, key: Key) -> Any:
        """What is remembered under that key, without asking the store.

        None: nothing is, or the catalog's version was not looked at of late.
        """
        return self._known.get(key) if time.monotonic() - self._looked_at <= self._fresh_s else None

    def get(self, key: Key, read: Callable[[], T]) -> T:
        """What is remembered under that key; it is read again when the catalog's version has moved."""
        found = self._known.get(key, _UNREAD)
        if found is not _UNREAD and time.monotonic() - self._looked_at <= self._fresh_s:
            return found  # type: ignore[return-value]
        if self._last is None:
            return self._read(key, read)
        try:
            value = self._read(key, read)
            self._remember(key, value)
        except StoreUnavailable:
            if key not in self._last:
                raise
            return self._last[key]  # type: ignore[return-value]
        return value

    def _read(self, key: Key, read: Callable[[], T]) -> T:
        if time.monotonic() - self._looked_at > self._fresh_s:
            self.saw_version(self._catalog.version())
        with self._lock:
            if key in self._known:
                return self._known[key]  # type: ignore[return-value]
            read_at = (self._version, self._forgotten)
        value = read()
        with self._lock:
            if read_at == (self._version, self._forgotten):
                make_room(self._known, _MOST)
                self._known[key] = value
        return value

    def _read_sources(self, topic: str, group: str, lane: bool) -> list[Source]:
        if lane:
            sources, own = self.sources(topic, group), self.lane(topic, group)
            return sources if own is None else [*sources, own]
        main = (self._catalog.topic(topic), self._catalog.group(topic, group))
        retries = self._read_source(retry_topic(topic, group), group)
        found = [main] if retries is None else [main, retries]
        self._keep(found)
        return found

    def _keep(self, sources: list[Source]) -> None:
        """While the catalog is away, who was handed messages must be able to renew their lease and to settle
        them: else they expire again and again, and innocents are dead letters (I14)."""
        for topic, group in sources:
            self._remember(("topic", topic.name), topic)
            self._remember(("group", topic.name, group.name), group)

    def _remember(self, key: Key, value: object) -> None:
        """For while the catalog is away, where that is good enough."""
        if self._last is not None:
            if key not in self._last:
                make_room(self._last, _MOST)
            self._last[key] = value

    def _read_source(self, own: str, group: str) -> Source | None:
        """A topic of the group's own; None: it was not made, or whoever made it was cut off."""
        try:
            return self._catalog.topic(own), self._catalog.group(own, group)
        except (UnknownTopic, UnknownGroup):
            return None

    def _read_readers(self, topic: str, group: str) -> list[Group]:
        found = self._catalog.group(topic, group)
        if not is_base(found):
            return [found]
        return [g for g in self._catalog.groups(topic) if base_of(g.name) == group]

    def _read_dead_letters(self, name: str) -> Topic | None:
        """None also if whoever made it was cut off before it made the group: it is made again then."""
        try:
            self._catalog.group(name, REDRIVE_GROUP)
            return self._catalog.topic(name)
        except (UnknownTopic, UnknownGroup):
            return None

    def make_internal(self, topic: str, group: str, settings: GroupSettings) -> Topic:
        """Make a group's own topic and the group that reads it; either may be there already."""
        try:
            self._catalog.create_topic(topic, TopicSettings(retention_ms=0, drop_settled=True), 1)
        except TopicExists:
            pass
        try:
            self._catalog.create_group(topic, group, settings)
        except GroupExists:
            pass
        self.forget()
        return self._catalog.topic(topic)


@dataclass(frozen=True, slots=True)
class Listed:
    """What the catalog held at one version."""

    version: int
    topics: tuple[Topic, ...]
    groups: dict[int, list[Group]] = field(default_factory=dict)  # by topic id; those without are missing
    by_partition: dict[int, Topic] = field(default_factory=dict)
    with_group: dict[str, set[str]] = field(default_factory=dict)  # topics, by the name of a native group


class Listing:
    """A list of all topics and groups, for background jobs: read again when the catalog's version has moved.

    So what runs every few seconds costs one small read on a queue of ten thousand topics while nobody changes
    them. A cache, never the truth: whoever acts on it asks the store's verbs, which know better. Blocking;
    any thread may call it.
    """

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
        with_group: dict[str, set[str]] = {}
        for group in self._catalog.groups_of():
            groups.setdefault(group.topic_id, []).append(group)
            with_group.setdefault(group.name, set()).add(group.topic)
        places = {piece.partition_id: topic for topic in topics for piece in topic.route.partitions}
        return Listed(version, topics, groups, places, with_group)
