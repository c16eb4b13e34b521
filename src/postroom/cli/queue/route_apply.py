"""`postroom route apply PLAN`: carry out a split plan, step by step (R47).

Shows every step before the first, and each one as it is done. A plan for another version of the route, or for
another topic, is refused. What is done already is found in the route itself, so that a plan which was
interrupted goes on where it stopped. A step is one change of the route, whole or not at all (I11): there is
no half of one, and what is left is said.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InvalidSetting, PostroomError, RouteConflict
from ...units import format_duration
from ..framework import show
from ..framework import terminal as ask
from ..framework.command import Run
from . import route_picture as picture

if TYPE_CHECKING:
    from postroom import Connection, Route

    from ...model.topology.split_plan import SplitPlan, Step

__all__ = ["apply"]

_WAIT_S = 20.0

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the steps; change nothing.")]


async def apply(
    run: Run,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="As `postroom pipeline hotspots` writes it.")],
    dry_run: DryRun = False,
    yes: ask.Yes = False,
) -> None:
    """Carry out a split plan: split and merge partitions, live and in order."""
    from ...model.topology.split_plan import done_steps

    wanted = _read(plan)
    async with run.connect() as mq:
        await _wait_for_others(mq, wanted.topic)
        done = done_steps(wanted, await mq.route_history(wanted.topic))
        route = await mq.route(wanted.topic)
        left = wanted.steps[done:]
        if not left:
            _say_nothing_left(run, wanted, route)
            return
        if not run.json:
            _show_steps(wanted, route, done)
        what = f"carry out {_count(left)} on topic {wanted.topic!r}"
        losses: ask.Losses = {
            "topic": wanted.topic,
            "steps": len(left),
            "done": done,
            "version": route.version,
        }
        if dry_run and run.json:
            show.json_line({"dry_run": True, **losses, "would": [_fields(step) for step in left]})
            return
        counted = f"{len(route.ranges)} partitions become {len(wanted.edges_after(len(wanted.steps)))}"
        if ask.agreed(run, what, losses, yes=yes, dry_run=dry_run, counted=counted):
            await _carry_out(run, mq, wanted, done, route)


def _read(path: Path) -> SplitPlan:
    from ...model.split_plan_file import plan_from_text

    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidSetting(
            f"the plan {path} cannot be read: {error.strerror}; `postroom pipeline hotspots` makes one"
        ) from None
    try:
        return plan_from_text(text)
    except InvalidSetting as error:
        raise InvalidSetting(f"{path}: {error}") from None


async def _wait_for_others(mq: Connection, topic: str) -> None:
    """A change that somebody has begun, perhaps an earlier run of this: it is finished, or turned back."""
    import asyncio

    deadline = time.monotonic() + _WAIT_S
    while (change := await mq.route_change(topic)) is not None:
        if time.monotonic() > deadline:
            raise RouteConflict(f"{picture.change_line(change)}; try again when it is done")
        await asyncio.sleep(0.1)


# ---- what is shown before ----


def _show_steps(plan: SplitPlan, route: Route, done: int) -> None:
    rows = [
        (str(n), _sentence(step), "done" if n <= done else "to do") for n, step in enumerate(plan.steps, 1)
    ]
    title = f"topic {plan.topic}, version {route.version} of its route"
    show.console().print(show.table(("step", "what", "state"), rows, numbers=("step",), title=title))


def _sentence(step: Step) -> str:
    parts = f"{step.first_slot}-{step.at - 1} and {step.at}-{step.last_slot}"
    if step.do == "merge":
        return f"merge slots {parts}"
    return f"split slots {step.first_slot}-{step.last_slot} into {parts}"


def _fields(step: Step) -> dict[str, Any]:
    return {"do": step.do, "first_slot": step.first_slot, "last_slot": step.last_slot, "at": step.at}


def _count(steps: tuple[Step, ...]) -> str:
    return f"{len(steps)} step{'' if len(steps) == 1 else 's'}"


def _say_nothing_left(run: Run, plan: SplitPlan, route: Route) -> None:
    steps = len(plan.steps)
    if run.json:
        show.json_line({"topic": plan.topic, "steps": 0, "done": steps, "version": route.version})
    elif steps:
        typer.echo(
            f"all {steps} steps of the plan are done already: topic {plan.topic}, version {route.version}"
        )
    else:
        typer.echo(f"the plan has no steps: the load of topic {plan.topic} is even as it is")


# ---- doing it ----


async def _carry_out(run: Run, mq: Connection, plan: SplitPlan, done: int, route: Route) -> None:
    total = len(plan.steps)
    began = time.perf_counter()
    for number, step in enumerate(plan.steps[done:], done + 1):
        try:
            route = await _step(mq, plan, step, route)
        except PostroomError as error:
            raise type(error)(_stopped(error, number, total), **error.details) from error
        if not run.json:
            opened = _opened(route, step)
            typer.echo(f"step {number} of {total}: {_sentence(step)}: {opened}, version {route.version}")
    took_ms = round((time.perf_counter() - began) * 1000)
    if run.json:
        ranges = [picture.range_fields(piece) for piece in route.ranges]
        fields = {"topic": plan.topic, "steps": total - done, "done": total, "version": route.version}
        show.json_line({**fields, "ranges": ranges, "took_ms": took_ms})
        return
    typer.echo(
        f"topic {plan.topic} has {len(route.ranges)} partitions now, version {route.version} of its route, "
        f"after {_count(plan.steps[done:])} in {format_duration(max(1, took_ms))}"
    )


async def _step(mq: Connection, plan: SplitPlan, step: Step, route: Route) -> Route:
    """Partitions are named by number, which is never used again: one that others changed is refused."""
    first, second = route.of_slot(step.first_slot), route.of_slot(step.last_slot)
    if step.do == "split":
        return await mq.split(plan.topic, first.partition, at=step.at)
    return await mq.merge(plan.topic, first.partition, second.partition)


def _opened(route: Route, step: Step) -> str:
    pieces = [r for r in route.ranges if step.first_slot <= r.first_slot <= step.last_slot]
    listed = " and ".join(str(piece.partition) for piece in pieces)
    return f"partition{'' if len(pieces) == 1 else 's'} {listed}"


def _stopped(error: PostroomError, number: int, total: int) -> str:
    done = f"steps 1 to {number - 1} are done and stay so" if number > 1 else "nothing was changed before"
    return (
        f"step {number} of {total} failed: {error}. {done[0].upper()}{done[1:]}; the same command looks "
        "where the route is, and goes on from there"
    )
