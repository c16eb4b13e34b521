"""Rates: how much a topic, a group or a producer takes in a second (R40, I17)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rate"]


@dataclass(frozen=True, slots=True)
class Rate:
    name: str  # "topic:orders", "group:orders/billing", "producer:shop"
    messages_per_s: int = 0  # 0: no limit
    bytes_per_s: int = 0
