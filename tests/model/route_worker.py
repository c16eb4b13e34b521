"""Whoever works on a route change, one step at a time; and the real procedure, cut between any two verbs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from postroom.broker.topology.route_changes import RouteChanges
from postroom.errors import PostroomError, RouteConflict, StoreError, UnknownPartition
from postroom.model.messages.batch import build_control
from postroom.model.topology import route as routes
from postroom.model.topology.route import Change, Draft, Route
from postroom.store.contract import Store

__all__ = ["IDLE_MS", "Away", "Cut", "Died", "Worker", "drafted", "procedure"]

IDLE_MS = 500


class Died(BaseException):
    """The process is gone: nothing of it runs any more."""


class Away(StoreError):
    """The store does not answer, and will not soon."""


class Worker:
    """The steps of `broker.routes`, in their order, each when the machine says so."""

    def __init__(self, store: Store, change: Change, *, seals: bool = True) -> None:
        self._store, self.change = store, change
        sealing = [piece.partition_id for piece in change.seals] if seals else []
        self._steps: list[int | str] = ["make", *sealing, "activate"]
        self._seen: Collection[int] | None = None  # what was sealed when it began to turn back

    def work(self) -> Worker | None:
        """The next step. Who is at work after it: the same one, or nobody."""
        try:
            return self._work()
        except (RouteConflict, UnknownPartition):
            return None  # others have finished it, or turned it back

    def _work(self) -> Worker | None:
        step = self._steps.pop(0)
        if step == "make":
            self._store.routes.make(self.change)
        elif isinstance(step, int):
            self._store.log.seal(step, build_control(1, b"sealed", timestamp=self._store.now_ms()))
        else:
            self._store.routes.activate(self.change)
        return self if self._steps else None

    def turn_back(self) -> Worker | None:
        """Two steps: look what is sealed, and replace the change. In between others may seal more (I11)."""
        ids = [piece.partition_id for piece in self.change.seals]
        try:
            if self._seen is None:
                self._seen = [one for one, found in self._store.log.bounds(ids).items() if found.sealed]
                return self
            instead = self._store.routes.turn_back(self.change, self._seen)
        except (RouteConflict, UnknownPartition):
            return None
        return None if instead is None else Worker(self._store, instead, seals=False)


def drafted(route: Route, kind: str, a: int, b: int) -> Draft | None:
    """A split or a merge of what is there."""
    at = a % len(route.ranges)
    piece = route.ranges[at]
    if kind == "merge":
        if at + 1 == len(route.ranges):
            return None
        return routes.merge(route, piece.partition, route.ranges[at + 1].partition)
    if piece.slots < 2 or len(route.ranges) > 5:
        return None
    return routes.split(route, piece.partition, piece.first_slot + 1 + b % (piece.slots - 1))


class Cut:
    """A store whose verb number `after` fails with an error: the process has died, or the store is away."""

    def __init__(self, store: Store, after: int, error: type[BaseException]) -> None:
        self._left, self._error = after, error
        self.now_ms = store.now_ms
        self.log = self.catalog = self.routes = None
        for part in ("log", "catalog", "routes"):
            setattr(self, part, _Part(self, getattr(store, part)))

    def count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error("cut")


class _Part:
    def __init__(self, cut: Cut, part: Any) -> None:
        self._cut, self._part = cut, part

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._part, name)

        def run(*args: Any) -> Any:
            self._cut.count()
            return verb(*args)

        return run


class _NoCache:
    def forget(self) -> None: ...


def procedure(store: Any, topic: str, kind: str, a: int, b: int) -> None:
    """`broker.routes` itself."""
    real = RouteChanges(store, _NoCache())  # type: ignore[arg-type]
    try:
        if kind == "help":
            real.help(topic)
        elif (draft := drafted(store.catalog.topic(topic).route, kind, a, b)) is None:
            pass
        elif kind == "merge":
            real.merge(topic, *(piece.partition for piece in draft.seals))
        else:
            real.split(topic, draft.seals[0].partition, draft.opens[1].first_slot)
    except (PostroomError, Died):
        pass
