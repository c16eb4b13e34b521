"""A group's settings as options, for the commands that may make or change a group.

Decides their names and what they say of themselves. Must pass on only what was asked for: what is left out is
whatever the group has, and never conflicts.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .values import Place, duration, place

__all__ = [
    "Exhausted", "Expires", "Lease", "MaxAttempts", "MaxHold", "Mode", "Order", "SlowLane", "Start", "wished",
]  # fmt: skip

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
    """As the SDK takes it: what is left out has its default; `failures=none`: failures do not count."""
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
    where: Place | None = None if start is None else place(start, name="--start")
    asked = {
        "start": where,
        "lease": duration(lease, name="--lease"),
        "max_hold": duration(max_hold, name="--max-hold"),
        "expires": duration(expires, name="--expires"),
        "slow_lane": slow_lane(lane),
        **others,
    }
    return {name: value for name, value in asked.items() if value is not None}
