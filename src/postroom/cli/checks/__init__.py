"""What `postroom doctor` looks at: a module for each kind of store, and one for topics and groups.

Decides which checks a queue gets. Must change nothing in the queue, and must never show a password.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .finding import Finding

if TYPE_CHECKING:
    from ...address import Address

__all__ = ["Finding", "examine"]

_OLDEST_SQLITE = (3, 37, 0)

Begin = Callable[[str, int], None]
"""Told which check begins, and how many there are in all."""


def examine(address: Address, begin: Begin) -> list[Finding]:
    """Return what can be found without a connection to the queue itself."""
    found = list(_python(address.kind))
    if address.kind == "memory":
        return [*found, Finding("file", "ok", "this queue is in memory: there is nothing else to check")]
    if address.path is not None:
        from .sqlite import examine_file

        return found + examine_file(address.path, begin)
    from .server import examine_server

    return found + examine_server(address, begin)


def _python(kind: str) -> Iterator[Finding]:
    yield Finding("python", "ok", f"Python {'.'.join(map(str, sys.version_info[:3]))}")
    if kind not in ("sqlite", "memory"):
        return
    version = f"SQLite {sqlite3.sqlite_version}"
    if sqlite3.sqlite_version_info >= _OLDEST_SQLITE:
        yield Finding("sqlite", "ok", version)
    else:
        yield Finding("sqlite", "warn", f"{version} is old", "use a Python that brings SQLite 3.37 or newer")
