"""Verdicts while the database is stopped for longer than a lease: settled when it is back (I25)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import postroom
from tests.integration.servers.test_faults import connected
from tests.ready import Ground, ready
from tests.servers.server import Server


@pytest.fixture
def own(spare_postgres: Server) -> Iterator[Ground]:
    with ready(spare_postgres) as ground:
        yield ground


@pytest.mark.slow("waits for a server that fails or hangs")
@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_an_ack_during_an_outage_is_settled_afterwards(own: Ground, mode: str) -> None:
    """The handler logs the error and goes on, as handlers do."""
    handled: list[bytes] = []
    failed: list[postroom.StoreUnavailable] = []
    async with connected(own.url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send_many("orders", [postroom.Message(b"%d" % n, key="k") for n in range(3)])
        async with mq.consumer("orders", "billing", mode=mode, lease=2, window=1) as consumer:  # type: ignore[arg-type]
            first = await anext(consumer)
            handled.append(first.value)
            await asyncio.to_thread(own.server.stop)
            with pytest.raises(postroom.StoreUnavailable, match="in the background") as caught:
                await asyncio.wait_for(first.ack(), 60)
            failed.append(caught.value)
            await asyncio.to_thread(own.server.start)
            async with asyncio.timeout(60):
                while len(handled) < 3:
                    message = await anext(consumer)
                    handled.append(message.value)
                    await message.ack()
                while (await mq.lag("orders", "billing")).total.messages:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
    assert handled == [b"0", b"1", b"2"] and len(failed) == 1


@pytest.mark.slow("waits for a server that fails or hangs")
async def test_a_handler_is_not_called_again_for_a_verdict_that_failed(
    own: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[bytes] = []
    async with connected(own.url) as mq:
        await mq.create_topic("orders", partitions=1)
        app, begun, go_on = postroom.App(mq), asyncio.Event(), asyncio.Event()

        @app.subscribe("orders", group="billing", lease=2)
        async def handle(body: bytes) -> None:
            calls.append(body)
            begun.set()
            await go_on.wait()

        async with app:
            await mq.send("orders", b"1")
            await asyncio.wait_for(begun.wait(), 30)
            await asyncio.to_thread(own.server.stop)
            go_on.set()
            async with asyncio.timeout(60):
                while "takes no verdicts" not in caplog.text:  # noqa: ASYNC110 - a whole lease has passed
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(own.server.start)
            async with asyncio.timeout(60):
                while (await mq.lag("orders", "billing")).total.messages:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
    assert calls == [b"1"]
