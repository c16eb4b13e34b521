"""Statements that are prepared on MariaDB: how many, what if it refuses, and over TLS."""

from __future__ import annotations

import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore
from postroom.store.contract import Append
from postroom.store.dialects import mysql_connection
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import append, batch, partitions, read_all
from tests.certificates import Authority
from tests.ready import Ground, ready
from tests.servers import MariaServer

maria = pytest.mark.parametrize("ground", ["mariadb"], indirect=True)


def places(store: SqlStore, count: int = 1) -> list[int]:
    return partitions(store.catalog.create_topic("orders", TopicSettings(), count))


def numbered(number: int, value: bytes = b"value") -> bytes:
    return batch(producer=7, sequence=number, value=value)


def is_sent(store: SqlStore, place: int, number: int, value: bytes = b"value") -> bool:
    """Send it, and wait for what becomes of it."""
    sent = store.log.send(replace(Append(0, numbered(number, value)), partition_id=place))
    if sent is None:
        return False
    socket = select.poll()
    socket.register(sent.fileno())
    done = False
    while not done:
        socket.modify(sent.fileno(), select.POLLIN | (select.POLLOUT if sent.unsent else 0))
        assert socket.poll(30_000)
        done = sent.answered()
    return sent.result() is not None


def prepared(store: SqlStore) -> dict[str, int | None]:
    with store.session.read(Area.LOG) as tx:
        found: dict[str, int | None] = tx.connection._prepared
    return found


def shown(store: SqlStore, name: str) -> str:
    """What the server says of the connection that appends."""
    with store.session.read(Area.LOG) as tx:
        ((_, value),) = tx.all(f"SHOW SESSION STATUS LIKE '{name}'")
    return str(value)


@maria
def test_the_oldest_is_given_up_for_one_more(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_connection, "_MOST_PREPARED", 3)
    store = ground.store()
    for place in places(store, 5):
        for number in range(3):
            append(store, place, numbered(number))
        assert is_sent(store, place, 3)
    assert len(prepared(store)) == 3
    assert (shown(store, "Com_stmt_prepare"), shown(store, "Com_stmt_close")) == ("5", "2")


@maria
@pytest.mark.undisturbed
def test_a_server_that_prepares_no_more_is_sent_text(ground: Ground) -> None:
    store = ground.store()
    place = places(store)[0]
    before = ground.rows("SELECT @@global.max_prepared_stmt_count")[0][0]
    ground.rows("SET GLOBAL max_prepared_stmt_count = 0", admin=True)
    try:
        for number in range(5):
            append(store, place, numbered(number))
        assert not is_sent(store, place, 5)
    finally:
        ground.rows(f"SET GLOBAL max_prepared_stmt_count = {before}", admin=True)
    append(store, place, numbered(5))
    assert not is_sent(store, place, 6)  # this connection does not ask again
    assert len(read_all(store, place)) == 6


class SecureServer(MariaServer):
    def _command(self, port: int) -> list[str | Path]:
        folder = self.folder / "tls"
        if not folder.exists():
            pair = Authority(folder).issue("server")
            for path in (folder, *folder.iterdir()):
                self._hand_over(path)
            self.tls = (f"--ssl-cert={pair.cert}", f"--ssl-key={pair.key}")
        return [*super()._command(port), *self.tls]


@pytest.fixture(scope="module")
def secure() -> Iterator[Ground]:
    with SecureServer(durable=False) as server, ready(server) as ground:
        yield ground


def test_over_tls_it_is_the_same(secure: Ground) -> None:
    store = secure.store()
    place = places(store)[0]
    for number in range(3):
        append(store, place, numbered(number))
    assert shown(store, "Ssl_cipher")
    values = [b"small", bytes(range(256)) * 20_000, b"small again"]
    for number, value in enumerate(values, start=3):
        assert is_sent(store, place, number, value)
    found = [piece.data[8:] for piece in read_all(store, place)][3:]
    assert found == [numbered(number, value)[8:] for number, value in enumerate(values, start=3)]


@maria
def test_columns_are_taken_for_what_they_are_now(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions that read the same are taken apart once; a column that was changed reads otherwise."""
    monkeypatch.setattr(mysql_connection, "_MOST_COLUMNS", 8)
    store, ask = ground.store(), "SELECT id, note FROM notes ORDER BY id"
    with store.session.read(Area.LOG) as tx:
        tx.do("CREATE TABLE notes (id INTEGER, note VARCHAR(20) CHARACTER SET utf8mb4)")
        tx.do("INSERT INTO notes VALUES (?, ?)", 1, "Zürich")
        assert tx.all(ask) == tx.all(ask) == [(1, "Zürich")]
        tx.do("ALTER TABLE notes MODIFY note VARBINARY(20), MODIFY id VARCHAR(10)")
        assert tx.all(ask) == tx.all(ask) == [("1", "Zürich".encode())]
        for number in range(30):
            assert tx.all(f"SELECT {number} AS column_{number}") == [(number,)]
        assert len(tx.connection._columns) <= 8
        assert tx.all(ask) == [("1", "Zürich".encode())]
