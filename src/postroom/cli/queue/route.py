"""`postroom route …`: show the route of a topic, and split, merge and move its partitions, live (R25 to R27).

A change asks no question: nothing is lost by it, and another change undoes it. `--dry-run` shows the route as
it would be. What may be changed, and what not, is decided where every other caller is told so, too.

`postroom route apply PLAN` carries out a split plan, step by step (R47). It shows every step before the
first, and each one as it is done. A plan for another version of the route, or for another topic, is refused.
What is done already is found in the route itself, so that a plan which was interrupted goes on where it
stopped. A step is one change of the route, whole or not at all (I11): there is no half of one, and what is
left is said.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...address import FIRST_SHARD
from ...config import DEFAULTS
from ...errors import InvalidSetting, PostroomError, RouteConflict, StoreUnavailable
from ...units import format_duration
from ..framework import exits, names, show
from ..framework import terminal as ask
from ..framework.command import Run, command, family
from ..framework.options import Topic
from . import route_picture as picture

if TYPE_CHECKING:
    from postroom import Connection, GroupInfo, Lag, Route

    from ...model.topology.route import Draft
    from ...model.topology.split_plan import SplitPlan, Step


__all__ = ["app"]


StepsOnly = Annotated[bool, typer.Option("--dry-run", help="Show the steps; change nothing.")]
app = family("route", "Show which partition takes which slots; split, merge and move partitions.")


@command(app, "apply")
async def apply(
    run: Run,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="As `postroom pipeline hotspots` writes it.")],
    dry_run: StepsOnly = False,
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

    deadline = time.monotonic() + DEFAULTS.tuning.cli.route_wait_s
    while (change := await mq.route_change(topic)) is not None:
        if time.monotonic() > deadline:
            raise RouteConflict(f"{picture.change_line(change)}; try again when it is done")
        await asyncio.sleep(DEFAULTS.tuning.cli.route_check_s)


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


Partition = Annotated[int, typer.Argument(metavar="PARTITION", help="Its number.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the route before and after; change nothing.")]


@command(app, "show")
async def show_route(
    run: Run,
    topic: Topic,
    group: Annotated[
        str | None, typer.Option("--group", "-g", help="Only this group.", show_default=False)
    ] = None,
    versions: Annotated[bool, typer.Option("--versions", help="Also all earlier versions.")] = False,
) -> None:
    """Show the route of a topic: slots, partitions, what follows what, and where each group is."""
    async with run.connect() as mq:
        route = await mq.route(topic)
        change = await mq.route_change(topic)
        lags = await _lags(mq, topic, group)
        ends = await _ends(mq, topic)
        history = await mq.route_history(topic) if versions else []
    if run.json:
        found: dict[str, Any] = {
            "topic": topic,
            "version": route.version,
            "partitions": picture.partition_fields(route, ends),
            "change": picture.change_fields(change),
            "groups": [picture.group_fields(lag, info.settings.mode) for info, lag in lags],
        }
        if versions:
            found["versions"] = [_version_fields(old) for old in history]
        show.json_line(found)
        return
    _print_route(f"topic {topic}, version {route.version} of its route", route, ends)
    out = show.console()
    for step in picture.lineage(route):
        out.print(f"  {step}")
    if change is not None:
        out.print(picture.change_line(change))
    if lags and (route.sealed or group is not None):
        groups = [picture.group_row(lag, info.settings.mode) for info, lag in lags]
        out.print(show.table(("group", "mode", "has to read", "waits"), groups))
    if history:
        out.print(show.table(("version", "partitions"), map(_version_row, history), numbers=("version",)))


async def _lags(mq: Connection, topic: str, group: str | None) -> list[tuple[GroupInfo, Lag]]:
    """Return the lag of the group that is named, or of all; nothing while a shard is away."""
    infos = await mq.groups(topic)
    if group is not None:
        await mq.lag(topic, group)  # raises, with a suggestion, if there is no such group
        infos = [info for info in infos if info.name == group]
    try:
        return [(info, await mq.lag(topic, info.name)) for info in infos]
    except StoreUnavailable as error:
        exits.say_note(f"where groups are is not known just now: {error}")
        return []


async def _ends(mq: Connection, topic: str) -> dict[int, int]:
    try:
        return await mq.offsets(topic)
    except StoreUnavailable as error:
        exits.say_note(f"where partitions end is not known just now: {error}")
        return {}


def _print_route(title: str, route: Route, ends: dict[int, int]) -> None:
    out = show.console()
    rows = picture.rows(route, ends, out.width)
    out.print(show.table(picture.COLUMNS, rows, numbers=picture.NUMBERS, title=title))


def _version_row(route: Route) -> tuple[str, str]:
    return str(route.version), ", ".join(f"{r.partition} ({picture.span(r)})" for r in route.ranges)


def _version_fields(route: Route) -> dict[str, Any]:
    return {"version": route.version, "ranges": [picture.range_fields(piece) for piece in route.ranges]}


# ---- changes ----


@command(app, "split")
async def split(
    run: Run,
    topic: Topic,
    partition: Partition,
    at: Annotated[
        int | None,
        typer.Option(help="The slot that the second part begins with; else the middle.", show_default=False),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Put two partitions in the place of one, live and in order."""
    from ...model.topology import route as routes

    async with run.connect() as mq:
        if dry_run:
            _refuse_internal(topic)
            await _preview(run, mq, topic, lambda route: routes.split(route, partition, at))
        else:
            await _change(run, mq, topic, [partition], lambda: mq.split(topic, partition, at=at), "split")


