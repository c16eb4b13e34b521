"""How many examples a machine tries: few in `make test`, POSTROOM_EXAMPLES times as many in a soak."""

from __future__ import annotations

import os

__all__ = ["examples"]

_TIMES = int(os.environ.get("POSTROOM_EXAMPLES", "1"))


def examples(count: int) -> int:
    return count * _TIMES
