"""A queue on several databases through the SDK (R6, R22, R25, R28, I9, I11, I12).

Two SQLite files, and in a few tests PostgreSQL with MariaDB. What happens when a shard is down is shown in
`tests/integration/broker/test_shards_down.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import Connection, InvalidSetting, InvalidURL, Received, ShardUnknown
from postroom.broker.broker import Broker
from postroom.clock import Clock, ManualClock
from postroom.endpoint.values import PollRequest
from postroom.model.policy.settings import GroupWish
from postroom.store import SqlStore, open_sqlite
from postroom.store.sharded.store import ShardSource, open_sharded
from tests.contract.brokers import broker_of, serving

LIMIT = 60  # seconds; for whatever must come
Url = tuple[str, dict[str, str]]

KINDS = ("sqlite", "servers")


@pytest.fixture
def files(tmp_path: Path) -> Url:
    return f"sqlite:///{tmp_path}/first.db", {"b": f"sqlite:///{tmp_path}/second.db"}


@pytest.fixture(params=KINDS)
def queue(request: pytest.FixtureRequest, files: Url) -> Url:
    """Two databases: two files, or a PostgreSQL one and one on MariaDB."""
    if request.param == "sqlite":
        return files
    return request.getfixturevalue("postgres_ready"), {"b": request.getfixturevalue("mysql_ready")}


@pytest.fixture(params=["embedded", "served"])
async def mq(request: pytest.FixtureRequest, files: Url) -> AsyncIterator[Connection]:
    async with postroom.connect(files[0], shards=files[1]) as connection:
        if request.param == "embedded":
            yield connection
        else:
            async with serving(connection) as url, postroom.connect(url) as client:
                yield client


async def shards_of(mq: Connection, topic: str = "orders") -> list[str]:
    return [piece.shard for piece in (await mq.route(topic)).ranges]


async def receive(mq: Connection, count: int, group: str = "billing", **settings: Any) -> list[Received]:
    found: list[Received] = []
    async with asyncio.timeout(LIMIT), mq.consumer("orders", group, **settings) as consumer:
        while len(found) < count:
            messages = await consumer.poll(max_messages=100, wait=5)
            await consumer.ack(messages)
            found += messages
    return found


def by_key(messages: list[Received]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = defaultdict(list)
    for message in messages:
        found[(message.key or b"").decode()].append(message.value)
    return found


async def send(mq: Connection, numbers: range, keys: int = 20) -> dict[str, list[bytes]]:
    expected: dict[str, list[bytes]] = defaultdict(list)
    for number in numbers:
        key = f"k{number % keys}"
        await mq.send("orders", b"%d" % number, key=key)
        expected[key].append(b"%d" % number)
    return expected


# --- placing -----------------------------------------------------------------------------------------


async def test_partitions_are_spread_evenly_over_all_topics(mq: Connection) -> None:
    for number in range(6):
        await mq.create_topic(f"one-{number}", partitions=1)
    await mq.create_topic("orders", partitions=5)
    found = Counter([shard for info in await mq.topics() for shard in await shards_of(mq, info.name)])
    assert sorted(found.values()) == [5, 6]
    assert [(s.name, s.state, s.partitions) for s in await mq.shards()] == [
        ("first", "open", found["first"]),
        ("b", "open", found["b"]),
    ]


async def test_one_database_is_one_shard(tmp_path: Path) -> None:
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        await mq.create_topic("orders", partitions=3)
        await mq.send("orders", b"later", delay=60)
        [only] = await mq.shards()
        assert (only.name, only.kind, only.state) == ("first", "sqlite", "open")
        assert (only.partitions, only.sealed, only.delayed) == (3, 0, 1)
        with pytest.raises(InvalidSetting, match="first shard cannot be drained"):
            await mq.drain_shard("first")


async def test_no_address_is_in_any_table(files: Url, tmp_path: Path, mq: Connection) -> None:
    await mq.create_topic("orders")
    await mq.close()
    for name in ("first.db", "second.db"):
        stored = b"".join(file.read_bytes() for file in tmp_path.glob(f"{name}*"))
        assert b"sqlite://" not in stored and b"second.db" not in stored and b"first.db" not in stored


# --- everything as on one database -------------------------------------------------------------------


@pytest.mark.slow("works for seconds")
@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_messages_go_through_all_shards(queue: Url, mode: str) -> None:
    async with postroom.connect(queue[0], shards=queue[1], migrate=True) as mq:
        await mq.create_topic("orders", partitions=4)
        assert set(await shards_of(mq)) == {"first", "b"}
        expected = await send(mq, range(100))
        found = await receive(mq, 100, mode=mode)
        assert len({m.id for m in found}) == 100
        if mode == "ordered":
            assert by_key(found) == expected
        assert (await mq.lag("orders", "billing")).total.messages == 0
        assert (await mq.topic("orders")).messages == 100
    async with postroom.connect(queue[0], shards=queue[1]) as again:
        await again.reset("orders", "billing", to="earliest")
        assert len(await receive(again, 100)) == 100


@pytest.mark.slow("works for seconds")
async def test_order_is_kept_while_partitions_move_there_and_back(queue: Url) -> None:
    async with postroom.connect(queue[0], shards=queue[1], migrate=True) as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.create_group("orders", "billing", mode="ordered")
        sending = asyncio.create_task(send(mq, range(300)))
        receiving = asyncio.create_task(receive(mq, 300, mode="ordered"))
        versions: list[int] = []
        while not sending.done() and len(versions) < 20:  # each costs both sides time, on a busy machine much
            piece = (await mq.route("orders")).ranges[len(versions) % 2]
            versions.append((await mq.move("orders", piece.partition)).version)
            await asyncio.sleep(0.01)
        assert by_key(await receiving) == await sending
        assert len(versions) > 1
        assert versions == list(range(2, len(versions) + 2))


async def test_delayed_messages_wait_on_their_shard_and_follow_the_route(files: Url) -> None:
    clock = ManualClock()
    async with postroom.connect(files[0], shards=files[1], clock=clock) as mq:
        await mq.create_topic("orders", partitions=2)
        for number in range(20):
            await mq.send("orders", b"%d" % number, key=f"k{number}", id=f"m{number}", delay=60)
        assert {s.name: s.delayed > 0 for s in await mq.shards()} == {"first": True, "b": True}
        assert (await mq.topic("orders")).delayed == 20
        here = next(r for r in (await mq.route("orders")).ranges if r.shard == "b")
        await mq.move("orders", here.partition, shard="first")
        assert await mq.cancel("orders", "m3") and not await mq.cancel("orders", "m3")
        assert await mq.cancel("orders", "m4")
        clock.advance(61)
        found = await receive(mq, 18)
        assert {m.value for m in found} == {b"%d" % n for n in range(20)} - {b"3", b"4"}
        assert sum(s.delayed for s in await mq.shards()) == 0


async def test_ids_are_remembered_across_a_move_to_another_shard(files: Url) -> None:
    async with postroom.connect(files[0], shards=files[1]) as mq:
        await mq.create_topic("orders", partitions=2, dedup_window="10m")
        for number in range(20):
            receipt = await mq.send("orders", b"x", key=f"k{number}", id=f"m{number}")
            assert not receipt.duplicate
        for piece in (await mq.route("orders")).ranges:
            await mq.move("orders", piece.partition)
        again = [await mq.send("orders", b"x", key=f"k{number}", id=f"m{number}") for number in range(20)]
        assert all(receipt.duplicate for receipt in again)
        assert not (await mq.send("orders", b"x", key="k1", id="new")).duplicate


async def test_dead_letters_and_their_redrive(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=4)
    expected = await send(mq, range(20))
    async with asyncio.timeout(LIMIT), mq.consumer("orders", "billing") as consumer:
        taken: list[Received] = []
        while len(taken) < 20:
            taken += await consumer.poll(wait=5)
        for message in taken:
            await message.dead("no")
    letters = await mq.dead_letters("orders", "billing")
    assert len(letters) == 20
    box = next(info.name for info in await mq.topics(internal=True) if info.internal)
    number = (await mq.route(box)).ranges[0].partition
    await mq.move(box, number)  # to the other shard, wherever it is
    assert len(await mq.dead_letters("orders", "billing")) == 20
    assert await mq.redrive("orders", "billing") == 20
    again = await receive(mq, 20)
    assert Counter(m.value for m in again) == Counter(v for values in expected.values() for v in values)


async def test_volatile_topics(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=4, storage="volatile")
    await send(mq, range(40))
    assert len(await receive(mq, 40)) == 40


async def test_a_group_starts_where_it_says_on_every_shard(files: Url) -> None:
    clock = ManualClock()
    async with postroom.connect(files[0], shards=files[1], clock=clock) as mq:
        await mq.create_topic("orders", partitions=4)
        await send(mq, range(40))
        clock.advance(10)
        middle = mq._endpoint.now_ms()
        await send(mq, range(40, 60))
        await mq.create_group("orders", "late", start="latest")
        await send(mq, range(60, 70))
        assert {int(m.value) for m in await receive(mq, 10, "late")} == set(range(60, 70))
        since = datetime.fromtimestamp(middle / 1000, UTC)
        await mq.create_group("orders", "since", start=since)
        assert {int(m.value) for m in await receive(mq, 30, "since")} == set(range(40, 70))
        await mq.reset("orders", "late", to="earliest")
        assert {int(m.value) for m in await receive(mq, 70, "late")} == set(range(70))


async def test_a_deleted_topic_leaves_nothing_on_any_shard(files: Url, mq: Connection) -> None:
    await mq.create_topic("orders", partitions=4)
    await send(mq, range(20))
    await mq.send("orders", b"later", key="k1", delay=3600)
    await receive(mq, 20)
    await mq.delete_topic("orders")
    broker = broker_of(mq)
    for duty in broker.duties._duties:
        if duty.name == "drop-logs":
            assert await asyncio.to_thread(broker.duties.run_once, duty)
    assert [(s.partitions, s.sealed, s.delayed) for s in await mq.shards()] == [(0, 0, 0)] * 2
    assert broker.store.catalog.dropped() == []
    second = broker.store.parts()["b"].log.news()
    assert (dict(second.ends), second.next_due) == ({}, None)


async def test_another_process_added_a_shard(files: Url, tmp_path: Path, mq: Connection) -> None:
    """What is there cannot be reached until it connects again; the rest goes on.

    The process had not been heard of for long: else the move would have been refused.
    """
    await mq.create_topic("orders", partitions=2)
    await broker_of(mq).presence.leave()
    served = not isinstance(mq._endpoint, Broker)
    more = {**files[1], "c": f"sqlite:///{tmp_path}/third.db"}
    async with postroom.connect(files[0], shards=more) as other:
        piece = (await other.route("orders")).ranges[0]
        await other.move("orders", piece.partition, shard="c")
        expected = await send(other, range(40))
        found = await receive(other, 40)
        assert Counter(m.value for m in found) == Counter(v for vs in expected.values() for v in vs)
    route = await mq.route("orders")
    slot = next(r.first_slot for r in route.ranges if r.shard != "c")
    assert (await mq.send("orders", b"here", slot=slot)).offset >= 0
    away = next(r for r in route.ranges if r.shard == "c")
    with pytest.raises(postroom.SendTimeout):
        await mq.send("orders", b"there", slot=away.first_slot, timeout=0.3)
    assert {(await mq.send("orders", b"here")).partition for _ in range(4)} == {route.of_slot(slot).partition}
    told = "ask the operator of the brokers" if served else "connect again, with shards="
    with pytest.raises(postroom.StoreUnavailable, match=told):
        await mq._endpoint.fetch("orders", away.partition_id, 0, max_messages=1, max_bytes=1, wait_ms=0)
    assert [m.value for m in await receive(mq, 5)] == [b"here"] * 5


async def test_nothing_is_put_where_somebody_cannot_reach_it(
    files: Url, tmp_path: Path, mq: Connection
) -> None:
    """Moved, drained or new: whoever was not given a shard's address is named (I11)."""
    await mq.create_topic("orders", partitions=2)
    more = {**files[1], "c": f"sqlite:///{tmp_path}/third.db"}
    async with postroom.connect(files[0], shards=more, client_id="shop-2") as other:
        piece = next(r for r in (await other.route("orders")).ranges if r.shard == "b")
        process = broker_of(mq).presence._name
        assert process.startswith("program " if isinstance(mq._endpoint, Broker) else "broker 127.0.0.1:")
        with pytest.raises(ShardUnknown, match=f"shard 'c' is not known to all.*{process} could") as caught:
            await other.move("orders", piece.partition, shard="c")
        assert "Give them its address" in str(caught.value)
        assert caught.value.details["processes"] == [process]
        with pytest.raises(ShardUnknown, match=process) as caught:
            await mq.move("orders", piece.partition, shard="c")  # which it does not know itself
        asking = "Ask the operator" in str(caught.value)
        assert asking is not isinstance(mq._endpoint, Broker)
        await other.create_topic("new", partitions=6)
        assert set(await shards_of(other, "new")) == {"first", "b"}
        assert (await other.move("orders", piece.partition)).ranges[0].shard == "first"  # it finds another
        assert (await other.route("orders")).version == 2
        await broker_of(mq).presence.leave()
        await other.move("orders", (await other.route("orders")).ranges[0].partition, shard="c")
        assert "c" in await shards_of(other)


