"""A lone batch that is sent to a server while the event loop goes on: what its answer means, and what
becomes of it if there is none (I2, I3, I15)."""

from __future__ import annotations

import asyncio
import select
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
from pymysql.constants import COMMAND

import postroom
from postroom.broker.broker import Broker
from postroom.config import DEFAULTS
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore
from postroom.store.contract import Append, Appended, SentAppend
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import append, batch, partitions, read_all
from tests.ready import Ground
from tests.servers import Proxy

LIMIT_S = 30
HASTY = replace(DEFAULTS, lock_timeout_ms=1_000, idle_timeout_ms=1_000)


@pytest.fixture
def place(ground: Ground) -> int:
    return partitions(ground.store().catalog.create_topic("orders", TopicSettings(), 1))[0]


def numbered(number: int, value: bytes = b"value") -> Append:
    return Append(0, batch(producer=7, sequence=number, value=value))


def known(store: SqlStore, place: int, count: int = 3) -> None:
    """The first goes the long way, the second is not prepared yet, the third is, or is just after."""
    for number in range(count):
        append(store, place, numbered(number).batch)


def send(store: SqlStore, place: int, number: int, value: bytes = b"value") -> SentAppend:
    sent = store.log.send(replace(numbered(number, value), partition_id=place))
    assert sent is not None
    return sent


def has_come(sent: SentAppend, seconds: float = LIMIT_S) -> bool:
    """As the event loop does it."""
    deadline = time.monotonic() + seconds
    socket = select.poll()
    socket.register(sent.fileno())
    while (left := deadline - time.monotonic()) > 0:
        socket.modify(sent.fileno(), select.POLLIN | (select.POLLOUT if sent.unsent else 0))
        if socket.poll(left * 1000) and sent.answered():
            return True
    return False


def result(sent: SentAppend) -> Appended | None:
    assert has_come(sent)
    return sent.result()


def stored_by_append(store: SqlStore, place: int, number: int) -> tuple[int, bool]:
    found = append(store, place, numbered(number).batch)[0]
    return found.base_offset, found.duplicate


@contextmanager
def locked(ground: Ground, place: int) -> Iterator[None]:
    with ground.connect().cursor() as cursor:
        cursor.execute("SELECT id FROM postroom_partitions WHERE id = %s FOR UPDATE", (place,))
        cursor.fetchall()
        yield
        cursor.connection.rollback()


def end_those_at_work(ground: Ground) -> None:
    if ground.kind == "postgres":
        waiting = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        ground.rows(waiting, admin=True)
    else:
        kill(ground, "info LIKE '%%UPDATE postroom%%'")


def end_the_idle(ground: Ground) -> None:
    if ground.kind == "postgres":
        ground.rows(
            """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE datname = %s AND pid <> pg_backend_pid() AND state = 'idle'""",
            ground.name,
            admin=True,
        )
    else:
        kill(ground, "command = 'Sleep'")


def kill(ground: Ground, which: str) -> None:
    look = f"""SELECT id FROM information_schema.processlist
               WHERE db = %s AND id <> CONNECTION_ID() AND {which}"""
    found = ground.rows(look, ground.name, admin=True)
    assert found
    for (number,) in found:
        ground.rows(f"KILL {number}", admin=True)


def test_it_is_stored_like_any_other(ground: Ground, place: int) -> None:
    store = ground.store()
    assert store.log.send(replace(numbered(0), partition_id=place)) is None  # nothing is known yet
    known(store, place)
    before = store.now_ms()
    found = [result(send(store, place, number)) for number in range(3, 8)]
    assert [one and one.base_offset for one in found] == [3, 4, 5, 6, 7]
    assert all(one is not None and before - 1000 <= one.appended_at for one in found)
    assert stored_by_append(store, place, 8) == (8, False)  # on the short way: what is known is right
    assert [piece.base_offset for piece in read_all(store, place)] == list(range(9))


def test_a_large_one_leaves_when_the_socket_takes_it(
    ground: Ground, place: int, proxy_to: Callable[[int], Proxy]
) -> None:
    proxy = proxy_to(ground.server.port)
    store = ground.store(port=proxy.port)
    known(store, place)
    value = bytes(range(256)) * 40_000
    proxy.deaf()
    sent = send(store, place, 3, value)
    assert sent.unsent and not has_come(sent, 0.2) and sent.unsent
    proxy.heal()
    assert result(sent) is not None
    assert read_all(store, place)[-1].data[8:] == numbered(3, value).batch[8:]


