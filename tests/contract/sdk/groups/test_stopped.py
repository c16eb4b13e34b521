"""What stopped can be operated (R23, R20, I10, I12): listed, restarted, skipped, dropped, and keys go on.

Time is moved, never waited for. Members hold their partitions while somebody decides, unless a test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import CatalogError, Connection, Consumer, InvalidSetting, PostroomError, Stopped
from postroom.broker.moves.departures import Mover
from postroom.clock import ManualClock
from tests.contract.stores import embedded, everywhere

STOP: dict[str, Any] = {"mode": "ordered", "exhausted": "stop", "max_attempts": 1, "lease": 30}


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    await connection.create_group("orders", "billing", **STOP)
    return connection


async def send(mq: Connection, *values: str, **more: Any) -> None:
    """The first letter is the key, the whole the id too."""
    for value in values:
        await mq.send("orders", value.encode(), key=value[0], id=value, **more)


def consuming(mq: Connection, name: str = "ann") -> Consumer:
    return mq.consumer("orders", "billing", member=name)


async def handle(consumer: Consumer, count: int, failing: str = "") -> list[str]:
    """The values of so many messages; those named fail, the others are acked."""
    found: list[str] = []
    while len(found) < count:
        messages = await consumer.poll(max_messages=1, wait=20)
        assert messages, f"only {found} of {count} came"
        found.append(messages[0].value.decode())
        if found[-1] in failing.split():
            await messages[0].retry(reason=f"{found[-1]} is broken")
        else:
            await messages[0].ack()
    return found


@asynccontextmanager
async def stopped_keys(mq: Connection, clock: ManualClock) -> AsyncIterator[Consumer]:
    """a1 and b1 have stopped; a2, a3 and b2 wait behind them in the hands of ann; c1 was handled."""
    await send(mq, "a1", "b1", "a2", "c1", "b2", "a3")
    async with consuming(mq) as ann:
        assert sorted(await handle(ann, 3, "a1 b1")) == ["a1", "b1", "c1"]
        yield ann


def ids(stopped: list[Stopped]) -> list[str]:
    return [one.id for one in stopped]


# ---- listing ----


@everywhere
async def test_what_stopped_is_listed_with_all_there_is_to_know(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"a1", key="a", id="a1", headers={"kind": "refund"})
    sent = clock.now_ms()
    clock.advance(5)
    failed = clock.now_ms()
    async with consuming(mq) as ann:
        await handle(ann, 1, "a1")
        await send(mq, "a2", "b1", "a3")
        assert await handle(ann, 1) == ["b1"]
        clock.advance(60)
        (one,) = await mq.stopped("orders", "billing")
    assert (one.topic, one.group, one.partition, one.offset) == ("orders", "billing", 0, 0)
    assert (one.id, one.key, one.value, dict(one.headers)) == ("a1", b"a", b"a1", {"kind": b"refund"})
    assert (one.timestamp, one.reason, one.attempts) == (sent, "a1 is broken", 1)
    assert (one.since, one.behind, one.more_behind) == (failed, 2, False)
    lag = await mq.lag("orders", "billing")
    assert (lag.total.stopped, lag.total.stopped_age_ms) == (1, 60_000)
    assert await mq.stopped("orders", "billing", limit=5) == [one]


async def test_a_list_has_a_limit_and_the_longest_wait_first(mq: Connection, clock: ManualClock) -> None:
    async with consuming(mq) as ann:
        for value in ("c1", "a1", "b1"):
            await send(mq, value)
            await handle(ann, 1, value)
            clock.advance(1)
        assert ids(await mq.stopped("orders", "billing")) == ["c1", "a1", "b1"]
        assert len(await mq.stopped("orders", "billing", limit=2)) == 2
        with pytest.raises(InvalidSetting, match="limit=0: a whole number from 1 up"):
            await mq.stopped("orders", "billing", limit=0)


async def test_more_than_fits_into_one_answer_is_listed(mq: Connection) -> None:
    """Answers are bounded in bytes, and what is large is no reason to miss the rest."""
    large = bytes(900_000)
    for number in range(12):
        await mq.send("orders", large, key=f"k{number}", id=f"m{number}")
    async with consuming(mq) as ann:
        for _ in range(12):
            (message,) = await ann.poll(max_messages=1, wait=20)
            await message.retry()
        assert sorted(ids(await mq.stopped("orders", "billing"))) == sorted(f"m{n}" for n in range(12))
        assert await mq.drop_stopped("orders", "billing", ids=["m11", "m0"]) == 2


async def test_what_waits_behind_is_counted_up_to_a_bound(
    mq: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.broker.deliver.stopped._COUNTED", 20)
    await send(mq, "a1")
    async with consuming(mq) as ann:
        await handle(ann, 1, "a1")
        await mq.send_many("orders", [postroom.Message(b"a", key="a") for _ in range(15)])
        assert [(s.behind, s.more_behind) for s in await mq.stopped("orders", "billing")] == [(15, False)]
        for _ in range(3):
            await mq.send_many("orders", [postroom.Message(b"a", key="a") for _ in range(15)])
        ((behind, more),) = [(s.behind, s.more_behind) for s in await mq.stopped("orders", "billing")]
    assert more and behind is not None and 15 < behind < 60


async def test_behind_a_stopped_message_the_whole_partition_waits_if_that_is_its_order(
    connection: Connection,
) -> None:
    await connection.create_topic("orders", partitions=1)
    await connection.create_group("orders", "billing", order="partition", **STOP)
    await send(connection, "a1", "b1", "c1")
    async with consuming(connection) as ann:
        assert await handle(ann, 1, "a1") == ["a1"]
        assert [s.behind for s in await connection.stopped("orders", "billing")] == [2]
        await connection.skip_stopped("orders", "billing")
        assert await handle(ann, 2) == ["b1", "c1"]


async def test_where_nothing_stopped_there_is_nothing(mq: Connection) -> None:
    await mq.create_group("orders", "shared")
    await mq.create_group("orders", "everybody", mode="broadcast")
    for group in ("billing", "shared", "everybody"):
        assert await mq.stopped("orders", group) == []
        assert await mq.restart_stopped("orders", group) == 0
        assert await mq.skip_stopped("orders", group) == 0
        assert await mq.drop_stopped("orders", group) == 0
    with pytest.raises(postroom.UnknownGroup):
        await mq.stopped("orders", "nobody")


# ---- deciding, while a live member holds the partition ----


@everywhere
async def test_one_is_restarted_and_the_other_stays(mq: Connection, clock: ManualClock) -> None:
    async with stopped_keys(mq, clock) as ann:
        assert await mq.restart_stopped("orders", "billing", ids=["a1"]) == 1
        assert await handle(ann, 3) == ["a1", "a2", "a3"]
        assert ids(await mq.stopped("orders", "billing")) == ["b1"]
        assert await mq.restart_stopped("orders", "billing", keys=[b"b"]) == 1
        assert await handle(ann, 2) == ["b1", "b2"]
        assert await mq.restart_stopped("orders", "billing") == 0  # once more is harmless
    assert (await mq.lag("orders", "billing")).total.messages == 0


@everywhere
async def test_one_is_skipped_to_the_dead_letters_and_its_key_goes_on(
    mq: Connection, clock: ManualClock
) -> None:
    async with stopped_keys(mq, clock) as ann:
        assert await mq.skip_stopped("orders", "billing", keys=["a"]) == 1
        assert await handle(ann, 2) == ["a2", "a3"]
        assert ids(await mq.stopped("orders", "billing")) == ["b1"]
        (letter,) = await mq.dead_letters("orders", "billing")
        assert (letter.id, letter.reason, letter.attempts) == ("a1", "a1 is broken", 1)
        assert (letter.topic, letter.partition, letter.offset) == ("orders", 0, 0)
        assert await mq.skip_stopped("orders", "billing") == 1
        assert await mq.skip_stopped("orders", "billing") == 0
        assert await handle(ann, 1) == ["b2"]
    assert sorted(letter.id for letter in await mq.dead_letters("orders", "billing")) == ["a1", "b1"]


@everywhere
async def test_one_is_dropped_and_its_key_goes_on(mq: Connection, clock: ManualClock) -> None:
    async with stopped_keys(mq, clock) as ann:
        assert await mq.drop_stopped("orders", "billing", ids=["b1"]) == 1
        assert await handle(ann, 1) == ["b2"]
        assert ids(await mq.stopped("orders", "billing")) == ["a1"]
        await send(mq, "b3", "a4")
        assert await handle(ann, 1) == ["b3"]
        assert await mq.drop_stopped("orders", "billing") == 1
        assert await handle(ann, 3) == ["a2", "a3", "a4"]
    assert (await mq.lag("orders", "billing")).total.messages == 0
    assert await mq.dead_letters("orders", "billing") == []


@everywhere
async def test_its_key_goes_on_at_once_and_not_with_the_next_heartbeat(
    connection: Connection, clock: ManualClock
) -> None:
    await connection.create_topic("orders", partitions=1)
    await connection.create_group("orders", "billing", **STOP | {"lease": 3600})  # heartbeats: 20 minutes
    async with stopped_keys(connection, clock) as ann:
        assert await connection.drop_stopped("orders", "billing", ids=["b1"]) == 1
        assert await handle(ann, 1) == ["b2"]


@everywhere
async def test_they_are_decided_about_while_nobody_holds_the_partition(
    mq: Connection, clock: ManualClock
) -> None:
    async with stopped_keys(mq, clock):
        pass
    assert sorted(ids(await mq.stopped("orders", "billing"))) == ["a1", "b1"]
    assert await mq.drop_stopped("orders", "billing", ids=["a1"]) == 1
    async with consuming(mq, "bob") as bob:
        assert await handle(bob, 2) == ["a2", "a3"]
    assert await mq.skip_stopped("orders", "billing", ids=["b1"]) == 1
    async with consuming(mq, "cat") as cat:
        assert await handle(cat, 1) == ["b2"]


async def test_what_is_at_work_meanwhile_is_handled_once(mq: Connection) -> None:
    """The member that is told to hand over finishes what it has begun."""
    await send(mq, "a1", "b1", "a2", "b2")
    async with consuming(mq) as ann:
        ((a1,), (b1,)) = [await ann.poll(max_messages=1, wait=20) for _ in range(2)]
        await a1.retry(reason="no")
        assert await mq.drop_stopped("orders", "billing", keys=["a"]) == 1
        going_on = asyncio.create_task(handle(ann, 2))
        assert (await asyncio.wait((going_on,), timeout=0.3))[1], "b1 is at work: nobody else may begin"
        await b1.ack()
        assert sorted(await going_on) == ["a2", "b2"]
    assert (await mq.lag("orders", "billing")).total.messages == 0


# ---- what was asked for wrongly ----


@everywhere
async def test_what_matches_nothing_is_named_and_changes_nothing(mq: Connection, clock: ManualClock) -> None:
    async with stopped_keys(mq, clock):
        for verb in (mq.restart_stopped, mq.skip_stopped, mq.drop_stopped):
            with pytest.raises(CatalogError) as unknown:
                await verb("orders", "billing", ids=["a1", "x7", "a2"])
            assert str(unknown.value) == (
                "group 'billing' of topic 'orders' has no stopped message with the id 'a2', 'x7': "
                "stopped() lists those it has; nothing was changed"
            )
            with pytest.raises(CatalogError, match="has no stopped message with the key 'c'"):
                await verb("orders", "billing", keys=["a", "c"])
        assert sorted(ids(await mq.stopped("orders", "billing"))) == ["a1", "b1"]


async def test_a_wrong_choice_is_refused(mq: Connection) -> None:
    for wrong, said in (
        ({"ids": ["a"], "keys": ["a"]}, "give ids= or keys=, not both"),
        ({"ids": "a1"}, "ids is a list, such as ['a1']"),
        ({"keys": b"a"}, "keys is a list, such as [b'a']"),
        ({"keys": [None]}, "keys are str or bytes, not None; one without a key is named by its id"),
    ):
        with pytest.raises(InvalidSetting) as refused:
            await mq.drop_stopped("orders", "billing", **wrong)  # type: ignore[arg-type]
        assert str(refused.value) == said


# ---- elsewhere: retry topics, several partitions, a mover that goes away ----


async def test_what_was_redriven_and_stopped_again_is_operated_too(mq: Connection) -> None:
    """It is in the group's retry topic then, and shows where it was first stored."""
    await send(mq, "a1", "a2")
    async with consuming(mq) as ann:
        await handle(ann, 1, "a1")
        await mq.skip_stopped("orders", "billing")
        assert await handle(ann, 1) == ["a2"]
        assert await mq.redrive("orders", "billing") == 1
        assert await handle(ann, 1, "a1") == ["a1"]
        (one,) = await mq.stopped("orders", "billing")
        assert (one.id, one.topic, one.partition, one.offset) == ("a1", "orders", 0, 0)
        assert await mq.restart_stopped("orders", "billing", ids=["a1"]) == 1
        assert await handle(ann, 1, "a1") == ["a1"]
        assert await mq.skip_stopped("orders", "billing", keys=["a"]) == 1
        assert [letter.id for letter in await mq.dead_letters("orders", "billing")] == ["a1"]
        assert await mq.stopped("orders", "billing") == []


