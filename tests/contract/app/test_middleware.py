"""Middleware: what runs around handlers, in which order, and what its endings mean."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from postroom import App, Backoff, Connection, Dead, Message, RequestFailed, UsageError
from postroom.clock import ManualClock
from postroom.testing.fixture import run_until_idle
from tests.contract.stores import only_file

pytestmark = only_file

who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    return connection


@pytest.fixture
def app(mq: Connection) -> App:
    return App(mq)


async def left(mq: Connection) -> int:
    return (await mq.lag("orders", "billing")).total.messages


async def test_the_first_registered_is_the_outermost(app: App, mq: Connection) -> None:
    order: list[Any] = []

    @app.middleware
    async def first(message: Any, call_next: Any) -> Any:
        order.append(("first", message.value))
        result = await call_next()
        order.append("first after")
        return result

    @app.subscribe("orders", group="billing")
    async def bill(body: bytes) -> None:
        order.append("handler")

    @app.middleware  # it does not matter that the handler came before
    async def second(message: Any) -> AsyncIterator[None]:
        order.append("second")
        yield
        order.append("second after")

    await mq.send("orders", b"1")
    assert (await run_until_idle(app)).handled == 1
    assert order == [("first", b"1"), "second", "handler", "second after", "first after"]


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "thread"])
async def test_what_a_handler_raises_passes_through(
    app: App, mq: Connection, clock: ManualClock, plain: bool
) -> None:
    """A session rolls back, a report is made, and the message is retried as without middleware."""
    seen: list[str] = []

    @app.middleware
    async def session(message: Any) -> AsyncIterator[None]:
        try:
            yield
        except ValueError as error:
            seen.append(f"rolled back: {error}")
            raise
        seen.append("committed")

    if plain:

        @app.subscribe("orders", group="billing", retry=Backoff(1, 1, 1))
        def bill(body: bytes, message: Any) -> None:
            if message.attempt == 1:
                raise ValueError("not yet")
    else:

        @app.subscribe("orders", group="billing", retry=Backoff(1, 1, 1))
        async def bill_too(body: bytes, message: Any) -> None:
            if message.attempt == 1:
                raise ValueError("not yet")

    await mq.send("orders", b"1")
    assert [str(error) for error in (await run_until_idle(app)).errors] == ["not yet"]
    clock.advance(1)
    assert (await run_until_idle(app)).errors == []
    assert seen == ["rolled back: not yet", "committed"]
    assert await left(mq) == 0


async def test_a_middleware_may_end_it_itself(app: App, mq: Connection) -> None:
    """One that raises has failed for the handler; one that does not call on has handled the message."""
    ran: list[bytes] = []

    @app.middleware
    async def gate(message: Any, call_next: Any) -> None:
        if message.value == b"spam":
            return
        if message.value == b"poison":
            raise Dead("not for us")
        await call_next()

    @app.subscribe("orders", group="billing")
    async def bill(body: bytes) -> None:
        ran.append(body)

    await mq.send_many("orders", [Message(b"spam"), Message(b"poison"), Message(b"good")])
    await run_until_idle(app)
    assert ran == [b"good"]
    assert [letter.reason for letter in await mq.dead_letters("orders", "billing")] == ["not for us"]
    assert await left(mq) == 0


async def test_plain_handlers_see_the_context_that_middleware_set(app: App, mq: Connection) -> None:
    seen: list[tuple[str, bool]] = []

    @app.middleware
    async def named(message: Any) -> AsyncIterator[None]:
        token = who.set(message.key.decode())
        yield
        who.reset(token)

    @app.subscribe("orders", group="billing")
    def bill(body: bytes) -> None:
        seen.append((who.get(), threading.current_thread() is threading.main_thread()))

    await mq.send("orders", b"1", key="ann")
    await run_until_idle(app)
    assert seen == [("ann", False)] and who.get() == "nobody"


async def test_a_plain_middleware_runs_in_the_thread_of_a_plain_handler(app: App, mq: Connection) -> None:
    """For what belongs to a thread; coroutine handlers are none of its business."""
    seen: list[tuple[str, int]] = []

    def note(what: str) -> None:
        seen.append((what, threading.get_ident()))

    @app.middleware
    def around(message: Any, call_next: Any) -> None:
        note(f"before {message.value.decode()}")
        call_next()
        note("after")

    @app.middleware
    def within(message: Any) -> Iterator[None]:
        try:
            yield
        except ValueError:
            note("failed")
            raise

    @app.subscribe("orders", group="billing", max_attempts=1)
    def bill(body: bytes) -> None:
        note("handler")
        if body == b"bad":
            raise ValueError

    @app.subscribe("orders", group="mailing")
    async def mail(body: bytes) -> None:
        note("mail")

    await mq.send("orders", b"1")
    ran = await run_until_idle(app)
    here = threading.get_ident()
    assert ran.errors == [] and ("mail", here) in seen
    seen.remove(("mail", here))
    assert [what for what, _ in seen] == ["before 1", "handler", "after"]
    assert len({thread for _, thread in seen}) == 1 and here not in {thread for _, thread in seen}
    seen.clear()
    await mq.send("orders", b"bad")
    assert [type(error) for error in (await run_until_idle(app)).errors] == [ValueError]
    assert [what for what, thread in seen if thread != here] == ["before bad", "handler", "failed"]


async def test_handlers_of_lists_have_it_called_with_the_list(app: App, mq: Connection) -> None:
    seen: list[Any] = []

    @app.middleware
    async def counted(messages: Any) -> AsyncIterator[None]:
        seen.append([message.value for message in messages])
        yield

    @app.subscribe("orders", group="billing", batch=10)
    async def bill(bodies: list[bytes]) -> None:
        seen.append(bodies)

    await mq.send_many("orders", [Message(b"%d" % n) for n in range(3)])
    await run_until_idle(app)
    assert seen == [[b"0", b"1", b"2"]] * 2


async def test_a_timeout_covers_the_middleware(app: App, mq: Connection) -> None:
    ended: list[str] = []

    @app.middleware
    async def hangs(message: Any, call_next: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    @app.subscribe("orders", group="billing", timeout="20ms", max_attempts=1)
    async def bill(body: bytes) -> None: ...

    await mq.send("orders", b"1")
    assert [type(error) for error in (await run_until_idle(app)).errors] == [TimeoutError]
    assert ended == ["cancelled"]


async def test_a_handler_runs_once(app: App, mq: Connection) -> None:
    ran: list[bytes] = []

    @app.middleware
    async def twice(message: Any, call_next: Any) -> None:
        await call_next()
        await call_next()

    @app.subscribe("orders", group="billing", max_attempts=1)
    async def bill(body: bytes) -> None:
        ran.append(body)

    await mq.send("orders", b"1")
    (error,) = (await run_until_idle(app)).errors
    assert isinstance(error, UsageError) and "twice" in str(error) and ran == [b"1"]


@pytest.mark.parametrize("code", [SystemExit, asyncio.CancelledError, StopIteration])
async def test_whatever_a_thread_raises_ends_neither_lane_nor_app(
    app: App, mq: Connection, code: type[BaseException]
) -> None:
    @app.middleware
    async def through(message: Any) -> AsyncIterator[None]:
        yield

    @app.subscribe("orders", group="billing", max_attempts=1)
    def bill(body: bytes) -> None:
        raise code

    await mq.send_many("orders", [Message(b"1"), Message(b"2")])
    assert (await run_until_idle(app)).handled == 2
    assert len(await mq.dead_letters("orders", "billing")) == 2


async def test_mistakes_are_told_when_it_is_registered(app: App, mq: Connection) -> None:
    async def nothing() -> None: ...
    async def generator(message: Any, call_next: Any) -> AsyncIterator[None]:
        yield

    def plain(message: Any, call_next: Any) -> None: ...

    for wrong in (nothing, generator):
        with pytest.raises(UsageError, match="write it as"):
            app.middleware(wrong)
    with pytest.raises(UsageError, match="is a function"):
        app.middleware("session")  # type: ignore[type-var]

    @app.subscribe("orders", group="billing")
    async def bill(body: bytes) -> None: ...

    async with app:
        with pytest.raises(UsageError, match="before it starts"):
            app.middleware(plain)
    app.middleware(plain)
    with pytest.raises(UsageError, match="make it `async def`"):
        await app.start()


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "thread"])
async def test_a_request_is_answered_once_the_middleware_has_ended(
    app: App, mq: Connection, plain: bool
) -> None:
    """A session that cannot commit must not have said yes; and a middleware may answer itself."""

    @app.middleware
    async def session(message: Any, call_next: Any) -> Any:
        if message.value == b"known":
            return "from the cache"
        await call_next()
        if message.value == b"full":
            raise OSError("the disk is full")
        return None

    @app.middleware
    async def through(message: Any) -> AsyncIterator[None]:
        yield

    if plain:

        @app.reply("orders", group="pricing")
        def price(body: bytes) -> str:
            return "9 EUR"
    else:

        @app.reply("orders", group="pricing")
        async def price_too(body: bytes) -> str:
            return "9 EUR"

    async with app:
        assert (await mq.request("orders", b"tea", timeout=20)).value == b"9 EUR"
        assert (await mq.request("orders", b"known", timeout=20)).value == b"from the cache"
        with pytest.raises(RequestFailed, match="the disk is full"):
            await mq.request("orders", b"full", timeout=20)
