"""Which fault comes when: drawn from a seed, and from nothing else.

Two series run side by side: what is done to processes, and what is done to their surroundings. Of the second
the next begins when work has gone on after the last. A plan says what and how long; it knows no process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["PROCESSES", "SURROUNDINGS", "Fault", "plan"]

PROCESSES: Mapping[str, int] = {"kill": 5, "pause a member": 1, "pause a producer": 1}
"""By name: how often, in proportion."""

_ALL = {"cut clients off": 1, "silence clients": 1, "pause a broker": 2, "slow the disk": 1, "overload": 1}
_SERVER = {
    **_ALL,
    "restart the database": 2,
    "crash the database": 3,
    "cut the database off": 1,
    "silence the database": 1,
    "lose its answers": 2,
    "slow the way to it": 1,
}
SURROUNDINGS: Mapping[str, Mapping[str, int]] = {
    "sqlite": {**_ALL, "kill all brokers": 3, "hold the lock": 2},
    "postgres": _SERVER,
    "mariadb": _SERVER,
    "mysql": _SERVER,
}

_SHORT = (0.5, 4.0)  # shorter than it takes a lease to end: a member that stands still keeps what it has
_LONG = (1.0, 9.0)


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    pick: float  # from 0 to 1: which of those it can befall
    seconds: float  # how long it lasts
    calm: float  # and how long nothing follows


def plan(seed: int, kinds: Mapping[str, int], calm: tuple[float, float]) -> Iterator[Fault]:
    """Return faults without end: those of the same seed are the same."""
    draw = random.Random(f"{seed} {sorted(kinds)}")
    names, weights = list(kinds), list(kinds.values())
    while True:
        (kind,) = draw.choices(names, weights)
        lasts = _SHORT if kind in PROCESSES else _LONG
        yield Fault(kind, draw.random(), draw.uniform(*lasts), draw.uniform(*calm))
