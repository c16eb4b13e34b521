"""The forwarder: what it makes of each answer, and what becomes of rows when it is cut off anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from postroom.backoff import Pauses
from postroom.client.forward import forwarder as forwarding
from postroom.client.forward.forwarder import Forwarder, Trouble
from postroom.errors import (
    BrokerUnavailable,
    LeaseLost,
    PermissionDenied,
    PostroomError,
    UnknownPartition,
    UnknownTopic,
)
from postroom.model.moves.forwarding import Batch, ForwardRow
from postroom.model.topology.route import Route
from tests.tuned import Tune
from tests.unit.client.client_endpoint import FakeEndpoint

LONG = 20


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "STUCK", Pauses(0.05, 0.05))


@dataclass
class Rows:
    """A source in memory."""

    rows: dict[int, ForwardRow] = field(default_factory=dict)
    told: list[tuple[str, Trouble | None]] = field(default_factory=list)
    lost: bool = False  # another has the lease
    given: list[list[Batch]] = field(default_factory=list)  # what was stamped, in each call

    def add(self, count: int, topic: str = "orders", keys: int = 3, size: int = 0) -> None:
        first = max(self.rows, default=0) + 1
        for id in range(first, first + count):
            value = b"%d" % id if not size else b"x" * size
            self.rows[id] = ForwardRow(id, topic, b"%d" % (id % keys), value, b"", None, 1, 0, None)

    def take(self, messages: int, size: int, without: Collection[str]) -> list[ForwardRow]:
        chosen = [row for _, row in sorted(self.rows.items()) if row.topic not in without]
        return [row for row in chosen if row.stamp is not None] or chosen[:messages]

    def stamp(self, batches: Sequence[Batch]) -> None:
        self._check()
        self.given.append(list(batches))
        for batch in batches:
            for row in batch.rows:
                assert self.rows[row.id].stamp is None, "a stamp is taken off before there is another"
                self.rows[row.id] = row._replace(stamp=batch.stamp)

    def finish(self, stored: Sequence[Batch], refused: Sequence[Batch]) -> None:
        self._check()
        for batch in stored:
            for row in batch.rows:
                assert self.rows.pop(row.id).stamp == batch.stamp
        for batch in refused:
            for row in batch.rows:
                self.rows[row.id] = row._replace(stamp=None)

    def tell(self, topic: str, trouble: Trouble | None) -> None:
        self.told.append((topic, trouble))

    def _check(self) -> None:
        if self.lost:
            raise LeaseLost("another forwards")


@asynccontextmanager
async def running(endpoint: FakeEndpoint, rows: Rows) -> AsyncIterator[Forwarder]:
    forwarder = Forwarder(endpoint, rows)  # type: ignore[arg-type]
    task = asyncio.create_task(forwarder.run())
    try:
        yield forwarder
    finally:
        await forwarder.stop()
        assert task.done()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def raising(error: PostroomError) -> Callable[[], Awaitable[None]]:
    async def fault() -> None:
        raise error

    return fault


def split(endpoint: FakeEndpoint) -> None:
    """Seal all partitions of the topic, and give it two others."""
    for piece in endpoint.routes["orders"].ranges:
        endpoint.partitions[piece.partition_id].sealed = True
    endpoint.add_topic("orders", 2)


def exactly(endpoint: FakeEndpoint, count: int, keys: int = 3) -> bool:
    found = [int(value) for value in endpoint.values()]  # of partitions in the order of their making
    assert sorted(found) == list(range(1, count + 1))
    for key in range(keys):
        mine = [n for n in found if n % keys == key]
        assert mine == sorted(mine)
    return True


async def test_rows_become_messages_once_and_in_order() -> None:
    endpoint, rows = FakeEndpoint(), Rows()
    rows.add(2500)
    async with running(endpoint, rows) as forwarder:
        await until(lambda: not rows.rows and forwarder.forwarded)
        rows.add(0)
        assert forwarder.forwarded == 2500
    assert exactly(endpoint, 2500)
    assert len(rows.given) == 1  # a round is one transaction of each kind


async def test_a_woken_forwarder_looks_at_once() -> None:
    endpoint, rows = FakeEndpoint(), Rows()
    async with running(endpoint, rows) as forwarder:
        await until(lambda: forwarder._task is not None)
        rows.add(3)
        await asyncio.to_thread(forwarder.wake)
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 3)


async def test_one_that_looks_by_itself_needs_no_waking() -> None:
    endpoint, rows = FakeEndpoint(), Rows()
    forwarder = Forwarder(endpoint, rows, look_ms=20)  # type: ignore[arg-type]
    task = asyncio.create_task(forwarder.run())
    await until(lambda: forwarder._task is not None)
    await asyncio.sleep(0)
    rows.add(3)
    await until(lambda: not rows.rows)
    await forwarder.stop()
    assert task.cancelled()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_answer_that_is_lost_is_asked_for_again_under_the_same_stamp(when: str) -> None:
    endpoint, rows = FakeEndpoint(partitions=1), Rows()
    faults = endpoint.on if when == "before" else endpoint.after
    for _ in range(3):
        faults["append"].append(raising(BrokerUnavailable("away")))
    rows.add(50)
    async with running(endpoint, rows):
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 50)
    assert len(rows.given) == 1


async def test_whoever_takes_over_repeats_the_stamps_that_are_there() -> None:
    endpoint, rows = FakeEndpoint(partitions=1), Rows()
    rows.add(2500)
    for _ in range(2):  # stored, and stored but not known to be; the third is not even sent
        endpoint.after["append"].append(_fine if not endpoint.after["append"] else _never)
    async with running(endpoint, rows):
        await until(lambda: endpoint.count("append") == 2)
    assert all(row.stamp is not None for row in rows.rows.values())
    rows.add(10)
    async with running(endpoint, rows):
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 2510)


async def _fine() -> None:
    pass


async def _never() -> None:
    await asyncio.Event().wait()


async def test_a_sealed_partition_is_left_for_its_successors_in_order() -> None:
    endpoint, rows = FakeEndpoint(partitions=1), Rows()

    async def sealed_now() -> None:
        split(endpoint)

    endpoint.on["append"].extend([_fine, sealed_now])  # the first batch is stored before, the others are not
    rows.add(4500)
    async with running(endpoint, rows):
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 4500)
    assert len(endpoint.values(next(iter(endpoint.partitions)))) == 1000


async def test_a_stored_batch_is_known_on_a_sealed_partition() -> None:
    """The old partition is asked first, also after a take-over (I4)."""
    endpoint, rows = FakeEndpoint(partitions=1), Rows()
    endpoint.after["append"].append(_never)
    rows.add(20)
    async with running(endpoint, rows):
        await until(lambda: endpoint.count("append") == 1)
    split(endpoint)
    rows.add(20)
    async with running(endpoint, rows):
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 40)
    assert len(endpoint.values(next(iter(endpoint.partitions)))) == 20


async def test_a_producer_that_was_forgotten_begins_anew() -> None:
    """A volatile topic after a crash of its server."""
    endpoint, rows = FakeEndpoint(partitions=1), Rows()
    rows.add(10)
    async with running(endpoint, rows) as forwarder:
        await until(lambda: not rows.rows)
        (partition,) = endpoint.partitions.values()
        partition.producers.clear()
        rows.add(10)
        for id in list(rows.rows):
            rows.rows[id + 10] = rows.rows.pop(id)._replace(id=id + 10, value=b"%d" % (id + 10))
        forwarder.wake()
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 20)


async def test_a_topic_that_is_not_there_holds_up_nobody_and_is_shown() -> None:
    endpoint, rows = FakeEndpoint(), Rows()
    rows.add(20, "missing")
    rows.add(5, "orders")
    async with running(endpoint, rows) as forwarder:
        await until(lambda: len(rows.rows) == 20)
        trouble = forwarder.troubles["missing"]
        assert trouble.stuck and "unknown_topic" in trouble.reason
        assert rows.told == [("missing", trouble)]
        endpoint.routes["missing"] = replace(endpoint.routes["orders"], topic="missing")
        await until(lambda: rows.told[-1] == ("missing", None))
        assert forwarder.troubles == {} and not rows.rows


async def test_a_refusal_is_tried_again_and_keeps_its_stamp() -> None:
    endpoint, rows = FakeEndpoint(partitions=1), Rows()
    for _ in range(3):
        endpoint.on["append"].append(raising(PermissionDenied("no")))
    rows.add(5)
    async with running(endpoint, rows) as forwarder:
        await until(lambda: not rows.rows)
        await until(lambda: rows.told[-1] == ("orders", None))
        assert forwarder.troubles == {}
    assert [topic for topic, trouble in rows.told if trouble] == ["orders"]  # told once, not at each try
    assert exactly(endpoint, 5) and len(rows.given) == 1


async def test_a_message_that_is_too_large_is_shown_by_its_row() -> None:
    endpoint, rows = FakeEndpoint(), Rows()
    rows.add(1, size=5_000_000)
    rows.add(1)
    async with running(endpoint, rows) as forwarder:
        await until(lambda: bool(rows.told))
        assert "row 1" in forwarder.troubles["orders"].reason
        del rows.rows[1]
        await until(lambda: not rows.rows)
    assert endpoint.values() == [b"2"]


async def test_a_lost_lease_ends_it_with_nothing_deleted() -> None:
    endpoint, rows = FakeEndpoint(partitions=1), Rows()

    async def lose() -> None:
        rows.lost = True

    endpoint.after["append"].append(lose)
    rows.add(5)
    forwarder = Forwarder(endpoint, rows)  # type: ignore[arg-type]
    with pytest.raises(LeaseLost):
        await forwarder.run()
    await forwarder.stop()
    assert len(rows.rows) == 5
    rows.lost = False
    async with running(endpoint, rows):  # the next one finds them stored
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 5)


async def test_a_topic_that_was_deleted_keeps_its_rows() -> None:
    endpoint, rows = FakeEndpoint(partitions=1), Rows()
    route: Route = endpoint.routes["orders"]

    async def deleted() -> None:
        del endpoint.routes["orders"]
        raise UnknownTopic("it was deleted")

    endpoint.on["append"].append(deleted)
    rows.add(5)
    async with running(endpoint, rows) as forwarder:
        await until(lambda: "orders" in forwarder.troubles and forwarder.troubles["orders"].stuck)
        assert len(rows.rows) == 5
        endpoint.routes["orders"] = route
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 5)
    assert len(rows.given) == 1  # somebody may only not have known of it: the same stamp again


async def test_a_topic_that_was_deleted_and_made_anew_gets_its_rows() -> None:
    endpoint, rows = FakeEndpoint(partitions=1), Rows()

    async def replaced() -> None:
        endpoint.add_topic("orders", 2)
        del endpoint.partitions[1]
        raise UnknownPartition("no partition 1")

    endpoint.on["append"].append(replaced)
    rows.add(5)
    async with running(endpoint, rows):
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 5)
    assert len(rows.given) == 2


async def test_a_topic_that_is_slow_holds_up_no_other(monkeypatch: pytest.MonkeyPatch, tune: Tune) -> None:
    tune(client={"line_s": 0.02})
    endpoint, rows, go_on = FakeEndpoint(partitions=1), Rows(), asyncio.Event()
    endpoint.add_topic("slow", 1)
    append = endpoint.append

    async def slow_append(topic: str, *args: object, **options: object) -> object:
        if topic == "slow":
            await go_on.wait()
        return await append(topic, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(endpoint, "append", slow_append)
    rows.add(1500, "slow")
    async with running(endpoint, rows) as forwarder:
        for _ in range(3):
            rows.add(10)
            forwarder.wake()
            await until(lambda: all(row.topic == "slow" for row in rows.rows.values()))
        rows.add(5, "slow")  # not to be taken while those before them are under way
        forwarder.wake()
        go_on.set()
        await until(lambda: not rows.rows)
        assert forwarder.forwarded == 1535
    (slow,) = (id for id, partition in endpoint.partitions.items() if partition.topic == "slow")
    found = [int(value) for value in endpoint.values(slow)]
    assert found == sorted(found) and len(set(found)) == 1505


async def test_a_slow_answer_to_what_failed_before_is_waited_for(tune: Tune) -> None:
    """The pause after the failure is over by then: seed 101302 of the simulator looked again without end."""
    tune(client={"line_s": 0.01})
    endpoint, rows, go_on = FakeEndpoint(partitions=1), Rows(), asyncio.Event()
    endpoint.on["append"] += [raising(BrokerUnavailable("away")), go_on.wait]
    rows.add(1)
    forwarder = Forwarder(endpoint, rows)  # type: ignore[arg-type]
    await forwarder.run_once()  # it fails
    await until(lambda: not forwarder._waiting())
    assert await forwarder.run_once() == 1 and forwarder._waiting()  # it is not answered
    assert await forwarder.run_once() == 0
    forwarder._woken.clear()
    idle = asyncio.create_task(forwarder._idle())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not idle.done()
    go_on.set()
    await asyncio.wait_for(idle, LONG)
    assert await forwarder.run_once() == 1 and not rows.rows
    await forwarder.stop()


async def test_a_slow_line_is_cut_off_with_the_forwarder(tune: Tune) -> None:
    tune(client={"line_s": 0.01})
    endpoint, rows = FakeEndpoint(partitions=1), Rows()
    endpoint.after["append"].append(_never)  # stored, and nobody hears of it
    rows.add(5)
    async with running(endpoint, rows) as forwarder:
        await until(lambda: bool(endpoint.values()))
        await until(lambda: bool(forwarder._waiting()))
    assert not forwarder._under_way or all(task.done() for task in forwarder._under_way)
    async with running(endpoint, rows):
        await until(lambda: not rows.rows)
    assert exactly(endpoint, 5)
