"""Locks on database servers end, and whoever loses a fight over them is run again (I1, I15)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from postroom.address import parse
from postroom.broker.broker import open_endpoint
from postroom.config import DEFAULTS, Limits
from postroom.errors import StoreBusy, StoreError, StoreUnavailable
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import SqlStore
from postroom.store.contract import Append, Appended
from postroom.store.dialects import mysql, postgres
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import (
    append,
    ask,
    batch,
    in_threads,
    partitions,
    read_all,
    spans,
    stored,
)
from tests.integration.processes.children import Connection, child, received
from tests.integration.races.interleaving import (
    kill,
    lock_waits,
    soon,
    stopped_after_lock,
    stopped_at_commit,
    until,
)
from tests.ready import Ground, opened
from tests.servers import MariaServer, Proxy

IMPATIENT = replace(DEFAULTS, lock_timeout_ms=1_000, idle_timeout_ms=2_000)
LOCK = "SELECT id FROM postroom_partitions WHERE id = %s FOR UPDATE"

pytestmark = pytest.mark.undisturbed  # it counts waiting transactions


@pytest.fixture
def store(ground: Ground) -> SqlStore:
    return ground.store()


@pytest.fixture
def places(store: SqlStore) -> list[int]:
    return partitions(store.catalog.create_topic("orders", TopicSettings(), 2))


def begun(ground: Ground) -> Any:
    """A stranger's connection with a transaction that will be dear to undo: servers end the cheapest one."""
    cursor = ground.connect().cursor()
    cursor.execute("BEGIN")
    for number in range(50):
        cursor.execute("INSERT INTO postroom_settings (name, value) VALUES (%s, '')", (f"stranger-{number}",))
    return cursor


# ---- fights -----------------------------------------------------------------------------------------------


@pytest.mark.slow("waits for a server that fails or hangs")
def test_a_deadlock_with_a_stranger_is_survived(ground: Ground, store: SqlStore, places: list[int]) -> None:
    """The stranger locks in the opposite order. Ours is undone, run again, and stored once."""
    low, high = places
    before = deadlocks(ground)
    stranger = begun(ground)
    stranger.execute(LOCK, (high,))
    ours = soon(store.log.append, [Append(low, batch(2)), Append(high, batch(2))])
    until(lock_waits(ground))
    stranger.execute(LOCK, (low,))  # returns when ours was undone
    until(lock_waits(ground))  # it is back, and waits
    stranger.connection.rollback()
    assert [stored(result).base_offset for result in ours.result(30)] == [0, 0]
    assert deadlocks(ground) > before  # others on the same server may meet one meanwhile
    assert [len(read_all(store, place)) for place in places] == [1, 1]


