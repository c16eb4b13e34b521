"""Killed between any two steps of a move to the slow lane, nothing is lost or stored twice (R42, I12)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

import postroom
from postroom import Connection, Message, SlowLane
from postroom.clock import ManualClock
from postroom.model.policy.slow_lane import Seen
from tests.contract.brokers import broker_of

LANE = "orders.billing.slow"
VALUES = [b"%d" % number for number in range(12)]
BAD = [value for number, value in enumerate(VALUES) if number % 3]

CHILD = """
import asyncio, os, sys
import postroom

url, step = sys.argv[1:]

async def main():
    async with postroom.connect(url) as mq:
        broker = mq._endpoint
        store, mover = broker.store, broker._mover
        append, settle = mover._append, store.progress.settle

        async def appending(one):
            if step == "stamped":
                os._exit(9)
            stored = await append(one)
            if step == "appended":
                os._exit(9)
            return stored

        def settling(*args):
            done = settle(*args)
            if step == "settled":
                os._exit(9)
            return done

        mover._append, store.progress.settle = appending, settling
        async with mq.consumer("orders", group="billing") as consumer:
            async with asyncio.timeout(60):
                while True:
                    for message in await consumer.poll(wait=60):
                        if message.source == "good":
                            await message.ack()

asyncio.run(main())
"""


async def _prepare(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.create_group("orders", "billing", slow_lane=SlowLane(at_least=3))
    store = broker_of(mq).store
    group = store.catalog.group("orders", "billing")
    store.lanes.count(group, [(store.now_ms(), Seen("bad", 3, 3))])
    sources = ["good" if number % 3 == 0 else "bad" for number in range(len(VALUES))]
    await mq.send_many("orders", [Message(v, source=s) for v, s in zip(VALUES, sources, strict=True)])


@pytest.mark.parametrize("step", ["stamped", "appended", "settled"])
async def test_whoever_comes_next_finishes_the_move_once(tmp_path: Path, step: str) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    async with postroom.connect(url) as mq:
        await _prepare(mq)
    command = [sys.executable, "-c", CHILD, url, step]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=100)
    assert ended.returncode == 9, ended.stderr.decode()
    clock = ManualClock(int(time.time() * 1000) + 120_000)  # the leases of whoever was killed have ended
    found: list[tuple[bytes, str]] = []
    async with postroom.connect(url, clock=clock) as mq:
        async with mq.consumer("orders", group="billing") as consumer, asyncio.timeout(60):
            while (await mq.lag("orders", "billing")).total.messages:
                for message in await consumer.poll(wait=0.2):
                    found.append((message.value, message._delivery.topic))
                    await message.ack()
        bad = [(value, topic) for value, topic in found if value in BAD]
        assert sorted(bad) == sorted((value, LANE) for value in BAD)  # each once, and from the lane
        stored = [message.value async for message in mq.read(LANE, start="earliest")]
        assert len(stored) == len(set(stored)) <= len(BAD)
