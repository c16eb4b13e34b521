"""The spool's own file: who may have it, how much it takes, what it says, and what it does with bad ones."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest

import postroom
from postroom import Message, sync
from postroom.client.forward.spool_file import SpoolFile, look, owner_of
from tests.contract.cli_runner import Cli
from tests.integration.processes.children import child, received
from tests.integration.spool.spooling import fill, in_order, stored

NOBODY = "postroom://127.0.0.1:1"
LONG = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.spool"


@pytest.fixture
def queue(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# ---- what is sent through it ----


async def test_messages_come_out_as_they_were_sent(queue: str, path: Path) -> None:
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders", partitions=4, dedup_window="10m")
        async with mq.producer("orders", spool=path) as producer:
            await producer.send(b"1", key="k", headers={"a": "b"}, id="o-1", source="web", expires="1h")
            await producer.send(b"again", key="k", id="o-1")
            await producer.send(b"3", slot=1023)
            late = await producer.send(b"4", delay=3600)
            past = await producer.send(b"5", delay=0.001)  # due by the time it is forwarded
            assert await producer.forwarded(LONG)
            assert late.due is not None and late.id and past.spooled
        async with mq.consumer("orders", group="check") as consumer:
            got: list[postroom.Received] = []
            while len(got) < 3:
                got += await consumer.poll(wait=20)
            await consumer.ack(got)
        first, *others = sorted(got, key=lambda message: message.value)
        assert (first.value, first.key, first.headers, first.id, first.source) == (
            b"1",
            b"k",
            {"a": b"b"},
            "o-1",
            "web",
        )
        assert first.expires is not None
        assert [message.value for message in others] == [b"3", b"5"]
        assert others[0].partition == 3
        assert await mq.cancel("orders", late.id)


async def test_posts_land_in_order_and_a_wrong_message_is_refused_at_once(queue: str, path: Path) -> None:
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders", partitions=2)
        async with mq.producer("orders", spool=path) as producer:
            posted = [await producer.post(b"%d" % n, key=str(n % 5)) for n in range(500)]
            assert all([(await one).spooled for one in posted])
            with pytest.raises(postroom.MessageTooLarge):
                await producer.send(b"x" * 5_000_000)
            with pytest.raises(postroom.InvalidMessage):
                await producer.send_many([Message(b"ok"), Message(object())])
            assert await producer.forwarded(LONG)
        found = await stored(mq)
    assert len(found) == 500 and in_order(found)
    with pytest.raises(postroom.InvalidSetting, match="confirm"):
        async with postroom.connect("memory://") as other:
            other.producer("orders", spool=path, confirm=False)


async def test_producers_of_a_connection_share_the_file(queue: str, path: Path) -> None:
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders")
        await mq.create_topic("mails")
        async with mq.producer("orders", spool=path) as orders, mq.producer("mails", spool=path) as mails:
            await asyncio.gather(fill(orders, 0, 20), fill(mails, 0, 30))
            assert await mails.forwarded(LONG)
        assert len(await stored(mq, "orders")) == 20 and len(await stored(mq, "mails")) == 30
        with pytest.raises(postroom.InvalidSetting, match="spool_bytes"):
            mq.producer("orders", spool=path, spool_bytes="1 MB")
        plain = mq.producer("orders")
        with pytest.raises(postroom.UsageError, match="has no spool"):
            await plain.forwarded()
        with pytest.raises(postroom.UsageError, match="has no spool"):
            plain.spooled  # noqa: B018


def test_without_await(queue: str, path: Path) -> None:
    with sync.connect(queue) as mq:
        mq.create_topic("orders")
        with mq.producer("orders", spool=path) as producer:
            assert producer.send(b"1").spooled
            assert producer.post(b"2").result(LONG).spooled
            assert producer.forwarded(LONG)
            assert producer.spooled.messages == 0
    with sync.Spool(path, queue) as spool:
        assert spool.send("orders", b"3").spooled
        assert len(spool.send_many("orders", [Message(b"4")])) == 1
        assert spool.producer("orders").send(b"5").spooled
        assert spool.forwarded(LONG)
    with sync.connect(queue) as mq:
        assert sorted(message.value for message in mq.read("orders")) == [b"1", b"2", b"3", b"4", b"5"]


# ---- how much it takes ----


async def test_a_full_one_makes_senders_wait_and_then_says_so(queue: str, path: Path) -> None:
    async with postroom.Spool(path, NOBODY, spool_bytes="10 KB") as spool:
        for _ in range(9):
            await spool.send("orders", b"x" * 1000, key="1")
        with pytest.raises(postroom.StoreFull, match="spool_bytes") as full:
            await spool.send("orders", b"x" * 1000, key="1", timeout=0.05)
        assert full.value.details["messages"] == 9
        assert spool.spooled.messages == 9
    async with postroom.Spool(path, NOBODY, spool_bytes="10 KB") as spool:
        with pytest.raises(postroom.StoreFull):  # what is there from before counts
            await spool.send("orders", b"x" * 1000, key="1", timeout=0.05)
    async with postroom.connect(queue) as mq:
        async with mq.producer("orders", spool=path, spool_bytes="10 KB") as producer:
            sending = asyncio.create_task(producer.send(b"x" * 1000, timeout=LONG))
            await mq.create_topic("orders")  # what is there leaves, and makes room
            assert (await sending).spooled
            assert await producer.forwarded(LONG)
        assert (await mq.topic("orders")).messages == 10


async def test_a_file_that_was_emptied_becomes_small_again(queue: str, path: Path) -> None:
    async with postroom.Spool(path, NOBODY) as spool:
        await spool.send_many("orders", [Message(b"x" * 1_000_000) for _ in range(20)])
    assert path.stat().st_size > 20_000_000
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders")
        async with mq.producer("orders", spool=path) as producer:
            assert await producer.forwarded(LONG)
    assert path.stat().st_size < 1_000_000


# ---- what waits, and why ----


async def test_a_topic_that_is_not_there_is_shown_and_holds_up_nobody(queue: str, path: Path) -> None:
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders")
        async with mq.producer("missing", spool=path) as missing, mq.producer("orders", spool=path) as orders:
            await fill(missing, 0, 30)
            await fill(orders, 0, 30)
            await until(lambda: orders.spooled.messages == 30)
            await until(lambda: bool(look(path).stuck))
            waiting = look(path)
            assert "topic 'missing'" in waiting.stuck and "unknown_topic" in waiting.stuck
            assert (waiting.messages, waiting.owner and waiting.owner.pid) == (30, os.getpid())
            assert waiting.bytes > 30 and waiting.oldest_age_ms >= 0
            await mq.create_topic("missing")
            assert await orders.forwarded(LONG)
            await until(lambda: not look(path).troubles)
        assert in_order(await stored(mq, "missing"))


def test_on_the_command_line(path: Path, tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    with sync.Spool(path, NOBODY) as spool:
        spool.send_many("orders", [Message(b"1"), Message(b"2")])
        shown = cli.ok("spool", str(path))
        assert "2 messages" in shown.out and f"process {os.getpid()}" in shown.out
    found = cli.ok("spool", str(path), "--json").json
    assert (found["messages"], found["owner"], found["stuck"]) == (2, None, "")
    missing = cli("spool", f"{path}x")
    assert missing.code == 1 and "there is no spool" in missing.err


# ---- who has it ----


async def test_one_process_at_a_time_has_it(path: Path) -> None:
    async with postroom.Spool(path, NOBODY):
        with pytest.raises(postroom.StoreBusy, match=f"process {os.getpid()} .this one.") as taken:
            await postroom.Spool(path, NOBODY).open()
        assert taken.value.details["owner"] == os.getpid()
    async with postroom.Spool(path, NOBODY):
        pass


def _hold(path: Path, pipe: Pipe) -> None:
    file = SpoolFile(path)
    pipe.send(os.getpid())
    pipe.recv()
    file.close()


async def test_one_that_was_killed_has_it_no_longer(path: Path) -> None:
    with child(_hold, path) as (process, pipe):
        pid = received(pipe)
        with pytest.raises(postroom.StoreBusy, match=f"process {pid}:"):
            SpoolFile(path)
        process.kill()
        process.join(30)
        SpoolFile(path).close()
    assert owner_of(path) is None


def test_a_forked_child_does_not_keep_it(path: Path) -> None:
    file = SpoolFile(path)
    reading, writing = os.pipe()
    forked = os.fork()
    if not forked:
        os.close(writing)
        os.read(reading, 1)  # until the parent says so
        os._exit(0)
    os.close(reading)
    try:
        file.close()
        SpoolFile(path).close()  # while the child lives
    finally:
        os.close(writing)
        os.waitpid(forked, 0)


# ---- bad files ----


def _text(path: Path) -> None:
    path.write_text("a list of what to buy")


def _database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE mine (x)")


def _newer(path: Path) -> None:
    SpoolFile(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 99")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _cut(path: Path) -> None:
    SpoolFile(path).close()
    path.write_bytes(path.read_bytes()[:50])


def _torn(path: Path) -> None:
    SpoolFile(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes(len(whole) - 100))


def _left(path: Path) -> None:
    path.with_name(f"{path.name}-wal").write_bytes(b"messages")


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (_text, postroom.StoreCorrupt, "not a spool"),
        (_database, postroom.StoreCorrupt, "something else"),
        (_newer, postroom.SchemaMismatch, "version 99"),
        (_cut, postroom.StoreCorrupt, "not a spool"),
        (_torn, postroom.StoreCorrupt, "damaged"),
        (_left, postroom.StoreCorrupt, "orders.spool-wal"),
    ],
)
async def test_a_file_that_is_no_sound_spool_is_left_as_it_is(
    path: Path, spoil: Callable[[Path], None], error: type[postroom.PostroomError], says: str
) -> None:
    spoil(path)
    before = path.read_bytes() if path.exists() else None
    for _ in range(2):  # nor does it keep the lock
        with pytest.raises(error, match=says):
            await postroom.Spool(path, NOBODY).open()
    assert (path.read_bytes() if path.exists() else None) == before


async def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "none" / "orders.spool"):
        with pytest.raises(postroom.StoreUnavailable, match=bad.name):
            await postroom.Spool(bad, NOBODY).open()
    for wrong in ("", 5):
        with pytest.raises(postroom.InvalidSetting, match="spool="):
            postroom.Spool(wrong, NOBODY)  # type: ignore[arg-type]
    with pytest.raises(postroom.InvalidURL):
        postroom.Spool("orders.spool", "nonsense")


async def test_a_disk_that_is_full_fails_the_send_and_nothing_else(path: Path) -> None:
    async with postroom.Spool(path, NOBODY) as spool:
        await spool.send("orders", b"1")
        assert spool._writer is not None and spool._writer._file is not None
        filling = spool._writer._file._filling
        pages = filling.execute("PRAGMA page_count").fetchone()[0]
        filling.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(postroom.StoreFull, match="no space"):
            await spool.send("orders", b"x" * 1_000_000)
        filling.execute("PRAGMA max_page_count = 1000000")
        await spool.send("orders", b"2")
        assert spool.spooled.messages == 2
