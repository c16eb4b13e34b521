"""Messages about slow lanes (R42)."""

from __future__ import annotations

from ..model.lanes import Seen
from .request import Request

__all__ = ["Report"]


class Report(Request):
    topic: str
    group: str
    seen: tuple[Seen, ...]
    version: int = 0
