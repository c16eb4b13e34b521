"""Offsets never go back (R6): a failover that lost commits, or a restored copy, stops the queue."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import postroom
from postroom import StoreCorrupt
from postroom.store.sql.log.log import Ends
from postroom.store.sql.session import Area
from tests.ready import Ground
from tests.tuned import Tune

LOST = (
    "UPDATE postroom_partitions SET next_offset = 5",
    "DELETE FROM postroom_log_{id} WHERE base_offset >= 5",
)


async def _notices(url: str, lose: object) -> None:
    async with postroom.connect(url, migrate=True) as mq, postroom.connect(url) as reader:
        await mq.create_topic("orders", partitions=1)
        for number in range(10):
            await mq.send("orders", b"%d" % number)
        async with reader.consumer("orders", "billing", window=4) as consumer:
            held = await consumer.poll(4, wait=20)
            assert len(held) == 4 and (await reader.topic("orders")).messages == 10
            assert len([message async for message in reader.read("orders")]) == 10
            place = (await mq.route("orders")).ranges[0].partition_id
            assert callable(lose)
            lose([statement.format(id=place) for statement in LOST])
            with pytest.raises(StoreCorrupt, match="older than it was"):
                await mq.send("orders", b"more", timeout=20)
            await consumer.ack(held)
            with pytest.raises(StoreCorrupt, match="older than it was"):
                await consumer.poll(wait=20)
    async with postroom.connect(url) as mq:  # somebody has decided
        assert (await mq.send("orders", b"more")).offset == 5


async def test_a_file_that_was_restored_under_a_running_process(tmp_path: Path) -> None:
    def lose(statements: list[str]) -> None:
        with closing(sqlite3.connect(tmp_path / "q.db")) as file, file:
            for statement in statements:
                file.execute(statement)

    await _notices(f"sqlite:///{tmp_path}/q.db", lose)


async def test_a_failover_that_lost_commits(ground: Ground, tune: Tune) -> None:
    tune(store={"flushed_s": 0.0})  # what was read twice counts
    await _notices(ground.url, lambda statements: [ground.rows(statement) for statement in statements])


def test_an_end_that_was_only_read_counts_when_it_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """InnoDB shows commits before they are flushed: a crash that takes one back loses nothing confirmed."""
    place, ends = (Area.LOG, 1), Ends(flushed_s=60.0)
    ends.read({place: 104}, flushed=False)
    ends.check(ends.expected([place]), {place: 102})  # a crash came in between
    ends.read({place: 102}, flushed=False)
    ends.read({place: 103}, flushed=False)
    assert ends.expected([place]) == {place: 0}
    monkeypatch.setattr(ends, "_flushed_s", 0.0)  # a while later
    ends.read({place: 105}, flushed=False)
    assert ends.expected([place]) == {place: 102}
    with pytest.raises(StoreCorrupt, match="older than it was"):
        ends.check(ends.expected([place]), {place: 101})


@pytest.mark.parametrize("left", [0, 3])
async def test_of_a_volatile_topic_a_crash_may_forget_the_last_offsets(ground: Ground, left: int) -> None:
    """Nothing stops for that (R3), and none is given twice: whoever saw the last ones knows."""
    async with postroom.connect(ground.url) as mq:
        await mq.create_topic("ticks", partitions=1, storage="volatile")
        before = [await mq.send("ticks", b"old") for _ in range(5)]
        place = (await mq.route("ticks")).ranges[0].partition_id
        assert (await mq.topic("ticks")).messages == 5
        ground.rows(f"UPDATE postroom_partitions SET next_offset = {left}")
        ground.rows(f"DELETE FROM postroom_log_{place}")
        await mq.topic("ticks")
        async with mq.consumer("ticks", "charts", start="earliest") as consumer:
            await consumer.poll(wait=0)
            assert (await mq.send("ticks", b"new")).offset > before[-1].offset
            found: list[bytes] = []  # the cache may still have old ones
            while b"new" not in found:
                found += [message.value for message in await consumer.poll(wait=20)]
