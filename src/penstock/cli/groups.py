"""`penstock group …`: create, list, show, alter, pause, resume, reset and delete groups (R12, R44)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import show
from .ask import DryRun, Losses, Yes, agreed
from .frame import Run, command, family
from .values import Group, Place, Topic, duration, place

if TYPE_CHECKING:
    from penstock import Connection, GroupInfo

__all__ = ["Lease", "MaxAttempts", "Start", "app", "find_group", "wished"]

app = family("group", "Create, list, pause, reset and delete groups.")

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
Force = Annotated[bool, typer.Option("--force", help="Also while members are using it.")]


@command(app, "create")
async def create(
    run: Run,
    topic: Topic,
    group: Group,
    start: Start = None,
    lease: Lease = None,
    max_attempts: MaxAttempts = None,
) -> None:
    """Create a group before its first consumer comes."""
    wish = wished(start, lease, max_attempts)
    async with run.connect() as mq:
        info = await mq.create_group(topic, group, **wish)
    if run.json:
        show.json_line(_fields(info))
    else:
        typer.echo(f"group {group} of topic {topic} is there; it starts at {info.settings.start.encode()}")


@command(app, "list")
async def list_groups(run: Run, topic: Topic) -> None:
    """List the groups of a topic, whether somebody uses them, and what they hold."""
    async with run.connect() as mq:
        found = await mq.groups(topic)
        behind = {info.name: (await mq.lag(topic, info.name)).total for info in found}
    if run.json:
        show.json_line([{**_fields(i), "behind": behind[i.name].messages} for i in found])
    elif not found:
        show.nothing(f"topic {topic} has no groups yet: a group comes with its first consumer")
    else:
        columns = ("group", "members", "state", "behind", "oldest", "mode", "lease", "attempts")
        rows = [_row(info, behind[info.name]) for info in found]
        show.console().print(
            show.table(columns, rows, numbers=("members", "behind", "oldest", "lease", "attempts"))
        )


@command(app, "show")
async def show_group(run: Run, topic: Topic, group: Group) -> None:
    """Show a group: its settings, its members and where it is in each partition."""
    async with run.connect() as mq:
        info = await find_group(mq, topic, group)
        lag = await mq.lag(topic, group)
    if run.json:
        committed = {str(p.partition): p.committed for p in lag.partitions if p.topic == topic}
        show.json_line({**_fields(info), "behind": lag.total.messages, "committed": committed})
        return
    out = show.console()
    out.print(
        show.table(("setting", "value"), _lines(info), title=f"group {info.name} of topic {info.topic}")
    )
    if info.members:
        members = [(m.name, m.client, show.moment(m.joined_at)) for m in info.members]
        out.print(show.table(("member", "client", "joined"), members))
    places = [
        (p.topic, str(p.partition), show.count(p.committed), show.count(p.end), show.count(p.messages))
        for p in lag.partitions
    ]
    columns = ("topic", "partition", "committed", "end", "behind")
    out.print(show.table(columns, places, numbers=columns[1:]))


@command(app, "alter")
async def alter(
    run: Run, topic: Topic, group: Group, lease: Lease = None, max_attempts: MaxAttempts = None
) -> None:
    """Change a group's settings; what is not named stays."""
    wish = wished(None, lease, max_attempts)
    if not wish:
        raise typer.BadParameter("name at least one setting to change, such as --lease 1m")
    async with run.connect() as mq:
        info = await mq.alter_group(topic, group, **wish)
    _say(run, info, f"changed group {group} of topic {topic}")


@command(app, "pause")
async def pause(run: Run, topic: Topic, group: Group) -> None:
    """Hand out nothing to this group until it is resumed."""
    async with run.connect() as mq:
        info = await mq.pause(topic, group)
    _say(run, info, f"paused group {group} of topic {topic}; go on with `penstock group resume`")


