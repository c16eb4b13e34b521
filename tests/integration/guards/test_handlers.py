"""Guards over handlers: they open a connection, own its transaction, and take what an app gives (R33)."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import RetryLater, SchemaMismatch, guards
from tests.integration.guards.guarding import SCOPE, Place, delivered, effects, note, prepare
from tests.integration.processes.children import child, received

PATIENCE_S = 60


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place("sqlite", f"sqlite:///{tmp_path}/books.db")
    connection = found.connect()
    prepare(connection)
    connection.close()
    return found


def by_driver(place: Place) -> Callable[[], Any]:
    return place.connect


def by_autocommit(place: Place) -> Callable[[], Any]:
    """The transaction is the guard's, so it begins one where the driver does not."""

    def connect() -> sqlite3.Connection:
        connection: sqlite3.Connection = place.connect()
        connection.isolation_level = None
        return connection

    return connect


@pytest.mark.parametrize("opens", [by_driver, by_autocommit])
def test_it_commits_when_the_handler_returns_and_rolls_back_when_it_raises(
    place: Place, opens: Callable[[Place], Callable[[], Any]]
) -> None:
    @guards.once(opens(place), scope=SCOPE)
    def handle(body: bytes, message: postroom.Received, connection: Any) -> str:
        note(connection, int(body))
        if message.attempt == 1:
            raise RuntimeError("not yet")
        return f"handled {int(body)}"

    with pytest.raises(RuntimeError):
        handle(b"7", message=delivered(1))
    assert effects(place) == []
    assert handle(b"7", delivered(1, attempt=2)) == "handled 7"
    assert handle(b"7", message=delivered(1, attempt=3)) is None
    assert effects(place) == [7]


def test_a_handler_need_not_ask_for_the_message(place: Place) -> None:
    """The guard does so in its stead, and an app sees that by the signature."""
    seen: list[tuple[str, int]] = []

    @dataclass
    class Order:
        number: int

    @guards.in_sequence(place.connect, scope=SCOPE)
    def handle(order: Order, connection: sqlite3.Connection, note: str = "x") -> None:
        seen.append((note, order.number))

    second = delivered(2, value=b'{"number": 2}', version=2)
    handle(Order(2), message=second)
    handle(Order(1), message=delivered(1, value=b'{"number": 1}', version=1))
    assert seen == [("x", 1), ("x", 2)]  # the second was decoded anew when its turn came


def test_what_waited_is_committed_with_the_message_that_released_it(place: Place) -> None:
    @guards.in_sequence(place.connect, scope=SCOPE)
    def handle(body: bytes, message: postroom.Received, connection: Any) -> None:
        note(connection, int(message.headers["version"]))
        assert body == message.value

    for version in (2, 3, 1):
        handle(b"%d" % version, message=delivered(version, version=version))
    assert effects(place) == [1, 2, 3]


def test_a_hand_back_leaves_nothing_behind(place: Place) -> None:
    @guards.transitions(place.connect, rules={"created": None, "paid": {"created"}}, scope=SCOPE)
    def handle(message: postroom.Received, connection: Any) -> None:
        note(connection, message.offset)

    with pytest.raises(RetryLater):
        handle(message=delivered(2, event="paid"))
    handle(message=delivered(1, event="created"))
    handle(message=delivered(2, event="paid"))
    assert effects(place) == [1, 2]


def test_missing_tables_are_found_before_the_handler_runs(tmp_path: Path) -> None:
    @guards.newest(lambda: sqlite3.connect(tmp_path / "empty.db"), scope=SCOPE)
    def handle(message: postroom.Received) -> None:
        raise AssertionError("the handler ran")

    with pytest.raises(SchemaMismatch, match="create_tables"):
        handle(message=delivered(1, version=1))


async def test_an_async_handler_with_a_session_of_sqlalchemy(place: Place) -> None:
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine

    engine = create_async_engine(place.url.replace("sqlite:", "sqlite+aiosqlite:"))
    adds = text("INSERT INTO effects (number) VALUES (:number)")

    @guards.once(async_sessionmaker(engine), scope=SCOPE)
    async def by_session(body: bytes, message: postroom.Received, session: AsyncSession) -> None:
        await session.execute(adds, {"number": int(body)})
        if message.attempt == 1:
            raise RuntimeError("not yet")

    @guards.newest(engine.connect, scope=SCOPE)
    async def by_connection(body: bytes, connection: AsyncConnection) -> None:
        await connection.execute(adds, {"number": int(body)})

    with pytest.raises(RuntimeError):
        await by_session(b"7", message=delivered(1))
    for attempt in (2, 3):
        await by_session(b"7", message=delivered(1, attempt=attempt))
    for version in (2, 1):
        await by_connection(b"%d" % version, message=delivered(version, version=version))
    async with engine.connect() as connection:
        await guards.create_tables(connection)  # once more is harmless
        assert await guards.waiting(connection) == []
        assert await guards.prune(connection) == 0
    async with async_sessionmaker(engine)() as session, session.begin():
        async with guards.once(session, delivered(1), scope=SCOPE) as fresh:
            assert not fresh
        async with guards.once(session, delivered(5), scope=SCOPE) as fresh:
            assert fresh
    await engine.dispose()
    assert effects(place) == [2, 7]


