"""A broker that is offered far more than it can store: it slows down, its memory stays bounded (R40, I17).

Every client keeps as much under way as its connection takes. What the broker has not read waits in sockets.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import postroom
from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS
from postroom.errors import PostroomError
from postroom.model.messages.batch import BatchBuilder
from postroom.wire import messages as m
from postroom.wire.client.link import Link, LinkLost, connect
from tests.servers.places import free_port

CLIENTS = 12
IN_FLIGHT = 150  # of each, of 1 MB: 1.8 GB in all
SECONDS = 4
BOUND_MB = 650  # 256 MB of requests, the writer's and the reader's copies of some, 64 MB of newest batches


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a broker in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "postroom", "serve", f"sqlite:///{tmp_path / 'q.db'}", "--dev"]
    process = subprocess.Popen([*command, "--port", str(port), "--http-port", "0"], stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(30)


def resident_mb(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def connected(address: str) -> postroom.Connection:
    deadline = time.monotonic() + 30
    while True:
        try:
            return await postroom.connect(f"postroom://{address}")
        except PostroomError:
            assert time.monotonic() < deadline, "the broker did not come up"
            await asyncio.sleep(0.1)


@pytest.mark.slow("overloads a broker for seconds")
async def test_memory_stays_bounded_under_overload(broker: tuple[str, int]) -> None:
    address, pid = broker
    mq = await connected(address)
    await mq.create_topic("flood", partitions=4)
    places = [piece.partition_id for piece in (await mq.route("flood")).ranges]
    builder = BatchBuilder()
    builder.append(1, None, bytes(1_000_000), [])
    batch = builder.build()
    stored, end = 0, asyncio.get_running_loop().time() + SECONDS

    async def flood(link: Link, number: int) -> None:
        nonlocal stored
        request = r.Append("flood", places[number % len(places)])
        while asyncio.get_running_loop().time() < end:
            await link.call(OPERATIONS["append"], request, (batch,))
            stored += 1

    hello = m.Hello(m.MIN_VERSION, m.MAX_VERSION, "flood")
    links = [await connect(address, hello, None, timeout_ms=20_000) for _ in range(CLIENTS)]
    tasks = [asyncio.create_task(flood(link, n)) for link in links for n in range(IN_FLIGHT)]
    peak = 0.0
    while asyncio.get_running_loop().time() < end:
        peak = max(peak, resident_mb(pid))
        await asyncio.sleep(0.05)
    async with asyncio.timeout(20):  # meanwhile somebody else is served
        receipt = await mq.send("flood", b"x")
    assert receipt.offset >= 0
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [o for o in outcomes if isinstance(o, Exception) and not isinstance(o, LinkLost)]
    for link in links:
        await link.close()
    await mq.close()
    print(f"{stored} MB stored in {SECONDS} s, {peak:.0f} MB resident at most")
    assert stored > 0
    assert peak < BOUND_MB