def deadlocks(ground: Ground) -> int:
    if ground.kind == "mariadb":
        return int(ground.rows("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'", admin=True)[0][1])
    return ground.server.log.read_text().count("deadlock detected")


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_serialization_failure_is_survived(
    postgres_ready: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We ask for READ COMMITTED, where there is none; were it otherwise, the verb would be run again."""
    monkeypatch.setattr(postgres, "_BEGIN", f"BEGIN ISOLATION LEVEL {level}")
    with closing(opened(postgres_ready)) as store, closing(opened(postgres_ready)) as other:
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        with stopped_at_commit(store) as stop:
            first = soon(append, store, place, batch(2))
            stop.wait()
            second = soon(append, other, place, batch(2))
            time.sleep(0.1)  # it may be waiting or not: either way it is told once the first is there
            stop.go_on.set()
            assert sorted(f.result(30)[0].base_offset for f in (first, second)) == [0, 2]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_the_isolation_of_the_role_does_not_count(postgres_ready: str, level: str) -> None:
    with closing(opened(postgres_ready)) as store, store.session.write(Area.LOG) as tx:
        tx.do(f"ALTER ROLE CURRENT_USER SET default_transaction_isolation = '{level}'")
    try:
        with closing(opened(postgres_ready)) as store, store.session.write(Area.PROGRESS) as tx:
            assert tx.one("SELECT current_setting('transaction_isolation')") == ("read committed",)
    finally:
        with closing(opened(postgres_ready)) as store, store.session.write(Area.LOG) as tx:
            tx.do("ALTER ROLE CURRENT_USER RESET default_transaction_isolation")


def test_two_who_insert_the_same_row_are_both_answered(ground: Ground, store: SqlStore) -> None:
    """A violation that comes with the COMMIT, behind statements that were to be prepared: nothing is left."""
    other = ground.store()
    for number in range(8):
        calls = [partial(through.duties.acquire, f"duty-{number}") for through in (store, other)]
        wins = in_threads(partial(calls[0], "ann", 60_000), partial(calls[1], "bob", 60_000))
        assert sorted(wins) == [False, True]


def test_a_transaction_that_failed_cannot_be_committed(postgres_ready: str) -> None:
    """PostgreSQL answers such a COMMIT with ROLLBACK, and with success."""

    def careless(store: SqlStore) -> None:
        with store.session.write(Area.LOG) as tx:
            tx.do("UPDATE postroom_settings SET value = 'lost' WHERE name = 'uuid'")
            with pytest.raises(psycopg.Error, match="division by zero"):
                tx.one("SELECT 1/0")

    with closing(opened(postgres_ready)) as store:
        with pytest.raises(StoreError):
            careless(store)
        with store.session.read(Area.LOG) as tx:
            assert tx.one("SELECT COUNT(*) FROM postroom_settings WHERE value = 'lost'") == (0,)


def test_a_connection_whose_statement_failed_is_as_good_as_new(ground: Ground, store: SqlStore) -> None:
    """psycopg takes statements for prepared that were sent behind the one that failed."""
    insert = "INSERT INTO postroom_settings (name, value) VALUES (?, ?)"
    change = "UPDATE postroom_settings SET value = ? WHERE name = ?"
    with store.session.write(Area.LOG) as tx:
        tx.do(insert, "there", "already")
        tx.do(change, "0", "there")  # once: from the third time on it is prepared
        ours = tx.one("SELECT pg_backend_pid()" if ground.kind == "postgres" else "SELECT CONNECTION_ID()")
    with pytest.raises(LookupError), store.session.write(Area.LOG):  # a ROLLBACK before all else
        raise LookupError

    def enter(name: str) -> None:
        with store.session.write(Area.LOG) as tx:
            tx.do(insert, name, "")
            for number in range(4):
                tx.do(change, str(number), name)

    with pytest.raises(StoreError) as told:
        enter("there")
    assert told.value.undone
    enter("new")
    with store.session.write(Area.LOG) as tx:
        assert tx.one("SELECT value FROM postroom_settings WHERE name = 'new'") == ("3",)
        look = "SELECT pg_backend_pid()" if ground.kind == "postgres" else "SELECT CONNECTION_ID()"
        assert tx.one(look) == ours


# ---- waits that end ---------------------------------------------------------------------------------------


@pytest.mark.slow("waits for a server that fails or hangs")
def test_a_lock_that_is_not_given_back_is_an_error_after_a_stated_time(
    ground: Ground, places: list[int]
) -> None:
    store = ground.store(limits=IMPATIENT)
    stranger = begun(ground)
    stranger.execute(LOCK, (places[0],))
    begin = time.monotonic()
    with pytest.raises(
        StoreBusy, match=r"was busy \(.*(lock timeout|Lock wait timeout).*then try again"
    ) as told:
        append(store, places[0], batch())
    assert 0.9 < time.monotonic() - begin < 7
    assert told.value.retriable and not told.value.undone
    assert stored(store.log.append([Append(places[1], batch())])[0]).base_offset == 0  # others go on
    stranger.connection.rollback()
    assert append(store, places[0], batch())[0].base_offset == 0


@pytest.mark.slow("waits for a server that fails or hangs")
def test_a_catalog_held_by_a_stranger_is_an_error_too(ground: Ground, places: list[int]) -> None:
    store = ground.store(limits=IMPATIENT)
    stranger = begun(ground)
    stranger.execute("SELECT value FROM postroom_settings WHERE name = 'catalog_version' FOR UPDATE")
    with pytest.raises(StoreBusy):
        store.catalog.create_group("orders", "billing", GroupSettings())
    stranger.connection.rollback()
    store.catalog.create_group("orders", "billing", GroupSettings())


# ---- processes that stop with a lock in their hands (I15) -------------------------------------------------


def hold(url: str, limits: Limits, place: int, forgetful: bool, where: str, pipe: Connection) -> None:
    """Stop between lock and commit until told to go on; then commit, and if that fails repeat it."""
    store = opened(url, limits)
    if forgetful:  # MySQL knows no limit on idle transactions
        with_no_idle_limit(store)
    stopped = {
        "after-lock": stopped_after_lock,
        "at-commit": stopped_at_commit,
        "in-a-pipeline": partial(stopped_at_commit, synced=False),
    }[where]
    with stopped(store) as stop:
        appending = soon(append, store, place, batch(2, producer=7))
        stop.wait()
        pipe.send("holding")
        pipe.recv()
        stop.go_on.set()
        try:
            pipe.send(appending.result(30)[0])
        except StoreUnavailable as error:
            pipe.send(error)
    pipe.send(append(store, place, batch(2, producer=7))[0])


def with_no_idle_limit(store: SqlStore) -> None:
    dialect: Any = store.session.dialect
    prepare = dialect._prepare

    def prepared(connection: pymysql.Connection[Any]) -> None:
        prepare(connection)
        connection.query("SET SESSION idle_transaction_timeout = 0")

    dialect._prepare = prepared
    store.session.forget(Area.LOG)


@pytest.mark.slow("waits for a server that fails or hangs")
@pytest.mark.parametrize("where", ["after-lock", "at-commit", "in-a-pipeline"])
@pytest.mark.parametrize("forgetful", [False, True], ids=["", "without-idle-limit"])
def test_a_process_that_was_stopped_with_a_lock_loses_it(
    ground: Ground, places: list[int], forgetful: bool, where: str
) -> None:
    if forgetful and ground.kind == "postgres":
        pytest.skip("PostgreSQL always has the limit")
    store, place = ground.store(limits=IMPATIENT), places[0]
    with child(hold, ground.url, IMPATIENT, place, forgetful, where) as (process, pipe):
        assert received(pipe) == "holding"
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(StoreBusy):
            append(store, place, batch())
        assert appended_at_last(store, place).base_offset == 0
        held_for = time.monotonic() - begin
        assert held_for < 2 * IMPATIENT.idle_timeout_ms / 1000 + 3
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("go on")
        first, repeated = received(pipe), received(pipe)
    known = where != "at-commit"  # else nothing of the last writes was sent
    if ground.kind == "postgres":
        # It is known that no commit was run if the server's last word is read, which says that the session
        # was idle; a connection that is reset first says nothing.
        known = not isinstance(first, StoreUnavailable)
    if not known:
        assert isinstance(first, StoreUnavailable)  # it cannot know, and repeats
        assert (repeated.base_offset, repeated.duplicate) == (1, False)
    else:
        assert first.base_offset == 1  # surely undone: the store ran it again by itself
        assert (repeated.base_offset, repeated.duplicate) == (1, True)
    assert len(read_all(store, place)) == 2


def appended_at_last(store: SqlStore, place: int) -> Any:
    while True:
        try:
            return append(store, place, batch())[0]
        except StoreBusy:
            pass


def test_a_process_that_was_killed_with_a_lock_loses_it_at_once(ground: Ground, places: list[int]) -> None:
    store, place = ground.store(), places[0]
    with child(hold, ground.url, DEFAULTS, place, False, "at-commit") as (process, pipe):
        assert received(pipe) == "holding"
        process.kill()
        begin = time.monotonic()
        assert append(store, place, batch())[0].base_offset == 0
        assert time.monotonic() - begin < 3


# ---- a network that goes deaf (I15) -----------------------------------------------------------------------


@pytest.mark.slow("waits for a server that fails or hangs")
def test_a_network_gone_deaf_is_an_error_after_a_stated_time_and_holds_nobody_up(
    ground: Ground, places: list[int], proxy_to: Callable[[int], Proxy]
) -> None:
    """Bytes are taken and no answer comes, as from a server that hangs: TCP alone would wait for ever."""
    proxy, place = proxy_to(ground.server.port), places[0]
    cut_off, store = ground.store(port=proxy.port, limits=IMPATIENT), ground.store(limits=IMPATIENT)
    append(cut_off, place, batch())
    with stopped_at_commit(cut_off) as stop:
        lost = soon(append, cut_off, place, batch(producer=7))
        stop.wait()
        proxy.deaf()
        stop.go_on.set()
        begin = time.monotonic()
        assert appended_at_last(store, place).base_offset == 1
        assert time.monotonic() - begin < 6
        with pytest.raises(StoreUnavailable):
            lost.result(30)
        assert time.monotonic() - begin < 8
    proxy.cut()
    proxy.heal()
    assert append(cut_off, place, batch(producer=7))[0].base_offset == 2


@pytest.mark.slow("waits for a server that fails or hangs")
def test_reading_from_a_deaf_network_ends_too(
    ground: Ground, places: list[int], proxy_to: Callable[[int], Proxy]
) -> None:
    """The try, and one more on a new connection; not eight of them."""
    proxy = proxy_to(ground.server.port)
    limits = replace(IMPATIENT, connect_timeout_ms=2_000)
    store = ground.store(port=proxy.port, limits=limits)
    store.log.bounds(places)
    proxy.deaf()
    begin = time.monotonic()
    with pytest.raises(StoreUnavailable):
        store.log.bounds(places)
    assert time.monotonic() - begin < 12
    proxy.cut()
    proxy.heal()
    assert store.log.bounds(places)[places[0]].end == 0


# ---- connections that end ---------------------------------------------------------------------------------


@pytest.mark.slow("waits for a server that fails or hangs")
def test_connections_ended_by_the_server_cost_nothing(
    ground: Ground, store: SqlStore, places: list[int]
) -> None:
    """An operator kills them, a firewall forgets them: the verb is run again on a new one."""
    group = store.catalog.create_group("orders", "billing", GroupSettings())
    for number in range(3):
        append(store, places[0], batch())
        assert spans(store.progress.poll(group, places[0], ask(number + 1, number + 1))) == [(number, number)]
        assert kill(ground) >= 2
    assert store.log.bounds(places)[places[0]].end == 3
    assert len(read_all(store, places[0])) == 3


def test_a_connection_unused_for_long_is_replaced_before_the_server_ends_it(
    ground: Ground, store: SqlStore, places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import postroom.store.sql.session as session

    append(store, places[0], batch())
    kill(ground)
    monkeypatch.setattr(store.session, "_idle_s", 0.0)
    monkeypatch.setattr(session, "_TRIES", 1)  # nothing is run again: it must not have to be
    assert append(store, places[0], batch())[0].base_offset == 1


@pytest.mark.slow("waits for a server that fails or hangs")
async def test_senders_to_a_locked_partition_do_not_wait_one_after_the_other(
    ground: Ground, places: list[int]
) -> None:
    """Each run alone after their common transaction failed, twelve would hold the writer for 13 seconds."""
    stranger = begun(ground)
    stranger.execute(LOCK, (places[0],))
    broker = await open_endpoint(parse(ground.url), limits=IMPATIENT)
    begin = time.monotonic()
    appends = [broker.append("orders", place, batch()) for place in (*[places[0]] * 12, places[1])]
    results = await asyncio.gather(*appends, return_exceptions=True)
    assert [type(result) for result in results] == [StoreBusy] * 12 + [Appended]
    assert time.monotonic() - begin < 11
    stranger.connection.rollback()
    assert (await broker.append("orders", places[0], batch())).base_offset == 0
    await broker.close()


def test_queues_of_one_server_are_migrated_beside_each_other(
    mysql_url: str, mysql_ready: str, mariadb_server: MariaServer
) -> None:
    """MySQL's named locks are the server's: the name of this one says which database it is about."""
    database = urlsplit(mysql_ready).path[1:]
    with closing(mariadb_server.connect(database)) as other, other.cursor() as cursor:
        cursor.execute(f"SELECT GET_LOCK({mysql._MIGRATION_LOCK}, 5)")
        assert cursor.fetchone() == (1,)
        opened(mysql_url, make_tables=True, limits=IMPATIENT).close()
        with (
            closing(opened(mysql_ready, limits=IMPATIENT)) as store,
            closing(mariadb_server.connect(database)) as mine,
            pytest.raises(StoreBusy, match="is being migrated by somebody else"),
            store.session.dialect.migrating(mine),
        ):
            pass
