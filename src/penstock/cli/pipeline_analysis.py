"""`penstock pipeline audit | backlog | hotspots`: what the jobs that look at a queue have found."""

from __future__ import annotations

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to the family `penstock pipeline`."""
