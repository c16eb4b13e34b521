"""Backups as the page about them says: nothing that was confirmed before is lost, at worst it comes again."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

import postroom
from postroom import Connection, Message, StoreCorrupt
from tests.ready import Ground
from tests.servers import MariaServer
from tests.servers.server import Server

SECONDS = 60


async def back_up(url: str, folder: Path) -> None:
    """In a process of its own, as operators do."""
    line = [sys.executable, "-m", "postroom", "backup", str(folder), "--url", url]
    copying = await asyncio.create_subprocess_exec(*line)
    assert await copying.wait() == 0


def copy(source: Path, folder: Path) -> None:
    """One file, as it is at one moment."""
    folder.mkdir(exist_ok=True)
    with closing(sqlite3.connect(source)) as file:
        file.execute("VACUUM INTO ?", (str(folder / source.name),))


def restore(folder: Path, queue: Path) -> None:
    for old in queue.parent.glob(f"{queue.name}*"):
        old.unlink()
    for file in folder.iterdir():
        shutil.copy(file, queue.parent / file.name)


async def drained(mq: Connection, group: str = "billing") -> list[bytes]:
    """What the group still gets, all acked."""
    found: list[bytes] = []
    async with mq.consumer("orders", group) as consumer:
        while (await mq.lag("orders", group)).total.messages:
            messages = await consumer.poll(wait=1)
            found += [message.value for message in messages]
            await consumer.ack(messages)
    return found


# ---- SQLite ----


async def test_a_queue_in_use_is_copied_and_restored(tmp_path: Path) -> None:
    queue, confirmed, acked = tmp_path / "q.db", list[bytes](), list[bytes]()
    busy = asyncio.Event()

    async def send(mq: Connection) -> None:
        for first in range(0, 10**9, 5):
            values = [b"%d" % n for n in range(first, first + 5)]
            await mq.send_many("orders", [Message(value) for value in values])
            confirmed.extend(values)

    async def consume(mq: Connection) -> None:
        async with mq.consumer("orders", "billing", window=100) as consumer:
            while True:
                messages = await consumer.poll(20)
                await consumer.ack(messages)
                acked.extend(message.value for message in messages)
                if len(acked) > 200:
                    busy.set()

    async with postroom.connect(f"sqlite:///{queue}") as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.create_group("orders", "billing", lease="3s")  # of what was in hand when it was copied
        running = [asyncio.create_task(send(mq)), asyncio.create_task(consume(mq))]
        async with asyncio.timeout(SECONDS):
            await busy.wait()
            before = set(confirmed)
            await back_up(f"sqlite:///{queue}", tmp_path / "copy")
        settled = set(acked)  # at least those that are settled in the copy
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    restore(tmp_path / "copy", queue)
    async with postroom.connect(f"sqlite:///{queue}") as mq:
        there = {message.value async for message in mq.read("orders")}
        assert before <= there <= {b"%d" % n for n in range(len(confirmed) + 5)}
        again = set(await drained(mq))
    assert before <= settled | again


@asynccontextmanager
async def one_partition(queue: Path) -> AsyncIterator[Connection]:
    async with postroom.connect(f"sqlite:///{queue}") as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send_many("orders", [Message(b"%d" % n) for n in range(4)])
        await mq.create_group("orders", "billing")
        yield mq


async def bury(mq: Connection) -> bytes:
    """Handle one message: it is hopeless."""
    async with mq.consumer("orders", "billing", window=1) as consumer:
        (message,) = await consumer.poll(1, wait=20)
        await message.dead("hopeless")
    return message.value


async def test_between_the_copies_messages_come_are_settled_and_die(tmp_path: Path) -> None:
    queue, folder = tmp_path / "q.db", tmp_path / "copy"
    async with one_partition(queue) as mq:
        copy(tmp_path / "q.db.progress", folder)
        dead = await bury(mq)
        await mq.send("orders", b"late")
        assert len(await drained(mq)) == 4
        copy(queue, folder)
    restore(folder, queue)
    async with postroom.connect(f"sqlite:///{queue}") as mq:
        assert sorted(await drained(mq)) == [b"0", b"1", b"2", b"3", b"late"]  # all of it again
        assert [letter.value for letter in await mq.dead_letters("orders", "billing")] == [dead]


async def test_the_wrong_order_is_refused_where_it_can_be_seen(tmp_path: Path) -> None:
    queue, folder = tmp_path / "q.db", tmp_path / "copy"
    async with one_partition(queue) as mq:
        copy(queue, folder)
        await mq.send("orders", b"late")
        assert len(await drained(mq)) == 5
        copy(tmp_path / "q.db.progress", folder)
    restore(folder, queue)
    with pytest.raises(StoreCorrupt, match="the log is older than its progress"):
        async with postroom.connect(f"sqlite:///{queue}"):
            pass


async def test_the_wrong_order_loses_what_cannot_be_seen(tmp_path: Path) -> None:
    """Why the page insists on the right one."""
    queue, folder = tmp_path / "q.db", tmp_path / "copy"
    async with one_partition(queue) as mq:
        copy(queue, folder)
        dead = await bury(mq)
        copy(tmp_path / "q.db.progress", folder)
    restore(folder, queue)
    async with postroom.connect(f"sqlite:///{queue}") as mq:
        assert dead not in await drained(mq)
        with pytest.raises(postroom.UnknownTopic):  # nor is there a dead letter
            _ = [message async for message in mq.read("orders.billing.dead")]


# ---- clients that were connected while the queue went back ----


async def test_clients_go_on_with_a_queue_that_went_back(tmp_path: Path) -> None:
    """Sequences of producers and ids go back with the log; leases of what is gone are lost."""
    queue, url = tmp_path / "q.db", f"sqlite:///{tmp_path}/q.db"
    async with postroom.connect(url) as host:
        await host.create_topic("orders", partitions=1, dedup_window="1h")
        served = await host.serve("127.0.0.1", 0)
        port = int(served.url.rpartition(":")[2])
        client = await postroom.connect(served.url)
        await client.send("orders", b"kept", id="kept")
        await back_up(url, tmp_path / "copy")
        for n in range(3):
            await client.send("orders", b"lost", id=f"lost-{n}")
        consumer = await client.consumer("orders", "billing").__aenter__()
        held = await consumer.poll(wait=20)
        while len(held) < 4:
            held += await consumer.poll(wait=20)
        await served.close()
    restore(tmp_path / "copy", queue)
    async with postroom.connect(url) as host:
        served = await host.serve("127.0.0.1", port)
        again = await client.send("orders", b"again", id="lost-1", timeout=SECONDS)
        kept = await client.send("orders", b"kept", id="kept", timeout=SECONDS)
        assert (again.offset, again.duplicate) == (1, False)  # its first try is gone
        assert (kept.offset, kept.duplicate) == (0, True)
        assert [message.value async for message in client.read("orders")] == [b"kept", b"again"]
        await consumer.close()
        assert sorted(await drained(client)) == [b"again", b"kept"]
        await client.close()
        await served.close()


# ---- servers ----


@contextmanager
def restored(server: Server) -> Iterator[str]:
    name = server.create_database()
    yield name
    server.drop_database(name)


def run(*command: str | Path, password: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "PGPASSWORD": password, "MYSQL_PWD": password}
    return subprocess.run(command, env=env, check=True, timeout=SECONDS, **options)  # type: ignore[call-overload,no-any-return]


def dump_and_restore(ground: Ground, name: str, file: Path) -> None:
    server = ground.server
    where = ["--host=127.0.0.1", f"--port={server.port}"]
    if isinstance(server, MariaServer):
        where += [f"--user={server.user}", "--protocol=tcp"]
        dump = run(
            "mariadb-dump", *where, "--single-transaction", ground.name,
            password=server.password, stdout=subprocess.PIPE,
        )  # fmt: skip
        run("mariadb", *where, name, password=server.password, input=dump.stdout)
    else:
        where += [f"--username={server.user}", "--no-password"]
        run("pg_dump", *where, "--format=custom", f"--file={file}", ground.name, password=server.password)
        run("pg_restore", *where, "--no-owner", "--exit-on-error", f"--dbname={name}", file,
            password=server.password)  # fmt: skip


async def test_a_dump_of_a_database_in_use_is_one_moment(ground: Ground, tmp_path: Path) -> None:
    if shutil.which("mariadb-dump" if isinstance(ground.server, MariaServer) else "pg_dump") is None:
        pytest.skip("the server's own programs are not in PATH")
    confirmed, busy = list[bytes](), asyncio.Event()

    async def send(mq: Connection) -> None:
        for n in range(10**9):
            await mq.send("orders", b"%d" % n)
            confirmed.append(b"%d" % n)
            if n == 50:
                busy.set()

    async with postroom.connect(ground.url) as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.create_group("orders", "billing")
        await mq.send_many("orders", [Message(b"settled") for _ in range(3)])
        assert await drained(mq) == [b"settled"] * 3
        sending = asyncio.create_task(send(mq))
        with restored(ground.server) as name:
            await asyncio.wait_for(busy.wait(), SECONDS)
            before = list(confirmed)
            await asyncio.to_thread(dump_and_restore, ground, name, tmp_path / "dump")
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            async with postroom.connect(ground.server.url(name)) as copy:
                found = await drained(copy)
    assert set(before) <= set(found) and b"settled" not in found
