"""One measurement of the whole queue: every topic and group in a few cheap reads, whatever their number.

How far a group is behind is the end of each partition less what the group has settled. Ends, and marks that
change with whatever is settled, come in one read each; only topics where something moved since the last
measurement are read again. Rates are what moved, by the time between two measurements. Ages, the wait for a
first delivery and stopped keys cost a read for each partition, so they are measured for the groups that are
worst, as far as the time goes; of the others the last figures are kept.

Blocking where it says so, and never changes anything. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..broker.served import Servable
from ..broker.topology.catalog_cache import readers
from ..config import DEFAULTS, ConsoleTuning
from ..errors import CatalogError, PostroomError
from ..model.topology.names import base_of, dead_topic, is_internal, owner
from ..store.contract import Bounds, Group, Topic

__all__ = ["GroupFigures", "Measured", "Measuring", "TopicFigures"]

_DETAILED = 60  # groups whose ages are measured at a time
_AT_ONCE = 20  # topics whose settled offsets are read together
_SMOOTH = 0.5  # of a rate, what the newest measurement counts


@dataclass(slots=True)
class GroupFigures:
    name: str
    paused: bool
    mode: str
    lag: int = 0
    settled: int = 0  # offsets, over all partitions
    out_per_s: float = 0.0
    members: int = 0
    dead: int = 0
    stopped: int = 0
    age_ms: int = 0  # of the oldest message that is not settled
    wait_ms: int = 0  # from arrival to first delivery, as last seen


@dataclass(slots=True)
class TopicFigures:
    name: str
    partitions: int
    messages: int = 0
    end: int = 0  # offsets, over all partitions
    in_per_s: float = 0.0
    delayed: int = 0
    groups: dict[str, GroupFigures] = field(default_factory=dict)

    @property
    def lag(self) -> int:
        return max((group.lag for group in self.groups.values()), default=0)

    @property
    def out_per_s(self) -> float:
        return sum(group.out_per_s for group in self.groups.values())


@dataclass(slots=True)
class Measured:
    at_ms: int = 0
    took_s: float = 0.0
    topics: dict[str, TopicFigures] = field(default_factory=dict)
    brokers: list[str] = field(default_factory=list)
    shards: list[tuple[str, str]] = field(default_factory=list)  # name and state


Marks = tuple[object, ...]


class Measuring:
    """Measures one queue again and again. Not for several threads at once."""

    def __init__(
        self,
        broker: Servable,
        clock: Callable[[], float] = time.monotonic,
        tuning: ConsoleTuning = DEFAULTS.tuning.console,
    ) -> None:
        self._broker, self._clock, self._detail_s = broker, clock, tuning.detail_s
        self.last = Measured()
        self._read_at = 0.0
        self._settled: dict[str, tuple[Marks, dict[int, dict[int, int]]]] = {}  # by topic

    async def run(self) -> Measured:
        """Returns a new measurement. StoreError if the store is away: the last one stays."""
        began, before = self._clock(), self.last
        since_s = began - self._read_at if self._read_at else 0.0
        found = await self._broker.in_thread(self._read)
        self._derive(found, before, since_s)
        first, self._read_at, self.last = not self._read_at, began, found
        await self._add_details(found, self._detail_s / (4 if first else 1))  # somebody waits for the first
        found.took_s = self._clock() - began
        return found

    # ---- blocking ----

    def _read(self) -> Measured:
        store, listed = self._broker.store, self._broker.listing.look()
        edges, marks, delayed = store.log.edges(), store.usage.marks(), store.schedule.delayed()
        found = Measured(store.now_ms())
        own: dict[str, tuple[tuple[str, str], int]] = {}  # topics of groups: whose, and what is in them
        self._read_settled(listed.topics, listed.groups, edges, marks)
        for topic in listed.topics:
            groups, settled = listed.groups.get(topic.id, []), self._settled[topic.name][1]
            if not is_internal(topic.name):
                figures = _topic_figures(topic, groups, edges, settled)
                figures.delayed = delayed.get(topic.id, 0)
                found.topics[topic.name] = figures
            elif (of := owner(topic.name)) is not None:
                own[topic.name] = of, sum(_lag(one, edges, settled) for one in groups)
        for name in self._settled.keys() - {topic.name for topic in listed.topics}:
            del self._settled[name]
        _add_own(found, own)
        self._count_members(found, [one for each in listed.groups.values() for one in each])
        found.brokers = [one.address for one in store.brokers.live()]
        found.shards = [(one.name or "first", "away" if one.away else one.state) for one in store.shards()]
        return found

    def _read_settled(
        self,
        topics: Sequence[Topic],
        groups: Mapping[int, Sequence[Group]],
        edges: dict[int, Bounds],
        marks: dict[int, tuple[int, ...]],
    ) -> None:
        """By topic, group and partition, what is settled; read again if a mark says that it may have changed.

        Several topics in one read: at first all of them are new, and a read for each would take long.
        """
        changed: list[tuple[str, Marks, Sequence[Group], list[int]]] = []
        for topic in topics:
            mine = readers(groups.get(topic.id, []))
            ids = [piece.partition_id for piece in topic.route.partitions if piece.partition_id in edges]
            key = (*(marks.get(one) for one in ids), *ids, *((one.id, one.generation) for one in mine))
            known = self._settled.get(topic.name)
            if known is None or known[0] != key:
                changed.append((topic.name, key, mine, ids))
        for at in range(0, len(changed), _AT_ONCE):
            some = changed[at : at + _AT_ONCE]
            all_groups = [group for _, _, mine, _ in some for group in mine]
            found = self._broker.store.usage.committed(all_groups, [one for *_, ids in some for one in ids])
            for name, seen, own, partition_ids in some:
                settled = {group.id: {one: found[group.id][one] for one in partition_ids} for group in own}
                self._settled[name] = (seen, settled)

    def _count_members(self, found: Measured, groups: Sequence[Group]) -> None:
        if not groups:
            return
        live = self._broker.store.progress.members_of([one.id for one in groups])
        for group in groups:
            topic, name = found.topics.get(group.topic), base_of(group.name) or group.name
            if topic is not None and name in topic.groups:
                topic.groups[name].members += len(live.get(group.id, ()))

    # ---- from one measurement to the next ----

    @staticmethod
    def _derive(found: Measured, before: Measured, since_s: float) -> None:
        for name, topic in found.topics.items():
            old = before.topics.get(name)
            if old is None:
                continue
            topic.in_per_s = _rate(topic.end - old.end, since_s, old.in_per_s)
            for group in topic.groups.values():
                was = old.groups.get(group.name)
                if was is not None:
                    group.out_per_s = _rate(group.settled - was.settled, since_s, was.out_per_s)
                    if group.lag:
                        group.age_ms, group.wait_ms, group.stopped = was.age_ms, was.wait_ms, was.stopped

    async def _add_details(self, found: Measured, most_s: float) -> None:
        began = self._clock()
        behind = [
            (topic, group) for topic in found.topics.values() for group in topic.groups.values() if group.lag
        ]
        behind.sort(key=lambda one: (one[1].stopped > 0, one[1].lag), reverse=True)
        for topic, group in behind[:_DETAILED]:
            if self._clock() - began > most_s:
                return
            try:
                total = (await self._broker.lag(topic.name, group.name)).total
            except CatalogError:  # it was deleted meanwhile
                continue
            except PostroomError:
                return
            group.age_ms, group.wait_ms = total.oldest_age_ms, total.first_wait_ms
            group.lag, group.stopped = total.messages, total.stopped


def _topic_figures(
    topic: Topic, groups: Sequence[Group], edges: dict[int, Bounds], settled: dict[int, dict[int, int]]
) -> TopicFigures:
    bounds = [edges[p.partition_id] for p in topic.route.partitions if p.partition_id in edges]
    figures = TopicFigures(topic.name, len(topic.route.ranges))
    figures.messages = sum(one.messages for one in bounds)
    figures.end = sum(one.end for one in bounds)
    for group in groups:
        name = base_of(group.name) or group.name  # members of a broadcast group count as the group
        one = figures.groups.get(name)
        if one is None:
            one = figures.groups[name] = GroupFigures(name, group.paused, group.settings.mode)
        one.lag += _lag(group, edges, settled)
        one.settled += sum(settled.get(group.id, {}).values())
    return figures


def _add_own(found: Measured, own: dict[str, tuple[tuple[str, str], int]]) -> None:
    """Dead letters are counted apart; what is in a group's retry topic or slow lane is behind as the rest."""
    for internal, ((name, group), messages) in own.items():
        topic = found.topics.get(name)
        if topic is None or group not in topic.groups:
            continue
        if internal == dead_topic(name, group):
            topic.groups[group].dead = messages
        else:
            topic.groups[group].lag += messages


def _lag(group: Group, edges: dict[int, Bounds], settled: dict[int, dict[int, int]]) -> int:
    found = 0
    for partition_id, offset in settled.get(group.id, {}).items():
        bounds = edges.get(partition_id)
        if bounds is not None:
            found += max(0, bounds.end - int(bounds.sealed) - max(offset, bounds.start))
    return found


def _rate(moved: int, since_s: float, before: float) -> float:
    if since_s <= 0:
        return 0.0
    now = max(0, moved) / since_s
    found = _SMOOTH * now + (1 - _SMOOTH) * before
    return 0.0 if found < 0.05 else found
