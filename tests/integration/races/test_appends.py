"""Appends that meet, in the order that goes wrong: lock then look, unknown commits, sequences (I1, I2, I3).

Each test puts two transactions on PostgreSQL and MariaDB into the order that INVARIANTS describe, by stopping
the first one between its last statement and its COMMIT.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import pytest

import postroom
from postroom.broker.broker import Broker
from postroom.errors import SequenceGap, StoreUnavailable
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import SqlStore
from postroom.store.contract import Append
from postroom.store.sql.session import Area, Transaction
from postroom.testing.store_contract.harness import (
    acks,
    append,
    ask,
    batch,
    in_threads,
    partitions,
    read_all,
    refused,
    spans,
    values,
)
from postroom.testing.store_contract.log.ids import send
from tests.integration.races.interleaving import kill, lock_waits, run_all, soon, stopped_at_commit, until
from tests.ready import Ground
from tests.servers import Proxy

pytestmark = pytest.mark.undisturbed("mariadb")  # it counts waiting transactions


@pytest.fixture
def store(ground: Ground) -> SqlStore:
    return ground.store()


@pytest.fixture
def other(ground: Ground) -> SqlStore:
    """Another process, as far as the database can tell."""
    return ground.store()


@pytest.fixture
def place(store: SqlStore) -> int:
    return partitions(store.catalog.create_topic("orders", TopicSettings(), 1))[0]


def numbered(number: int, producer: int = 7) -> bytes:
    return batch(3, producer=producer, sequence=3 * number, value=b"%d" % number)


# ---- lock, then look (I1) ---------------------------------------------------------------------------------


def test_a_repeat_that_waited_for_the_lock_of_the_first_try_is_stored_once(
    ground: Ground, store: SqlStore, other: SqlStore, place: int
) -> None:
    """Reproduced: with a look before the lock, or under MariaDB's own isolation, it is stored twice."""
    append(store, place, numbered(0))
    other.log.bounds([place])  # connected, and the caches as they are in earnest
    with stopped_at_commit(store) as stop:
        first = soon(append, store, place, numbered(1))
        stop.wait()
        repeat = soon(append, other, place, numbered(1))
        until(lock_waits(ground))
        stop.go_on.set()
        told = [first.result(30)[0], repeat.result(30)[0]]
    assert [(t.base_offset, t.duplicate) for t in told] == [(3, False), (3, True)]
    assert values(read_all(store, place)) == [b"0-0", b"0-1", b"0-2", b"1-0", b"1-1", b"1-2"]


def test_a_lone_append_that_waited_for_the_lock_sees_what_was_stored_meanwhile(
    ground: Ground, store: SqlStore, other: SqlStore, place: int
) -> None:
    """What it knows was right when it asked for the lock, and is wrong when it has it."""
    append(other, place, numbered(0))
    with stopped_at_commit(store) as stop:
        first = soon(append, store, place, numbered(1))
        stop.wait()
        with mock.patch.object(
            other.session.dialect, "append_lone", wraps=other.session.dialect.append_lone
        ) as lone:
            repeat = soon(append, other, place, numbered(1))
            until(lock_waits(ground))
            stop.go_on.set()
            told = [first.result(30)[0], repeat.result(30)[0]]
        assert lone.call_count == 1
    assert [(t.base_offset, t.duplicate) for t in told] == [(3, False), (3, True)]
    assert append(other, place, numbered(2))[0].base_offset == 6
    assert [piece.base_offset for piece in read_all(store, place)] == [0, 3, 6]


def test_many_repeats_wait_for_one_lock(ground: Ground, store: SqlStore, other: SqlStore, place: int) -> None:
    """Of a first batch ever: there is no sequence's row yet that could be locked."""
    with stopped_at_commit(store) as stop:
        first = soon(append, store, place, numbered(0))
        stop.wait()
        repeats = [soon(append, other, place, numbered(0)) for _ in range(4)]
        until(lock_waits(ground, 4))
        stop.go_on.set()
        assert not first.result(30)[0].duplicate
        assert [(r.result(30)[0].base_offset, r.result(30)[0].duplicate) for r in repeats] == [(0, True)] * 4
    assert len(read_all(store, place)) == 1


