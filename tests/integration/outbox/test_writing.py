"""Messages are written in the caller's own transaction, and share its fate (R30): on every database, by every
kind of connection. Nothing is sent here.
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import postroom
from postroom.errors import (
    InvalidMessage,
    InvalidName,
    InvalidSetting,
    MessageTooLarge,
    SchemaMismatch,
    UsageError,
)
from tests.integration.outbox.outbox_world import KINDS, Database


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Database:
    """One for all tests here: making one takes longer than most of them."""
    if request.param == "sqlite":
        return Database("sqlite", f"sqlite:///{tmp_path_factory.mktemp('shop')}/shop.db")
    server = request.getfixturevalue("postgres_server" if request.param == "postgres" else "mariadb_server")
    return Database(request.param, server.url(server.create_database()))


@pytest.fixture
def database(place: Database) -> Database:
    """With an outbox that is empty."""
    connection = place.connect()
    for name in ("postroom_outbox", "letters", "old"):
        for table in (name, f"{name}_relay"):
            connection.cursor().execute(f"DROP TABLE IF EXISTS {table}")
    connection.commit()
    postroom.Outbox().create_table(connection)
    connection.close()  # it was committed
    return place


@pytest.fixture
def shop(tmp_path: Path) -> Database:
    found = Database("sqlite", f"sqlite:///{tmp_path}/shop.db")
    connection = found.connect()
    postroom.Outbox().create_table(connection)
    connection.close()
    return found


@pytest.fixture
def outbox() -> postroom.Outbox:
    return postroom.Outbox()


@pytest.fixture
def woken(outbox: postroom.Outbox) -> list[str]:
    """Grows whenever a relay would be woken."""
    found: list[str] = []
    outbox._wakers.append(lambda: found.append("woken"))
    return found


@pytest.fixture
def connection(database: Database) -> Iterator[Any]:
    found = database.connect()
    yield found
    found.close()


# ---- plain connections ----


def test_a_commit_leaves_the_message_and_a_rollback_nothing(
    database: Database, outbox: postroom.Outbox, connection: Any, woken: list[str]
) -> None:
    with outbox.transaction(connection):
        outbox.send(connection, "orders", b"one", key="42")
        outbox.send_many(connection, "orders", [postroom.Message(b"two"), postroom.Message(b"three")])
        assert database.kind == "sqlite" or database.values() == []  # not committed yet
    assert database.values() == [b"one", b"two", b"three"]
    assert woken
    with suppress(ZeroDivisionError), outbox.transaction(connection):
        outbox.send(connection, "orders", b"never")
        raise ZeroDivisionError
    assert database.values() == [b"one", b"two", b"three"]


def test_a_commit_that_fails_is_rolled_back_and_not_left_to_the_next_block(
    shop: Database, outbox: postroom.Outbox
) -> None:
    """SQLite leaves the transaction open then, with its lock: seeds 1452, 2428 and 2482 of the simulator."""
    connection = sqlite3.connect(shop.url.removeprefix("sqlite:///"), isolation_level=None)
    connection.executescript("""PRAGMA foreign_keys = ON;
        CREATE TABLE customers (id INTEGER PRIMARY KEY);
        CREATE TABLE orders (customer INTEGER REFERENCES customers (id) DEFERRABLE INITIALLY DEFERRED);""")

    @outbox.transactional
    def order(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO orders VALUES (42)")
        outbox.send(connection, "orders", b"never")

    with pytest.raises(sqlite3.IntegrityError):
        order(connection)
    assert not connection.in_transaction
    with outbox.transaction(connection):
        outbox.send(connection, "orders", b"done")
    assert shop.values() == [b"done"]
    connection.close()


def test_it_joins_a_transaction_of_the_callers(
    database: Database, outbox: postroom.Outbox, connection: Any
) -> None:
    outbox.send(connection, "orders", b"undone")
    connection.rollback()
    outbox.send(connection, "orders", b"done")
    connection.commit()
    assert database.values() == [b"done"]


def test_a_savepoint_that_is_rolled_back_takes_its_own_messages_only(
    database: Database, outbox: postroom.Outbox, connection: Any
) -> None:
    with outbox.transaction(connection):
        outbox.send(connection, "orders", b"before")
        with suppress(ZeroDivisionError), outbox.transaction(connection):
            outbox.send(connection, "orders", b"inner")
            raise ZeroDivisionError
        with outbox.transaction(connection):
            outbox.send(connection, "orders", b"kept")
    assert database.values() == [b"before", b"kept"]


def test_a_released_savepoint_is_undone_with_the_transaction_around_it(
    database: Database, outbox: postroom.Outbox, connection: Any
) -> None:
    with suppress(ZeroDivisionError), outbox.transaction(connection):
        with outbox.transaction(connection):
            outbox.send(connection, "orders", b"inner")
        raise ZeroDivisionError
    assert database.values() == []


def test_a_connection_that_commits_by_itself_is_refused(database: Database, outbox: postroom.Outbox) -> None:
    connection = database.connect(autocommit=True)
    with pytest.raises(UsageError, match=r"outbox\.transaction"):
        outbox.send(connection, "orders", b"x")
    with outbox.transaction(connection):  # which begins one
        outbox.send(connection, "orders", b"fine")
    with suppress(ZeroDivisionError), outbox.transaction(connection):
        outbox.send(connection, "orders", b"undone")
        raise ZeroDivisionError
    connection.close()
    assert database.values() == [b"fine"]


def test_making_the_tables_again_changes_nothing_and_joins_a_transaction(tmp_path: Path) -> None:
    outbox, path = postroom.Outbox("letters"), tmp_path / "a.db"
    connection = sqlite3.connect(path)
    connection.execute("BEGIN")
    outbox.create_table(connection)
    connection.rollback()
    with pytest.raises(SchemaMismatch):
        outbox.send(connection, "orders", b"x")
    connection.rollback()
    outbox.create_table(connection)
    with outbox.transaction(connection):
        outbox.send(connection, "orders", b"kept")
    outbox.create_table(connection)
    connection.close()
    assert Database("sqlite", f"sqlite:///{path}").values("letters") == [b"kept"]


# ---- SQLAlchemy ----


def test_sessions_of_sqlalchemy(database: Database, outbox: postroom.Outbox, woken: list[str]) -> None:
    engine = database.engine()
    with Session(engine) as session, session.begin():
        outbox.send(session, "orders", b"one")
    assert database.values() == [b"one"]
    assert woken
    with Session(engine) as session:
        outbox.send(session, "orders", b"undone")
        session.rollback()
        with outbox.transaction(session):
            outbox.send(session, "orders", b"two")
            with suppress(ZeroDivisionError), session.begin_nested():
                outbox.send(session, "orders", b"inner")
                raise ZeroDivisionError
    assert database.values() == [b"one", b"two"]
    engine.dispose()


def test_connections_of_sqlalchemy(database: Database, outbox: postroom.Outbox, woken: list[str]) -> None:
    engine = database.engine()
    with engine.begin() as connection:
        outbox.send(connection, "orders", b"one")
    assert woken
    with engine.connect() as connection:
        with suppress(ZeroDivisionError), outbox.transaction(connection):
            outbox.send(connection, "orders", b"undone")
            raise ZeroDivisionError
        with outbox.transaction(connection):
            outbox.send(connection, "orders", b"two")
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with connection, pytest.raises(UsageError, match="commits each statement"):
        outbox.send(connection, "orders", b"x")
    assert database.values() == [b"one", b"two"]
    engine.dispose()


def test_a_released_savepoint_wakes_and_leaves_nothing_to_send(
    shop: Database, outbox: postroom.Outbox, woken: list[str]
) -> None:
    """I21: `after_commit` comes for it, though the transaction around it is rolled back."""
    engine = shop.engine()
    with Session(engine) as session:
        outbox.send(session, "orders", b"outer")  # sqlite3 begins with a write, and not with a savepoint
        with session.begin_nested():
            outbox.send(session, "orders", b"inner")
        told = len(woken)
        session.rollback()
    assert told, "the event did come: what it does matters"
    assert shop.values() == []


def test_async_sessions_and_connections_of_sqlalchemy(
    shop: Database, outbox: postroom.Outbox, woken: list[str]
) -> None:
    async def work() -> None:
        engine = create_async_engine(shop.url.replace("sqlite", "sqlite+aiosqlite", 1))
        async with AsyncSession(engine) as session, session.begin():
            await outbox.send(session, "orders", b"one")
        assert woken
        async with AsyncSession(engine) as session:
            with suppress(ZeroDivisionError):
                async with outbox.transaction(session):
                    await outbox.send(session, "orders", b"undone")
                    raise ZeroDivisionError
            async with outbox.transaction(session):
                await outbox.send(session, "orders", b"two")
                with suppress(ZeroDivisionError):
                    async with outbox.transaction(session):
                        await outbox.send(session, "orders", b"inner")
                        raise ZeroDivisionError
        async with engine.begin() as connection:
            await outbox.send_many(connection, "orders", [postroom.Message(b"three")])
            assert (await outbox.status(connection)).messages == 3
        with pytest.raises(UsageError, match="async with"), outbox.transaction(session):
            raise AssertionError("not entered")
        await engine.dispose()

    asyncio.run(work())
    assert shop.values() == [b"one", b"two", b"three"]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("what", ["session", "connection"])
def test_a_send_that_was_not_awaited_stops_the_commit(
    shop: Database, outbox: postroom.Outbox, what: str
) -> None:
    async def work() -> None:
        engine = create_async_engine(shop.url.replace("sqlite", "sqlite+aiosqlite", 1))
        opened: Any = AsyncSession(engine) if what == "session" else engine.connect()
        async with opened as connection:
            await outbox.send(connection, "orders", b"awaited")
            outbox.send(connection, "orders", b"forgotten")
            with pytest.raises(UsageError, match="not awaited"):
                await connection.commit()
            await connection.rollback()
            await outbox.send(connection, "orders", b"afterwards")
            await connection.commit()
        await engine.dispose()

    asyncio.run(work())
    assert shop.values() == [b"afterwards"]


# ---- Django ----

_DJANGO = """
    import sys
    from django.conf import settings
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}})
    import django; django.setup()
    from django.db import connection, transaction
    import postroom

    outbox, woken = postroom.Outbox(), []
    outbox._wakers.append(lambda: woken.append(1))
    outbox.create_table(connection)
    try:
        outbox.send(connection, "orders", b"outside")
    except postroom.UsageError as error:
        assert "outbox.transaction" in str(error), error
    else:
        raise AssertionError("an autocommit was not refused")
    with transaction.atomic():
        outbox.send(connection, "orders", b"one")
        try:
            with transaction.atomic():
                outbox.send("default", "orders", b"inner")
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert not woken, "nothing is committed yet"
    assert woken
    try:
        with transaction.atomic():
            with transaction.atomic():
                outbox.send(connection, "orders", b"released")
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    with outbox.transaction("default"):
        outbox.send("default", "orders", b"two")

    @outbox.transactional(connect="default")
    def place(connection, value):
        outbox.send(connection, "orders", value)
    place(b"three")
    assert outbox.status("default").messages == 3
    with postroom.sync.connect(sys.argv[2]) as mq:
        mq.create_topic("orders", partitions=1)
        with outbox.relay(mq, "default"), mq.consumer("orders", group="all") as consumer:
            for expected in (b"one", b"two", b"three"):
                assert next(consumer).value == expected
    assert not outbox.status("default").relay
