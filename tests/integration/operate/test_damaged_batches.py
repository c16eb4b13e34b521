"""`postroom doctor` and the background check find stored batches that cannot be read (R6, I12)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import postroom
from postroom.broker.metrics import Figures
from postroom.broker.moves.unreadable import CheckBatches
from postroom.cli.checks import Finding
from postroom.cli.checks.queue import check_batches
from postroom.store.sql.session import Area
from tests.contract.brokers import broker_of, run_duty
from tests.contract.cli_runner import Cli
from tests.damage import garbage


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/q.db"


@pytest.fixture
async def mq(url: str) -> AsyncIterator[postroom.Connection]:
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.create_topic("clicks", partitions=3)
        yield mq


async def place_of(mq: postroom.Connection) -> int:
    return (await mq.route("orders")).ranges[0].partition_id


async def fill(mq: postroom.Connection, batches: int = 3) -> None:
    for _ in range(batches):
        await mq.send_many("orders", [postroom.Message(b"x" * 100)] * 500)


async def turn_over(mq: postroom.Connection, base_offset: int, at: int = 100) -> None:
    """A bit of a batch, in the table."""
    table = f"postroom_log_{await place_of(mq)}"
    with broker_of(mq).store.session.write(Area.LOG) as tx:  # type: ignore[attr-defined]
        (data,) = tx.one(f"SELECT batch FROM {table} WHERE base_offset = ?", base_offset)
        changed = bytes(data[:at]) + bytes((data[at] ^ 4,)) + bytes(data[at + 1 :])
        tx.run(f"UPDATE {table} SET batch = ? WHERE base_offset = ?", changed, base_offset)
    broker_of(mq)._tail.forget([await place_of(mq)])


async def found(mq: postroom.Connection, *, deep: bool = False) -> Finding:
    (finding,) = await check_batches(mq, lambda name, steps: None, deep=deep)
    return finding


# ---- doctor ----


async def test_a_sound_queue(mq: postroom.Connection) -> None:
    await fill(mq)
    for deep in (False, True):
        finding = await found(mq, deep=deep)
        assert finding.state == "ok"
        assert finding.message.startswith("3 in 4 partitions")


async def test_the_newest_messages_are_always_looked_at(mq: postroom.Connection) -> None:
    await fill(mq)
    await turn_over(mq, 1000)
    finding = await found(mq)
    assert finding.state == "fail"
    assert "orders:0:1000 (500 messages)" in finding.message and "backup" in finding.advice


async def test_all_of_it_is_read_if_asked_for(mq: postroom.Connection) -> None:
    """The old batch may be in the sample, or not; a deep look finds it in any case, and names it once."""
    await fill(mq, 12)
    await turn_over(mq, 0)
    await turn_over(mq, 2000, at=7)  # its offset, which has no checksum
    finding = await found(mq, deep=True)
    assert finding.message.startswith("2 cannot be read")
    assert "orders:0:0 " in finding.message and "orders:0:2000 " in finding.message


async def test_many_are_counted_and_some_are_named(mq: postroom.Connection) -> None:
    for _ in range(9):
        await broker_of(mq).append("orders", await place_of(mq), garbage())
    finding = await found(mq, deep=True)
    assert finding.message.startswith("9 cannot be read") and finding.message.endswith("; and 4 more")


async def test_doctor_fails(mq: postroom.Connection, url: str, tmp_path: Path) -> None:
    await fill(mq, 1)
    cli = Cli(tmp_path, url)
    sound = await asyncio.to_thread(cli, "doctor", "--deep", "--json")
    assert sound.code == 0 and sound.json["checks"][-1]["check"] == "batches"
    await turn_over(mq, 0)
    damaged = await asyncio.to_thread(cli, "doctor")
    assert damaged.code == 1 and "orders:0:0" in damaged.out


# ---- the background check ----


async def test_the_background_check_names_each_once(
    mq: postroom.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    figures = Figures()
    broker_of(mq).watch(figures)
    await fill(mq)
    await turn_over(mq, 500)
    check = broker_of(mq)._check
    for _ in range(2):
        check._next_round = 0.0
        await run_duty(mq, CheckBatches)
        while check._places:
            await run_duty(mq, CheckBatches)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(told) == 1 and "orders:0:500" in told[0]
    assert figures.unreadable.items() == [(("orders", "check"), 1)]


async def test_a_run_is_short_and_the_next_one_goes_on(
    mq: postroom.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(mq, 6)
    reads = list[int]()
    monkeypatch.setattr("postroom.broker.moves.unreadable._RUN_BYTES", 1)
    monkeypatch.setattr("postroom.broker.moves.unreadable._READ_BYTES", 1)
    read = broker_of(mq).store.log.read

    def watched(partition_id: int, offset: int, **most: int) -> object:
        reads.append(offset)
        return read(partition_id, offset, **most)

    monkeypatch.setattr(broker_of(mq).store.log, "read", watched)
    for _ in range(30):
        await run_duty(mq, CheckBatches)
    assert reads == [0, 500, 1000, 1500, 2000, 2500]  # then the round is over, and nothing is read
