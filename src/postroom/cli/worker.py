"""`postroom worker module:app`: run an application's handlers until it is told to stop.

The application names its own queue. A `--url`, with its `--shard`s, is used in its stead, and that is logged;
they are in POSTROOM_URL and POSTROOM_SHARDS while the application is imported. What handlers do wrong is
logged to stderr: as lines for people, or with `--json` as objects.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import show
from .frame import Run, command
from .shard_urls import shard_text

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    command(app, "worker", rich_help_panel="Running")(worker)


def worker(
    run: Run,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The postroom.App, such as orders:app.")],
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
    from ..client.app.app import load_app

    found = load_app(app)
    if run.named:
        found.use(run.url, shards=run.shards or None)
    found.run()


def _log_to_stderr(run: Run) -> None:
    """Unless the application has set up its own logging, which it may still do while it is imported."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter() if run.json else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("postroom").setLevel(logging.DEBUG if run.debug else logging.INFO)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": show.moment(round(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return show.encoded(fields)
