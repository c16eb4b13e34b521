"""Conditions of a query that narrow down what a batch read fetches.

A bound is taken from a condition only where no row outside of it can fit. Spark checks every condition again
on what is read: so a bound may be too wide, and never too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from .planning import Span

__all__ = ["Bounds", "Narrowing", "narrowing"]

_FAR = 2**63


@dataclass(frozen=True, slots=True)
class Bounds:
    """From and up to, both included."""

    low: int = -_FAR
    high: int = _FAR

    def both(self, other: Bounds) -> Bounds:
        return Bounds(max(self.low, other.low), min(self.high, other.high))

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Narrowing:
    offset: Bounds = field(default_factory=Bounds)
    partition: Bounds = field(default_factory=Bounds)
    timestamp: Bounds = field(default_factory=Bounds)  # microseconds since 1970
    topics: frozenset[str] | None = None  # None: all

    def apply(self, spans: Iterable[Span]) -> list[Span]:
        found = []
        for span in spans:
            if span.partition in self.partition and (self.topics is None or span.topic in self.topics):
                first, end = max(span.first, self.offset.low), min(span.end, self.offset.high + 1)
                if first < end:
                    found.append(replace(span, first=first, end=end))
        return found

    @property
    def not_before_ms(self) -> int | None:
        """Batches whose newest message is older have nothing that fits."""
        return self.timestamp.low // 1000 if self.timestamp.low > -_FAR else None


def narrowing(filters: Iterable[Any]) -> Narrowing:
    """`filters` are those of `pyspark.sql.datasource`: a column, a comparison, a literal; all must hold."""
    found = Narrowing()
    for one in filters:
        column, value = getattr(one, "attribute", ()), getattr(one, "value", None)
        kind = type(one).__name__
        if column == ("topic",) and kind in ("EqualTo", "EqualNullSafe", "In") and value is not None:
            names = frozenset(value if kind == "In" else [value])
            found = replace(found, topics=names if found.topics is None else found.topics & names)
        elif column in (("offset",), ("partition",), ("timestamp",)):
            name = column[0]
            bounds = _bounds(kind, value)
            if bounds is not None:
                found = replace(found, **{name: getattr(found, name).both(bounds)})
    return found


def _bounds(kind: str, value: Any) -> Bounds | None:
    if kind == "In":
        numbers = [n for n in map(_number, value) if n is not None]
        return Bounds(min(numbers), max(numbers)) if numbers else None
    number = _number(value)
    if number is None:
        return None
    match kind:
        case "EqualTo" | "EqualNullSafe":
            return Bounds(number, number)
        case "GreaterThan" | "GreaterThanOrEqual":
            return Bounds(low=number + (kind == "GreaterThan"))
        case "LessThan" | "LessThanOrEqual":
            return Bounds(high=number - (kind == "LessThan"))
    return None


def _number(value: Any) -> int | None:
    if isinstance(value, datetime):
        at = value if value.tzinfo else value.replace(tzinfo=UTC)
        since = at - datetime(1970, 1, 1, tzinfo=UTC)
        return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return value if type(value) is int else None
