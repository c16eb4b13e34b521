"""`postroom pipeline …`: the jobs on Spark (R46). Here: archive, replay, triage.

Decides the spelling of their options, checked before Spark is started, and how their results look.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...errors import InvalidSetting, UsageError
from ..framework import show
from ..framework.command import Run, command, family
from ..framework.exits import say_note
from ..framework.options import Group, Topic, place, seconds
from . import analysis
from .frame import Master, Memory, queue_options, spark_session, stepping

if TYPE_CHECKING:
    from ...spark.jobs.archive import Archived, ArchiveOptions
    from ...spark.jobs.lake import Compacted
    from ...spark.jobs.triage import Error, Triage

__all__ = ["app"]

app = family("pipeline", "Jobs on Spark: archive, replay, triage, audit and more.")

_VALUE_WIDTH = 40

Start = Annotated[
    str, typer.Option(metavar="PLACE", help="From here on: earliest, a moment, or offsets such as 0=12,1=40.")
]
Format = Annotated[str, typer.Option(help="Of the archive: delta or iceberg.")]
Catalog = Annotated[
    str,
    typer.Option(
        metavar="NAME|URI",
        help="Iceberg: the catalog that lists the table. Default: a file in the folder.",
        show_default=False,
    ),
]
End = Annotated[
    str, typer.Option(metavar="PLACE", help="Up to here, and without it: latest, a moment, or offsets.")
]


# ---- archive ----


@command(app, "archive")
def archive(
    run: Run,
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC…", help="The topics.", show_default=False)],
    to: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where the tables are: FOLDER/TOPIC.", show_default=False)
    ],
    once: Annotated[
        bool, typer.Option("--once/--continuous", help="What is there now, or on and on.")
    ] = True,
    every: Annotated[str, typer.Option(help="Continuous: how long to wait when there is nothing.")] = "10s",
    group: Annotated[
        str, typer.Option(help="The group that holds retention until it is archived.")
    ] = "archive",
    start: Annotated[str, typer.Option(help="Where a new table begins: earliest or latest.")] = "earliest",
    max_rows: Annotated[int, typer.Option(min=1, help="Messages of one commit, at most.")] = 2_000_000,
    allow_data_loss: Annotated[
        bool, typer.Option("--allow-data-loss", help="Go on without messages that were dropped before.")
    ] = False,
    set_aside_unreadable: Annotated[
        bool,
        typer.Option(
            "--set-aside-unreadable", help="Put batches that cannot be read into the quarantine, and go on."
        ),
    ] = False,
    compact: Annotated[
        bool,
        typer.Option("--compact", help="Then merge small files, and delete those of no version for 7 days."),
    ] = False,
    format: Format = "delta",
    catalog: Catalog = "",
    master: Master = None,
    memory: Memory = "2g",
) -> None:
    """Archive topics as Parquet files in Delta or Iceberg tables, each message exactly once."""
    from ...spark.jobs.archive import ArchiveOptions, check

    if start not in ("earliest", "latest"):
        raise InvalidSetting(f"--start {start!r}: choose earliest or latest")
    if not once and len(topics) != 1:
        raise UsageError("--continuous is for one topic: start a command for each")
    wanted = [
        ArchiveOptions(
            queue=queue_options(run), topic=topic, folder=to, group=group, once=once, max_rows=max_rows,
            start="earliest" if start == "earliest" else "latest", every_s=seconds(every, name="--every"),
            fail_on_data_loss=not allow_data_loss, set_aside_unreadable=set_aside_unreadable,
            format=_format(format), catalog=catalog,
        )
        for topic in topics
    ]  # fmt: skip
    run.refuse_missing()
    for options in wanted:
        check(options)  # Spark takes seconds to start
    with spark_session(run, master, memory) as spark:
        done = [_archive(run, spark, options, compact) for options in wanted]
    if run.json:
        for archived, merged in done:
            show.json_line({**asdict(archived), "compacted": None if merged is None else asdict(merged)})
        return
    _show_archived(done)


def _format(name: str) -> Literal["delta", "iceberg"]:
    if name not in ("delta", "iceberg"):
        raise InvalidSetting(f"--format {name!r}: choose delta or iceberg")
    return "iceberg" if name == "iceberg" else "delta"


def _archive(
    run: Run, spark: Any, options: ArchiveOptions, compacting: bool
) -> tuple[Archived, Compacted | None]:
    from ...spark.jobs.archive import archive, compact

    stop = threading.Event()
    if not options.once:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        say_note(f"archiving topic {options.topic} until it is stopped (Ctrl-C)")
    with stepping(run, f"archiving {options.topic} …") as step:
        done = archive(
            spark,
            options,
            stop=stop,
            progress=lambda now, of: step(
                f"archiving {options.topic}: {show.count(now)} of {show.count(of)} …"
            ),
        )
        if compacting:
            step(f"compacting {done.table} …")
        return done, compact(options) if compacting else None


def _show_archived(done: list[tuple[Archived, Compacted | None]]) -> None:
    from ...spark.jobs.lake.quarantine import REASONS
    from ...units import format_bytes

    rows = [
        (one.topic, show.count(one.messages), show.count(one.files), format_bytes(one.bytes),
         show.rate(one.messages / one.seconds), show.count(one.behind), str(one.version), one.table)
        for one, _ in done
    ]  # fmt: skip
    columns = ("topic", "archived", "files", "size", "rate", "behind", "version", "table")
    show.console().print(show.table(columns, rows, numbers=columns[1:-1]))
    for one, merged in done:
        if one.set_aside:
            why = ", ".join(f"{show.count(count)} {REASONS[name]}" for name, count in one.set_aside.items())
            say_note(f"set aside of {one.topic}: {why}; see {one.quarantine}")
        if merged is not None:
            typer.echo(
                f"compacted {one.topic}: {show.count(merged.files_before)} files before, "
                f"{show.count(merged.files_after)} now; {show.count(merged.files_deleted)} old ones deleted"
            )


# ---- replay ----


@command(app, "replay")
def replay(
    run: Run,
    topic: Topic,
    to: Annotated[str, typer.Option(metavar="TOPIC", help="The topic they go to.", show_default=False)],
    archive: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Of an archive. Default: the topic itself.", show_default=False),
    ] = None,
    start: Start = "earliest",
    end: End = "latest",
    partition: Annotated[
        list[int] | None, typer.Option(min=0, help="Only this one; repeatable.", show_default=False)
    ] = None,
    format: Format = "delta",
    catalog: Catalog = "",
    job: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Of the job: what it has published comes once. Default: a new one."),
    ] = None,
    master: Master = None,
    memory: Memory = "2g",
) -> None:
    """Publish messages of an archive, or of a topic, again, with where they were in their headers."""
    import secrets

    from ...spark.jobs.replay import ReplayOptions, check
    from ...spark.jobs.replay import replay as do

    named, job = job is not None, job or f"replay-{secrets.token_hex(4)}"
    options = ReplayOptions(
        queue=queue_options(run),
        topic=topic,
        to=to,
        job=job,
        folder=archive,
        format=_format(format),
        catalog=catalog,
        start=_bound(start, "--start", "earliest"),
        end=_bound(end, "--end", "latest"),
        partitions=tuple(partition or ()),
    )
    run.refuse_missing()
    check(options)
    if not named:
        say_note(
            f"this is job {job}: if it is cut off, run the same command with --job {job}, and it goes on"
        )
    with spark_session(run, master, memory) as spark, stepping(run, f"replaying {topic} into {to} …"):
        done = do(spark, options)
    if run.json:
        show.json_line(asdict(done))
        return
    columns = ("job", "from", "to", "published", "before", "rate")
    row = (done.job, done.source, done.to, show.count(done.messages), show.count(done.before),
           show.rate(done.messages / done.seconds))  # fmt: skip
    show.console().print(show.table(columns, [row], numbers=columns[3:]))
    if done.before:
        typer.echo(
            f"{show.messages(done.before, 'was', 'were')} left out: this job had published them before; "
            "another --job publishes them again"
        )


def _bound(text: str, name: str, whole: str) -> datetime | Mapping[int, int] | None:
    found = place(text, name=name)
    if not isinstance(found, str):
        return found
    if found != whole:
        raise InvalidSetting(f"{name} {found}: there would be nothing to replay; {name} {whole} is all of it")
    return None


# ---- triage ----


@command(app, "triage")
def triage(
    run: Run,
    topic: Topic,
    group: Group,
    redrive_list: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Make a list for `postroom dead redrive --from`.", show_default=False
        ),
    ] = None,
    error: Annotated[str, typer.Option(metavar="TEXT", help="Only errors with this text in them.")] = "",
    samples: Annotated[int, typer.Option(min=0, help="How many letters of each error are shown.")] = 3,
    limit: Annotated[int, typer.Option(min=1, help="Look at so many letters, the oldest first.")] = 1_000_000,
    master: Master = None,
    memory: Memory = "2g",
) -> None:
    """Sort a group's dead letters by error: how many, since when, and what they look like."""
    from ...spark.jobs.triage import TriageOptions
    from ...spark.jobs.triage import triage as do

    options = TriageOptions(
        queue=queue_options(run),
        topic=topic,
        group=group,
        limit=limit,
        samples=samples,
        error=error,
        redrive_list=None if redrive_list is None else str(redrive_list),
    )
    with spark_session(run, master, memory) as spark, stepping(run, "sorting dead letters …"):
        found = do(spark, options)
    if run.json:
        show.json_line({**asdict(found), "errors": [_error_fields(one) for one in found.errors]})
    elif not found.errors:
        show.nothing(f"group {group} of topic {topic} has no {'such ' if error else ''}dead letters")
    else:
        _show_errors(found)


