"""`postroom pipeline audit | backlog | hotspots`: what the jobs that look at a queue have found.

They change nothing in it. An audit that is not clean ends with exit code 1, and names the file with all that
is bad. A split plan is a file, too: `postroom route apply` carries it out.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InvalidSetting
from ...units import duration_ms, format_bytes, format_duration, moment_ms
from ..framework import exits, show
from ..framework import options as values
from ..framework.command import Run
from ..framework.options import Topic
from .frame import Master, Memory, queue_options, spark_session, stepping

if TYPE_CHECKING:
    from ...spark.jobs.audit import Audited
    from ...spark.jobs.backlog import Backlogged, Window
    from ...spark.jobs.fields import Journal
    from ...spark.jobs.hotspots import Heat, Hotspots

__all__ = ["audit", "backlog", "hotspots"]

NOT_CLEAN = exits.CROSSED
_SHOWN_WINDOWS = 60

Since = Annotated[
    str | None,
    typer.Option(help="From when on: a moment, or how long ago, such as 1h.", show_default=False),
]
Until = Annotated[str | None, typer.Option(help="Up to when, likewise.", show_default=False)]
IdField = Annotated[
    str, typer.Option("--id", help="Where a message has its id: id, key, value, place, header:N or json:F.")
]


def _when(text: str | None, name: str) -> int | None:
    """A moment, or how long ago."""
    if text is None:
        return None
    try:
        return time.time_ns() // 1_000_000 - duration_ms(text, name=name)
    except InvalidSetting:
        spelling = "a moment such as 2026-01-31T08:00:00Z, or how long ago, such as 1h"
        return moment_ms(values.moment(text, name=name, spelling=spelling), name=name)


def _journal(source: str, id: str | None, at: str | None) -> Journal:
    from ...spark.jobs.fields import Journal

    return Journal(source, id or "id", at or "")


# ---- audit ----


def audit(
    run: Run,
    topic: Topic,
    number: Annotated[
        str | None,
        typer.Option(
            help="Where messages have a running number: header:NAME or json:FIELD.", show_default=False
        ),
    ] = None,
    stream: Annotated[str, typer.Option(help="What has a running number of its own.")] = "key",
    first_number: Annotated[
        int | None, typer.Option(help="The number that each begins with.", show_default=False)
    ] = None,
    id: IdField = "id",
    sent: Annotated[
        str | None, typer.Option(help="Ids that were sent: a file, or topic:NAME.", show_default=False)
    ] = None,
    sent_id: Annotated[str | None, typer.Option(help="Its column with the id.", show_default=False)] = None,
    sent_at: Annotated[
        str | None, typer.Option(help="Its column with the order.", show_default=False)
    ] = None,
    handled: Annotated[
        list[str] | None,
        typer.Option(help="Ids that were handled, likewise; several times for several.", show_default=False),
    ] = None,
    handled_id: Annotated[
        str | None, typer.Option(help="Its column with the id.", show_default=False)
    ] = None,
    handled_at: Annotated[
        str | None, typer.Option(help="Its column with the order.", show_default=False)
    ] = None,
    order: Annotated[bool, typer.Option("--order/--no-order", help="Whether keys keep their order.")] = True,
    waiting_after: Annotated[
        str | None,
        typer.Option(help="What was stored since then may still wait to be handled.", show_default=False),
    ] = None,
    since: Since = None,
    until: Until = None,
    report: Annotated[
        Path | None, typer.Option(help="For what is bad. Default: audit-TOPIC.jsonl", show_default=False)
    ] = None,
    master: Master = None,
    memory: Memory = "2g",
) -> None:
    """Find what was lost, repeated or put out of order."""
    from ...spark.jobs.audit import AuditOptions
    from ...spark.jobs.audit import audit as job

    options = AuditOptions(
        queue=queue_options(run),
        topic=topic,
        start_ms=_when(since, "--since"),
        end_ms=_when(until, "--until"),
        number=number,
        stream=stream,
        first_number=first_number,
        id=id,
        sent=_journal(sent, sent_id, sent_at) if sent is not None else None,
        handled=tuple(_journal(one, handled_id, handled_at) for one in handled or ()),
        order=order,
        waiting_after_ms=_when(waiting_after, "--waiting-after"),
        report=str(report or f"audit-{topic}.jsonl"),
    )
    with stepping(run, "starting Spark") as step, spark_session(run, master, memory) as spark:
        found = job(spark, options, progress=step)
    _show_audit(run, found)
    if not found.clean:
        raise typer.Exit(NOT_CLEAN)


def _show_audit(run: Run, found: Audited) -> None:
    if run.json:
        counted = {"messages": found.messages, "verdict": found.verdict, "clean": found.clean}
        show.json_line({**asdict(found), **counted, "seconds": round(found.seconds, 1)})
        return
    rows = [
        ("looked at", name.replace("_", " "), "–", show.count(n)) for name, n in found.counts.items() if n
    ]
    rows += [(one.stage, one.kind, one.by, show.count(one.messages)) for one in found.bad]
    if found.waiting:
        rows.append(("handled", "waiting", "id", show.count(found.waiting)))
    title = f"topic {found.topic}, audit of level {found.level}"
    show.console().print(
        show.table(("stage", "what", "told by", "messages"), rows, numbers=("messages",), title=title)
    )
    for text in found.unchecked:
        exits.say_note(f"not checked: {text}")
    if found.clean:
        typer.echo("verdict: clean")
    else:
        typer.echo(f"verdict: not clean; each message that is bad is in {found.report}")


# ---- backlog ----


def backlog(
    run: Run,
    topic: Topic,
    window: Annotated[str, typer.Option(help="How long a window is.")] = "1m",
    handled: Annotated[
        str | None,
        typer.Option(help="Ids and when each was handled: a file, or topic:NAME.", show_default=False),
    ] = None,
    handled_id: Annotated[
        str | None, typer.Option(help="Its column with the id.", show_default=False)
    ] = None,
    handled_at: Annotated[
        str | None, typer.Option(help="Its column with the time.", show_default=False)
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Instead: how far a group was behind, as JSON lines.", show_default=False),
    ] = None,
    id: IdField = "id",
    charts: Annotated[
        Path | None, typer.Option(help="A folder for charts (PNG).", show_default=False)
    ] = None,
    since: Since = None,
    until: Until = None,
    master: Master = None,
    memory: Memory = "2g",
) -> None:
    """Show arrival, handling and waiting times, by window."""
    from ...spark.jobs.backlog import BacklogOptions
    from ...spark.jobs.backlog import backlog as job

    options = BacklogOptions(
        queue=queue_options(run),
        topic=topic,
        start_ms=_when(since, "--since"),
        end_ms=_when(until, "--until"),
        window_ms=duration_ms(window, name="--window"),
        id=id,
        handled=_journal(handled, handled_id, handled_at) if handled is not None else None,
        samples=samples,
        charts=None if charts is None else str(charts),
    )
    with stepping(run, "starting Spark") as step, spark_session(run, master, memory) as spark:
        found = job(spark, options, progress=step)
    _show_backlog(run, found)


def _show_backlog(run: Run, found: Backlogged) -> None:
    if run.json:
        show.json_line({**asdict(found), "peak": found.peak, "seconds": round(found.seconds, 1)})
        return
    if not found.windows:
        odd = f", but for {found.odd:,} with a time that cannot be" if found.odd else ""
        show.nothing(f"topic {found.topic} has no messages in this range{odd}")
        return
    columns: tuple[str, ...] = ("arrived", "handled", "behind", "p50", "p95", "p99", "longest")
    if found.source == "samples":
        columns = ("arrived", "handled", "behind", "wait, about")
    elif found.source == "arrival":
        columns = ("arrived",)
    rows = [(show.moment(w.start_ms), *_cells(w)[: len(columns)]) for w in found.windows[-_SHOWN_WINDOWS:]]
    title = f"topic {found.topic}, windows of {format_duration(found.window_ms)}"
    show.console().print(show.table(("from", *columns), rows, numbers=columns, title=title))
    if len(found.windows) > _SHOWN_WINDOWS:
        exits.say_note(
            f"{len(found.windows) - _SHOWN_WINDOWS:,} earlier windows are left out; --json has all"
        )
    typer.echo(_backlog_line(found))
    for chart in found.charts:
        typer.echo(f"chart: {chart}")


def _cells(window: Window) -> list[str]:
    cells = [show.count(window.arrived), _known(window.handled), _known(window.behind)]
    if window.waits is None:
        about = window.about_wait_ms
        return [*cells, "–" if about is None else format_duration(about), "–", "–", "–"]
    waits = window.waits
    return [*cells, *map(format_duration, (waits.p50_ms, waits.p95_ms, waits.p99_ms, waits.max_ms))]


def _known(number: int | None) -> str:
    return "–" if number is None else show.count(number)


def _backlog_line(found: Backlogged) -> str:
    text = f"{show.messages(found.arrived)} arrived"
    if found.handled is not None:
        text += f", {show.count(found.handled)} handled"
    if found.peak is not None:
        text += f"; at most {show.count(found.peak)} behind"
    if found.waits is not None:
        half, most = format_duration(found.waits.p50_ms), format_duration(found.waits.p99_ms)
        text += f"; half waited up to {half}, 99 % up to {most}"
    if found.odd:
        text += f"; {show.messages(found.odd)} with a time that cannot be, in no window"
    return text


# ---- hotspots ----


def hotspots(
    run: Run,
    topic: Topic,
    weigh: Annotated[str, typer.Option(help="What a load is counted in: messages or bytes.")] = "messages",
    factor: Annotated[
        float, typer.Option(help="The heaviest partition may have so many times the mean.")
    ] = 1.5,
    max_partitions: Annotated[
        int | None, typer.Option(help="Not more than that, after the plan.", show_default=False)
    ] = None,
    merge_cold: Annotated[bool, typer.Option("--merge-cold", help="Also merge cold neighbours.")] = False,
    top: Annotated[int, typer.Option(help="So many keys and slots are shown.")] = 10,
    plan: Annotated[
        Path | None, typer.Option(help="The plan's file. Default: split-plan-TOPIC.json", show_default=False)
    ] = None,
    since: Since = None,
    until: Until = None,
    master: Master = None,
    memory: Memory = "2g",
) -> None:
    """Find hot keys, slots and partitions, and write a split plan."""
    from ...spark.jobs.hotspots import HotspotsOptions
    from ...spark.jobs.hotspots import hotspots as job

    options = HotspotsOptions(
        queue=queue_options(run),
        topic=topic,
        start_ms=_when(since, "--since"),
        end_ms=_when(until, "--until"),
        weigh=weigh,  # type: ignore[arg-type]  # checked there
        factor=factor,
        max_partitions=max_partitions,
        merge_cold=merge_cold,
        top=top,
    )
    with stepping(run, "starting Spark") as step, spark_session(run, master, memory) as spark:
        found = job(spark, options, progress=step)
    path = _write_plan(found, plan or Path(f"split-plan-{topic}.json"))
    if run.json:
        fields = {**asdict(found), "even": found.plan.even, "plan_file": None if path is None else str(path)}
        show.json_line({**fields, "seconds": round(found.seconds, 1)})
    elif not found.messages:
        show.nothing(f"topic {topic} has no messages in this range")
    else:
        _show_hotspots(found, path)


def _write_plan(found: Hotspots, path: Path) -> Path | None:
    """Write the plan and return its path; None if there is nothing to do."""
    from ...files import write_private
    from ...model.split_plan_file import plan_to_text

    if not found.plan.steps:
        return None
    try:
        write_private(path, plan_to_text(found.plan))
    except OSError as error:
        raise InvalidSetting(f"the plan {path} cannot be written: {error.strerror}") from None
    return path


def _show_hotspots(found: Hotspots, path: Path | None) -> None:
    out = show.console()
    for title, name, heats in (
        (f"topic {found.topic}, version {found.plan.version} of its route", "partition", found.partitions),
        ("the hottest keys", "key", found.keys),
        ("the hottest slots", "slot", found.slots),
    ):
        slot = ("slot",) if name == "key" else ()
        hot = ("advice",) if any(heat.too_hot for heat in heats) else ()
        columns = (name, *slot, "messages", "bytes", "share", *hot)
        rows = [_heat_row(heat, with_slot=bool(slot))[: len(columns)] for heat in heats]
        out.print(show.table(columns, rows, numbers=("slot", "messages", "bytes", "share"), title=title))
    if found.keyless or found.placed:
        exits.say_note(
            f"{show.messages(found.keyless)} without a key and {show.count(found.placed)} with a slot of "
            "their own are in no slot's load"
        )
    for line in _advice(found, path):
        typer.echo(line)


def _heat_row(heat: Heat, *, with_slot: bool) -> tuple[str, ...]:
    load = (show.count(heat.messages), format_bytes(heat.bytes), f"{heat.share:.1%}")
    hot = "too hot to split" if heat.too_hot else ""
    return (heat.name, *((str(heat.slot),) if with_slot else ()), *load, hot)


def _advice(found: Hotspots, path: Path | None) -> list[str]:
    from ...model.topology.split_plan import heaviest

    plan, lines = found.plan, []
    for key in found.hot_keys:
        lines.append(
            f"key {key.name} alone has {key.share:.0%} of the load: a split puts it apart, and does not "
            "make it faster. Use finer keys, if its order allows"
        )
    now, then = heaviest(plan.before), heaviest(plan.after)
    if path is None:
        enough = f"within the factor {plan.factor:g}" if plan.even else "and no split makes it lighter"
        lines.append(f"no plan: the heaviest partition has {now:.1f} times the mean, {enough}")
        return lines
    splits = sum(step.do == "split" for step in plan.steps)
    merges = len(plan.steps) - splits
    done = [f"{splits} split{'' if splits == 1 else 's'}"] if splits else []
    done += [f"{merges} merge{'' if merges == 1 else 's'}"] if merges else []
    most, least = max(p.load for p in plan.before), max(p.load for p in plan.after)
    lines.append(
        f"plan: {' and '.join(done)}, from {len(plan.before)} to {len(plan.after)} partitions; the heaviest "
        f"goes from {most:,} {plan.weighed} ({now:.1f} times the mean) to {least:,} ({then:.1f} times)"
    )
    lines.append(f"written to {path}; carry it out with `postroom route apply {path}`")
    return lines
