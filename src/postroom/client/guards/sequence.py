"""`in_sequence`: exactly the next version of an entity is handled; what comes early waits for its turn (R33).

What comes early is kept whole in the user's database, in the transaction that is then committed and acked:
from there on it is the table that has it, and the message before it that brings it back. Both lock the
entity's row, so one that is being kept and the one before it never miss each other. If the message before it
fails, all that it would have released is rolled back with it. Must never keep more than `room` for one
entity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...clock import Clock, SystemClock
from ...errors import InvalidSetting, UsageError
from ...model.policy.guards import SequenceStep, take_turn
from ...units import Duration, duration_ms
from ..app.handler import RetryLater
from ..databases import Theirs
from ..message import Kind, Received
from . import tables
from .apply import Ready
from .entities import Reached, locked, save_version
from .fields import Entity, Version, version_of

__all__ = ["InSequence", "Waiting", "waiting"]

_VERSIONS = "SELECT version FROM postroom_guards_waiting WHERE id = ?"
_KEPT = "SELECT message FROM postroom_guards_waiting WHERE id = ? AND version = ?"
_PARK = "INSERT INTO postroom_guards_waiting (id, version, parked_at, message) VALUES (?, ?, ?, {blob})"
_RELEASE = "DELETE FROM postroom_guards_waiting WHERE id = ? AND version = ?"
_WAITING = """SELECT e.scope, e.entity, e.version, e.waiting, MIN(w.version), MIN(w.parked_at)
              FROM postroom_guards_entities e JOIN postroom_guards_waiting w ON w.id = e.id
              GROUP BY e.id, e.scope, e.entity, e.version, e.waiting ORDER BY MIN(w.parked_at) LIMIT ?"""


class _Kept(msgspec.Struct, array_like=True):
    """A message as it waits in the table. Add at the end only: rows may be older than the program."""

    value: bytes
    key: bytes | None
    headers: dict[str, bytes]
    id: str | None
    source: str | None
    expires_ms: int | None
    timestamp: int
    topic: str
    partition: int
    partition_id: int
    offset: int
    attempt: int


@dataclass(frozen=True, slots=True)
class _Parked:
    """Stands where a delivery would: the message was acked when it was kept."""

    topic: str
    partition: int
    partition_id: int
    attempt: int

    async def settle(
        self, position: int, kind: Kind, *, delay_ms: int = 0, at_ms: int | None = None, reason: str = ""
    ) -> None:
        raise UsageError(f"this message waited for its turn and was acked then: there is nothing to {kind}")

    async def extend(self, position: int) -> None:
        raise UsageError("this message waited for its turn and was acked then: it has no lease")


@dataclass(frozen=True, slots=True)
class Waiting:
    """An entity of which something waits. `following`: the version that is missing."""

    scope: str
    entity: str
    following: int
    messages: int
    first: int  # the lowest version that waits
    since: datetime


class InSequence:
    def __init__(
        self, version: Version, entity: Entity, scope: str | None, first: int, room: int, delay: Duration,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        if type(first) is not int or type(room) is not int or room < 0:
            raise InvalidSetting(f"first={first!r}, room={room!r}: whole numbers, and room from 0 up")
        self._version, self._entity, self._scope = version, entity, scope
        self._first, self._room = first, room
        self._delay_ms = duration_ms(delay, name="delay")
        self._clock = clock or SystemClock()

    def ready(self, theirs: Theirs, connection: Any, message: Received) -> Sequence[Received]:
        version = version_of(message, self._version)
        reached = locked(theirs, "in_sequence", message, self._entity, self._scope)
        following = self._first if reached.version is None else reached.version
        early = (
            {row[0] for row in theirs.rows(_now(theirs, _VERSIONS), (reached.id,))}
            if reached.waiting
            else set()
        )
        turn = take_turn(following, version, early, self._room)
        if turn.full:
            raise RetryLater(self._delay_ms / 1000, reason=_full(reached, following, version))
        released = [self._release(theirs, reached.id, one) for one in turn.released]
        if turn.waits:
            self._park(theirs, reached.id, version, message)
        self._save(theirs, reached, following, turn)
        return [message, *released] if turn.handled else released

    def shown(self, ready: Sequence[Any]) -> Ready:
        return Ready(ready)

    def _save(self, theirs: Theirs, reached: Reached, before: int, turn: SequenceStep) -> None:
        if turn.waits or turn.following != before:
            left = reached.waiting + turn.waits - len(turn.released)
            save_version(theirs, reached.id, turn.following, left)

    def _park(self, theirs: Theirs, id: str, version: int, message: Received) -> None:
        raw = msgspec.msgpack.encode(_kept(message))
        given: Any = raw.hex() if theirs.kind == "mysql" else raw
        insert = _PARK.format(blob=tables.blob(theirs.kind))
        theirs.run(insert, (id, version, self._clock.now_ms(), given))

    def _release(self, theirs: Theirs, id: str, version: int) -> Received:
        [(raw,)] = theirs.rows(_now(theirs, _KEPT), (id, version))
        theirs.run(_RELEASE, (id, version))
        return _received(msgspec.msgpack.decode(bytes(raw), type=_Kept))


def waiting(connection: Any, *, limit: int = 100) -> Any:
    """Entities of which messages wait for a version that has not come, longest waiting first.

    A list of `Waiting`. Awaited as `create_tables` is.
    """
    return tables.on(connection, lambda theirs: _waiting(theirs, limit))


def _waiting(theirs: Theirs, limit: int) -> list[Waiting]:
    rows = theirs.rows(_WAITING, (limit,))
    return [
        Waiting(scope, entity, following, count, first, datetime.fromtimestamp(since / 1000, UTC))
        for scope, entity, following, count, first, since in rows
    ]


def _now(theirs: Theirs, sql: str) -> str:
    """On MySQL a plain read may be of the moment when the transaction began, before the lock (I1)."""
    return f"{sql} FOR UPDATE" if theirs.kind == "mysql" else sql


def _full(reached: Reached, following: int, version: int) -> str:
    return (
        f"version {version} of {reached.shown!r} came before version {following}, for which "
        f"{reached.waiting} others wait already: there is no room"
    )


def _kept(message: Received) -> _Kept:
    expires = None if message.expires is None else round(message.expires.timestamp() * 1000)
    return _Kept(
        bytes(message.value), message.key, dict(message.headers), message._id, message.source, expires,
        message.timestamp, message.topic, message.partition, message._delivery.partition_id, message.offset,
        message.attempt,
    )  # fmt: skip


def _received(kept: _Kept) -> Received:
    expires = None if kept.expires_ms is None else datetime.fromtimestamp(kept.expires_ms / 1000, UTC)
    delivery = _Parked(kept.topic, kept.partition, kept.partition_id, kept.attempt)
    return Received(
        kept.value, kept.key, kept.headers, "", kept.source, expires, kept.timestamp, kept.offset, kept.id,
        delivery, kept.offset,
    )  # fmt: skip
