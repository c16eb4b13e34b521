"""Where reading begins and ends: what the options say, as offsets of every partition.

Resolved on the driver, once for a batch read and once for a new stream (I9). Partitions that an option does
not name begin at the oldest message that is kept, and end behind the newest.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import InvalidSetting, UnknownPartition
from ..model.settings import Start
from .offsets import Offsets, Place
from .options import EARLIEST, LATEST, Position, ReadOptions, Topics, bad_option
from .planning import Partition, Snapshot
from .queue import Queue

__all__ = ["ends", "look", "starts"]


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


def _offsets(queue: Queue, position: Position, now: Snapshot, otherwise: int) -> dict[Place, int]:
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


def _given(moments: Iterable[tuple[Place, int | None]]) -> list[tuple[Place, int]]:
    return [(place, ms) for place, ms in moments if ms is not None]


def _at(position: Position, place: Place, value: int, there: Partition) -> int:
    if value in (EARLIEST, LATEST):
        return there.start if value == EARLIEST else there.end
    if value > there.end:
        raise InvalidSetting(
            f"option {position.option}: topic {place[0]!r} partition {place[1]} ends at {there.end}, and "
            f"{value} is behind that; -1 is its end"
        )
    return value


def _there(option: str, place: Place, now: Snapshot) -> None:
    if place not in now.partitions:
        known = ", ".join(str(n) for t, n in sorted(now.partitions) if t == place[0]) or "none that is read"
        raise UnknownPartition(
            f"option {option}: topic {place[0]!r} has no partition {place[1]}; it has {known}"
        )
