"""Handlers of an app: what their endings do to messages (R16, R17, R20), on every store."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from typing import Any

import pytest

import postroom
from postroom import App, Backoff, Connection, Dead, Message, RetryLater, UsageError
from postroom.clock import ManualClock
from postroom.testing.fixture import run_until_idle
from tests.contract.stores import everywhere


@dataclass
class Order:
    id: int


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=2)
    return connection


@pytest.fixture
def app(mq: Connection) -> App:
    return App(mq)


async def left(mq: Connection, group: str = "billing") -> int:
    return (await mq.lag("orders", group)).total.messages


async def test_a_handler_that_returns_acks(app: App, mq: Connection) -> None:
    got: list[Any] = []

    @app.subscribe("orders", group="billing")
    async def bill(order: Order, message: Any) -> None:
        got.append((order, message.attempt, message.topic, message.key))

    await mq.send("orders", b'{"id": 1}', key="k")
    assert (await run_until_idle(app)).handled == 1
    assert got == [(Order(1), 1, "orders", b"k")]
    assert await left(mq) == 0
    assert (await run_until_idle(app)).handled == 0


@everywhere
async def test_a_handler_that_raises_gets_the_message_again_after_the_back_off(
    app: App, mq: Connection, clock: ManualClock
) -> None:
    attempts: list[int] = []

    @app.subscribe("orders", group="billing", retry=Backoff(10, 2, "10m"))
    async def bill(order: Order, message: Any) -> None:
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise ValueError("not yet")

    await mq.send("orders", b'{"id": 1}')
    assert [str(error) for error in (await run_until_idle(app)).errors] == ["not yet"]
    clock.advance(9)
    assert (await run_until_idle(app)).handled == 0
    clock.advance(1)
    assert (await run_until_idle(app)).handled == 1
    clock.advance(19)
    assert (await run_until_idle(app)).handled == 0
    clock.advance(1)
    assert (await run_until_idle(app)).errors == []
    assert attempts == [1, 2, 3]
    assert await left(mq) == 0


async def test_the_back_off_has_jitter_outside_of_tests(mq: Connection, clock: ManualClock) -> None:
    """Messages that failed together do not come back together: one later than the other."""
    app, failed, again = App(mq), asyncio.Event(), asyncio.Event()
    app._fraction = iter([0.0, 0.5]).__next__
    attempts: list[bytes] = []

    @app.subscribe("orders", group="billing", concurrency=1, retry=Backoff(10, 2, "10m"))
    async def bill(body: bytes, message: Any) -> None:
        attempts.append(body)
        if message.attempt == 1:
            failed.set() if len(attempts) == 2 else None
            raise ValueError("not yet")
        again.set()

    async with app:
        await mq.send_many("orders", [Message(b"a"), Message(b"b")], slot=0)
        await asyncio.wait_for(failed.wait(), 10)
        await app._workers[0].quiet(10)
        clock.advance(10)
        await asyncio.wait_for(again.wait(), 10)
        await app._workers[0].quiet(10)
        assert len(attempts) == 3
        again.clear()
        clock.advance(1)
        await asyncio.wait_for(again.wait(), 10)
    assert attempts[2:] == attempts[:2]


@everywhere
async def test_exhausted_messages_go_to_the_dead_letters_with_the_error_as_the_reason(
    app: App, mq: Connection, clock: ManualClock
) -> None:
    @app.subscribe("orders", group="billing", max_attempts=2, retry=Backoff(1, 1, 1))
    async def bill(order: Order) -> None:
        raise ValueError("never")

    await mq.send("orders", b'{"id": 1}')
    await run_until_idle(app)
    assert await mq.dead_letters("orders", "billing") == []
    clock.advance(1)
    await run_until_idle(app)
    (letter,) = await mq.dead_letters("orders", "billing")
    assert (letter.reason, letter.attempts, letter.value) == ("ValueError: never", 2, b'{"id": 1}')
    assert await left(mq) == 0


async def test_retry_later_names_the_time(app: App, mq: Connection, clock: ManualClock) -> None:
    """R17: after a delay, or at a moment."""
    got: list[tuple[int, int]] = []

    @app.subscribe("orders", group="billing")
    async def bill(order: Order, message: Any) -> None:
        got.append((order.id, message.attempt))
        if message.attempt == 1:
            raise RetryLater(delay="1m") if order.id == 1 else RetryLater(at=clock.now_ms() / 1000 + 120)

    await mq.send_many("orders", [Message(b'{"id": 1}'), Message(b'{"id": 2}')])
    await run_until_idle(app)
    clock.advance(59)
    assert (await run_until_idle(app)).handled == 0
    clock.advance(1)
    assert (await run_until_idle(app)).handled == 1
    clock.advance(60)
    await run_until_idle(app)
    assert sorted(got[:2]) == [(1, 1), (2, 1)]
    assert got[2:] == [(1, 2), (2, 2)]


async def test_dead_and_misfits_are_dead_letters_at_once(app: App, mq: Connection) -> None:
    seen: list[int] = []

    @app.subscribe("orders", group="billing")
    async def bill(order: Order) -> None:
        seen.append(order.id)
        if order.id == 2:
            raise Dead("unknown customer")

    await mq.send_many("orders", [Message(b'{"id": 2}'), Message(b'{"id": "x"}'), Message(b'{"id": 3}')])
    ran = await run_until_idle(app)
    letters = {letter.value: letter for letter in await mq.dead_letters("orders", "billing")}
    assert set(letters) == {b'{"id": 2}', b'{"id": "x"}'}
    assert letters[b'{"id": 2}'].reason == "unknown customer"
    assert "Order" in letters[b'{"id": "x"}'].reason and "$.id" in letters[b'{"id": "x"}'].reason
    assert sorted(seen) == [2, 3]
    assert len(ran.errors) == 2
    assert await left(mq) == 0


async def test_a_handler_may_settle_itself(app: App, mq: Connection, clock: ManualClock) -> None:
    seen: list[bytes] = []

    @app.subscribe("orders", group="billing")
    async def bill(body: bytes, message: Any) -> None:
        seen.append(body)
        if message.attempt == 1 and body == b"retry":
            await message.retry(delay=5)
        if body == b"dead":
            await message.dead("by hand")
        if body == b"ack":
            await message.ack()
            raise ValueError("after it was acked: too late to fail")

    await mq.send_many("orders", [Message(b"retry"), Message(b"dead"), Message(b"ack")])
    await run_until_idle(app)
    assert [letter.reason for letter in await mq.dead_letters("orders", "billing")] == ["by hand"]
    clock.advance(5)
    assert (await run_until_idle(app)).handled == 1
    assert sorted(seen) == [b"ack", b"dead", b"retry", b"retry"]
    assert await left(mq) == 0


@everywhere
async def test_ack_modes(app: App, mq: Connection, clock: ManualClock) -> None:
    """R16: on delivery a failing message is not seen again; manual leaves what the handler leaves."""
    once: list[bytes] = []
    manual: list[tuple[bytes, int]] = []

    @app.subscribe("orders", group="once", ack="on_delivery", retry=Backoff(0, 1, 0))
    async def at_most_once(body: bytes) -> None:
        once.append(body)
        raise ValueError("lost")

    @app.subscribe("orders", group="hand", ack="manual", retry=Backoff(0, 1, 0))
    async def by_hand(body: bytes, message: Any) -> None:
        manual.append((body, message.attempt))
        if body == b"ack":
            await message.ack()
        elif body == b"raise" and message.attempt == 1:
            raise ValueError("retried")

    await mq.send_many("orders", [Message(b"ack"), Message(b"raise"), Message(b"leave")])
    await run_until_idle(app)
    assert sorted(once) == [b"ack", b"leave", b"raise"]
    assert sorted(manual) == [(b"ack", 1), (b"leave", 1), (b"raise", 1), (b"raise", 2)]
    assert await left(mq, "once") == 0
    assert await left(mq, "hand") == 2  # nobody settled them: handed back when the app stopped


async def test_groups_each_get_every_message(app: App, mq: Connection) -> None:
    got: list[str] = []

    @app.subscribe("orders", group="billing")
    async def bill(body: str) -> None:
        got.append(f"bill {body}")

    @app.subscribe("orders", group="shipping")
    def ship(body: str) -> None:
        got.append(f"ship {body}")

    await mq.send("orders", b"1")
    await run_until_idle(app)
    assert sorted(got) == ["bill 1", "ship 1"]


@everywhere
async def test_plain_functions_run_in_threads_and_settle_without_await(
    app: App, mq: Connection, clock: ManualClock
) -> None:
    threads: set[str] = set()
    bodies: list[Order] = []

    @app.subscribe("orders", group="billing")
    def bill(order: Order, message: Any) -> None:
        threads.add(threading.current_thread().name)
        bodies.append(order)
        if order.id == 1:
            message.dead(f"by hand, attempt {message.attempt}")
        if order.id == 2:
            raise Dead("raised")
        if order.id == 3:
            raise SystemExit

    await mq.send_many("orders", [Message(b'{"id": %d}' % n) for n in range(4)])
    ran = await run_until_idle(app)
    assert sorted(letter.reason for letter in await mq.dead_letters("orders", "billing")) == [
        "by hand, attempt 1",
        "raised",
    ]
    assert threading.current_thread().name not in threads
    assert sorted(order.id for order in bodies) == [0, 1, 2, 3]
    assert {type(error) for error in ran.errors} == {Dead, SystemExit}
    assert await left(mq) == 1  # the one that raised SystemExit is retried


async def test_a_plain_function_that_only_makes_a_coroutine_has_done_nothing(
    app: App, mq: Connection
) -> None:
    async def really(body: bytes) -> None: ...

    @app.subscribe("orders", group="billing")
    def wrapper(body: bytes) -> Any:
        return really(body)

    await mq.send("orders", b"1")
    ran = await run_until_idle(app)
    assert [type(error) for error in ran.errors] == [UsageError]
    assert await left(mq) == 1


@pytest.mark.parametrize("plain", [False, True])
async def test_no_more_run_at_once_than_concurrency_says(app: App, mq: Connection, plain: bool) -> None:
    running, most, lock = 0, 0, threading.Lock()
    full, together = threading.Barrier(3), asyncio.Barrier(3)

    def enter(step: int) -> None:
        nonlocal running, most
        with lock:
            running += step
            most = max(most, running)

    if plain:

        @app.subscribe("orders", group="billing", concurrency=3)
        def handle(body: bytes) -> None:
            enter(1)
            full.wait(10)  # three are there at once, or this fails
            enter(-1)

    else:

        @app.subscribe("orders", group="billing", concurrency=3)
        async def ahandle(body: bytes) -> None:
            enter(1)
            await together.wait()
            enter(-1)

    await mq.send_many("orders", [Message(b"x")] * 12)
    ran = await run_until_idle(app)
    assert (ran.handled, ran.errors) == (12, [])
    assert most == 3


async def test_a_timeout_cancels_the_handler_and_counts_as_a_failure(
    app: App, mq: Connection, clock: ManualClock
) -> None:
    cancelled: list[int] = []

    @app.subscribe("orders", group="billing", timeout=0.01)
    async def slow(body: bytes, message: Any) -> None:
        if message.attempt == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.attempt)
                raise

    @app.subscribe("orders", group="own", timeout=60)
    async def own(body: bytes, message: Any) -> None:
        if message.attempt == 1:
            raise TimeoutError("the user's own")

    await mq.send("orders", b"1")
    ran = await run_until_idle(app)
    assert cancelled == [1]
    assert sorted(str(error) for error in ran.errors) == [
        "the handler did not end within 0.01 seconds",
        "the user's own",
    ]
    clock.advance(2)
    assert (await run_until_idle(app)).errors == []
    assert await left(mq) == await left(mq, "own") == 0


async def test_a_thread_that_overruns_counts_for_what_it_did(
    app: App, mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be cancelled, and to retry work that was done would double it."""

    @app.subscribe("orders", group="billing", timeout=0.001)
    def slow(body: bytes) -> None:
        threading.Event().wait(0.02)

    await mq.send("orders", b"1")
    assert (await run_until_idle(app)).errors == []
    assert await left(mq) == 0
    assert "cannot be cancelled" in caplog.text


