"""Progress bars for work that takes a while. Only for terminals: callers ask first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .show import console

__all__ = ["checking", "sending", "working"]


@contextmanager
def sending(total_bytes: int | None) -> Iterator[Callable[[int, int], None]]:
    """A bar over the bytes of a file, or a spinner; the call advances it by (messages, bytes)."""
    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[messages]:,}[/bold] messages"),
        BarColumn(),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task("sending", total=total_bytes, messages=0, rate=0.0)
        messages = 0

        def advance(count: int, size: int) -> None:
            nonlocal messages
            messages += count
            elapsed = bars.tasks[0].elapsed or 0.0
            bars.update(task, advance=size, messages=messages, rate=messages / elapsed if elapsed else 0.0)

        yield advance


@contextmanager
def checking() -> Iterator[Callable[[str, int], None]]:
    """A bar over named steps; the call says which one begins, and of how many."""
    columns = (SpinnerColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)
        begun = 0

        def begin(name: str, steps: int) -> None:
            nonlocal begun
            bars.update(task, total=steps, completed=begun, description=name)
            begun += 1

        yield begin


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner beside what is being done."""
    with console(stderr=True).status(what):
        yield
