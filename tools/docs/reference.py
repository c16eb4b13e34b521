"""The reference of the Python API and of the command line, as Markdown, from signatures, docstrings and help.

    python -m tools.docs.reference        # print it

Decides which names stand on which page: every public name on one, and on one only. It is not committed: it is
the code, and the site has it as the code is. Must never show what is private.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer

import postroom
from postroom import errors
from postroom.cli.root import app

__all__ = ["GROUPS", "Page", "pages"]

# By what one does with them; what is not listed is a value that calls return.
GROUPS: dict[str, tuple[str, ...]] = {
    "Connection": ("connect", "Connection"),
    "Sending": ("Message", "Receipt", "Producer", "Outbox", "OutboxStatus", "Spool", "Spooled"),
    "Consuming": ("Consumer", "Received", "DeadLetter", "Stopped", "Backoff"),
    "App and tasks": ("App", "Task", "Batch", "RetryLater", "Dead", "AppHealth", "HandlerHealth"),
}
MODULES = ("guards", "sync", "tracing")
GIVEN = ("Connection", "Producer", "Consumer", "Task")  # what calls return: nobody makes one by hand
_PRIVATE = re.compile(r"\bpostroom(?:\.\w+)+\.(?=[A-Z])")


@dataclass(frozen=True)
class Page:
    title: str
    path: str
    text: str


@cache
def pages() -> tuple[Page, ...]:
    listed = {name for names in GROUPS.values() for name in names}
    failures = {name for name in postroom.__all__ if hasattr(errors, name)}
    values = tuple(sorted(set(postroom.__all__) - listed - failures - set(MODULES)))
    found = [_python(title, names) for title, names in {**GROUPS, "Values": values}.items()]
    return (*found, _commands())


def _python(title: str, names: tuple[str, ...]) -> Page:
    parts = [f"# {title}", f"Of `postroom`: {', '.join(f'`{name}`' for name in names)}."]
    for name in names:
        parts += _described(name, getattr(postroom, name))
    path = f"reference/{title.lower().replace(' ', '-')}.md"
    return Page(f"Python: {title[:1].lower()}{title[1:]}", path, "\n\n".join(parts) + "\n")


def _described(name: str, value: Any) -> Iterator[str]:
    yield f"## {name}"
    if name not in GIVEN:
        yield _signature(f"postroom.{name}", value)
    yield _prose(value)
    if isinstance(value, type):
        for inner, member in _members(value):
            yield f"### {name}.{inner}"
            if callable(member):
                yield _signature(inner, member)
            yield _prose(member)


def _members(value: type) -> Iterator[tuple[str, Any]]:
    for name in sorted(name for name in dir(value) if not name.startswith("_")):
        member = inspect.getattr_static(value, name)
        member = getattr(member, "__func__", member)
        if inspect.isfunction(member) or isinstance(member, property):
            yield name, member


def _signature(name: str, value: Any) -> str:
    try:
        shown = str(inspect.signature(value))
    except (TypeError, ValueError):
        shown = "(…)"
    shown = _PRIVATE.sub("", shown).replace("(self, ", "(").replace("(self)", "()").replace("'", "")
    word = "await " if inspect.iscoroutinefunction(value) else ""
    return f"```python\n{_wrapped(word + name, shown)}\n```"


def _wrapped(name: str, signature: str) -> str:
    """On one line if it fits, else a parameter a line."""
    if len(name + signature) <= 100 or not signature.startswith("("):
        return name + signature
    inner, depth, parts = "", 0, []
    head, _, result = signature.rpartition(")")
    for char in head[1:]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(inner.strip())
            inner = ""
        else:
            inner += char
    lines = "\n".join(f"    {part}," for part in (*parts, inner.strip()) if part)
    return f"{name}(\n{lines}\n){result}"


def _prose(value: Any) -> str:
    """The docstring, in which what is indented is an example."""
    text = value.__doc__ or ""  # its own, not that of a parent
    if inspect.isclass(value) and text.startswith(f"{value.__name__}("):
        return ""  # written by dataclass: the signature says it
    return inspect.cleandoc(text)


# ---- the command line ----


def _commands() -> Page:
    top: Any = typer.main.get_command(app)
    parts = ["# Commands", "What `postroom COMMAND --help` says, on one page.", *_options_of(top)]
    for name, command in top.commands.items():
        below = getattr(command, "commands", None)
        if below is None:
            parts += _command(f"postroom {name}", command)
        else:
            parts += [f"## postroom {name}", _help(command)]
            for inner, one in below.items():
                parts += _command(f"postroom {name} {inner}", one, level="###")
    return Page("Command line", "reference/commands.md", "\n\n".join(parts) + "\n")


def _command(name: str, command: Any, level: str = "##") -> Iterator[str]:
    yield f"{level} {name}"
    yield _help(command)
    words = [f"[{one.name.upper()}]" if not one.required else one.name.upper() for one in _arguments(command)]
    yield f"```console\n$ {' '.join([name, *words])} [OPTIONS]\n```"
    yield from _options_of(command)


def _help(command: Any) -> str:
    return re.sub(r"\[/?(?:bold|cyan|dim)\]", "", command.help or "")


def _arguments(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "argument"]


def _options_of(command: Any) -> Iterator[str]:
    rows = []
    for one in command.params:
        if getattr(one, "hidden", False) or not getattr(one, "help", None):
            continue
        option = one.param_type_name == "option"
        names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts)) if option else one.name
        variable = f" (`{one.envvar}`)" if getattr(one, "envvar", None) else ""
        rows.append(f"| {names if option else names.upper()} | {one.help}{variable} |".replace("\n", " "))
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows])


if __name__ == "__main__":
    print("\n".join(page.text for page in pages()))
