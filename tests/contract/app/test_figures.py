"""What handlers did, as metrics: handled, failed, how long, in flight; and that it survives a restart."""

from __future__ import annotations

import asyncio

import pytest

import postroom
from postroom import App, Backoff, Connection, Dead
from postroom.metrics import Metrics
from tests.contract.app.test_keeping import until
from tests.docs.pages import ROOT, table

BILL = {"topic": "orders", "group": "billing", "handler": "bill"}


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    return connection


def counted(found: Metrics, name: str) -> float | None:
    return found.value(f"postroom_handler_{name}", **BILL)


async def test_what_is_handled_fails_and_is_in_flight_is_counted(mq: Connection) -> None:
    app, go = App(mq), asyncio.Event()

    @app.subscribe("orders", group="billing", concurrency=4, max_attempts=1, retry=Backoff(1, 1, 1))
    async def bill(number: int) -> None:
        if number == 1:
            raise Dead("no")
        if number == 2:
            await go.wait()

    async with app:
        await mq.send_many("orders", [0, 1, 2])
        await mq.send("orders", b"no number")
        await until(lambda: app._workers and app._workers[0].handled == 3)
        found = await app.metrics()
        assert (counted(found, "messages"), counted(found, "failures")) == (3, 2)
        assert (counted(found, "in_flight"), counted(found, "seconds_count")) == (1, 2)
        assert found.value("postroom_handler_running", topic="orders", group="billing") == 1
        go.set()
        await until(lambda: app._workers[0].handled == 4)
        found = await app.metrics()
        assert (counted(found, "messages"), counted(found, "in_flight")) == (4, 0)
        assert counted(found, "seconds_count") == 3
    assert counted(await app.metrics(), "messages") == 4  # what was counted stays


async def test_a_list_is_one_call_and_as_many_messages(mq: Connection) -> None:
    app, done = App(mq), asyncio.Event()

    @app.subscribe("orders", group="billing", batch=10)
    async def bill(numbers: list[int]) -> None:
        if 9 in numbers:
            done.set()

    await mq.send_many("orders", list(range(10)))
    async with app:
        await asyncio.wait_for(done.wait(), 30)
        await until(lambda: app._workers[0].handled == 10)
        found = await app.metrics()
    assert counted(found, "messages") == 10
    assert counted(found, "seconds_count") == 1


async def test_an_app_that_counts_shows_its_queue_too() -> None:
    app = App("memory://figures", metrics=True)

    @app.subscribe("orders", group="billing")
    async def bill(number: int) -> None: ...

    await app.start(create=True)
    try:
        await app.send("orders", 1)
        await until(lambda: app._workers[0].handled == 1)
        found = await app.metrics()
    finally:
        await app.stop()
    assert found.value("postroom_messages_published", topic="orders") == 1
    assert counted(found, "messages") == 1


async def test_the_page_names_every_metric_of_handlers() -> None:
    rows = table(ROOT / "docs" / "howto" / "metrics.md", "Metrics of workers")
    shown = {row[0].strip("`"): tuple(row[1].split(", ")) for row in rows if row[0].startswith("`postroom_h")}
    families = (await postroom.App("memory://").metrics()).families
    names = {(f"{one.name}_total" if one.type == "counter" else one.name): one.labels for one in families}
    assert shown == names
