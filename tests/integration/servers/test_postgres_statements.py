"""Statements on PostgreSQL past psycopg's cursors: values, answers in their order, and what becomes of one
that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from postroom.store.dialects import postgres_connection
from postroom.store.dialects.postgres_connection import ImpatientConnection, Statements
from tests.servers import PostgresServer

VALUES = (
    0, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, -(2**63), True,
    "", "Zürich 🐟", "it's ? \\ $1", b"", bytes(range(256)), 0.1, -1e300, None,
)  # fmt: skip


@pytest.fixture
def connection(postgres_url: str) -> Iterator[ImpatientConnection]:
    with ImpatientConnection.connect(postgres_url, autocommit=True) as made:
        made.ask(
            "CREATE TABLE notes (id BIGINT PRIMARY KEY, small INTEGER, note TEXT, body BYTEA, share FLOAT8)"
        )
        yield made


def cast(value: Any) -> str:
    kind = {bool: "int", int: "bigint", str: "text", bytes: "bytea", float: "float8"}.get(type(value), "text")
    return f"?::{kind}"


def prepared(connection: ImpatientConnection) -> int:
    """How many statements the server keeps for this session."""
    return int(connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()[0])


def test_values_come_back_as_they_went(connection: ImpatientConnection) -> None:
    everything = "SELECT " + ", ".join(map(cast, VALUES))
    for _ in range(3):  # not prepared, being prepared, prepared
        assert connection.ask(everything, VALUES).fetchall() == [VALUES]
    statements = Statements(connection)
    replies = [statements.add(f"SELECT {cast(value)}", (value,)) for value in VALUES * 3]
    statements.sync()
    statements.leave()
    assert [reply.fetchone() for reply in replies] == [(value,) for value in VALUES * 3]


def test_numbers_are_no_larger_than_functions_and_columns_take(connection: ImpatientConnection) -> None:
    assert connection.ask("SELECT substr('letters', ?, ?)", (2, 3)).fetchone() == ("ett",)
    connection.ask("INSERT INTO notes (id, small) VALUES (?, ?)", (2**40, 7))
    with pytest.raises(psycopg.errors.NumericValueOutOfRange):
        connection.ask("INSERT INTO notes (id, small) VALUES (?, ?)", (1, 2**40))
    assert connection.ask("SELECT small FROM notes WHERE id = ? LIMIT ?", (2**40, 1)).fetchall() == [(7,)]


def test_answers_are_those_of_their_statements(connection: ImpatientConnection) -> None:
    insert, found = "INSERT INTO notes (id, note) VALUES (?, ?)", "SELECT note FROM notes WHERE id = ?"
    statements = Statements(connection)
    statements.add("BEGIN")
    for number in range(5):
        statements.add(insert, (number, f"note {number}"))
        one = statements.add(found, (number,))
        none = statements.add(found, (-1,))
        changed = statements.add("UPDATE notes SET note = 'changed' WHERE id < ?", (number,))
        if number % 2:
            statements.sync()
            assert (one.fetchall(), none.fetchone(), changed.rowcount) == (
                [(f"note {number}",)],
                None,
                number,
            )
    done = statements.add("COMMIT")
    statements.sync()
    statements.leave()
    assert done.status == b"COMMIT"
    assert prepared(connection) >= 3
    with pytest.raises(psycopg.ProgrammingError, match="no rows"):
        changed.fetchone()


def test_nothing_runs_behind_one_that_fails(connection: ImpatientConnection) -> None:
    """What was to be prepared behind it is not, and what was before it is: nothing piles up at the server."""
    insert, other, third = (
        f"INSERT INTO notes (id, {column}) VALUES (?, NULL)" for column in ("note", "body", "share")
    )
    connection.ask(insert, (1,))
    for attempt in range(20):
        statements = Statements(connection)
        statements.add("BEGIN")
        statements.add(other, (2,))
        statements.add(insert, (1,))
        last = statements.add(third, (3,))
        with pytest.raises(psycopg.errors.UniqueViolation):
            statements.sync()
        assert last.result is None
        statements.add(third, (3,))
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            statements.sync()
        done = statements.add("COMMIT")
        statements.sync()
        statements.leave()
        assert done.status == b"ROLLBACK"
        assert connection.ask("SELECT id FROM notes").fetchall() == [(1,)]
        if attempt == 3:
            kept = prepared(connection)
    assert prepared(connection) <= kept + 2
    for number in (3, 4, 5):  # as good as new
        connection.ask(third, (number,))


def test_statements_that_somebody_has_dropped_are_prepared_again(connection: ImpatientConnection) -> None:
    for _ in range(3):
        connection.ask("SELECT 1")
    connection.execute("DEALLOCATE ALL")
    assert connection.ask("SELECT 1").fetchone() == (1,)
    connection.ask("SELECT 1")
    connection.execute("DEALLOCATE ALL")
    statements = Statements(connection)
    statements.add("SELECT 1")
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        statements.sync()
    statements.add("SELECT 1")  # whoever runs the verb again meets nothing of it
    statements.sync()
    statements.leave()


def test_a_connection_keeps_as_many_prepared_as_it_may(
    connection: ImpatientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connection, "_MOST_NAMES", 10)
    for number in range(50):
        for _ in range(3):
            assert connection.ask(f"SELECT {number}").fetchone() == (number,)
    assert prepared(connection) <= 11
    connection.prepares = False
    connection.execute("DEALLOCATE ALL")
    connection.forget()
    for _ in range(3):
        connection.ask("SELECT 1")
    assert prepared(connection) == 0


def test_much_goes_both_ways_at_once(connection: ImpatientConnection) -> None:
    """More than sockets hold: whoever only sends, or only reads, would wait for ever."""
    connection.patience_s, large = 30, bytes(3_000_000)
    statements = Statements(connection)
    replies = [statements.add("SELECT ?::bytea", (large,)) for _ in range(10)]
    statements.sync()
    statements.leave()
    assert {reply.fetchone() for reply in replies} == {(large,)}


def test_what_is_no_value_is_refused_before_it_is_sent(connection: ImpatientConnection) -> None:
    statements = Statements(connection)
    with pytest.raises(psycopg.ProgrammingError, match="no value of a statement: dict"):
        statements.add("SELECT ?", ({},))
    statements.sync()
    statements.leave()
    assert connection.ask("SELECT ?::text", ("here",)).fetchone() == ("here",)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_session_that_is_ended_says_so(
    connection: ImpatientConnection, postgres_server: PostgresServer, when: str
) -> None:
    connection.patience_s = 30
    ours = connection.ask("SELECT pg_backend_pid()").fetchone()
    assert ours is not None

    def end() -> None:
        with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 30000)", ours)

    statements = Statements(connection)
    statements.add("BEGIN")
    if when == "before":
        end()
    ending = threading.Timer(0.1, end)
    if when == "meanwhile":
        statements.add("SELECT pg_sleep(60)")
        ending.start()
    with pytest.raises(psycopg.OperationalError):
        statements.sync()
    if when == "meanwhile":
        ending.join()
    assert connection.closed or connection.broken
    with pytest.raises(psycopg.OperationalError):
        connection.ask("SELECT 1")