def test_what_is_otherwise_is_stored_by_the_long_way(ground: Ground, place: int) -> None:
    store, other = ground.store(), ground.store()
    known(store, place)
    append(other, place, batch(producer=8))
    assert result(send(store, place, 3)) is None
    assert stored_by_append(store, place, 3) == (4, False)
    assert other.log.forget_producers(2**62) == 2
    assert store.log.send(replace(numbered(4), partition_id=place)) is None  # another came between
    assert len(read_all(store, place)) == 5


def test_who_waits_for_a_lock_waits_for_nothing_else(ground: Ground, place: int) -> None:
    store = ground.store()
    known(store, place)
    with locked(ground, place):
        sent = send(store, place, 3)
        assert not has_come(sent, 0.2)
    found = result(sent)
    assert found is not None and found.base_offset == 3


def test_a_lock_that_is_not_had_in_time_stores_nothing(ground: Ground, place: int) -> None:
    store = ground.store(limits=HASTY)
    known(store, place)
    with locked(ground, place):
        assert result(send(store, place, 3)) is None
    assert stored_by_append(store, place, 3) == (3, False)


@pytest.mark.parametrize("how", ["its server's process ends", "it is cut", "it is abandoned"])
def test_one_that_is_lost_before_it_was_stored_is_stored_once(
    ground: Ground, place: int, proxy_to: Callable[[int], Proxy], how: str
) -> None:
    proxy = proxy_to(ground.server.port)
    patient = replace(HASTY, lock_timeout_ms=20_000)  # on a busy machine a second may pass before it is asked
    store = ground.store(port=proxy.port, limits=patient)
    known(store, place)
    with locked(ground, place):
        sent = send(store, place, 3)
        assert not has_come(sent, 0.1)
        if how == "its server's process ends":
            end_those_at_work(ground)
        elif how == "it is cut":
            proxy.cut()
        if how == "it is abandoned":
            sent.abandon()
        else:
            assert result(sent) is None
    assert stored_by_append(store, place, 3)[0] == 3  # a repeat if the server went on with it
    assert [piece.base_offset for piece in read_all(store, place)] == [0, 1, 2, 3]