@command(app, "resume")
async def resume(run: Run, topic: Topic, group: Group) -> None:
    """Go on handing out."""
    async with run.connect() as mq:
        info = await mq.resume(topic, group)
    _say(run, info, f"resumed group {group} of topic {topic}")


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
    """Move a group to another place in the topic: messages are skipped, or handled once more."""
    target = place(to, name="--to")
    async with run.connect() as mq:
        await find_group(mq, topic, group)
        before = (await mq.lag(topic, group)).total
        losses: Losses = {"topic": topic, "group": group, "to": to, "behind": before.messages}
        counted = f"its position is lost ({show.messages(before.messages, 'is', 'are')} waiting for it now)"
        if not agreed(
            run, f"reset group {group!r} to {to}", losses, yes=yes, dry_run=dry_run, counted=counted
        ):
            return
        await mq.reset(topic, group, to=target, force=force)
        after = (await mq.lag(topic, group)).total
    if run.json:
        show.json_line({"reset": True, **losses, "behind": after.messages})
    else:
        waiting = show.messages(after.messages, "is", "are")
        typer.echo(f"reset group {group} to {to}: {waiting} waiting for it")


@command(app, "delete")
async def delete(
    run: Run, topic: Topic, group: Group, force: Force = False, yes: Yes = False, dry_run: DryRun = False
) -> None:
    """Delete a group: its progress and its dead letters; the topic's messages stay."""
    async with run.connect() as mq:
        await find_group(mq, topic, group)
        waiting = (await mq.lag(topic, group)).total.messages
        dead = len(await mq.dead_letters(topic, group))
        losses: Losses = {"topic": topic, "group": group, "behind": waiting, "dead_letters": dead}
        behind = f"its progress ({show.messages(waiting)} waiting)"
        counted = f"{behind} and {show.dead_letters(dead)} will be lost"
        if not agreed(run, f"delete group {group!r}", losses, yes=yes, dry_run=dry_run, counted=counted):
            return
        await mq.delete_group(topic, group, force=force)
    if run.json:
        show.json_line({"deleted": True, **losses})
    else:
        typer.echo(f"deleted group {group} of topic {topic}")


async def find_group(mq: Connection, topic: str, name: str) -> GroupInfo:
    """The group of that name; the error names what is near."""
    for info in await mq.groups(topic):
        if info.name == name:
            return info
    await mq.lag(topic, name)  # raises UnknownGroup, with a suggestion
    raise AssertionError(f"group {name!r} came and went")  # pragma: no cover


def wished(start: str | None, lease: str | None, max_attempts: int | None) -> dict[str, Any]:
    """Settings as the SDK takes them; only those that were asked for."""
    where: Place | None = None if start is None else place(start, name="--start")
    asked = {
        "start": where,
        "lease": duration(lease, name="--lease"),
        "max_attempts": max_attempts,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _fields(info: GroupInfo) -> dict[str, Any]:
    settings = info.settings
    return {
        "topic": info.topic,
        "group": info.name,
        "mode": settings.mode,
        "start": settings.start.encode(),
        "lease_ms": settings.lease_ms,
        "max_attempts": settings.max_attempts,
        "paused": info.paused,
        "members": [m.name for m in info.members],
        "created_at": show.moment(info.created_at),
    }


def _lines(info: GroupInfo) -> list[tuple[str, str]]:
    settings = info.settings
    return [
        ("mode", settings.mode),
        ("started at", settings.start.encode()),
        ("lease", show.age(settings.lease_ms)),
        ("max attempts", str(settings.max_attempts)),
        ("state", _state(info)),
        ("created", show.moment(info.created_at)),
    ]


def _row(info: GroupInfo, behind: Any) -> tuple[str, ...]:
    return (
        info.name,
        str(len(info.members)),
        _state(info),
        show.count(behind.messages),
        show.age(behind.oldest_age_ms),
        info.settings.mode,
        show.age(info.settings.lease_ms),
        str(info.settings.max_attempts),
    )


def _state(info: GroupInfo) -> str:
    if info.paused:
        return "paused"
    return "in use" if info.members else "idle"


def _say(run: Run, info: GroupInfo, sentence: str) -> None:
    if run.json:
        show.json_line(_fields(info))
    else:
        typer.echo(sentence)
