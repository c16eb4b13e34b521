"""`postroom demo`: the queue at work, crashes included, and then the data pipeline, in less than a minute.

Everything happens in a folder that is fresh each time and kept afterwards, so that one can look at its queue.
A folder that the demo did not make is never touched. On a database server it makes topics of its own, and
refuses if they are there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import StoreUnavailable
from ...units import format_bytes
from ..framework import exits
from ..framework.command import Run, command, run_loop
from .cast import LEDGER
from .figures import Figures
from .scene import Scene

if TYPE_CHECKING:
    from .scene import Scene

__all__ = ["fresh", "register", "summary"]


_MARK = ".gitignore"  # keeps the folder out of repositories, and says who made it
_MARK_TEXT = "# made by `postroom demo`, which empties this folder each time\n*\n"


def register(app: typer.Typer) -> None:
    command(app, "demo", rich_help_panel="Running")(demo)


def demo(
    run: Run,
    fast: Annotated[bool, typer.Option("--fast", help="Fewer messages.")] = False,
    queue_only: Annotated[
        bool, typer.Option("--queue-only", help="Without the data pipeline, which starts Spark.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where it happens.")] = Path("postroom-demo"),
) -> None:
    """See it work: 100,000 messages, consumers killed at work, a poisonous message, order, a split, delay.

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
    from .acts import play
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
    """An empty folder; never at the cost of something that is not the demo's."""
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


# ---- closing ----
# The end of the demo: what is left in its folder, whether all is well, and what to type next.


def summary(scene: Scene, no_pipeline: str | None = None) -> None:
    """`no_pipeline`: why the data pipeline was not shown, and how to see it."""
    figures, stage = scene.figures, scene.stage
    stage.heading("What is left")
    stage.table(_files(scene.folder))
    if figures.well:
        stage.say(f"**{figures.lost:,} messages lost.** It took {figures.seconds:.1f} s.", style="green")
    else:
        stage.say(f"**{figures.lost:,} messages lost**, or not where they belong: please report it.")
    stage.heading("Try next")
    for words in _commands(scene):
        stage.line(f"{_program()} -u {figures.shown} {words}")
    if no_pipeline is not None:
        stage.heading("The data pipeline")
        stage.say(f"Archive, audit and hotspots were not shown. {no_pipeline}.")


def _files(folder: Path) -> list[tuple[str, str]]:
    """What is there, by name, but for the ledgers: there are many."""
    rows, ledgers = list[tuple[str, str]](), list[int]()
    for path in sorted(folder.iterdir()):
        size = sum(one.stat().st_size for one in path.rglob("*")) if path.is_dir() else path.stat().st_size
        if path.suffix == LEDGER:
            ledgers += [size] if size else []
        elif size and path.name[0] != ".":
            rows.append((f"{path}{'/' if path.is_dir() else ''}", format_bytes(size)))
    return [*rows, (f"{len(ledgers)} ledgers of handlers", format_bytes(sum(ledgers)))]


def _commands(scene: Scene) -> list[str]:
    orders, payments, plan = scene.topic("orders"), scene.topic("payments"), _plan(scene.figures)
    words = [f"lag {orders}", f"read {orders} --limit 3", f"group show {payments} charge"]
    return [*words, f"route apply {plan}"] if plan is not None else words


def _plan(figures: Figures) -> str | None:
    return None if figures.pipeline is None else figures.pipeline.plan


def _program() -> str:
    """How this program is called from here: by name, or by its path if it is not on the PATH."""
    beside = Path(sys.executable).parent / "postroom"
    return "postroom" if shutil.which("postroom") or not beside.exists() else os.path.relpath(beside)
