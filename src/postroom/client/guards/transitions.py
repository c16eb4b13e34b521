"""`transitions`: an event is handled where the entity's state lets it, else handed back, a few times (R33).

What does not fit may fit once something else has been handled, so it is retried; after `attempts` it is dead,
or dropped, as declared. A repeat of what was handled is passed over: it would not fit any more, and is no
failure. Must never leave anything written of an event that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ...clock import Clock
from ...errors import InvalidSetting
from ...model.guards import Fit, Machine, fit
from ...units import Duration, duration_ms
from ..app.handler import Dead, RetryLater
from ..databases import Theirs
from ..message import Received
from .entities import locked, save_state
from .once import KEEP, Seen
from .reading import Entity, Id, Text, entity_of, text_of

__all__ = ["Exhausted", "Load", "Save", "Transitions"]

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
        delay: Duration,
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
        self._attempts, self._delay_ms, self._exhausted = (
            attempts,
            duration_ms(delay, name="delay"),
            exhausted,
        )
        self._load, self._save = load, save
        self._seen = Seen("transitions", id, scope, keep, clock)

    def ready(self, theirs: Theirs, connection: Any, message: Received) -> Sequence[Received]:
        event = text_of(message, self._event, "event")
        reached = locked(theirs, "transitions", message, self._entity, self._scope)
        if not self._seen.add(theirs, message):  # first: a look for what is not there would lock too much
            return []
        name = entity_of(message, self._entity).decode(errors="backslashreplace")
        state = reached.state if self._load is None else self._load(connection, name)
        after = self._machine.after(state, event)
        if after is None:
            self._seen.remove(theirs, message)
        match fit(after, message.attempt, self._attempts):
            case Fit.LATER:
                raise RetryLater(self._delay_ms / 1000, reason=_misfit(event, name, state))
            case Fit.GIVEN_UP if self._exhausted == "dead":
                raise Dead(f"{_misfit(event, name, state)}; it was handed back {message.attempt - 1} times")
            case Fit.GIVEN_UP:
                return []
        assert after is not None, "it fits"
        if self._save is None:
            save_state(theirs, reached.id, after)
        else:
            self._save(connection, name, after)
        return [message]

    def shown(self, ready: Sequence[Any]) -> bool:
        return bool(ready)


def _misfit(event: str, name: str, state: str | None) -> str:
    return f"{event!r} does not fit {name!r}, " + (
        "of which nothing is there yet" if state is None else f"which is in state {state!r}"
    )
