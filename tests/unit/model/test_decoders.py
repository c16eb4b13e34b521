"""A decoder of a type is made with its module, before any thread can use it.

msgspec keeps what it knows of a class on the class from the moment it begins to find out, and has no lock: a
second thread that decodes the class meanwhile ends the process with SIGSEGV. Of 60 processes in which four
threads called `msgspec.json.decode(data, type=kind)` for the first time at once, 56 ended so (0.22), and so
did a broker as it started. While a module is imported, its importers wait.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src" / "postroom"
ALONE = {
    "wire/messages.py",  # under a lock
    "model/messages/body.py",  # of users' types, when a handler is registered
    "spark/formats/json_values.py",  # of a type that is made for it
    "model/split_plan_file.py",  # read once, by a command
    "console/pages.py",  # of plain dicts
}


def made_late(source: str) -> list[int]:
    """Lines within functions that make a decoder, or decode to a type at once."""
    functions = [
        n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return sorted({call.lineno for function in functions for call in _typed(function)})


def _typed(function: ast.AST) -> Iterator[ast.Call]:
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("msgspec."):
            name = ast.unparse(call.func).rpartition(".")[2]
            if name in ("Decoder", "convert") or any(given.arg == "type" for given in call.keywords):
                yield call


def test_decoders_are_made_with_their_module() -> None:
    found = {
        name: lines
        for path in SOURCE.rglob("*.py")
        if (name := str(path.relative_to(SOURCE))) not in ALONE and (lines := made_late(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line", ["msgspec.json.decode(b, type=A)", "msgspec.msgpack.Decoder(A)", "msgspec.convert(b, A)"]
)
def test_one_that_is_made_late_would_be_found(line: str) -> None:
    assert made_late(f"def read(b):\n    return {line}") == [2]
    assert made_late(f"decode = {line}\ndef read(b):\n    return msgspec.json.decode(b)") == []