@command(app, "merge")
async def merge(
    run: Run,
    topic: Topic,
    one: Annotated[int, typer.Argument(metavar="A", help="A partition.", show_default=False)],
    other: Annotated[int, typer.Argument(metavar="B", help="Its neighbour.", show_default=False)],
    dry_run: DryRun = False,
) -> None:
    """Put one partition in the place of two neighbours, live and in order."""
    from ...model.topology import route as routes

    async with run.connect() as mq:
        if dry_run:
            await _preview(run, mq, topic, lambda route: routes.merge(route, one, other))
        else:
            await _change(run, mq, topic, [one, other], lambda: mq.merge(topic, one, other), "merged")


@command(app, "move")
async def move(
    run: Run,
    topic: Topic,
    partition: Partition,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="SHARD",
            help="The shard it goes to; else the one with the fewest partitions.",
            show_default=False,
            autocompletion=names.shards,
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Move a partition to another shard, live and in order."""
    from ...model.topology import route as routes

    _refuse_unnamed(run, to)
    async with run.connect(create_shards=not dry_run) as mq:
        if not dry_run:
            await _change(run, mq, topic, [partition], lambda: mq.move(topic, partition, shard=to), "moved")
        elif to is None:
            raise typer.BadParameter("--dry-run needs --to: which shard has room is found out by the move")
        else:
            await _preview(run, mq, topic, lambda route: routes.move(route, partition, to or FIRST_SHARD))


def _refuse_unnamed(run: Run, name: str | None) -> None:
    """The queue may know the shard; without its address nothing can be moved there. Brokers have theirs."""
    if run.address.kind == "postroom":
        return
    if name is None:
        if not run.shards:
            raise InvalidSetting("there is no other shard here: name one with --shard NAME=URL")
        return
    if name in ("", FIRST_SHARD) or name in run.shards:
        return
    known = ", ".join([FIRST_SHARD, *run.shards])
    raise InvalidSetting(
        f"there is no shard {name!r} here, only {known}: name its database with --shard {name}=URL, or in "
        "POSTROOM_SHARDS"
    )


def _refuse_internal(topic: str) -> None:
    from ...model.topology.names import is_internal

    if is_internal(topic):
        raise InvalidSetting(f"topic {topic!r} belongs to a group and keeps its one partition")


async def _change(
    run: Run, mq: Connection, topic: str, numbers: list[int], change: Callable[[], Awaitable[Route]], did: str
) -> None:
    before = await mq.route(topic)
    began = time.perf_counter()
    after = await change()
    took_ms = (time.perf_counter() - began) * 1000
    seals = [before.of_partition(number) for number in numbers]
    known = {piece.partition_id for piece in before.partitions}
    opened = [
        new
        for new in after.ranges
        if new.partition_id not in known and any(old.overlaps(new) for old in seals)
    ]
    if run.json:
        opens = [picture.range_fields(piece) for piece in opened]
        fields = {"topic": topic, "sealed": numbers, "opened": opens, "version": after.version}
        show.json_line({"changed": did, **fields, "took_ms": round(took_ms, 1)})
        return
    old = " and ".join(map(str, numbers))
    new = " and ".join(
        f"{piece.partition} (slots {picture.span(piece)}, shard {picture.shard_name(piece.shard)})"
        for piece in opened
    )
    plural = "" if len(numbers) == 1 else "s"
    took = format_duration(max(1, round(took_ms)))
    typer.echo(
        f"{did} partition{plural} {old} of topic {topic} into {new} in {took}: version {after.version}"
    )


async def _preview(run: Run, mq: Connection, topic: str, wanted: Callable[[Route], Draft]) -> None:
    """Show what would come of a change. The store numbers what opens, so that has no number here."""
    before = await mq.route(topic)
    draft = wanted(before)
    names = [(-1 - n, -1 - n) for n in range(len(draft.opens))]
    after = before.after(draft.numbered(0, 0, names))
    change = await mq.route_change(topic)
    if change is not None:
        exits.say_note(f"{picture.change_line(change)}; until it is done, others are refused")
    if run.json:
        show.json_line(
            {
                "dry_run": True,
                "topic": topic,
                "sealed": [piece.partition for piece in draft.seals],
                "before": _version_fields(before),
                "after": _version_fields(after),
            }
        )
        return
    ends = await _ends(mq, topic)
    _print_route(f"topic {topic}, version {before.version}: as it is", before, ends)
    _print_route(f"version {after.version}: as it would be (dry run, nothing was changed)", after, ends)
