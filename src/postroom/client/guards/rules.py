"""The rules of the guards: whether a message is handled, by what the user's database says was handled before.

`once`: each message has one effect, however often it is delivered (R33). What was let through is written down
in the handler's own transaction, under a unique key: a second delivery at the same time waits there until the
first has committed, and is passed over then; if the first is rolled back, it is the second that is let
through. Rows are forgotten after `keep`, in slices, now and then. Must never be read before it is written
(I1).

The others go by what an entity has reached, under its lock: one row for each guard, scope and entity. The row
is locked by the statement that makes it sure it is there, before anything is read (I1); whoever comes at the
same time waits until this transaction ends. So what is about one entity is handled one after the other, also
in different processes.

`in_sequence` handles exactly the next version of an entity; what comes early waits for its turn (R33). It is
kept whole in the user's database, in the transaction that is then committed and acked: from there on it is
the table that has it, and the message before it that brings it back. Both lock the entity's row, so one that
is being kept and the one before it never miss each other. If the message before it fails, all that it would
have released is rolled back with it. Must never keep more than `room` for one entity.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any, Literal, TypeAlias

import msgspec

from ...clock import Clock, SystemClock
from ...errors import InvalidSetting, UsageError
from ...model.delivery.retry import Backoff
from ...model.policy.guards import Fit, Machine, SequenceStep, digest_of, fit, is_newer, take_turn
from ...units import Duration, duration_ms
from ..app.handler import Dead, RetryLater
from ..databases import Kind, Theirs
from ..message import Kind as SettleKind
from ..message import Received
from . import tables
from .apply import Entity, Id, Ready, Text, Version, entity_of, id_of, scope_of, text_of, version_of

__all__ = [
    "KEEP",
    "Exhausted",
    "InSequence",
    "Load",
    "Newest",
    "Once",
    "Reached",
    "Save",
    "Seen",
    "Transitions",
    "Waiting",
    "locked",
    "prune",
    "save_state",
    "save_version",
    "waiting",
]


KEEP: Duration = "30d"

_ADD: dict[Kind, str] = {
    "sqlite": "INSERT OR IGNORE INTO postroom_guards_seen (id, expires_at) VALUES (?, ?)",
    "postgres": "INSERT INTO postroom_guards_seen (id, expires_at) VALUES (?, ?) ON CONFLICT DO NOTHING",
    "mysql": "INSERT IGNORE INTO postroom_guards_seen (id, expires_at) VALUES (?, ?)",
}
_OLD = "SELECT id FROM postroom_guards_seen WHERE expires_at < ? ORDER BY expires_at LIMIT ?"
_FREE = "SELECT id FROM postroom_guards_seen WHERE id IN ({marks}) FOR UPDATE SKIP LOCKED"
_DELETE = "DELETE FROM postroom_guards_seen WHERE id IN ({marks})"
_SLICE = 500
_EVERY = 500  # messages that are let through between two slices
_turns = count()
_READ = "SELECT version, state, waiting FROM postroom_guards_entities WHERE id = ?"
_INSERT = "INSERT INTO postroom_guards_entities (id, guard, scope, entity) VALUES (?, ?, ?, ?) "
_MAKE: dict[Kind, str] = {
    "sqlite": _INSERT + "ON CONFLICT (id) DO UPDATE SET guard = excluded.guard",
    "postgres": _INSERT + "ON CONFLICT (id) DO UPDATE SET guard = excluded.guard",
    "mysql": _INSERT + "ON DUPLICATE KEY UPDATE guard = VALUES(guard)",
}
_SHOWN = 200


class Seen:
    """Ids that were let through, of one guard."""

    def __init__(self, guard: str, id: Id, scope: str | None, keep: Duration, clock: Clock | None) -> None:
        self._guard, self._id, self._scope = guard, id, scope
        self._keep_ms = duration_ms(keep, name="keep")
        if not self._keep_ms:
            raise InvalidSetting(
                'keep=0 would forget at once what was handled: keep it for longer, such as "30d"'
            )
        self._clock = clock or SystemClock()

    def _digest(self, message: Received) -> str:
        return digest_of(self._guard, scope_of(message, self._scope), *id_of(message, self._id))

    def add(self, theirs: Theirs, message: Received) -> bool:
        """Whether it was not there."""
        now = self._clock.now_ms()
        fresh = theirs.run(_ADD[theirs.kind], (self._digest(message), now + self._keep_ms)) == 1
        if fresh and next(_turns) % _EVERY == 0:
            _forget(theirs, now)
        return fresh

    def remove(self, theirs: Theirs, message: Received) -> None:
        """It was added in this transaction, and is not let through after all."""
        theirs.run(_DELETE.format(marks="?"), (self._digest(message),))


class Once:
    def __init__(self, id: Id, scope: str | None, keep: Duration = KEEP, clock: Clock | None = None) -> None:
        self._seen = Seen("once", id, scope, keep, clock)

    def ready(self, theirs: Theirs, connection: Any, message: Received) -> Sequence[Received]:
        return [message] if self._seen.add(theirs, message) else []

    def shown(self, ready: Sequence[Any]) -> bool:
        return bool(ready)


def prune(connection: Any, *, clock: Clock | None = None) -> Any:
    """Forget one slice of what is older than it was to be kept; returns how much that was.

    Guards do so by themselves now and then. Call it until it returns 0 where much has piled up. Commits, and
    is awaited, as `create_tables` is.
    """
    now = (clock or SystemClock()).now_ms()
    return tables.on(connection, lambda theirs: _forget(theirs, now))


def _forget(theirs: Theirs, now: int) -> int:
    """What another transaction is forgetting just now is left to it: nobody waits."""
    found = [row[0] for row in theirs.rows(_OLD, (now, _SLICE))]
    if found and theirs.kind != "sqlite":
        found = [row[0] for row in theirs.rows(_FREE.format(marks=_marks(found)), found)]
    if found:
        theirs.run(_DELETE.format(marks=_marks(found)), found)
    return len(found)


def _marks(found: Sequence[str]) -> str:
    return ", ".join("?" * len(found))


@dataclass(frozen=True, slots=True)
class Reached:
    id: str
    version: int | None
    state: str | None
    waiting: int  # how many messages came early
    shown: str  # the entity, for people


def locked(theirs: Theirs, guard: str, message: Received, entity: Entity, scope: str | None) -> Reached:
    named, what = scope_of(message, scope), entity_of(message, entity)
    id, shown = digest_of(guard, named, what), what.decode(errors="backslashreplace")[:_SHOWN]
    found = theirs.rows(_READ + " FOR UPDATE", (id,)) if theirs.kind == "postgres" else []
    if not found:  # on others a read before the row is there would lock too little, or too much
        theirs.run(_MAKE[theirs.kind], (id, guard, named[:_SHOWN], shown))
        found = theirs.rows(_READ + ("" if theirs.kind == "sqlite" else " FOR UPDATE"), (id,))
    version, state, waiting = found[0]
    return Reached(id, None if version is None else int(version), state, int(waiting), shown)


def save_version(theirs: Theirs, id: str, version: int, waiting: int = 0) -> None:
    theirs.run(
        "UPDATE postroom_guards_entities SET version = ?, waiting = ? WHERE id = ?", (version, waiting, id)
    )


def save_state(theirs: Theirs, id: str, state: str) -> None:
    theirs.run("UPDATE postroom_guards_entities SET state = ? WHERE id = ?", (state, id))


# ---- newest ----
# `newest`: of what is about one entity, only a larger version than the last is handled (R33).


class Newest:
    def __init__(self, version: Version, entity: Entity, scope: str | None) -> None:
        self._version, self._entity, self._scope = version, entity, scope

    def ready(self, theirs: Theirs, connection: Any, message: Received) -> Sequence[Received]:
        version = version_of(message, self._version)
        reached = locked(theirs, "newest", message, self._entity, self._scope)
        if not is_newer(reached.version, version):
            return []
        save_version(theirs, reached.id, version)
        return [message]

    def shown(self, ready: Sequence[Any]) -> bool:
        return bool(ready)


# ---- transitions ----
# `transitions`: an event is handled where the entity's state lets it, else handed back, a few times
# (R33).
#
# What does not fit may fit once something else has been handled, so it is retried; after `attempts` it is
# dead, or dropped, as declared. What can never fit is so at once. A repeat is passed over, whatever its
# id: it would not fit any more, and is no failure. Must never leave anything written of an event that
# does not fit.

Exhausted: TypeAlias = Literal["dead", "drop"]
Load: TypeAlias = Callable[[Any, str], str | None]
Save: TypeAlias = Callable[[Any, str, str], Any]


class Transitions:
    def __init__(
        self,
        rules: Machine | Mapping[Any, Any],
        event: Text,
        entity: Entity,
        scope: str | None,
        *,
        attempts: int,
        delay: Duration | Backoff,
        exhausted: Exhausted,
        load: Load | None,
        save: Save | None,
        id: Id = None,
        keep: Duration = KEEP,
        clock: Clock | None = None,
    ) -> None:
        if type(attempts) is not int or attempts < 0:
            raise InvalidSetting(f"attempts={attempts!r}: how often it is handed back, from 0 up")
        if exhausted not in ("dead", "drop"):
            raise InvalidSetting(
                f'exhausted={exhausted!r}: choose "dead" (dead letters) or "drop" (passed over)'
            )
        if (load is None) != (save is None):
            raise InvalidSetting(
                "load= and save= go together: both, for a state in a row of your own, or neither"
            )
        self._machine = rules if isinstance(rules, Machine) else Machine(rules)
        self._event, self._entity, self._scope = event, entity, scope
        self._attempts, self._exhausted = attempts, exhausted
        self._delay = delay if isinstance(delay, Backoff) else duration_ms(delay, name="delay")
        self._load, self._save = load, save
        self._seen = Seen("transitions", id, scope, keep, clock)

    def ready(self, theirs: Theirs, connection: Any, message: Received) -> Sequence[Received]:
        event = text_of(message, self._event, "event")
        reached = locked(theirs, "transitions", message, self._entity, self._scope)
        if not self._seen.add(theirs, message):  # first: a look for what is not there would lock too much
            return []
        name = entity_of(message, self._entity).decode(errors="backslashreplace")
        state = reached.state if self._load is None else self._load(connection, name)
        found = fit(self._machine, state, event, message.attempt, self._attempts)
        if found is not Fit.FITS:
            self._seen.remove(theirs, message)
            if found is Fit.LATER:
                raise RetryLater(self._delay_s(message.attempt), reason=_misfit(event, name, state))
            if found is not Fit.REPEATED and self._exhausted == "dead":
                raise Dead(self._why(found, event, name, state, message.attempt))
            return []
        after = self._machine.after(state, event)
        assert after is not None, "it fits"
        if self._save is None:
            save_state(theirs, reached.id, after)
        else:
            self._save(connection, name, after)
        return [message]

    def _delay_s(self, attempt: int) -> float:
        delay = self._delay
        return (delay if isinstance(delay, int) else delay.delay_ms(attempt, random.random())) / 1000

    def _why(self, found: Fit, event: str, name: str, state: str | None, attempt: int) -> str:
        if event not in self._machine.events:
            known = ", ".join(sorted(self._machine.events))
            return f"no rule has the event {event!r}, which came for {name!r}; there are {known}"
        if found is Fit.NEVER:
            return f"{_misfit(event, name, state)}, and no event leads from there to where it would fit"
        return f"{_misfit(event, name, state)}; it was handed back {attempt - 1} times"

    def shown(self, ready: Sequence[Any]) -> bool:
        return bool(ready)


def _misfit(event: str, name: str, state: str | None) -> str:
    return f"{event!r} does not fit {name!r}, " + (
        "of which nothing is there yet" if state is None else f"which is in state {state!r}"
    )


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


_decode_kept = msgspec.msgpack.Decoder(_Kept).decode


@dataclass(frozen=True, slots=True)
class _Parked:
    """Stands where a delivery would: the message was acked when it was kept."""

    topic: str
    partition: int
    partition_id: int
    attempt: int

    async def settle(
        self,
        position: int,
        kind: SettleKind,
        *,
        delay_ms: int = 0,
        at_ms: int | None = None,
        reason: str = "",
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
        return _received(_decode_kept(bytes(raw)))


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
