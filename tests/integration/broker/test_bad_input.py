"""Mistakes and misfortunes, through the public API.

Each gives one clear error that says what to do; nothing is stored half, and the process goes on.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.config import DEFAULTS


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'queue.db'}"


@pytest.fixture
async def mq(url: str) -> AsyncIterator[postroom.Connection]:
    async with postroom.connect(url) as opened:
        await opened.create_topic("orders", partitions=2)
        yield opened


async def stored(mq: postroom.Connection) -> list[bytes]:
    return [message.value async for message in mq.read("orders")]


# ---- names and settings ----


async def test_an_unknown_topic_names_the_near_one(mq: postroom.Connection) -> None:
    with pytest.raises(postroom.UnknownTopic, match=r"did you mean 'orders'\?.*create_topic"):
        await mq.send("order", b"x")
    with pytest.raises(postroom.UnknownTopic, match="create_topic"):
        async with mq.consumer("nothing-like-it", group="billing"):
            pass
    assert [t.name for t in await mq.topics()] == ["orders"]


async def test_an_unknown_group_names_the_near_one(mq: postroom.Connection) -> None:
    await mq.create_group("orders", "billing")
    for call in (mq.lag, mq.pause, mq.resume, mq.dead_letters, mq.redrive):
        with pytest.raises(postroom.UnknownGroup, match="did you mean 'billing'"):
            await call("orders", "biling")
    assert [g.name for g in await mq.groups("orders")] == ["billing"]


async def test_settings_that_conflict(mq: postroom.Connection) -> None:
    await mq.create_group("orders", "billing", lease=20, max_attempts=3)
    with pytest.raises(
        postroom.GroupConflict,
        match=r"lease='20s'.*lease='10s'.*alter_group\('orders', 'billing', lease='10s'\)",
    ):
        async with mq.consumer("orders", group="billing", lease=10):
            pass
    async with mq.consumer("orders", group="billing", lease=20), mq.consumer("orders", group="billing"):
        pass
    await mq.alter_group("orders", "billing", lease=10)
    async with mq.consumer("orders", group="billing", lease=10):
        pass


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda mq: mq.create_topic("no spaces"), postroom.InvalidName, "such as 'orders'"),
        (lambda mq: mq.create_topic("_mine"), postroom.InvalidName, "reserved"),
        (lambda mq: mq.create_topic("orders"), postroom.TopicExists, "exist_ok"),
        (lambda mq: mq.create_topic("more", partitions=0), postroom.InvalidSetting, "from 1 to 1024"),
        (lambda mq: mq.create_topic("more", retention="soon"), postroom.InvalidSetting, "retention"),
        (lambda mq: mq.create_topic("more", storage="stone"), postroom.InvalidSetting, "durable"),
        (lambda mq: mq.create_group("orders", "a.b"), postroom.InvalidName, "such as 'billing'"),
        (lambda mq: mq.create_group("orders", "g", lease=-1), postroom.InvalidSetting, "lease"),
        (lambda mq: mq.create_group("orders", "g", max_attempts=0), postroom.InvalidSetting, "max_attempts"),
        (lambda mq: mq.create_group("orders", "g", start="yesterday"), postroom.InvalidSetting, "earliest"),
        (lambda mq: mq.create_group("orders", "g", start={9: 0}), postroom.InvalidSetting, "partition 9"),
        (lambda mq: mq.send("orders", b"x", slot=4096), postroom.InvalidSetting, "1023"),
        (lambda mq: mq.send("orders", b"x", delay=-5), postroom.InvalidSetting, "delay"),
        (lambda mq: mq.send("orders", b"x", delay=5, at=2e9), postroom.InvalidSetting, "not both"),
        (lambda mq: mq.cancel("orders", 42), postroom.InvalidSetting, "receipt.id"),
    ],
)
async def test_wrong_names_and_settings(mq: postroom.Connection, call: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        await call(mq)
    assert not await stored(mq)
    assert [t.name for t in await mq.topics()] == ["orders"]
    assert not await mq.groups("orders")


# ---- messages ----


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (postroom.Message(object()), "object"),
        (postroom.Message(None), "None is no body"),
        (postroom.Message(b"x", key=42), "key"),  # type: ignore[arg-type]
        (postroom.Message(b"x", headers={"n": 1}), "header"),  # type: ignore[dict-item]
        (postroom.Message(b"x", headers={1: b"v"}), "header"),  # type: ignore[dict-item]
        (postroom.Message(b"x", headers={"postroom-id": b"v"}), "postroom-"),
        (postroom.Message(b"x", id=7), "id"),  # type: ignore[arg-type]
    ],
)
async def test_a_wrong_message_stops_the_whole_call(
    mq: postroom.Connection, message: postroom.Message, says: str
) -> None:
    with pytest.raises(postroom.InvalidMessage, match=says):
        await mq.send_many("orders", [postroom.Message(b"fine"), message, postroom.Message(b"fine")])
    assert not await stored(mq)
    await mq.send("orders", b"goes on")
    assert await stored(mq) == [b"goes on"]


async def test_an_oversize_message(mq: postroom.Connection) -> None:
    too_large = b"x" * (DEFAULTS.max_message_bytes + 1)
    with pytest.raises(postroom.MessageTooLarge, match=f"limit is {DEFAULTS.max_message_bytes:,}"):
        await mq.send_many("orders", [postroom.Message(b"fine"), postroom.Message(too_large)])
    with pytest.raises(postroom.MessageTooLarge):
        await mq.send("orders", b"x", key="k" * (DEFAULTS.max_key_bytes + 1))
    with pytest.raises(postroom.MessageTooLarge):
        await mq.send("orders", b"x", headers={str(i): b"" for i in range(DEFAULTS.max_headers + 1)})
    assert not await stored(mq)
    largest = b"x" * (DEFAULTS.max_message_bytes - 1024)
    await mq.send("orders", largest)
    async with mq.consumer("orders", group="g", window=10) as consumer:
        (message,) = await consumer.poll(wait=5)
        assert message.value == largest
        await message.ack()


async def test_a_damaged_batch_in_the_file_is_named_and_the_rest_goes_on(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=1)
        for value in (b"first", b"second"):
            await mq.send("orders", value)
    with sqlite3.connect(tmp_path / "queue.db") as db:
        (data,) = db.execute("SELECT batch FROM postroom_log_1 WHERE base_offset = 1").fetchone()
        damaged = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
        db.execute("UPDATE postroom_log_1 SET batch = ? WHERE base_offset = 1", (damaged,))
    db.close()
    async with postroom.connect(url) as mq:
        await mq.send("orders", b"third")
        assert [message.value async for message in mq.read("orders")] == [b"first", b"third"]
    assert "orders:0:1, a batch of 1 messages, cannot be read" in caplog.text
    assert "checksum" in caplog.text


# ---- addresses and files ----


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("sqlite://orders.db", "sqlite:///orders.db"),
        ("sqllite:///orders.db", "sqlite"),
        ("sqlite:///", "names no file"),
        ("orders.db", "sqlite:///orders.db"),
        ("postgresql://localhost", "names no database"),
        ("http://localhost", "sqlite"),
        ("", "sqlite"),
    ],
)
async def test_a_url_with_a_typo(wrong: str, says: str) -> None:
    with pytest.raises(postroom.InvalidURL, match=says):
        await postroom.connect(wrong)


async def test_an_unwritable_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "q.db", tmp_path / "file" / "q.db", tmp_path / "folder"):
        with pytest.raises(postroom.StoreUnavailable, match=r"folder|cannot be opened"):
            await postroom.connect(f"sqlite:///{path}")


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "q.db").write_bytes(b"a letter to grandmother" * 100)
    with pytest.raises(postroom.StoreCorrupt, match="backup"):
        await postroom.connect(f"sqlite:///{tmp_path / 'q.db'}")


async def test_a_database_of_a_newer_version(url: str, tmp_path: Path) -> None:
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders")
    db = sqlite3.connect(tmp_path / "queue.db")
    with db:
        db.execute("INSERT INTO postroom_schema (version, applied_at) VALUES (99, 0)")
    db.close()
    with pytest.raises(postroom.SchemaMismatch, match="at most: update your checkout of Postroom"):
        await postroom.connect(url)


async def test_progress_of_another_log_is_refused(url: str, tmp_path: Path) -> None:
    """Deleting the log but not its progress must not make a new log's messages pass as handled."""
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders")
    for path in tmp_path.glob("queue.db*"):
        if "progress" not in path.name:
            path.unlink()
    with pytest.raises(postroom.StoreCorrupt, match="belongs to another log"):
        await postroom.connect(url)
    for path in tmp_path.glob("queue.db.progress*"):
        path.unlink()
    async with postroom.connect(url) as mq:
        assert await mq.topics() == []


