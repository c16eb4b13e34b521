"""`postroom restored`: say that a queue was restored from a backup.

A database that was put back cannot tell. Whoever keeps offsets elsewhere, such as the checkpoint of a stream,
mostly sees it by itself; this settles the cases in which nothing else could.
"""

from __future__ import annotations

from contextlib import closing

import typer

from ..errors import InvalidURL
from . import show
from .frame import Run, command

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    command(app, "restored", rich_help_panel="Running")(restored)


def restored(run: Run) -> None:
    """Say that the queue was restored from a backup: the last step of a restore."""
    from ..store import open_store

    if run.address.kind not in ("sqlite", "postgresql", "mysql"):
        raise InvalidURL(
            "it is written down in the queue's database: name that with --url, such as sqlite:///postroom.db"
        )
    run.refuse_missing(shards=False)
    with closing(open_store(run.address)) as store:
        made = store.catalog.restored()
    if run.json:
        show.json_line({"url": run.shown, "incarnation": made})
    else:
        typer.echo(f"{run.shown} was restored: streams that have read what it lost will say so")