async def test_a_shard_cannot_be_drained_to_where_somebody_cannot_reach(files: Url, tmp_path: Path) -> None:
    async with postroom.connect(files[0], shards=files[1], client_id="shop-1") as mq:
        await mq.create_topic("orders", partitions=2)
        piece = next(r for r in (await mq.route("orders")).ranges if r.shard == "first")
        await mq.move("orders", piece.partition, shard="b")
        more = {**files[1], "c": f"sqlite:///{tmp_path}/third.db"}
        async with postroom.connect(files[0], shards=more) as other:
            assert (await other.drain_shard("b")).partitions == 0
        assert set(await shards_of(mq)) == {"first"}


async def test_the_first_shard_is_called_first(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2)
    assert set(await shards_of(mq)) == {"first", "b"}
    moving = next(r for r in (await mq.route("orders")).ranges if r.shard == "b")
    after = await mq.move("orders", moving.partition, shard="")
    assert {piece.shard for piece in after.ranges} == {"first"}
    assert {piece.shard for piece in after.sealed} == {"b"}
    assert {r.shard for route in await mq.route_history("orders") for r in route.ranges} == {"first", "b"}


async def test_a_process_that_knows_of_no_shards_is_told(files: Url) -> None:
    async with postroom.connect(files[0]) as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.create_topic("other")
        await broker_of(mq).presence.leave()  # nobody has heard of it for long
        async with postroom.connect(files[0], shards=files[1]) as more:
            moved = (await more.move("orders", 0, shard="b")).of_slot(0)
            assert (await more.send("orders", b"x", slot=0)).partition == moved.partition
        with pytest.raises(InvalidSetting, match="connect again, with shards="):
            await mq.send("orders", b"x", slot=0)
        with pytest.raises(InvalidSetting, match="connect again, with shards="):
            async with mq.consumer("orders", "billing") as consumer:
                await consumer.poll(wait=5)
        assert (await mq.send("other", b"x")).offset == 0


