"""A view says once how a thing is shown: its fields for scripts, its columns and lines for people.

Decides which of the two a command prints: with `--json` one line of JSON, else a table or a sentence. A
command fetches and its view prints, so that no command can forget one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import typer

from .command import Run
from .show import console, json_line, nothing, table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["View", "answer"]

X = TypeVar("X")
Lines = Iterable[tuple[str, str]]


def answer(run: Run, fields: Any, sentence: str) -> None:
    """Print what became of a command: the fields for scripts, the sentence for people."""
    if run.json:
        json_line(fields)
    else:
        typer.echo(sentence)


def _for_people_only(thing: object) -> dict[str, Any]:
    raise AssertionError(f"{thing!r} is part of another view's JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class View(Generic[X]):
    """A view shows things of one kind."""

    fields: Callable[[X], dict[str, Any]] = _for_people_only  # as JSON; scripts rely on names and order
    columns: Mapping[str, Callable[[X], str]] = field(default_factory=dict)  # of a list, with their cells
    numbers: Collection[str] = ()  # the columns that stand to the right
    title: Callable[[X], str] = str  # of one of them
    lines: Callable[[X], Lines] = lambda thing: ()  # of one of them, by name
    named: str = "setting"  # what the lines are

    def list(self, run: Run, things: Sequence[X], *, none: str = "", without: Collection[str] = ()) -> None:
        """Print all; `none` is said to people where there is nothing to list."""
        if run.json:
            json_line([self.fields(thing) for thing in things])
        elif none and not things:
            nothing(none)
        else:
            console().print(self.table(things, without=without))

    def details(self, run: Run, things: Sequence[X], *, none: str = "") -> None:
        """Print all in full: for people a table for each of them."""
        if run.json:
            json_line([self.fields(thing) for thing in things])
        elif none and not things:
            nothing(none)
        else:
            for thing in things:
                console().print(self.detail(thing))

    def table(self, things: Iterable[X], *, without: Collection[str] = (), title: str | None = None) -> Table:
        """Return a table with a row for each of them."""
        columns = {name: cell for name, cell in self.columns.items() if name not in without}
        rows = [[cell(thing) for cell in columns.values()] for thing in things]
        return table(tuple(columns), rows, numbers=self.numbers, title=title)

    def detail(self, thing: X) -> Table:
        """Return a table of two columns with all that there is to say of one."""
        return table((self.named, "value"), list(self.lines(thing)), title=self.title(thing))
