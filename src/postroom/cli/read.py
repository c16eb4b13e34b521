"""`postroom read`: browse a topic without a group; nothing is acked, nothing changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .frame import Run, command
from .messages import Format, Printer
from .values import Topic, place

if TYPE_CHECKING:
    from postroom import Received

__all__ = ["register"]

_AT_ONCE = 500


def register(app: typer.Typer) -> None:
    command(app, "read", rich_help_panel="Messages")(read)


async def read(
    run: Run,
    topic: Topic,
    start: Annotated[
        str | None,
        typer.Option(
            help="Where to begin: earliest, latest, 2026-01-31T08:00:00Z, offsets 0=12,1=40, or, with "
            "--partition, an offset. Default: earliest; with --follow, latest.",
            show_default=False,
        ),
    ] = None,
    end: Annotated[
        str | None, typer.Option(help="Where to stop, written like --start. Default: what is there now.")
    ] = None,
    partition: Annotated[int | None, typer.Option("--partition", "-p", help="Only this partition.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after so many.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-F", help="Go on as messages arrive.")] = False,
    format: Format = None,
) -> None:
    """Browse a topic: no group, no ack, nothing changes."""
    if follow and end is not None:
        raise UsageError("--follow has no --end: leave one of them out")
    printer = Printer(format, as_json=run.json)
    first = place(start or ("latest" if follow else "earliest"), name="--start", partition=partition)
    last = None if end is None else place(end, name="--end", partition=partition)
    async with run.connect() as mq:
        messages = mq.read(topic, start=first, end=last, partition=partition, follow=follow)
        async with aclosing(messages):
            await _print(messages, printer, limit, at_once=1 if follow else _AT_ONCE)


async def _print(
    messages: AsyncIterator[Received], printer: Printer, limit: int | None, at_once: int
) -> None:
    waiting: list[Received] = []
    async for message in messages:
        waiting.append(message)
        enough = limit is not None and printer.printed + len(waiting) >= limit
        if enough or len(waiting) >= at_once:
            printer.print(waiting)
            waiting = []
        if enough:
            return
    printer.print(waiting)
