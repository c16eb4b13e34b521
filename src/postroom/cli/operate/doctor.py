"""`postroom doctor`: is this queue well? A line for each check, with what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import PostroomError
from ..framework import exits, show
from ..framework.command import Run

if TYPE_CHECKING:
    from ..checks import Finding

__all__ = ["doctor"]

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


async def doctor(
    run: Run,
    outbox: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A database of yours with an outbox; repeatable.")
    ] = None,
    table: Annotated[str, typer.Option("--outbox-table", help="The name of its table.")] = "postroom_outbox",
    deep: Annotated[bool, typer.Option("--deep", help="Read every stored batch, not only a sample.")] = False,
) -> None:
    """Check the file, the database servers or the brokers, and the groups. Exit code 1 if something fails."""
    found = await _brokers(run) if run.address.kind == "postroom" else _examine(run)
    if not any(finding.state == "fail" for finding in found):
        found += await _inside(run, deep)
        found += _outboxes(run, outbox or [], table)
    failed = any(finding.state == "fail" for finding in found)
    if run.json:
        show.json_line({"url": run.shown, "ok": not failed, "checks": [_fields(f) for f in found]})
    else:
        _print(run, found)
    if failed:
        raise typer.Exit(exits.FAILED)


def _examine(run: Run) -> list[Finding]:
    from ..checks import examine

    found: list[Finding] = []
    for name, one in zip(("", *run.shards), run.databases(), strict=True):
        with _progress(run) as begin:
            checks = examine(one.address, begin)
        found += [replace(check, check=f"{name}: {check.check}") for check in checks] if name else checks
    return found


async def _brokers(run: Run) -> list[Finding]:
    from ..checks.queue import check_brokers

    return await check_brokers(run.address)


async def _inside(run: Run, deep: bool) -> list[Finding]:
    """Check what is seen through a connection: groups, and what is stored."""
    from ..checks import Finding
    from ..checks.queue import check_batches, check_groups

    if run.address.kind == "memory":
        return []
    found: list[Finding] = []
    try:
        async with run.connect() as mq:
            found += await check_groups(mq)
            with _progress(run) as begin:
                found += await check_batches(mq, begin, deep=deep)
    except PostroomError as error:
        name = "batches" if found else "groups"
        found.append(Finding(name, "fail", f"could not be checked: {error}"))
    return found


def _outboxes(run: Run, urls: list[str], table: str) -> list[Finding]:
    from ...address import parse
    from ..checks.queue import check_outbox

    here = run.address
    found = [] if here.kind in ("memory", "postroom") else check_outbox(here, table, named=False)
    return found + [finding for url in urls for finding in check_outbox(parse(url), table)]


def _progress(run: Run) -> AbstractContextManager[Callable[[str, int], None]]:
    if run.json or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return nullcontext(lambda name, steps: None)
    from ..framework.terminal import checking

    return checking()


def _fields(finding: Finding) -> dict[str, str]:
    fields = {"check": finding.check, "state": finding.state, "message": finding.message}
    return {**fields, "advice": finding.advice} if finding.advice else fields


def _print(run: Run, found: list[Finding]) -> None:
    from rich.text import Text

    out = show.console()
    width = max(len(finding.check) for finding in found)
    out.print(Text.assemble("the queue ", (run.shown, "bold")))
    for finding in found:
        state = (f"{finding.state:<4}", _STYLES[finding.state])
        out.print(Text.assemble("  ", state, f"  {finding.check:<{width}}  {finding.message}"))
        if finding.advice:
            out.print(Text.assemble(" " * (width + 10), ("→ ", "dim"), (finding.advice, "italic")))
    counts = {state: sum(f.state == state for f in found) for state in _STYLES}
    skipped = f", {counts['skip']} not looked at" if counts["skip"] else ""
    out.print(Text(f"{counts['ok']} ok, {counts['warn']} to check, {counts['fail']} failed{skipped}"))
