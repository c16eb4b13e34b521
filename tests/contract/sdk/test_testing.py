"""What Postroom offers to users' tests: it works as they are told, with any runner or none."""

from __future__ import annotations

import asyncio
import textwrap
import threading
from typing import Any

import pytest

from postroom import App, Backoff, Connection, Message, UnknownTopic, UsageError, sync
from postroom.clock import ManualClock
from postroom.testing import fixture, plugin
from postroom.testing.fixture import Sent, TestQueue, capture, run_until_idle

pytest_plugins = ["pytester"]

SHOP = """
    import postroom
    app = postroom.App("sqlite:////nowhere/at/all.db")

    @app.subscribe("orders", group="billing", retry=postroom.Backoff(60, 2, "1h"))
    async def bill(order: dict, message):
        if order["id"] == 7 and message.attempt == 1:
            raise ValueError("the bank is shut")
        await app.send("bills", str(order["id"]).encode())
"""


def shown(module: object) -> str:
    """The test that a docstring shows, as it stands there."""
    return textwrap.dedent(str(module.__doc__).split("\n\n")[1])


ASYNC_TEST = f"""
from shop import app

{shown(plugin)}

{shown(fixture)}

async def test_every_test_has_a_queue_of_its_own(postroom_queue):
    assert await postroom_queue.topics() == []

async def test_a_queue_that_is_not_used_costs_nothing(postroom_queue):
    assert not postroom_queue.opened
"""

PLAIN_TEST = """
    import threading
    from shop import app

    def test_an_order_is_billed(postroom_sync, postroom_clock):
        postroom_sync.create_topics("orders", "bills")
        captured = postroom_sync.capture()
        postroom_sync.send("orders", b'{"id": 7}')
        postroom_sync.run_until_idle(app)
        postroom_clock.advance(60)
        postroom_sync.run_until_idle(app)
        assert captured.values("bills") == [b"7"]

    def test_nothing_is_left_running():
        assert not [t.name for t in threading.enumerate() if t.name.startswith("postroom")]
"""

LEFT_RUNNING = """
    import threading

    def test_zz_nothing_is_left_running():
        assert not [t.name for t in threading.enumerate() if t.name.startswith("postroom")]
"""

OWN_RUNNER = """
    import asyncio, inspect
    import pytest

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem):
        if inspect.iscoroutinefunction(pyfuncitem.obj):
            names = pyfuncitem._fixtureinfo.argnames
            asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
            return True
"""

AUTO = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]


@pytest.mark.slow("starts programs")
@pytest.mark.parametrize("runner", ["pytest-asyncio", "none but asyncio.run"])
def test_the_test_in_the_documentation_runs(pytester: pytest.Pytester, runner: str) -> None:
    own = runner != "pytest-asyncio"
    pytester.makepyfile(shop=SHOP, test_shop=ASYNC_TEST, test_zz=LEFT_RUNNING)
    if own:
        pytester.makeconftest(OWN_RUNNER)
    _passes(pytester, 5, *(["-p", "no:asyncio"] if own else AUTO))


@pytest.mark.slow("works for seconds")
def test_the_plain_test_in_the_documentation_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(shop=SHOP, test_shop=PLAIN_TEST)
    _passes(pytester, 2, "-p", "no:asyncio")


@pytest.mark.slow("starts programs")
def test_a_loop_of_the_whole_session_is_fine(pytester: pytest.Pytester) -> None:
    """The loop outlives the queue: the fixture closes it in time."""
    pytester.makepyfile(shop=SHOP, test_shop=ASYNC_TEST, test_zz=LEFT_RUNNING)
    _passes(pytester, 5, *AUTO, "-o", "asyncio_default_test_loop_scope=session")


