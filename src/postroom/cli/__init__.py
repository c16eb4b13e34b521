"""The command line. `main` is the entry point `postroom`; each module holds one command or one family.

Commands are built on the public API alone. They need Typer and Rich, the extra `cli`: without it, `main` says
what to type. Whatever is slow to import (the SDK, asyncio, most of Rich) is imported inside the functions
that need it: `postroom --help` must answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper

from ..errors import how_to_install

__all__ = ["main"]

_OF_THE_EXTRA = ("typer", "rich")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code."""
    try:
        from .root import run
    except ModuleNotFoundError as missing:
        if missing.name not in _OF_THE_EXTRA:
            raise
        sys.exit(f"error: the command needs {missing.name}, which is not installed: {how_to_install('cli')}")

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character must not end us
    sys.exit(run(sys.argv[1:] if argv is None else argv))
