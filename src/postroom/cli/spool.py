"""`postroom spool FILE`: what waits in a spool on this machine, why, and which process has it. Only looks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import show
from .frame import Run, command

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    command(app, "spool", rich_help_panel="Running")(spool)


def spool(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The spool, such as orders.spool.")],
) -> None:
    """Show what waits in a spool: how much, since when, and what is in the way. The queue is not asked."""
    from ..client.spool.file import look

    found = look(file.absolute())
    if run.json:
        show.json_line(
            {
                "file": str(file),
                "messages": found.messages,
                "bytes": found.bytes,
                "oldest_age_ms": found.oldest_age_ms,
                "owner": found.owner.pid if found.owner else None,
                "stuck": found.stuck,
                "troubles": {topic: trouble._asdict() for topic, trouble in found.troubles.items()},
            }
        )
        return
    from ..units import format_bytes

    out = show.console()
    out.print(f"the spool {file}", style="bold", markup=False)
    oldest = f", the oldest since {show.age(found.oldest_age_ms)}" if found.messages else ""
    out.print(f"  {found.messages:,} messages, {format_bytes(found.bytes)}{oldest}")
    out.print(
        f"  in use by {found.owner}" if found.owner else "  no process has it: nothing is forwarded now"
    )
    for topic, trouble in found.troubles.items():
        what = f"topic {topic}" if topic else "the queue"
        state = "stuck" if trouble.stuck else "waits"
        out.print(f"  {state}  {what}: {trouble.reason}", markup=False, soft_wrap=True)
