"""`postroom demo`: the queue at work, crashes included, and then the data pipeline, in less than a minute.

Everything happens in a folder that is fresh each time and kept afterwards, so that one can look at its queue.
A folder that the demo did not make is never touched. On a database server it makes topics of its own, and
refuses if they are there.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import StoreUnavailable
from ..framework import exits
from ..framework.command import Run, run_loop

if TYPE_CHECKING:
    from .scene import Scene

__all__ = ["demo", "fresh"]


_MARK = ".gitignore"  # keeps the folder out of repositories, and says who made it
_MARK_TEXT = "# made by `postroom demo`, which empties this folder each time\n*\n"


def demo(
    run: Run,
    fast: Annotated[bool, typer.Option("--fast", help="Fewer messages.")] = False,
    queue_only: Annotated[
        bool, typer.Option("--queue-only", help="Without the data pipeline, which starts Spark.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where it happens.")] = Path("postroom-demo"),
) -> None:
    """See it work: 100,000 messages, consumers killed at work, a poison message, order, a split, delay.

    Then archive, audit and hotspots on Spark, where it is installed. Uses a SQLite file in its own folder.
    With --url (POSTROOM_URL does not count) it runs on a database server, in topics whose names begin
    with "demo-".
    """
    from .figures import Figures
    from .scene import Scale, Scene, Stage

    fresh(folder)
    if run.named and run.address.path is None:
        figures, prefix = Figures(url=run.url, shown=run.shown), "demo-"
    else:
        url = f"sqlite:///{folder / 'demo.db'}"
        figures, prefix = Figures(url=url, shown=url), ""
    scale = Scale.fast() if fast else Scale()
    _tell(Scene(folder, scale, Stage(quiet=run.json), figures, prefix), run, queue_only=queue_only)
    if run.json:
        from ..framework.show import json_line

        json_line(figures.fields())
    if not figures.well:
        raise typer.Exit(exits.FAILED)


def _tell(scene: Scene, run: Run, *, queue_only: bool) -> None:
    from .acts import play, summary
    from .pipeline import run_jobs, why_not

    began = time.perf_counter()
    run_loop(play(scene))
    missing = None if queue_only else why_not()
    if not queue_only and missing is None:
        run_jobs(scene, run)
    scene.figures.seconds = time.perf_counter() - began
    (scene.folder / "figures.json").write_text(json.dumps(scene.figures.fields(), indent=2))
    summary(scene, no_pipeline=missing)


def fresh(folder: Path) -> None:
    """Make the folder new and empty; one that the demo did not make is refused, never emptied."""
    mark = folder / _MARK
    try:
        if folder.exists():
            if not mark.is_file() or mark.read_text() != _MARK_TEXT:
                raise StoreUnavailable(
                    f"{folder} is there and was not made by the demo: move it away, or name another --folder"
                )
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700, parents=True)
        mark.write_text(_MARK_TEXT)
    except OSError as error:
        raise StoreUnavailable(
            f"{folder} cannot be made here ({error.strerror}): name another --folder"
        ) from None
