"""The data pipeline: Spark reads topics and writes into them, through PySpark."""

from __future__ import annotations

from .lag import Lag, TopicLag, lag, lag_listener
from .session import session, settings

__all__ = ["Lag", "TopicLag", "lag", "lag_listener", "session", "settings"]