@pytest.mark.slow("starts programs")
def test_the_plugin_is_found_without_being_asked_for(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--fixtures", "-q")
    result.stdout.fnmatch_lines(["postroom_clock*", "postroom_queue*", "postroom_sync*"])


def _passes(pytester: pytest.Pytester, count: int, *options: str) -> None:
    result = pytester.runpytest_subprocess("-q", "-W", "error", "-p", "no:cacheprovider", *options)
    result.assert_outcomes(passed=count)


def test_the_test_in_the_documentation_has_six_lines() -> None:
    assert len(shown(plugin).splitlines()) == len(shown(fixture).splitlines()) == 6


# ---- the queue ----


async def test_the_queue_is_a_connection(postroom_queue: TestQueue, postroom_clock: ManualClock) -> None:
    assert isinstance(postroom_queue, Connection)
    assert postroom_queue.clock is postroom_clock
    await postroom_queue.create_topic("orders")
    assert postroom_queue.opened
    async with postroom_queue.consumer("orders", group="billing") as consumer:
        async with postroom_queue.producer("orders") as producer:
            await producer.send(b"1")
        (message,) = await consumer.poll(wait=10)
        await message.retry(delay="1h")
        assert await consumer.poll(wait=0) == []
        postroom_clock.advance(3600)
        (message,) = await consumer.poll(wait=10)
        assert message.attempt == 2
    assert [message.value async for message in postroom_queue.read("orders")] == [b"1"]
    with pytest.raises(AttributeError, match="no_such_thing"):
        postroom_queue.no_such_thing  # noqa: B018


def test_a_plain_test_is_told_which_queue_to_take(postroom_queue: TestQueue) -> None:
    with pytest.raises(UsageError, match="postroom_sync"):
        postroom_queue.consumer("orders", group="billing")


def test_a_queue_closes_with_its_loop() -> None:
    before = set(threading.enumerate())

    async def use() -> TestQueue:
        queue = TestQueue()
        await queue.create_topic("orders")
        consumer = queue.consumer("orders", group="billing")
        await consumer.__aenter__()
        return queue

    queue = asyncio.run(use())
    assert queue.closed
    assert set(threading.enumerate()) <= before


# ---- what was sent ----


async def test_everything_that_is_sent_is_captured(postroom_queue: TestQueue) -> None:
    mq = postroom_queue
    await mq.create_topic("orders", partitions=1)
    await mq.create_topic("bills")
    await mq.send("orders", b"before")
    with capture(mq) as captured:
        await mq.send("orders", b"1", key="k", headers={"a": "b"}, id="o-1")
        await mq.send_many("orders", [Message(b"2"), Message(b"3")])
        async with mq.producer("bills") as producer:
            await producer.post(b"4")
        async with mq.producer("orders", confirm=False) as producer:
            await producer.send(b"5")
        with pytest.raises(UnknownTopic):
            await mq.send("nowhere", b"never stored")
    await mq.send("orders", b"after")
    assert captured.sent("orders")[0] == Sent("orders", b"1", b"k", {"a": b"b"}, "o-1")
    assert captured.values("orders") == [b"1", b"2", b"3", b"5"]
    assert captured.sent("bills") == [Sent("bills", b"4")]
    assert len(captured.sent()) == 5
    captured.clear()
    assert captured.sent() == []


async def test_dead_letters_are_not_sends(postroom_queue: TestQueue) -> None:
    await postroom_queue.create_topic("orders")
    await postroom_queue.send("orders", b"1")
    captured = postroom_queue.capture()
    async with postroom_queue.consumer("orders", group="billing") as consumer:
        (message,) = await consumer.poll(wait=10)
        await message.dead("no good")
    assert len(await postroom_queue.dead_letters("orders", "billing")) == 1
    assert captured.sent() == []


# ---- running handlers ----


async def test_it_runs_until_handlers_have_nothing_to_tell_each_other(postroom_queue: TestQueue) -> None:
    """A message that a handler sends is handled too, by whichever handler, however long the chain."""
    app, got = App(postroom_queue), []

    @app.subscribe("second", group="g")
    async def second(body: bytes) -> None:
        got.append(body)
        if len(body) < 50:
            await app.send("first", body + b".")

    @app.subscribe("first", group="g")
    def first(body: bytes) -> None:
        app.sync.send("second", body + b"-")

    await postroom_queue.create_topic("first")
    await postroom_queue.create_topic("second")
    await postroom_queue.send("first", b"x")
    ran = await run_until_idle(app)
    assert (ran.handled, ran.errors) == (2 * len(got), [])
    assert got[-1] == b"x-" + b".-" * 24


async def test_handlers_may_wait_for_each_other(postroom_queue: TestQueue) -> None:
    app, answered = App(postroom_queue), asyncio.Event()

    @app.subscribe("questions", group="g")
    async def ask(body: bytes) -> None:
        await app.send("answers", body)
        await answered.wait()

    @app.subscribe("answers", group="g")
    async def answer(body: bytes) -> None:
        answered.set()

    await postroom_queue.create_topic("questions")
    await postroom_queue.create_topic("answers")
    await postroom_queue.send("questions", b"?")
    assert (await run_until_idle(app)).handled == 2


async def test_more_than_a_window_is_handled(postroom_queue: TestQueue) -> None:
    app, got = App(postroom_queue), 0

    @app.subscribe("orders", group="g", concurrency=1, window=3)
    async def handle(body: bytes) -> None:
        nonlocal got
        got += 1

    await postroom_queue.create_topic("orders")
    await postroom_queue.send_many("orders", [Message(b"x")] * 100)
    assert (await run_until_idle(app)).handled == got == 100


async def test_a_handler_that_never_ends_is_named(postroom_queue: TestQueue) -> None:
    app = App(postroom_queue)

    @app.subscribe("orders", group="g")
    async def hangs(body: bytes) -> None:
        await asyncio.Event().wait()

    await postroom_queue.create_topic("orders")
    await postroom_queue.send("orders", b"x")
    with pytest.raises(TimeoutError, match="hangs"):
        await run_until_idle(app, timeout=0.05)
    assert not app.running


async def test_it_says_what_is_missing(postroom_queue: TestQueue) -> None:
    app = App("memory://")

    @app.subscribe("orders", group="g")
    async def handle(body: bytes) -> None: ...

    with pytest.raises(UsageError, match="on which queue"):
        await run_until_idle(app)
    with pytest.raises(UnknownTopic):
        await run_until_idle(app, postroom_queue)
    await postroom_queue.create_topic("orders")
    own = App(postroom_queue)
    async with own:
        with pytest.raises(UsageError, match="runs already"):
            await run_until_idle(own)


async def test_the_app_is_as_it_was_afterwards(postroom_queue: TestQueue) -> None:
    told: list[BaseException] = []
    app = App(postroom_queue)
    app.on_error(lambda error, messages: told.append(error))

    @app.subscribe("orders", group="g", retry=Backoff(0, 1, 0), max_attempts=1)
    async def handle(body: bytes) -> None:
        raise ValueError("boom")

    fraction, hook = app._fraction, app._on_error
    await postroom_queue.create_topic("orders")
    await postroom_queue.send("orders", b"x")
    assert (await run_until_idle(app)).errors == told != []
    assert (app._fraction, app._on_error, app.running) == (fraction, hook, False)


def test_the_sync_queue_is_a_sync_connection(postroom_sync: Any, postroom_clock: ManualClock) -> None:
    assert isinstance(postroom_sync, sync.Connection)
    postroom_sync.create_topic("orders")
    captured = capture(postroom_sync)
    postroom_sync.send("orders", b"1")
    assert captured.values("orders") == [b"1"]
    with postroom_sync.consumer("orders", group="billing") as consumer:
        consumer.poll(wait=10)[0].retry(delay=60)
        postroom_clock.advance(60)
        assert consumer.poll(wait=10)[0].attempt == 2


def test_pytest_takes_none_of_it_for_tests() -> None:
    assert not TestQueue.__test__ and not fixture.SyncTestQueue.__test__


async def test_what_has_expired_does_not_look_like_the_end() -> None:
    """More of it than the handler's window holds comes before what is to be handled."""
    queue, app, got = TestQueue(), App("memory://"), []

    @app.subscribe("orders", group="billing", concurrency=1)
    async def bill(body: bytes) -> None:
        got.append(body)

    await queue.create_topic("orders", partitions=1)
    await queue.send_many("orders", [Message(b"old", expires=1)] * 9)
    queue.clock.advance(2)
    await queue.send("orders", b"new")
    assert (await queue.run_until_idle(app)).handled == 1 and got == [b"new"]
