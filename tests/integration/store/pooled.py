"""The connection that a store's next statement goes through, for tests that look at it or trip it up."""

from __future__ import annotations

import sqlite3

from postroom.store import SqlStore
from postroom.store.sql.session import Area

__all__ = ["pooled"]


def pooled(store: SqlStore, area: Area) -> sqlite3.Connection:
    """What was given back last is taken first, so a test without threads always meets the same one."""
    session = store.session
    with session.read(area) as tx:
        connection = tx.connection
        assert isinstance(connection, sqlite3.Connection)
    return connection
