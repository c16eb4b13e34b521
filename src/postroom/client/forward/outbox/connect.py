"""How a relay opens a connection of its own to the caller's database.

It is given an address, as of `postroom.connect`; a function that returns a connection; an engine of
SQLAlchemy; or the alias of a database of Django. Decides nothing else. Must never change settings of the
database that outlive the connection, such as SQLite's journal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ....address import Address, parse
from ....config import DEFAULTS
from ....errors import InvalidSetting
from ... import databases

__all__ = ["Opening", "opening", "opening_of"]

Opening = Callable[[], Any]

_LOCK_S, _IDLE_S = DEFAULTS.lock_timeout_ms // 1000, DEFAULTS.idle_timeout_ms // 1000  # locks end (I15)
_CONNECT_S, _ANSWER_S = DEFAULTS.connect_timeout_ms // 1000, 30


def opening(connect: Any) -> Opening:
    """A call that opens a connection; it comes from the relay's own thread."""
    if isinstance(connect, str):
        return opening_of(parse(connect)) if ":" in connect else lambda: _django(connect)
    if hasattr(connect, "dialect") and hasattr(connect, "url"):  # an engine
        return opening_of(parse(_address(connect.url))) if databases.is_async(connect) else connect.connect
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


def opening_of(address: Address) -> Opening:
    if address.kind == "sqlite":
        return lambda: sqlite3.connect(str(address.path), isolation_level=None, timeout=_LOCK_S)
    if address.kind == "postgresql":
        return lambda: _postgres(address)
    if address.kind == "mysql":
        return lambda: _mysql(address)
    raise InvalidSetting(
        f"an outbox is in a database of yours, SQLite, PostgreSQL or MySQL, and not in {address.kind}://"
    )


def _postgres(address: Address) -> Any:
    import psycopg

    connection = psycopg.connect(
        address.dsn,
        autocommit=True,
        connect_timeout=max(2, _CONNECT_S),
        tcp_user_timeout=_ANSWER_S * 1000,
        fallback_application_name="postroom outbox",
    )
    if address.pgbouncer:
        connection.prepare_threshold = None
    else:
        connection.execute(
            f"SET lock_timeout = '{_LOCK_S}s'; SET idle_in_transaction_session_timeout = '{_IDLE_S}s'"
        )
    return connection


def _mysql(address: Address) -> Any:
    import pymysql

    options: dict[str, Any] = dict(address.server)
    limits = {"connect_timeout": _CONNECT_S, "read_timeout": _ANSWER_S, "write_timeout": _ANSWER_S}
    connection = pymysql.connect(**options, **limits, charset="utf8mb4", autocommit=True)
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {_LOCK_S}")
        with suppress(pymysql.OperationalError):  # MySQL has no such limit
            cursor.execute(f"SET SESSION idle_transaction_timeout = {_IDLE_S}")
    return connection


def _address(url: Any) -> str:
    """That of an async engine, for the driver that is not."""
    plain = {"sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
    name = plain.get(url.get_backend_name(), url.get_backend_name())
    if name == "sqlite":
        return f"sqlite:///{url.database}"
    return str(url.set(drivername=name, query={}).render_as_string(hide_password=False))