@everywhere
async def test_several_partitions_and_sealed_ones(connection: Connection) -> None:
    """I10: a key that stopped before a split holds the successors, until somebody decides."""
    mq = connection
    await mq.create_topic("orders", partitions=2)
    await mq.create_group("orders", "billing", **STOP)
    keys = "abcdefgh"
    await send(mq, *(f"{key}1" for key in keys))
    async with consuming(mq) as ann:
        await handle(ann, 8, " ".join(f"{key}1" for key in keys))
        await mq.split("orders", 0)
        await send(mq, *(f"{key}2" for key in keys))
        stopped = await mq.stopped("orders", "billing")
        assert sorted(ids(stopped)) == sorted(f"{key}1" for key in keys)
        assert {one.partition for one in stopped} == {0, 1}
        chosen = ids(stopped)
        assert await mq.restart_stopped("orders", "billing", ids=chosen[:3]) == 3
        assert await mq.skip_stopped("orders", "billing", ids=chosen[3:6]) == 3
        assert await mq.drop_stopped("orders", "billing", ids=chosen[6:]) == 2
        found = await handle(ann, 11)
    assert sorted(found) == sorted([*chosen[:3], *(f"{key}2" for key in keys)])
    for one in chosen[:3]:
        assert found.index(one) < found.index(f"{one[0]}2")
    assert sorted(letter.id for letter in await mq.dead_letters("orders", "billing")) == sorted(chosen[3:6])
    assert (await mq.lag("orders", "billing")).total.messages == 0


