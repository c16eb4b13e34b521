"""`postroom status`: everything there is at a glance, and what needs somebody's attention (R43).

A line for each group, and one for each topic that nobody reads. Below them what is wrong, each with the
command that says more: dead letters, stopped keys, groups that are paused or that nobody reads. `--check`
makes that the exit code 3, for monitors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import CatalogError
from ...model.topology.names import base_of, dead_topic
from ...units import format_duration
from ..framework import exits, show
from ..framework.command import Run
from ..framework.options import seconds
from ..framework.show import View, keep_showing
from ..messages.dead import dead_letter_count

if TYPE_CHECKING:
    from rich.console import RenderableType

    from postroom import Connection, GroupInfo, PartitionLag, ShardInfo, TopicInfo

__all__ = ["status"]


@dataclass(frozen=True, slots=True)
class _Line:
    """A topic and one of its groups; None: nobody reads the topic."""

    topic: TopicInfo
    group: GroupInfo | None = None
    lag: PartitionLag | None = None
    members: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True)
class _Status:
    lines: list[_Line]
    shards: list[ShardInfo]

    @property
    def attention(self) -> list[str]:
        """What somebody should look at, and how."""
        found = [said for line in self.lines for said in _wrong(line)]
        return found + [f"shard {one.name} is unreachable" for one in self.shards if one.state == "away"]


async def status(
    run: Run,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 3 if anything needs attention, for monitors.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it, until Ctrl-C.")] = False,
    interval: Annotated[str, typer.Option(help="With --watch: how often.")] = "2s",
) -> None:
    """Show all topics and groups: how far behind they are, dead letters, who reads them, what is wrong."""
    every_s = max(0.05, seconds(interval, name="--interval"))
    async with run.connect() as mq:
        if watch:
            await keep_showing(run, lambda: _status(mq), _fields, _render, every_s)
        found = await _status(mq)
    if run.json:
        show.json_line(_fields(found))
    else:
        show.console().print(_render(found))
    if check and (wrong := found.attention):
        exits.say_error("attention", "; ".join(wrong), as_json=run.json)
        raise typer.Exit(exits.CROSSED)


# ---- what there is ----


async def _status(mq: Connection) -> _Status:
    topics = await mq.topics(internal=True)
    names = {topic.name for topic in topics}
    lines: list[_Line] = []
    for topic in topics:
        if not topic.internal:
            lines += await _lines(mq, topic, names)
    shards = await mq.shards()
    return _Status(lines, shards if len(shards) > 1 else [])


async def _lines(mq: Connection, topic: TopicInfo, names: set[str]) -> list[_Line]:
    try:
        groups = await mq.groups(topic.name)
    except CatalogError:  # it was deleted meanwhile
        return []
    live = {group.name: len(group.members) for group in groups}
    for group in groups:  # members of a broadcast group have groups of their own
        if (base := base_of(group.name)) is not None:
            live[base] = live.get(base, 0) + len(group.members)
    found = []
    for group in groups:
        if base_of(group.name) is None:
            try:
                lag = (await mq.lag(topic.name, group.name)).total
            except CatalogError:
                continue
            dead = 0
            if dead_topic(topic.name, group.name) in names:
                dead = await dead_letter_count(mq, topic.name, group.name)
            found.append(_Line(topic, group, lag, live[group.name], dead))
    return found or [_Line(topic)]


# ---- what is wrong ----


def _wrong(line: _Line) -> Iterator[str]:
    if line.group is None or line.lag is None:
        return
    topic, group, lag = line.topic.name, line.group.name, line.lag
    which = f"group {group} of topic {topic}"
    if line.dead:
        yield f"{which} has {show.dead_letters(line.dead)}: `postroom dead list {topic} {group}`"
    if lag.stopped:
        keys = "1 stopped key" if lag.stopped == 1 else f"{show.count(lag.stopped)} stopped keys"
        yield f"{which} has {keys}: `postroom stopped list {topic} {group}`"
    if line.group.paused:
        yield f"{which} is paused: `postroom group resume {topic} {group}`"
    elif not line.members and lag.messages:
        behind = show.messages(lag.messages, "waits", "wait")
        yield (
            f"{behind} for {which}, which nobody reads: start its consumers, or "
            f"`postroom group delete {topic} {group}`"
        )


def _state(line: _Line) -> str:
    if line.group is None or line.lag is None:
        return "no group"
    if line.group.paused:
        return "paused"
    if line.lag.stopped:
        return "keys stopped"
    if line.members:
        return "behind" if line.lag.drain_eta_s is None and line.lag.messages else "ok"
    idle = line.group.idle_ms
    return "nobody reads it" if idle is None else f"nobody reads it for {format_duration(idle)}"


# ---- how it looks ----


def _render(found: _Status) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    if not found.lines:
        return Text("no topics yet: `postroom topic create NAME` makes one", style="dim")
    shown = {
        "delayed": any(line.topic.delayed for line in found.lines),
        "stopped": any(line.lag is not None and line.lag.stopped for line in found.lines),
    }
    hidden = [name for name, some in shown.items() if not some]
    parts: list[RenderableType] = [_LINE.table(found.lines, without=hidden)]
    if wrong := found.attention:
        parts += [Text(""), Text("Needs attention:"), *(Text(f"  {said}") for said in wrong)]
    else:
        parts += [Text(""), Text("Nothing needs attention.", style="dim")]
    return Group(*parts)


def _fields(found: _Status) -> dict[str, Any]:
    return {
        "groups": [_line_fields(line) for line in found.lines],
        "shards": [{"name": one.name, "state": one.state} for one in found.shards],
        "attention": found.attention,
    }


def _line_fields(line: _Line) -> dict[str, Any]:
    group, lag = line.group, line.lag
    return {
        "topic": line.topic.name,
        "messages": line.topic.messages,
        "delayed": line.topic.delayed,
        "group": None if group is None else group.name,
        "mode": None if group is None else group.settings.mode,
        "members": line.members,
        "behind": None if lag is None else lag.messages,
        "oldest_age_ms": None if lag is None else lag.oldest_age_ms,
        "first_wait_ms": None if lag is None else lag.first_wait_ms,
        "first_wait_p50_ms": None if lag is None else lag.first_wait_p50_ms,
        "first_wait_p95_ms": None if lag is None else lag.first_wait_p95_ms,
        "arrival_per_s": None if lag is None else round(lag.arrival_per_s, 1),
        "drain_per_s": None if lag is None else round(lag.drain_per_s, 1),
        "dead_letters": line.dead,
        "stopped": 0 if lag is None else lag.stopped,
        "paused": group is not None and group.paused,
        "state": _state(line),
    }


def _of_lag(show_it: Callable[[PartitionLag], str]) -> Callable[[_Line], str]:
    return lambda line: "–" if line.lag is None else show_it(line.lag)


_LINE: View[_Line] = View(
    columns={
        "topic": lambda line: line.topic.name,
        "messages": lambda line: show.count(line.topic.messages),
        "delayed": lambda line: show.count(line.topic.delayed),
        "group": lambda line: "–" if line.group is None else line.group.name,
        "members": lambda line: str(line.members),
        "behind": _of_lag(lambda lag: show.count(lag.messages)),
        "oldest": _of_lag(lambda lag: show.age(lag.oldest_age_ms)),
        "waited": _of_lag(lambda lag: show.age(lag.first_wait_ms)),
        "p95": _of_lag(lambda lag: show.wait(lag.first_wait_p95_ms)),
        "in": _of_lag(lambda lag: show.rate(lag.arrival_per_s)),
        "out": _of_lag(lambda lag: show.rate(lag.drain_per_s)),
        "dead": lambda line: show.count(line.dead),
        "stopped": _of_lag(lambda lag: show.count(lag.stopped)),
        "state": _state,
    },
    numbers=(
        "messages",
        "delayed",
        "members",
        "behind",
        "oldest",
        "waited",
        "p95",
        "in",
        "out",
        "dead",
        "stopped",
    ),
)
