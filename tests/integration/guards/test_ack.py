"""`message.ack(connection=…)`: acked with the user's own work, or not at all (R33)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import LeaseLost, UsageError
from postroom.client.consumer.in_flight import ACKED
from postroom.client.consumer.settle import delivery_of
from tests.integration.guards.guarding import Place, effects, note
from tests.integration.processes.children import child, received

SERVERS = {"postgres": "postgres_ready", "mysql": "mysql_ready"}
PATIENCE_S = 60


@pytest.fixture(params=SERVERS)
def place(request: pytest.FixtureRequest) -> Any:
    found = Place(request.param, request.getfixturevalue(SERVERS[request.param]))
    connection = found.connect()
    connection.cursor().execute("CREATE TABLE effects (number INTEGER, entity VARCHAR(20))")
    connection.commit()
    yield found
    connection.cursor().execute("DROP TABLE effects")
    connection.commit()
    connection.close()


@pytest.fixture
def connection(place: Place) -> Any:
    opened = place.connect()
    yield opened
    opened.close()


@asynccontextmanager
async def consuming(
    place: Place, mode: Any = "shared", count: int = 1, window: int = 100
) -> AsyncIterator[Any]:
    """A queue with that many messages, and a consumer of it."""
    async with postroom.connect(place.url) as mq:
        await mq.create_topic("orders", partitions=1)
        for number in range(count):
            await mq.send("orders", b"%d" % number, key="42")
        async with mq.consumer("orders", group="billing", mode=mode, window=window) as consumer:
            yield mq, consumer


async def unsettled(mq: postroom.Connection) -> int:
    return (await mq.lag("orders", "billing")).total.messages


@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_the_ack_is_committed_with_the_work(place: Place, connection: Any, mode: str) -> None:
    async with consuming(place, mode, count=2) as (mq, consumer):
        message = await anext(consumer)
        note(connection, 1)
        await message.ack(connection=connection)
        assert await unsettled(mq) == 2
        connection.commit()
        assert await unsettled(mq) == 1
        await message.ack()  # tells the consumer; once more is harmless
        assert (await anext(consumer)).value == b"1"
    assert effects(place) == [1]


@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_the_ack_is_rolled_back_with_the_work(place: Place, connection: Any, mode: str) -> None:
    async with consuming(place, mode) as (mq, consumer):
        message = await anext(consumer)
        note(connection, 1)
        await message.ack(connection=connection)
        connection.rollback()
        assert await unsettled(mq) == 1
        await message.retry()  # it is as it was
        again = await anext(consumer)
        assert (again.offset, again.attempt) == (message.offset, 2)
        note(connection, 2)
        await again.ack(connection=connection)
        connection.commit()
        assert await unsettled(mq) == 0
    assert effects(place) == [2]


@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_what_was_committed_is_not_handed_back(place: Place, connection: Any, mode: str) -> None:
    """A handler that raises after its commit: the message is settled all the same."""
    async with consuming(place, mode) as (mq, consumer):
        message = await anext(consumer)
        await message.ack(connection=connection)
        connection.commit()
        await message.retry()
        assert await unsettled(mq) == 0
        assert await consumer.poll(wait=0) == []


async def test_the_next_heartbeat_finds_out_of_the_commit(
    place: Place, connection: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with consuming(place, count=2) as (mq, consumer):
        first, second = await anext(consumer), await anext(consumer)
        await first.ack(connection=connection)
        connection.commit()
        await asyncio.to_thread(mq._heartbeat.beat_once)
        await asyncio.sleep(0)  # what it found was handed to the loop
        delivery = delivery_of(first)
        assert delivery.state[first._position - delivery.first] == ACKED
        await second.ack()  # and only that
    assert "lost the lease" not in caplog.text


@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_whoever_lost_the_lease_is_told_to_roll_back(place: Place, connection: Any, mode: str) -> None:
    async with consuming(place, mode) as (mq, consumer):
        message = await anext(consumer)
        note(connection, 1)
        other = place.connect()
        other.cursor().execute("UPDATE postroom_deliveries SET token = token + 1, holder = 'other'")
        other.commit()
        other.close()
        with pytest.raises(LeaseLost, match="roll this transaction back"):
            await message.ack(connection=connection)
        connection.rollback()
        assert await unsettled(mq) == 1
    assert effects(place) == []


async def test_a_group_that_was_reset_meanwhile_is_a_lost_lease(place: Place, connection: Any) -> None:
    async with consuming(place) as (mq, consumer):
        message = await anext(consumer)
        await mq.reset("orders", "billing", to="earliest", force=True)
        with pytest.raises(LeaseLost):
            await message.ack(connection=connection)
        connection.rollback()


async def test_a_transaction_that_began_before_sees_what_is_held_now(place: Place, connection: Any) -> None:
    """At MySQL's default isolation its plain reads are of the moment when it began (I1)."""
    cursor = connection.cursor()
    cursor.execute("SELECT COUNT(*) FROM postroom_deliveries")
    cursor.execute("SELECT COUNT(*) FROM postroom_progress")
    async with consuming(place, count=3) as (mq, consumer):
        messages = [await anext(consumer) for _ in range(3)]
        await messages[0].ack()
        await messages[1].ack(connection=connection)
        connection.commit()
        assert await unsettled(mq) == 1
        await messages[2].ack()
        assert await unsettled(mq) == 0


