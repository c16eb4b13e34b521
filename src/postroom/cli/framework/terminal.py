"""What a terminal is for: questions before something is destroyed, and progress of work that takes a while.

What is lost is counted before the question. `--yes` answers it, `--dry-run` only shows it. Where nobody can
answer (no terminal) and nothing was said beforehand, the answer is no. Progress is for terminals alone:
callers ask first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

import typer

from .command import Run
from .exits import AbortedError
from .show import console, json_line

__all__ = ["DryRun", "Losses", "Yes", "agreed", "checking", "copying", "sending", "working"]


Losses: TypeAlias = dict[str, Any]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be lost; change nothing.")]


def agreed(
    run: Run,
    what: str,
    losses: Losses,
    *,
    yes: bool,
    dry_run: bool,
    counted: str,
    detail: Callable[[], None] = lambda: None,
) -> bool:
    """Ask whether to go on; return False after a dry run, and raise if the answer is no.

    `what` is the deed ("delete topic 'orders'"), `counted` says what is lost, `detail` shows more of it to
    people.
    """
    if dry_run:
        if run.json:
            json_line({"dry_run": True, "would": what, **losses})
        else:
            typer.echo(f"would {what}: {counted} (dry run, nothing was changed)")
            detail()
        return False
    if yes:
        return True
    if run.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise AbortedError(f"refusing to {what} without confirmation: {counted}; pass --yes to go ahead")
    typer.secho(f"About to {what}: {counted}.", bold=True)
    detail()
    try:
        answer = input("Go on? Type y to do it [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise AbortedError("nothing was changed")
    return True


@contextmanager
def sending(total_bytes: int | None) -> Iterator[Callable[[int, int], None]]:
    """Show a bar over the bytes of a file, or a spinner; the call advances it by (messages, bytes)."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[messages]:,}[/bold] messages"),
        BarColumn(),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task("sending", total=total_bytes, messages=0, rate=0.0)
        messages = 0

        def advance(count: int, size: int) -> None:
            nonlocal messages
            messages += count
            elapsed = bars.tasks[0].elapsed or 0.0
            bars.update(task, advance=size, messages=messages, rate=messages / elapsed if elapsed else 0.0)

        yield advance


@contextmanager
def checking() -> Iterator[Callable[[str, int], None]]:
    """Show a bar over named steps; the call says which one begins, and of how many."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)
        begun = 0

        def begin(name: str, steps: int) -> None:
            nonlocal begun
            bars.update(task, total=steps, completed=begun, description=name)
            begun += 1

        yield begin


@contextmanager
def copying() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show a bar over the bytes of one file after the other; the call begins one, its result advances it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def begin(name: str) -> Callable[[int, int], None]:
            bars.reset(task, total=None, description=name)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield begin


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner beside what is being done."""
    with console(stderr=True).status(what):
        yield
