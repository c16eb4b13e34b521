"""Guards make a handler safe to repeat: their state is in your database, in the handler's transaction.

    with guards.once(connection, message) as fresh:            seen before? then pass it over
        if fresh: …
    with guards.newest(connection, message, version="version") as newer: …
    with guards.in_sequence(connection, message, version="version") as ready:
        for one in ready: …
    with guards.transitions(connection, message, rules=RULES, event="event") as fits: …

Over a handler they take what opens a connection instead: `@guards.once(Session)`. Must never be imported by
what is below the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from ...clock import Clock
from ...model.delivery.retry import Backoff
from ...model.policy.guards import Machine
from ...units import Duration
from .apply import Entity, Guarded, Id, Ready, Text, Version, use
from .rules import KEEP, Exhausted, InSequence, Load, Newest, Once, Save, Transitions, Waiting, prune, waiting
from .tables import create_tables, ddl

__all__ = [
    "Guarded",
    "Machine",
    "Ready",
    "Waiting",
    "create_tables",
    "ddl",
    "in_sequence",
    "newest",
    "once",
    "prune",
    "transitions",
    "waiting",
]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def once(
    connection: Any,
    *,
    id: Id = None,
    scope: str | None = None,
    keep: Duration = KEEP,
    clock: Clock | None = None,
) -> Callable[[F], F]: ...


@overload
def once(
    connection: Any,
    message: Any,
    *,
    id: Id = None,
    scope: str | None = None,
    keep: Duration = KEEP,
    clock: Clock | None = None,
) -> Guarded[bool]: ...


def once(
    connection: Any,
    message: Any = None,
    *,
    id: Id = None,
    scope: str | None = None,
    keep: Duration = KEEP,
    clock: Clock | None = None,
) -> Any:
    """True at the first time a message is handled, False whenever it comes again.

    Known by its id, else by where it is stored; `id` is another one, or a function of the message. `scope`
    keeps uses apart: by default the topic and the group. What was seen is forgotten after `keep`: choose it
    longer than a message may come again, also by `redrive`. `clock` is for tests.
    """
    return use(Once(id, scope, keep, clock), connection, message)


@overload
def newest(
    connection: Any, *, version: Version = "version", entity: Entity = None, scope: str | None = None
) -> Callable[[F], F]: ...


@overload
def newest(
    connection: Any,
    message: Any,
    *,
    version: Version = "version",
    entity: Entity = None,
    scope: str | None = None,
) -> Guarded[bool]: ...


def newest(
    connection: Any,
    message: Any = None,
    *,
    version: Version = "version",
    entity: Entity = None,
    scope: str | None = None,
) -> Any:
    """True if the version is larger than all that were handled of this entity; ties are passed over too.

    `version`: the header that has it, or a function of the message. `entity`: by default the message's key.
    """
    return use(Newest(version, entity, scope), connection, message)


@overload
def in_sequence(
    connection: Any,
    *,
    version: Version = "version",
    entity: Entity = None,
    scope: str | None = None,
    first: int = 1,
    room: int = 100,
    delay: Duration = "10s",
) -> Callable[[F], F]: ...


@overload
def in_sequence(
    connection: Any,
    message: Any,
    *,
    version: Version = "version",
    entity: Entity = None,
    scope: str | None = None,
    first: int = 1,
    room: int = 100,
    delay: Duration = "10s",
) -> Guarded[Ready]: ...


def in_sequence(
    connection: Any,
    message: Any = None,
    *,
    version: Version = "version",
    entity: Entity = None,
    scope: str | None = None,
    first: int = 1,
    room: int = 100,
    delay: Duration = "10s",
) -> Any:
    """The messages whose turn it is: none, this one, or this one and those that waited for it.

    An entity's versions begin at `first` and each is one more than the last. What comes early waits in a
    table: ack it. With `room` of them waiting, the next is handed back for `delay` (RetryLater).
    """
    return use(InSequence(version, entity, scope, first, room, delay), connection, message)


@overload
def transitions(
    connection: Any,
    *,
    rules: Machine | Mapping[Any, Any],
    event: Text = "event",
    entity: Entity = None,
    scope: str | None = None,
    attempts: int = 5,
    delay: Duration | Backoff = "10s",
    exhausted: Exhausted = "dead",
    load: Load | None = None,
    save: Save | None = None,
) -> Callable[[F], F]: ...


@overload
def transitions(
    connection: Any,
    message: Any,
    *,
    rules: Machine | Mapping[Any, Any],
    event: Text = "event",
    entity: Entity = None,
    scope: str | None = None,
    attempts: int = 5,
    delay: Duration | Backoff = "10s",
    exhausted: Exhausted = "dead",
    load: Load | None = None,
    save: Save | None = None,
) -> Guarded[bool]: ...


def transitions(
    connection: Any,
    message: Any = None,
    *,
    rules: Machine | Mapping[Any, Any],
    event: Text = "event",
    entity: Entity = None,
    scope: str | None = None,
    attempts: int = 5,
    delay: Duration | Backoff = "10s",
    exhausted: Exhausted = "dead",
    load: Load | None = None,
    save: Save | None = None,
) -> Any:
    """True if the event fits the state of its entity, which then moves on; False if it has happened before.

    `rules`: see `Machine`. `event`: the header that names it, or a function of the message. What does not fit
    yet is handed back for `delay` (RetryLater), or by a `Backoff`, `attempts` times; then it is dead, or
    passed over (`exhausted="drop"`). What can never fit is so at once. `load(connection, entity)` and
    `save(connection, entity, state)` keep the state in a row of your own; of an async session they get the
    sync side.
    """
    rule = Transitions(
        rules, event, entity, scope, attempts=attempts, delay=delay, exhausted=exhausted, load=load, save=save
    )  # fmt: skip
    return use(rule, connection, message)
