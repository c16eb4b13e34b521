"""What users get wrong with a database server, and the sentence they are told (R6, R48).

Every sentence names the server without its password, says what is wrong and what to do next.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest

import postroom
from postroom.errors import AccessDenied, SchemaMismatch, StoreError, StoreUnavailable, UsageError
from postroom.model.policy.settings import TopicSettings
from postroom.store.sql.schema import VERSION
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import append, batch, partitions
from tests.integration.races.interleaving import until
from tests.ready import Ground, both, ready
from tests.servers import MariaServer, PostgresServer, Proxy
from tests.servers.server import Server

SECRET = quote(Server.password, safe="")


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(f"spare_{kind}")


@pytest.fixture
def fresh(server: Server) -> Iterator[Ground]:
    """A database of this test alone, without tables."""
    ground = Ground(server, server.create_database())
    yield ground
    ground.close()
    server.drop_database(ground.name)


@pytest.fixture
def own(server: Server) -> Iterator[Ground]:
    """One with tables."""
    with ready(server) as ground:
        yield ground
    server.drop_database(ground.name)


async def refused(url: str, kind: type[postroom.PostroomError], *words: str, **options: Any) -> str:
    """Connecting is refused soon, with these words and without the password."""
    begin = time.monotonic()
    with pytest.raises(kind) as told:
        async with postroom.connect(url, **options):
            pass
    assert time.monotonic() - begin < 3
    return sentence(told.value, *words)


def sentence(error: BaseException, *words: str) -> str:
    said = str(error)
    shown: list[str] = [said, repr(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        shown.append(str(error))
    for text in shown:
        assert Server.password not in text and SECRET not in text, "the password is shown"
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"
    return said


# ---- the address ------------------------------------------------------------------------------------------


@both
async def test_a_wrong_password(fresh: Ground) -> None:
    await refused(
        fresh.url.replace(SECRET, "guessed"), AccessDenied, "postroom@127.0.0.1", "check user", "password"
    )


@both
async def test_an_unknown_user(fresh: Ground) -> None:
    await refused(fresh.url.replace("//postroom:", "//nobody:"), AccessDenied, "nobody", "check user")


@both
async def test_an_unknown_database(fresh: Ground) -> None:
    url = fresh.server.url("postroom_nowhere")
    await refused(url, AccessDenied, "postroom_nowhere", "create the database, or correct its name")


@both
async def test_a_port_nobody_listens_on(server: Server) -> None:
    url = server.url("orders", port=1)
    await refused(url, StoreUnavailable, "127.0.0.1:1/orders", "cannot be reached", "check host and port")


@both
async def test_a_host_that_does_not_exist(server: Server) -> None:
    url = server.url("orders").replace("127.0.0.1", "no-such-host.invalid")
    await refused(url, StoreUnavailable, "no-such-host.invalid", "cannot be reached", "check host and port")


@pytest.mark.slow("waits for a server that fails or hangs")
@both
async def test_a_host_that_does_not_answer(fresh: Ground, proxy_to: Callable[[int], Proxy]) -> None:
    """Within the stated five seconds, not after minutes."""
    proxy = proxy_to(fresh.server.port)
    proxy.deaf()
    begin = time.monotonic()
    with pytest.raises(StoreUnavailable) as told:
        await postroom.connect(fresh.server.url(fresh.name, port=proxy.port))
    assert 4 < time.monotonic() - begin < 20
    sentence(told.value, f"127.0.0.1:{proxy.port}", "check host and port")


@both
async def test_a_server_that_was_stopped(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(f"spare_{kind}")
    with ready(server) as ground:
        server.stop()
        await refused(ground.url, StoreUnavailable, "cannot be reached", "that the server runs")


# ---- the server's state -----------------------------------------------------------------------------------


@both
async def test_a_database_without_tables(fresh: Ground) -> None:
    await refused(fresh.url, SchemaMismatch, "no Postroom tables", "postroom migrate", "migrate=True")
    async with postroom.connect(fresh.url, migrate=True) as mq:
        assert await mq.topics() == []


@both
async def test_a_database_of_an_earlier_version(own: Ground) -> None:
    own.rows("DELETE FROM postroom_schema WHERE version = %s", VERSION)
    await refused(own.url, SchemaMismatch, f"version {VERSION - 1}", f"needs {VERSION}", "postroom migrate")


@both
async def test_a_database_of_a_newer_version(own: Ground) -> None:
    own.rows("INSERT INTO postroom_schema (version, applied_at) VALUES (%s, 0)", VERSION + 1)
    words = (f"version {VERSION + 1}", f"knows {VERSION}", "update your checkout", "pip install .")
    await refused(own.url, SchemaMismatch, *words)
    await refused(own.url, SchemaMismatch, *words, migrate=True)


@both
async def test_a_server_that_takes_no_writes(own: Ground) -> None:
    with read_only(own):
        await refused(own.url, StoreUnavailable, "takes no writes", "name the primary")
        await refused(own.url, StoreUnavailable, "takes no writes", migrate=True)


@both
def test_a_server_that_stops_taking_writes(own: Ground) -> None:
    """A failover: the connections to the old primary are not used again, the address may name others."""
    store = own.store()
    (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
    append(store, place, batch())
    with read_only(own):
        with pytest.raises(StoreUnavailable) as told:
            append(store, place, batch())
        sentence(told.value, "takes no writes", "name the primary")
        assert told.value.retriable and not store.session._pools[Area.LOG, False]
    assert append(store, place, batch())[0].base_offset == 1


@contextmanager
def read_only(ground: Ground) -> Iterator[None]:
    """For everybody but the administrator. On PostgreSQL for connections that are open, too."""
    if ground.kind == "mariadb":
        ground.rows("SET GLOBAL read_only = 1", admin=True)
    else:
        _set_postgres(ground, "SET default_transaction_read_only = on")
        until(lambda: ground.rows("SHOW transaction_read_only") == [("on",)])
    try:
        yield
    finally:
        if ground.kind == "mariadb":
            ground.rows("SET GLOBAL read_only = 0", admin=True)
        else:
            _set_postgres(ground, "RESET default_transaction_read_only")
            until(lambda: ground.rows("SHOW transaction_read_only") == [("off",)])


def _set_postgres(ground: Ground, change: str) -> None:
    connection = ground.connect(admin=True)
    connection.autocommit = True
    connection.execute("SET default_transaction_read_only = off")
    connection.execute(f"ALTER SYSTEM {change}")
    connection.execute("SELECT pg_reload_conf()")


# ---- rights -----------------------------------------------------------------------------------------------

CLERK = {
    "postgres": (
        "CREATE ROLE clerk LOGIN PASSWORD '{password}'",
        "GRANT CONNECT ON DATABASE {name} TO clerk",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO clerk",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO clerk",
    ),
    "mariadb": (
        "CREATE USER clerk@'%' IDENTIFIED BY '{password}'",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.* TO clerk@'%'",
    ),
}


@contextmanager
def clerk(ground: Ground) -> Iterator[str]:
    """The URL of one who may work with tables that are there, and make none."""
    plain = {"password": Server.password, "name": ground.name}
    with closing(ground.server.connect(ground.name, admin=True)) as connection, connection.cursor() as cursor:
        for statement in CLERK[ground.kind]:
            cursor.execute(statement.format(**plain))
        connection.commit()
    try:
        yield ground.url.replace("//postroom:", "//clerk:")
    finally:
        if ground.kind == "postgres":
            ground.rows("DROP OWNED BY clerk", admin=True)
        ground.rows("DROP ROLE clerk" if ground.kind == "postgres" else "DROP USER clerk@'%%'", admin=True)


@both
async def test_no_right_to_make_tables(fresh: Ground) -> None:
    with clerk(fresh) as url:
        await refused(url, AccessDenied, "clerk", "grant the missing right", "CREATE", migrate=True)


@both
async def test_no_right_to_make_a_topic(own: Ground) -> None:
    """Each partition is a table. Whoever may not make one can still send and receive."""
    store = own.store()
    store.catalog.create_topic("orders", TopicSettings(), 1)
    with clerk(own) as url:
        async with postroom.connect(url) as mq:
            with pytest.raises(AccessDenied) as told:
                await mq.create_topic("more")
            sentence(told.value, "clerk", "grant the missing right", "CREATE")
            assert [topic.name for topic in await mq.topics()] == ["orders"]
            await mq.send("orders", b"hello")
            async with mq.consumer("orders", "billing") as consumer:
                (message,) = await consumer.poll(wait=10)
                await message.ack()


@both
async def test_no_right_to_read_the_tables(own: Ground) -> None:
    with clerk(own) as url:
        if own.kind == "postgres":
            own.rows("REVOKE ALL ON ALL TABLES IN SCHEMA public FROM clerk", admin=True)
            words = ("postroom_schema", "grant the missing right")
        else:
            own.rows("REVOKE ALL PRIVILEGES, GRANT OPTION FROM clerk@'%%'", admin=True)
            words = (own.name, "check user, password and database")
        await refused(url, AccessDenied, "clerk", *words)


# ---- too many ---------------------------------------------------------------------------------------------


@both
async def test_too_many_connections(own: Ground) -> None:
    with one_connection(own), closing(own.server.connect(own.name)):
        await refused(own.url, StoreUnavailable, "takes no more connections", "raise the server's limit")
    async with postroom.connect(own.url) as mq:
        assert await mq.topics() == []


@contextmanager
def one_connection(ground: Ground) -> Iterator[None]:
    change = (
        f"ALTER DATABASE {ground.name} CONNECTION LIMIT {{}}"
        if ground.kind == "postgres"
        else "ALTER USER postroom@'%%' WITH MAX_USER_CONNECTIONS {}"
    )
    ground.rows(change.format(1), admin=True)
    try:
        yield
    finally:
        ground.rows(change.format(-1 if ground.kind == "postgres" else 0), admin=True)


async def test_a_server_whose_packets_are_too_small_for_a_batch(spare_mariadb: MariaServer) -> None:
    """Found when a large batch is sent, it would look like a server that goes away again and again."""
    with ready(spare_mariadb) as ground:
        before = ground.rows("SELECT @@global.max_allowed_packet")[0][0]
        ground.rows("SET GLOBAL max_allowed_packet = 4194304", admin=True)
        try:
            await refused(ground.url, StoreError, "max_allowed_packet", "16M")
        finally:
            ground.rows("SET GLOBAL max_allowed_packet = %s", before, admin=True)
    spare_mariadb.drop_database(ground.name)


# ---- text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_a_database_that_cannot_hold_all_text(postgres_server: PostgresServer, encoding: str) -> None:
    """Names and reasons are text: it would fail at the first that does not fit, after months perhaps."""
    name = f"postroom_{encoding.lower()}"
    with closing(postgres_server.connect("postgres", admin=True)) as connection:
        connection.autocommit = True
        connection.execute(
            f"CREATE DATABASE {name} OWNER postroom ENCODING '{encoding}' TEMPLATE template0 LOCALE 'C'"
        )
    try:
        for migrate in (False, True):
            url = postgres_server.url(name)
            await refused(url, StoreError, f"{encoding}", "ENCODING 'UTF8'", migrate=migrate)
    finally:
        postgres_server.drop_database(name)


@pytest.mark.slow("waits for a server that fails or hangs")
async def test_the_character_set_of_a_mysql_database_does_not_matter(mariadb_server: MariaServer) -> None:
    name = mariadb_server.create_database()
    ground = Ground(mariadb_server, name)
    ground.rows(f"ALTER DATABASE {name} CHARACTER SET latin1 COLLATE latin1_swedish_ci", admin=True)
    try:
        async with postroom.connect(ground.url, migrate=True) as mq:
            await all_text(mq)
    finally:
        mariadb_server.drop_database(name)


async def test_text_comes_back_as_it_was(ground: Ground) -> None:
    async with postroom.connect(ground.url) as mq:
        await all_text(mq)


async def all_text(mq: postroom.Connection) -> None:
    """Names differ by case; reasons may hold anything that an exception says."""
    for topic in ("orders", "Orders", "ORDERS"):
        await mq.create_topic(topic, partitions=1)
    assert sorted(topic.name for topic in await mq.topics()) == ["ORDERS", "Orders", "orders"]
    await mq.create_group("orders", "billing")
    await mq.create_group("orders", "Billing")
    reasons = [
        "Grüße aus 東京 🎉",
        "nul \0 and \x7f\x1b[31m",
        'it\'s 100% \\ "quoted"; --',
        "long " * 20_000,
        "\ud800",
    ]
    await mq.send_many("orders", [postroom.Message(b"%d" % n) for n in range(len(reasons))])
    async with mq.consumer("orders", "billing", member="Zoë 🦊") as consumer:
        found: list[postroom.Received] = []
        while len(found) < len(reasons):
            found += await consumer.poll(wait=10)
        for message, reason in zip(found, reasons, strict=True):
            await message.dead(reason)
    letters = await mq.dead_letters("orders", "billing")
    assert [letter.reason[:15] for letter in letters][:1] == ["Grüße aus 東京 🎉"[:15]]
    assert len(letters) == len(reasons)
    assert (await mq.lag("orders", "Billing")).total.messages == len(reasons)


@pytest.mark.parametrize("client_id", ["x" * 101, "a\0b", "a\nb"])
async def test_a_client_id_that_no_server_could_keep(postgres_ready: str, client_id: str) -> None:
    with pytest.raises(postroom.InvalidSetting, match="client_id"):
        await postroom.connect(postgres_ready, client_id=client_id)


@pytest.mark.parametrize("member", ["x" * 121, "a\0b", "a\nb"])
async def test_a_member_that_no_server_could_keep(ground: Ground, member: str) -> None:
    async with postroom.connect(ground.url) as mq:
        with pytest.raises(postroom.InvalidSetting, match="member"):
            mq.consumer("orders", "billing", member=member)


async def test_the_longest_names_fit(ground: Ground) -> None:
    topic, group = "t" * 120, "g" * 60
    async with postroom.connect(ground.url, client_id="c" * 100) as mq:
        await mq.create_topic(topic, partitions=1)
        await mq.send(topic, b"x")
        async with mq.consumer(topic, group):
            pass
        async with mq.consumer(topic, group, member="m" * 120) as consumer:
            (message,) = await consumer.poll(wait=10)
            await message.dead("no")
        assert len(await mq.dead_letters(topic, group)) == 1
        assert await mq.redrive(topic, group) == 1


# ---- time -------------------------------------------------------------------------------------------------


async def test_the_time_zone_of_the_server_does_not_matter(ground: Ground) -> None:
    """Both servers of the tests run at +05:45."""
    zone = "SHOW timezone" if ground.kind == "postgres" else "SELECT @@global.time_zone"
    assert ground.rows(zone)[0][0] in ("Asia/Kathmandu", "+05:45")
    async with postroom.connect(ground.url) as mq:
        await mq.create_topic("orders", partitions=1)
        before = time.time() * 1000
        await mq.send("orders", b"now")
        (message,) = [m async for m in mq.read("orders")]
        assert before - 1000 < message.timestamp < time.time() * 1000 + 1000
        await mq.create_group("orders", "late", start=datetime.now(UTC) - timedelta(minutes=1))
        assert (await mq.lag("orders", "late")).total.messages == 1


# ---- drivers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "driver", "extra"),
    [
        ("postgresql://ann:secret@127.0.0.1:1/orders", "psycopg", "postgres"),
        ("mysql://ann:secret@127.0.0.1:1/orders", "pymysql", "mysql"),
    ],
)
async def test_a_driver_that_is_not_installed(
    url: str, driver: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("postroom.store.") or name == driver]:
        if name in ("postroom.store.dialects.postgres", "postroom.store.dialects.mysql", driver):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, driver, None)
    says = rf"needs a driver .*: run `pip install '\.\[{extra}\]'` in a checkout of Postroom"
    with pytest.raises(UsageError, match=says) as told:
        await postroom.connect(url)
    assert "secret" not in str(told.value)