async def test_something_cancelled_inside_a_handler_is_a_failure_of_it(app: App, mq: Connection) -> None:
    @app.subscribe("orders", group="billing")
    async def handle(body: bytes, message: Any) -> None:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    await mq.send("orders", b"1")
    ran = await run_until_idle(app)
    assert [type(error) for error in ran.errors] == [asyncio.CancelledError]
    assert (ran.handled, await left(mq)) == (1, 1)


async def test_the_error_hook_is_told_and_may_fail_itself(
    app: App, mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[str, list[bytes]]] = []

    @app.on_error
    async def hook(error: BaseException, messages: list[postroom.Received]) -> None:
        told.append((str(error), [message.value for message in messages]))
        raise KeyError("the hook's own")

    @app.subscribe("orders", group="billing")
    async def handle(order: Order) -> None:
        raise ValueError("boom")

    await mq.send_many("orders", [Message(b'{"id": 1}'), Message(b'{"id": 2}')])
    assert (await run_until_idle(app)).handled == 2
    assert sorted(told) == [("boom", [b'{"id": 1}']), ("boom", [b'{"id": 2}'])]
    assert "the hook's own" in caplog.text


@everywhere
async def test_a_lost_lease_is_logged_and_nobody_is_harmed(
    mq: Connection, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The group is reset while a handler is at work: what it held is nobody's, its ack comes too late."""
    app, begun, go_on = App(mq), asyncio.Event(), asyncio.Event()
    attempts: list[int] = []

    async def told() -> None:
        while not caplog.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)

    @app.subscribe("orders", group="billing")
    async def slow(body: bytes, message: Any) -> None:
        attempts.append(message.attempt)
        begun.set()
        # The late ack is to be the first of the two: an ack of what is acked by then loses nothing.
        await (go_on.wait() if len(attempts) == 1 else told())

    with caplog.at_level(logging.WARNING, "postroom"):
        async with app:
            await mq.send("orders", b"1")
            await asyncio.wait_for(begun.wait(), 10)
            begun.clear()  # before: the message may come again while the reset is under way
            await mq.reset("orders", "billing", to="earliest", force=True)
            go_on.set()
            await asyncio.wait_for(begun.wait(), 10)
    assert "the lease on 1 " in caplog.text  # told by the ack, or by a heartbeat before it
    assert len(attempts) == 2
    assert await left(mq) == 0


def test_wrong_subscriptions_are_refused_when_they_are_made() -> None:
    app = App("memory://")

    async def handle(body: bytes) -> None: ...

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"topic": "or ders"}, "topic"),
        ({"topic": "orders.billing.dead"}, "reserved"),
        ({"group": "a.b"}, "group"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": True}, "concurrency"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"retry": 3}, "Backoff"),
        ({"ack": "never"}, "on_delivery"),
        ({"window": 0}, "window"),
        ({"lease": "1ms"}, "lease"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"start": "yesterday"}, "start"),
        ({"mode": "wild"}, "mode"),
        ({"batch": 0}, "count"),
        ({"batch": "many"}, "batch"),
    ]
    for changes, said in wrong:
        settings: dict[str, Any] = {"topic": "orders", "group": "billing", **changes}
        with pytest.raises(postroom.PostroomError, match=said):
            app.subscribe(**settings)(handle)
    assert app.subscriptions == ()
