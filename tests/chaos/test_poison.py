"""A message that kills its consumer ends alone in the dead letters; its neighbours are all handled (I14)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

import postroom

CONSUMER = """
import asyncio, os, sys, postroom
async def main(url, notes):
    noted = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    async with postroom.connect(url) as mq, mq.consumer("orders", group="billing") as consumer:
        while True:
            messages = await consumer.poll(max_messages=100, wait=1)
            for message in messages:
                if message.value == b"poison":
                    os._exit(9)
            os.write(noted, b"".join(m.value + b"\\n" for m in messages))
            await consumer.ack(messages)
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow("makes trouble for seconds, in many processes")
async def test_poison_goes_alone(tmp_path: Path) -> None:
    url, notes = f"sqlite:///{tmp_path / 'queue.db'}", tmp_path / "notes"
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.create_group("orders", "billing", lease=0.3, max_attempts=2)
        values = [f"m{i}".encode() for i in range(40)]
        await mq.send_many("orders", [postroom.Message(v) for v in [*values[:25], b"poison", *values[25:]]])
        deaths = 0
        while (await mq.lag("orders", "billing")).total.messages:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", CONSUMER, url, str(notes))
            while process.returncode is None and (await mq.lag("orders", "billing")).total.messages:
                await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=0.05)
            if process.returncode is None:
                process.kill()
                await process.wait()
            else:
                assert process.returncode == 9
                deaths += 1
        dead = await mq.dead_letters("orders", "billing")
        assert [d.value for d in dead] == [b"poison"]
        assert deaths >= 3
        assert {line.encode() for line in notes.read_text().splitlines()} == set(values)
        assert await mq.redrive("orders", "billing") == 1
        async with mq.consumer("orders", group="billing") as consumer:
            (again,) = await consumer.poll(wait=5)
            assert (again.value, again.topic, again.attempt) == (b"poison", "orders", 1)
            await again.ack()
        assert not await mq.dead_letters("orders", "billing")
