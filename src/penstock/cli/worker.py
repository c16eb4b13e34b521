"""`penstock worker module:app`: run an application's handlers until it is told to stop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .frame import Run, command

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    command(app, "worker", rich_help_panel="Running")(worker)


def worker(
    run: Run,
    app: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:APP", help="Where the App is, such as orders:app.", show_default=False
        ),
    ],
) -> None:
    """Run the handlers of a penstock.App. Modules of this folder can be imported. Ctrl-C drains and stops."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    from ..client.app import load_app

    load_app(app).run()