def test_a_repeat_whose_first_try_is_undone_is_the_one_that_counts(
    ground: Ground, store: SqlStore, other: SqlStore, place: int
) -> None:
    with stopped_at_commit(store) as stop:
        first = soon(append, store, place, numbered(0))
        stop.wait()
        repeat = soon(append, other, place, numbered(0))
        until(lock_waits(ground))
        assert kill(ground, in_transaction=True) == 1
        stop.go_on.set()
        assert repeat.result(30)[0].duplicate is False
        with pytest.raises(StoreUnavailable):
            first.result(30)
    assert append(store, place, numbered(0))[0].duplicate is True
    assert len(read_all(store, place)) == 1


# ---- sequences (I3) ---------------------------------------------------------------------------------------


def test_the_next_batch_waits_for_the_one_before_it(
    ground: Ground, store: SqlStore, other: SqlStore, place: int
) -> None:
    """Two writers of one producer: the second batch is looked at when the first is there."""
    with stopped_at_commit(store) as stop:
        first = soon(append, store, place, numbered(0))
        stop.wait()
        second = soon(append, other, place, numbered(1))
        until(lock_waits(ground))
        stop.go_on.set()
        assert (first.result(30)[0].base_offset, second.result(30)[0].base_offset) == (0, 3)


def test_a_batch_does_not_overtake_one_that_was_undone(
    ground: Ground, store: SqlStore, other: SqlStore, place: int
) -> None:
    """It is a gap, and retriable; nothing of it is stored."""
    append(store, place, numbered(0))
    with stopped_at_commit(store) as stop:
        first = soon(append, store, place, numbered(1))
        stop.wait()
        second = soon(other.log.append, [Append(place, numbered(2)), Append(place, numbered(0, producer=8))])
        until(lock_waits(ground))
        kill(ground, in_transaction=True)
        stop.go_on.set()
        with pytest.raises(StoreUnavailable):
            first.result(30)
        early, innocent = second.result(30)
    assert refused(early, SequenceGap).retriable
    assert not isinstance(innocent, postroom.PostroomError) and innocent.base_offset == 3
    assert [d.base_offset for d in append(store, place, numbered(1), numbered(2))] == [6, 9]


# ---- commits of unknown fate (I2, R34) --------------------------------------------------------------------

Fate = Literal["committed", "undone"]
both_fates = pytest.mark.parametrize("fate", ["committed", "undone"])


@contextmanager
def commit_is_lost(
    store: SqlStore, proxy: Proxy, fate: Fate, seen: Callable[[], bool]
) -> Iterator[list[Any]]:
    """The next COMMIT arrives and its answer does not, or it is lost on its way. Then all is well again."""
    dialect, lost = store.session.dialect, list[Any]()
    original, original_lone = dialect.end, dialect.append_lone

    def losing(commit: Callable[[], Any], how: str) -> Any:
        lost.append(how)
        proxy.deaf("answers" if fate == "committed" else "both")
        committing = soon(commit)
        if fate == "committed":
            until(seen)
        proxy.cut()
        proxy.heal()
        return committing.result(30)

    def end(connection: Any, area: Area, *, commit: bool) -> None:
        if not commit or lost:
            return original(connection, area, commit=commit)
        run_all(connection)
        losing(lambda: original(connection, area, commit=True), "long")
        return None

    def append_lone(connection: Any, lone: Any) -> int | None:
        if lost:
            return original_lone(connection, lone)
        found: int | None = losing(lambda: original_lone(connection, lone), "short")
        return found

    with mock.patch.object(dialect, "end", end), mock.patch.object(dialect, "append_lone", append_lone):
        yield lost


