"""`postroom group …`: create, list, show, alter, pause, resume, reset and delete groups (R12, R44)."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..framework import show
from ..framework.command import Run, command, family
from ..framework.options import (
    AnyTopic,
    Exhausted,
    Expires,
    Group,
    Lease,
    MaxAttempts,
    MaxHold,
    Mode,
    Order,
    SlowLane,
    Start,
    Topic,
    place,
    wished,
)
from ..framework.show import View, answer
from ..framework.terminal import DryRun, Losses, Yes, agreed

if TYPE_CHECKING:
    from rich.table import Table

    from postroom import Connection, GroupInfo, Lag, PartitionLag, ResetPlan

    from ...endpoint.values import PartitionReset
    from ...model.policy.settings import Mode as GroupMode
    from ...model.policy.slow_lane import LanePolicy

__all__ = ["app", "find_group"]

app = family("group", "Create, list, pause, reset, convert and delete groups.")

Force = Annotated[bool, typer.Option("--force", help="Also while members are using it.")]


@command(app, "create")
async def create(
    run: Run,
    topic: Topic,
    group: Group,
    mode: Mode = None,
    order: Order = None,
    start: Start = None,
    lease: Lease = None,
    max_attempts: MaxAttempts = None,
    exhausted: Exhausted = None,
    max_hold: MaxHold = None,
    expires: Expires = None,
    slow_lane: SlowLane = None,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Fine if it is there already, with what is asked for.")
    ] = False,
) -> None:
    """Create a group before its first consumer comes."""
    wish = wished(
        mode=mode, order=order, start=start, lease=lease, max_attempts=max_attempts,
        exhausted=exhausted, max_hold=max_hold, expires=expires, lane=slow_lane,
    )  # fmt: skip
    async with run.connect() as mq:
        info = await mq.create_group(topic, group, exist_ok=exist_ok, **wish)
    mode_said = "" if info.settings.mode == "shared" else f", in mode {info.settings.mode}"
    starts = f"it {'starts' if info.made else 'started'} {info.settings.start.said}"
    answer(run, _fields(info), f"group {group} of topic {topic} is ready{mode_said}; {starts}")


@command(app, "list")
async def list_groups(run: Run, topic: AnyTopic = None) -> None:
    """List the groups of a topic or of all, whether somebody uses them, and what they hold."""
    async with run.connect() as mq:
        names = [topic] if topic is not None else [info.name for info in await mq.topics()]
        found = [info for name in names for info in await mq.groups(name)]
        lagging = [(info, await mq.lag(info.topic, info.name)) for info in found]
    whose = "there are no groups yet" if topic is None else f"topic {topic} has no groups yet"
    ordered = any(info.settings.mode == "ordered" for info in found)
    hidden = [*(() if ordered else ("holders",)), *(() if topic is None else ("topic",))]
    _GROUP.list(run, lagging, none=f"{whose}: a group comes with its first consumer", without=hidden)


@command(app, "show")
async def show_group(run: Run, topic: Topic, group: Group) -> None:
    """Show a group: its settings, its members and where it is in each partition."""
    async with run.connect() as mq:
        info = await find_group(mq, topic, group)
        lag = await mq.lag(topic, group)
    if run.json:
        committed = {str(p.partition): p.committed for p in lag.partitions if p.topic == topic}
        show.json_line({**_listed((info, lag)), "committed": committed})
        return
    out = show.console()
    out.print(_GROUP.detail((info, lag)))
    if info.members:
        members = [(m.name, m.client, show.moment(m.joined_at)) for m in info.members]
        out.print(show.table(("member", "client", "joined"), members))
    hidden = () if info.settings.mode == "ordered" else ("holder", "stopped")
    out.print(_PROGRESS.table(lag.partitions, without=hidden))


@command(app, "alter")
async def alter(
    run: Run,
    topic: Topic,
    group: Group,
    lease: Lease = None,
    max_attempts: MaxAttempts = None,
    exhausted: Exhausted = None,
    max_hold: MaxHold = None,
    expires: Expires = None,
    slow_lane: SlowLane = None,
) -> None:
    """Change a group's settings; what is not named stays. Mode and order are for its whole life."""
    wish = wished(
        lease=lease, max_attempts=max_attempts, exhausted=exhausted, max_hold=max_hold, expires=expires,
        lane=slow_lane,
    )  # fmt: skip
    if not wish:
        raise typer.BadParameter("name at least one setting to change, such as --lease 1m")
    async with run.connect() as mq:
        info = await mq.alter_group(topic, group, **wish)
    answer(run, _fields(info), f"changed group {group} of topic {topic}")


@command(app, "pause")
async def pause(run: Run, topic: Topic, group: Group) -> None:
    """Hand out nothing to this group until it is resumed."""
    async with run.connect() as mq:
        info = await mq.pause(topic, group)
    said = f"paused group {group} of topic {topic}; go on with `postroom group resume`"
    answer(run, _fields(info), said)


