"""Retries that are far away (I17): they leave through the schedule for the group's retry topic.

A retry in some minutes waits as a delivery of its partition. One further away than `far_retry_ms` would hold
the group's committed offset, and with it the log, for as long: so it is stamped, and the mover schedules it
on the topic `<topic>.<group>.retry`, which that group alone reads; one of its slow lane comes back there.
Ordered groups keep failing messages in place.

The attempts it has used go with it in headers. The deliveries of the retry topic do not know them, and the
store does not open batches: so when it fails again there, its headers are read here, and what was used before
counts towards `max_attempts`. Only retries are counted over all of its life; what its consumers do to it by
going away (I14) counts anew on the retry topic. Of a retry only what its token holds is read: whoever settles
names a range, and it may be any.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import CorruptBatch
from ..model.batch import stored_records
from ..model.delivery import Delivery, Settlement, Stamp
from ..model.names import retry_topic
from ..model.settings import Mode, Start
from ..model.settlement import uncovered, within
from ..store.contract import Group, StoredBatch, Topic
from .catalog import CatalogCache
from .mover import attempts_used

__all__ = ["FarRetries", "make_retry_topic"]


class FarRetries:
    """Blocking. `read` returns the batches that hold the offsets of a partition."""

    def __init__(
        self, catalog: CatalogCache, read: Callable[[int, int, int], list[StoredBatch]], far_ms: int
    ) -> None:
        self._catalog = catalog
        self._read = read
        self._far_ms = far_ms

    def of(
        self,
        retry: Settlement,
        group: Group,
        partition_id: int,
        held: Callable[[], Sequence[Delivery]],
        now: int,
    ) -> list[Settlement]:
        """What a retry in that group comes to: itself, with what it has used before, here or later.

        `held`: what its token holds, lowest offset first.
        """
        if group.settings.mode == "ordered":
            return [retry]
        found = self._with_used(retry, partition_id, held()) if _is_own_topic(group) else [retry]
        if retry.visible_at - now <= self._far_ms:
            return found
        target = self._target(group).route.ranges[0].partition_id
        return [
            replace(one, later=Stamp(secrets.randbits(62), target, due_at=one.visible_at)) for one in found
        ]

    def _target(self, group: Group) -> Topic:
        if _is_own_topic(group):
            return self._catalog.topic(group.topic)
        sources = self._catalog.sources(group.topic, group.name)
        return sources[1][0] if len(sources) > 1 else make_retry_topic(self._catalog, group)

    def _with_used(self, retry: Settlement, partition_id: int, held: Sequence[Delivery]) -> list[Settlement]:
        """A settlement for each message that is held: they may have come with different numbers.

        What is not held stays in ranges, and is told to be lost.
        """
        mine = within((retry.first, retry.last), held)
        found = [replace(retry, first=a, last=z) for a, z in uncovered((retry.first, retry.last), mine)]
        for delivery in mine:
            first, last = max(delivery.first, retry.first), min(delivery.last, retry.last)
            used: dict[int, int] = {}
            for batch in self._read(partition_id, first, last):
                with suppress(CorruptBatch):  # then it is not known; whoever moves it says so
                    used |= {record.offset: attempts_used(record)[1] for record in stored_records(batch)}
            found += (
                replace(retry, first=offset, last=offset, used=used.get(offset, 0))
                for offset in range(first, last + 1)
            )
        return found


def make_retry_topic(catalog: CatalogCache, group: Group) -> Topic:
    """The group's retry topic and the group that reads it, with the settings of the group itself."""
    mode: Mode = "ordered" if group.settings.mode == "ordered" else "shared"
    fresh = replace(group.settings, mode=mode, start=Start(), expires_ms=0)
    return catalog.make_internal(retry_topic(group.topic, group.name), group.name, fresh)


def _is_own_topic(group: Group) -> bool:
    return group.topic.endswith((f".{group.name}.retry", f".{group.name}.slow"))