# --- draining ----------------------------------------------------------------------------------------


async def test_a_shard_is_drained_live_and_then_left_out(files: Url, mq: Connection) -> None:
    await mq.create_topic("orders", partitions=4, retention="1s", drop_settled=True)
    await mq.create_group("orders", "billing", mode="ordered")
    sending = asyncio.create_task(send(mq, range(200)))
    info = await mq.drain_shard("b")
    assert (info.name, info.state, info.partitions) == ("b", "draining", 0)
    assert set(await shards_of(mq)) == {"first"}
    expected = await sending
    await mq.create_topic("more", partitions=4)
    assert set(await shards_of(mq, "more")) == {"first"}
    with pytest.raises(InvalidSetting, match="being drained"):
        await mq.move("more", 0, shard="b")
    assert by_key(await receive(mq, 200, mode="ordered")) == expected
    await _run_duty(mq, "retention", until=lambda: _state(mq, "b", "empty"))
    await mq.close()
    async with postroom.connect(files[0]) as alone:
        assert [s.name for s in await alone.shards()] == ["first"]
        await send(alone, range(10))
        assert len(await receive(alone, 10)) == 10


async def _state(mq: Connection, name: str, state: str) -> bool:
    return any(s.name == name and s.state == state for s in await mq.shards())


async def _run_duty(mq: Connection, name: str, until: Callable[[], Any]) -> None:
    broker = broker_of(mq)
    duty = next(duty for duty in broker.duties._duties if duty.name == name)
    async with asyncio.timeout(LIMIT):
        while not await until():
            await asyncio.to_thread(broker.duties.run_once, duty)
            await asyncio.sleep(0.1)


