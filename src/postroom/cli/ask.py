"""Asking before something is destroyed.

What is lost is counted before the question. `--yes` answers it, `--dry-run` only shows it. Where nobody can
answer (no terminal) and nothing was said beforehand, the answer is no.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import typer

from .exits import AbortedError
from .frame import Run
from .show import json_line

__all__ = ["DryRun", "Losses", "Yes", "agreed"]

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
    """Whether to go on. `what` is the deed ("delete topic 'orders'"), `counted` says what is lost.

    `detail` shows more of it to people.
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
        raise AbortedError(f"refusing to {what} without being asked: {counted}; add --yes if that is meant")
    typer.secho(f"About to {what}: {counted}.", bold=True)
    detail()
    try:
        answer = input("Go on? Type y to do it [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise AbortedError("nothing was changed")
    return True
