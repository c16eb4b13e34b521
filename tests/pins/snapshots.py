"""The files that pins are compared with, and what is said when one differs."""

from __future__ import annotations

import difflib
from pathlib import Path

__all__ = ["differences", "path_of", "read", "renew_command", "write"]

_FOLDER = Path(__file__).parent / "snapshots"
_MOST_LINES = 80  # of a difference: the rest is in the file once it is renewed


def path_of(name: str) -> Path:
    """The file of a pin; `name` has its suffix."""
    return _FOLDER / name


def read(name: str) -> str:
    path = path_of(name)
    return path.read_text(encoding="utf-8") if path.exists() else ""


def write(name: str, text: str) -> bool:
    """Store a snapshot; the answer says whether it changed."""
    changed = read(name) != text
    if changed:
        path_of(name).parent.mkdir(exist_ok=True)
        path_of(name).write_text(text, encoding="utf-8")
    return changed


def renew_command(name: str) -> str:
    return f"python -m tests.pins renew {name.partition('.')[0]}"


def differences(name: str, found: str, means: str) -> str:
    """The message of a failure: empty if nothing changed."""
    pinned = read(name)
    if pinned == found:
        return ""
    lines = list(
        difflib.unified_diff(
            pinned.splitlines(), found.splitlines(), f"snapshots/{name}", "the code", lineterm="", n=2
        )
    )
    left = len(lines) - _MOST_LINES
    shown = lines[:_MOST_LINES] + ([f"… and {left} more lines"] if left > 0 else [])
    return "\n".join(
        [
            f"{name} is no longer what it was. {means}",
            "If that is not meant, undo it. If it is, say so in CHANGELOG.md and write the snapshot anew:",
            f"    {renew_command(name)}",
            *shown,
        ]
    )
