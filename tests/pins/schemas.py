"""The tables as this version makes them: the queue's, a spool's, and those in a user's own database.

The queue has a durable and a volatile topic, since logs are made with their topic. Migrations are pinned as
they are written: by them queues of every version have got the tables they have. That each older version
becomes this one is tested by `tests/integration/store/test_schema.py` (files, every version) and
`tests/contract/cli/operate/test_migrate.py` (servers).
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import postroom
import postroom.sync
from postroom import guards
from tests.servers.server import Server

from .internals import migrations

__all__ = ["mariadb_schema_text", "migrations_text", "postgres_schema_text", "sqlite_schema_text"]

_SPACE = re.compile(r"\s+")


def _make_queue(url: str) -> None:
    with postroom.sync.connect(url, migrate=True) as mq:
        mq.create_topic("durable", partitions=1)
        mq.create_topic("volatile", partitions=1, storage="volatile")


def _make_users(connection: Any) -> None:
    postroom.Outbox().create_table(connection)
    guards.create_tables(connection)
    connection.commit()


def _text(sections: dict[str, Iterable[str]]) -> str:
    lines = (line for title, entries in sections.items() for line in (f"== {title}", *entries, ""))
    return "\n".join(lines).rstrip("\n") + "\n"


def migrations_text() -> str:
    return _text(
        {
            f"version {version}, {part}": [
                _SPACE.sub(" ", statement) for *where, statement in migrations() if where == [version, part]
            ]
            for version, part, _ in migrations()
        }
    )


# ---- SQLite ----


def sqlite_schema_text() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "queue.db"
        _make_queue(f"sqlite:///{path}")
        with closing(sqlite3.connect(Path(folder) / "users.db")) as connection:
            _make_users(connection)
        with postroom.sync.Spool(Path(folder) / "spool.db", f"sqlite:///{path}"):
            pass  # its file stays, for whoever opens it next
        found = {}
        for file in sorted(Path(folder).iterdir()):
            if file.read_bytes()[:6] == b"SQLite":
                with closing(sqlite3.connect(file)) as connection:
                    found[file.name] = list(_sqlite_lines(connection))
        return _text({**found})


def _sqlite_lines(connection: sqlite3.Connection) -> Iterator[str]:
    rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()
    for (sql,) in rows:
        head, bracket, rest = _SPACE.sub(" ", sql).partition(" (")
        yield head + bracket.rstrip("(").rstrip()
        yield from (f"    {part}" for part in _parts(rest))


def _parts(text: str) -> Iterator[str]:
    """Columns and what follows them, one each: cut at commas that are in no brackets."""
    depth, start = 0, 0
    for at, sign in enumerate(text):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if (sign == "," and depth == 0) or depth < 0:
            yield text[start:at].strip()
            if depth < 0:
                if after := text[at + 1 :].strip():
                    yield f"then {after}"
                return
            start = at + 1


# ---- servers ----


def postgres_schema_text(server: Server) -> str:
    return _of_server(
        server,
        {
            "tables": (
                "SELECT c.relname, c.relpersistence, coalesce(array_to_string(c.reloptions, ','), '') "
                "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
                "WHERE n.nspname = 'public' AND c.relkind IN ('r', 'p', 'S', 'v')"
            ),
            "columns": (
                "SELECT table_name, lpad(ordinal_position::text, 2, '0'), column_name, "
                "data_type || coalesce('(' || character_maximum_length || ')', ''), "
                "CASE is_nullable WHEN 'NO' THEN 'not null' ELSE 'null' END, "
                "coalesce('default ' || column_default, ''), "
                "coalesce('identity ' || identity_generation, ''), coalesce(collation_name, '') "
                "FROM information_schema.columns WHERE table_schema = 'public'"
            ),
            "constraints": (
                "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
                "WHERE connamespace = 'public'::regnamespace AND contype <> 'n'"
            ),
            "indexes": "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public'",
            "functions and triggers": (
                "SELECT 'function', proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace "
                "UNION SELECT 'trigger', tgname FROM pg_trigger WHERE NOT tgisinternal"
            ),
        },
    )


def mariadb_schema_text(server: Server) -> str:
    return _of_server(
        server,
        {
            "tables": (
                f"SELECT table_name, engine, {_collation('table_collation')}, row_format "
                "FROM information_schema.tables WHERE table_schema = DATABASE()"
            ),
            "columns": (
                "SELECT table_name, lpad(ordinal_position, 2, '0'), column_name, column_type, "
                "CASE is_nullable WHEN 'NO' THEN 'not null' ELSE 'null' END, "
                "coalesce(concat('default ', column_default), ''), extra, "
                f"{_collation('collation_name')} "
                "FROM information_schema.columns WHERE table_schema = DATABASE()"
            ),
            "indexes": (
                "SELECT table_name, index_name, CASE non_unique WHEN 0 THEN 'unique' ELSE '' END, "
                "group_concat(concat(column_name, coalesce(concat('(', sub_part, ')'), '')) "
                "ORDER BY seq_in_index SEPARATOR ', ') FROM information_schema.statistics "
                "WHERE table_schema = DATABASE() GROUP BY table_name, index_name, non_unique"
            ),
        },
    )


def _collation(column: str) -> str:
    """Where none is set it is the database's, which differs between versions of the server."""
    return f"CASE WHEN {column} = @@collation_database THEN '' ELSE coalesce({column}, '') END"


def _of_server(server: Server, questions: dict[str, str]) -> str:
    found: dict[str, Iterable[str]] = {}
    for whose in ("queue", "users"):
        name = server.create_database()
        try:
            if whose == "queue":
                _make_queue(server.url(name))
            with closing(server.connect(name)) as connection:
                if whose == "users":
                    _make_users(connection)
                for title, question in questions.items():
                    found[f"{whose}: {title}"] = _rows(connection, question)
        finally:
            server.drop_database(name)
    return _text(found)


def _rows(connection: Any, question: str) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(question)
        return sorted(" | ".join(str(one) for one in row if one != "") for row in cursor.fetchall())
