"""What a guard decides about a message: handle it, pass it over, let it wait, or hand it back (R33).

Pure: what is stored comes in, what is to be stored goes out. The guards themselves (`client.guards`) lock
what a decision is made of before they read it, and write it in the handler's own transaction. Must never let
a version be handled twice, or before the one it follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any

from ...errors import InvalidSetting

__all__ = ["Fit", "Machine", "SequenceStep", "digest_of", "fit", "is_newer", "take_turn"]


def digest_of(*parts: str | bytes) -> str:
    """32 hexadecimal digits that stand for these parts; ("a", "bc") is not ("ab", "c")."""
    found = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        found.update(b"%d:%b%b" % (len(raw), b"s" if isinstance(part, str) else b"b", raw))
    return found.hexdigest()


# ---- versions ----


def is_newer(stored: int | None, version: int) -> bool:
    """Ties are old: the same version was handled already."""
    return stored is None or version > stored


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """A message that has a number in a sequence becomes one of these.

    `handled`: it is its turn. `waits`: it is to be kept until then. `full`: it should be kept, and there is
    no room. `released`: versions that waited and whose turn it is then, in order. `following`: the next one
    after all that.
    """

    following: int
    handled: bool = False
    waits: bool = False
    full: bool = False
    released: tuple[int, ...] = ()


def take_turn(following: int, version: int, waiting: Collection[int], room: int) -> SequenceStep:
    """`following` is the version that is to come next, `waiting` are those that came early.

        next 3, waiting 4, 5, 7; comes 3: handled, then 4 and 5; next is 6, and 7 waits on

    What is ready is released whoever comes, also a late or repeated one.
    """
    early = version > following
    if early and version not in waiting and len(waiting) >= room:
        return SequenceStep(following, full=True)
    handled = version == following
    reached = following + handled
    released = []
    while reached in waiting:
        released.append(reached)
        reached += 1
    return SequenceStep(reached, handled, early and version not in waiting, released=tuple(released))


# ---- states ----

State = str | None  # None: there is nothing yet


class Fit(Enum):
    FITS = "fits"
    LATER = "later"  # it may fit once something else has happened
    GIVEN_UP = "given up"  # it was handed back as often as is allowed
    REPEATED = "repeated"  # it has happened already, and cannot happen again
    NEVER = "never"  # no way leads from this state to one that it fits


def fit(machine: Machine, state: State, event: str, attempt: int, attempts: int) -> Fit:
    """Decide whether the event fits the state. `attempt` counts from 1; after `attempts` it is given up.

    created → paid → shipped, and created → cancelled; in state shipped:
    comes "paid": repeated, since nothing is shipped that was not paid
    comes "cancelled": never; in state cancelled so does "paid", which may not have happened
    """
    if machine.after(state, event) is not None:
        return Fit.FITS
    if machine.may_come_to_fit(state, event):
        return Fit.LATER if attempt <= attempts else Fit.GIVEN_UP
    return Fit.REPEATED if machine.has_happened(state, event) else Fit.NEVER


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine says which event leads from which state to which.

    Machine({"created": {None}, "paid": {"created"}, "shipped": {"paid"}})
        an event is named like the state that it leads to; None: nothing is there yet
    Machine({("created", "pay"): "paid", ("paid", "refund"): "created"})
        events have names of their own
    """

    moves: Mapping[tuple[State, str], str]

    def __init__(self, rules: Mapping[Any, Any]) -> None:
        if not isinstance(rules, Mapping) or not rules:
            raise InvalidSetting(_EXAMPLE.format(rules))
        pairs = [isinstance(name, tuple) for name in rules]
        if any(pairs) and not all(pairs):
            raise InvalidSetting(_EXAMPLE.format(rules))
        moves = dict(_by_event(rules) if all(pairs) else _by_state(rules))
        object.__setattr__(self, "moves", moves)

    @property
    def events(self) -> set[str]:
        return {event for _, event in self.moves}

    def after(self, state: State, event: str) -> State:
        """Return the state that the event leads to; None if it does not fit this one."""
        return self.moves.get((state, event))

    def may_come_to_fit(self, state: State, event: str) -> bool:
        """Tell whether the event fits a state that can be reached from this one.

        Of a state that no rule has anything may come: somebody else has set it, or has not begun yet.
        """
        if event not in self.events:
            return False
        if all(state not in (source, target) for (source, _), target in self.moves.items()):
            return True
        return any((reached, event) in self.moves for reached in self._reached({state}))

    def has_happened(self, state: State, event: str) -> bool:
        """Tell whether every way from a beginning to this state, and there is one, has the event in it."""
        targets = set(self.moves.values())
        beginnings = {None, *(source for source, _ in self.moves if source not in targets)}
        return state in self._reached(beginnings) - self._reached(beginnings, without=event)

    def _reached(self, states: set[State], without: str | None = None) -> set[State]:
        """Return these states, and all that can be reached from them."""
        found = set(states)
        while more := {
            target
            for (source, event), target in self.moves.items()
            if source in found and target not in found and event != without
        }:
            found |= more
        return found


_EXAMPLE = (
    'a state machine is {{"paid": {{"created"}}, …}}: from which states each one is reached, None for the '
    'beginning; or {{("created", "pay"): "paid", …}}; not {!r}'
)


def _by_state(rules: Mapping[Any, Any]) -> list[tuple[tuple[State, str], str]]:
    found: list[tuple[tuple[State, str], str]] = []
    for target, sources in rules.items():
        alone = sources is None or isinstance(sources, str)
        each: Sequence[Any] = [sources] if alone else list(sources) if _is_many(sources) else [object()]
        if not _is_name(target) or not all(source is None or _is_name(source) for source in each):
            raise InvalidSetting(_EXAMPLE.format(rules))
        found += [((source, target), target) for source in each]
    return found


def _by_event(rules: Mapping[Any, Any]) -> list[tuple[tuple[State, str], str]]:
    for pair, target in rules.items():
        known = len(pair) == 2 and (pair[0] is None or _is_name(pair[0])) and _is_name(pair[1])
        if not known or not _is_name(target):
            raise InvalidSetting(_EXAMPLE.format(rules))
    return list(rules.items())


def _is_many(sources: object) -> bool:
    return isinstance(sources, set | frozenset | list | tuple)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200
