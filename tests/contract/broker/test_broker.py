"""The broker in this process: what its parts do together that neither the store nor the SDK shows."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postroom.address import Address, parse
from postroom.broker.broker import Broker, open_endpoint
from postroom.broker.deliver.fetch import Wanted
from postroom.broker.duties import DutyRunner
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.endpoint.values import PollReply, PollRequest, Settle, Verdict
from postroom.errors import (
    CorruptBatch,
    GenerationChanged,
    PostroomError,
    SequenceGap,
    StoreBusy,
    StoreFull,
    UnknownPartition,
    UsageError,
)
from postroom.model.messages.batch import BatchBuilder, build_control, records
from postroom.model.policy.settings import GroupWish, TopicSettings
from postroom.store.contract import Append, Appended
from tests.contract.stores import everywhere


def _file(folder: Path) -> Address:
    return Address("sqlite", path=folder / "q.db")


def batch(count: int = 1, producer: int = -1, sequence: int = -1, value: bytes = b"v") -> bytes:
    builder = BatchBuilder()
    builder.extend(1, [(None, value, [])] * count)
    return builder.build(producer, 0 if producer >= 0 else -1, sequence)


@pytest.fixture
async def broker(any_url: str, clock: ManualClock) -> AsyncIterator[Broker]:
    opened = await open_endpoint(parse(any_url), clock=clock, migrate=True)
    await opened.create_topic("orders", TopicSettings(), 1, False)
    yield opened
    await opened.close()


async def place(broker: Broker) -> int:
    return (await broker.route("orders")).ranges[0].partition_id


async def poll(
    broker: Broker, *, wait_ms: int = 0, messages: int = 100, held: bool = False
) -> tuple[int, PollReply]:
    token = secrets.randbits(62) + 1
    request = PollRequest("orders", "billing", "m", token, messages, 1 << 20, wait_ms, not held)
    return token, await broker.poll(request)


def spans(reply: PollReply) -> list[tuple[int, int]]:
    return [(lease.first, lease.last) for grant in reply.grants for lease in grant.leases]


# ---- writer ----


@everywhere
async def test_concurrent_appends_share_a_commit(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    append = broker.store.log.append

    def counted(appends: Sequence[Append]) -> list[Appended | PostroomError]:
        groups.append(len(appends))
        return append(appends)

    monkeypatch.setattr(broker.store.log, "append", counted)
    there = await place(broker)
    results = await asyncio.gather(*(broker.append("orders", there, batch(3)) for _ in range(50)))
    assert sorted(r.base_offset for r in results) == list(range(0, 150, 3))
    assert sum(groups) == 50
    assert len(groups) < 25


@everywhere
async def test_a_refused_batch_does_not_take_its_neighbours_with_it(broker: Broker) -> None:
    there = await place(broker)
    results = await asyncio.gather(
        broker.append("orders", there, batch(1)),
        broker.append("orders", 999_999, batch(1)),
        broker.append("orders", there, batch(1, producer=5, sequence=7)),
        broker.append("orders", there, batch(1)),
        return_exceptions=True,
    )
    assert isinstance(results[1], UnknownPartition)
    assert isinstance(results[2], PostroomError)
    assert [r.base_offset for r in (results[0], results[3]) if isinstance(r, Appended)] == [0, 1]


async def test_a_failed_transaction_is_run_again_alone_and_in_order(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2, I3: one append that cannot be stored fails alone; what follows it is not let past."""
    append = broker.store.log.append

    def failing(appends: Sequence[Append]) -> list[Appended | PostroomError]:
        if any(b"too big" in a.batch for a in appends):
            raise StoreFull("no space for this one")
        return append(appends)

    monkeypatch.setattr(broker.store.log, "append", failing)
    there = await place(broker)
    results = await asyncio.gather(
        broker.append("orders", there, batch(1, 7, 0)),
        broker.append("orders", there, batch(1, 7, 1, b"too big")),
        broker.append("orders", there, batch(1, 7, 2)),
        broker.append("orders", there, batch(1, 8, 0)),
        return_exceptions=True,
    )
    assert [type(r) for r in results] == [Appended, StoreFull, SequenceGap, Appended]
    fetched = await broker.fetch("orders", there, 0, max_messages=100, max_bytes=1 << 20, wait_ms=0)
    assert fetched.end == 2
    assert sum(b.records for b in fetched.batches) == 2