def test_one_whose_answer_is_lost_is_known_by_its_sequence(
    ground: Ground, place: int, proxy_to: Callable[[int], Proxy]
) -> None:
    proxy = proxy_to(ground.server.port)
    store = ground.store(port=proxy.port, limits=HASTY)
    known(store, place)
    proxy.deaf("answers")
    sent = send(store, place, 3)
    deadline = time.monotonic() + LIMIT_S
    while len(read_all(ground.store(), place)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    proxy.cut()
    assert result(sent) is None
    proxy.heal()
    assert stored_by_append(store, place, 3) == (3, True)
    assert len(read_all(store, place)) == 4


def test_a_statement_that_is_not_prepared_any_more_is_prepared_again(ground: Ground, place: int) -> None:
    """The driver drops all of them after a rollback; those between us and a server have their ways."""
    store = ground.store()
    known(store, place)
    with store.session.read(Area.LOG) as tx:
        if ground.kind == "postgres":
            tx.connection.execute("DEALLOCATE ALL")
        else:
            (number,) = tx.connection._prepared.values()
            tx.connection._execute_command(COMMAND.COM_STMT_CLOSE, struct.pack("<I", number))
    assert result(send(store, place, 3)) is None
    for number in range(3, 7):
        assert stored_by_append(store, place, number) == (number, False)
    assert result(send(store, place, 7)) is not None


def test_a_connection_that_ended_meanwhile_is_sent_nothing(ground: Ground, place: int) -> None:
    store = ground.store()
    known(store, place)
    end_the_idle(ground)
    deadline = time.monotonic() + LIMIT_S
    while (sent := store.log.send(replace(numbered(3), partition_id=place))) is not None:
        assert result(sent) is None  # it was sent before the end was to be seen
        assert time.monotonic() < deadline
        known(store, place)
    assert stored_by_append(store, place, 3)[0] == 3
    assert len(read_all(store, place)) == 4


# ---- the writer ----


@contextmanager
def in_threads(mq: postroom.Connection) -> Iterator[list[int]]:
    """How many batches each commit of the writer's thread has."""
    broker = mq._endpoint
    assert isinstance(broker, Broker)
    real, seen = broker.store.log.append, list[int]()

    def append(appends: list[Append]) -> object:
        seen.append(len(appends))
        return real(appends)

    with mock.patch.object(broker.store.log, "append", append):
        yield seen


async def begin(mq: postroom.Connection) -> None:
    """Four messages, after which the statement is prepared."""
    await mq.create_topic("orders", partitions=1)
    for _ in range(4):
        await mq.send("orders", b"first")


async def test_one_message_after_the_other_needs_no_thread(ground: Ground) -> None:
    async with postroom.connect(ground.url) as mq:
        await begin(mq)
        with in_threads(mq) as commits:
            receipts = [await mq.send("orders", b"%d" % number) for number in range(50)]
        assert [one.offset for one in receipts] == list(range(4, 54))
        assert not commits
        found = [message.value async for message in mq.read("orders", end="latest")]
        assert found[4:] == [b"%d" % number for number in range(50)]


async def test_what_comes_while_one_is_sent_is_one_commit_behind_it(ground: Ground) -> None:
    async with postroom.connect(ground.url) as mq:
        await begin(mq)
        place = (await mq.route("orders")).ranges[0].partition_id
        with in_threads(mq) as commits, locked(ground, place):
            sends = []
            for number in range(20):
                sends.append(asyncio.create_task(mq.send("orders", b"%d" % number)))
                await asyncio.sleep(0.005)
            assert not any(one.done() for one in sends) and not commits
        receipts = await asyncio.wait_for(asyncio.gather(*sends), LIMIT_S)
        assert [one.offset for one in receipts] == list(range(4, 24))


async def test_leaving_waits_for_the_answer(ground: Ground) -> None:
    async with postroom.connect(ground.url) as mq:
        await begin(mq)
        place = (await mq.route("orders")).ranges[0].partition_id
        broker = mq._endpoint
        assert isinstance(broker, Broker)
        with locked(ground, place):
            sends = [asyncio.create_task(mq.send("orders", b"last")) for _ in range(2)]
            await asyncio.sleep(0.1)
            closing = asyncio.create_task(mq.close())
            await asyncio.sleep(0.1)
            assert not closing.done()
        await asyncio.wait_for(closing, LIMIT_S)
        stored = [
            one
            for one in await asyncio.gather(*sends, return_exceptions=True)
            if not isinstance(one, BaseException)
        ]
    assert len(stored) >= 1
    assert {4} <= {one.offset for one in stored}


async def test_an_answer_that_never_comes_is_given_up_and_the_message_stored_once(
    ground: Ground, proxy_to: Callable[[int], Proxy]
) -> None:
    proxy = proxy_to(ground.server.port)
    address = ground.server.url(ground.name, port=proxy.port)
    async with postroom.connect(address) as mq:
        with impatient(mq) as given_up:
            await begin(mq)
            proxy.deaf("answers")
            sending = asyncio.create_task(mq.send("orders", b"once"))
            async with asyncio.timeout(LIMIT_S):
                await given_up.wait()
            assert not sending.done()
            proxy.heal()
            receipt = await asyncio.wait_for(sending, LIMIT_S)
        assert receipt.offset == 4
        values = [message.value async for message in mq.read("orders", end="latest")]
    assert values == [b"first"] * 4 + [b"once"]


@contextmanager
def impatient(mq: postroom.Connection) -> Iterator[asyncio.Event]:
    """Nobody waits long for an answer. The event: one was given up."""
    broker, given_up = mq._endpoint, asyncio.Event()
    assert isinstance(broker, Broker)
    real = broker.store.log.send

    def send(append: Append) -> SentAppend | None:
        sent = real(append)
        if sent is not None:
            abandon, sent.patience_s = sent.abandon, 0.5

            def abandoned() -> None:
                given_up.set()
                abandon()

            sent.abandon = abandoned  # type: ignore[method-assign]
        return sent

    with mock.patch.object(broker.store.log, "send", send):
        yield given_up