@both_fates
def test_a_commit_of_unknown_fate_is_an_error_and_its_repeat_is_recognised(
    ground: Ground, place: int, other: SqlStore, proxy_to: Callable[[int], Proxy], fate: Fate
) -> None:
    proxy = proxy_to(ground.server.port)
    store = ground.store(port=proxy.port)
    seen = lambda: other.log.bounds([place])[place].end == 3  # noqa: E731
    with commit_is_lost(store, proxy, fate, seen) as lost:
        with pytest.raises(StoreUnavailable) as told:
            append(store, place, numbered(0))
        assert told.value.retriable and not told.value.undone and lost  # the store does not guess
        again = append(store, place, numbered(0))[0]
    assert (again.base_offset, again.duplicate) == (0, fate == "committed")
    assert append(store, place, numbered(1))[0].base_offset == 3
    assert len(read_all(other, place)) == 2


@both_fates
def test_a_lone_append_of_unknown_fate_is_an_error_and_its_repeat_is_recognised(
    ground: Ground, place: int, other: SqlStore, proxy_to: Callable[[int], Proxy], fate: Fate
) -> None:
    """The short way, whose only statement is the whole transaction."""
    proxy = proxy_to(ground.server.port)
    store = ground.store(port=proxy.port)
    append(store, place, numbered(0))
    seen = lambda: other.log.bounds([place])[place].end == 6  # noqa: E731
    with commit_is_lost(store, proxy, fate, seen) as lost:
        with pytest.raises(StoreUnavailable) as told:
            append(store, place, numbered(1))
        assert told.value.retriable and not told.value.undone and not told.value.nothing_done
        again = append(store, place, numbered(1))[0]
    assert lost == ["short"]
    assert (again.base_offset, again.duplicate) == (3, fate == "committed")
    assert append(store, place, numbered(2))[0].base_offset == 6
    assert len(read_all(other, place)) == 3


@pytest.mark.slow("works for seconds")
@both_fates
async def test_a_send_whose_commit_was_lost_has_the_right_receipt(
    ground: Ground, place: int, other: SqlStore, proxy_to: Callable[[int], Proxy], fate: Fate
) -> None:
    proxy = proxy_to(ground.server.port)
    async with postroom.connect(ground.server.url(ground.name, port=proxy.port)) as mq:
        await mq.send("orders", b"first")
        broker = mq._endpoint
        assert isinstance(broker, Broker) and isinstance(broker.store, SqlStore)
        seen = lambda: other.log.bounds([place])[place].end == 2  # noqa: E731
        with commit_is_lost(broker.store, proxy, fate, seen) as lost:
            receipt = await mq.send("orders", b"second")
        assert lost and receipt.offset == 1
        assert (await mq.send("orders", b"third")).offset == 2
        found = [(m.offset, m.value) async for m in mq.read("orders")]
    assert found == [(0, b"first"), (1, b"second"), (2, b"third")]


@pytest.mark.slow("works for seconds")
@both_fates
async def test_batches_behind_a_lost_commit_stay_behind_it(
    ground: Ground, place: int, other: SqlStore, proxy_to: Callable[[int], Proxy], fate: Fate
) -> None:
    """I3: also of a producer that the store has never heard of before that batch. Order and receipts hold."""
    proxy = proxy_to(ground.server.port)
    async with postroom.connect(ground.server.url(ground.name, port=proxy.port)) as mq:
        await mq.route("orders")
        assert isinstance(mq._endpoint, Broker) and isinstance(mq._endpoint.store, SqlStore)
        seen = lambda: other.log.bounds([place])[place].end > 0  # noqa: E731
        with commit_is_lost(mq._endpoint.store, proxy, fate, seen) as lost:
            async with mq.producer("orders", batch_messages=1) as producer:
                receipts = [await producer.post(b"%d" % number, key="k") for number in range(12)]
        assert lost and [(await receipt).offset for receipt in receipts] == list(range(12))
        found = [(m.offset, m.value) async for m in mq.read("orders")]
    assert found == [(number, b"%d" % number) for number in range(12)]