@command(app, "resume")
async def resume(run: Run, topic: Topic, group: Group) -> None:
    """Go on handing out."""
    async with run.connect() as mq:
        info = await mq.resume(topic, group)
    answer(run, _fields(info), f"resumed group {group} of topic {topic}")


@command(app, "reset")
async def reset(
    run: Run,
    topic: Topic,
    group: Group,
    to: Annotated[
        str, typer.Option("--to", help="earliest, latest, 2026-01-31T08:00:00Z, or offsets 0=12,1=40.")
    ],
    force: Force = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Move a group to another place in the topic: messages are skipped, or handled once more.

    Offsets move the partitions that they name; in the others the group stays where it is.
    """
    target = place(to, name="--to")
    async with run.connect() as mq:
        await find_group(mq, topic, group)
        before = (await mq.lag(topic, group)).total
        plan = await mq.reset(topic, group, to=target, dry_run=True)
        losses: Losses = {"topic": topic, "group": group, "to": to, "behind": before.messages}
        if not _agreed_to(run, f"reset group {group!r} to {to}", losses, plan, yes=yes, dry_run=dry_run):
            return
        done = await mq.reset(topic, group, to=target, force=force)
        after = (await mq.lag(topic, group)).total
    if run.json:
        show.json_line({"reset": True, **losses, **_moved(done), "behind": after.messages})
    else:
        waiting = show.messages(after.messages, "is", "are")
        show.console().print(_moves(done))
        typer.echo(f"reset group {group} to {to}: {_counted(done)}; {waiting} waiting for it")


@command(app, "convert")
async def convert(
    run: Run,
    topic: Topic,
    group: Group,
    to: Annotated[
        str, typer.Option("--to", help="kafka: for Kafka clients; shared or ordered: for native ones.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Even if dead letters and retries are lost.")
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Make a group one of Kafka clients, or a native one: it goes on where it was.

    Nobody may be using it.
    """
    mode = cast("GroupMode", to)
    async with run.connect() as mq:
        await find_group(mq, topic, group)
        plan = await mq.convert_group(topic, group, mode, force=force, dry_run=True)
        losses: Losses = {"topic": topic, "group": group, "to": to}
        if not _agreed_to(run, f"convert group {group!r} to {to}", losses, plan, yes=yes, dry_run=dry_run):
            return
        done = await mq.convert_group(topic, group, mode, force=force)
    answer(run, {"converted": True, **losses, **_moved(done)}, f"group {group} is {to} now: {_counted(done)}")


@command(app, "delete")
async def delete(
    run: Run, topic: Topic, group: Group, force: Force = False, yes: Yes = False, dry_run: DryRun = False
) -> None:
    """Delete a group: its progress and its dead letters; the topic's messages stay."""
    async with run.connect() as mq:
        found = await find_group(mq, topic, group)
        waiting = (await mq.lag(topic, group)).total.messages
        has_letters = found.settings.mode != "kafka"
        dead = len(await mq.dead_letters(topic, group)) if has_letters else 0
        losses: Losses = {"topic": topic, "group": group, "behind": waiting, "dead_letters": dead}
        behind = f"its progress ({show.messages(waiting)} waiting)"
        counted = f"{behind} and {show.dead_letters(dead)} will be lost"
        if not agreed(run, f"delete group {group!r}", losses, yes=yes, dry_run=dry_run, counted=counted):
            return
        await mq.delete_group(topic, group, force=force)
    answer(run, {"deleted": True, **losses}, f"deleted group {group} of topic {topic}")


def _agreed_to(run: Run, deed: str, losses: Losses, plan: ResetPlan, *, yes: bool, dry_run: bool) -> bool:
    """Whether to do it, asked with what comes again and what is skipped, partition by partition."""
    return agreed(
        run,
        deed,
        {**losses, **_moved(plan)},
        yes=yes,
        dry_run=dry_run,
        counted=_counted(plan),
        detail=lambda: show.console().print(_moves(plan)),
    )


def _moved(plan: ResetPlan) -> dict[str, Any]:
    lines = [asdict(line) for line in plan.partitions]
    return {"again": plan.again, "skipped": plan.skipped, "partitions": lines}


def _counted(plan: ResetPlan) -> str:
    again, skipped = show.messages(plan.again, "comes", "come"), show.messages(plan.skipped, "is", "are")
    return f"{again} again, {skipped} skipped"


def _moves(plan: ResetPlan) -> Table:
    """Return a table with a line for each partition, and in mode "broadcast" for each member."""
    alone = all(line.group == plan.name for line in plan.partitions)
    return _RESET.table(plan.partitions, without=("group",) if alone else ())


async def find_group(mq: Connection, topic: str, name: str) -> GroupInfo:
    """The group of that name; the error names what is near."""
    for info in await mq.groups(topic):
        if info.name == name:
            return info
    await mq.lag(topic, name)  # raises UnknownGroup, with a suggestion
    raise AssertionError(f"group {name!r} came and went")  # pragma: no cover


def _fields(info: GroupInfo) -> dict[str, Any]:
    settings = info.settings
    return {
        "topic": info.topic,
        "group": info.name,
        "mode": settings.mode,
        "order": settings.order,
        "start": settings.start.encode(),
        "lease_ms": settings.lease_ms,
        "max_attempts": settings.max_attempts,
        "exhausted": settings.exhausted,
        "max_hold_ms": settings.max_hold_ms,
        "expires_ms": settings.expires_ms,
        "slow_lane": asdict(settings.slow_lane) if settings.slow_lane.on else None,
        "paused": info.paused,
        "idle_ms": info.idle_ms,
        "members": [m.name for m in info.members],
        "created_at": show.moment(info.created_at),
    }


def _listed(one: tuple[GroupInfo, Lag]) -> dict[str, Any]:
    info, lag = one
    behind, stopped = lag.total.messages, lag.total.stopped
    return {**_fields(info), "behind": behind, "stopped": stopped, "holders": _assigned(lag)}


def _assigned(lag: Lag) -> dict[str, int]:
    """Return how many partitions each member of an ordered group has."""
    return dict(Counter(part.holder for part in lag.partitions if part.holder))


def _lines(one: tuple[GroupInfo, Lag]) -> list[tuple[str, str]]:
    info, settings, ordered = one[0], one[0].settings, one[0].settings.mode == "ordered"
    if settings.mode == "kafka":  # the rest is its clients' affair
        return [("mode", "kafka"), ("generation", str(info.generation)), ("state", _state(info))]
    holding = [("max hold", show.age(settings.max_hold_ms))] if ordered else []
    return [
        ("mode", f"ordered by {settings.order}" if ordered else settings.mode),
        ("started at", settings.start.encode()),
        ("lease", show.age(settings.lease_ms)),
        ("max attempts", f"{settings.max_attempts}, then {_END[settings.exhausted]}"),
        *holding,
        *([("slow lane", _slow_lane(settings.slow_lane))] if settings.slow_lane.on else []),
        ("expires", f"when idle for {show.age(settings.expires_ms)}" if settings.expires_ms else "never"),
        ("state", _state(info)),
        ("created", show.moment(info.created_at)),
    ]


def _slow_lane(policy: LanePolicy) -> str:
    failing = [f"{policy.failures:.0%} fail"] if policy.failures else []
    long = [f"they take {show.age(policy.handling_ms)}"] if policy.handling_ms else []
    when = f"if {' or '.join(failing + long)}, of {policy.at_least} in {show.age(policy.window_ms)}"
    return f"{policy.share:.0%} for sources ({policy.header}) {when}; clean after {show.age(policy.clean_ms)}"


_END = {"dead": "dead letters", "stop": "its key stops"}


def _holders(lag: Lag) -> str:
    assigned = ", ".join(f"{name} {count}" for name, count in _assigned(lag).items())
    stopped = f"{lag.total.stopped} stopped" if lag.total.stopped else ""
    return "; ".join(filter(None, (assigned, stopped))) or "–"


def _state(info: GroupInfo) -> str:
    """Say whether a group is paused, in use, or for how long it was not used (R44)."""
    if info.paused:
        return "paused"
    return "in use" if info.idle_ms is None else f"idle {show.age(info.idle_ms)}".rstrip(" –")


_GROUP: View[tuple[GroupInfo, Lag]] = View(
    fields=_listed,
    columns={
        "topic": lambda one: one[0].topic,
        "group": lambda one: one[0].name,
        "mode": lambda one: one[0].settings.mode,
        "members": lambda one: str(len(one[0].members)),
        "state": lambda one: _state(one[0]),
        "behind": lambda one: show.count(one[1].total.messages),
        "oldest": lambda one: show.age(one[1].total.oldest_age_ms),
        "holders": lambda one: _holders(one[1]),
    },
    numbers=("members", "behind", "oldest"),
    title=lambda one: f"group {one[0].name} of topic {one[0].topic}",
    lines=_lines,
)

_PROGRESS: View[PartitionLag] = View(
    columns={
        "topic": lambda part: part.topic,
        "partition": lambda part: str(part.partition),
        "committed": lambda part: show.count(part.committed),
        "end": lambda part: show.count(part.end),
        "behind": lambda part: show.count(part.messages),
        "holder": lambda part: part.holder or "–",
        "stopped": lambda part: show.count(part.stopped),
    },
    numbers=("partition", "committed", "end", "behind", "stopped"),
)

_RESET: View[PartitionReset] = View(
    columns={
        "group": lambda line: line.group,
        "partition": lambda line: str(line.partition),
        "before": lambda line: show.count(line.before),
        "after": lambda line: show.count(line.after) if line.moved else "stays",
        "again": lambda line: show.count(line.again),
        "skipped": lambda line: show.count(line.skipped),
    },
    numbers=("partition", "before", "after", "again", "skipped"),
)
