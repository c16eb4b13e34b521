"""DeleteRecords: what lies before an offset is gone for every client, also over a move; the rest stays."""

from __future__ import annotations

from pathlib import Path

import pytest

import postroom
from postroom import Connection
from postroom.kafka.apis import Code
from tests.kafka.integration.share.client import asked
from tests.kafka.integration.share.test_bad_share import logged_in
from tests.kafka.integration.test_access import allow
from tests.kafka.integration.test_bad_input import Wire, connected


async def deleted(
    wire: Wire, before: int, *, topic: str = "orders", partition: int = 0, version: int = 2
) -> tuple[int, int]:
    """Where the log starts after that, and the code."""
    partitions = [{"partition_index": partition, "offset": before}]
    asking = {"topics": [{"name": topic, "partitions": partitions}], "timeout": 1000}
    found = await asked(wire, 21, version, asking)
    [one] = found.topics[0].partitions
    return one.low_watermark, int(one.error_code)


async def kept(mq: Connection) -> list[bytes]:
    return [one.value async for one in mq.read("orders")]


async def fetched(wire: Wire, offset: int) -> int:
    """The code of a fetch from there on."""
    partition = {
        "partition": 0, "current_leader_epoch": -1, "fetch_offset": offset, "last_fetched_epoch": -1,
        "log_start_offset": -1, "partition_max_bytes": 1_000_000,
    }  # fmt: skip
    asking = {
        "max_wait": 0, "min_bytes": 0, "max_bytes": 1_000_000, "isolation_level": 0, "session_id": 0,
        "session_epoch": -1, "topics": [{"topic": "orders", "partitions": [partition]}],
        "forgotten_topics_data": (), "rack_id": "",
    }  # fmt: skip
    return int((await asked(wire, 1, 12, asking)).responses[0].partitions[0].error_code)


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_what_lies_before_an_offset_is_gone(queue: Connection, address: str, version: int) -> None:
    await queue.create_topic("orders", kafka_partitions=1)
    await queue.create_group("orders", "billing")
    for number in range(10):
        await queue.send("orders", b"%d" % number)
    async with connected(address) as wire:
        assert await fetched(wire, 0) == 0
        assert await deleted(wire, 4, version=version) == (4, 0)
        assert await kept(queue) == [b"4", b"5", b"6", b"7", b"8", b"9"]
        assert (await queue.lag("orders", "billing")).total.messages == 6
        assert await fetched(wire, 3) == Code.OFFSET_OUT_OF_RANGE and await fetched(wire, 4) == 0
        assert await deleted(wire, 2) == (4, 0), "what is gone stays gone"
        assert await deleted(wire, -1) == (10, 0), "all of it"
        assert await kept(queue) == []
        for wrong in (11, -2, 2**62):
            assert await deleted(wire, wrong) == (-1, Code.OFFSET_OUT_OF_RANGE)
        for unknown in ({"topic": "unknown"}, {"partition": 1}, {"partition": -1}):
            assert await deleted(wire, 0, **unknown) == (-1, Code.UNKNOWN_TOPIC_OR_PARTITION)  # type: ignore[arg-type]
    await queue.send("orders", b"new")
    assert await kept(queue) == [b"new"]


async def test_what_lies_before_an_offset_is_gone_over_a_move(tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db", shards={"other": other}) as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        await mq.send("orders", b"before")
        await mq.send("orders", b"last before")
        await mq.move("orders", 0, shard=None)
        await mq.send("orders", b"after")
        await mq.send("orders", b"last")
        async with await mq.serve(port=0, kafka=0) as served, connected(str(served.kafka)) as wire:
            assert await deleted(wire, 1) == (1, 0)
            assert await kept(mq) == [b"last before", b"after", b"last"]
            assert await deleted(wire, 3) == (3, 0)
            assert await kept(mq) == [b"last"]
            assert await fetched(wire, 2) == Code.OFFSET_OUT_OF_RANGE and await fetched(wire, 3) == 0


async def test_whoever_may_not_manage_a_topic_deletes_nothing(tmp_path: Path) -> None:
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        await mq.send("orders", b"paid")
        token = allow(mq, "consume:orders", "send:orders")
        async with await mq.serve(port=0, token="pst_other", kafka=0) as served:
            async with connected(str(served.kafka)) as wire:
                await logged_in(wire, token)
                assert await deleted(wire, -1) == (-1, Code.TOPIC_AUTHORIZATION_FAILED)
                assert await kept(mq) == [b"paid"]
            async with connected(str(served.kafka)) as wire:
                await logged_in(wire, "pst_other")
                assert await deleted(wire, -1) == (1, 0)
                assert [one.action for one in await mq.audit_log(topic="orders")][:1] == ["delete_records"]
