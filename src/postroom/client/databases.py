"""The caller's own database, of any kind, through the caller's open connection (R30, R33) or one of ours.

Known are `sqlite3`, psycopg 3, PyMySQL, SQLAlchemy 2 (a session or a connection; of the async ones the sync
side, within `run_sync`) and Django's connections. Outbox and guards write their statements once, with `?` for
parameters, and run them here, in the transaction that is open on the connection. Must never begin, commit or
roll back anything: the transaction is the caller's.

A relay opens a connection of its own: by an address, as of `postroom.connect`; by a function that returns a
connection; by an engine of SQLAlchemy; or by the alias of a database of Django. Must never change settings of
the database that outlive the connection, such as SQLite's journal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from ..address import Address, parse
from ..config import DEFAULTS, Limits
from ..errors import InvalidSetting
from . import databases

__all__ = [
    "Kind",
    "Opening",
    "Theirs",
    "is_async",
    "library",
    "of",
    "opening",
    "opening_of",
]


Kind = Literal["sqlite", "postgres", "mysql"]
Args = Sequence[Any]

_KINDS: dict[str, Kind] = {
    "sqlite": "sqlite",
    "postgresql": "postgres",
    "postgres": "postgres",
    "mysql": "mysql",
    "mariadb": "mysql",
}
_MYSQL_IN_TRANSACTION = 1  # the bit of the server's status


class Theirs(Protocol):
    kind: Kind

    def rows(self, sql: str, args: Args = ()) -> list[tuple[Any, ...]]:
        """The rows of a SELECT, or of what RETURNING returns."""

    def run(self, sql: str, args: Args = ()) -> int:
        """How many rows a statement met."""

    def many(self, sql: str, rows: Sequence[Args]) -> None:
        """One statement for each."""

    @property
    def in_transaction(self) -> bool:
        """Whether what is run now can still be rolled back by the caller."""


def of(connection: Any) -> Theirs:
    """InvalidSetting: it is none of the kinds that are known."""
    if isinstance(connection, sqlite3.Connection):
        return _Driver("sqlite", connection, _sqlite_in_transaction)
    bases = _packages(connection)
    if "sqlalchemy" in bases:
        return _of_sqlalchemy(connection)
    if "django" in bases:
        return _Driver(_kind(connection.vendor), connection, _django_in_transaction)
    if "psycopg" in bases and not is_async(connection):
        return _Driver("postgres", connection, _psycopg_in_transaction)
    if "pymysql" in bases:
        return _Driver("mysql", connection, _pymysql_in_transaction)
    named = f"{type(connection).__module__}.{type(connection).__qualname__}"
    raise InvalidSetting(
        f"a {named} is not a connection that Postroom knows: give it one of sqlite3, psycopg 3 or PyMySQL, a "
        "session or connection of SQLAlchemy 2, or django.db.connection"
    )


def library(connection: Any) -> str:
    """Whose connection it is: sqlite3, sqlalchemy, django, psycopg or pymysql; "" for any other object."""
    found, known = _packages(connection), ("sqlalchemy", "django", "sqlite3", "psycopg", "pymysql")
    return next((name for name in known if name in found), "")


def is_async(connection: Any) -> bool:
    """An async session or connection of SQLAlchemy: reach its sync side with `run_sync`."""
    return any(base.__name__.startswith("Async") for base in type(connection).__mro__)


def _of_sqlalchemy(connection: Any) -> Theirs:
    if is_async(connection):
        raise InvalidSetting(
            "this is an async session or connection of SQLAlchemy: await the call that takes it, or use "
            "run_sync to reach its sync side"
        )
    if not hasattr(connection, "execute"):
        raise InvalidSetting(
            f"a {type(connection).__name__} of SQLAlchemy is no session or connection: give what it opens"
        )
    return _SqlAlchemy(connection)


def _packages(connection: Any) -> set[str]:
    """Of its class and those it is made of: a subclass of the caller's is known too."""
    return {base.__module__.partition(".")[0] for base in type(connection).__mro__}


