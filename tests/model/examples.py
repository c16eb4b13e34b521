"""How many examples hypothesis tries: POSTROOM_EXAMPLES times as many; a third in `make test`."""

from __future__ import annotations

import os

__all__ = ["examples"]

_TIMES = float(os.environ.get("POSTROOM_EXAMPLES", "1"))


def examples(count: int) -> int:
    return max(1, round(count * _TIMES))