async def test_polls_of_others_wait_for_the_commit_and_go_on(place: Place, connection: Any) -> None:
    async with consuming(place, window=1) as (mq, consumer):  # which then asks for no more itself
        message = await anext(consumer)
        await message.ack(connection=connection)
        await mq.send("orders", b"next")
        async with mq.consumer("orders", group="billing") as other:
            polling = asyncio.create_task(other.poll(wait=PATIENCE_S))
            done, _ = await asyncio.wait([polling], timeout=0.3)
            assert not done
            connection.commit()
            assert [m.value for m in await polling] == [b"next"]


async def test_an_app_needs_nothing_else(place: Place) -> None:
    """A plain function in a thread; the app acks when it returns, retries when it raises."""
    app = postroom.App(place.url)
    seen: list[int] = []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    @app.subscribe("orders", group="billing", retry=postroom.Backoff(0.01, 1, 1))
    def handle(body: bytes, message: postroom.sync.Received) -> None:
        connection = place.connect()
        try:
            note(connection, int(body))
            message.ack(connection=connection)
            seen.append(message.attempt)
            if message.attempt == 1:
                raise RuntimeError("not yet")
            connection.commit()
            loop.call_soon_threadsafe(done.set)
        finally:
            connection.close()

    async with postroom.connect(place.url) as mq:
        await mq.create_topic("orders")
        await mq.send("orders", b"7")
        async with app.lifespan():
            await asyncio.wait_for(done.wait(), PATIENCE_S)
        assert await unsettled(mq) == 0
    assert (effects(place), seen) == ([7], [1, 2])


async def test_an_async_session_of_sqlalchemy(place: Place) -> None:
    if place.kind == "mysql":
        pytest.skip("no async driver is installed")
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))
    async with consuming(place) as (mq, consumer):
        message = await anext(consumer)
        async with engine.begin() as session:
            await message.ack(connection=session)
            assert await unsettled(mq) == 1
        assert await unsettled(mq) == 0
    await engine.dispose()


async def test_its_lock_ends_with_a_process_that_stands_still(place: Place, connection: Any) -> None:
    """Until the transaction ends, and where the user has set no limits himself (I15)."""
    if place.kind == "mysql":
        pytest.skip("it has no limits that end with a transaction")

    def limits() -> list[str]:
        ask = "SELECT current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')"
        return list(connection.execute(ask).fetchone())

    async with consuming(place, count=2) as (_, consumer):
        await (await anext(consumer)).ack(connection=connection)
        assert "0" not in limits()
        connection.rollback()
        assert limits() == ["0", "0"]
        connection.execute("SET LOCAL lock_timeout = '77s'")
        await (await anext(consumer)).ack(connection=connection)
        assert limits()[0] == "77s"
        connection.commit()


