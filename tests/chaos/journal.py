"""A process writes down what it does before and after it does it, so that its death leaves no doubt.

One line each: when, what, and the value of the message. Lines go to the system at once, which keeps them
when the process is killed; only the last one may be cut, and is then not read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Entry", "Journal", "read"]


class Entry(NamedTuple):
    at: int  # nanoseconds since 1970: all processes of a test share one machine and its clock
    verb: str
    value: str


class Journal:
    """Producers note `sending`, then `confirmed` or `failed`; consumers `handled`, then how it ended:
    `settled`, or `gone` (somebody else has it). Changers: `changing`, then `changed` or `refused`. Operators:
    `skips` or `drops`, then `skipped` or `dropped`; and `restarted`.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, verb: str, values: Iterable[str]) -> None:
        at = time.time_ns()
        os.write(self._file, "".join(f"{at} {verb} {value}\n" for value in values).encode())


def read(path: Path) -> list[Entry]:
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [Entry(int(at), verb, value) for at, verb, value in (line.split(" ") for line in lines)]