async def test_a_log_older_than_its_progress_is_noticed(url: str, tmp_path: Path) -> None:
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.create_group("orders", "g")
        backup = sqlite3.connect(tmp_path / "backup.db")
        with sqlite3.connect(tmp_path / "queue.db") as source:
            source.backup(backup)
        backup.close()
        source.close()
        await mq.send_many("orders", [postroom.Message(b"x")] * 10)
        async with mq.consumer("orders", group="g") as consumer:
            await consumer.ack(await consumer.poll(wait=5))
    for name in ("queue.db", "queue.db-wal", "queue.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "backup.db").rename(tmp_path / "queue.db")
    with pytest.raises(postroom.StoreCorrupt, match="the log is older than its progress"):
        await postroom.connect(url)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_loses_nothing_and_heals(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 1_000_000)
    async with postroom.connect(f"sqlite:///{small_disk / 'q.db'}") as mq:
        await mq.create_topic("orders", partitions=1)
        confirmed = []
        with pytest.raises(postroom.StoreFull, match="free some space"):  # noqa: PT012
            for i in range(200):
                value = b"%d " % i + b"x" * 20_000
                await mq.send("orders", value)
                confirmed.append(value)
        assert 5 < len(confirmed) < 200
        assert await stored(mq) == confirmed
        with pytest.raises(postroom.StoreFull):
            await mq.send_many("orders", [os.urandom(50_000) for _ in range(20)])  # it does not shrink
        assert await stored(mq) == confirmed
        ballast.unlink()
        await mq.send("orders", b"after")
        async with mq.consumer("orders", group="g") as consumer:
            messages = await consumer.poll(wait=5)
            while len(messages) < len(confirmed) + 1:
                messages += await consumer.poll(wait=5)
            await consumer.ack(messages)
        assert [m.value for m in messages] == [*confirmed, b"after"]
        assert (await mq.lag("orders", "g")).total.messages == 0


# ---- life ----


async def test_use_after_close(url: str) -> None:
    mq = await postroom.connect(url)
    await mq.create_topic("orders")
    async with mq.consumer("orders", group="g") as consumer:
        await mq.send("orders", b"x")
        (message,) = await consumer.poll(wait=5)
    with pytest.raises(postroom.ClosedError, match="delivered again"):
        await message.ack()
    with pytest.raises(postroom.ClosedError, match=r"mq\.consumer"):
        await consumer.poll()
    producer = mq.producer("orders")
    async with producer:
        pass
    with pytest.raises(postroom.ClosedError, match=r"mq\.producer"):
        await producer.post(b"x")
    await mq.close()
    await mq.close()
    for call in (lambda: mq.send("orders", b"x"), mq.topics, lambda: mq.lag("orders", "g")):
        with pytest.raises(postroom.ClosedError, match="connect again"):
            await call()


async def test_use_after_fork(mq: postroom.Connection) -> None:
    await mq.send("orders", b"before")
    code = os.fork()
    if code == 0:  # in the child, whose event loop is a copy: drive one call by hand
        status = 1
        try:
            mq.send("orders", b"child").send(None)
        except postroom.ForkError as error:
            status = 0 if "connect" in str(error) else 2
        except BaseException:
            status = 3
        os._exit(status)
    _, result = await asyncio.to_thread(os.waitpid, code, 0)
    assert os.waitstatus_to_exitcode(result) == 0
    await mq.send("orders", b"after")
    assert sorted(await stored(mq)) == [b"after", b"before"]


async def test_use_from_another_event_loop(mq: postroom.Connection) -> None:
    def elsewhere() -> None:
        asyncio.run(_send(mq))

    with pytest.raises(postroom.UsageError, match="event loop"):
        await asyncio.to_thread(elsewhere)


async def _send(mq: postroom.Connection) -> None:
    await mq.send("orders", b"x")
