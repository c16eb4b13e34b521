"""Slow lanes in a broker: what members see of sources is gathered, and they are told which are slow (R42).

Members report what became of messages; a healthy source costs the store nothing: only what fails or takes
long is written there, with what was counted of it before within the window, and from then on everybody
counts that source. What is slow is read again no more often than `slow_sources_fresh_s`, and only for groups
that have a policy and are in use. So a source is slow for all members within a second, whichever brokers they
use.

A cache, never the truth: what it has is lost with the process, and is counted anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...errors import PostroomError
from ...model.policy.bounds import make_room
from ...model.policy.slow_lane import (
    LaneInfo,
    LaneState,
    LaneView,
    Seen,
    bucket_of,
    looks_bad,
    returns,
    total,
    view_of,
    window_start,
)
from ...store.contract import Group, Store
from ..topology.catalog_cache import CatalogCache

__all__ = ["Lanes"]

_log = logging.getLogger("postroom.broker")

_MOST_KEPT = 10_000  # sources of a group that are counted here, in one bucket; further ones are not
_MOST_GROUPS = 10_000  # that are watched here
_LONGEST = 120  # of a source's name, as the store keeps it


class _Watched:
    """What is known here of one group."""

    def __init__(self) -> None:
        self.counts: dict[int, dict[str, Seen]] = {}  # by bucket and source; what the store was not told
        self.state = LaneState()
        self.read_at = 0.0
        self.turn = threading.Lock()

    def add(self, bucket: int, since: int, seen: Sequence[Seen]) -> None:
        for old in [at for at in self.counts if at < since]:
            del self.counts[old]
        kept = self.counts.setdefault(bucket, {})
        for one in seen:
            known = kept.get(one.source)
            if known is not None:
                kept[one.source] = known + one
            elif len(kept) < _MOST_KEPT:
                kept[one.source] = one

    def take(self, group: Group) -> list[tuple[int, Seen]]:
        """What is worth telling the store."""
        policy, watched = group.settings.slow_lane, self.state.watched
        slow = {one.source for one in self.state.slow}
        summed = total(seen for kept in self.counts.values() for seen in kept.values())
        wanted = {s for s, seen in summed.items() if s in watched or s in slow or looks_bad(policy, seen)}
        return [(at, kept.pop(s)) for at, kept in self.counts.items() for s in wanted if s in kept]


class Lanes:
    """Used in the event loop; what blocks runs in threads."""

    def __init__(
        self,
        store: Store,
        catalog: CatalogCache,
        in_thread: Callable[..., Awaitable[Any]],
        fresh_s: float,
    ) -> None:
        """`fresh_s`: the store is asked no more often."""
        self._fresh_s = fresh_s
        self._store, self._catalog, self._in_thread = store, catalog, in_thread
        self._groups: dict[int, _Watched] = {}
        self._lock = threading.Lock()

    async def view(self, group: Group, version: int) -> LaneView | None:
        """The slow sources, for a member that knows another version of them; None: it knows this one."""
        policy = group.settings.slow_lane
        if not policy.on:
            return LaneView(0) if version else None
        watched = self._of(group)
        if time.monotonic() - watched.read_at > self._fresh_s:
            await self._in_thread(self._refresh, group, watched)
        found = view_of(policy, watched.state.slow)
        return None if found.version == version else found

    async def report(self, topic: str, name: str, seen: Sequence[Seen], version: int) -> LaneView | None:
        group: Group | None = self._catalog.known(("group", topic, name))
        if group is None:
            group = await self._in_thread(self._catalog.group, topic, name)
        policy, now = group.settings.slow_lane, self._store.now_ms()
        fit = [one for one in seen if _fits(one)]
        if policy.on and fit:
            watched = self._of(group)
            with self._lock:
                watched.add(bucket_of(policy, now), window_start(policy, now), fit)
            if any(looks_bad(policy, one) for one in fit):  # the store is told soon, whoever comes next
                await asyncio.sleep(max(0.0, watched.read_at + self._fresh_s - time.monotonic()) + 0.001)
        return await self.view(group, version)

    async def listed(self, topic: str, name: str) -> LaneInfo:
        found: LaneInfo = await self._in_thread(self._listed, topic, name)
        return found

    def _listed(self, topic: str, name: str) -> LaneInfo:
        """As it is in the store; blocking."""
        group, lane = self._catalog.group(topic, name), self._catalog.lane(topic, name)
        if group.settings.slow_lane.on:
            self._refresh(group, self._of(group))
        waiting = 0
        if lane is not None:
            places = self._store.present(piece.partition_id for piece in lane[0].route.partitions)
            waiting = sum(found.messages for found in self._store.progress.backlog(lane[1], places))
        state = self._of(group).state if group.settings.slow_lane.on else LaneState()
        return LaneInfo(topic, name, waiting, state.slow)

    def _of(self, group: Group) -> _Watched:
        found = self._groups.get(group.id)
        if found is None:
            make_room(self._groups, _MOST_GROUPS)
            found = self._groups.setdefault(group.id, _Watched())
        return found

    def _refresh(self, group: Group, watched: _Watched) -> None:
        """Blocking; one at a time for a group, and others go on with what is known."""
        if not watched.turn.acquire(blocking=False):
            return
        try:
            with self._lock:
                counts = watched.take(group)
            policy, now = group.settings.slow_lane, self._store.now_ms()
            if counts or any(returns(policy, now, one) for one in watched.state.slow):
                watched.state = self._store.lanes.count(group, counts)
            else:
                watched.state = self._store.lanes.state(group)
        except PostroomError as error:
            _log.warning("sources of %s/%s are not counted now: %s", group.topic, group.name, error)
        finally:
            watched.read_at = time.monotonic()
            watched.turn.release()


def _fits(one: Seen) -> bool:
    """Whoever reports may be anybody."""
    named = 0 < len(one.source) <= _LONGEST and one.source.isprintable()
    return named and 0 <= one.failed <= one.handled <= 2**31 and 0 <= one.spent_ms <= 2**42