"""


def test_django(tmp_path: Path) -> None:
    script = tmp_path / "django_shop.py"
    script.write_text(textwrap.dedent(_DJANGO))
    shop, queue = tmp_path / "shop.db", f"sqlite:///{tmp_path}/queue.db"
    subprocess.run([sys.executable, str(script), str(shop), queue], check=True, timeout=60)
    assert Database("sqlite", f"sqlite:///{shop}").values() == []


# ---- the decorator ----


def test_a_function_is_a_transaction_in_one_line(shop: Database, outbox: postroom.Outbox) -> None:
    class Shop:
        @outbox.transactional
        def place(self, connection: Any, value: bytes, fail: bool = False) -> str:
            outbox.send(connection, "orders", value)
            if fail:
                raise ZeroDivisionError
            return "placed"

    @outbox.transactional(connect=shop.connect)
    def place(connection: Any, value: bytes) -> None:
        outbox.send(connection, "orders", value)
        opened.append(connection)

    opened: list[Any] = []
    connection = shop.connect()
    assert Shop().place(connection, b"one") == "placed"
    with pytest.raises(ZeroDivisionError):
        Shop().place(value=b"undone", connection=connection, fail=True)
    place(b"two")
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")
    with pytest.raises(UsageError, match="connect="):
        Shop().place("no connection", b"x")
    assert shop.values() == [b"one", b"two"]
    connection.close()


def test_it_takes_sessions_and_coroutine_functions(shop: Database, outbox: postroom.Outbox) -> None:
    engine = shop.engine()

    @outbox.transactional(connect=sessionmaker(engine))
    def place(session: Session, value: bytes) -> None:
        session.execute(sqlalchemy.text("SELECT 1"))
        outbox.send(session, "orders", value)

    place(b"one")

    async def work() -> None:
        engine = create_async_engine(shop.url.replace("sqlite", "sqlite+aiosqlite", 1))

        @outbox.transactional(connect=async_sessionmaker(engine))
        async def place(session: AsyncSession, value: bytes, fail: bool = False) -> None:
            await outbox.send(session, "orders", value)
            if fail:
                raise ZeroDivisionError

        @outbox.transactional
        async def place_on(session: AsyncSession, value: bytes) -> None:
            await outbox.send(session, "orders", value)

        await place(b"two")
        with pytest.raises(ZeroDivisionError):
            await place(b"undone", fail=True)
        async with AsyncSession(engine) as session:
            await place_on(session, b"three")
        await engine.dispose()

    asyncio.run(work())
    engine.dispose()
    assert shop.values() == [b"one", b"two", b"three"]


# ---- bad input ----


def test_a_missing_table_says_what_to_do(database: Database) -> None:
    outbox = postroom.Outbox("nowhere")
    connection = database.connect()
    with pytest.raises(SchemaMismatch, match=r"no outbox nowhere .*create_table"):
        outbox.send(connection, "orders", b"x")
    connection.rollback()
    with pytest.raises(SchemaMismatch, match=r"no outbox nowhere .*create_table"):
        outbox.status(connection)
    connection.close()
    engine = database.engine()
    with engine.connect() as wrapped, pytest.raises(SchemaMismatch, match="no outbox nowhere"):
        outbox.send(wrapped, "orders", b"x")
    engine.dispose()


def test_an_old_table_says_what_to_do(database: Database) -> None:
    outbox, connection = postroom.Outbox("old"), database.connect()
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE old (id INTEGER PRIMARY KEY, topic VARCHAR(120))")
    connection.commit()
    with pytest.raises(SchemaMismatch, match="another version"):
        outbox.send(connection, "orders", b"x")
    connection.rollback()
    for version, advice in ((0, "create_table"), (99, "update Postroom")):
        cursor.execute(f"UPDATE postroom_outbox_relay SET version = {version}")
        with pytest.raises(SchemaMismatch, match=advice):
            postroom.Outbox().status(connection)
        connection.rollback()
    connection.close()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"topic": "_mine"}, InvalidName),
        ({"value": object()}, InvalidMessage),
        ({"key": 42}, InvalidMessage),
        ({"headers": {"postroom-id": "x"}}, InvalidMessage),
        ({"slot": 5000}, InvalidSetting),
        ({"delay": 5, "at": 6}, InvalidSetting),
        ({"value": bytes(5_000_000)}, MessageTooLarge),
    ],
)
def test_a_wrong_message_is_refused_when_it_is_written(
    shop: Database, outbox: postroom.Outbox, wrong: dict[str, Any], error: type[Exception]
) -> None:
    connection = shop.connect()
    arguments: dict[str, Any] = {"topic": "orders", "value": b"x", **wrong}
    with pytest.raises(error):
        outbox.send(connection, **arguments)
    connection.close()


def test_what_is_no_connection_is_refused(outbox: postroom.Outbox) -> None:
    with pytest.raises(InvalidSetting, match="psycopg"):
        outbox.send(object(), "orders", b"x")
    with pytest.raises(InvalidSetting, match="letters, digits"):
        postroom.Outbox("drop table; --")
    with pytest.raises(InvalidSetting, match="sqlite, postgres"):
        outbox.ddl("oracle")
    with pytest.raises(InvalidSetting, match="an address"):
        outbox.relay(None, 7)


# ---- Alembic ----


def test_alembic_does_not_see_the_tables(database: Database, outbox: postroom.Outbox) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    engine = database.engine()
    metadata = sqlalchemy.MetaData()
    with engine.connect() as connection:
        seen = MigrationContext.configure(connection)
        assert {found[0] for found in compare_metadata(seen, metadata)} >= {"remove_table"}
        hidden = MigrationContext.configure(connection, opts={"include_name": outbox.include_name})
        assert compare_metadata(hidden, metadata) == []
        chosen = postroom.Outbox("letters").include_name
        assert [chosen(name, "table", {}) for name in ("letters", "letters_relay", "mine")] == [0, 0, 1]
    engine.dispose()


def test_the_statements_of_a_migration_make_the_tables(database: Database) -> None:
    outbox, connection = postroom.Outbox("letters"), database.connect()
    for statement in outbox.ddl(database.kind):
        connection.cursor().execute(statement)
    connection.commit()
    with outbox.transaction(connection):
        outbox.send(connection, "orders", b"one")
    assert outbox.status(connection).messages == 1
    connection.close()
