"""What rows of a batch hold, for whole columns: the hashes of `model.content`, at a tenth of the cost.

Columns are hashed by pandas (SipHash, in C), and mixed into one number a row. A library that hashes otherwise
gives other words: its sums are not compared with these. Must never depend on the order of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..model.content import joined, summed
from .writing_rows import Part

__all__ = ["content_of"]

_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD)
_PROBE = b"what rows of a batch hold"


def content_of(parts: Iterable[Part]) -> bytes:
    """Empty where pandas is missing: then batches are compared by their number of rows."""
    try:
        import numpy as np
        from pandas.util import hash_array
    except ImportError:
        return b""

    def hashed(values: Sequence[bytes | None]) -> Any:
        column = np.empty(len(values), dtype=object)
        column[:] = values
        return hash_array(column, categorize=False)

    def present(values: Sequence[bytes | None]) -> Any:
        """0 for None: a column of these is as none."""
        some = np.fromiter((value is not None for value in values), dtype=bool, count=len(values))
        return np.where(some, hashed(values), np.uint64(0))

    topic_by, key_by, value_by, headers_by, all_by = (np.uint64(number) for number in _ODD)
    word = hashed([_PROBE]).tobytes()
    found = []
    for part in parts:
        rows = hashed(part.values) * value_by + hashed([part.topic.encode()]) * topic_by
        if part.keys is not None:
            rows += present(part.keys) * key_by
        if part.headers is not None:
            packed = [msgspec.msgpack.encode(pairs) if pairs else None for pairs in part.headers]
            rows += present(packed) * headers_by
        rows ^= rows >> np.uint64(32)
        rows *= all_by
        rows ^= rows >> np.uint64(29)
        low, high = rows & np.uint64(0xFFFFFFFF), rows >> np.uint64(32)  # their sums do not overflow
        found.append(summed(word, int(low.sum()) + (int(high.sum()) << 32)))
    return joined(found)
