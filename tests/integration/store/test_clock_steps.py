"""The wall clock is set while a queue in a file is in use: a real steady clock, a wall clock set by the test.

No lease ends or lasts for it, nothing is delivered twice, nothing is deleted (I26).
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.broker.broker import Broker
from postroom.broker.duties import Retention
from postroom.clock import SteadyClock, wall_ms
from postroom.endpoint.values import PollRequest
from postroom.model.delivery.delivery import Ask, Kind, Settlement
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append, Store
from postroom.store.dialects import sqlite_clock as steadiness
from postroom.store.dialects.sqlite import SqliteDialect
from postroom.testing.store_contract.harness import MovableClock, append, batch, partitions

HOUR_MS = 3_600_000
LEASE = 2


class Machine:
    """Several programs on one machine, with one file."""

    def __init__(self, folder: Path) -> None:
        self.url, self.path = f"sqlite:///{folder}/queue.db", folder / "queue.db"
        self.set_by_ms = 0
        self._open = AsyncExitStack()

    def clock(self) -> SteadyClock:
        return SteadyClock(lambda: wall_ms() + self.set_by_ms)

    async def program(self) -> postroom.Connection:
        return await self._open.enter_async_context(postroom.connect(self.url, clock=self.clock()))

    async def consumer(self, mode: str) -> postroom.Consumer:
        mq = await self.program()
        wish: Any = {"mode": mode, "lease": LEASE, "window": 1}
        return await self._open.enter_async_context(mq.consumer("orders", "billing", **wish))

    async def close(self) -> None:
        await self._open.aclose()


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path)
    mq = await made.program()
    await mq.create_topic("orders", partitions=1, retention="10m", keep="limits")
    yield made
    await made.close()


def broker_of(mq: postroom.Connection) -> Broker:
    endpoint = mq._endpoint
    assert isinstance(endpoint, Broker)
    return endpoint


@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_an_hour_on_ends_no_lease(machine: Machine, mode: str) -> None:
    """For two leases nobody else gets what a living member has in hand."""
    mq = await machine.program()
    await mq.send("orders", b"1", key="k")
    one = await machine.consumer(mode)
    (message,) = await one.poll(1, wait=30)
    other = await machine.consumer(mode)
    machine.set_by_ms = HOUR_MS
    assert await other.poll(5, wait=2 * LEASE) == []
    await message.ack()  # its lease was not lost
    assert message.attempt == 1


async def test_ten_minutes_back_make_no_lease_last(machine: Machine) -> None:
    """Somebody was killed with a message in hand; it comes after its lease, and not ten minutes later."""
    mq = await machine.program()
    await mq.send("orders", b"1")
    await mq.create_group("orders", "billing", lease=LEASE)
    request = PollRequest("orders", "billing", "killed", 4711, 10, 10_000, 0, True, False)
    assert (await broker_of(mq).poll(request)).grants
    machine.set_by_ms = -10 * 60_000
    consumer = await machine.consumer("shared")
    before = time.monotonic()
    (message,) = await consumer.poll(1, wait=60)
    assert (message.value, message.attempt) == (b"1", 2)
    assert time.monotonic() - before < 45  # a lease, and however long the machine takes
    await message.ack()


async def test_an_hour_on_deletes_nothing(machine: Machine) -> None:
    """The topic keeps messages for ten minutes, whether or not somebody has read them."""
    mq = await machine.program()
    await mq.send_many("orders", [postroom.Message(b"%d" % n) for n in range(100)])
    machine.set_by_ms = HOUR_MS
    broker = broker_of(mq)
    for _ in range(3):
        await asyncio.sleep(0.3)  # long enough for the step to be seen
        await broker.in_thread(Retention(broker.store, broker._limits).run_once)
    assert len([m async for m in mq.read("orders")]) == 100


async def test_delayed_messages_do_not_come_an_hour_early(machine: Machine) -> None:
    mq = await machine.program()
    await mq.send("orders", b"later", delay="30m")
    machine.set_by_ms = HOUR_MS
    consumer = await machine.consumer("shared")
    assert await consumer.poll(wait=1) == []


def wait_until_seen(*stores: Store) -> None:
    """As long as somebody goes by a wall clock from before it was set."""
    deadline = time.monotonic() + 30
    for store in stores:
        assert isinstance(store, SqlStore) and isinstance(store.session.dialect, SqliteDialect)
        clock = store.session.dialect.clock
        assert isinstance(clock, SteadyClock)
        while clock.step_ms():
            assert time.monotonic() < deadline
            clock.now_ms()
            time.sleep(0.02)


def test_programs_agree_on_the_time(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with (
        closing(open_sqlite(machine.path, machine.clock())) as one,
        closing(open_sqlite(machine.path, machine.clock())) as other,
    ):
        for machine.set_by_ms in (HOUR_MS, -HOUR_MS, 0):
            before = one.now_ms()
            wait_until_seen(one, other)
            assert abs(one.now_ms() - other.now_ms()) < 500
            assert 0 <= one.now_ms() - before < 40_000
    assert caplog.text.count("was set by +3600") == 2 and "was set by -7200" in caplog.text


def test_another_process_begins_where_the_others_are(machine: Machine) -> None:
    """The wall clock was set an hour on, and is followed; who starts then does not begin an hour ahead."""
    with closing(open_sqlite(machine.path, machine.clock())) as store:
        machine.set_by_ms = -HOUR_MS  # as if it was set on by an hour after that
        with closing(open_sqlite(machine.path, machine.clock())) as back:
            before = back.now_ms()
    program = (
        "import sys; from pathlib import Path; from postroom.store import open_sqlite;"
        f"print(open_sqlite(Path({str(machine.path)!r})).now_ms())"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert abs(int(out) - before) < 60_000
    assert store is not back


def test_time_does_not_go_back_when_the_machine_was_started_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_sqlite(machine.path, machine.clock())) as store:
        partition = store.catalog.topic("orders").route.partitions[0].partition_id
        store.log.append([Append(partition, batch())])
        before = store.now_ms()
    monkeypatch.setattr(steadiness, "boot_id", lambda: "the next one")
    machine.set_by_ms = -HOUR_MS
    with closing(open_sqlite(machine.path, machine.clock())) as store:
        assert before - 1_000 <= store.now_ms() < before + 60_000
    monkeypatch.setattr(steadiness, "boot_id", lambda: "and another")
    machine.set_by_ms = -100 * 24 * HOUR_MS  # nobody can wait for that
    with closing(open_sqlite(machine.path, machine.clock())) as store:
        assert abs(store.now_ms() - wall_ms() - machine.set_by_ms) < 60_000


def test_a_start_of_the_machine_is_a_start_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that a broker here serves live on, and what was not flushed is forgotten (I8)."""

    def opened() -> int:
        with closing(open_sqlite(tmp_path / "queue.db")) as store:
            return store.progress.started_ms()

    first = opened()
    assert first > 0 and opened() == first
    monkeypatch.setattr(steadiness, "boot_id", lambda: "the next one")
    second = opened()
    assert second >= first and opened() == second
    with closing(sqlite3.connect(tmp_path / "queue.db")) as file:
        (kept,) = file.execute("SELECT value FROM postroom_settings WHERE name = 'opened'").fetchone()
    assert "the next one" in kept


def test_a_poll_after_a_start_says_when_to_ask_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be held still is due, but not handed out for a lease (I8): members asked again and again."""
    clock = MovableClock()
    with closing(open_sqlite(tmp_path / "queue.db", clock)) as store:
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        group = store.catalog.create_group("orders", "billing", GroupSettings(lease_ms=2_000))
        append(store, place, batch(3))

        def poll(token: int) -> int | None:
            granted = store.progress.poll(group, place, Ask(f"m{token}", token, 3, 3, empty_handed=False))
            return None if granted.deliveries else granted.next_due

        assert poll(1) is None
        later = clock.now_ms() + 3_500
        store.progress.settle(group, place, 1, [Settlement(Kind.RETRY, 2, 2, visible_at=later)])
        clock.ms += 3_000
        started = clock.now_ms()
        monkeypatch.setattr(store.session.dialect, "started_ms", lambda connection: started)
        assert poll(2) == later  # what waits in nobody's hands comes as it would
        clock.ms = later
        assert poll(3) is None
        assert poll(4) == started + 2_000
