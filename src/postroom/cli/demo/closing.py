"""The end of the demo: what is left in its folder, whether all is well, and what to type next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from ...units import format_bytes
from .cast import LEDGER
from .figures import Figures
from .scene import Scene

__all__ = ["summary"]


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
