"""`postroom lag`: how far groups are behind (R43), for people, dashboards and monitors.

One group is shown by partition, with who holds it if the group is ordered, whether it is sealed, and what is
to be read before it; a broadcast group by member. "waited" is how long what was read last had waited, "p50"
and "p95" how long half and 95 in 100 of what was first read in the last minutes had, at most. A threshold
that is crossed is exit code 3, and the line on stderr says which group crossed which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ...units import duration_ms, format_bytes, format_duration
from ..framework import exits, names, show
from ..framework.command import Run
from ..framework.options import AnyTopic, seconds
from ..framework.show import View, keep_showing

if TYPE_CHECKING:
    from rich.console import RenderableType

    from postroom import Connection, Lag, PartitionLag

__all__ = ["lag", "lag_table"]

_SHOWN = 10  # slow sources


async def lag(
    run: Run,
    topic: AnyTopic = None,
    group: Annotated[
        str | None,
        typer.Argument(
            help="Only this group: by partition, or by member.",
            show_default=False,
            autocompletion=names.groups,
        ),
    ] = None,
    max_age: Annotated[
        str | None,
        typer.Option(help='Exit 3 if the oldest waiting message is older, such as "5m".', show_default=False),
    ] = None,
    max_messages: Annotated[
        int | None, typer.Option(min=0, help="Exit 3 if more messages are waiting for a group.")
    ] = None,
    max_wait: Annotated[
        str | None,
        typer.Option(help="Exit 3 if of late 5 in 100 waited longer until first read.", show_default=False),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it, until Ctrl-C.")] = False,
    interval: Annotated[str, typer.Option(help="With --watch: how often.")] = "1s",
) -> None:
    """Show how far groups are behind: messages, bytes, age, rates, time to drain."""

    def render(lags: list[Lag]) -> RenderableType:
        return _render(topic, lags, by_partition=group is not None and len(lags) == 1)

    oldest_ms = None if max_age is None else duration_ms(max_age, name="--max-age")
    wait_ms = None if max_wait is None else duration_ms(max_wait, name="--max-wait")
    every_s = max(0.05, seconds(interval, name="--interval"))
    async with run.connect() as mq:
        if watch:
            await keep_showing(run, lambda: _lags(mq, topic, group), _all_fields, render, every_s)
        lags = await _lags(mq, topic, group)
        if not run.json:
            await _note_slow(mq, lags)
        if run.shards:
            await _note_away(mq)
    if run.json:
        show.json_line(_all_fields(lags))
    else:
        show.console().print(render(lags))
    if crossed := _crossed(lags, oldest_ms, max_messages, wait_ms):
        exits.say_error("threshold_crossed", crossed, as_json=run.json)
        raise typer.Exit(exits.CROSSED)


async def _note_away(mq: Connection) -> None:
    away = [info.name for info in await mq.shards() if info.state == "away"]
    if away:
        exits.say_note(f"shard {', '.join(away)} is away: what waits there is not counted")


async def _note_slow(mq: Connection, lags: list[Lag]) -> None:
    """Sources whose messages go to a slow lane (R42)."""
    for topic in dict.fromkeys(lag.topic for lag in lags):
        watched = {info.name for info in await mq.groups(topic) if info.settings.slow_lane.on}
        for group in [lag.group for lag in lags if lag.topic == topic and lag.group in watched]:
            found = (await mq.lanes(topic, group)).sources
            for one in found[:_SHOWN]:
                since = show.moment(one.since)
                exits.say_note(f"group {group}: source {one.source} is slow since {since}: {one.reason}")
            if len(found) > _SHOWN:
                exits.say_note(f"group {group}: and {len(found) - _SHOWN} more sources are slow")


async def _lags(mq: Connection, topic: str | None, group: str | None) -> list[Lag]:
    """One group, all of a topic, or all there are; a broadcast group is followed by its members, each of
    which is a group (R11)."""
    if topic is None:
        return [lag for info in await mq.topics() for lag in await _lags(mq, info.name, None)]
    if group is None:
        return [await mq.lag(topic, info.name) for info in await mq.groups(topic)]
    lags = [await mq.lag(topic, group)]  # raises, with a suggestion, if there is no such group
    members = [info.name for info in await mq.groups(topic) if info.name.startswith(f"{group}@")]
    return lags + [await mq.lag(topic, member) for member in members]


def _render(topic: str | None, lags: list[Lag], *, by_partition: bool) -> RenderableType:
    if not lags:
        from rich.text import Text

        whose = "there are no groups" if topic is None else f"topic {topic} has no groups"
        return Text(f"{whose}: nobody is behind", style="dim")
    if topic is None or not by_partition:
        return lag_table(lags, topics=topic is None)
    parts = [part for lag in lags for part in lag.partitions]
    ordered = any(part.holder or part.stopped for part in parts)
    changed = any(part.sealed or part.waits_for for part in parts)
    lines = [(_name(part, topic), part) for part in parts] + [(_ALL, lag.total) for lag in lags]
    hidden = [*(() if ordered else ("stopped", "holder")), *(() if changed else ("state",))]
    return _LINE.table(lines, without=("group", *hidden))


def lag_table(lags: list[Lag], *, topics: bool = False) -> RenderableType:
    """Return a table with a row for each group; `topics`: and its topic."""
    stopped = any(lag.total.stopped for lag in lags)
    lines = [(f"{lag.topic} / {lag.group}" if topics else lag.group, lag.total) for lag in lags]
    return _LINE.table(lines, without=("partition", "holder", "state", *(() if stopped else ("stopped",))))


def _state(line: _Line) -> str:
    """Say whether a partition takes messages, and what the group has to read before it (I10)."""
    name, part = line
    if name == _ALL:
        return "–"
    state = "sealed" if part.sealed else "open"
    waits_for = ", ".join(map(str, part.waits_for))
    return f"{state}, waits for {waits_for}" if waits_for else state


def _name(part: PartitionLag, topic: str) -> str:
    if part.topic == topic:
        return str(part.partition)
    return f"{part.partition} ({'slow lane' if part.topic.endswith('.slow') else 'redriven'})"


def _eta(part: PartitionLag) -> str:
    if part.messages == 0:
        return "–"
    return "never" if part.drain_eta_s is None else format_duration(round(part.drain_eta_s * 1000))


def _fields(lag: Lag) -> dict[str, Any]:
    return {
        "topic": lag.topic,
        "group": lag.group,
        **_numbers(lag.total),
        "partitions": [{**_edges(part), **_numbers(part)} for part in lag.partitions],
    }


def _all_fields(lags: list[Lag]) -> list[dict[str, Any]]:
    return [_fields(lag) for lag in lags]


def _edges(part: PartitionLag) -> dict[str, Any]:
    shown = ("topic", "partition", "committed", "end", "holder", "sealed", "waits_for")
    return {name: getattr(part, name) for name in shown}


def _numbers(part: PartitionLag) -> dict[str, Any]:
    return {
        "messages": part.messages,
        "bytes": part.bytes,
        "unsettled": part.unsettled,
        "stopped": part.stopped,
        "stopped_age_ms": part.stopped_age_ms,
        "oldest_age_ms": part.oldest_age_ms,
        "first_wait_ms": part.first_wait_ms,
        "first_wait_p50_ms": part.first_wait_p50_ms,
        "first_wait_p95_ms": part.first_wait_p95_ms,
        "arrival_per_s": round(part.arrival_per_s, 1),
        "drain_per_s": round(part.drain_per_s, 1),
        "drain_eta_s": None if part.drain_eta_s is None else round(part.drain_eta_s, 1),
    }


_Line: TypeAlias = "tuple[str, PartitionLag]"
"""A name, and the figures of a partition or of all."""

_ALL = "all"

_LINE: View[_Line] = View(
    columns={
        "partition": lambda line: line[0],
        "group": lambda line: line[0],
        "behind": lambda line: show.count(line[1].messages),
        "bytes": lambda line: format_bytes(line[1].bytes),
        "unsettled": lambda line: show.count(line[1].unsettled),
        "oldest": lambda line: show.age(line[1].oldest_age_ms),
        "waited": lambda line: show.age(line[1].first_wait_ms),
        "p50": lambda line: show.wait(line[1].first_wait_p50_ms),
        "p95": lambda line: show.wait(line[1].first_wait_p95_ms),
        "in": lambda line: show.rate(line[1].arrival_per_s),
        "out": lambda line: show.rate(line[1].drain_per_s),
        "drained in": lambda line: _eta(line[1]),
        "stopped": lambda line: show.count(line[1].stopped),
        "holder": lambda line: line[1].holder or "–",
        "state": _state,
    },
    numbers=(
        "behind",
        "bytes",
        "unsettled",
        "oldest",
        "waited",
        "p50",
        "p95",
        "in",
        "out",
        "drained in",
        "stopped",
    ),
)


def _crossed(lags: list[Lag], oldest_ms: int | None, most: int | None, wait_ms: int | None = None) -> str:
    """Say which groups are over which limit; empty if none is."""
    found = []
    for lag in lags:
        age_ms = lag.total.oldest_age_ms
        if oldest_ms is not None and age_ms > oldest_ms:
            old = f"the oldest waiting message is {format_duration(age_ms)} old"
            found.append(f"group {lag.group}: {old} (limit {format_duration(oldest_ms)})")
        p95_ms = lag.total.first_wait_p95_ms
        if wait_ms is not None and p95_ms is not None and p95_ms > wait_ms:
            long = f"of late 5 in 100 messages waited {format_duration(p95_ms)} or longer until first read"
            found.append(f"group {lag.group}: {long} (limit {format_duration(wait_ms)})")
        if most is not None and lag.total.messages > most:
            found.append(
                f"group {lag.group}: {show.messages(lag.total.messages, 'is', 'are')} waiting "
                f"(limit {show.count(most)})"
            )
    return "; ".join(found)
