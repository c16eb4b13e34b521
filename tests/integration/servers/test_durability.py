"""What a crash of the server may take, and what it may not (I8, R1, R15)."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from unittest import mock

import pytest

from postroom.errors import StoreUnavailable
from postroom.model.delivery.delivery import Kind, OrderedAsk, Settlement, Stamp
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.store import SqlStore
from postroom.store.contract import Append
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import (
    acks,
    append,
    ask,
    batch,
    in_threads,
    partitions,
    read_all,
    spans,
    values,
)
from tests.integration.races.interleaving import until
from tests.ready import Ground, both, opened, ready
from tests.servers import PostgresServer
from tests.servers.server import Server

# ---- what is flushed --------------------------------------------------------------------------------------


class Asked:
    """The durability of each transaction that is committed, as PostgreSQL itself sees it at that moment."""

    def __init__(self, store: SqlStore) -> None:
        self._store, self._seen = store, list[str]()

    def __call__(self, verb: Callable[[], object]) -> list[str]:
        self._seen.clear()
        dialect = self._store.session.dialect
        original = dialect.end

        def end(connection: Any, area: Area, *, commit: bool) -> None:
            if commit:
                asked = dialect.ask(connection, "SELECT current_setting('synchronous_commit')", ())
                (how,) = asked.fetchone()
                self._seen.append(how)
            original(connection, area, commit=commit)

        with mock.patch.object(dialect, "end", end):
            verb()
        return list(self._seen)


def test_what_is_flushed_and_what_is_not(postgres_ready: str) -> None:
    with closing(opened(postgres_ready)) as store:
        asked = Asked(store)
        log, catalog, progress = store.log, store.catalog, store.progress
        create = lambda: catalog.create_topic("orders", TopicSettings(), 1)  # noqa: E731
        assert set(asked(create)) == {"on"}
        (place,) = partitions(catalog.topic("orders"))
        (swift,) = partitions(catalog.create_topic("swift", TopicSettings(storage="volatile"), 1))
        assert asked(lambda: log.append([Append(place, batch(20))])) == ["on"]
        assert asked(lambda: log.append([Append(swift, batch(20))])) == ["off"]
        assert asked(lambda: catalog.create_group("orders", "g", GroupSettings(lease_ms=100))) == ["on"]
        group = catalog.group("orders", "g")
        stamp = Stamp(7, place)
        steps: list[tuple[str, Callable[[], object]]] = [
            ("on", lambda: progress.poll(group, place, ask(1, 20, messages=4))),  # makes the row
            ("off", lambda: progress.poll(group, place, ask(2, 20, messages=4))),  # a first hand-out
            ("off", lambda: progress.settle(group, place, 2, acks((4, 5)))),
            ("off", lambda: progress.extend(group, place, 2, [(6, 7)])),
            ("on", lambda: progress.settle(group, place, 2, [Settlement(Kind.MOVE, 6, 6, stamp=stamp)])),
            ("on", lambda: progress.poll(group, place, ask(3, 20, messages=4, on_delivery=True))),
            ("on", lambda: until(lambda: progress.poll(group, place, ask(next(TOKENS), 4)).deliveries)),
            ("on", lambda: progress.rewind(catalog.reset_group("orders", "g", Start("latest")), [place])),
            ("off", lambda: progress.join(group.id, "ann", "client", 1000)),
            ("on", lambda: progress.forget(group.id)),
            ("on", lambda: store.duties.acquire("retention", "ann", 1000)),
            ("on", lambda: log.trim(place, 3)),
        ]
        assert [(number, asked(verb)[-1]) for number, (_, verb) in enumerate(steps)] == [
            (number, how) for number, (how, _) in enumerate(steps)
        ]


TOKENS = itertools.count(100)


def test_what_of_an_ordered_group_is_flushed(postgres_ready: str) -> None:
    with closing(opened(postgres_ready)) as store:
        asked, progress = Asked(store), store.progress
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        append(store, place, batch(9))
        settings = GroupSettings(mode="ordered", lease_ms=100)
        group = store.catalog.create_group("orders", "line", settings)

        def poll(token: int, expects: int | None = None) -> bool:
            found = progress.poll_ordered(group, place, OrderedAsk(f"m{token}", token, 3, 9, expects))
            return bool(found.deliveries)

        with mock.patch.object(store.session.dialect, "started_ms", return_value=0):
            assert asked(lambda: poll(1))[-1] == "on"  # a holder
            assert asked(lambda: poll(1, 3))[-1] == "off"  # and its next poll
            assert asked(lambda: progress.extend(group, place, 1, []))[-1] == "off"
            assert asked(lambda: progress.settle(group, place, 1, acks((0, 0))))[-1] == "off"
            assert asked(lambda: until(lambda: poll(2)))[-1] == "on"  # a takeover
            assert asked(lambda: progress.hand_over(group, place, 2))[-1] == "on"


# ---- the server is killed ---------------------------------------------------------------------------------


@pytest.fixture
def own(kind: str, request: pytest.FixtureRequest) -> Iterator[Ground]:
    server: Server = request.getfixturevalue(f"spare_{kind}")
    with ready(server) as ground:
        yield ground


@both
def test_what_was_confirmed_is_there_after_a_crash(own: Ground) -> None:
    """kill -9 of the server while four write. What it had not confirmed is there once, or not at all."""
    store = own.store()
    (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
    confirmed: list[list[int]] = [[] for _ in range(4)]

    def write(who: int) -> None:
        for number in itertools.count():
            try:
                append(store, place, numbered(who, number))
            except StoreUnavailable:
                return
            confirmed[who].append(number)

    def crash() -> None:
        until(lambda: sum(map(len, confirmed)) > 100)
        own.server.kill()

    in_threads(*(lambda who=who: write(who) for who in range(4)), crash)
    own.server.start()
    for who in range(4):
        append(store, place, numbered(who, len(confirmed[who])))  # of unknown fate until now
    found = values(read_all(store, place))
    wanted = {b"%d:%d-0" % (who, n) for who in range(4) for n in range(len(confirmed[who]) + 1)}
    assert len(found) == len(set(found)) and set(found) == wanted


def numbered(who: int, number: int) -> bytes:
    return batch(1, producer=who + 1, sequence=number, value=b"%d:%d" % (who, number))


@pytest.mark.slow("waits for a server that fails or hangs")
@both
def test_an_ack_that_was_not_flushed_may_come_back_and_a_redelivery_does_not(own: Ground) -> None:
    """PostgreSQL is told to flush by itself only after 10 s: what was not flushed is surely lost."""
    if own.kind == "postgres":
        own.rows("SELECT 1")
        connection = own.connect(admin=True)
        connection.autocommit = True
        connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        own.server.restart()
    store = own.store()
    (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
    append(store, place, batch(6))
    settings = GroupSettings(lease_ms=300, max_attempts=5)
    group = store.catalog.create_group("orders", "billing", settings)
    progress = store.progress
    progress.poll(group, place, ask(1, 6, messages=1))
    until(lambda: progress.poll(group, place, ask(2, 1)).deliveries)  # expired, handed out again: flushed
    assert progress.settle(group, place, 2, acks((0, 0))).lost == ()
    assert spans(progress.poll(group, place, ask(3, 6, messages=2))) == [(1, 2)]
    own.server.kill()
    own.server.start()
    store = own.store()
    committed = store.progress.committed(group.id, place)
    late = store.progress.settle(group, place, 3, acks((1, 2)))
    lazy = own.kind == "postgres"  # the last ones may be lost, unless somebody else's flush took them along
    assert committed == 1 or (lazy and committed == 0)
    assert late.lost == () or (lazy and late.lost == ((1, 2),))  # forgotten hand-outs are nobody's (I7)
    again = ([] if committed else [0]) + ([1, 2] if late.lost else [])
    found: dict[int, int] = {}
    for token in range(10, 30):
        granted = store.progress.poll(group, place, ask(token, 6))
        found |= {offset: d.attempt for d in granted.deliveries for offset in range(d.first, d.last + 1)}
        store.progress.settle(group, place, token, acks(*spans(granted)))
        if store.progress.committed(group.id, place) == 6:
            break
        time.sleep(0.1)  # a lease has to pass
    assert sorted(found) == [*again, 3, 4, 5]
    assert found.get(0, 3) == 3  # its second attempt was remembered


@pytest.mark.slow("waits for a server that fails or hangs")
def test_no_takeover_for_one_lease_after_a_crash(own_postgres: PostgresServer) -> None:
    """I8: the holder may have renewed its lease, and the renewal may be what was lost."""
    with ready(own_postgres) as own:
        store, lease_ms = own.store(), 2_000
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        append(store, place, batch(4))
        settings = GroupSettings(mode="ordered", lease_ms=lease_ms)
        group = store.catalog.create_group("orders", "line", settings)

        def holds(token: int, through: SqlStore) -> bool:
            wish = OrderedAsk(f"m{token}", token, 4, 4)
            return bool(through.progress.poll_ordered(group, place, wish).deliveries)

        assert holds(1, store)
        until_ms = store.progress.peek(group, [place])[place].holder.until
        own_postgres.kill()
        own_postgres.start()
        store = own.store()
        with store.session.read(Area.LOG) as tx:
            started_ms = tx.started_ms()
        assert started_ms + lease_ms > until_ms + 50  # the lease alone would be over before
        until(lambda: holds(2, store))
        assert 0 <= store.now_ms() - started_ms - lease_ms < 1_500


def test_the_crash_of_one_process_of_the_server_counts_too(own_postgres: PostgresServer) -> None:
    """PostgreSQL recovers by itself, and forgets what was not flushed, without being started anew."""
    with ready(own_postgres) as own:
        store = own.store()
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        append(store, place, batch())
        with store.session.read(Area.LOG) as tx:
            before, (backend,) = tx.started_ms(), tx.one("SELECT pg_backend_pid()") or (0,)
        crashed_at = store.now_ms()
        os.kill(backend, signal.SIGKILL)
        until(lambda: appended(store, place))
        with store.session.read(Area.LOG) as tx:
            assert before < crashed_at <= tx.started_ms() <= tx.now_ms()


def appended(store: SqlStore, place: int) -> bool:
    try:
        return bool(append(store, place, batch(producer=9)))
    except StoreUnavailable:
        return False
