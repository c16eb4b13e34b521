"""The data pipeline: Spark reads topics and writes into them, through PySpark."""

from __future__ import annotations

from .jobs.failures import explained
from .session import session, settings

__all__ = ["explained", "session", "settings"]