def _kind(name: str) -> Kind:
    found = _KINDS.get(name)
    if found is None:
        raise InvalidSetting(
            f"a database of kind {name!r} is not known: SQLite, PostgreSQL, MySQL or MariaDB are"
        )
    return found


class _Driver:
    """A DB-API connection, or Django's, whose cursors are like one."""

    __slots__ = ("_connection", "_in_transaction", "_mark", "kind")

    def __init__(self, kind: Kind, connection: Any, in_transaction: Callable[[Any], bool]) -> None:
        self.kind: Kind = kind
        self._connection, self._in_transaction = connection, in_transaction
        self._mark = "?" if isinstance(connection, sqlite3.Connection) else "%s"

    def rows(self, sql: str, args: Args = ()) -> list[tuple[Any, ...]]:
        cursor = self._cursor()
        try:
            cursor.execute(self._sql(sql), tuple(args))
            return [tuple(row) for row in cursor.fetchall()]
        finally:
            cursor.close()

    def run(self, sql: str, args: Args = ()) -> int:
        cursor = self._cursor()
        try:
            cursor.execute(self._sql(sql), tuple(args))
            return int(cursor.rowcount)
        finally:
            cursor.close()

    def many(self, sql: str, rows: Sequence[Args]) -> None:
        cursor = self._cursor()
        try:
            cursor.executemany(self._sql(sql), [tuple(row) for row in rows])
        finally:
            cursor.close()

    @property
    def in_transaction(self) -> bool:
        return self._in_transaction(self._connection)

    def _sql(self, text: str) -> str:
        return text if self._mark == "?" else text.replace("?", self._mark)

    def _cursor(self) -> Any:
        """One that returns tuples, whatever rows the caller likes."""
        if isinstance(self._connection, sqlite3.Connection):
            cursor = self._connection.cursor()
            cursor.row_factory = None
            return cursor
        names = _packages(self._connection)
        if "psycopg" in names:
            from psycopg.rows import tuple_row

            return self._connection.cursor(row_factory=tuple_row)
        if "pymysql" in names:
            from pymysql.cursors import Cursor

            return self._connection.cursor(Cursor)
        return self._connection.cursor()


def _sqlite_in_transaction(connection: sqlite3.Connection) -> bool:
    if connection.in_transaction:
        return True
    mode = getattr(connection, "autocommit", None)  # since Python 3.12; -1: as `isolation_level` says
    return mode is False or (mode in (None, -1) and connection.isolation_level is not None)


def _psycopg_in_transaction(connection: Any) -> bool:
    return not connection.autocommit or connection.info.transaction_status.name != "IDLE"


def _pymysql_in_transaction(connection: Any) -> bool:
    return not connection.get_autocommit() or bool(connection.server_status & _MYSQL_IN_TRANSACTION)


def _django_in_transaction(connection: Any) -> bool:
    return bool(connection.in_atomic_block) or not connection.get_autocommit()


class _SqlAlchemy:
    """A session or a connection. Both begin by themselves; statements go to the driver as they are."""

    __slots__ = ("_connection", "_mark", "kind")

    def __init__(self, given: Any) -> None:
        self._connection = (
            given.connection() if hasattr(given, "connection") and callable(given.connection) else given
        )
        self.kind: Kind = _kind(self._connection.dialect.name)
        self._mark: str = self._connection.dialect.paramstyle

    def rows(self, sql: str, args: Args = ()) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._execute(sql, args).fetchall()]

    def run(self, sql: str, args: Args = ()) -> int:
        return int(self._execute(sql, args).rowcount)

    def many(self, sql: str, rows: Sequence[Args]) -> None:
        if rows:
            self._connection.exec_driver_sql(self._sql(sql), [tuple(row) for row in rows])

    @property
    def in_transaction(self) -> bool:
        options = self._connection.get_execution_options()
        level = options.get("isolation_level") or self._connection.default_isolation_level
        return bool(level != "AUTOCOMMIT")

    def _execute(self, sql: str, args: Args) -> Any:
        return self._connection.exec_driver_sql(self._sql(sql), tuple(args))

    def _sql(self, text: str) -> str:
        if self._mark == "qmark":
            return text
        if self._mark in ("format", "pyformat"):
            return text.replace("?", "%s")
        head, *rest = text.split("?")  # numeric: $1, $2, or :1, :2
        sign = "$" if self._mark == "numeric_dollar" else ":"
        return head + "".join(f"{sign}{number}{part}" for number, part in enumerate(rest, start=1))


