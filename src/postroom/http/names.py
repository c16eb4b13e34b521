"""Names in figures: which topics and groups a scrape shows to whom.

Names are shown to those who would see them in a list: of a topic one has a permission on, and of all to
whoever has one on `_metrics`, which `*` includes. Everything else is added up as `(other)`, so that totals
are right for anybody. Ages and debts of others are the largest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, Protocol

from prometheus_client.samples import Sample

from ..broker.figures import OTHER
from ..model.access import Principal, allows, visible

__all__ = ["METRICS", "Named", "sees_all"]

METRICS = "_metrics"
"""A topic that nobody has: a permission on it is one to see all names in figures."""

_NAMES = ("topic", "group", "producer")
_LARGEST = ("_age_seconds", "_debt_seconds")


class Collected(Protocol):
    def collect(self) -> Iterable[Any]: ...


def sees_all(principal: Principal) -> bool:
    return allows(principal, "any", METRICS)


class Named:
    """What a collector collects, with names as this principal may see them."""

    def __init__(self, collected: Collected, principal: Principal) -> None:
        self._collected, self._principal = collected, principal
        self._shown: dict[str, bool] = {OTHER: True}

    def collect(self) -> Iterator[Any]:
        for family in self._collected.collect():
            if any("topic" in sample.labels for sample in family.samples):
                family = copy(family)
                family.samples = self._named(family.samples)
            yield family

    def _named(self, samples: Iterable[Sample]) -> list[Sample]:
        found: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
        for sample in samples:
            if not self._shows(sample.labels.get("topic", "")):
                labels = {name: OTHER if name in _NAMES else value for name, value in sample.labels.items()}
                sample = sample._replace(labels=labels)
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if (before := found.get(key)) is not None:
                add = _adding(sample.name)
                sample = sample._replace(value=add((before.value, sample.value)))
            found[key] = sample
        return list(found.values())

    def _shows(self, topic: str) -> bool:
        shown = self._shown.get(topic)
        if shown is None:
            shown = self._shown[topic] = bool(topic) and bool(visible(self._principal, [topic]))
        return shown


def _adding(name: str) -> Callable[[Iterable[float]], float]:
    return max if name.endswith(_LARGEST) else sum
