"""Requests and replies (R38): what the requester gets, whatever the handler does; and what is left of both.

Real time is only waited for where nobody can be told that it passed: at a requester's deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import postroom
from postroom import App, Connection, Message, NoReply, RequestFailed, UnknownTopic, UsageError
from postroom.broker.topology.topics import ForgetReplies
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.model.policy.settings import TopicSettings
from postroom.model.topology.names import is_reply
from postroom.testing.fixture import TestQueue, run_until_idle
from tests.contract.brokers import broker_of, run_duty
from tests.contract.stores import Open, embedded, everywhere
from tests.tuned import Tune

SECONDS = 30  # for whatever is to come

anywhere = pytest.mark.stores("memory")
"""Marks a test of what no store or endpoint does differently."""


@dataclass
class Quote:
    sku: str
    price: int = 0


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("quote", partitions=2, storage="volatile")
    return connection


@pytest.fixture
def app(mq: Connection) -> App:
    return App(mq)


@pytest.fixture(autouse=True)
def patient(tune: Tune) -> None:
    """Whether anybody serves a topic is found out, however busy the machine is."""
    tune(client={"served_check_s": SECONDS})


async def left(mq: Connection) -> int:
    return (await mq.lag("quote", "pricing")).total.messages


async def reply_topics(mq: Connection) -> list[str]:
    return [topic.name for topic in await mq.topics(internal=True) if is_reply(topic.name)]


async def until(found: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not await found():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


@asynccontextmanager
async def asking(mq: Connection, value: bytes = b"1") -> AsyncIterator[asyncio.Task[postroom.Received]]:
    """A request that waits for its reply."""
    task = asyncio.create_task(mq.request("quote", value, timeout=SECONDS))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ---- replies ---------------------------------------------------------------------------------------------


@everywhere
async def test_a_reply_comes_back(app: App, mq: Connection) -> None:
    @app.reply("quote", group="pricing")
    async def price(quote: Quote, message: postroom.Received) -> Quote:
        assert message.headers == {"currency": b"EUR"}
        assert message.expires is not None
        return Quote(quote.sku, 7)

    async with app:
        reply = await mq.request(
            "quote", b'{"sku": "a"}', key="a", headers={"currency": "EUR"}, timeout=SECONDS
        )
    assert reply.value == b'{"sku":"a","price":7}'
    assert reply.headers == {}
    assert await left(mq) == 0
    assert mq.late_replies == 0


async def test_a_plain_function_replies_from_a_thread(app: App, mq: Connection) -> None:
    @app.reply("quote", group="pricing")
    def price(body: bytes, message: Any) -> Message:
        message.extend()  # blocking, as of postroom.sync
        return Message(body * 2, headers={"currency": "EUR"})

    async with app:
        reply = await mq.request("quote", b"ab", timeout=SECONDS)
    assert (reply.value, reply.headers) == (b"abab", {"currency": b"EUR"})


async def test_a_consumer_replies_by_hand(mq: Connection) -> None:
    async with asking(mq, b"x") as request, mq.consumer("quote", group="pricing") as consumer:
        (message,) = await consumer.poll(wait=SECONDS)
        assert await message.reply(b"y", headers={"h": "1"})
        await message.ack()
        assert (await request).value == b"y"
        await mq.send("quote", b"plain")
        (message,) = await consumer.poll(wait=SECONDS)
        with pytest.raises(UsageError, match=r"no request.*mq\.request"):
            await message.reply(b"y")
    async for browsed in mq.read("quote"):
        with pytest.raises(UsageError, match="read, not delivered"):
            await browsed.reply(b"y")


@anywhere
async def test_a_message_that_is_no_request_is_handled_all_the_same(app: App, mq: Connection) -> None:
    got: list[bytes] = []

    @app.reply("quote", group="pricing")
    async def price(body: bytes) -> bytes:
        got.append(body)
        if len(got) == 1:
            raise ValueError("not yet")
        return body

    await mq.send("quote", b"x")
    ran = await run_until_idle(app)
    assert [type(error) for error in ran.errors] == [ValueError]
    assert (got, await left(mq)) == ([b"x"], 1)  # retried, as by subscribe


@pytest.mark.slow("works for seconds")
@embedded("served, as many are under way as a connection may have; the other tests are enough")
async def test_thousands_are_under_way_at_once(app: App, mq: Connection) -> None:
    begun, all_here = 0, asyncio.Event()

    @app.reply("quote", group="pricing", concurrency=2000)
    async def price(body: bytes) -> bytes:
        nonlocal begun
        begun += 1
        if begun == 2000:
            all_here.set()
        await all_here.wait()
        return body

    async with app, asyncio.timeout(2 * SECONDS):
        values = [b"%d" % number for number in range(2000)]
        replies = await asyncio.gather(*(mq.request("quote", v, timeout=2 * SECONDS) for v in values))
        assert len(await reply_topics(mq)) == 1
    assert [reply.value for reply in replies] == values


@anywhere
async def test_a_list_of_requests_is_answered_one_by_one(app: App, mq: Connection) -> None:
    """One that does not fit, and one that is no request, take nobody along."""
    lists: list[list[int]] = []

    @app.reply("quote", group="pricing", batch=100, concurrency=1)
    def price(numbers: list[int], messages: list[postroom.Received]) -> list[dict[str, int]]:
        assert len(messages) == len(numbers)
        lists.append(numbers)
        return [{"price": number} for number in numbers]

    await mq.send("quote", b"7")
    asked = [asyncio.create_task(mq.request("quote", b"%d" % n, timeout=SECONDS)) for n in range(200)]
    wrong = asyncio.create_task(mq.request("quote", b"wrong", timeout=SECONDS))
    await until(lambda: _waiting(mq, 202))
    async with app:
        replies = await asyncio.gather(*asked)
        with pytest.raises(RequestFailed, match="does not fit"):
            await wrong
    assert [reply.value for reply in replies] == [b'{"price":%d}' % n for n in range(200)]
    assert sorted(number for numbers in lists for number in numbers) == sorted([*range(200), 7])
    assert len(lists) < 20
    assert await left(mq) == 0


@anywhere
@pytest.mark.parametrize("returned", [[], [1, 2, 3], None, 5])
async def test_a_list_of_requests_needs_a_list_of_replies(app: App, mq: Connection, returned: Any) -> None:
    @app.reply("quote", group="pricing", batch=2, concurrency=1)
    async def price(bodies: list[bytes]) -> Any:
        return returned

    asked = [asyncio.create_task(mq.request("quote", b"x", timeout=SECONDS)) for _ in range(2)]
    async with app:
        for failure in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(failure, RequestFailed)
            assert "return a list with the reply to each, in their order" in str(failure)
    assert await left(mq) == 0  # their requesters know


@anywhere
async def test_what_a_handler_of_lists_raises_is_told_to_all_who_asked(app: App, mq: Connection) -> None:
    """The message that is no request is retried, as by subscribe."""

    @app.reply("quote", group="pricing", batch=100, concurrency=1)
    async def price(bodies: list[bytes]) -> list[bytes]:
        raise ValueError("sold out")

    await mq.send("quote", b"plain")
    asked = [asyncio.create_task(mq.request("quote", b"x", timeout=SECONDS)) for _ in range(5)]
    await until(lambda: _waiting(mq, 6))
    async with app:
        failures = await asyncio.gather(*asked, return_exceptions=True)
    assert {str(failure) for failure in failures} == {"sold out"}
    assert await left(mq) == 1


@anywhere
async def test_one_reply_of_a_list_that_cannot_be_encoded(app: App, mq: Connection) -> None:
    @app.reply("quote", group="pricing", batch=2, concurrency=1)
    async def price(bodies: list[bytes]) -> list[Any]:
        return [object() if body == b"bad" else body for body in bodies]

    good, bad = (asyncio.create_task(mq.request("quote", v, timeout=SECONDS)) for v in (b"good", b"bad"))
    async with app:
        assert (await good).value == b"good"
        with pytest.raises(RequestFailed):
            await bad
    assert await left(mq) == 0


async def _waiting(mq: Connection, count: int) -> bool:
    return (await mq.topic("quote")).messages == count


# ---- failures --------------------------------------------------------------------------------------------


@everywhere
async def test_what_a_handler_raises_is_told_at_once_and_not_tried_again(
    app: App, mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    calls, told = 0, []

    @app.reply("quote", group="pricing")
    async def price(body: bytes) -> bytes:
        nonlocal calls
        calls += 1
        raise LookupError(f"no price for {body.decode()}")

    app.on_error(lambda error, messages: told.append(error))
    async with app:
        with pytest.raises(RequestFailed, match=r"^no price for a$") as caught:
            await mq.request("quote", b"a", timeout=SECONDS)
        await until(lambda: _is(mq, 0))
    assert (caught.value.kind, caught.value.code) == ("LookupError", "request_failed")
    assert caught.value.details == {"kind": "LookupError", "topic": "quote"}  # and no traceback
    assert calls == len(told) == 1
    assert "no price for a" in caplog.text  # the worker's own log has all of it


async def _is(mq: Connection, messages: int) -> bool:
    return await left(mq) == messages


@anywhere
async def test_a_handler_names_the_kind_of_its_failure(app: App, mq: Connection) -> None:
    @app.reply("quote", group="pricing", traceback=True)
    def price(body: bytes) -> bytes:
        raise RequestFailed("sold out", kind="sold_out")

    async with app:
        with pytest.raises(RequestFailed) as caught:
            await mq.request("quote", b"", timeout=SECONDS)
    assert (str(caught.value), caught.value.kind) == ("sold out", "sold_out")
    trace = caught.value.details["traceback"]
    assert "in price" in trace
    assert "replying.py" not in trace


@anywhere
@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b"{", "decode", "does not fit Quote"),
        (b'{"sku": "large"}', "message_too_large", "the limit is"),
        (b'{"sku": "odd"}', "usage", "returned object, which cannot be sent"),
        (b'{"sku": "slow"}', "timeout", "did not end within 0.05 seconds"),
        (b'{"sku": "dead"}', "dead", "hopeless"),
    ],
)
async def test_whatever_goes_wrong_is_told_and_the_worker_goes_on(
    app: App, mq: Connection, body: bytes, kind: str, says: str
) -> None:
    @app.reply("quote", group="pricing", timeout=0.05)
    async def price(quote: Quote) -> Any:
        if quote.sku == "large":
            return b"x" * (DEFAULTS.max_message_bytes + 1)
        if quote.sku == "slow":
            await asyncio.Event().wait()
        if quote.sku == "dead":
            raise postroom.Dead("hopeless")
        return object() if quote.sku == "odd" else b"fine"

    async with app:
        with pytest.raises(RequestFailed, match=says) as caught:
            await mq.request("quote", body, timeout=SECONDS)
        assert caught.value.kind == kind
        assert (await mq.request("quote", b'{"sku": "a"}', timeout=SECONDS)).value == b"fine"
        await until(lambda: _is(mq, 0))
    assert len(await mq.dead_letters("quote", "pricing")) == (kind == "dead")


@anywhere
async def test_a_handler_that_asks_for_another_try_gets_it_before_the_deadline(
    app: App, mq: Connection
) -> None:
    attempts: list[int] = []

    @app.reply("quote", group="pricing")
    async def price(body: bytes, message: postroom.Received) -> bytes:
        attempts.append(message.attempt)
        if message.attempt == 1 or body == b"never":
            raise postroom.RetryLater(delay=0 if body == b"soon" else "1h", reason="not yet")
        return b"now"

    async with app:
        assert (await mq.request("quote", b"soon", timeout=SECONDS)).value == b"now"
        with pytest.raises(RequestFailed, match="not yet") as caught:
            await mq.request("quote", b"never", timeout=SECONDS)
    assert caught.value.kind == "retry_later"
    assert attempts == [1, 2, 1]


# ---- no reply --------------------------------------------------------------------------------------------


async def test_a_topic_that_is_not_there_is_told_at_once(mq: Connection) -> None:
    with pytest.raises(UnknownTopic, match="did you mean 'quote'"):
        await mq.request("quotes", b"", timeout=SECONDS)


async def test_nobody_serves_the_topic(mq: Connection) -> None:
    with pytest.raises(NoReply, match=r"nobody serves 'quote'.*@app\.reply") as caught:
        await mq.request("quote", b"", timeout=0.05)
    assert caught.value.details == {"topic": "quote", "served": False}


@anywhere
async def test_wrong_arguments(mq: Connection) -> None:
    with pytest.raises(postroom.InvalidSetting, match="timeout=0"):
        await mq.request("quote", b"", timeout=0)
    with pytest.raises(postroom.InvalidMessage, match="object"):
        await mq.request("quote", object(), timeout=1)
    with pytest.raises(postroom.InvalidName):
        await mq.request("_reply.x", b"", timeout=1)
    assert await reply_topics(mq) == []


async def test_a_late_reply_is_dropped_and_counted(app: App, mq: Connection) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.reply("quote", group="pricing")
    async def price(body: bytes) -> bytes:
        begun.set()
        await go_on.wait()
        return body

    async with app:
        with pytest.raises(NoReply, match=r"1 live member.*may still be handled") as caught:
            await mq.request("quote", b"late", timeout=0.2)
        assert caught.value.details["served"] is True
        async with asking(mq, b"cancelled") as request:
            async with asyncio.timeout(SECONDS):
                await begun.wait()
            request.cancel()
        assert mq.late_replies == 0
        go_on.set()
        assert (await mq.request("quote", b"in time", timeout=SECONDS)).value == b"in time"
        await until(lambda: _late(mq, 1))


async def _late(mq: Connection, least: int) -> bool:
    return mq.late_replies >= least


@everywhere
async def test_a_request_whose_deadline_passed_is_not_handled(
    app: App, mq: Connection, clock: ManualClock
) -> None:
    got: list[bytes] = []

    @app.reply("quote", group="pricing")
    async def price(body: bytes) -> bytes:
        got.append(body)
        return body

    with pytest.raises(NoReply):
        await mq.request("quote", b"expired", timeout=0.2)
    clock.advance(1)
    async with app:
        assert (await mq.request("quote", b"fresh", timeout=SECONDS)).value == b"fresh"
        await until(lambda: _is(mq, 0))
    assert got == [b"fresh"]


async def test_nor_one_that_waited_at_the_worker(mq: Connection, clock: ManualClock) -> None:
    app, got = App(mq), []
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.reply("quote", group="pricing", concurrency=1, window=2)
    async def price(body: bytes) -> bytes:
        got.append(body)
        begun.set()
        await go_on.wait()
        return body

    async def both_here() -> bool:
        return app._workers[0].consumer.in_hand == 2

    async with app:
        async with asking(mq, b"1") as first:
            async with asyncio.timeout(SECONDS):
                await begun.wait()
            async with asking(mq, b"2") as second:
                await until(both_here)
                clock.advance(2 * SECONDS)
                go_on.set()
                assert (await first).value == b"1"
                await until(lambda: _is(mq, 0))
                assert not second.done()
        assert got == [b"1"]
        assert app._workers[0].consumer.expired == 1


# ---- the reply topic -------------------------------------------------------------------------------------


@everywhere
async def test_the_reply_topic_is_hidden_and_goes_with_its_requester(mq: Connection, opened: Open) -> None:
    app = App(mq)

    @app.reply("quote", group="pricing")
    async def price(body: bytes) -> bytes:
        return body

    async with app:
        async with opened() as other:
            await asyncio.gather(*(other.request("quote", b"", timeout=SECONDS) for _ in range(10)))
            (name,) = await reply_topics(mq)
            info = await mq.topic(name)
            assert (info.internal, info.settings.storage, info.partitions) == (True, "volatile", 1)
            assert [topic.name for topic in await mq.topics()] == ["quote"]
            assert info.groups == ()
            with pytest.raises(postroom.InvalidName):
                await mq.send(name, b"by hand")
        assert await reply_topics(mq) == []


@everywhere
async def test_what_a_requester_left_that_was_killed_is_deleted(
    app: App, mq: Connection, clock: ManualClock
) -> None:
    @app.reply("quote", group="pricing")
    async def price(body: bytes) -> bytes:
        return body

    async with app:
        await mq.request("quote", b"", timeout=SECONDS)  # it lives
        (living,) = await reply_topics(mq)
        broker = broker_of(mq)
        dead = await broker.open_replies("killed-1")
        clock.advance(DEFAULTS.reply_idle_ms / 1000 - 1)
        await run_duty(mq, ForgetReplies)
        assert set(await reply_topics(mq)) == {living, dead.name}
        await mq._endpoint.open_replies(living.split(".")[1])  # as it does every few seconds
        clock.advance(1)
        await run_duty(mq, ForgetReplies)
        assert await reply_topics(mq) == [living]
        again = await broker.open_replies("killed-1")
        assert (again.name, again.partition_id != dead.partition_id) == (dead.name, True)


@anywhere
async def test_a_requester_says_that_it_lives(
    app: App, mq: Connection, clock: ManualClock, tune: Tune
) -> None:
    tune(client={"keep_s": 0.01})

    @app.reply("quote", group="pricing")
    async def price(body: bytes) -> bytes:
        return body

    async with app:
        await mq.request("quote", b"", timeout=SECONDS)
        (name,) = await reply_topics(mq)
        store = broker_of(mq).store
        group = store.catalog.group(name, "_requester")
        clock.advance(DEFAULTS.reply_idle_ms / 1000)

        async def heard() -> bool:
            return (await asyncio.to_thread(store.usage.seen))[group.id] == clock.now_ms()

        await until(heard)
        await run_duty(mq, ForgetReplies)
        assert await reply_topics(mq) == [name]
        assert (await mq.request("quote", b"x", timeout=SECONDS)).value == b"x"
    assert mq.late_replies == 0


@anywhere
async def test_a_reply_topic_that_was_only_begun_is_deleted_too(mq: Connection, clock: ManualClock) -> None:
    """Its maker was cut off between the topic and what says when it was heard of."""
    broker = broker_of(mq)
    name = (await broker.open_replies("begun")).name
    broker.store.catalog.delete_group(name, "_requester")
    await run_duty(mq, ForgetReplies)
    assert await reply_topics(mq) == [name]  # or it is about to make it
    clock.advance(DEFAULTS.reply_idle_ms / 1000)
    await run_duty(mq, ForgetReplies)
    assert await reply_topics(mq) == []
    found = broker.store.catalog.create_topic(name, TopicSettings("volatile"), 1)
    assert (await broker.open_replies("begun")).partition_id == found.route.ranges[0].partition_id


@anywhere
async def test_a_reply_topic_that_is_about_to_go_is_made_anew(mq: Connection, clock: ManualClock) -> None:
    broker = broker_of(mq)
    first = await broker.open_replies("slow")
    clock.advance(DEFAULTS.reply_idle_ms / 1000)
    group = broker.store.catalog.group(first.name, "_requester")
    assert broker.store.usage.retire(group.id, DEFAULTS.reply_idle_ms)  # and its mover was killed here
    assert (await broker.open_replies("slow")).partition_id != first.partition_id
    await run_duty(mq, ForgetReplies)
    assert await reply_topics(mq) == [first.name]


async def test_requests_end_when_their_reply_topic_is_gone(
    app: App, mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "postroom.requests")
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.reply("quote", group="pricing")
    async def price(body: bytes) -> bytes:
        begun.set()
        await go_on.wait()
        return body

    async with app, asking(mq) as request:
        async with asyncio.timeout(SECONDS):
            await begun.wait()
        (name,) = await reply_topics(mq)
        await broker_of(mq).delete_topic(name)
        with pytest.raises(NoReply, match="not known whether the request was handled"):
            await request
        go_on.set()
        await until(lambda: _is(mq, 0))  # the worker is done with it
        assert (await mq.request("quote", b"2", timeout=SECONDS)).value == b"2"
    assert "the requester is gone" in caplog.text


async def test_closing_ends_what_waits(mq: Connection, opened: Open) -> None:
    async with opened() as other:
        request = asyncio.create_task(other.request("quote", b"", timeout=SECONDS))
        await until(lambda: _has_reply_topic(mq))
    with pytest.raises(postroom.ClosedError):
        await request


async def _has_reply_topic(mq: Connection) -> bool:
    return bool(await reply_topics(mq))


@embedded("postroom.sync opens the store itself")
def test_without_asyncio(any_url: str, endpoint: str) -> None:
    with postroom.sync.connect(any_url, migrate=True) as mq:
        mq.create_topic("quote", partitions=1)
        with pytest.raises(NoReply, match="nobody serves"):
            mq.request("quote", b"", timeout=0.05)
        with mq.consumer("quote", group="pricing") as consumer:
            assert consumer.poll(wait=0) == []
        assert mq.late_replies == 0


async def test_in_a_users_test(postroom_queue: TestQueue) -> None:
    app = App("sqlite:///elsewhere.db")

    @app.reply("quote", group="pricing")
    async def price(quote: Quote) -> Quote:
        if quote.sku == "none":
            raise RequestFailed("sold out", kind="sold_out")
        return Quote(quote.sku, 7)

    await postroom_queue.create_topic("quote")
    assert (await postroom_queue.ask(app, "quote", b'{"sku": "a"}')).value == b'{"sku":"a","price":7}'
    with pytest.raises(RequestFailed, match="sold out"):
        await postroom_queue.ask(app, "quote", b'{"sku": "none"}')


def test_in_a_users_plain_test(postroom_sync: Any) -> None:
    app = App("sqlite:///elsewhere.db")

    @app.reply("quote", group="pricing")
    def price(body: bytes) -> str:
        return body.decode().upper()

    postroom_sync.create_topic("quote")
    assert postroom_sync.ask(app, "quote", b"a").value == b"A"
