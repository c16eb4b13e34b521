"""The flash-sale gateway and the order status, run as their pages say (R33, R38)."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import postroom.sync
from postroom.clock import ManualClock
from postroom.testing.fixture import TestQueue
from tests.integration.programs.programs import LIMIT, program, ran, until
from tests.servers.places import free_port

PATIENCE_S = 2.0  # of the gateway
SLACK_S = 8.0  # for a machine that is busy with other things


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    return {"POSTROOM_URL": f"sqlite:///{tmp_path}/queue.db", "SHOP_DB": f"{tmp_path}/shop.db"}


@dataclass(frozen=True)
class Answer:
    status: int
    retry_after: str | None
    body: dict[str, Any]
    seconds: float


async def buy(port: int, number: int) -> Answer:
    """One click: a connection of its own, without a client that would be slower than the gateway."""
    began, body = time.monotonic(), json.dumps({"item": "phone", "buyer": f"buyer {number}"})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /purchases HTTP/1.1\r\nHost: shop\r\nX-Request-Id: r{number}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    raw, found = (await reader.read()).decode().split("\r\n\r\n", 1)
    writer.close()
    headers = dict(line.lower().split(": ", 1) for line in raw.splitlines()[1:])
    status = int(raw.split()[1])
    return Answer(status, headers.get("retry-after"), json.loads(found), time.monotonic() - began)


async def all_buy(port: int, numbers: Iterable[int]) -> dict[int, Answer]:
    numbers = list(numbers)
    async with asyncio.timeout(LIMIT):
        return dict(zip(numbers, await asyncio.gather(*(buy(port, n) for n in numbers)), strict=True))


@contextmanager
def gateway(places: dict[str, str]) -> Iterator[int]:
    """It is open; its port."""
    port = free_port()
    ran("examples.flash_sale.stock", "phone", "20", **places)
    web = ("examples.flash_sale.gateway:web", "--port", str(port), "--log-level", "warning")
    with program("uvicorn", *web, **places), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        until(lambda: _answers(client))
        yield port


@pytest.mark.slow("a thousand buyers")
def test_a_thousand_buyers_at_once_are_answered_or_told_to_come_back(places: dict[str, str]) -> None:
    """Within the patience, and what a busy machine adds; all of them in the end, and 20 phones are sold."""
    worker = ("worker", "examples.flash_sale.stock:app")  # before there is a topic
    with program("postroom", *worker, **places), gateway(places) as sale:
        until(lambda: asyncio.run(buy(sale, 1)).status == 200)
        for thousand in (range(1000), range(1000, 2000), range(2000, 3000)):
            answers = asyncio.run(all_buy(sale, thousand))
            assert {answer.status for answer in answers.values()} <= {200, 503, 504}
            assert max(answer.seconds for answer in answers.values()) < PATIENCE_S + SLACK_S
            vain = sum(answer.status == 504 for answer in answers.values())
            if vain < 100:
                break  # else the machine stood still: once more
        assert vain < 100, "they were let in, and not answered in time"
        while refused := [n for n, answer in answers.items() if answer.status != 200]:
            assert {answers[n].retry_after for n in refused} == {"1"}
            time.sleep(1)  # as they were told; and they do not all come back in the same instant
            for begin in range(0, len(refused), 100):
                answers |= asyncio.run(all_buy(sale, refused[begin : begin + 100]))
        until(
            lambda: asyncio.run(buy(sale, thousand[7])).body == answers[thousand[7]].body
        )  # the same answer
    with closing(sqlite3.connect(places["SHOP_DB"])) as shop:
        sold = [json.loads(row[0])["result"] for row in shop.execute("SELECT answer FROM sales")]
        assert shop.execute("SELECT left_over FROM stock").fetchall() == [(0,)]
    assert sold.count("sold") == 20
    assert len(sold) >= len({answer.body["request_id"] for answer in answers.values()}) == 1000


@pytest.mark.slow("starts programs")
def test_buyers_of_a_shop_that_is_shut_are_refused_at_once(places: dict[str, str]) -> None:
    """The first wait in vain, and are told where to look; from then on one at a time does."""
    with (
        gateway(places) as sale,
        httpx.Client(base_url=f"http://127.0.0.1:{sale}", timeout=LIMIT) as web,
    ):
        nobody = asyncio.run(buy(sale, 0))
        assert (nobody.status, nobody.retry_after) == (504, "1")
        assert nobody.body["detail"]["next"] == "/purchases/r0"
        assert web.get("/purchases/r0").status_code == 404
        answers = asyncio.run(all_buy(sale, range(100))).values()
        assert sorted(answer.status for answer in answers) == [503] * 99 + [504]
        refused = [answer for answer in answers if answer.status == 503]
        assert max(answer.seconds for answer in refused) < PATIENCE_S + SLACK_S
        assert {answer.body["detail"] for answer in refused} == {"too many buyers at once: try again"}
        with program("postroom", "worker", "examples.flash_sale.stock:app", **places):
            until(lambda: asyncio.run(buy(sale, 0)).status == 200)
            sold = asyncio.run(all_buy(sale, range(20)))
        assert [answer.status for answer in sold.values()] == [200] * 20
        assert web.get("/purchases/r7").json() == sold[7].body


def _answers(web: httpx.Client) -> bool:
    try:
        return web.get("/docs").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow("events that come early are tried again, after pauses of seconds")
def test_events_of_an_order_are_taken_when_they_fit(places: dict[str, str]) -> None:
    """In a wrong order, and some of them twice; what no rule has is dead at once, with the reason."""
    for _ in range(2):
        ran("examples.order_status.orders", "prepare", **places)

    with (
        postroom.sync.connect(places["POSTROOM_URL"]) as mq,
        closing(sqlite3.connect(places["SHOP_DB"])) as shop,
        program("postroom", "worker", "examples.order_status.orders:app", **places),
    ):

        def send(event: str, key: str = "42") -> None:
            mq.send("order-events", b"{}", key=key, headers={"event": event})

        for event in ("shipped", "paid", "flown", "created", "delivered"):
            send(event)
        until(lambda: shop.execute("SELECT status FROM orders").fetchall() == [("delivered",)])
        page = ("postroom", "send", "order-events", "{}", "--key", "42", "--header", "event=paid")
        ran(*page, **places)  # once more, under an id of its own
        for event in ("created", "cancelled"):
            send(event, "43")
        until(lambda: mq.lag("order-events", "status").total.messages == 0)
        send("paid", "43")
        until(lambda: len(mq.dead_letters("order-events", "status")) == 2)
        until(lambda: mq.lag("order-events", "status").total.messages == 0)
        events = shop.execute("SELECT id, event FROM history ORDER BY number").fetchall()
        flown, paid = mq.dead_letters("order-events", "status")
    assert [e for key, e in events if key == "42"] == ["created", "paid", "shipped", "delivered"]
    assert [e for key, e in events if key == "43"] == ["created", "cancelled"]
    known = "cancelled, created, delivered, paid, shipped"
    assert flown.reason == f"no rule has the event 'flown', which came for '42'; there are {known}"
    assert (flown.attempts, paid.attempts) == (1, 1)
    assert paid.reason.startswith("'paid' does not fit '43', which is in state 'cancelled', and no event")


async def test_an_event_that_comes_eight_hours_early_is_taken_in_the_end(
    postroom_queue: TestQueue, postroom_clock: ManualClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Four steps early; it was a dead letter after five seconds."""
    from examples.order_status import orders

    monkeypatch.setenv("SHOP_DB", str(tmp_path / "shop.db"))
    monkeypatch.setattr(orders, "QUEUE", f"sqlite:///{tmp_path}/queue.db")
    await asyncio.to_thread(orders.prepare)
    await postroom_queue.create_topic("order-events")

    async def send(event: str) -> None:
        await postroom_queue.send("order-events", b"{}", key="42", headers={"event": event})

    async def hours(count: int) -> None:
        for _ in range(12 * count):
            postroom_clock.advance(300)
            await postroom_queue.run_until_idle(orders.app)

    await send("delivered")
    await hours(8)
    for event in ("created", "paid", "shipped"):
        await send(event)
    await hours(2)
    with closing(orders.database()) as shop:
        assert orders.status_of(shop, "42") == "delivered"
    assert await postroom_queue.dead_letters("order-events", "status") == []
