"""A queue as the data source uses it: blocking calls, from the driver or an executor.

Decides nothing. The event loop has a thread of its own, so that a broker does not take an executor for dead
that waits for Spark. A queue is opened where it is used, and never sent to another process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from socket import gethostname
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self, TypeVar

from ..address import Address, parse
from ..backoff import pause
from ..client.connection import Connection, connect
from ..config import DEFAULTS, SparkTuning
from ..endpoint.values import Fetched
from ..errors import InvalidSetting, PostroomError, UnknownGroup, UnknownPartition
from ..model.messages.batch import TopicBounds
from ..model.policy.bounds import MOST_PARTITIONS
from ..model.policy.settings import GroupWish, Start
from ..model.topology.route import Route
from ..sync.portal import LoopThread
from ..units import format_duration
from .options import EARLIEST, LATEST, Position, Reach, ReadOptions, Topics, bad_option
from .planning import Offsets, Partition, Snapshot, Span, TopicPartition

__all__ = [
    "AHEAD",
    "FETCH_BYTES",
    "FETCH_MESSAGES",
    "Queue",
    "check_file",
    "ends",
    "look",
    "patiently",
    "starts",
]


log = logging.getLogger("postroom.spark")

T = TypeVar("T")

AHEAD = 4
"""So many fetches are on their way at once."""

_TRIES = 20
FETCH_MESSAGES = 50_000
FETCH_BYTES = 4 * 1024 * 1024


def patiently(call: Callable[[], T], wait_ms: int, tuning: SparkTuning = DEFAULTS.tuning.spark) -> T:
    """What it returns: asked again while it may succeed, since a broker or a database may be away a while."""
    since, tries, told = monotonic(), 0, False
    while True:
        try:
            found = call()
        except PostroomError as error:
            waited_s = monotonic() - since
            if not error.retriable:
                raise
            if waited_s * 1000 >= wait_ms:
                raise type(error)(
                    f"{error}. It was tried for {format_duration(wait_ms)}, as the option unreachableTimeout "
                    "says: start again when it is back, or set a longer time",
                    **error.details,
                ) from error
            if not told and waited_s >= tuning.wait_told_s:
                told = True
                log.warning("waiting up to %s for the queue: %s", format_duration(wait_ms), error)
            tries += 1
            sleep(min(tuning.wait_pause_s if told else pause(tries), wait_ms / 1000 - waited_s))
        else:
            if told:
                log.warning("the queue is back, after %.1f s", monotonic() - since)
            return found


class Queue:
    def __init__(self, reach: Reach) -> None:
        self._loop = LoopThread(lambda portal, value: value)
        self._ahead = ThreadPoolExecutor(AHEAD, "postroom-ahead")
        self._wait_ms = reach.wait_ms
        try:
            self._mq: Connection = patiently(lambda: self._loop.call(_open, reach), reach.wait_ms)
        except BaseException:
            self._loop.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._ahead.shutdown(cancel_futures=True)
        try:
            self._loop.call(self._mq.close)
        finally:
            self._loop.end()

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Asked again while it may succeed; everything here can be."""
        return patiently(lambda: self._loop.call(function, *args, **kwargs), self._wait_ms)

    # ---- partitions ----

    def topics(self, wanted: Topics) -> list[str]:
        if not wanted.pattern:
            return list(wanted.names)
        return sorted(info.name for info in self._call(self._mq.topics) if wanted.takes(info.name))

    def routes(self, wanted: Topics) -> list[Route]:
        return [self._call(self._mq.route, topic) for topic in self.topics(wanted)]

    def resolve(self, topic: str, start: Start) -> dict[int, int]:
        """Offsets by partition id."""
        found: dict[int, int] = self._call(self._mq._endpoint.resolve, topic, start)
        return found

    def identity(self, topic: str) -> int:
        """The lowest id of its first partitions: no topic after it has the same."""
        history: list[Route] = self._call(self._mq.route_history, topic)
        return min(piece.partition_id for piece in history[0].ranges)

    def snapshot(
        self, wanted: Topics, identity: Callable[[str], int], at: Mapping[TopicPartition, int] | None = None
    ) -> Snapshot:
        """`at`: offsets; each partition has the mark of the batch before that."""
        return self._settled(lambda: self._snapshot(wanted, identity, at or {}))

    def _snapshot(
        self, wanted: Topics, identity: Callable[[str], int], at: Mapping[TopicPartition, int]
    ) -> Snapshot:
        found, incarnation = {}, ""
        routes = self.routes(wanted)
        for route in routes:  # the route first: the end of what it shows as sealed is final
            ids = {
                piece.partition_id: at.get((route.topic, piece.partition), 0) for piece in route.partitions
            }
            bounds = self._bounds(route.topic, ids)
            incarnation, kept = bounds.incarnation, bounds.partitions
            numbers = {piece.partition_id: piece.partition for piece in route.partitions}
            sealed = {piece.partition_id for piece in route.sealed}
            for piece in route.partitions:
                id, place = piece.partition_id, (route.topic, piece.partition)
                if id not in kept or (wanted.partitions and place not in wanted.partitions):
                    continue
                before = tuple(numbers[one] for one in route.predecessors.get(id, ()) if one in numbers)
                there = kept[id]
                found[place] = Partition(id, there.end, there.start, id in sealed, before, there.mark)
        return Snapshot(found, {route.topic: identity(route.topic) for route in routes}, incarnation)

    def _bounds(self, topic: str, at: Mapping[int, int]) -> TopicBounds:
        """`at`: by partition id; 0: no mark is asked for."""
        asked = [(id, offset) for id, offset in at.items() if offset]
        found: TopicBounds = self._call(self._mq._endpoint.bounds, topic, tuple(asked[:MOST_PARTITIONS]))
        for first in range(MOST_PARTITIONS, len(asked), MOST_PARTITIONS):
            some = tuple(asked[first : first + MOST_PARTITIONS])
            more: TopicBounds = self._call(self._mq._endpoint.bounds, topic, some)
            marked = {id: more.partitions[id] for id, _ in some if id in more.partitions}
            found = replace(found, partitions={**found.partitions, **marked})
        return found

    def marks(self, at: Mapping[TopicPartition, int], now: Snapshot) -> dict[TopicPartition, str]:
        """Of the batches before these offsets, as far as they are kept."""
        found = {}
        for topic in sorted({topic for topic, _ in at}):
            ids = {now.partitions[p].id: p for p in at if p[0] == topic and p in now.partitions}
            wish = {id: at[place] for id, place in ids.items()}
            kept = self._settled(partial(self._bounds, topic, wish)).partitions
            found.update({ids[id]: kept[id].mark for id in ids if id in kept and kept[id].mark})
        return found

    def final_ends(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Where partitions ended that were sealed, and that retention has dropped; others are missing."""
        found, wanted = {}, set(places)
        for topic in sorted({topic for topic, _ in wanted}):
            history: list[Route] = self._call(self._mq.route_history, topic)
            older = {r.partition_id: (topic, r.partition) for route in history for r in route.ranges}
            ids = {id: place for id, place in older.items() if place in wanted}
            kept = self._settled(partial(self._bounds, topic, dict.fromkeys(ids, 1))).partitions
            found.update({p: kept[id].end for id, p in ids.items() if id in kept and kept[id].removed})
        return found

    def _settled(self, look: Callable[[], T]) -> T:
        """Again if a partition was dropped by retention between two questions."""
        for _ in range(_TRIES - 1):
            try:
                return look()
            except UnknownPartition:
                sleep(pause(1))
        return look()

    # ---- messages ----

    def fetch(self, span: Span, offset: int) -> Fetched:
        found: Fetched = self._call(
            self._mq._endpoint.fetch,
            span.topic,
            span.partition_id,
            offset,
            max_messages=min(FETCH_MESSAGES, span.end - offset),
            max_bytes=FETCH_BYTES,
            wait_ms=0,
        )
        return found

    def fetch_ahead(self, span: Span, offset: int) -> Future[Fetched]:
        return self._ahead.submit(self.fetch, span, offset)

    # ---- groups ----

    def set_group(self, topic: str, group: str, offsets: Iterable[tuple[int, int]]) -> None:
        """Where a group is, by partition number. GroupLive if somebody consumes in it."""
        known = dict(offsets)
        for tries in range(1, _TRIES + 1):
            try:
                return self._set_group(topic, group, known)
            except InvalidSetting:  # a partition was dropped by retention after the look at the route
                if tries == _TRIES:
                    raise

    def _set_group(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        route: Route = self._call(self._mq.route, topic)
        there = {piece.partition for piece in route.partitions}
        wish = Start("offsets", offsets=tuple((n, at) for n, at in sorted(offsets.items()) if n in there))
        kept: dict[int, int] = self._call(self._mq._endpoint.resolve, topic, wish)  # not below what is kept
        ids = {piece.partition: piece.partition_id for piece in route.partitions}
        start = Start("offsets", offsets=tuple((n, kept.get(ids[n], at)) for n, at in wish.offsets))
        try:
            self._call(self._mq._endpoint.reset, topic, group, start, False)
        except UnknownGroup:
            self._call(self._mq._endpoint.create_group, topic, group, GroupWish(start=start))


def check_file(address: Address) -> None:
    """Refuses a file that is not there: to open it would make it."""
    path = address.path
    if path is not None and not path.exists():
        raise bad_option("url", f"there is no file {path} on this machine, {gethostname()}")


async def _open(reach: Reach) -> Connection:
    check_file(parse(reach.url))
    tls = {"true": True, "false": None}.get((reach.tls or "false").lower(), reach.tls)
    return await connect(
        reach.url, token=reach.token, tls=tls, shards=dict(reach.shards) or None, client_id=None
    )


# ---- where reading begins and ends: what the options say, as offsets of every partition ----
# Resolved on the driver, once for a batch read and once for a new stream (I9). Partitions that an option
# does not name begin at the oldest message that is kept, and end behind the newest.


def look(queue: Queue, wanted: Topics) -> Snapshot:
    """The partitions as they are, for somebody who begins; refuses what is not there."""
    now = queue.snapshot(wanted, queue.identity)
    if wanted.pattern and not now.ids:
        raise bad_option(
            "subscribePattern", f"no topic fits {wanted.pattern!r} yet; `postroom topic list` lists them"
        )
    if not wanted.partitions <= set(now.partitions):
        routes = {route.topic: route for route in queue.routes(wanted)}
        for topic, number in sorted(wanted.partitions):
            routes[topic].readable(number)  # raises, and says which there are
    return now


def starts(queue: Queue, options: ReadOptions, now: Snapshot) -> Offsets:
    position = options.start
    at = _offsets(queue, position, now, EARLIEST)
    if position.kind in ("time", "times") and not options.or_latest:
        for place, there in now.partitions.items():
            asked = position.kind == "time" or place in position.at
            if asked and not there.sealed and at[place] >= there.end:
                raise bad_option(
                    position.option,
                    f"nothing was stored in topic {place[0]!r} partition {place[1]} since then; with "
                    "startingOffsetsByTimestampStrategy=latest reading begins behind the newest one there",
                )
    sealed = {p for p, there in now.partitions.items() if there.sealed and at[p] >= there.end}
    return Offsets(at, frozenset(sealed), dict(now.ids), first=True, queue=now.incarnation)


def ends(queue: Queue, options: ReadOptions, now: Snapshot) -> Offsets:
    return Offsets(_offsets(queue, options.end, now, LATEST), ids=dict(now.ids))


def _offsets(queue: Queue, position: Position, now: Snapshot, otherwise: int) -> dict[TopicPartition, int]:
    for place in position.at:
        _there(position.option, place, now)
    if position.kind in ("earliest", "latest"):
        mark = EARLIEST if position.kind == "earliest" else LATEST
        return {place: _at(position, place, mark, there) for place, there in now.partitions.items()}
    if position.kind == "offsets":
        return {
            place: _at(position, place, position.at.get(place, otherwise), there)
            for place, there in now.partitions.items()
        }
    moments = {p: position.time_ms if position.kind == "time" else position.at.get(p) for p in now.partitions}
    found = {(t, ms): queue.resolve(t, Start("time", time_ms=ms)) for (t, _), ms in _given(moments.items())}
    return {
        place: _at(position, place, otherwise, there)
        if moments[place] is None
        else found[place[0], moments[place] or 0].get(there.id, there.end)
        for place, there in now.partitions.items()
    }


def _given(moments: Iterable[tuple[TopicPartition, int | None]]) -> list[tuple[TopicPartition, int]]:
    return [(place, ms) for place, ms in moments if ms is not None]


def _at(position: Position, place: TopicPartition, value: int, there: Partition) -> int:
    if value in (EARLIEST, LATEST):
        return there.start if value == EARLIEST else there.end
    if value > there.end:
        raise InvalidSetting(
            f"option {position.option}: topic {place[0]!r} partition {place[1]} ends at {there.end}, and "
            f"{value} is behind that; -1 is its end"
        )
    return value


def _there(option: str, place: TopicPartition, now: Snapshot) -> None:
    if place not in now.partitions:
        known = ", ".join(str(n) for t, n in sorted(now.partitions) if t == place[0]) or "none that is read"
        raise UnknownPartition(
            f"option {option}: topic {place[0]!r} has no partition {place[1]}; it has {known}"
        )
