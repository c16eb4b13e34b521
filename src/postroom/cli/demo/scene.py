"""What all acts share: how much happens, where, the stage that shows it, and the figures so far."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...config import DEFAULTS
from ...errors import PostroomError
from .figures import Figures

if TYPE_CHECKING:
    from postroom import Lag

__all__ = ["Scale", "Scene", "Stage", "until"]


_WIDTH = 100


class Stage:
    """The stage shows headings, sentences, and the lag as it falls.

    On a terminal the lag is a table that stays where it is; in a log it is a line a second. The stage says
    only what it is given: every number comes from a measurement.
    """

    def __init__(self, *, quiet: bool) -> None:
        terminal = sys.stdout.isatty()
        self._console = Console(quiet=quiet, width=None if terminal else _WIDTH, highlight=False)
        self._live: Live | None = None
        self._alive = terminal and not quiet
        self._began = self._line_at = time.monotonic()

    def heading(self, title: str) -> None:
        self._console.print()
        self._console.print(Text(title, style="bold cyan"))

    def say(self, text: str, *, style: str = "") -> None:
        """One sentence; **words** between stars stand out."""
        parts = text.split("**")
        styled = [(part, "bold" if at % 2 else style) for at, part in enumerate(parts)]
        self._print(Text.assemble(*styled))

    def line(self, text: str) -> None:
        """Something to copy: never cut in two."""
        self._console.print(Text(f"  {text}"), soft_wrap=True)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        grid = Table.grid(padding=(0, 2, 0, 0))
        for name, value in rows:
            grid.add_row(Text(name, style="dim"), Text(value))
        self._print(grid)

    def columns(self, rows: Sequence[Sequence[str]]) -> None:
        """The first row is the heading; all but the first column are numbers."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        for at in range(len(rows[0])):
            grid.add_column(justify="right" if at else "left")
        for at, row in enumerate(rows):
            grid.add_row(*(Text(cell, style="bold" if at else "dim") for cell in row))
        self._print(grid)

    def _print(self, what: RenderableType) -> None:
        self._console.print(_indented(what))

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[str], None]]:
        """Around work that takes seconds: a spinner on a terminal, a line before it in a log."""
        if not self._alive:
            self.say(what, style="dim")
            yield lambda text: None
            return
        with self._console.status(what) as status:
            yield status.update

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around work whose lag is shown."""
        self._began = time.monotonic()
        self._line_at = self._began
        if not self._alive:
            yield
            return
        with Live(console=self._console, auto_refresh=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def lag(self, lags: Sequence[Lag], total: int, *, last: bool) -> None:
        if self._live is not None:
            self._live.update(_indented(_lag_table(lags, total)), refresh=True)
        elif last or time.monotonic() >= self._line_at:
            self._line_at += DEFAULTS.tuning.cli.demo_line_s
            behind = " · ".join(f"{lag.group} {lag.total.messages:,} behind" for lag in lags)
            self.say(f"{time.monotonic() - self._began:4.1f} s  {behind}", style="dim")


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, 2))


def _lag_table(lags: Sequence[Lag], total: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for lag in lags:
        done = total - lag.total.messages
        table.add_row(
            Text(lag.group, style="bold"),
            ProgressBar(total=total, completed=done, width=40, complete_style="cyan", finished_style="green"),
            Text(f"{lag.total.messages:,} behind", justify="right"),
            Text(f"{lag.total.drain_per_s:,.0f}/s", style="dim", justify="right"),
        )
    return table


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale says how much happens, and how fast."""

    messages: int = 100_000
    watch_s: float = 4.0  # about how long handling takes
    lease: str = "2s"  # of the groups in the second act
    payments: int = 12
    poison_lease: str = "500ms"
    accounts: int = 20
    bookings: int = 50  # of each account
    order_lease: str = "1500ms"
    trade_keys: int = 40
    between_s: float = 0.6  # two changes of the route
    reminders: int = 200
    latest_s: float = 2.0  # the last reminder is due after so long

    @staticmethod
    def fast() -> Scale:
        return Scale(
            messages=4_000, watch_s=1.0, lease="500ms", payments=4, poison_lease="300ms",
            accounts=10, bookings=20, order_lease="700ms", between_s=0.2, reminders=50, latest_s=0.6,
        )  # fmt: skip

    def pause(self, processes: int) -> str:
        """Return how long each handler waits per message, so that the whole takes about `watch_s`."""
        return f"pause={self.watch_s * processes / self.messages:.9f}"


@dataclass(frozen=True, slots=True)
class Scene:
    """One run of the demo."""

    folder: Path
    scale: Scale
    stage: Stage
    figures: Figures
    prefix: str = ""  # of topics: on somebody's own database they are told from his

    def topic(self, name: str) -> str:
        return f"{self.prefix}{name}"


async def until(holds: Callable[[], Coroutine[Any, Any, bool]], failure: str) -> None:
    """Wait for a condition; a demo that hangs says what did not happen."""
    patience_s = DEFAULTS.tuning.cli.demo_patience_s
    give_up = time.monotonic() + patience_s
    while not await holds():
        if time.monotonic() > give_up:
            raise PostroomError(f"{failure} within {patience_s:.0f} s")
        await asyncio.sleep(DEFAULTS.tuning.cli.demo_check_s)
