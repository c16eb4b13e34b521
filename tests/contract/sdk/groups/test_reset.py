"""A reset moves the partitions that it names, and says what that means (R12, I10)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import postroom
from postroom import Connection, Consumer, InvalidSetting, Message, PartitionReset, Received
from postroom.clock import ManualClock
from postroom.model.messages.slot import slot_of
from tests.contract.stores import everywhere, only_file

WAIT = 20


async def fill(mq: Connection, each: int, partitions: int = 3) -> None:
    await mq.create_topic("orders", partitions=partitions)
    for piece in (await mq.route("orders")).ranges:
        for number in range(each):
            await mq.send("orders", b"%d" % number, slot=piece.first_slot)


async def take(consumer: Consumer, count: int) -> list[Received]:
    found: list[Received] = []
    while len(found) < count:
        messages = await consumer.poll(wait=WAIT)
        assert messages, f"{len(found)} of {count} came"
        found += messages
    return found


def places(messages: list[Received]) -> list[tuple[int, int]]:
    return sorted((message.partition, message.offset) for message in messages)


async def committed(mq: Connection, group: str = "billing") -> dict[int, int]:
    return {line.partition: line.committed for line in (await mq.lag("orders", group)).partitions}


@everywhere
async def test_offsets_move_the_partitions_that_they_name(mq: Connection) -> None:
    await fill(mq, 6)
    async with mq.consumer("orders", "billing") as consumer:
        await consumer.ack(await take(consumer, 18))
    plan = await mq.reset("orders", "billing", to={2: 1}, dry_run=True)
    assert plan.dry_run and plan.partitions == (
        PartitionReset("billing", 0, 6, 6, 0, 0, moved=False),
        PartitionReset("billing", 1, 6, 6, 0, 0, moved=False),
        PartitionReset("billing", 2, 6, 1, 5, 0),
    )
    assert await committed(mq) == {0: 6, 1: 6, 2: 6}  # nothing was done
    done = await mq.reset("orders", "billing", to={2: 1})
    assert (done.partitions, done.again, done.skipped, done.dry_run) == (plan.partitions, 5, 0, False)
    assert done.name == "billing" and done.settings.mode == "shared"
    assert await committed(mq) == {0: 6, 1: 6, 2: 1}
    async with mq.consumer("orders", "billing") as consumer:
        assert places(await take(consumer, 5)) == [(2, n) for n in range(1, 6)]


@everywhere
async def test_what_is_unsettled_elsewhere_stays_so(mq: Connection) -> None:
    """In flight it can be acked, and what waits for a retry comes again with its attempt counted."""
    await fill(mq, 3, partitions=2)
    async with mq.consumer("orders", "billing") as consumer:
        held = {(m.partition, m.offset): m for m in await take(consumer, 6)}
        await held.pop((0, 0)).retry(delay=0)
        plan = await mq.reset("orders", "billing", to={1: 2}, force=True)
        assert [(line.partition, line.again, line.skipped) for line in plan.partitions] == [
            (0, 0, 0),
            (1, 0, 2),
        ]
        await held[0, 1].ack()
        with pytest.raises(postroom.LeaseLost):
            await held[1, 2].ack()
        again = await take(consumer, 2)
        assert [(m.partition, m.offset, m.attempt) for m in sorted(again, key=lambda m: m.partition)] == [
            (0, 0, 2),
            (1, 2, 1),
        ]
        await consumer.ack([*again, held[0, 2]])
        assert (await mq.lag("orders", "billing")).total.messages == 0


async def test_a_lease_is_kept_elsewhere(mq: Connection) -> None:
    """The heart goes on beating for what is in flight: it is not handed to anybody else."""
    await fill(mq, 1, partitions=2)
    async with mq.consumer("orders", "billing", lease=1) as consumer:
        held = {m.partition: m for m in await take(consumer, 2)}
        await mq.reset("orders", "billing", to={1: 1}, force=True)
        await held[0].extend()
        assert await consumer.poll(wait=0) == []
        await held[0].ack()
        assert (await mq.lag("orders", "billing")).total.messages == 0


@everywhere
async def test_ordered_groups_with_successors(mq: Connection) -> None:
    """I10: successors wait until what was rewound is read again, and go on where they were."""
    await mq.create_topic("orders", partitions=1)
    keys = [f"k{n}" for n in range(8)]
    await mq.send_many("orders", [Message(b"old", key=key) for key in keys])
    async with mq.consumer("orders", "billing", mode="ordered") as consumer:
        await consumer.ack(await take(consumer, 8))
        await mq.split("orders", 0)
        await mq.send_many("orders", [Message(b"new", key=key) for key in keys])
        held = await take(consumer, 8)
        settled, open_ = held[:3], held[3:]
        await consumer.ack(settled)
        plan = await mq.reset("orders", "billing", to={0: 6}, force=True)
        assert [(line.partition, line.moved) for line in plan.partitions] == [
            (0, True),
            (1, False),
            (2, False),
        ]
        with pytest.raises(postroom.LeaseLost):
            await consumer.ack(open_)
        again = await take(consumer, 2)
        assert places(again) == [(0, 6), (0, 7)]
        await consumer.ack(again)
        rest = await take(consumer, len(open_))
        assert places(rest) == places(open_)
        await consumer.ack(rest)
        assert (await mq.lag("orders", "billing")).total.messages == 0


async def test_a_merged_partition_waits_for_the_one_that_is_read_again(mq: Connection) -> None:
    await fill(mq, 2, partitions=2)
    async with mq.consumer("orders", "billing", mode="ordered") as consumer:
        await consumer.ack(await take(consumer, 4))
        await mq.merge("orders", 0, 1)
        await mq.send("orders", b"new")
        await consumer.ack(await take(consumer, 1))
        await mq.send("orders", b"newest")
    await mq.reset("orders", "billing", to={1: 1})
    async with mq.consumer("orders", "billing") as consumer:
        (first,) = await take(consumer, 1)
        assert (first.partition, first.offset) == (1, 1)
        await first.ack()
        (second,) = await take(consumer, 1)
        assert second.value == b"newest"


async def test_broadcast_members_move_there_alone(mq: Connection) -> None:
    await fill(mq, 2, partitions=2)
    for name in ("ann", "bob"):
        async with mq.consumer("orders", "cache", mode="broadcast", member=name) as consumer:
            await consumer.ack(await take(consumer, 4))
    plan = await mq.reset("orders", "cache", to={1: 0})
    assert [
        (line.group, line.partition, line.before, line.after, line.again) for line in plan.partitions
    ] == [
        ("cache@ann", 0, 2, 2, 0),
        ("cache@ann", 1, 2, 0, 2),
        ("cache@bob", 0, 2, 2, 0),
        ("cache@bob", 1, 2, 0, 2),
    ]
    async with mq.consumer("orders", "cache", member="bob") as consumer:
        assert places(await take(consumer, 2)) == [(1, 0), (1, 1)]
        assert await consumer.poll(wait=0) == []


async def test_a_plan_counts_what_was_settled_out_of_turn(mq: Connection) -> None:
    await fill(mq, 10, partitions=1)
    async with mq.consumer("orders", "billing") as consumer:
        held = await consumer.poll(6, wait=WAIT)
        await consumer.ack([held[1], held[2], held[4]])

    async def counts(offset: int) -> tuple[int, int]:
        plan = await mq.reset("orders", "billing", to={0: offset}, dry_run=True)
        return plan.again, plan.skipped

    assert [await counts(n) for n in (0, 1, 3, 5, 8, 10)] == [(3, 0), (3, 1), (1, 1), (0, 2), (0, 5), (0, 7)]
    assert (await mq.reset("orders", "billing", to="latest", dry_run=True)).skipped == 7
    assert (await mq.reset("orders", "billing", to="earliest", dry_run=True)).again == 3


@everywhere
async def test_places_that_are_not_there(mq: Connection) -> None:
    await fill(mq, 4, partitions=2)
    await mq.create_group("orders", "billing", start={0: 2, 1: 2})
    cases = {
        "topic 'orders' has no partition 7; it has 0, 1": {0: 1, 7: 0},
        "partition 1 of topic 'orders' ends at offset 4, and 5 is beyond it: choose 4": {1: 5},
    }
    for sentence, to in cases.items():
        for dry_run in (True, False):
            with pytest.raises(InvalidSetting, match=sentence):
                await mq.reset("orders", "billing", to=to, dry_run=dry_run)
    await mq.purge("orders")
    with pytest.raises(InvalidSetting, match=r"partition 0 .* begins at offset 4, and 3 is not"):
        await mq.reset("orders", "billing", to={0: 3})
    assert (await mq.reset("orders", "billing", to={0: 4})).skipped == 0


@only_file
async def test_a_moment_in_the_future(mq: Connection, clock: ManualClock) -> None:
    await fill(mq, 1, partitions=1)
    now = datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
    soon, later = now + timedelta(seconds=5), now + timedelta(hours=1)
    await mq.create_group("orders", "billing", start=soon)  # a clock that is a little ahead
    with pytest.raises(InvalidSetting, match=r"to=.* is in the future.*use 'latest'"):
        await mq.reset("orders", "billing", to=later)
    with pytest.raises(InvalidSetting, match=r"start=.* is in the future.*use 'latest'"):
        await mq.create_group("orders", "other", start=later)
    with pytest.raises(InvalidSetting, match=r"start=.* is in the future"):
        async with mq.consumer("orders", "other", start=later):
            pass
    with pytest.raises(InvalidSetting, match=r"start=.* is in the future"):
        [message async for message in mq.read("orders", start=later)]
    with pytest.raises(InvalidSetting, match=r"at=.* is in the future"):
        await mq.offsets("orders", at=later)
    assert [m.value async for m in mq.read("orders", end=later)] == [b"0"]  # all there is until then
    assert [group.name for group in await mq.groups("orders")] == ["billing"]


async def test_a_successor_on_another_shard(tmp_path: Path) -> None:
    """R6, I10: the gate that closes again is on one database, and what it waits for on the other."""
    url, shards = f"sqlite:///{tmp_path}/first.db", {"b": f"sqlite:///{tmp_path}/second.db"}
    async with postroom.connect(url, shards=shards) as mq:
        await fill(mq, 3, partitions=2)
        there = next(piece for piece in (await mq.route("orders")).ranges if piece.shard == "b")
        async with mq.consumer("orders", "billing", mode="ordered") as consumer:
            await consumer.ack(await take(consumer, 6))
            route = await mq.move("orders", there.partition, shard="first")
            (moved,) = [piece for piece in route.ranges if piece.first_slot == there.first_slot]
            keys = (f"k{n}" for n in range(1000))  # of their own: a key waits for what was before it
            mine = [key for key in keys if there.first_slot <= slot_of(key.encode()) <= there.last_slot]
            await mq.send_many("orders", [Message(b"new", key=key) for key in mine[:4]])
            held = sorted(await take(consumer, 4), key=lambda message: message.offset)
            await consumer.ack(held[:1])
            await mq.reset("orders", "billing", to={there.partition: 1}, force=True)
            with pytest.raises(postroom.LeaseLost):
                await consumer.ack(held[1:])
            again = await take(consumer, 2)
            assert places(again) == [(there.partition, 1), (there.partition, 2)]
            await consumer.ack(again)
            rest = await take(consumer, 3)
            assert places(rest) == [(moved.partition, n) for n in (1, 2, 3)]


def test_the_same_without_await(tmp_path: Path) -> None:
    with postroom.sync.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        mq.create_topic("orders", partitions=2)
        mq.create_group("orders", "billing")
        plan = mq.reset("orders", "billing", to={1: 0}, dry_run=True)
        assert [(line.partition, line.moved) for line in plan.partitions] == [(0, False), (1, True)]
