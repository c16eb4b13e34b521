"""`postroom worker module:app`: run an application's handlers until it is told to stop.

The application may name its own queue. A `--url` or POSTROOM_URL, with its shards, is used in its stead, and
that is logged; they are in the environment while the application is imported. What handlers do wrong is
logged to stderr: as lines for people, or with `--json` as objects; tokens are cut out of both.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..framework import show
from ..framework.command import Run, shard_text
from ..framework.log_lines import JsonLines, TextLines

__all__ = ["spool", "worker"]


def worker(
    run: Run,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The postroom.App, such as orders:app.")],
    create: Annotated[
        bool, typer.Option("--create", help="Create topics of the App that are missing.")
    ] = False,
) -> None:
    """Run the handlers of an App; modules of this folder can be imported. Ctrl-C lets handlers end."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if run.chosen:
        os.environ["POSTROOM_URL"] = run.url
    if run.shards:
        os.environ["POSTROOM_SHARDS"] = shard_text(run.shards)
    _log_to_stderr(run)
    from ...client.app.program import load_app

    found = load_app(app)
    if run.chosen:
        found.use(run.url, shards=run.shards or None)
    found.run(create=create)


def _log_to_stderr(run: Run) -> None:
    """Unless the application has set up its own logging, which it may still do while it is imported."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if run.json else TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("postroom").setLevel(logging.DEBUG if run.debug else logging.INFO)


# ---- `postroom spool FILE`: what waits in a spool on this machine, why, and which process has it ----
# Only looks.


def spool(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The spool, such as orders.spool.")],
) -> None:
    """Show what waits in a spool: how much, since when, and what is in the way. The queue is not asked."""
    from ...client.forward.spool_file import look

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
    from ...units import format_bytes

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
