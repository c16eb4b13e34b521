"""Verdicts of one settle are about different messages: whoever says two things about one is refused.

So the work that a settle makes is bounded by what it names and by what its tokens hold, and never by the
product of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..broker.endpoint import Settle
from ..errors import UsageError
from ..model.delivery import Span

__all__ = ["refuse_overlaps"]


def refuse_overlaps(parts: Sequence[Settle]) -> None:
    """UsageError; what parks is left out, since its range has messages of other keys in it (I27)."""
    if len(parts) == 1 and len(parts[0].verdicts) <= 1:
        return
    spans: dict[tuple[int, int], list[Span]] = {}
    for part in parts:
        here = spans.setdefault((part.partition_id, part.token), [])
        here += ((v.first, v.last) for v in part.verdicts if v.kind != "park")
    for found in spans.values():
        found.sort()
        if any(before[1] >= after[0] for before, after in pairwise(found)):
            raise UsageError("two verdicts of a settle are about the same message: settle each message once")
