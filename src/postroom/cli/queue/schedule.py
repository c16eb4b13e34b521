"""`postroom schedule …`: the recurring schedules of a queue, when they come, and who runs them.

Schedules are declared in programs (`@app.every`); the queue knows those that were started on it once. What is
wrong is said below the list: a schedule that nobody runs, one whose tick was missed, one whose runs failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..framework import exits, show
from ..framework.command import Run, command, family
from ..framework.show import View

if TYPE_CHECKING:
    from postroom import ScheduleInfo

__all__ = ["app"]

app = family("schedule", "List recurring schedules, with their next runs.")
_MOST_WORKERS = 3


@command(app, "list")
async def list_schedules(run: Run) -> None:
    """List recurring schedules: when they come next and came last, who runs them, what failed."""
    async with run.connect() as mq:
        found = await mq.schedules()
    _SCHEDULE.list(run, found, none="no recurring schedules yet: a program declares one with @app.every")
    if not run.json:
        for said in [said for one in found for said in _wrong(one)]:
            exits.say_note(said)


def _wrong(one: ScheduleInfo) -> Iterator[str]:
    if not one.workers:
        yield (
            f"nobody runs schedule {one.name}: start its workers, or, if it is gone from the program, "
            f"`postroom topic delete {one.topic}`"
        )
    elif one.missed:
        yield f"schedule {one.name} has missed a tick: its workers were away, or their logs say why"
    if one.dead:
        yield f"{one.dead} runs of {one.name} failed for good: `postroom dead list {one.topic} every`"


def _fields(one: ScheduleInfo) -> dict[str, Any]:
    return {
        "name": one.name,
        "topic": one.topic,
        "rule": one.rule,
        "timezone": one.timezone,
        "next": [show.moment(ms) for ms in one.next_ms],
        "last": None if one.last_ms is None else show.moment(one.last_ms),
        "workers": list(one.workers),
        "pending": one.pending,
        "dead": one.dead,
        "missed": one.missed,
    }


def _workers(one: ScheduleInfo) -> str:
    if not one.workers:
        return "nobody"
    more = len(one.workers) - _MOST_WORKERS
    return ", ".join(one.workers[:_MOST_WORKERS]) + (f" and {more} more" if more > 0 else "")


_SCHEDULE: View[ScheduleInfo] = View(
    fields=_fields,
    columns={
        "name": lambda one: one.name,
        "topic": lambda one: one.topic,
        "rule": lambda one: f"{one.rule or '?'} {one.timezone}".rstrip(),
        "next": lambda one: show.moment(one.next_ms[0]) if one.next_ms else "?",
        "last": lambda one: "–" if one.last_ms is None else show.moment(one.last_ms),
        "run by": _workers,
        "pending": lambda one: show.count(one.pending),
        "dead": lambda one: show.count(one.dead),
    },
    numbers=("pending", "dead"),
)
