"""The stores that tests of the SDK run on, by name."""

from __future__ import annotations

import pytest

__all__ = ["EVERYWHERE", "HERE", "SERVERS", "everywhere"]

HERE = ("memory", "sqlite")
SERVERS = {"postgres": "postgres_ready", "mysql": "mysql_ready"}  # name → fixture
EVERYWHERE = (*HERE, *SERVERS)

everywhere = pytest.mark.parametrize("any_url", EVERYWHERE, indirect=True)
"""Marks a test of what the databases may do differently."""
