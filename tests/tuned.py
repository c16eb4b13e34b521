"""Other heuristics for a test: `tuned` for what is handed limits, `tune` for what is opened by a URL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import pytest

from postroom.config import DEFAULTS, Limits


def tuned(limits: Limits = DEFAULTS, **rooms: dict[str, Any]) -> Limits:
    """Return limits with other heuristics: `tuned(wire={"tick_s": 0.05})`."""
    parts = {room: replace(getattr(limits.tuning, room), **values) for room, values in rooms.items()}
    return replace(limits, tuning=replace(limits.tuning, **parts))


class Tune(Protocol):
    def __call__(self, **rooms: dict[str, Any]) -> None: ...


@pytest.fixture
def tune() -> Iterator[Tune]:
    """Change the defaults, for what is made from now on until the test ends: `tune(wire={"tick_s": 0.05})`.

    For tests of `connect`, `serve` and the like, which take no limits; else inject what `tuned` returns.
    """
    before: list[tuple[object, str, object]] = []

    def change(**rooms: dict[str, Any]) -> None:
        for room, values in rooms.items():
            part = getattr(DEFAULTS.tuning, room)
            for name, value in values.items():
                before.append((part, name, getattr(part, name)))
                object.__setattr__(part, name, value)  # it is frozen for everybody else

    yield change
    for part, name, value in reversed(before):
        object.__setattr__(part, name, value)
