"""What may be written for a value on the command line, and what it means to the SDK.

Decides the spelling of durations, places to start, headers and offsets. Must never guess: what is unclear
is refused with an example, before anything is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import typer

from ...errors import InvalidSetting
from ...units import duration_ms, moment_ms, size_bytes
from . import names

__all__ = [
    "AnyGroup",
    "AnyTopic",
    "Exhausted",
    "Expires",
    "Group",
    "Lease",
    "MaxAttempts",
    "MaxHold",
    "Mode",
    "Order",
    "SlowLane",
    "Start",
    "StartAt",
    "Topic",
    "duration",
    "headers",
    "moment",
    "place",
    "seconds",
    "size",
    "wished",
]


StartAt: TypeAlias = str | datetime | dict[int, int]
"""Where to start, stop or go: "earliest", "latest", a moment, or offsets by partition."""

Topic = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="The topic.", show_default=False, autocompletion=names.topics),
]
AnyTopic = Annotated[
    str | None,
    typer.Argument(
        metavar="[TOPIC]",
        help="Only this topic. Default: all.",
        show_default=False,
        autocompletion=names.topics,
    ),
]
AnyGroup = Annotated[
    str | None,
    typer.Argument(
        metavar="[GROUP]",
        help="Only this group. Default: all.",
        show_default=False,
        autocompletion=names.groups,
    ),
]
Group = Annotated[
    str,
    typer.Argument(metavar="GROUP", help="The group.", show_default=False, autocompletion=names.groups),
]

_OFFSETS = re.compile(r"\d+=\d+(,\d+=\d+)*")


def place(text: str, *, name: str, partition: int | None = None) -> StartAt:
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


# ---- a group's settings as options, for the commands that may make or change a group ----
# Decides their names and what they say of themselves. Must pass on only what was asked for: what is left
# out is whatever the group has, and never conflicts.

Start = Annotated[
    str | None,
    typer.Option(
        help="Where a new group starts: earliest, latest, 2026-01-31T08:00:00Z, or offsets 0=12,1=40.",
        show_default=False,
    ),
]
Lease = Annotated[
    str | None, typer.Option(help='How long a delivered message is invisible to others, such as "30s".')
]
MaxAttempts = Annotated[int | None, typer.Option(help="Attempts before a message is a dead letter.")]
Mode = Annotated[
    str | None,
    typer.Option(
        help="shared: any member takes any message; ordered: keys keep their order; "
        "broadcast: every member gets every message."
    ),
]
Order = Annotated[
    str | None,
    typer.Option(help="With --mode ordered, what keeps its order: key (each key), or partition (all of it)."),
]
Exhausted = Annotated[
    str | None,
    typer.Option(
        help="After the last attempt: dead (dead letters), or stop (ordered groups: its key waits)."
    ),
]
MaxHold = Annotated[
    str | None,
    typer.Option(help='Ordered groups: how long a failing message may hold its key, such as "1h".'),
]
Expires = Annotated[
    str | None,
    typer.Option(help='Forget the group when nobody used it for so long, such as "7d"; 0: never.'),
]


SlowLane = Annotated[
    str | None,
    typer.Option(
        help="Sources that fail or take long are read apart: on, off, or "
        "failures=0.5,at_least=20,handling=5s,window=1m,clean=5m,share=0.1,header=source.",
        show_default=False,
    ),
]


def slow_lane(text: str | None) -> Any:
    """Return it as the SDK takes it; what is left out has its default, and none is no limit."""
    if text is None or text in ("on", "off"):
        return None if text is None else text == "on"
    from postroom import SlowLane as Lane

    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _LANE:
            names = ", ".join(_LANE)
            raise typer.BadParameter(f"--slow-lane {text!r}: on, off, or a list of {names}, each with =value")
        try:
            given[name] = None if value == "none" else _LANE[name](value)
        except ValueError:
            raise typer.BadParameter(f"--slow-lane: {name}={value!r} is not a number") from None
    return Lane(**given)


_LANE: dict[str, Any] = {
    "failures": float, "at_least": int, "handling": str, "window": str, "clean": str, "share": float,
    "header": str,
}  # fmt: skip


def wished(
    *,
    start: str | None = None,
    lease: str | None = None,
    max_hold: str | None = None,
    expires: str | None = None,
    lane: str | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Settings as the SDK takes them; only those that were asked for."""
    where: StartAt | None = None if start is None else place(start, name="--start")
    asked = {
        "start": where,
        "lease": duration(lease, name="--lease"),
        "max_hold": duration(max_hold, name="--max-hold"),
        "expires": duration(expires, name="--expires"),
        "slow_lane": slow_lane(lane),
        **others,
    }
    return {name: value for name, value in asked.items() if value is not None}
