"""Metrics as values, and as the text that Prometheus reads.

    found = await mq.metrics()          # of a connection, or of an App
    found.value("postroom_group_lag_messages", topic="orders", group="billing")
    found.text                          # for a page that Prometheus scrapes

A family is one metric with its samples; counters are named without the `_total` that their samples end in, as
Prometheus' own libraries do. Decides how a family is written down, and nothing about what is counted. Needs
no other package, so that a program that embeds the queue can show its figures without any. Must never do I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = ["CONTENT_TYPE", "Family", "Metrics", "Sample", "counter", "gauge", "histogram", "single"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What an answer over HTTP says of `Metrics.text`."""

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
_PREFIX = "postroom_"
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_ESCAPED_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure: of a histogram the name ends in `_bucket`, `_count` or `_sum`, of a counter in `_total`."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name, what it means, and its figures."""

    name: str
    type: Kind
    help: str
    labels: Labels = ()
    samples: list[Sample] = field(default_factory=list)
    of_queue: bool = False  # it comes from the store: every process of a queue shows the same

    def with_label(self, name: str, value: str) -> Family:
        """Return it with one more label, the same for every sample."""
        samples = [replace(one, labels={name: value, **one.labels}) for one in self.samples]
        return replace(self, labels=(*self.labels, name), samples=samples)


class Metrics:
    """What was counted and measured, at one moment."""

    def __init__(self, families: Iterable[Family]) -> None:
        self.families = tuple(families)

    @property
    def text(self) -> str:
        """Return all of it as Prometheus reads it; `CONTENT_TYPE` is for the answer's header."""
        return "".join(_lines(self.families))

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sample of that name whose labels are these; the sum, if it has more labels than these.

        None: there is none. A counter may be named with or without its `_total`.
        """
        names = (name, f"{name}_total")
        wanted = labels.items()
        found = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name in names and wanted <= sample.labels.items()
        ]
        return sum(found) if found else None

    def as_json(self) -> list[dict[str, Any]]:
        """Return all of it as plain values, for another process."""
        names = ("name", "type", "help", "labels", "of_queue")
        return [
            {name: getattr(one, name) for name in names}
            | {"samples": [[s.name, dict(s.labels), s.value] for s in one.samples]}
            for one in self.families
        ]

    @staticmethod
    def of_json(families: Iterable[Mapping[str, Any]]) -> Metrics:
        """Return what `as_json` was made of."""
        return Metrics(
            Family(**{**one, "labels": tuple(one["labels"]), "samples": [Sample(*s) for s in one["samples"]]})
            for one in families
        )


# ---- making families ----


def counter(name: str, help: str, labels: Labels, values: Iterable[tuple[Labels, float]]) -> Family:
    """Return what only grows; the name goes without prefix and `_total`."""
    full = _PREFIX + name
    samples = [Sample(f"{full}_total", _labelled(labels, found), float(value)) for found, value in values]
    return Family(full, "counter", help, labels, samples)


def gauge(
    name: str, help: str, labels: Labels, values: Iterable[tuple[Labels, float]], *, of_queue: bool = False
) -> Family:
    """Return what goes up and down."""
    full = _PREFIX + name
    samples = [Sample(full, _labelled(labels, found), float(value)) for found, value in values]
    return Family(full, "gauge", help, labels, samples, of_queue)


def single(name: str, help: str, value: float, *, of_queue: bool = False) -> Family:
    """Return a gauge without labels."""
    return gauge(name, help, (), [((), value)], of_queue=of_queue)


def histogram(
    name: str,
    help: str,
    labels: Labels,
    values: Iterable[tuple[Labels, Sequence[int], float]],
    bounds: Sequence[float],
) -> Family:
    """Return how durations are spread; of each: how many in each bucket (the last is open), and their sum."""
    full, edges = _PREFIX + name, [*map(str, bounds), "+Inf"]
    samples = []
    for found, counts, total in values:
        named, up_to = _labelled(labels, found), 0
        for edge, count in zip(edges, counts, strict=True):
            up_to += count
            samples.append(Sample(f"{full}_bucket", {**named, "le": edge}, up_to))
        samples += [Sample(f"{full}_count", named, up_to), Sample(f"{full}_sum", named, total)]
    return Family(full, "histogram", help, labels, samples)


def _labelled(names: Labels, values: Labels) -> dict[str, str]:
    return dict(zip(names, values, strict=True))


# ---- text ----


def _lines(families: Iterable[Family]) -> Iterator[str]:
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"# HELP {name} {family.help.translate(_ESCAPED_HELP)}\n# TYPE {name} {family.type}\n"
        for sample in family.samples:
            found = sorted(sample.labels.items())
            labels = ",".join(f'{key}="{value.translate(_ESCAPED)}"' for key, value in found)
            yield f"{sample.name}{{{labels}}} " if labels else f"{sample.name} "
            yield f"{_number(sample.value)}\n"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
