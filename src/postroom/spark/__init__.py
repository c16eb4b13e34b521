"""The data pipeline: Spark reads topics and writes into them, through PySpark."""

from __future__ import annotations

from .jobs.failures import explained
from .lag import Lag, TopicLag, lag, lag_listener
from .session import session, settings

__all__ = ["Lag", "TopicLag", "explained", "lag", "lag_listener", "session", "settings"]
