"""Limits on the backlog of a topic (R9): a batch is refused while the slowest group is too far behind.

The backlog of a topic is what its slowest group has not settled; without groups, all that is kept. It is
measured at most every `backlog_look_ms`, and only while somebody sends to a topic that has a limit. What
this process has let through since is added to it, and what it has let through before and is not stored yet.
So the limit is not exact: a batch that begins below it is stored whole, and other processes are seen at the
next look. Must never be asked about internal
appends (I17); delayed messages are let in by the schedule when they are due, and count from then on. What is
due before the next look is not delayed: else a due moment of now were a way around the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ...config import Limits
from ...errors import BacklogFull, PostroomError
from ...model.policy.bounds import make_room
from ...model.policy.settings import TopicSettings
from ...store.contract import Store, Topic
from ...tasks import SingleFlight
from ...units import format_bytes
from ..topology.catalog_cache import readers
from ..topology.kafka_groups import KafkaReaders

__all__ = ["BacklogGate", "Passage"]

_MOST = 10_000  # topics whose backlog is remembered


@dataclass(slots=True)
class _Measured:
    """A topic's backlog, and what this process has let through since."""

    messages: int
    bytes: int
    slowest: str  # the group with most messages to settle; "": the topic has no groups
    largest: str  # the one with most bytes
    until: float = 0.0  # by the loop's clock: measured again after that

    def add(self, passage: Passage, sign: int = 1) -> None:
        self.messages += sign * passage.messages
        self.bytes += sign * passage.size


@dataclass(slots=True, eq=False)
class Passage:
    """A batch that was let through: in flight until the end of its `with`, and put back if it fails there."""

    messages: int
    size: int
    _of: BacklogGate
    _topic_id: int

    def __enter__(self) -> None:
        self._of._in_flight.setdefault(self._topic_id, set()).add(self)

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        mine = self._of._in_flight[self._topic_id]
        mine.discard(self)
        if not mine:
            del self._of._in_flight[self._topic_id]
        if isinstance(error, PostroomError) and (now := self._of._measured.get(self._topic_id)) is not None:
            now.add(self, -1)


class BacklogGate:
    """Used in the event loop only; looks at the store in a worker thread."""

    def __init__(self, store: Store, limits: Limits, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._store = store
        self._look_ms, self._look_s = limits.backlog_look_ms, limits.backlog_look_ms / 1000
        self._in_thread = in_thread
        self._measured: dict[int, _Measured] = {}  # by topic id
        self._in_flight: dict[int, set[Passage]] = {}  # likewise: let through, and not stored yet
        self._looks = SingleFlight(self._look)

    @staticmethod
    def limits(settings: TopicSettings) -> bool:
        return settings.max_backlog > 0 or settings.max_backlog_bytes > 0

    def is_now(self, due_at: int) -> bool:
        """Whether what is due then counts already."""
        return not due_at or due_at <= self._store.now_ms() + self._look_ms

    async def pass_through(self, topic: Topic, messages: int, size: int) -> Passage:
        """Count a batch that is about to be stored; BacklogFull if there is no room for any."""
        found = self._measured.get(topic.id)
        if found is None or found.until <= asyncio.get_running_loop().time():
            found = await self._looks.look(topic.id, None, self._measure, topic)
        settings = topic.settings
        if 0 < settings.max_backlog <= found.messages:
            behind = f"{found.messages:,} messages"
            raise _full(topic, found.slowest, behind, f"max_backlog={settings.max_backlog}")
        if 0 < settings.max_backlog_bytes <= found.bytes:
            limit = f"max_backlog_bytes={format_bytes(settings.max_backlog_bytes)!r}"
            raise _full(topic, found.largest, format_bytes(found.bytes), limit)
        passage = Passage(messages, size, self, topic.id)
        found.add(passage)
        return passage

    async def _look(self, measure: Callable[[Topic], _Measured], topic: Topic) -> _Measured:
        self._measured.pop(topic.id, None)
        before = self._in_flight.get(topic.id, set()).copy()
        found: _Measured = await self._in_thread(measure, topic)
        for passage in before & self._in_flight.get(topic.id, set()):  # not stored when it was measured
            found.add(passage)
        found.until = asyncio.get_running_loop().time() + self._look_s
        make_room(self._measured, _MOST)
        self._measured[topic.id] = found
        return found

    # ---- in a worker thread ----

    def _measure(self, topic: Topic) -> _Measured:
        places = [piece.partition_id for piece in topic.route.partitions]
        groups = readers(self._store.catalog.groups(topic.name))
        places = self._store.present(places)  # what is on a shard that is away does not hold up the others
        committed = self._store.usage.committed(groups, places)
        bounds = self._store.log.bounds(places)
        lowest = {"": {place: bounds[place].start for place in places}}
        if groups:
            lowest = {g.name: {p: max(committed[g.id][p], bounds[p].start) for p in places} for g in groups}
        kafka = self._store.kafka_groups.positions([topic.id]).get(topic.id)
        for name, offsets in KafkaReaders(self._store).committed(topic, bounds, kafka).items():
            lowest.pop("", None)
            lowest[name] = {p: max(offsets.get(p, 0), bounds[p].start) for p in places}
        messages = {
            name: sum(max(0, bounds[place].end - offsets[place]) for place in places)
            for name, offsets in lowest.items()
        }
        size = dict.fromkeys(lowest, 0)
        if topic.settings.max_backlog_bytes:
            size = dict(zip(lowest, self._store.usage.bytes_from(list(lowest.values())), strict=True))
        slowest, largest = max(messages, key=messages.__getitem__), max(size, key=size.__getitem__)
        return _Measured(messages[slowest], size[largest], slowest, largest)


def _full(topic: Topic, group: str, behind: str, limit: str) -> BacklogFull:
    who = f"its slowest group {group!r} has" if group else "no group reads it, and it keeps"
    return BacklogFull(
        f"topic {topic.name!r} takes no more for now: {who} {behind} unsettled, and the limit is {limit}. "
        "Send again once its consumers have caught up, start more of them, delete a group that nobody uses, "
        "or raise the limit with alter_topic; nothing of this batch was stored",
        topic=topic.name,
        group=group,
    )