@everywhere
async def test_caches_change_only_after_a_commit(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: a commit that fails leaves nothing in memory that would answer a retry with success."""
    append, fail = broker.store.log.append, [True]

    def once(appends: Sequence[Append]) -> list[Appended | PostroomError]:
        if fail.pop() if fail else False:
            raise StoreBusy("not now")
        return append(appends)

    monkeypatch.setattr(broker.store.log, "append", once)
    there = await place(broker)
    with pytest.raises(StoreBusy):
        await broker.append("orders", there, batch(2, 7, 0))
    assert not (await broker.fetch("orders", there, 0, max_messages=9, max_bytes=999, wait_ms=0)).batches
    stored = await broker.append("orders", there, batch(2, 7, 0))
    assert (stored.base_offset, stored.duplicate) == (0, False)


async def test_a_corrupt_or_control_batch_is_refused(broker: Broker) -> None:
    there = await place(broker)
    good = batch(3)
    for bad in (good[:-1], good[:-1] + b"?", b"", good + b"x"):
        with pytest.raises(CorruptBatch):
            await broker.append("orders", there, bad)
    with pytest.raises(UsageError):
        await broker.append("orders", there, build_control(64))
    assert (await broker.append("orders", there, good)).base_offset == 0


# ---- deliveries ----


async def test_a_repeated_poll_is_answered_with_the_same_deliveries(tmp_path: Path) -> None:
    """I6: the answer was lost; over all partitions, and nothing more is handed out."""
    broker = await open_endpoint(_file(tmp_path))
    try:
        await broker.create_topic("orders", TopicSettings(), 3, False)
        await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
        for piece in (await broker.route("orders")).ranges:
            await broker.append("orders", piece.partition_id, batch(4))
        request = PollRequest("orders", "billing", "m", 77, 6, 1 << 20, 0, True)
        first, again = await broker.poll(request), await broker.poll(replace(request, repeated=True))
        assert sorted((g.partition, g.leases) for g in first.grants) == sorted(
            (g.partition, g.leases) for g in again.grants
        )
        assert sum(lease.last - lease.first + 1 for g in again.grants for lease in g.leases) == 6
        rest = await broker.poll(replace(request, token=78, messages=100))
        assert sum(lease.last - lease.first + 1 for g in rest.grants for lease in g.leases) == 6
    finally:
        await broker.close()


@everywhere
async def test_a_group_that_is_reset_again_and_again_is_told_not_waited_for(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
    await broker.append("orders", await place(broker), batch(1))
    tries = []

    def always_reset(*args: object, **more: object) -> object:
        tries.append(args)
        raise GenerationChanged("reset meanwhile")

    monkeypatch.setattr(broker.store.progress, "visit", always_reset)
    with pytest.raises(GenerationChanged):
        await poll(broker)
    assert 1 < len(tries) < 20


@everywhere
async def test_every_batch_of_a_redelivery_comes_along(broker: Broker, clock: ManualClock) -> None:
    """Deliveries that end in batches read already, with others between them."""
    await broker.subscribe("orders", "billing", GroupWish(lease_ms=1000), "m", "c")
    there = await place(broker)
    for _ in range(3):
        await broker.append("orders", there, batch(10))
    token, reply = await poll(broker, messages=23)
    assert spans(reply) == [(0, 22)]
    verdicts = (Verdict("release", 0, 3), Verdict("retry", 4, 22))
    assert not (await broker.settle("orders", "billing", [Settle("orders", there, token, verdicts)])).lost
    _, reply = await poll(broker)
    (grant,) = reply.grants
    assert sorted(spans(reply)) == [(0, 3), (4, 22), (23, 29)]
    assert [b.base_offset for b in grant.batches] == [0, 10, 20]


# ---- waiters ----


async def test_a_long_poll_wakes_at_an_append(broker: Broker) -> None:
    await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
    waiting = asyncio.create_task(poll(broker, wait_ms=20_000))
    await asyncio.sleep(0)
    await broker.append("orders", await place(broker), batch(2))
    _, reply = await asyncio.wait_for(waiting, 5)
    assert spans(reply) == [(0, 1)]


@everywhere
async def test_a_long_poll_wakes_when_a_retry_is_due(broker: Broker, clock: ManualClock) -> None:
    await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
    there = await place(broker)
    await broker.append("orders", there, batch(1))
    token, _ = await poll(broker)
    verdict = Verdict("retry", 0, 0, delay_ms=60_000)
    assert not (await broker.settle("orders", "billing", [Settle("orders", there, token, (verdict,))])).lost
    waiting = asyncio.create_task(poll(broker, wait_ms=20_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    clock.advance(60)
    _, reply = await asyncio.wait_for(waiting, 5)
    assert [lease.attempt for lease in reply.grants[0].leases] == [2]


async def test_another_process_wakes_a_long_poll(tmp_path: Path) -> None:
    """Two brokers on one file are as good as two processes: they share nothing but the file."""
    one, other = await open_endpoint(_file(tmp_path)), await open_endpoint(_file(tmp_path))
    try:
        await one.create_topic("orders", TopicSettings(), 1, False)
        await one.subscribe("orders", "billing", GroupWish(), "m", "c")
        waiting = asyncio.create_task(poll(one, wait_ms=20_000))
        await asyncio.sleep(0.05)
        await other.append("orders", await place(other), batch(4))
        _, reply = await asyncio.wait_for(waiting, 5)
        assert spans(reply) == [(0, 3)]
    finally:
        await one.close()
        await other.close()


async def test_a_poll_that_a_send_wakes_asks_the_store_for_nothing_else(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows where the group was left, and what came is in memory."""
    await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
    there = await place(broker)
    await broker.append("orders", there, batch(1))
    await poll(broker)
    monkeypatch.setattr(broker.store.progress, "peek", None)
    for offset in (1, 2):
        waiting = asyncio.create_task(poll(broker, wait_ms=20_000))
        await asyncio.sleep(0.05)
        await broker.append("orders", there, batch(1))
        _, reply = await asyncio.wait_for(waiting, 5)
        assert spans(reply) == [(offset, offset)]


async def test_what_another_process_has_polled_meanwhile_is_not_handed_out_again(tmp_path: Path) -> None:
    """Nor is anything left out: where the group was left here is only a hint."""
    one, other = await open_endpoint(_file(tmp_path)), await open_endpoint(_file(tmp_path))
    try:
        await one.create_topic("orders", TopicSettings(), 1, False)
        await one.subscribe("orders", "billing", GroupWish(), "m", "c")
        there, found = await place(one), []
        for turn in range(20):
            waiting = asyncio.create_task(poll(one, wait_ms=20_000))
            await asyncio.sleep(0.02)
            await one.append("orders", there, batch(2))
            taken = await poll(other, messages=1) if turn % 2 else None  # both are after the same
            _, reply = await asyncio.wait_for(waiting, 5)
            _, rest = await poll(other)
            for some in (reply, rest, *([taken[1]] if taken else [])):
                found += [offset for first, last in spans(some) for offset in range(first, last + 1)]
            await other.append("orders", there, batch(1))  # which one is told of by its watcher, perhaps
            found += [o for first, last in spans((await poll(other))[1]) for o in range(first, last + 1)]
        assert sorted(found) == list(range(60))
    finally:
        await one.close()
        await other.close()


async def cancelled_after_its_grant(
    broker: Broker, polling: Coroutine[Any, Any, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has granted it something, and nobody is there any more to be told."""
    granted, go_on = asyncio.Event(), threading.Event()
    loop, store_visit = asyncio.get_running_loop(), broker.store.progress.visit

    def slow(*args: object, **more: object) -> object:
        result = store_visit(*args, **more)  # type: ignore[arg-type]
        loop.call_soon_threadsafe(granted.set)
        assert go_on.wait(10)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(broker._workers, "_at_once", None)  # it is to take its time
        patch.setattr(broker.store.progress, "visit", slow)
        waiting = asyncio.create_task(polling)
        await granted.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()


async def test_a_cancelled_poll_gives_back_what_it_was_given(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
    await broker.append("orders", await place(broker), batch(5))
    await cancelled_after_its_grant(broker, poll(broker), monkeypatch)
    _, reply = await poll(broker, wait_ms=5000)
    assert [(lease.first, lease.last, lease.attempt) for lease in reply.grants[0].leases] == [(0, 4, 1)]


async def test_a_poll_that_came_late_does_not_give_back_what_its_repetition_was_given(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker stood still with a poll, and the client, which has gone, was answered by another one (I6)."""
    await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
    await broker.append("orders", await place(broker), batch(5))
    request = PollRequest("orders", "billing", "m", 77, 100, 1 << 20, 0, True)
    answered = await broker.poll(replace(request, repeated=True))
    assert spans(answered) == [(0, 4)]
    await broker.append("orders", await place(broker), batch(1))
    await cancelled_after_its_grant(broker, broker.poll(request), monkeypatch)
    await asyncio.gather(*broker._polling._background)
    _, reply = await poll(broker, held=True)
    assert spans(reply) == [(5, 5)]  # the others are in good hands


async def test_another_process_that_hands_back_wakes_a_long_poll(tmp_path: Path) -> None:
    """Again and again, also when releases follow each other closely: none is slept through."""
    one, other = await open_endpoint(_file(tmp_path)), await open_endpoint(_file(tmp_path))
    try:
        await one.create_topic("orders", TopicSettings(), 1, False)
        await one.subscribe("orders", "billing", GroupWish(), "m", "c")
        there = await place(one)
        await one.append("orders", there, batch(1))
        token, reply = await poll(other, wait_ms=5000)
        for turn in range(40):
            assert spans(reply) == [(0, 0)]
            taker, giver = (one, other) if turn % 2 == 0 else (other, one)
            waiting = asyncio.create_task(poll(taker, wait_ms=20_000))
            await asyncio.sleep(0.01 if turn < 10 else 0)
            back = Settle("orders", there, token, (Verdict("release", 0, 0),))
            assert not (await giver.settle("orders", "billing", [back])).lost
            token, reply = await asyncio.wait_for(waiting, 5)
    finally:
        await one.close()
        await other.close()


# ---- movers ----


@everywhere
async def test_a_mover_that_died_is_finished_by_the_next_poll(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: crash after the append and before the delete; each dead letter is there once."""
    await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
    there = await place(broker)
    await broker.append("orders", there, batch(3))
    token, _ = await poll(broker)
    settle, calls = broker.store.progress.visit, []

    def dies_after_the_append(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:  # the first stamped them
            raise StoreBusy("the mover died here")
        return settle(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(broker.store.progress, "visit", dies_after_the_append)
    verdicts = (
        Verdict("dead", 0, 0, reason="bad"),
        Verdict("ack", 1, 1),
        Verdict("dead", 2, 2, reason="sad"),
    )
    assert not (await broker.settle("orders", "billing", [Settle("orders", there, token, verdicts)])).lost
    assert len(calls) == 2
    assert (await broker.lag("orders", "billing")).total.messages == 2
    clock.advance(11)
    assert spans((await poll(broker))[1]) == []
    assert (await broker.lag("orders", "billing")).total.messages == 0
    (letters,) = await broker.dead_letters("orders", "billing", 10)
    found = [r for b in letters.batches for r in records(b.data)]
    assert [dict(r.headers)["postroom-reason"] for r in found] == [b"bad", b"sad"]


@everywhere
async def test_those_that_die_together_are_moved_together(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a reason and an identity of its own; the source is read once for all, and they are settled at
    once, in their order."""
    await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
    there = await place(broker)
    await broker.append("orders", there, batch(40))
    token, _ = await poll(broker)
    settle, calls = broker.store.progress.visit, []
    read, reads = broker._mover._read, []
    monkeypatch.setattr(broker.store.progress, "visit", lambda *args: calls.append(args) or settle(*args))
    monkeypatch.setattr(broker._mover, "_read", lambda *args: reads.append(args) or read(*args))
    verdicts = tuple(Verdict("dead", at, at, reason=f"no {at}") for at in range(40))
    assert not (await broker.settle("orders", "billing", [Settle("orders", there, token, verdicts)])).lost
    assert (len(calls), len(reads)) == (2, 1)  # stamped, and settled
    (letters,) = await broker.dead_letters("orders", "billing", 100)
    found = [r for b in letters.batches for r in records(b.data)]
    assert [dict(r.headers)["postroom-reason"] for r in found] == [b"no %d" % at for at in range(40)]
    assert (await broker.lag("orders", "billing")).total.messages == 0


@everywhere
async def test_redrive_is_for_that_group_alone_and_can_be_repeated(broker: Broker) -> None:
    for group in ("billing", "audit"):
        await broker.subscribe("orders", group, GroupWish(), "m", "c")
    there = await place(broker)
    await broker.append("orders", there, batch(5))
    token, _ = await poll(broker)
    verdicts = (Verdict("ack", 0, 1), Verdict("dead", 2, 3, reason="bad"), Verdict("ack", 4, 4))
    await broker.settle("orders", "billing", [Settle("orders", there, token, verdicts)])
    [letters] = await broker.dead_letters("orders", "billing", 10)
    assert await broker.redrive("orders", "billing", [(letters.partition_id, 1)]) == 1
    assert await broker.redrive("orders", "billing", None) == 1
    assert await broker.redrive("orders", "billing", None) == 0
    _, reply = await poll(broker)
    assert {grant.topic for grant in reply.grants} == {"orders.billing.retry"}
    assert sum(last - first + 1 for first, last in spans(reply)) == 2
    assert (await broker.lag("orders", "audit")).total.messages == 5


async def test_discarded_letters_are_gone(broker: Broker) -> None:
    await broker.subscribe("orders", "billing", GroupWish(), "m", "c")
    there = await place(broker)
    await broker.append("orders", there, batch(4))
    token, _ = await poll(broker)
    await broker.settle("orders", "billing", [Settle("orders", there, token, (Verdict("dead", 0, 3),))])
    [letters] = await broker.dead_letters("orders", "billing", 10)
    assert (
        await broker.discard("orders", "billing", [(letters.partition_id, 0), (letters.partition_id, 2)]) == 2
    )
    (letters,) = await broker.dead_letters("orders", "billing", 10)
    assert letters.open == ((1, 1), (3, 3))
    assert await broker.discard("orders", "billing", None) == 2
    assert (await broker.dead_letters("orders", "billing", 10))[0].open == ()


# ---- duties ----


async def run_duties(broker: Broker) -> None:
    for duty in broker.duties._duties:
        assert broker.duties.run_once(duty)


@everywhere
async def test_retention_keeps_what_a_group_needs(broker: Broker, clock: ManualClock) -> None:
    there = await place(broker)
    await broker.alter_topic("orders", TopicSettings(retention_ms=1000))
    await broker.create_group("orders", "billing", GroupWish())
    for _ in range(10):
        await broker.append("orders", there, batch(10))
    clock.advance(5)
    await run_duties(broker)
    assert broker.store.log.bounds([there])[there].start == 0
    token, _ = await poll(broker, messages=35)
    await broker.settle("orders", "billing", [Settle("orders", there, token, (Verdict("ack", 0, 34),))])
    await run_duties(broker)
    assert broker.store.log.bounds([there])[there].start == 35
    assert [b.base_offset for b in broker.store.log.read(there, 0, max_messages=10, max_bytes=1)] == [30]
    await broker.alter_topic("orders", TopicSettings(retention_ms=1000, keep="limits"))
    await run_duties(broker)
    assert broker.store.log.bounds([there])[there].start == 100
    assert spans((await poll(broker))[1]) == []


@everywhere
async def test_settled_messages_may_be_dropped_early(broker: Broker) -> None:
    there = await place(broker)
    await broker.alter_topic("orders", TopicSettings(drop_settled=True))
    await broker.create_group("orders", "billing", GroupWish())
    await broker.append("orders", there, batch(10))
    token, _ = await poll(broker)
    await broker.settle("orders", "billing", [Settle("orders", there, token, (Verdict("ack", 0, 6),))])
    await run_duties(broker)
    assert broker.store.log.bounds([there])[there].start == 7


@everywhere
async def test_a_duty_has_one_holder(broker: Broker, clock: ManualClock) -> None:
    duty = broker.duties._duties[0]
    assert broker.store.duties.acquire(duty.name, "somebody else", 1000)
    assert not broker.duties.run_once(duty)
    clock.advance(2)
    assert broker.duties.run_once(duty)
    assert not broker.store.duties.acquire(duty.name, "somebody else", 1000)


async def test_closing_lets_a_running_duty_finish(broker: Broker) -> None:
    """Its thread cannot be cancelled: closing waits, and releases the lease only then."""
    began, go_on, order = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    class Slow:
        name = "slow"
        every_s = 0.0

        def run_once(self) -> None:
            loop.call_soon_threadsafe(began.set)
            assert go_on.wait(10)
            order.append("duty ended")

    runner = DutyRunner(broker.store, [Slow()], "me", DEFAULTS, broker._in_thread)
    await began.wait()
    closing = asyncio.create_task(runner.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    assert not broker.store.duties.acquire("slow", "somebody else", 1000)
    go_on.set()
    await closing
    assert order == ["duty ended"]
    assert broker.store.duties.acquire("slow", "somebody else", 1000)


@everywhere
async def test_a_deleted_topic_leaves_no_tables_behind(broker: Broker) -> None:
    there = await place(broker)
    await broker.append("orders", there, batch(10))
    await broker.delete_topic("orders")
    assert broker.store.catalog.dropped() == [there]
    await run_duties(broker)
    assert broker.store.catalog.dropped() == []
    await broker.create_topic("orders", TopicSettings(), 1, False)
    assert await place(broker) > there


@everywhere
async def test_whoever_reads_by_offsets_from_behind_gets_every_batch_in_order(any_url: str) -> None:
    """Batches that are not in memory are read ahead; a smaller answer leaves nothing out."""
    broker = await open_endpoint(parse(any_url), migrate=True, limits=replace(DEFAULTS, tail_cache_bytes=0))
    try:
        await broker.create_topic("behind", TopicSettings(), 1, False)
        there = (await broker.route("behind")).ranges[0].partition_id
        sizes = [len(batch(7))] * 30
        for _ in sizes:
            await broker.append("behind", there, batch(7))
        at, found, room = 0, list[int](), itertools.cycle((5 * sizes[0], sizes[0], 1, 3 * sizes[0] + 1))
        while at < 7 * len(sizes):
            most = next(room)
            (fetched,) = await broker.fetch_each([Wanted(there, at, most)], most)
            assert sum(len(one.data) for one in fetched.batches) <= max(most, sizes[0])
            found += [one.base_offset for one in fetched.batches]
            at = fetched.batches[-1].last_offset + 1
        assert found == list(range(0, 7 * len(sizes), 7))
    finally:
        await broker.close()


# ---- limits ----


async def test_a_full_writer_queue_slows_and_drops_nothing(tmp_path: Path) -> None:
    broker = await open_endpoint(_file(tmp_path), limits=replace(DEFAULTS, writer_queue_bytes=1000))
    try:
        await broker.create_topic("orders", TopicSettings(), 1, False)
        there = await place(broker)
        results = await asyncio.gather(*(broker.append("orders", there, batch(20)) for _ in range(40)))
        assert sorted(r.base_offset for r in results) == list(range(0, 800, 20))
    finally:
        await broker.close()


async def test_who_has_a_duty_is_not_told_by_an_address(broker: Broker) -> None:
    """One that is freed comes again: the next broker of the process would take the duty for its own."""
    assert not broker._work._holder.endswith(f":{id(broker):x}")
