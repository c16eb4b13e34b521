"""Staging through the SDK: what a job writes is published once, however often it is run again (I20)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

import postroom
from postroom import Connection, Message
from postroom.broker.moves.staged import FinishDecisions
from postroom.client.producer.staging import Staged
from postroom.errors import InvalidSetting, StagingConflict, UnknownTopic, UsageError
from tests.contract.brokers import broker_of
from tests.contract.stores import Open, embedded, everywhere


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=2)
    return connection


async def there(mq: Connection, topic: str = "orders") -> list[bytes]:
    return [message.value async for message in mq.read(topic)]


async def task(
    mq: Connection, query: str, batch: int, values: Sequence[bytes], topic: str = "orders"
) -> Staged:
    segment = mq.staging(query, batch).segment()
    await segment.add(topic, [Message(value, key=value[:1]) for value in values])
    return await segment.close()


@everywhere
async def test_what_is_staged_is_seen_once_it_is_committed(mq: Connection, opened: Open) -> None:
    segments = [
        await task(mq, "job", 0, [b"%c%d" % (97 + n % 7, n) for n in range(t, 3000, 3)]) for t in range(3)
    ]
    assert await there(mq) == []
    published = await mq.staging("job").commit(segments)
    assert (published.done, published.messages) == (True, 3000)
    assert sum(place.messages for place in published.places) == 3000
    assert {place.topic for place in published.places} == {"orders"}
    found = await there(mq)
    assert sorted(found) == sorted(b"%c%d" % (97 + n % 7, n) for n in range(3000))
    for turn in range(3):
        for letter in b"abcdefg":
            mine = [int(v[1:]) for v in found if v[0] == letter and int(v[1:]) % 3 == turn]
            assert mine == sorted(mine)
    async with opened() as other:
        again = [await task(other, "job", 0, [b"%c%d" % (97 + n % 7, n) for n in range(3000)])]
        assert await other.staging("job").commit(again) == published
        assert await other.staging("job").abort(again) == 0  # they were dropped
    assert len(await there(mq)) == 3000


async def test_messages_keep_what_they_are_made_of(mq: Connection) -> None:
    staging = mq.staging("job")
    segment = staging.segment("mine")
    sent = [Message(b"1", key="k", headers={"a": "b"}, id="x"), Message(b"2"), Message(b"", key=b"")]
    await segment.add("orders", sent)
    await segment.add_columns("orders", [b"3"], [b"k"], [[("h", b"v")]])
    segment.saw(1, ["orders"])
    staged = await segment.close()
    assert (staged.segment, staged.messages, staged.rows, staged.topics) == ("mine", 4, 4, ("orders",))
    await staging.commit([staged])
    found = {m.value: m async for m in mq.read("orders")}
    assert (found[b"1"].key, dict(found[b"1"].headers), found[b"1"].id) == (b"k", {"a": b"b"}, "x")
    assert (found[b"2"].key, found[b""].key) == (None, b"")
    assert dict(found[b"3"].headers) == {"h": b"v"}


async def test_consumers_that_wait_are_woken(mq: Connection) -> None:
    segments = [await task(mq, "job", 0, [b"a", b"b"])]
    async with mq.consumer("orders", group="billing") as consumer:
        waiting = asyncio.create_task(consumer.poll(max_messages=2, wait=20))
        await asyncio.sleep(0)
        await mq.staging("job").commit(segments)
        assert await asyncio.wait_for(waiting, 20)


async def test_batches_of_a_query_follow_each_other(mq: Connection) -> None:
    for batch in range(3):
        first = await task(mq, "job", batch, [b"a%d" % batch])
        failed = await task(mq, "job", batch, [b"never"])
        await mq.staging("job", batch).commit([first])
        assert await mq.staging("job", batch).abort([failed, first]) == 1
    assert await there(mq) == [b"a0", b"a1", b"a2"]


async def test_an_empty_batch(mq: Connection) -> None:
    assert (await mq.staging("job").commit([])).messages == 0
    empty = await mq.staging("job").segment().close()
    assert (await mq.staging("job").commit([empty])).done
    nothing = await task(mq, "job", 1, [])
    assert (await mq.staging("job", 1).commit([nothing])).done


async def test_rows_with_source_offsets_may_come_back_with_another_range(mq: Connection) -> None:
    async def run(batch: int, first: int, last: int) -> None:
        staging = mq.staging("job", batch)
        marks = await staging.marks(["orders"])
        segment = staging.segment()
        new = [n for n in range(first, last + 1) if n > marks.get("s", -1)]
        await segment.add_columns("orders", [b"%d" % n for n in new], [b"k"] * len(new))
        segment.saw(last - first + 1, ["orders"], {"s": (first, last)}, {"s": marks.get("s", -1)})
        await staging.commit([await segment.close()])

    for batch, first, last in ((0, 0, 9), (1, 10, 19), (1, 10, 24), (1, 10, 24), (1, 10, 14), (2, 15, 30)):
        await run(batch, first, last)
    assert await there(mq) == [b"%d" % n for n in range(31)]
    assert await mq.staging("job").marks(["orders"]) == {"s": 30}


async def test_rows_without_source_offsets_are_refused_if_they_are_others(mq: Connection) -> None:
    await mq.staging("job").commit([await task(mq, "job", 0, [b"a", b"b"])])
    with pytest.raises(StagingConflict, match="source_partition"):
        await mq.staging("job").commit([await task(mq, "job", 0, [b"a", b"b", b"c"])])
    assert await there(mq) == [b"a", b"b"]


@everywhere
async def test_a_batch_that_comes_again_with_other_content_is_refused(mq: Connection, opened: Open) -> None:
    await mq.staging("job").commit([await task(mq, "job", 0, [b"a", b"b", b"c"])])
    async with opened() as other:
        await other.staging("job").commit(
            [await task(other, "job", 0, some) for some in ([b"c"], [b"b", b"a"])]
        )
        with pytest.raises(StagingConflict, match=r"3 rows, and comes again with as many of other content"):
            await other.staging("job").commit([await task(other, "job", 0, [b"a", b"b", b"x"])])
        staging = other.staging("job", compare=False)
        segment = staging.segment()
        await segment.add("orders", [Message(b"random", key="1") for _ in range(3)])
        await staging.commit([await segment.close()])
    assert sorted(await there(mq)) == [b"a", b"b", b"c"]


async def test_a_split_in_the_middle(mq: Connection) -> None:
    first = await task(mq, "job", 0, [b"%c%d" % (97 + n % 26, n) for n in range(500)])
    await mq.split("orders", 0)
    await mq.staging("job").commit([first])
    found = await there(mq)
    assert len(found) == len(set(found)) == 500


async def test_calls_that_are_wrong(mq: Connection) -> None:
    with pytest.raises(UnknownTopic):
        await task(mq, "job", 0, [b"a"], topic="nowhere")
    with pytest.raises(InvalidSetting, match="query"):
        mq.staging("")
    with pytest.raises(UsageError, match="counted from 0"):
        mq.staging("job", -1)
    with pytest.raises(InvalidSetting, match="printable"):
        mq.staging("job").segment("x" * 121)
    segment = mq.staging("job").segment()
    with pytest.raises(UsageError, match="not delayed"):
        await segment.add("orders", [Message(b"a", delay=1)])
    with pytest.raises(postroom.MessageTooLarge):
        await segment.add_columns("orders", [b"x" * (4 * 1024 * 1024 + 1)])
    await segment.close()
    with pytest.raises(UsageError, match="closed"):
        await segment.add("orders", [Message(b"a")])


async def test_more_than_fits_into_one_call(mq: Connection) -> None:
    segment = mq.staging("job").segment()
    for turn in range(12):
        values = [b"%d.%d." % (turn, n) + bytes(1000 + n) for n in range(500)]
        noise = [value[:8] + hash_of(value) * 30 for value in values]
        await segment.add_columns("orders", noise, [b"%d" % n for n in range(500)])
    segment.saw(6000, ["orders"])
    assert (await mq.staging("job").commit([await segment.close()])).messages == 6000


def hash_of(value: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(value).digest()


@embedded("it looks into the broker")
async def test_what_a_job_left_behind(mq: Connection, clock: postroom.clock.ManualClock) -> None:
    """It was decided, and the job never came back; another one decided nothing."""
    broker = broker_of(mq)
    left = await task(mq, "left", 0, [b"a"])
    await task(mq, "undecided", 0, [b"b"])
    wish = postroom.model.moves.staging.Wish(((left.segment, 1),), 1)
    await broker.decide_staged(["orders"], "left", 0, wish)
    duty = next(one for one in broker.duties._duties if isinstance(one, FinishDecisions))
    clock.advance(120)
    duty.run_once()
    assert await there(mq) == [b"a"]
    clock.advance(2 * 86_400)
    duty.run_once()
    assert broker.store.staging.drop("undecided", 0) == 0


@embedded("the file is opened in a thread")
@pytest.mark.stores("sqlite")
async def test_without_asyncio(any_url: str, tmp_path: Path) -> None:
    def job() -> int:
        with postroom.sync.connect(any_url) as mq:
            mq.create_topic("orders", partitions=2)
            staging = mq.staging("job")
            segment = staging.segment()
            segment.add("orders", [Message(b"a", key="k")])
            segment.saw(0, ["orders"])
            published: postroom.endpoint.values.Published = staging.commit([segment.close()])
            return published.messages

    assert await asyncio.to_thread(job) == 1
