"""What a check finds, and how a check is run.

A check is a function from what is under examination to findings, each with a state and, where something
is to be done, the advice. Must change nothing in the queue. A check that cannot be made is a finding too,
never a traceback, and never a silent "ok".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from ...errors import PostroomError

__all__ = ["Check", "Checks", "Finding", "State", "made"]

State = Literal["ok", "warn", "fail", "skip"]
"""skip: it could not be looked at, and that is no fault of the queue."""

X = TypeVar("X")
Check = Callable[[X], Iterable["Finding"]]
Checks = tuple[tuple[str, Check[X]], ...]


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