async def test_what_stopped_on_another_shard(tmp_path: Path) -> None:
    shards = {"b": f"sqlite:///{tmp_path}/b.db"}
    async with postroom.connect(f"sqlite:///{tmp_path}/a.db", shards=shards) as mq:
        await mq.create_topic("orders", partitions=4)
        assert {piece.shard for piece in (await mq.route("orders")).ranges} == {"first", "b"}
        await mq.create_group("orders", "billing", **STOP)
        await send(mq, *(f"{key}{number}" for key in "abcdefgh" for number in (1, 2)))
        async with consuming(mq) as ann:
            found = await handle(ann, 8, " ".join(f"{key}1" for key in "abcdefgh"))
            assert sorted(found) == [f"{key}1" for key in "abcdefgh"]
            stopped = await mq.stopped("orders", "billing")
            assert sorted(ids(stopped)) == sorted(found) and {one.behind for one in stopped} == {1}
            assert len({one.partition for one in stopped}) > 2
            assert await mq.skip_stopped("orders", "billing", keys=list("abcd")) == 4
            assert await mq.drop_stopped("orders", "billing") == 4
            assert sorted(await handle(ann, 8)) == [f"{key}2" for key in "abcdefgh"]
        letters = await mq.dead_letters("orders", "billing")
        assert sorted(letter.id for letter in letters) == ["a1", "b1", "c1", "d1"]


