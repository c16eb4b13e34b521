"""How things look: tables for people, JSON for scripts, and messages as text.

On a terminal tables have lines and colours; in a pipe they are plain columns, never cut. Bytes that are UTF-8
are shown as text, others as base64 under a name that says so; `postroom send --jsonl` takes both back.

A view says once how a thing is shown: its fields for scripts, its columns and lines for people. It decides
which of the two a command prints: with `--json` one line of JSON, else a table or a sentence. A command
fetches and its view prints, so that no command can forget one of them.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import typer

from .command import Run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


__all__ = [
    "View",
    "age",
    "answer",
    "console",
    "content_fields",
    "count",
    "dead_letters",
    "encoded",
    "json_line",
    "keep_showing",
    "message_fields",
    "messages",
    "moment",
    "nothing",
    "rate",
    "short",
    "table",
    "text_of",
    "wait",
]


_PIPE_WIDTH = 4000  # no terminal: never cut a cell
_CELL_WIDTH = 60
X = TypeVar("X")
Lines = Iterable[tuple[str, str]]


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # the frame knows what to do; Rich would exit with 1

    stream = sys.stderr if stderr else sys.stdout
    return PipeConsole(
        stderr=stderr, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=False
    )


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    numbers: Iterable[str] = (),
    title: str | None = None,
) -> Table:
    """A table; `numbers` names the columns that stand to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    fancy = sys.stdout.isatty()
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.ROUNDED if fancy else None,
        header_style="bold cyan" if fancy else "",
        border_style="dim",
        padding=(0, 1) if fancy else (0, 2, 0, 0),
        show_edge=fancy,
    )
    right = set(numbers)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def json_line(value: Any) -> None:
    """One value on one line."""
    sys.stdout.write(encoded(value) + "\n")


def encoded(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


# ---- numbers and moments ----


def count(number: int) -> str:
    return f"{number:,}"


def messages(number: int, one: str = "", many: str = "") -> str:
    """ "1 message", "3,000 messages"; with words that must agree: "1 message is", "2 messages are"."""
    noun, verb = ("message", one) if number == 1 else ("messages", many)
    return f"{count(number)} {noun} {verb}".rstrip()


def dead_letters(number: int) -> str:
    return f"{count(number)} dead letter{'' if number == 1 else 's'}"


def rate(per_s: float) -> str:
    if 0 < per_s < 0.05:
        return "<0.1/s"
    return f"{per_s:,.0f}/s" if per_s >= 10 or per_s == 0 else f"{per_s:.1f}/s"


def age(ms: int) -> str:
    from ...units import format_duration

    return format_duration(ms) if ms else "–"


def wait(ms: int | None) -> str:
    """How long something waited; None: nothing did."""
    from ...units import format_duration

    return "–" if ms is None else format_duration(ms)


def moment(ms: int) -> str:
    """UTC, to the millisecond, as every other tool can read it; the number where no calendar has it."""
    from ...model.messages.timestamps import FIRST_SHOWN_MS, LAST_SHOWN_MS

    if not FIRST_SHOWN_MS <= ms <= LAST_SHOWN_MS:
        return f"{ms} ms"
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def keep_showing(
    run: Run,
    sample: Callable[[], Awaitable[X]],
    fields: Callable[[X], Any],
    render: Callable[[X], RenderableType],
    every_s: float,
) -> NoReturn:
    """Show what there is, again and again, until Ctrl-C: on a terminal in one place, else one below the
    other; with `--json` a line each."""
    import asyncio

    if run.json or not sys.stdout.isatty():
        while True:
            found = await sample()
            if run.json:
                json_line(fields(found))
            else:
                console().print(render(found))
            sys.stdout.flush()
            await asyncio.sleep(every_s)
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        while True:
            live.update(render(await sample()), refresh=True)
            await asyncio.sleep(every_s)


def nothing(text: str) -> None:
    """Print a line where a table would be empty."""
    console().print(f"[dim]{text}[/dim]")


# ---- messages ----


def text_of(data: bytes | None) -> str:
    """Bytes on one line for people."""
    if data is None:
        return "–"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"<{len(data)} bytes: {data[:16].hex(' ')}{' …' if len(data) > 16 else ''}>"
    return text if text.isprintable() else repr(text)[1:-1]


def short(text: str, width: int = _CELL_WIDTH) -> str:
    """Return a text that fits into a cell: cut at the width, with a sign that it was."""
    return text if len(text) <= width else text[: width - 1] + "…"


def message_fields(message: Any) -> dict[str, Any]:
    """A message as JSON: what `send --jsonl` takes, and where it was."""
    where = {"topic": message.topic, "partition": message.partition, "offset": message.offset}
    return where | content_fields(message)


def content_fields(message: Any) -> dict[str, Any]:
    """What a message is as JSON, wherever it is."""
    fields: dict[str, Any] = {
        "id": message.id,
        "timestamp": moment(message.timestamp),
        **_bytes("key", message.key),
        **_bytes("value", message.value),
    }
    if message.headers:
        fields["headers"] = _header_texts(message.headers)
    return fields


def _bytes(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _header_texts(headers: Mapping[str, bytes]) -> dict[str, str]:
    return {name: value.decode(errors="backslashreplace") for name, value in headers.items()}


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