async def test_a_shard_that_is_in_the_users_database(tmp_path: Path, postgres_url: str) -> None:
    """What is on that shard joins; what is on another does not."""
    place, joined = Place("postgres", postgres_url), []
    url = f"sqlite:///{tmp_path}/queue.db"
    async with postroom.connect(url, shards={"b": postgres_url}, migrate=True) as mq:
        await mq.create_topic("orders", partitions=2)
        for slot in (0, 1023):
            await mq.send("orders", b"x", slot=slot)
        shards = {piece.partition: piece.shard for piece in (await mq.route("orders")).ranges}
        connection = place.connect()
        async with mq.consumer("orders", group="billing") as consumer:
            for message in [await anext(consumer), await anext(consumer)]:
                try:
                    await message.ack(connection=connection)
                    joined.append(shards[message.partition])
                except UsageError:
                    await message.ack()
            assert await unsettled(mq) == 1
            connection.commit()
            assert await unsettled(mq) == 0
        connection.close()
    assert joined == ["b"]


# ---- what is refused ----


async def test_sqlite_and_brokers_cannot_join(place: Place, connection: Any, tmp_path: Path) -> None:
    async with postroom.connect(f"sqlite:///{tmp_path}/queue.db") as mq, await mq.serve(port=0) as served:
        await mq.create_topic("orders")
        for number in range(2):
            await mq.send("orders", b"%d" % number)
        async with mq.consumer("orders", group="embedded") as consumer:
            with pytest.raises(UsageError, match=r"on SQLite .* postroom.guards.once"):
                await (await anext(consumer)).ack(connection=connection)
        async with postroom.connect(served.url) as remote, remote.consumer("orders", group="far") as consumer:
            with pytest.raises(UsageError, match=r"a broker cannot join .* postroom.guards.once"):
                await (await anext(consumer)).ack(connection=connection)


async def test_another_database_is_refused(place: Place, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue({"postgres": "postgres_server", "mysql": "mariadb_server"}[place.kind])
    name = server.create_database()
    connection = server.connect(name)
    async with consuming(place) as (mq, consumer):
        message = await anext(consumer)
        with pytest.raises(UsageError, match="not to the database that the queue is in"):
            await message.ack(connection=connection)
        connection.rollback()
        await message.ack()
        assert await unsettled(mq) == 0
    connection.close()
    server.drop_database(name)


async def test_a_connection_without_a_transaction_is_refused(place: Place, connection: Any) -> None:
    if place.kind == "postgres":
        connection.autocommit = True
    else:
        connection.autocommit(True)
    async with consuming(place) as (_, consumer):
        message = await anext(consumer)
        with pytest.raises(UsageError, match="begin a transaction first"):
            await message.ack(connection=connection)
        await message.ack()
        with pytest.raises(UsageError, match="settled already"):
            await message.ack(connection=connection)


# ---- kill -9 ----


def handle_and_die(url: str, step: str, pipe: Any) -> None:
    """Dies at that step, having told so."""
    place = Place("", url)

    async def run() -> None:
        async with postroom.connect(url) as mq, mq.consumer("orders", group="billing") as consumer:
            message = await anext(consumer)
            connection = place.connect()
            note(connection, 1)
            await message.ack(connection=connection)
            if step == "committed":
                connection.commit()
            pipe.send(step)
            await asyncio.sleep(PATIENCE_S)

    asyncio.run(run())


@pytest.mark.parametrize("step", ["acked", "committed"])
async def test_a_process_that_dies_leaves_both_or_none(place: Place, step: str) -> None:
    async with postroom.connect(place.url) as mq:
        await mq.create_topic("orders")
        await mq.create_group("orders", "billing", lease=1)
        await mq.send("orders", b"0")
        with child(handle_and_die, place.url, step) as (process, pipe):
            assert received(pipe, PATIENCE_S) == step
            process.kill()
            process.join(PATIENCE_S)
        assert effects(place) == ([1] if step == "committed" else [])
        assert await unsettled(mq) == (0 if step == "committed" else 1)
