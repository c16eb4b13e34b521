"""`penstock demo`: the queue at work, crashes included, in less than half a minute.

Everything happens in a folder that is fresh each time and kept afterwards, so that one can look at its queue.
A folder that the demo did not make is never touched. On a database server it makes topics of its own, and
refuses if they are there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ...errors import StoreUnavailable
from .. import exits
from ..frame import Run, command

__all__ = ["register"]

_MARK = ".gitignore"  # keeps the folder out of repositories, and says who made it
_MARK_TEXT = "# made by `penstock demo`, which empties this folder each time\n*\n"


def register(app: typer.Typer) -> None:
    command(app, "demo", rich_help_panel="Running")(demo)


async def demo(
    run: Run,
    fast: Annotated[bool, typer.Option("--fast", help="Fewer messages.")] = False,
    folder: Annotated[Path, typer.Option(help="Where it happens.")] = Path("penstock-demo"),
) -> None:
    """See it work: 100,000 messages, consumers killed at work, a poisonous message, order, a split, delay.

    Uses a SQLite file in its own folder. With --url (PENSTOCK_URL does not count) it runs on a database
    server, in topics whose names begin with "demo-".
    """
    from .acts import play
    from .figures import Figures
    from .scene import Scale, Scene
    from .stage import Stage

    _fresh(folder)
    if run.named and run.address.path is None:
        figures, prefix = Figures(url=run.url, shown=run.shown), "demo-"
    else:
        url = f"sqlite:///{folder / 'demo.db'}"
        figures, prefix = Figures(url=url, shown=url), ""
    scale = Scale.fast() if fast else Scale()
    await play(Scene(folder, scale, Stage(quiet=run.json), figures, prefix))
    if run.json:
        from ..show import json_line

        json_line(figures.fields())
    if not figures.well:
        raise typer.Exit(exits.FAILED)


def _fresh(folder: Path) -> None:
    """An empty folder; never at the cost of something that is not the demo's."""
    mark = folder / _MARK
    try:
        if folder.exists():
            if not mark.is_file() or mark.read_text() != _MARK_TEXT:
                raise StoreUnavailable(
                    f"{folder} is there and was not made by the demo: move it away, or name another --folder"
                )
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        mark.write_text(_MARK_TEXT)
    except OSError as error:
        raise StoreUnavailable(
            f"{folder} cannot be made here ({error.strerror}): name another --folder"
        ) from None
