"""Samples of how far a group was behind: JSON lines with `time` and `messages`, in any order.

`time` is a moment with a zone, such as 2026-01-31T08:00:00Z, or milliseconds since 1970. Decides what a
sample is, and refuses the rest with the number of its line. There are few: they are read on the driver.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidSetting
from ...units import moment_ms

__all__ = ["Sample", "read_samples"]

MAX_SAMPLES = 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class Sample:
    time_ms: int
    behind: int


def read_samples(path: str) -> list[Sample]:
    """The oldest first."""
    found: list[Sample] = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append(_sample(line, f"samples {path}, line {number}"))
                if len(found) > MAX_SAMPLES:
                    raise InvalidSetting(
                        f"samples {path}: there are more than {MAX_SAMPLES:,}; leave some out"
                    )
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"samples {path} cannot be read: {error}") from None
    if not found:
        raise InvalidSetting(f"samples {path}: there are none in it")
    return sorted(found)


def _sample(line: str, where: str) -> Sample:
    try:
        fields: Any = json.loads(line)
        time, behind = fields["time"], fields["messages"]
    except (ValueError, KeyError, TypeError):
        raise InvalidSetting(
            f'{where}: write {{"time": "2026-01-31T08:00:00Z", "messages": 12}}, not {line.strip()[:60]!r}'
        ) from None
    if type(behind) is not int or behind < 0:
        raise InvalidSetting(f"{where}: messages={behind!r}: a whole number from 0 up")
    return Sample(time if type(time) is int else moment_ms(time, name=f"{where}: time"), behind)
