"""`postroom audit-log`: who changed what in a queue, when, from where, and what it was like before."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...units import duration_ms
from ..framework import show
from ..framework.command import Run
from ..framework.options import moment, seconds
from ..framework.show import View

if TYPE_CHECKING:
    from datetime import datetime

    from postroom import AuditEntry, Connection

__all__ = ["audit_log"]

_CHANGE_WIDTH = 100  # characters of what was changed, in a table; --json has all of it
_AT_ONCE = 1000  # entries of one answer
_AGO = re.compile(r"\d+(\.\d+)?[a-z]+")


async def audit_log(
    run: Run,
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Only what was done to it.", show_default=False)
    ] = None,
    who: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only what this principal or user did.", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Only since then: 2h, 7d or 2026-01-31T08:00:00Z.", show_default=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 50,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    interval: Annotated[str, typer.Option(help="With --watch: how often to look.")] = "1s",
) -> None:
    """Show who changed what (topics, groups, routes, limits, access, dead letters), the oldest first."""
    every_s = max(0.05, seconds(interval, name="--interval"))
    wanted: dict[str, Any] = {"topic": topic, "who": who}
    async with run.connect() as mq:
        found = await _newest(mq, limit, {**wanted, "since": None if since is None else _moment(since, mq)})
        if not watch:
            none = "nobody has changed anything" + (" of that" if topic or who or since else " yet")
            _ENTRY.list(run, found, none=none)
            return
        await _follow(run, mq, found, wanted, every_s)


async def _newest(mq: Connection, limit: int, wanted: dict[str, Any]) -> list[AuditEntry]:
    """Return that many of the newest entries, the oldest first."""
    found: list[AuditEntry] = []
    while len(found) < limit:
        before = found[-1].id if found else None
        some = await mq.audit_log(**wanted, limit=min(_AT_ONCE, limit - len(found)), before=before)
        if not some:
            break
        found += some
    return found[::-1]


async def _follow(
    run: Run, mq: Connection, found: list[AuditEntry], wanted: dict[str, Any], every_s: float
) -> None:
    """Print a line for each, and for those that come; once more for what was under way and has ended."""
    import asyncio

    last, begun = 0, set[int]()
    while True:
        for entry in found:
            if entry.id > last or (entry.id in begun and entry.outcome != "begun"):
                if run.json:
                    show.json_line(_fields(entry))
                else:
                    typer.echo(_line(entry))
        begun = {entry.id for entry in found if entry.outcome == "begun"}
        last = max((last, *(entry.id for entry in found)))
        sys.stdout.flush()
        await asyncio.sleep(every_s)
        after = min(begun, default=last + 1) - 1
        found = (await mq.audit_log(**wanted, limit=_AT_ONCE, after=after))[::-1]


def _moment(text: str, mq: Connection) -> datetime:
    """Return the moment that is meant: by the calendar, or so long ago."""
    from datetime import UTC, datetime

    if _AGO.fullmatch(text):
        ago_ms = duration_ms(text, name="--since")
        return datetime.fromtimestamp(max(0, mq._endpoint.now_ms() - ago_ms) / 1000, UTC)
    return moment(text, name="--since", spelling="2h, 7d, or a moment such as 2026-01-31T08:00:00Z")


# ---- what is shown ----


def _subject(entry: AuditEntry) -> str:
    return " / ".join(filter(None, (entry.topic, entry.group))) or "the queue"


def _change(entry: AuditEntry) -> str:
    """Return what was changed, as `name: before → after`."""
    if entry.before is None or entry.after is None:
        state = entry.after if entry.before is None else entry.before
        told = {**entry.asked, **(state or {})}
        return ", ".join(f"{name}: {_value(value)}" for name, value in told.items()) or "–"
    names = {**entry.before, **entry.after}
    moves = [f"{one}: {_value(entry.before.get(one))} → {_value(entry.after.get(one))}" for one in names]
    return ", ".join(moves) or "–"


def _value(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else show.encoded(value)


def _by(entry: AuditEntry) -> str:
    return f"{entry.who} ({entry.door}, {entry.address})"


def _line(entry: AuditEntry) -> str:
    return (
        f"{show.moment(entry.at)}  {_by(entry)}  {entry.action}  {_subject(entry)}  {entry.outcome}  "
        f"{_change(entry)}"
    )


def _fields(entry: AuditEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "at": show.moment(entry.at),
        "who": entry.who,
        "door": entry.door,
        "address": entry.address,
        "action": entry.action,
        "topic": entry.topic or None,
        "group": entry.group or None,
        "outcome": entry.outcome,
        "asked": entry.asked,
        "before": entry.before,
        "after": entry.after,
    }


_ENTRY: View[AuditEntry] = View(
    fields=_fields,
    columns={
        "when": lambda entry: show.moment(entry.at),
        "who": _by,
        "action": lambda entry: entry.action,
        "of": _subject,
        "outcome": lambda entry: entry.outcome,
        "change": lambda entry: show.short(_change(entry), _CHANGE_WIDTH),
    },
)
