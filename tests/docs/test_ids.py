"""Ids of requirements and invariants (R15, I6) are for developers: users do not meet them anywhere.

Users read the pages, the examples, the command line's help, what is raised, logged or answered, the
description of the HTTP API, and what `help()` shows of the public names. Developers' pages may cite them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from fastapi import APIRouter, FastAPI

from postroom.cli.root import app
from postroom.http import administration, messages, monitoring
from tests.docs.pages import PAGES, ROOT, page_id

ID = re.compile(r"(?<![\w.+/-])[RI][1-9][0-9]?(?![\w-])")
DEVELOPERS = {ROOT / "docs" / name for name in (
    "how-it-is-proven.md", "store-contract.md", "PROTOCOL.md", "protocol-operations.md",
    "kafka-partitions.md",
)}  # fmt: skip
PUBLIC = (
    "postroom",
    "postroom.sync",
    "postroom.testing",
    "postroom.client.guards",
    "postroom.errors",
    "postroom.integrations.fastapi",
    "postroom.integrations.flask",
    "postroom.integrations.django",
    "postroom.spark",
    "postroom.tracing",
)


def ids(text: str) -> list[str]:
    return ID.findall(text)


# --- pages and examples ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(set(PAGES) - DEVELOPERS), ids=page_id)
def test_a_page_has_none(page: Path) -> None:
    assert ids(page.read_text(encoding="utf-8")) == []


def test_the_changelog_and_the_examples_have_none() -> None:
    read = [
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs" / "examples").iterdir(),
        *(ROOT / "examples").rglob("*.py"),
    ]
    assert len(read) > 10
    assert [page_id(path) for path in read if ids(path.read_text(encoding="utf-8"))] == []


# --- what the code says ------------------------------------------------------------------------------


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of what may be shown: every string but docstrings."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # below a constant
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | loose:
            yield node.lineno, node.value


def test_errors_log_lines_and_help_have_none() -> None:
    """The suite that a new store is tested with is for developers."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        if "store_contract" not in path.parts
        for line, text in strings(ast.parse(path.read_text(encoding="utf-8")))
        if ids(text)
    ]
    assert found == []


def test_the_help_of_the_commands_has_none() -> None:
    found = {name: text for name, text in helps(typer.main.get_command(app), "postroom") if ids(text)}
    assert found == {}


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    yield name, " ".join([command.help or "", *(getattr(p, "help", None) or "" for p in command.params)])
    for below, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{name} {below}")


def test_the_description_of_the_http_api_has_none() -> None:
    api = FastAPI()
    for part in (administration, messages, monitoring):
        for router in (value for value in vars(part).values() if isinstance(value, APIRouter)):
            api.include_router(router)
    described = json.dumps([api.openapi(), messages.SCHEMAS])
    assert "/topics" in described and ids(described) == []


@pytest.mark.parametrize("name", PUBLIC)
def test_the_help_of_the_public_names_has_none(name: str) -> None:
    found = {where: ids(text) for where, text in documented(import_module(name)) if ids(text)}
    assert found == {}


def documented(module: ModuleType) -> Iterator[tuple[str, str]]:
    """What `help()` shows of the module, of its public names and of their public members."""
    yield module.__name__, module.__doc__ or ""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            continue
        yield f"{module.__name__}.{name}", inspect.getdoc(value) or ""
        if inspect.isclass(value):
            for member, inner in inspect.getmembers(value):
                if not member.startswith("_") or member == "__init__":
                    yield f"{module.__name__}.{name}.{member}", inspect.getdoc(inner) or ""


# --- the rules themselves notice ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["never lost (R15)", "I8 says so", "keeps I3, I17", "(R6, R28)", "R1."])
def test_an_id_is_found(text: str) -> None:
    assert ids(text) != []


@pytest.mark.parametrize("text", ["CR12", "R2D2", "I/O", "RFC 9110", "I am 5", "R0", "UTF-8", "P1 and Q4"])
def test_what_is_none_is_not(text: str) -> None:
    assert ids(text) == []


def test_strings_are_told_from_docstrings() -> None:
    tree = ast.parse('"""I1."""\nX = 1\n"""I2."""\n\ndef f():\n    """I3."""\n    raise E(f"{X} (R4)")\n')
    assert [text for _, text in strings(tree)] == [" (R4)"]


def test_public_members_are_looked_at() -> None:
    seen = {where for where, text in documented(import_module("postroom")) if text}
    assert {"postroom", "postroom.connect", "postroom.Connection.send", "postroom.App.subscribe"} <= seen