def _error_fields(error: Error) -> dict[str, Any]:
    samples = [
        {
            "id": one.id,
            "partition": one.partition,
            "offset": one.offset,
            "key": None if one.key is None else show.text_of(one.key),
            "headers": {name: show.text_of(value) for name, value in one.headers.items()},
            "value": show.text_of(one.value),
            "reason": one.reason,
            "dead_at": show.moment(one.dead_ms),
        }
        for one in error.samples
    ]
    return {
        "error": error.error,
        "letters": error.letters,
        "keys": error.keys,
        "attempts": error.attempts,
        "first": show.moment(error.first_ms),
        "last": show.moment(error.last_ms),
        "samples": samples,
    }


def _show_errors(found: Triage) -> None:
    rows = [
        (show.short(one.error), show.count(one.letters), show.count(one.keys), str(one.attempts),
         show.moment(one.first_ms), show.moment(one.last_ms))
        for one in found.errors
    ]  # fmt: skip
    columns = ("error", "letters", "keys", "attempts", "first seen", "last seen")
    show.console().print(show.table(columns, rows, numbers=columns[1:4]))
    samples = [
        (show.short(error.error), one.id, f"{one.partition}:{one.offset}", show.text_of(one.key),
         " ".join(f"{name}={show.text_of(value)}" for name, value in one.headers.items()) or "–",
         show.short(show.text_of(one.value), _VALUE_WIDTH))
        for error in found.errors
        for one in error.samples
    ]  # fmt: skip
    if samples:
        typer.echo("")
        columns = ("error", "id", "place", "key", "headers", "value")
        show.console().print(show.table(columns, samples))
    if found.more:
        typer.echo("… and there are more than --limit: those are not looked at")
    if found.redrive_list is not None:
        typer.echo(
            f"{found.redrive_list} lists {show.dead_letters(found.letters)}: `postroom dead redrive "
            f"{found.topic} {found.group} --from {found.redrive_list}` hands them back"
        )


for job in (analysis.audit, analysis.backlog, analysis.hotspots):
    command(app, job.__name__)(job)
