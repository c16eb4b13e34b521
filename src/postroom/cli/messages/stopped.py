"""`postroom stopped …`: list, show, restart, skip and drop what stopped its key in ordered groups (R23)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import CatalogError, UsageError
from ..framework import show
from ..framework.command import Run, command, family
from ..framework.options import Group, Topic
from ..framework.show import View, answer
from ..framework.terminal import DryRun, Losses, Yes, agreed

if TYPE_CHECKING:
    from postroom import Connection, Stopped

__all__ = ["app"]

app = family("stopped", 'List, restart, skip and drop what stopped its key in groups with exhausted="stop".')

Ids = Annotated[
    list[str] | None,
    typer.Option("--id", help="The one with this id; repeatable.", show_default=False),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", help="Those of this key; repeatable.", show_default=False),
]
All = Annotated[bool, typer.Option("--all", help="All that stopped in the group.")]
NoChange = Annotated[bool, typer.Option("--dry-run", help="Show how many; change nothing.")]
_EVERY = 2**31 - 1


@command(app, "list")
async def list_stopped(
    run: Run,
    topic: Topic,
    group: Group,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many at most.")] = 100,
) -> None:
    """List what stopped: which key, why, since when, and how many messages wait behind it."""
    async with run.connect() as mq:
        found = await mq.stopped(topic, group, limit=limit + 1)
    more, found = len(found) > limit, found[:limit]
    _STOPPED.list(run, found, none=f"nothing has stopped in group {group} of topic {topic}")
    if more and not run.json:
        typer.echo(f"… and more; --limit {limit * 10} shows them")


@command(app, "show")
async def show_stopped(run: Run, topic: Topic, group: Group, id: Ids = None, key: Keys = None) -> None:
    """Show stopped messages in full: reason, headers, value."""
    async with run.connect() as mq:
        found = await _chosen(mq, topic, group, id, key)
    _STOPPED.details(run, found, none=f"nothing has stopped in group {group} of topic {topic}")


@command(app, "restart")
async def restart(
    run: Run,
    topic: Topic,
    group: Group,
    id: Ids = None,
    key: Keys = None,
    all: All = False,
    dry_run: NoChange = False,
) -> None:
    """Handle them again, with all their attempts; what waits behind them follows in order."""
    _check_choice(id, key, all)
    async with run.connect() as mq:
        if dry_run:
            count = len(await _chosen(mq, topic, group, id, key))
        else:
            count = await mq.restart_stopped(topic, group, ids=id or None, keys=key or None)
    _say(run, topic, group, "restarted", "would restart" if dry_run else "restarted", count, dry_run=dry_run)


@command(app, "skip")
async def skip(
    run: Run,
    topic: Topic,
    group: Group,
    id: Ids = None,
    key: Keys = None,
    all: All = False,
    dry_run: NoChange = False,
) -> None:
    """Move them to the dead letters, with their reason; their keys go on without them."""
    _check_choice(id, key, all)
    async with run.connect() as mq:
        if dry_run:
            count = len(await _chosen(mq, topic, group, id, key))
        else:
            count = await mq.skip_stopped(topic, group, ids=id or None, keys=key or None)
    verb = "would skip" if dry_run else "skipped"
    note = f" to the dead letters: `postroom dead list {topic} {group}` shows them" if count else ""
    _say(run, topic, group, "skipped", verb, count, note="" if dry_run else note, dry_run=dry_run)


@command(app, "drop")
async def drop(
    run: Run,
    topic: Topic,
    group: Group,
    id: Ids = None,
    key: Keys = None,
    all: All = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Drop them unhandled: the group never sees them again; their keys go on."""
    _check_choice(id, key, all)
    async with run.connect() as mq:
        doomed = len(await _chosen(mq, topic, group, id, key))
        losses: Losses = {"topic": topic, "group": group, "stopped": doomed}
        what = f"drop what stopped in group {group!r}"
        counted = f"{show.messages(doomed)} will be lost to the group"
        if not agreed(run, what, losses, yes=yes, dry_run=dry_run, counted=counted):
            return
        count = await mq.drop_stopped(topic, group, ids=id or None, keys=key or None)
    _say(run, topic, group, "dropped", "dropped", count)


def _say(
    run: Run,
    topic: str,
    group: str,
    field: str,
    verb: str,
    count: int,
    *,
    note: str = "",
    dry_run: bool = False,
) -> None:
    fields = {"topic": topic, "group": group, field: count, "dry_run": dry_run}
    answer(run, fields, f"{verb} {show.messages(count)} of group {group}{note}")


def _check_choice(ids: list[str] | None, keys: list[str] | None, all: bool) -> None:
    if bool(ids) + bool(keys) + all != 1:
        raise UsageError("say which: --id ID, --key KEY (each repeatable), or --all")


async def _chosen(
    mq: Connection, topic: str, group: str, ids: list[str] | None, keys: list[str] | None
) -> list[Stopped]:
    """Return all of the group, or those that are named; raise if one of them is not there."""
    if ids and keys:
        raise UsageError("give --id or --key, not both")
    found = await mq.stopped(topic, group, limit=_EVERY)
    if not ids and not keys:
        return found
    what, wanted = ("id", set(ids)) if ids else ("key", set(keys or ()))
    named = [(one, one.id if ids else show.text_of(one.key)) for one in found]
    if unknown := wanted - {name for _, name in named}:
        raise CatalogError(
            f"group {group!r} of topic {topic!r} has no stopped message with the {what} {min(unknown)!r}: "
            f"stopped() lists those it has; nothing was changed"
        )
    return [one for one, name in named if name in wanted]


def _behind(one: Stopped) -> str:
    if one.behind is None:
        return "–"
    return f"{show.count(one.behind)}{'+' if one.more_behind else ''}"


def _fields(one: Stopped) -> dict[str, Any]:
    return {
        **show.message_fields(one),
        "group": one.group,
        "reason": one.reason,
        "attempts": one.attempts,
        "since": show.moment(one.since),
        "behind": one.behind,
        "more_behind": one.more_behind,
    }


def _lines(one: Stopped) -> list[tuple[str, str]]:
    headers = [(f"header {name}", show.text_of(value)) for name, value in one.headers.items()]
    return [
        ("place", f"{one.topic}, partition {one.partition}, offset {one.offset}"),
        ("key", show.text_of(one.key)),
        ("sent", show.moment(one.timestamp)),
        ("key waits since", show.moment(one.since)),
        ("wait behind it", _behind(one)),
        ("attempts", str(one.attempts)),
        ("reason", one.reason or "–"),
        *headers,
        ("value", show.text_of(one.value)),
    ]


_STOPPED: View[Stopped] = View(
    fields=_fields,
    columns={
        "id": lambda one: one.id,
        "key": lambda one: show.text_of(one.key),
        "place": lambda one: f"{one.partition}:{one.offset}",
        "attempts": lambda one: str(one.attempts),
        "since": lambda one: show.moment(one.since),
        "behind": _behind,
        "reason": lambda one: one.reason or "–",
        "value": lambda one: show.short(show.text_of(one.value)),
    },
    numbers=("attempts", "behind"),
    title=lambda one: f"stopped message {one.id}",
    lines=_lines,
    named="field",
)
