"""Shards as people see them; taking one out: every partition is moved off it, and then it runs empty (R28).

Two visible phases (I11). `drain` is the first: the shard takes no new partitions, and each one that is there
is moved, live; the topics stay writable. Then it holds sealed partitions and delayed messages only: once the
groups have read the ones and the others were due, `shards` says that it is empty, and it may be left out.
May be cut at any point and called again. Blocking code, run in a thread.
"""

from __future__ import annotations

import time

from ...address import FIRST_SHARD
from ...endpoint.values import ShardInfo
from ...errors import InvalidSetting, RouteConflict, StoreUnavailable, UnknownPartition, UnknownTopic
from ...model.topology.route import Range
from ...store.contract import ShardState, Store
from .route_changes import RouteChanges

__all__ = ["Drain", "shard_name"]

_PAUSE_S = 0.05  # before partitions are tried again that another change had
_GIVE_UP_S = 60.0  # without any progress


def shard_name(shown: str) -> str:
    """A shard's name as the store has it."""
    return "" if shown == FIRST_SHARD else shown


class Drain:
    def __init__(self, store: Store, routes: RouteChanges) -> None:
        self._store = store
        self._routes = routes

    def shards(self) -> list[ShardInfo]:
        return [_info(state) for state in self._store.shards()]

    def drain(self, shown: str) -> ShardInfo:
        """The first phase. Moves what is there; returns once nothing is left that takes messages."""
        name = self._allowed(shown)
        if self._state(name).state == "open":
            self._store.set_shard(name, "draining")
        give_up_at, fewest = time.monotonic() + _GIVE_UP_S, 2**31
        while left := self._left(name):
            if len(left) < fewest:
                give_up_at, fewest = time.monotonic() + _GIVE_UP_S, len(left)
            if time.monotonic() > give_up_at:
                raise RouteConflict(
                    f"{len(left)} partitions are still on shard {shown!r}: other changes of their routes are "
                    "under way; it takes no new ones, drain it again to move them"
                )
            for topic, piece in left:
                self._move(topic, piece)
            time.sleep(_PAUSE_S)
        return _info(self._state(name))

    def open(self, shown: str) -> ShardInfo:
        """It takes new partitions again."""
        name = self._known(shown)
        if name:
            self._store.set_shard(name, "open")
        return _info(self._state(name))

    def _known(self, shown: str) -> str:
        names = [state.name or FIRST_SHARD for state in self._store.shards()]
        if shown not in names:
            raise InvalidSetting(f"there is no shard {shown!r}; there is {', '.join(names)}")
        return shard_name(shown)

    def _allowed(self, shown: str) -> str:
        name = self._known(shown)
        if not name:
            raise InvalidSetting(
                "the first shard cannot be drained: topics and groups are kept there. Move single partitions "
                "off it with move()"
            )
        states = self._store.shards()
        if any(state.name == name and state.away for state in states):
            raise StoreUnavailable(
                f"shard {shown!r} is away, and a drain needs it: what is stored there is sealed and read to "
                "its end. Start its database, then drain it",
                shard=name,
            )
        if not any(s.name != name and s.state == "open" and not s.away for s in states):
            raise InvalidSetting(
                f"shard {shown!r} cannot be drained: no other shard takes partitions now; add one, or open "
                "one again"
            )
        return name

    def _state(self, name: str) -> ShardState:
        return next(state for state in self._store.shards() if state.name == name)

    def _left(self, name: str) -> list[tuple[str, Range | None]]:
        """What takes messages there, and what a change is about to open there."""
        left: list[tuple[str, Range | None]] = [
            (topic.name, piece)
            for topic in self._store.catalog.topics()
            for piece in topic.route.ranges
            if piece.shard == name
        ]
        for change in self._store.routes.changes():
            left += [(change.topic, None) for piece in change.opens if piece.shard == name]
        return left

    def _move(self, topic: str, piece: Range | None) -> None:
        try:
            if piece is None:
                self._routes.help(topic)
            else:
                self._routes.move(topic, piece.partition, None)
        except (RouteConflict, UnknownTopic, UnknownPartition):
            pass  # another change came first, or it is gone: it is looked at again


def _info(state: ShardState) -> ShardInfo:
    shown = "away" if state.away else state.state
    name = state.name or FIRST_SHARD
    return ShardInfo(name, state.kind, shown, state.partitions, state.sealed, state.delayed)
