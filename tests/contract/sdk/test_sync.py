"""The client without asyncio: the same names, parameters, errors and results."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import ClosedError, ForkError, Message, StoreError, UnknownTopic, UsageError, sync
from tests.contract.stores import everywhere

PAIRS = [
    (postroom.Connection, sync.Connection),
    (postroom.Producer, sync.Producer),
    (postroom.Consumer, sync.Consumer),
    (postroom.Received, sync.Received),
]


@pytest.fixture
def mq(any_url: str, endpoint: str) -> Iterator[sync.Connection]:
    with ExitStack() as stack:
        connection = stack.enter_context(sync.connect(any_url, migrate=True))
        if endpoint == "served":
            server = connection.serve("127.0.0.1", 0)
            connection = stack.enter_context(sync.connect(server.url))
        connection.create_topic("orders", partitions=2)
        yield connection


# ---- nothing is missing ----


@pytest.mark.parametrize(("asynchronous", "plain"), PAIRS)
def test_every_public_name_is_there_with_the_same_parameters(asynchronous: Any, plain: Any) -> None:
    names = [name for name in dir(asynchronous) if not name.startswith("_")]
    assert len(names) > 5
    for name in names:
        theirs, ours = getattr(asynchronous, name), getattr(plain, name)
        if inspect.isfunction(theirs):
            assert (
                inspect.signature(ours).parameters == inspect.signature(theirs).parameters or name == "close"
            )
            assert not inspect.iscoroutinefunction(ours) and not inspect.isasyncgenfunction(ours)
            assert ours.__doc__ == theirs.__doc__
        else:
            assert isinstance(ours, property)


@pytest.mark.parametrize(("asynchronous", "plain"), PAIRS)
def test_blocks_and_iteration_are_there_too(asynchronous: Any, plain: Any) -> None:
    for theirs, ours in [("__aenter__", "__enter__"), ("__aexit__", "__exit__"), ("__aiter__", "__iter__")]:
        assert hasattr(asynchronous, theirs) == hasattr(plain, ours)
    assert hasattr(asynchronous, "__anext__") == hasattr(plain, "__next__")


def test_connect_takes_the_same() -> None:
    assert inspect.signature(sync.connect).parameters == inspect.signature(postroom.connect).parameters
    assert inspect.signature(sync.Connection.close).parameters.keys() == {"self"}


def test_what_a_consumer_sets_itself_can_be_read(mq: sync.Connection) -> None:
    assert mq.client_id and mq.closed is False
    with mq.producer("orders") as producer:
        assert (producer.topic, producer.failed) == ("orders", 0)
    with pytest.raises(AttributeError):
        mq.no_such_name  # noqa: B018
    with pytest.raises(AttributeError):
        mq._no_such_name  # noqa: B018


# ---- it does the same ----


@everywhere
def test_send_and_consume(mq: sync.Connection) -> None:
    receipt = mq.send("orders", b"1", key="42", headers={"source": "web"})
    assert isinstance(receipt, postroom.Receipt) and receipt.topic == "orders"
    assert len(mq.send_many("orders", (Message(b"%d" % n) for n in range(2, 10)))) == 8
    with mq.consumer("orders", group="billing") as consumer:
        got: list[sync.Received] = []
        while len(got) < 9:
            found = consumer.poll(max_messages=4, wait=10)
            assert 0 < len(found) <= 4
            assert all(type(message) is sync.Received for message in found)
            got += found
            consumer.ack(found)
        first = next(message for message in got if message.value == b"1")
        assert (first.key, first.headers, first.attempt, first.topic) == (
            b"42",
            {"source": b"web"},
            1,
            "orders",
        )
        assert "value=b'1'" in repr(first)
    assert sorted(message.value for message in got) == [b"%d" % n for n in range(1, 10)]
    assert mq.lag("orders", "billing").total.messages == 0


@everywhere
def test_iterating_settling_one_by_one(mq: sync.Connection) -> None:
    mq.send_many("orders", [Message(b"%d" % n) for n in range(4)])
    seen: list[tuple[bytes, int]] = []
    with mq.consumer("orders", group="billing") as consumer:
        for message in consumer:
            seen.append((message.value, message.attempt))
            message.extend()
            if message.value == b"0" and message.attempt == 1:
                message.retry(delay=0)
            elif message.value == b"1":
                message.dead("by hand")
            elif message.value == b"2" and seen.count((b"2", 1)) == 1:
                message.release()
            else:
                message.ack()
            if len(seen) == 6:
                break
    assert [letter.reason for letter in mq.dead_letters("orders", "billing")] == ["by hand"]
    assert sorted(seen) == [(b"0", 1), (b"0", 2), (b"1", 1), (b"2", 1), (b"2", 1), (b"3", 1)]
    assert mq.lag("orders", "billing").total.messages == 0


def test_ack_after_handling_and_up_to(mq: sync.Connection) -> None:
    mq.send_many("orders", [Message(b"x")] * 3, slot=0)
    with mq.consumer("orders", group="after", ack="after") as consumer:
        for _, _message in zip(range(3), consumer, strict=False):
            pass
    assert mq.lag("orders", "after").total.messages == 0
    with mq.consumer("orders", group="hand") as consumer:
        messages = consumer.poll(wait=10)
        consumer.ack(up_to=messages[1])
    assert mq.lag("orders", "hand").total.messages == 1


def test_reading_is_plain_iteration(mq: sync.Connection) -> None:
    mq.send_many("orders", [Message(b"%04d" % n) for n in range(3000)], slot=0)
    values = [message.value for message in mq.read("orders")]
    assert values == [b"%04d" % n for n in range(3000)]
    first = next(iter(mq.read("orders", start={0: 17}, partition=0)))
    assert first.offset == 17
    with pytest.raises(UsageError, match="read, not delivered"):
        first.ack()


def test_following_does_not_wait_for_more_than_there_is(mq: sync.Connection) -> None:
    mq.send("orders", b"1")
    following = mq.read("orders", follow=True)
    assert next(following).value == b"1"
    mq.send("orders", b"2")
    assert next(following).value == b"2"
    following.close()


def test_a_reader_that_is_dropped_is_forgotten(mq: sync.Connection) -> None:
    mq.send("orders", b"1")
    next(mq.read("orders", follow=True))
    gc.collect()

    def tasks() -> list[str]:
        return [t.get_coro().__qualname__ for t in asyncio.all_tasks() if "Pump" in repr(t.get_coro())]

    async def none_left() -> bool:
        for _ in range(100):
            if not tasks():
                return True
            await asyncio.sleep(0.01)
        return False

    assert mq._portal.call(none_left)


def test_posts_give_futures_of_threads(mq: sync.Connection) -> None:
    with mq.producer("orders") as producer:
        futures = [producer.post(b"x") for _ in range(100)]
        done, waiting = concurrent.futures.wait(futures, timeout=10)
        assert len(done) == 100 and not waiting
        assert all(future.result().topic == "orders" for future in futures)
        assert futures[0].cancel() is False


def test_failures_of_posts_nobody_looked_at_are_raised_in_the_end(mq: sync.Connection) -> None:
    _break_appends(mq)
    with pytest.raises(StoreError, match="broken"), mq.producer("orders") as producer:
        producer.post(b"x")
    with mq.producer("orders") as producer:
        looked_at = producer.post(b"x")
        with pytest.raises(StoreError, match="broken"):
            looked_at.result(10)
        seen = producer.post(b"x")
        assert isinstance(seen.exception(10), StoreError)


def _break_appends(mq: sync.Connection) -> None:
    async def broken(*args: Any, **more: Any) -> Any:
        raise StoreError("broken")

    mq._target._endpoint.append, mq._target._endpoint.append_soon = broken, lambda *args: False


def test_errors_are_the_same(mq: sync.Connection) -> None:
    with pytest.raises(UnknownTopic, match="did you mean 'orders'"):
        mq.send("ordres", b"1")
    with pytest.raises(UnknownTopic):
        list(mq.read("nowhere"))
    with pytest.raises(postroom.InvalidURL):
        sync.connect("sqlite:orders.db")
    with pytest.raises(postroom.StoreError):
        sync.connect(f"sqlite:///{os.devnull}/x.db")


@everywhere
def test_many_threads_may_share_a_connection(mq: sync.Connection) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda n: mq.send("orders", b"%d" % n), range(200)))
    assert len({(receipt.partition, receipt.offset) for receipt in receipts}) == 200


def test_a_queue_is_served_until_that_is_closed() -> None:
    with sync.connect("memory://") as mq:
        with mq.serve("127.0.0.1", 0) as server, sync.connect(url := server.url) as other:
            other.create_topic("orders")
            assert [topic.name for topic in mq.topics()] == ["orders"]
        assert server.closed
        with pytest.raises(postroom.BrokerUnavailable):
            sync.connect(url)
        assert [topic.name for topic in mq.topics()] == ["orders"]


# ---- where it may not be used ----


def test_it_is_refused_inside_a_running_loop(mq: sync.Connection) -> None:
    async def inside(call: Any) -> None:
        with pytest.raises(UsageError, match=r"use postroom\.connect"):
            call()

    asyncio.run(inside(lambda: sync.connect("memory://")))
    asyncio.run(inside(lambda: mq.send("orders", b"1")))
    asyncio.run(inside(lambda: next(mq.read("orders"))))
    asyncio.run(inside(mq.close))
    mq.send("orders", b"1")


def test_use_after_close_says_so_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    mq = sync.connect("memory://")
    mq.create_topic("orders")
    consumer = mq.consumer("orders", group="billing")
    consumer.__enter__()
    mq.send("orders", b"1")
    (message,) = consumer.poll(wait=10)
    mq.close()
    mq.close()
    assert mq.closed
    for call in (
        lambda: mq.send("orders", b"1"),
        consumer.poll,
        message.ack,
        lambda: list(mq.read("orders")),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert set(threading.enumerate()) <= before


def test_a_closed_producer_says_so(mq: sync.Connection) -> None:
    with mq.producer("orders") as producer:
        pass
    with pytest.raises(ClosedError, match="producer"):
        producer.send(b"1")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed before"])
def test_a_file_that_was_open_at_the_fork_is_refused_in_the_child(tmp_path: Path, closed: bool) -> None:
    """SQLite would lose what the child stores once the parent closes the file."""
    url = f"sqlite:///{tmp_path}/queue.db"
    mq = sync.connect(url)
    mq.create_topic("orders")
    if closed:
        mq.close()
    read, write = os.pipe()
    child = os.fork()
    if not child:  # no assertion may leave the child
        try:
            with sync.connect(url) as own:
                own.send("orders", b"1")
            answer = b"sent"
        except BaseException as error:
            answer = repr(error).encode()
        os.write(write, answer)
        os._exit(0)
    os.waitpid(child, 0)
    answer = os.read(read, 1000)
    mq.close()
    assert answer == b"sent" if closed else b"ForkError" in answer and b"before the fork" in answer


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_after_fork_says_so(mq: sync.Connection) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:  # no assertion may leave the child
        try:
            mq.send("orders", b"1")
            answer = b"sent"
        except ForkError:
            answer = b"ForkError"
        except BaseException as error:
            answer = repr(error).encode()
        os.write(write, answer)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000) == b"ForkError"
    os.close(read), os.close(write)
    mq.send("orders", b"1")


# ---- interrupted and forgotten ----

INTERRUPTED = """
import postroom.sync
with postroom.sync.connect("memory://") as mq:
    mq.create_topic("orders")
    with mq.consumer("orders", group="billing") as consumer:
        try:
            print("waiting", flush=True)
            consumer.poll(wait=600)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        mq.send("orders", b"1")
        print(consumer.poll(wait=10)[0].value, flush=True)
        print("again", flush=True)
        for message in consumer:
            pass
"""


@pytest.mark.slow("works for seconds")
def test_ctrl_c_ends_a_call_and_the_connection_goes_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for line in ("waiting", "interrupted", "b'1'", "again"):
            assert process.stdout.readline().strip() == line
            if line in ("waiting", "again"):
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.3)  # it is in the call now
                process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode != 0
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "never" not in err and "pending" not in err


def test_a_program_that_forgets_to_close_ends() -> None:
    program = (
        "import postroom.sync as s; mq = s.connect('memory://'); mq.create_topic('t'); mq.send('t', b'1');"
        "c = mq.consumer('t', group='g'); c.__enter__(); print(c.poll(wait=10)[0].value)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "b'1'\n", "")