def test_a_session_of_sqlalchemy(place: Place) -> None:
    from sqlalchemy import create_engine, text
    from sqlalchemy.orm import Session, sessionmaker

    engine = create_engine(place.url)

    @guards.once(sessionmaker(engine), scope=SCOPE)
    def handle(message: postroom.Received, session: Session) -> None:
        session.execute(text(f"INSERT INTO effects (number) VALUES ({message.offset})"))

    for offset in (1, 2, 1):
        handle(message=delivered(offset))
    at_once = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with at_once, pytest.raises(postroom.UsageError, match="begin a transaction first"):
        guards.once(at_once, delivered(3), scope=SCOPE).__enter__()
    for opens in (engine, sessionmaker(engine)):
        with pytest.raises(postroom.InvalidSetting, match="give what it opens"):
            guards.once(opens, delivered(3), scope=SCOPE).__enter__()
    engine.dispose()
    assert effects(place) == [1, 2]


def in_django(path: str, pipe: Any) -> None:
    """In a process of its own: Django's settings are the process's."""
    import django
    from django.conf import settings

    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": path}}, INSTALLED_APPS=[]
    )
    django.setup()
    from django.db import connection, transaction

    @guards.once("default", scope=SCOPE)
    def handle(message: postroom.Received) -> None:
        note(connection, message.offset)
        if message.attempt == 1:
            raise RuntimeError("not yet")

    try:
        handle(message=delivered(1))
    except RuntimeError as error:
        pipe.send(str(error))
    handle(message=delivered(1, attempt=2))
    handle(message=delivered(1, attempt=3))
    try:
        guards.once(connection, delivered(2), scope=SCOPE).__enter__()
    except postroom.UsageError as error:
        pipe.send(str(error))
    with transaction.atomic(), guards.once("default", delivered(2), scope=SCOPE) as fresh:
        note(connection, 2)
    pipe.send(fresh)


def test_django(place: Place, tmp_path: Path) -> None:
    with child(in_django, f"{tmp_path}/books.db") as (_, pipe):
        assert received(pipe, PATIENCE_S) == "not yet"
        assert "begin a transaction first" in received(pipe, PATIENCE_S)
        assert received(pipe, PATIENCE_S) is True
    assert effects(place) == [1, 2]


async def test_a_message_that_was_moved_is_still_the_same(place: Place, tmp_path: Path) -> None:
    """It was handled, and yet ended in the dead letters: redriven, it comes from another topic."""
    connection = place.connect()
    fresh = []
    async with postroom.connect(f"sqlite:///{tmp_path}/queue.db") as mq:
        await mq.create_topic("orders")
        await mq.send("orders", b"1", key="42")
        async with mq.consumer("orders", group="billing") as consumer:
            for _ in range(2):
                message = await anext(consumer)
                with guards.once(connection, message) as first:
                    fresh.append(first)
                connection.commit()
                await message.dead("by mistake")
                await mq.redrive("orders", "billing")
    connection.close()
    assert fresh == [True, False]


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_an_app_runs_guarded_handlers(place: Place, tmp_path: Path, kind: str) -> None:
    """The queue delivers twice what is retried; known by topic and group, and by the id that was sent."""
    app = postroom.App(f"sqlite:///{tmp_path}/queue.db")
    done, loop = asyncio.Event(), asyncio.get_running_loop()
    took: list[tuple[bytes, int]] = []

    def work(body: bytes, message: Any, connection: Any) -> None:
        note(connection, int(body))
        took.append((body, message.attempt))
        if int(body) == 1 and message.attempt == 1:
            raise RuntimeError("not yet")
        if int(body) == 3:
            loop.call_soon_threadsafe(done.set)

    how: dict[str, Any] = {"group": "billing", "mode": "ordered", "retry": postroom.Backoff(0.01, 1, 1)}
    if kind == "plain":

        @app.subscribe("orders", **how)
        @guards.once(place.connect)
        def handle(body: bytes, message: postroom.sync.Received, connection: Any) -> None:
            work(body, message, connection)

    else:

        @app.subscribe("orders", **how)
        @guards.once(place.connect)
        async def handle_async(body: bytes, message: postroom.Received, connection: Any) -> None:
            work(body, message, connection)

    async with postroom.connect(f"sqlite:///{tmp_path}/queue.db") as mq:
        await mq.create_topic("orders")
        for number, id in ((1, "o-1"), (2, "o-2"), (1, "o-1"), (3, "o-3")):
            await mq.send("orders", b"%d" % number, key="42", id=id)
        async with app.lifespan():
            await asyncio.wait_for(done.wait(), PATIENCE_S)
        assert (await mq.lag("orders", "billing")).total.messages == 0
    assert took == [(b"1", 1), (b"1", 2), (b"2", 1), (b"3", 1)]
    assert effects(place) == [1, 2, 3]
