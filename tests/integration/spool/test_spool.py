"""The spool and real queues: killed between every two steps, the broker away and back, changing routes."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.client.forward.forwarder import Trouble
from postroom.client.forward.spool_file import SpoolFile, look
from tests.integration.processes.children import child, drained, received
from tests.integration.spool.spooling import STEPS, fill, fill_and_die, in_order, serve, stored

LONG = 60


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def queue(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


async def _killed(url: str, spool: Path, step: str) -> None:
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic("orders", partitions=2)
    with child(fill_and_die, url, spool, step, 3) as (process, pipe):
        reports = drained(pipe)
        process.join(30)
    assert "it did not die" not in reports
    durable = max(reports, default=0)
    left = look(spool)  # as it was left
    assert left.owner is None and left.messages <= durable + 20
    async with postroom.connect(url) as mq, mq.producer("orders", spool=spool) as producer:
        await fill(producer, 1000, 20)
        assert await producer.forwarded(LONG)
        found = await stored(mq)
    before = [n for n in found if n < 1000]
    assert in_order(found)
    assert sorted(before) == list(range(len(before)))  # nothing is missing in between
    assert len(before) - durable in (0, 20)  # what it had not reported yet may be there, whole
    assert sorted(n for n in found if n >= 1000) == list(range(1000, 1020))


@pytest.mark.parametrize("step", STEPS)
async def test_a_process_that_is_killed_loses_and_doubles_nothing(
    queue: str, tmp_path: Path, step: str
) -> None:
    await _killed(queue, tmp_path / "orders.spool", step)


@pytest.mark.parametrize("step", ["rows are stamped", "messages are appended"])
@pytest.mark.parametrize("server", ["postgres_ready", "mysql_ready"])
async def test_nor_does_it_with_a_database_server(
    request: pytest.FixtureRequest, tmp_path: Path, server: str, step: str
) -> None:
    await _killed(request.getfixturevalue(server), tmp_path / "orders.spool", step)


async def test_a_broker_that_is_killed_and_comes_back(queue: str, tmp_path: Path) -> None:
    port = _free_port()
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders", partitions=2)
    async with postroom.Spool(tmp_path / "orders.spool", f"postroom://127.0.0.1:{port}") as spool:
        producer = spool.producer("orders")
        await fill(producer, 0, 100)  # nobody is there yet
        assert spool.spooled.messages == 100
        for round in range(1, 4):
            with child(serve, queue, port) as (_, pipe):
                received(pipe)
                for first in range(1000 * round, 1000 * round + 1000, 100):
                    await fill(producer, first, 100)  # some of it is on its way when the broker is killed
        await fill(producer, 4000, 100)
        with child(serve, queue, port) as (_, pipe):
            received(pipe)
            assert await spool.forwarded(LONG)
    async with postroom.connect(queue) as mq:
        found = await stored(mq)
    assert in_order(found)
    assert sorted(found) == [*range(100), *range(1000, 4100)]


async def test_a_topic_that_is_split_and_merged_meanwhile(queue: str, tmp_path: Path) -> None:
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders", partitions=1)
        async with mq.producer("orders", spool=tmp_path / "orders.spool") as producer:
            await fill(producer, 0, 5000)
            filling = asyncio.create_task(_keep_filling(producer))
            for step in range(4):
                route = await mq.route("orders")
                if step % 2 == 0:
                    await mq.split("orders", route.ranges[0].partition)
                else:
                    await mq.merge("orders", route.ranges[0].partition, route.ranges[1].partition)
            await filling
            assert await producer.forwarded(LONG)
        found = await stored(mq)
        assert (await mq.route("orders")).version == 5
    assert in_order(found)
    assert sorted(found) == list(range(10_000))


async def _keep_filling(producer: postroom.Producer) -> None:
    for first in range(5000, 10_000, 250):
        await fill(producer, first, 250)


async def test_a_queue_that_is_not_there_at_the_start(queue: str, tmp_path: Path) -> None:
    port = _free_port()
    spool = postroom.Spool(tmp_path / "orders.spool", f"postroom://127.0.0.1:{port}")
    async with spool:
        receipt = await spool.send("orders", b"1", key="1", id="o-1")
        assert (receipt.spooled, receipt.offset, receipt.id) == (True, -1, "o-1")
        async with asyncio.timeout(LONG):
            while not spool.spooled.troubles:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        waiting = spool.spooled
        assert waiting.messages == 1
        assert not waiting.stuck  # it may come at any time
        assert f"127.0.0.1:{port}" in waiting.troubles["orders"].reason
        assert look(tmp_path / "orders.spool").owner is not None
        async with postroom.connect(queue) as mq:
            await mq.create_topic("orders")
            await mq.serve("127.0.0.1", port)
            assert await spool.forwarded(LONG)
            assert spool.spooled.messages == 0
            assert [message.value async for message in mq.read("orders")] == [b"1"]
    assert look(tmp_path / "orders.spool").owner is None


async def test_a_database_that_is_not_there_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    async with postroom.Spool(tmp_path / "orders.spool", f"sqlite:///{folder}/queue.db") as spool:
        await fill(spool.producer("orders"), 0, 10)
        async with asyncio.timeout(LONG):
            while not spool.spooled.troubles:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert spool.connection is None
        assert str(folder) in spool.spooled.troubles[""].reason
        folder.mkdir()
        async with postroom.connect(f"sqlite:///{folder}/queue.db") as mq:
            await mq.create_topic("orders")
            assert await spool.forwarded(LONG)
            assert in_order(await stored(mq))
        assert spool.spooled.troubles == {}


async def test_a_spool_whose_own_disk_is_full_goes_on_looking_for_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why it waits cannot be written down, and later not that it is over."""
    folder, tell, tried = tmp_path / "mounted", SpoolFile.tell, list[str]()

    def full(self: SpoolFile, topic: str, trouble: Trouble | None) -> None:
        tried.append("" if trouble is None else trouble.reason)
        if len(tried) < 3 or (trouble is None and tried.count("") < 3):
            raise postroom.StoreFull("no space")
        tell(self, topic, trouble)

    monkeypatch.setattr(SpoolFile, "tell", full)
    async with postroom.Spool(tmp_path / "orders.spool", f"sqlite:///{folder}/queue.db") as spool:
        await spool.send("orders", b"1")
        async with asyncio.timeout(LONG):
            while not spool.spooled.troubles:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        folder.mkdir()
        async with postroom.connect(f"sqlite:///{folder}/queue.db") as mq:
            await mq.create_topic("orders", exist_ok=True)
            assert await spool.forwarded(LONG)
            assert [message.value async for message in mq.read("orders")] == [b"1"]
        async with asyncio.timeout(LONG):
            while spool.spooled.troubles:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_what_is_left_is_forwarded_by_whoever_opens_the_file_next(queue: str, tmp_path: Path) -> None:
    path = tmp_path / "orders.spool"
    async with postroom.Spool(path, f"postroom://127.0.0.1:{_free_port()}") as spool:
        await fill(spool.producer("orders"), 0, 50)
    assert look(path).messages == 50
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders")
        async with mq.producer("other", spool=path) as producer:
            assert await producer.forwarded(LONG)
        assert in_order(await stored(mq))
    assert look(path)[:3] == (0, 0, 0)