async def test_a_drained_shard_can_be_opened_again(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2)
    await mq.drain_shard("b")
    assert (await mq.open_shard("b")).state == "open"
    await mq.create_topic("more", partitions=2)
    assert "b" in await shards_of(mq, "more")


async def test_dead_letters_leave_a_drained_shard_too(mq: Connection) -> None:
    await mq.create_topic("one", partitions=1)  # on the first: what comes next is on the second
    await mq.create_topic("orders", partitions=2)
    await mq.send("orders", b"x")
    async with asyncio.timeout(LIMIT), mq.consumer("orders", "billing") as consumer:
        for message in await consumer.poll(wait=5):
            await message.dead("no")
    await mq.drain_shard("b")
    for info in await mq.topics(internal=True):
        assert set(await shards_of(mq, info.name)) == {"first"}
    assert [letter.value for letter in await mq.dead_letters("orders", "billing")] == [b"x"]


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "error", "words"),
    [
        (["sqlite:///b.db"], InvalidSetting, "shards= takes addresses by name"),
        ({"": "sqlite:///b.db"}, InvalidSetting, "letters, digits and '-'"),
        ({"a b": "sqlite:///b.db"}, InvalidSetting, "letters, digits and '-'"),
        ({"x" * 61: "sqlite:///b.db"}, InvalidSetting, "60 at most"),
        ({3: "sqlite:///b.db"}, InvalidSetting, "letters, digits and '-'"),
        ({"first": "sqlite:///b.db"}, InvalidSetting, "choose another name"),
        ({"b": "b.db"}, InvalidURL, "no scheme"),
        ({"b": None}, InvalidURL, "an address is text"),
    ],
)
async def test_names_and_addresses_are_checked_at_once(
    shards: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        postroom.connect("memory://", shards=shards)


async def refused(url: str, shards: dict[str, str] | None, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        async with postroom.connect(url, shards=shards):
            pass


async def test_every_database_has_its_place(files: Url, tmp_path: Path) -> None:
    url, shards = files
    third = f"sqlite:///{tmp_path}/third.db"
    async with postroom.connect(url, shards=shards) as mq:
        await mq.create_topic("orders", partitions=2)
        await send(mq, range(10))
    await refused(url, None, "shard 'b' of this queue holds partitions")
    await refused(url, {"c": third}, "shard 'b' of this queue holds partitions")
    await refused(url, {"b": third}, "shard 'b' of this queue is another database")
    await refused(url, {"b": shards["b"], "c": shards["b"]}, "'c' is the same database as shard 'b'")
    await refused(url, {"b": shards["b"], "c": url}, "'c' is the queue's first database itself")
    await refused(shards["b"], None, "this database is shard 'b' of a queue")
    await refused(shards["b"], {"c": third}, "this database is shard 'b' of a queue")
    async with postroom.connect(f"sqlite:///{tmp_path}/other.db") as other:
        await other.create_topic("own")
    await refused(url, {**shards, "c": f"sqlite:///{tmp_path}/other.db"}, "a queue of its own, with topics")
    await refused(f"sqlite:///{tmp_path}/other.db", shards, "is shard 'b' of another queue")
    async with postroom.connect(url, shards=shards) as mq:  # and nothing was changed by all that
        assert len(await receive(mq, 10)) == 10
        assert [s.name for s in await mq.shards()] == ["first", "b"]
    async with postroom.connect(f"sqlite:///{tmp_path}/other.db") as other:
        assert [info.name for info in await other.topics()] == ["own"]


async def test_two_new_names_for_one_new_database_change_nothing(files: Url, tmp_path: Path) -> None:
    url, new = files[0], f"sqlite:///{tmp_path}/third.db"
    await refused(url, {"b": new, "c": new}, "'c' is the same database as shard 'b'")
    async with postroom.connect(url) as mq:
        assert [s.name for s in await mq.shards()] == ["first"]
    async with postroom.connect(new) as own:  # nobody has claimed it
        await own.create_topic("own")


async def test_a_shard_that_never_had_anything_may_be_left_out(files: Url) -> None:
    async with postroom.connect(files[0], shards=files[1]):
        pass
    async with postroom.connect(files[0]) as mq:
        await mq.create_topic("orders")


async def test_shards_that_cannot_be_moved_to_or_drained(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2)
    with pytest.raises(InvalidSetting, match="there is no shard 'zz'; there is first, b"):
        await mq.move("orders", 0, shard="zz")
    with pytest.raises(InvalidSetting, match="there is no shard 'zz'; there is first, b"):
        await mq.drain_shard("zz")
    with pytest.raises(InvalidSetting, match="the first shard cannot be drained"):
        await mq.drain_shard("first")
    here = (await mq.route("orders")).ranges[0]
    with pytest.raises(InvalidSetting, match="on that shard already"):
        await mq.move("orders", here.partition, shard=here.shard)
    assert (await mq.route("orders")).version == 1


def test_without_async(files: Url) -> None:
    with postroom.sync.connect(files[0], shards=files[1]) as mq:
        mq.create_topic("orders", partitions=2)
        assert mq.send("orders", b"x").offset == 0
        assert [s.name for s in mq.shards()] == ["first", "b"]


# --- clocks ------------------------------------------------------------------------------------------


class Ahead:
    """The clock of a database that is an hour ahead."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def now_ms(self) -> int:
        return self._clock.now_ms() + 3_600_000

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        return self._clock.subscribe(moved)


@pytest.fixture
async def skewed(tmp_path: Path) -> AsyncIterator[tuple[Connection, ManualClock, int]]:
    """A queue whose second shard is an hour ahead, and a slot there."""
    clock = ManualClock()

    def opening(name: str, at: Clock, **how: Any) -> SqlStore:
        store = open_sqlite(tmp_path / name, at)
        assert isinstance(store, SqlStore)
        return SqlStore(store.session, **how)

    first = ShardSource("sqlite", partial(opening, "first.db", clock))
    second = ShardSource("sqlite", partial(opening, "second.db", Ahead(clock)))
    broker = Broker(await asyncio.to_thread(open_sharded, first, {"b": second}), clock)
    async with Connection(broker, clock=clock) as mq:
        await mq.create_topic("orders", partitions=2)
        there = next(r for r in (await mq.route("orders")).ranges if r.shard == "b")
        yield mq, clock, there.first_slot


@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_a_retry_comes_when_it_was_said_whatever_the_shards_clock(
    skewed: tuple[Connection, ManualClock, int], mode: Any
) -> None:
    mq, clock, slot = skewed
    await mq.send("orders", b"x", slot=slot)
    async with asyncio.timeout(LIMIT), mq.consumer("orders", "billing", mode=mode, lease=60) as consumer:
        [message] = await consumer.poll(wait=5)
        await message.retry(delay=10)
        clock.advance(8)
        assert await consumer.poll(wait=0.3) == []
        clock.advance(4)
        [again] = await consumer.poll(wait=5)
        assert again.attempt == 2
        await again.ack()


async def test_a_lease_lasts_as_long_whatever_the_shards_clock(
    skewed: tuple[Connection, ManualClock, int],
) -> None:
    mq, clock, slot = skewed
    await mq.send("orders", b"x", slot=slot)
    route = await mq.route("orders")
    broker = mq._endpoint
    await broker.create_group("orders", "billing", GroupWish(lease_ms=30_000))
    first = await broker.poll(PollRequest("orders", "billing", "ann", 1, 10, 10_000, 5_000, True))
    assert [g.partition_id for g in first.grants] == [route.of_slot(slot).partition_id]
    clock.advance(28)
    again = PollRequest("orders", "billing", "bob", 2, 10, 10_000, 0, True)
    assert (await broker.poll(again)).grants == ()
    clock.advance(4)
    assert [grant.leases[0].attempt for grant in (await broker.poll(again)).grants] == [2]


async def test_a_delayed_message_is_due_when_it_was_said_whatever_the_shards_clock(
    skewed: tuple[Connection, ManualClock, int],
) -> None:
    mq, clock, slot = skewed
    await mq.create_group("orders", "billing")
    await mq.send("orders", b"x", slot=slot, delay=10)
    clock.advance(8)
    async with asyncio.timeout(LIMIT), mq.consumer("orders", "billing") as consumer:
        assert await consumer.poll(wait=0.3) == []
        clock.advance(4)
        assert [m.value for m in await consumer.poll(wait=5)] == [b"x"]
