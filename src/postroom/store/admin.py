"""A store's databases as operators see them: their tables and versions, whatever queue is in them.

For `postroom migrate`, `doctor` and `backup`, which work on a database and not on a queue. All that they need
of the store's inside is named here: a session without a look at its tables, what the tables lack, the
statements that make them, and what `doctor` examines; `copies` has the files. Must never make a file by
looking at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import open_session
from .dialects.sqlite import SqliteDialect
from .dialects.sqlite_clock import read_pace
from .sql.brokers import SqlDuties
from .sql.identity import check, check_alone, check_pair
from .sql.schema import (
    ROLLING_SINCE,
    VERSION,
    check_schema,
    migrate,
    refuse_former,
    script,
    statements,
    version_of,
)
from .sql.session import Area, Row, Session

__all__ = [
    "ROLLING_SINCE",
    "VERSION",
    "Area",
    "Row",
    "SchemaState",
    "Session",
    "SqlDuties",
    "SqliteDialect",
    "check_pair",
    "check_schema",
    "check_shards",
    "migrate",
    "open_session",
    "read_pace",
    "refuse_former",
    "schema_state",
    "script",
]


class SchemaState(NamedTuple):
    version: int  # of the area that is furthest behind; 0: it has no tables
    missing: list[str]  # statements that bring all areas to `VERSION`, without types


def schema_state(session: Session) -> SchemaState:
    """Return how far a database's tables are behind this program's."""
    areas = session.dialect.areas
    have = {area: _version(session, area) for area in areas}
    missing = [
        statement
        for area in areas
        for number in range(have[area] + 1, VERSION + 1)
        for statement in statements(number, area, areas)
    ]
    return SchemaState(min(have.values()), missing)


def _version(session: Session, area: Area) -> int:
    """Return an area's version; 0 for a file that is not there: looking must not make it."""
    if isinstance(session.dialect, SqliteDialect):
        file = session.dialect.file(area)
        if file is not None and not file.exists():
            return 0
    return version_of(session, area)


def check_shards(first: Session, others: Mapping[str, Session]) -> None:
    """InvalidSetting if these databases are not all of one queue, the first one first; changes nothing."""
    check_alone(first, frozenset(others))
    check(first, others)
