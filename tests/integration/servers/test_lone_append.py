"""One batch alone on a server: what its round trip depends on, and what is told when it fails (I2, I16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from postroom.config import DEFAULTS
from postroom.errors import StoreBusy, StoreUnavailable, UnknownProducer
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore
from postroom.store.dialects import mysql, postgres_connection
from postroom.store.sql.log.lone_append import LoneAppend
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import append, batch, partitions, read_all
from tests.ready import Ground
from tests.servers import Proxy

HOUR_MS = 3_600_000
HASTY = replace(DEFAULTS, lock_timeout_ms=1_000, idle_timeout_ms=1_000)


@pytest.fixture
def place(ground: Ground) -> int:
    return partitions(ground.store().catalog.create_topic("orders", TopicSettings(), 1))[0]


def numbered(number: int, value: bytes = b"value") -> bytes:
    return batch(producer=7, sequence=number, value=value)


@contextmanager
def short_ways(store: SqlStore) -> Iterator[list[bool]]:
    """Whether each that was tried was taken."""
    taken: list[bool] = []
    dialect = store.session.dialect
    real = dialect.append_lone

    def append_lone(connection: object, lone: LoneAppend) -> int | None:
        found = real(connection, lone)
        taken.append(found is not None)
        return found

    with mock.patch.object(dialect, "append_lone", append_lone):
        yield taken


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_time_that_the_server_does_not_have_any_more_is_not_stored(
    ground: Ground, place: int, monkeypatch: pytest.MonkeyPatch, step_ms: int
) -> None:
    """I16: whoever knows the time from earlier answers stores by it only while the server agrees."""
    store = ground.store()
    with short_ways(store) as taken:
        before = [append(store, place, numbered(number))[0].appended_at for number in range(2)]
        kind = type(store.session.dialect)
        monkeypatch.setattr(kind, "now", f"{kind.now} + {step_ms}")  # type: ignore[attr-defined]
        after = [append(store, place, numbered(number))[0].appended_at for number in range(2, 4)]
    assert taken == [True, False, True]
    if step_ms > 0:
        assert all(at >= before[-1] + step_ms for at in after)
    else:
        assert after == [before[-1]] * 2  # times do not go back
    assert [piece.appended_at for piece in read_all(store, place)] == before + after


def test_the_time_is_the_servers(ground: Ground, place: int) -> None:
    store = ground.store()
    sql = f"{store.session.dialect.now}"  # type: ignore[attr-defined]
    with short_ways(store) as taken:
        for number in range(5):
            before = ground.rows(sql)[0][0]
            at = append(store, place, numbered(number))[0].appended_at
            assert before - 500 <= at <= ground.rows(sql)[0][0] + 500
    assert taken == [True] * 4


def test_large_batches_are_stored_as_they_are(
    ground: Ground, place: int, proxy_to: Callable[[int], Proxy]
) -> None:
    """More than a socket takes at once."""
    store = ground.store(port=proxy_to(ground.server.port).port)
    sent = [numbered(number, bytes([0, 39, 92, 255, number]) * 700_000) for number in range(4)]
    with short_ways(store) as taken:
        for one in sent:
            append(store, place, one)
    assert taken == [True] * 3
    assert [piece.data[8:] for piece in read_all(store, place)] == [one[8:] for one in sent]


def test_one_that_has_no_lock_in_time_stored_nothing_and_says_so(ground: Ground, place: int) -> None:
    store = ground.store(limits=HASTY)
    append(store, place, numbered(0))
    with ground.connect().cursor() as cursor:
        cursor.execute("SELECT id FROM postroom_partitions WHERE id = %s FOR UPDATE", (place,))
        cursor.fetchall()
        with short_ways(store), pytest.raises(StoreBusy) as told:
            append(store, place, numbered(1))
        cursor.connection.rollback()
    assert told.value.nothing_done
    assert append(store, place, numbered(1))[0].base_offset == 1


def test_a_server_without_blocks_is_sent_the_statements_one_by_one(
    ground: Ground, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MySQL, whose answers to them are told apart: what is otherwise is undone all the same."""
    whole = mysql._lone
    monkeypatch.setattr(mysql, "_lone", lambda *args, block: whole(*args, block=False))
    store, other = ground.store(limits=HASTY), ground.store()
    with short_ways(store) as taken:
        for number in range(3):
            append(store, place, numbered(number))
        append(other, place, batch(producer=8))
        assert append(store, place, numbered(3))[0].base_offset == 4
        append(store, place, numbered(4))
        assert other.log.forget_producers(2**62) == 2
        with pytest.raises(UnknownProducer):
            append(store, place, numbered(5))
    assert taken == [True, True, False, False]  # the fifth was not tried: another had come between
    assert store.log.bounds([place])[place].end == 6 == len(read_all(store, place))


def test_one_that_is_not_answered_is_given_up_and_of_unknown_fate(
    ground: Ground, place: int, proxy_to: Callable[[int], Proxy]
) -> None:
    """I15, I2: the server has it, and says nothing."""
    proxy = proxy_to(ground.server.port)
    store = ground.store(port=proxy.port, limits=HASTY)
    for number in range(3):
        append(store, place, numbered(number))
    proxy.deaf("answers")
    with pytest.raises(StoreUnavailable) as told:
        append(store, place, numbered(3))
    assert not told.value.nothing_done and not told.value.undone
    proxy.cut()
    proxy.heal()
    assert append(store, place, numbered(3))[0].base_offset == 3
    assert len(read_all(store, place)) == 4


def test_a_connection_keeps_few_statements_prepared(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each partition has a statement of its own."""
    monkeypatch.setattr(postgres_connection, "_MOST_NAMES", 2)
    store = ground.store()
    places = partitions(store.catalog.create_topic("many", TopicSettings(), 3))
    order = [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 1, 2, 0, 1, 2]
    with short_ways(store) as taken:
        for at, which in enumerate(order):
            append(store, places[which], numbered(order[:at].count(which)))
    assert taken == [True] * (len(order) - 3)
    for which, place in enumerate(places):
        assert [piece.base_offset for piece in read_all(store, place)] == list(range(order.count(which)))


@pytest.mark.parametrize("most", [500, 1])
def test_statements_that_the_driver_drops_are_prepared_again(
    ground: Ground, place: int, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """psycopg drops all that a connection has prepared, after a transaction of its own was rolled back."""
    monkeypatch.setattr(postgres_connection, "_MOST_NAMES", most)
    store = ground.store()
    other = partitions(store.catalog.create_topic("other", TopicSettings(), 1))[0]
    with short_ways(store) as taken:
        for number in range(12):
            append(store, place, numbered(number))
            append(store, other, numbered(number))
            if number % 4 == 3 and ground.kind == "postgres":
                with store.session.read(Area.LOG) as tx:
                    tx.connection.execute("DEALLOCATE ALL")
    assert taken == [True] * 22
    assert len(read_all(store, place)) == len(read_all(store, other)) == 12
