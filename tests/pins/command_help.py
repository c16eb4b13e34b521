"""`--help` of every command, as a terminal of 80 columns without colours shows it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from postroom.cli import main

__all__ = ["command_help_text", "print_all"]

_ROOT = Path(__file__).resolve().parents[2]
_TERMINAL = {
    "COLUMNS": "80",
    "TERMINAL_WIDTH": "80",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "PYTHONUTF8": "1",
    "LC_ALL": "C.UTF-8",
}
_PRINT = "import tests.commands; from tests.pins.command_help import print_all; print_all()"
_LEFT_OUT = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "CLICOLOR_FORCE", "COVERAGE_PROCESS_START")


def command_help_text() -> str:
    """In a process of its own: how wide a terminal is, is read when the command line is imported."""
    from .internals import command_tree  # not needed there

    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LEFT_OUT and not name.startswith("POSTROOM_")
    }
    paths = [" ".join(path) for path in _commands(command_tree(), ())]
    done = subprocess.run(
        [sys.executable, "-c", _PRINT],
        cwd=_ROOT,
        env=kept | _TERMINAL | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        input="\n".join(paths),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(below, (*path, name))


def _help(path: tuple[str, ...]) -> str:
    text = io.StringIO()
    with redirect_stdout(text):
        try:
            main([*path, "--help"])
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"postroom {' '.join(path)} --help ended with {end.code}") from end
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def print_all() -> None:
    """The help of the commands that are named on standard input, one a line."""
    for line in sys.stdin.read().split("\n"):
        path = tuple(line.split())
        print(f"$ {' '.join(('postroom', *path, '--help'))}\n{_help(path)}\n")
