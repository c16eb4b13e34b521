"""What `postroom doctor` looks at: a module for each kind of store, and one for topics and groups.

Decides which checks a queue gets. A check is a function from what is under examination to findings, each with
a state and, where something is to be done, the advice. Must change nothing in the queue, and must never show
a password. A check that cannot be made is a finding too, never a traceback, and never a silent "ok".
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from ...errors import PostroomError

if TYPE_CHECKING:
    from ...address import Address


__all__ = ["Check", "Checks", "Finding", "State", "examine", "made"]


State = Literal["ok", "warn", "fail", "skip"]
"""skip: it could not be looked at, and that is no fault of the queue."""

X = TypeVar("X")
Check = Callable[[X], Iterable["Finding"]]
Checks = tuple[tuple[str, Check[X]], ...]
_OLDEST_SQLITE = (3, 37, 0)

Begin = Callable[[str, int], None]
"""Told which check begins, and how many there are in all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has found, worded for whoever runs the queue."""

    check: str
    state: State
    message: str
    advice: str = ""


def made(name: str, check: Check[X], exam: X, *, advice: str) -> list[Finding]:
    """Return what a check finds; what stops it is a finding too, with the advice given here."""
    try:
        return list(check(exam))
    except (PostroomError, OSError) as error:
        return [Finding(name, "fail", f"could not be checked: {error}", advice)]


def examine(address: Address, begin: Begin) -> list[Finding]:
    """Return what can be found without a connection to the queue itself."""
    found = list(_python(address.kind))
    if address.kind == "memory":
        return [*found, Finding("file", "ok", "this queue is in memory: there is nothing else to check")]
    if address.path is not None:
        from .sqlite import examine_file

        return found + examine_file(address.path, begin)
    from .server import examine_server

    return found + examine_server(address, begin)


def _python(kind: str) -> Iterator[Finding]:
    yield Finding("python", "ok", f"Python {'.'.join(map(str, sys.version_info[:3]))}")
    if kind not in ("sqlite", "memory"):
        return
    version = f"SQLite {sqlite3.sqlite_version}"
    if sqlite3.sqlite_version_info >= _OLDEST_SQLITE:
        yield Finding("sqlite", "ok", version)
    else:
        yield Finding("sqlite", "warn", f"{version} is old", "use a Python that brings SQLite 3.37 or newer")