@embedded("its mover is taken away from it")
async def test_a_skip_that_is_cut_off_is_finished_by_whoever_comes_next(
    mq: Connection, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: stamped, and its mover is gone before it has moved anything."""
    async with stopped_keys(mq, clock) as ann:
        with monkeypatch.context() as patch:

            async def gone(*args: Any, **more: Any) -> int:
                raise PostroomError("the broker was killed")

            patch.setattr(Mover, "move", gone)
            with pytest.raises(PostroomError, match="killed"):
                await mq.skip_stopped("orders", "billing", ids=["a1"])
        assert await handle(ann, 2) == ["a2", "a3"]
        assert await mq.dead_letters("orders", "billing") == []
        clock.advance(15)
        await send(mq, "c2")
        assert await handle(ann, 1) == ["c2"]
        letters = await mq.dead_letters("orders", "billing")
        assert [(letter.id, letter.reason) for letter in letters] == [("a1", "a1 is broken")]


async def test_redrive_restarts_all_that_stopped_as_before(mq: Connection, clock: ManualClock) -> None:
    async with stopped_keys(mq, clock) as ann:
        assert await mq.redrive("orders", "billing") == 2
        assert sorted(await handle(ann, 5)) == ["a1", "a2", "a3", "b1", "b2"]


async def test_an_expired_message_that_stopped_is_shown(mq: Connection, clock: ManualClock) -> None:
    """It holds its key all the same."""
    await send(mq, "a1", expires=10)
    async with consuming(mq) as ann:
        await handle(ann, 1, "a1")
        clock.advance(60)
        assert ids(await mq.stopped("orders", "billing")) == ["a1"]