async def test_a_short_program_needs_not_wait(queue: str, tmp_path: Path) -> None:
    """What it sent last is forwarded while it closes, if the queue is there."""
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders")
        async with mq.producer("orders", spool=tmp_path / "orders.spool") as producer:
            await fill(producer, 0, 500)
    assert look(tmp_path / "orders.spool").messages == 0
    async with postroom.connect(queue) as mq:
        assert (await mq.topic("orders")).messages == 500


async def test_a_topic_that_was_deleted_and_made_anew_after_a_stamp(queue: str, tmp_path: Path) -> None:
    path = tmp_path / "orders.spool"
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders", partitions=2)
    with child(fill_and_die, queue, path, "rows are stamped", 1) as (process, pipe):
        drained(pipe)
        process.join(30)
    async with postroom.connect(queue) as mq:
        await mq.delete_topic("orders")
        await mq.create_topic("orders", partitions=3)
        async with mq.producer("orders", spool=path) as producer:
            assert await producer.forwarded(LONG)
        assert sorted(await stored(mq)) == list(range(20))


async def test_before_a_broker_was_reached_messages_have_the_time_of_this_process(
    queue: str, tmp_path: Path
) -> None:
    before_ms = time.time() * 1000
    async with postroom.Spool(tmp_path / "s.spool", f"postroom://127.0.0.1:{_free_port()}") as spool:
        await spool.send("orders", b"1", key="a", expires="1h")
        await spool.send_many("orders", [postroom.Message(b"2", key="a", timestamp=round(before_ms))])
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders")
        async with mq.producer("orders", spool=tmp_path / "s.spool") as producer:
            assert await producer.forwarded(LONG)
        found = [message async for message in mq.read("orders")]
    assert [message.value for message in found] == [b"1", b"2"]
    assert all(before_ms - 1 <= message.timestamp_ms <= time.time() * 1000 for message in found)


async def test_who_stops_waiting_for_the_disk_is_not_told_that_nothing_was_stored(
    queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders", partitions=1)
        async with mq.producer("orders", spool=tmp_path / "orders.spool") as producer:
            writer, held = producer._writer, list[Any]()  # type: ignore[attr-defined]
            with monkeypatch.context() as slow:
                slow.setattr(writer, "add", lambda *args: held.append(args))
                with pytest.raises(postroom.SendTimeout, match="whether it is in the spool") as told:
                    await producer.send(b"1", timeout=0.05)
            assert "stored" not in told.value.details  # it may not be sent again as if it were not there
            writer.add(*held.pop())
            assert await producer.forwarded(LONG)
        assert await stored(mq) == [1]
