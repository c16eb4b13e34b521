"""What the audit log says: who did what to a queue, when, from where, and what was changed by it.

An entry is written before the action and completed after it, so that nothing is done without one: an action
has many transactions, on several databases (I8), and no single one could carry it. What was never completed
says so. An action that changed nothing has no entry.

Here it is decided what of an action is told. That is settings, routes, limits, permissions and counts: must
never hold a secret, a message, its key or its headers. Everything is cut to a bound, and is ASCII: names come
from whoever asks, and were checked by nobody yet (I22).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from .policy.rate import Rate
from .topology.route import Route

__all__ = [
    "BEGUN", "DONE", "Asker", "AuditEntry", "State", "Told", "differing", "rate_state", "route_state",
    "settings_state", "short", "stored_state", "told_arguments",
]  # fmt: skip

BEGUN, DONE = "begun", "done"
"""Outcomes, besides the codes of errors. What is only begun was cut off: whether it was done is not known."""

Told: TypeAlias = bool | int | float | str | None

State: TypeAlias = Mapping[str, Any]
"""What something was like: a few names with numbers or short texts."""

_MOST_NAMES = 40  # of a state
_LONGEST = 250  # characters of a text
_SUBJECT = ("topic", "group", "name", "exist_ok")  # of a request: what it is about is told beside it


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks something of a queue, and by which door."""

    who: str  # the principal; of a program that has the queue's database itself, the user that runs it
    door: str  # "wire", "http", "console", "kafka", "cli" or "embedded"
    address: str  # of the client; of a program on the database itself, its host


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One administrative action."""

    id: int  # grows
    at: int  # when it began, in milliseconds since 1970
    who: str  # principal, or the user whose program used the database itself
    door: str  # "wire", "http", "console", "kafka", "cli" or "embedded"
    address: str  # from where
    action: str  # the operation, such as "delete_topic"
    topic: str  # that it is about; "": the queue as a whole
    group: str  # of the topic; or what else it is about: a shard, a principal, a producer
    outcome: str  # "done", the code of an error, or "begun": it was cut off, and may have been done
    asked: dict[str, Told]  # what the request says besides
    before: dict[str, Told] | None  # what of it was changed; None: it was not there
    after: dict[str, Told] | None


# ---- what is told ----


def short(text: object) -> str:
    """Return a name as it can be stored and shown anywhere: printable ASCII, and not too long."""
    plain = str(text)  # whoever calls the SDK may name what is no text: that is refused later
    plain = plain if plain.isascii() and plain.isprintable() else ascii(plain)[1:-1]
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 3]}..."


def told_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request says besides its subject: numbers, flags and names; of a list, how long it is.

    >>> told_arguments({"topic": "orders", "partition": 2, "at": None, "spots": [(1, 2), (1, 3)]})
    {'partition': 2, 'spots': 2}
    """
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _SUBJECT or value is False or (value is None and name != "spots"):
            continue
        if name == "spots":
            found[name] = "all" if value is None else len(value)
        elif isinstance(value, bool | int | float):
            found[name] = value
        elif isinstance(value, str):
            found[name] = short(value)
    return found


def settings_state(settings: Any, **more: Any) -> State:
    """Return the settings of a topic or a group, all of them."""
    found: dict[str, Any] = msgspec.to_builtins(settings)
    return more | found


def route_state(route: Route) -> State:
    """Return the version, and where each partition is.

    >>> from .topology.route import Range
    >>> route_state(Route("orders", 3, (Range(0, 1023, 7, 12),)))
    {'version': 3, 'partition 7': 'slots 0-1023 on shard first'}
    """
    ranges = {
        f"partition {piece.partition}": f"slots {piece.first_slot}-{piece.last_slot} on shard "
        f"{piece.shard or 'first'}"
        for piece in route.ranges
    }
    return {"version": route.version, **ranges}


def rate_state(rates: Iterable[Rate], name: str) -> State | None:
    """Return the limit of that name; None: there is none."""
    for rate in rates:
        if rate.name == name and not rate.unlimited:
            return {"messages_per_s": rate.messages_per_s, "bytes_per_s": rate.bytes_per_s}
    return None


# ---- what was changed ----


def differing(
    before: State | None, after: State | None, usual: State | None = None
) -> tuple[State | None, State | None]:
    """Return what differs of the two; of something that was made or deleted, all that is not as `usual`.

    >>> differing({"paused": False, "lease_ms": 1}, {"paused": True, "lease_ms": 1})
    ({'paused': False}, {'paused': True})
    """
    if before is None or after is None:
        return _unusual(before, usual or {}), _unusual(after, usual or {})
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return _only(before, names), _only(after, names)


def _unusual(state: State | None, usual: State) -> State | None:
    if state is None:
        return None
    return {name: value for name, value in state.items() if name not in usual or value != usual[name]}


def _only(state: State, names: Iterable[str]) -> State:
    return {name: state[name] for name in names if name in state}


def stored_state(state: State | None) -> str:
    """Return the state as JSON of bounded length; "" is None."""
    if state is None:
        return ""
    kept = {short(str(name)): _bounded(value) for name, value in list(state.items())[:_MOST_NAMES]}
    if len(state) > len(kept):
        kept["more"] = len(state) - len(kept)
    return msgspec.json.encode(kept).decode()


def _bounded(value: Any) -> Told:
    if value is None or isinstance(value, bool | int | float):
        return value
    return short(value if isinstance(value, str) else msgspec.json.encode(value).decode(errors="replace"))
