"""What may be written for a value on the command line, and what it means to the SDK.

Decides the spelling of durations, places to start, headers and offsets. Must never guess: what is unclear
is refused with an example, before anything is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, TypeAlias

import typer

from ..errors import InvalidSetting
from ..units import duration_ms, moment_ms, size_bytes

__all__ = ["Group", "Place", "Topic", "duration", "headers", "moment", "place", "seconds", "size"]

Place: TypeAlias = str | datetime | dict[int, int]
"""Where to start, stop or go: "earliest", "latest", a moment, or offsets by partition."""

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group.", show_default=False)]

_OFFSETS = re.compile(r"\d+=\d+(,\d+=\d+)*")


def place(text: str, *, name: str, partition: int | None = None) -> Place:
    """earliest, latest, 2026-01-31T08:00:00Z, 0=12,1=40, or an offset of the partition that was named."""
    text = text.strip()
    if text in ("earliest", "latest"):
        return text
    if _OFFSETS.fullmatch(text.replace(" ", "")):
        return _offsets(text.replace(" ", ""), name)
    if text.isdecimal() and len(text) < 19:
        if partition is None:
            raise InvalidSetting(f"{name} {text}: offsets are per partition, such as {name} 0={text}")
        return {partition: int(text)}
    others = "earliest, latest, a moment such as 2026-01-31T08:00:00Z, or offsets such as 0=12,1=40"
    return moment(text, name=name, spelling=others)


def moment(text: str, *, name: str, spelling: str = "a moment such as 2026-01-31T08:00:00Z") -> datetime:
    """A point in time; without a time zone nobody knows which."""
    text = text.strip()
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidSetting(f"{name} {text!r}: use {spelling}") from None
    if found.utcoffset() is None:
        raise InvalidSetting(f"{name} {text!r} has no time zone: write {text}Z for UTC, or {text}+02:00")
    moment_ms(found, name=name)
    return found


def _offsets(text: str, name: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for pair in text.split(","):
        partition, _, offset = pair.partition("=")
        if int(partition) in found:
            raise InvalidSetting(f"{name}: partition {partition} is named twice")
        found[int(partition)] = int(offset)
    return found


def duration(text: str | None, *, name: str) -> str | None:
    """A duration as the SDK takes it, checked now."""
    if text is not None:
        duration_ms(text, name=name)
    return text


def size(text: str | None, *, name: str) -> int | None:
    return None if text is None else size_bytes(text, name=name)


def seconds(text: str, *, name: str) -> float:
    return duration_ms(text, name=name) / 1000


def headers(pairs: Iterable[str]) -> dict[str, str] | None:
    """`--header k=v`, any number of times."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidSetting(f"--header {pair!r}: write a name and a value, such as --header source=web")
        if name in found:
            raise InvalidSetting(f"--header {name} is given twice")
        found[name] = value
    return found or None
