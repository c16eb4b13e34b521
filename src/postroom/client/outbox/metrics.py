"""Figures of an outbox for Prometheus, in the process of its relay, if that has `prometheus_client` (R43).

Set by the leading relay alone, in the process's default registry, under the names that a served broker uses
for an outbox in its own database. Must never fail a relay.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from .status import OutboxStatus

__all__ = ["forget", "show"]

log = logging.getLogger("postroom.outbox")

_GAUGES = {
    "postroom_outbox_messages": "Messages committed in the outbox, and not sent yet.",
    "postroom_outbox_oldest_age_seconds": "Age of the oldest of them.",
    "postroom_outbox_stuck_topics": "Topics that can take none of their messages until somebody acts.",
}
_made: list[Any] | None = None


def show(status: OutboxStatus) -> None:
    values = (status.messages, status.oldest_age_ms / 1000, len(status.stuck))
    for gauge, value in zip(_gauges(), values, strict=False):
        gauge.labels(status.table).set(value)


def forget(table: str) -> None:
    """Another relay leads: its process has the figures now."""
    for gauge in _made or ():
        with suppress(KeyError):
            gauge.remove(table)


def _gauges() -> list[Any]:
    global _made
    if _made is None:
        try:
            from prometheus_client import Gauge

            _made = [Gauge(name, text, ["table"]) for name, text in _GAUGES.items()]
        except (ImportError, ValueError) as error:  # it is not there; or somebody has these names already
            log.debug("an outbox has no figures for Prometheus: %r", error)
            _made = []
    return _made
