"""What the pages state agrees with the code: tables, links, names and commands."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
import typer

import postroom
from postroom import errors
from postroom.cli.root import app
from postroom.config import DEFAULTS, Limits
from postroom.model.messages.slot import TEST_VECTORS
from postroom.store import contract
from postroom.units import format_bytes, format_duration
from tests.docs.pages import PAGES, ROOT, blocks, code_spans, headings, links, page_id, table

DOCS = ROOT / "docs"
MAX_LINES = 160


def plain(rows: list[list[str]]) -> list[list[str]]:
    return [[cell.replace("`", "") for cell in row] for row in rows]


# --- tables ------------------------------------------------------------------------------------------


def test_the_table_of_errors_is_the_tree_of_errors() -> None:
    shown = [tuple(row[:3]) for row in plain(table(DOCS / "errors.md", "All errors"))]
    assert shown == list(error_rows(errors.PostroomError, depth=0))


def error_rows(kind: type[errors.PostroomError], depth: int) -> Iterator[tuple[str, str, str]]:
    yield "– " * depth + kind.__name__, kind.code, "yes" if kind.retriable else "no"
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from error_rows(below, depth + 1)


def test_the_table_of_limits_is_the_code() -> None:
    shown = {row[0]: row[1] for row in plain(table(DOCS / "operations.md", "Limits and defaults"))}
    assert shown == {field.name: limit(field.name) for field in fields(Limits) if field.name != "tuning"}


def limit(name: str) -> str:
    value = getattr(DEFAULTS, name)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_duration(value) if name.endswith("_ms") else str(value)


def test_the_parts_of_a_store_are_the_contract() -> None:
    parts = get_type_hints(contract.Store)
    shown = {row[0]: row[2].split() for row in plain(table(DOCS / "store-contract.md", "The parts"))}
    assert list(shown) == list(parts)
    for name, verbs in shown.items():
        known = [verb for verb in vars(parts[name]) if not verb.startswith("_")]
        if verbs[-1] != "…":
            assert verbs == known
        assert set(verbs) - {"…"} <= set(known)


def test_the_test_vectors_are_the_code() -> None:
    shown = table(DOCS / "howto" / "slots.md", "Test vectors")
    assert [(key_of(cells[0]), int(cells[2])) for cells in shown] == list(TEST_VECTORS)
    assert [cells[1].strip("`") for cells in shown if cells[1]] == [
        key_of(cells[0]).decode() for cells in shown if cells[1]
    ]


def key_of(cell: str) -> bytes:
    digits, _, times = cell.strip("`").removeprefix("(empty)").partition(" × ")
    return bytes.fromhex(digits) * int(times or 1)


# --- pages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page_id(page)} links to {link}, which is not there"
        if anchor:
            assert anchor in headings(target), f"{page_id(page)} links to {link}: no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = {PAGES[0]}, [PAGES[0]]
    while waiting:
        page = waiting.pop()
        found = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        waiting += [path for path in found & set(PAGES) if path not in reached]
        reached |= found
    assert [page_id(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


# --- names -------------------------------------------------------------------------------------------

# What a variable of the examples is. Names behind it must exist: `mq.send` is looked up on Connection.
_KINDS: dict[str, Any] = {
    "postroom": postroom,
    "mq": postroom.Connection,
    "producer": postroom.Producer,
    "consumer": postroom.Consumer,
    "app": postroom.App,
    "message": postroom.Received,
    "receipt": postroom.Receipt,
}
_DOTTED = re.compile(r"^(?:await )?(\w+)((?:\.\w+)+)")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_names_in_the_text_exist(page: Path) -> None:
    for span in code_spans(page):
        found = _DOTTED.match(span)
        if found and found[1] in _KINDS and not span.endswith((".db", ".py", ".md")):
            assert has_name(_KINDS[found[1]], found[2][1:].split(".")), f"{page_id(page)}: `{span}`"


def has_name(owner: Any, path: list[str]) -> bool:
    for name in path:
        if isinstance(owner, type) and name in instance_names(owner):
            return True
        if not hasattr(owner, name) and isinstance(owner, ModuleType):
            try:
                import_module(f"{owner.__name__}.{name}")
            except ModuleNotFoundError:
                return False
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def instance_names(owner: type) -> set[str]:
    """Fields, and what a method assigns to `self`."""
    assigned = re.findall(r"\bself\.([a-z]\w*)(?:: [^=\n]+)? =", inspect.getsource(owner))
    return {*assigned, *getattr(owner, "__struct_fields__", ()), *getattr(owner, "__annotations__", {})}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_in_the_text_exist(page: Path) -> None:
    for line in mentioned_commands(page):
        assert unknown_words(line) == [], f"{page_id(page)}: {line}"


def mentioned_commands(page: Path) -> Iterator[str]:
    """Commands in code spans and in console blocks, those that are not run too."""
    yield from (span for span in code_spans(page) if span.startswith("postroom "))
    for block in blocks(page):
        if block.language == "console":
            text = re.sub(r"\\\n\s*", "", block.text)
            yield from re.findall(r"^\$ (?:.*\| )?(postroom [^\n|#]*)", text, re.MULTILINE)


def unknown_words(line: str) -> list[str]:
    """Commands and options in the line that the command line does not have."""
    command: Any = typer.main.get_command(app)
    known, unknown = options(command), []
    for word in shlex.split(line)[1:]:
        if word.startswith("-") and not word.lstrip("-").isdecimal():
            if word.partition("=")[0] not in known and word != "-":
                unknown.append(word)
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return [] if word.isupper() or word in ("…", "...") else [word]
            command = command.commands[word]
            known |= options(command)
    return unknown


def options(command: Any) -> set[str]:
    found = {"--help", "-h"}
    for parameter in command.params:
        found.update(parameter.opts, parameter.secondary_opts)
    return found


def test_every_command_is_on_its_page() -> None:
    page = DOCS / "howto" / "command-line.md"
    shown = "\n".join(block.text for block in blocks(page))
    missing = [name for name in command_names() if f"postroom {name}" not in shown]
    assert missing == []


def command_names() -> list[str]:
    top: Any = typer.main.get_command(app)
    names = []
    for name, command in top.commands.items():
        below = getattr(command, "commands", None)
        names += [f"{name} {inner}" for inner in below] if below else [name]
    return names