@both_fates
def test_a_poll_whose_commit_was_lost_is_answered_when_it_is_repeated(
    ground: Ground, place: int, other: SqlStore, proxy_to: Callable[[int], Proxy], fate: Fate
) -> None:
    """I6: the same token is handed the same; nothing is skipped, nothing is in two hands."""
    append(other, place, batch(5))
    group = other.catalog.create_group("orders", "billing", GroupSettings())
    other.progress.rewind(group, [place])
    proxy = proxy_to(ground.server.port)
    store = ground.store(port=proxy.port)
    seen = lambda: other.progress.peek(group, [place])[place].cursor == 3  # noqa: E731
    with commit_is_lost(store, proxy, fate, seen):
        with pytest.raises(StoreUnavailable):
            store.progress.poll(group, place, ask(11, 5, messages=3))
        assert spans(store.progress.poll(group, place, ask(11, 5, messages=3))) == [(0, 2)]
    assert spans(other.progress.poll(group, place, ask(12, 5))) == [(3, 4)]
    assert store.progress.settle(group, place, 11, acks((0, 2))).lost == ()
    assert other.progress.committed(group.id, place) == 3


# ---- offsets that no reader skips (the offset pitfall) ----------------------------------------------------

WRITERS, ROUNDS = 4, 25


@pytest.mark.slow("works for seconds")
def test_whoever_reads_on_misses_nothing_while_commits_are_slow(
    ground: Ground, store: SqlStore, other: SqlStore, place: int
) -> None:
    """What is given an offset first is seen first, however long its transaction stays open."""
    total = WRITERS * ROUNDS * 3
    draw = random.Random(4)

    def write(through: SqlStore, who: int) -> None:
        for number in range(ROUNDS):
            append(through, place, batch(3, producer=who, sequence=3 * number))

    def follow() -> int:
        last, looks = 0, 0
        while last < total:
            looks += 1
            end = other.log.news().ends[place]
            for piece in other.log.read(place, last, max_messages=50, max_bytes=10**6):
                assert piece.base_offset == last, "something is missing, and may appear later"
                last = piece.last_offset + 1
            assert last >= end, "the end was told before what is below it could be read"
        return looks

    with slow_commits(store, draw), slow_commits(other, draw):
        *_, looks = in_threads(
            *(lambda who=who, to=to: write(to, who) for who, to in enumerate([store, other] * 2)), follow
        )
    assert [piece.base_offset for piece in read_all(store, place)] == list(range(0, total, 3))
    assert looks > WRITERS * ROUNDS / 4, "it looked too seldom to have met a transaction that was open"


@contextmanager
def slow_commits(store: SqlStore, draw: random.Random) -> Iterator[None]:
    """Transactions stay open for a while between their last statement and their COMMIT."""
    dialect = store.session.dialect
    original = dialect.end

    def end(connection: Any, area: Area, *, commit: bool) -> None:
        if commit:
            run_all(connection)
            threading.Event().wait(draw.random() * 0.02)
        original(connection, area, commit=commit)

    with mock.patch.object(dialect, "end", end):
        yield


# ---- ids (I13) --------------------------------------------------------------------------------------------


def test_a_window_that_is_loaded_while_the_first_batches_come_has_them_all(
    store: SqlStore, other: SqlStore
) -> None:
    """Found: an empty log was looked at before its end, and what came between was never seen again."""
    topic = store.catalog.create_topic("mails", TopicSettings(dedup_ms=60_000), 1)
    place, ask_one = partitions(topic)[0], Transaction.one
    between = iter([("a",), ("b",), ("c",)])

    def one(tx: Transaction, sql: str, *args: Any) -> Any:
        found = ask_one(tx, sql, *args)
        if "MIN(base_offset)" in sql:
            with mock.patch.object(Transaction, "one", ask_one):
                for ids in between:
                    send(other, place, *ids, window_ms=60_000)
        return found

    with mock.patch.object(Transaction, "one", one):
        assert dict(send(store, place, "a", "d", window_ms=60_000).repeats) == {0: 0}
    assert [value.decode() for value in values(read_all(store, place))] == ["a", "b", "c", "d"]
