"""Lists of values in statements: `IN (…)`, in parts that every database takes.

Servers remember each statement by its text. So where lists are long or frequent they come in a few lengths
only, and a part that is not full repeats its last value: in a list of alternatives that changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from functools import cache
from typing import TypeVar

from .session import Row, Transaction

__all__ = ["blanks", "each", "padded", "parts"]

T = TypeVar("T")


@cache
def blanks(count: int) -> str:
    """Return the parameters of a list of so many values."""
    return ", ".join("?" * count)


def parts(items: Sequence[T], size: int = 500) -> list[Sequence[T]]:
    """Cut a list into parts of as many values as one statement names."""
    if len(items) <= size:
        return [items] if items else []
    return [items[at : at + size] for at in range(0, len(items), size)]


def padded(items: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """Cut a list into parts of these few sizes; the last value stands in for what the last one lacks."""
    found = parts(items, sizes[-1])
    if found:
        last = found[-1]
        lacks = sizes[bisect_left(sizes, len(last))] - len(last)
        if lacks:
            found[-1] = [*last, *[last[-1]] * lacks]
    return found


def each(tx: Transaction, sql: str, column: str, ids: Collection[int] | None) -> list[Row]:
    """Return the rows of these ids, or all of them if `ids` is None; the statement ends in conditions."""
    if ids is None:
        return tx.all(sql)
    found: list[Row] = []
    for some in parts(sorted(ids)):
        found += tx.all(f"{sql} AND {column} IN ({blanks(len(some))})", *some)
    return found
