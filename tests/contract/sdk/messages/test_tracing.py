"""The trace of a message, from whoever sends it to whoever handles it, on every store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

import postroom
from postroom import App, Backoff, Connection, Dead, Message, PermissionDenied, RetryLater, UnknownTopic, sync
from postroom.clock import ManualClock
from postroom.testing.fixture import run_until_idle
from tests.contract.stores import everywhere, only_file
from tests.recorded import Recorded, id_of, parent_of, recording


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with recording() as recorded:
        yield recorded


@pytest.fixture
async def mq(connection: Connection, recorded: Recorded) -> Connection:
    for topic in ("orders", "bills"):
        await connection.create_topic(topic, partitions=1)
    return connection


async def stored(mq: Connection, topic: str = "orders") -> list[postroom.Received]:
    async with aclosing(mq.read(topic)) as messages:
        return [message async for message in messages]


def attributes(span: Any) -> dict[str, Any]:
    return {name.removeprefix("messaging."): value for name, value in span.attributes.items()}


# ---- from end to end ----


@everywhere
async def test_one_trace_goes_through_a_handler_that_sends(mq: Connection, recorded: Recorded) -> None:
    app = App(mq)

    @app.subscribe("orders", group="billing")
    async def bill(order: bytes) -> None:
        await mq.send("bills", order)

    @app.subscribe("bills", group="printing")
    def print_it(body: bytes) -> None:
        assert trace.get_current_span().get_span_context().is_valid  # in its thread, too

    with recorded.span("request"):
        receipt = await mq.send("orders", b"1", key="k")
    assert (await run_until_idle(app)).errors == []

    chain = ["request", "send orders", "handle orders", "send bills", "handle bills"]
    spans = [recorded.one(name) for name in chain]
    assert {span.context.trace_id for span in spans} == {spans[0].context.trace_id}
    assert [parent_of(span) for span in spans[1:]] == [span.context.span_id for span in spans[:-1]]
    assert [span.kind for span in spans[1:]] == [SpanKind.PRODUCER, SpanKind.CONSUMER] * 2
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert attributes(spans[1]) == {
        "system": "postroom",
        "operation.name": "send",
        "operation.type": "send",
        "destination.name": "orders",
        "destination.partition.id": "0",
        "message.id": receipt.id,
        "postroom.offset": 0,
    }
    assert attributes(spans[2]) == {
        "system": "postroom",
        "operation.name": "handle",
        "operation.type": "process",
        "destination.name": "orders",
        "destination.partition.id": "0",
        "consumer.group.name": "billing",
        "message.id": receipt.id,
        "postroom.offset": 0,
        "postroom.attempt": 1,
    }


async def test_an_app_that_runs_does_not_put_handlers_into_the_trace_it_was_started_in(
    mq: Connection, recorded: Recorded
) -> None:
    app, handled = App(mq), asyncio.Event()

    @app.subscribe("orders", group="billing")
    async def bill(order: bytes) -> None:
        handled.set()

    with recorded.span("startup"):
        await app.start()
    await mq.send("orders", b"1")
    async with asyncio.timeout(20):
        await handled.wait()
    await app.stop()
    span = recorded.one("handle orders")
    assert parent_of(span) == recorded.one("send orders").context.span_id and not span.links


@everywhere
async def test_a_list_is_sent_in_one_span(mq: Connection, recorded: Recorded) -> None:
    await mq.send_many("orders", [Message(b"%d" % n, key=f"{n}", headers={"n": "1"}) for n in range(3)])
    span = recorded.one("send orders")
    assert attributes(span)["batch.message_count"] == 3
    for message in await stored(mq):
        assert message.headers == {"n": b"1", "traceparent": id_of(span).encode()}


async def test_a_handler_of_lists_is_linked_to_every_sender_once(mq: Connection, recorded: Recorded) -> None:
    app, sizes = App(mq), []

    @app.subscribe("orders", group="billing", batch=10)
    async def bill(orders: list[bytes]) -> None:
        sizes.append(len(orders))

    await mq.send_many("orders", [Message(b"1"), Message(b"2")])
    await mq.send("orders", b"3")
    assert (await run_until_idle(app)).errors == [] and sizes == [3]
    span = recorded.one("handle orders")
    assert span.parent is None and attributes(span)["batch.message_count"] == 3
    assert [link.context.span_id for link in span.links] == [
        sender.context.span_id for sender in recorded.all("send orders")
    ]


# ---- failures ----


async def test_a_failing_handler_is_recorded_at_every_attempt(
    mq: Connection, recorded: Recorded, clock: ManualClock
) -> None:
    app = App(mq)

    @app.subscribe("orders", group="billing", retry=Backoff(1, 1, 1))
    async def bill(order: bytes, message: Any) -> None:
        if message.attempt == 1:
            raise ValueError("no stock")
        if message.attempt == 2:
            raise RetryLater(1)

    await mq.send("orders", b"1")
    for _ in range(3):
        await run_until_idle(app)
        clock.advance(1)
    failed, later, good = recorded.all("handle orders")
    sender = recorded.one("send orders")
    assert {parent_of(span) for span in (failed, later, good)} == {sender.context.span_id}
    assert [attributes(span)["postroom.attempt"] for span in (failed, later, good)] == [1, 2, 3]
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "no stock")
    assert attributes(failed)["error.type"] == "ValueError"
    assert [event.attributes["exception.message"] for event in failed.events] == ["no stock"]
    assert later.status.status_code is StatusCode.UNSET and attributes(later)["error.type"] == "RetryLater"
    assert good.status.status_code is StatusCode.UNSET and "error.type" not in attributes(good)


async def test_a_body_that_does_not_fit_is_recorded(mq: Connection, recorded: Recorded) -> None:
    app = App(mq)

    @app.subscribe("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    await mq.send("orders", b"{")
    assert len((await run_until_idle(app)).errors) == 1
    span = recorded.one("handle orders")
    assert span.status.status_code is StatusCode.ERROR and attributes(span)["error.type"] == "DecodeError"
    assert parent_of(span) == recorded.one("send orders").context.span_id


@everywhere
async def test_dead_letters_and_far_retries_stay_in_the_trace(
    mq: Connection, recorded: Recorded, clock: ManualClock
) -> None:
    app = App(mq)

    @app.subscribe("orders", group="billing", retry=Backoff("1h", 1, "1h"))
    async def bill(order: bytes, message: Any) -> None:
        if message.attempt == 1:
            raise ValueError("in an hour")
        if not recorded.all("handle orders")[1:]:
            raise Dead("hopeless")

    await mq.send("orders", b"1")
    await run_until_idle(app)
    clock.advance(3600)
    await asyncio.wait_for(until(lambda: run_once(app)), 20)
    (letter,) = await mq.dead_letters("orders", "billing")
    sender = recorded.one("send orders")
    assert letter.headers == {"traceparent": id_of(sender).encode()}
    await mq.redrive("orders", "billing")
    await asyncio.wait_for(until(lambda: run_once(app)), 20)
    spans = recorded.all("handle orders")
    assert len(spans) == 3 and {parent_of(span) for span in spans} == {sender.context.span_id}
    assert {attributes(span)["destination.name"] for span in spans} == {"orders"}
    assert [attributes(span)["postroom.attempt"] for span in spans[:2]] == [1, 2]


async def run_once(app: App) -> int:
    return (await run_until_idle(app)).handled


async def until(step: Any) -> None:
    """The schedule delivers what is due in a thread of its own: look until it has."""
    while not await step():  # noqa: ASYNC110 - nor has the schedule an event
        await asyncio.sleep(0.01)


async def test_a_failing_send_is_recorded(mq: Connection, recorded: Recorded) -> None:
    with pytest.raises(UnknownTopic):
        await mq.send("nowhere", b"1")
    span = recorded.one("send nowhere")
    assert span.status.status_code is StatusCode.ERROR and attributes(span)["error.type"] == "UnknownTopic"


# ---- posts ----


async def test_posts_carry_the_context_of_their_caller_and_share_a_span(
    mq: Connection, recorded: Recorded
) -> None:
    with recorded.span("job"):
        async with mq.producer("orders") as producer:
            for n in range(5):
                await producer.post(b"%d" % n)
    span, job = recorded.one("send orders"), recorded.one("job")
    assert parent_of(span) == job.context.span_id and span.kind is SpanKind.CLIENT
    assert attributes(span)["batch.message_count"] == 5
    assert {m.headers["traceparent"] for m in await stored(mq)} == {id_of(job).encode()}


async def test_a_batch_of_several_callers_is_linked_to_each(mq: Connection, recorded: Recorded) -> None:
    async with mq.producer("orders", linger="10s") as producer:
        for name in ("a", "b", "b"):
            with recorded.span(name):
                await producer.post(name.encode())
    span = recorded.one("send orders")
    callers = [recorded.one("a"), *recorded.all("b")]
    assert span.parent is None
    assert [link.context.span_id for link in span.links] == [one.context.span_id for one in callers]
    assert [m.headers["traceparent"].decode() for m in await stored(mq)] == [id_of(one) for one in callers]


@pytest.mark.parametrize("confirm", [True, False])
async def test_posts_that_fail_are_recorded(
    mq: Connection, recorded: Recorded, confirm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: Any, **options: Any) -> None:
        raise PermissionDenied("you may not send to orders")

    monkeypatch.setattr(mq._endpoint, "append", refuse)
    monkeypatch.setattr(mq._endpoint, "append_soon", lambda *args: False)
    async with mq.producer("orders", confirm=confirm) as producer:
        future = await producer.post(b"1")
        if confirm:
            with pytest.raises(PermissionDenied):
                await future
    assert producer.failed == (0 if confirm else 1)
    span = recorded.one("send orders")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "PermissionDenied"


# ---- what the user says ----


async def test_the_users_own_header_wins(mq: Connection, recorded: Recorded) -> None:
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await mq.send("orders", b"1", headers={"traceparent": own})
    await mq.send_many("orders", [Message(b"2", headers={"traceparent": own}), Message(b"3")])
    first, second, third = await stored(mq)
    assert dict(first.headers) == dict(second.headers) == {"traceparent": own.encode()}
    assert third.headers["traceparent"].decode() == id_of(recorded.all("send orders")[1])


async def test_a_delayed_message_keeps_its_context(
    mq: Connection, recorded: Recorded, clock: ManualClock
) -> None:
    app = App(mq)

    @app.subscribe("orders", group="billing")
    async def bill(order: bytes) -> None: ...

    receipt = await mq.send("orders", b"1", delay=60)
    clock.advance(60)
    await asyncio.wait_for(until(lambda: run_once(app)), 20)
    sender, span = recorded.one("send orders"), recorded.one("handle orders")
    assert parent_of(span) == sender.context.span_id
    assert attributes(sender)["message.id"] == receipt.id == attributes(span)["message.id"]
    assert "postroom.offset" not in attributes(sender)


# ---- by hand ----


@pytest.fixture
async def consumer(mq: Connection) -> AsyncIterator[postroom.Consumer]:
    async with mq.consumer("orders", "billing") as consumer:
        yield consumer


async def test_a_message_handled_by_hand(
    mq: Connection, consumer: postroom.Consumer, recorded: Recorded
) -> None:
    await mq.send("orders", b"1")
    (message,) = await consumer.poll(wait=20)
    with recorded.span("loop"):
        with postroom.tracing.handling(message) as span:
            span.set_attribute("customer", 7)
            await mq.send("bills", b"1")
        await mq.send("bills", b"2")
    handled, loop = recorded.one("handle orders"), recorded.one("loop")
    assert parent_of(handled) == recorded.one("send orders").context.span_id
    assert [link.context.span_id for link in handled.links] == [loop.context.span_id]
    assert handled.attributes and handled.attributes["customer"] == 7
    assert attributes(handled)["consumer.group.name"] == "billing"
    assert [parent_of(s) for s in recorded.all("send bills")] == [
        handled.context.span_id,
        loop.context.span_id,
    ]


async def test_what_is_raised_by_hand_is_recorded_and_goes_on(
    mq: Connection, consumer: postroom.Consumer, recorded: Recorded
) -> None:
    await mq.send("orders", b"1")
    (message,) = await consumer.poll(wait=20)
    with pytest.raises(ValueError, match="no stock"), postroom.tracing.handling(message):
        raise ValueError("no stock")
    assert recorded.one("handle orders").status.status_code is StatusCode.ERROR


async def test_lists_by_hand_and_messages_without_a_trace(
    mq: Connection, consumer: postroom.Consumer, recorded: Recorded
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("postroom.client.tracing._tracing", lambda: None)  # a sender that is not traced
        await mq.send("orders", b"1")
    await mq.send("orders", b"2")
    found = await asyncio.wait_for(take(consumer, 2), 20)
    with recorded.span("loop"):
        with postroom.tracing.handling(found):
            pass
        with postroom.tracing.handling(found[0]):
            pass
        with postroom.tracing.handling([]) as nothing:
            assert nothing is None
    both, alone = recorded.all("handle orders")
    loop = recorded.one("loop").context.span_id
    assert parent_of(both) == loop and attributes(both)["batch.message_count"] == 2
    assert [link.context.span_id for link in both.links] == [recorded.one("send orders").context.span_id]
    assert parent_of(alone) == loop and not alone.links


async def take(consumer: postroom.Consumer, count: int) -> list[postroom.Received]:
    found: list[postroom.Received] = []
    while len(found) < count:
        found += await consumer.poll(wait=20)
    return found


async def test_messages_that_were_only_read(mq: Connection, recorded: Recorded) -> None:
    await mq.send("orders", b"1")
    (message,) = await stored(mq)
    with postroom.tracing.handling(message):
        pass
    span = recorded.one("handle orders")
    assert parent_of(span) == recorded.one("send orders").context.span_id
    assert "consumer.group.name" not in attributes(span)


# ---- without asyncio ----


@only_file
def test_the_client_without_asyncio(any_url: str, recorded: Recorded) -> None:
    with sync.connect(any_url) as mq:
        mq.create_topic("orders")
        with recorded.span("request"):
            mq.send("orders", b"1")
        with mq.consumer("orders", "billing") as consumer:
            (message,) = consumer.poll(wait=20)
            with postroom.tracing.handling(message):
                mq.send("orders", b"2")
    first, second = recorded.all("send orders")
    handled = recorded.one("handle orders")
    assert parent_of(first) == recorded.one("request").context.span_id
    assert (parent_of(handled), parent_of(second)) == (first.context.span_id, handled.context.span_id)
    assert attributes(handled)["consumer.group.name"] == "billing"


async def test_a_plain_function_sends_in_its_own_trace(mq: Connection, recorded: Recorded) -> None:
    app, threads = App(mq), set()

    @app.subscribe("orders", group="billing", concurrency=2)
    def bill(order: bytes) -> None:
        threads.add(threading.get_ident())
        app.sync.send("bills", order)

    await mq.send("orders", b"1")
    await mq.send("orders", b"2")
    assert (await run_until_idle(app)).errors == [] and threading.get_ident() not in threads
    handled = {span.context.span_id: parent_of(span) for span in recorded.all("handle orders")}
    assert {handled[parent_of(span) or 0] for span in recorded.all("send bills")} == {
        span.context.span_id for span in recorded.all("send orders")
    }