# ---- a connection of our own ----


Opening = Callable[[], Any]


def opening(connect: Any, limits: Limits = DEFAULTS) -> Opening:
    """A call that opens a connection; it comes from the relay's own thread."""
    if isinstance(connect, str):
        return opening_of(parse(connect), limits) if ":" in connect else lambda: _django(connect)
    if hasattr(connect, "dialect") and hasattr(connect, "url"):  # an engine
        return (
            opening_of(parse(_address(connect.url)), limits)
            if databases.is_async(connect)
            else connect.connect
        )
    if callable(connect):
        return connect  # type: ignore[no-any-return]
    raise InvalidSetting(
        f"connect={connect!r}: give the relay an address such as postgresql://user:password@host/database, a "
        "function that returns a connection, an engine of SQLAlchemy, or the alias of a database of Django"
    )


def _django(alias: str) -> Any:
    """Its connections belong to threads: this one is the relay's own."""
    from django.db import connections

    connection = connections[alias]
    connection.close_if_unusable_or_obsolete()
    return connection


def opening_of(address: Address, limits: Limits = DEFAULTS) -> Opening:
    if address.kind == "sqlite":
        lock_s = limits.lock_timeout_ms // 1000
        return lambda: sqlite3.connect(str(address.path), isolation_level=None, timeout=lock_s)
    if address.kind == "postgresql":
        return lambda: _postgres(address, limits)
    if address.kind == "mysql":
        return lambda: _mysql(address, limits)
    raise InvalidSetting(
        f"an outbox is in a database of yours, SQLite, PostgreSQL or MySQL, and not in {address.kind}://"
    )


def _postgres(address: Address, limits: Limits) -> Any:
    import psycopg

    connection = psycopg.connect(
        address.dsn,
        autocommit=True,
        connect_timeout=max(2, limits.connect_timeout_ms // 1000),
        tcp_user_timeout=limits.tuning.client.user_answer_s * 1000,
        fallback_application_name="postroom outbox",
    )
    if address.pgbouncer:
        connection.prepare_threshold = None
    else:
        connection.execute(
            f"SET lock_timeout = {limits.lock_timeout_ms}; "  # locks end (I15)
            f"SET idle_in_transaction_session_timeout = {limits.idle_timeout_ms}"
        )
    return connection


def _mysql(address: Address, limits: Limits) -> Any:
    import pymysql

    options: dict[str, Any] = dict(address.server)
    answer_s, connect_s = limits.tuning.client.user_answer_s, limits.connect_timeout_ms // 1000
    patience = {"connect_timeout": connect_s, "read_timeout": answer_s, "write_timeout": answer_s}
    connection = pymysql.connect(**options, **patience, charset="utf8mb4", autocommit=True)
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {limits.lock_timeout_ms // 1000}")
        with suppress(pymysql.OperationalError):  # MySQL has no such limit
            cursor.execute(f"SET SESSION idle_transaction_timeout = {limits.idle_timeout_ms // 1000}")
    return connection


def _address(url: Any) -> str:
    """That of an async engine, for the driver that is not."""
    plain = {"sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
    name = plain.get(url.get_backend_name(), url.get_backend_name())
    if name == "sqlite":
        return f"sqlite:///{url.database}"
    return str(url.set(drivername=name, query={}).render_as_string(hide_password=False))
