"""What to run to install an extra of Postroom, or a newer version: the words of every error that says so.

There is no release yet: a name on the package index would be somebody else's package, or none. So both name a
checkout, never the index.
"""

from __future__ import annotations

__all__ = ["how_to_install", "how_to_update"]


def how_to_install(extra: str) -> str:
    """What to run for an extra (a name of `[project.optional-dependencies]`), as the end of a sentence."""
    return f"run `pip install '.[{extra}]'` in a checkout of Postroom"


def how_to_update() -> str:
    """What to run for a newer Postroom, as the end of a sentence."""
    return "update your checkout of Postroom and run `pip install .` in it"
