"""The guards' tables in the user's own database: how they are made, and what is said if they are not there.

    postroom_guards             the version of these tables
    postroom_guards_seen        what `once` and `transitions` have let through, until it is forgotten
    postroom_guards_entities    the version or state that an entity has reached
    postroom_guards_waiting     messages that came before their turn

Rows are found by a digest of guard, scope and entity: text of one length, whatever the driver and whatever
the bytes of a key. Must never commit: whoever makes the tables does, and each guard works in the user's
transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import InvalidSetting, SchemaMismatch
from .. import databases
from ..databases import Kind, Theirs
from ..forward.transactions import is_awaited, joined, resolved

__all__ = ["VERSION", "blob", "check", "create_tables", "ddl", "explained", "on"]

VERSION = 1

_DIGEST: dict[Kind, str] = {
    "sqlite": "TEXT",
    "postgres": "TEXT",
    "mysql": "CHAR(32) CHARACTER SET ascii COLLATE ascii_bin",
}
_BLOB: dict[Kind, str] = {"sqlite": "BLOB", "postgres": "BYTEA", "mysql": "LONGBLOB"}
_END: dict[Kind, str] = {
    "sqlite": " WITHOUT ROWID",
    "postgres": "",
    "mysql": " ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin",
}
_TABLES = (
    """CREATE TABLE IF NOT EXISTS postroom_guards (
  name VARCHAR(20) NOT NULL PRIMARY KEY, version INTEGER NOT NULL){end}""",
    """CREATE TABLE IF NOT EXISTS postroom_guards_seen (
  id {digest} NOT NULL PRIMARY KEY, expires_at BIGINT NOT NULL{index}){end}""",
    """CREATE TABLE IF NOT EXISTS postroom_guards_entities (
  id {digest} NOT NULL PRIMARY KEY, guard VARCHAR(20) NOT NULL, scope VARCHAR(200) NOT NULL,
  entity VARCHAR(200) NOT NULL, version BIGINT, state VARCHAR(200),
  waiting INTEGER NOT NULL DEFAULT 0){end}""",
    """CREATE TABLE IF NOT EXISTS postroom_guards_waiting (
  id {digest} NOT NULL, version BIGINT NOT NULL, parked_at BIGINT NOT NULL, message {blob} NOT NULL,
  PRIMARY KEY (id, version)){end}""",
)
_INDEX = "CREATE INDEX IF NOT EXISTS postroom_guards_seen_age ON postroom_guards_seen (expires_at)"
_INSIDE = ", INDEX postroom_guards_seen_age (expires_at)"  # MySQL has no CREATE INDEX IF NOT EXISTS
_MARK = f"postroom_guards (name, version) VALUES ('tables', {VERSION})"
_MARKS: dict[Kind, str] = {
    "sqlite": f"INSERT OR IGNORE INTO {_MARK}",
    "postgres": f"INSERT INTO {_MARK} ON CONFLICT DO NOTHING",
    "mysql": f"INSERT IGNORE INTO {_MARK}",
}
_KINDS: dict[str, Kind] = {"sqlite": "sqlite", "postgres": "postgres", "mysql": "mysql"}
_CURE = (
    "run postroom.guards.create_tables(connection) once, or put postroom.guards.ddl({kind!r}) into a "
    "migration"
)
_MISSING = (
    "no such table",
    "no such column",
    "has no column",
    "does not exist",
    "doesn't exist",
    "Unknown column",
)


def ddl(kind: str) -> list[str]:
    """The statements that make the tables, for a migration of your own: "sqlite", "postgres" or "mysql"."""
    known = _KINDS.get(kind)
    if known is None:
        raise InvalidSetting(f'ddl({kind!r}): choose "sqlite", "postgres" or "mysql" (also for MariaDB)')
    inside = _INSIDE if known == "mysql" else ""
    named = {"digest": _DIGEST[known], "blob": _BLOB[known], "end": _END[known], "index": inside}
    made = [table.format(**named) for table in _TABLES]
    if known != "mysql":
        made.append(_INDEX)
    return [*made, _MARKS[known]]


def create_tables(connection: Any) -> Any:
    """Make the guards' tables, unless they are there; commits if no transaction is open.

    Of an async session or connection of SQLAlchemy: `await guards.create_tables(…)`.
    """
    return on(connection, _create)


def _create(theirs: Theirs) -> None:
    for statement in ddl(theirs.kind):
        theirs.run(statement)
    check(theirs)


def on(connection: Any, work: Callable[[Theirs], Any]) -> Any:
    """In the transaction that is open there, or else in one of its own; awaited where that is needed."""

    def run(found: Any) -> Any:
        theirs = databases.of(found)
        with joined(found), explained(theirs):
            return work(theirs)

    found = resolved(connection)
    return found.run_sync(run) if is_awaited(found) else run(found)


def check(theirs: Theirs) -> None:
    """SchemaMismatch: the tables are missing, or of another version."""
    with explained(theirs):
        found = theirs.rows("SELECT version FROM postroom_guards WHERE name = 'tables'")
    version = found[0][0] if found else 0
    if version > VERSION:
        raise SchemaMismatch(
            f"the guards' tables are of version {version}, made by a newer Postroom: upgrade this program"
        )
    if version < VERSION:
        raise SchemaMismatch(
            f"the guards' tables are of version {version}, and {VERSION} is needed: "
            f"{_CURE.format(kind=theirs.kind)}"
        )


def blob(kind: Kind) -> str:
    """The place of bytes in a statement; on MySQL as hexadecimal digits: PyMySQL may take bytes for text."""
    return "UNHEX(?)" if kind == "mysql" else "?"


@contextmanager
def explained(theirs: Theirs) -> Iterator[None]:
    """An error of a missing or old table says what to do. Looked for only then: it costs nothing else."""
    try:
        yield
    except Exception as error:
        if any(words in str(error) for words in _MISSING):
            raise SchemaMismatch(
                f"the guards' tables are missing in this database, or old ({str(error).splitlines()[0]}): "
                f"{_CURE.format(kind=theirs.kind)}"
            ) from error
        raise
