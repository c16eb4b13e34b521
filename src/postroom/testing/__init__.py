"""For tests: those of users, and those of people who write a store of their own (`store_contract`)."""

from __future__ import annotations

from ..clock import ManualClock
from .fixture import Captured, TestQueue, capture, run_until_idle

__all__ = ["Captured", "ManualClock", "TestQueue", "capture", "run_until_idle"]
