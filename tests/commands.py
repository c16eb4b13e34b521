"""The command line is put together once in a test process, not once for each command that a test gives.

Typer makes all sixty commands from their signatures whenever one is run: as a program that happens once, in
this process hundreds of times, and takes four fifths of what a short command takes. They keep no state.
"""

from __future__ import annotations

import functools

import typer.main
import typer.testing

__all__ = ["get_command"]

get_command = functools.cache(typer.main.get_command)
typer.main.get_command = get_command
typer.testing._get_command = get_command  # type: ignore[attr-defined]
