"""The flash-sale gateway and the order status, run as their pages say (R33, R38)."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

import postroom.sync
from tests.servers.places import free_port

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds


@contextmanager
def program(*args: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen([sys.executable, "-m", *args], cwd=ROOT, env={**os.environ, **environment})
    try:
        yield running
    finally:
        running.terminate()
        running.wait(LIMIT)


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not found():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    return {"POSTROOM_URL": f"sqlite:///{tmp_path}/queue.db", "SHOP_DB": f"{tmp_path}/shop.db"}


def test_a_flash_sale_sells_what_is_there_and_no_more(places: dict[str, str]) -> None:
    port = free_port()
    with closing(sqlite3.connect(places["SHOP_DB"])) as shop, shop:
        shop.execute("CREATE TABLE stock (item TEXT PRIMARY KEY, left_over INTEGER NOT NULL)")
        shop.execute("INSERT INTO stock VALUES ('phone', 20)")
    with (
        program("uvicorn", "examples.flash_sale.gateway:web", "--port", str(port), PATIENCE_S="3", **places),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT) as web,
    ):
        until(lambda: _answers(web))

        def buy(number: int) -> httpx.Response:
            order = {"item": "phone", "buyer": f"buyer {number}"}
            return web.post("/purchases", json=order, headers={"X-Request-Id": f"r{number}"})

        nobody = buy(0)  # the shop is not open yet
        assert nobody.status_code == 504 and nobody.json()["detail"]["next"] == "/purchases/r0"
        with program("postroom", "worker", "examples.flash_sale.stock:app", **places):
            until(lambda: buy(0).status_code == 200)
            with ThreadPoolExecutor(8) as buyers:
                answers = list(buyers.map(buy, range(40)))
        assert {answer.status_code for answer in answers} == {200}
        results = [answer.json()["result"] for answer in answers]
        assert (results.count("sold"), results.count("sold out")) == (20, 20)
        assert web.get("/purchases/r0").json() == answers[0].json()
        assert web.get("/purchases/nobody").status_code == 404


def _answers(web: httpx.Client) -> bool:
    try:
        return web.get("/docs").status_code == 200
    except httpx.TransportError:
        return False


def test_events_of_an_order_are_taken_when_they_fit(places: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "-c", "from examples.order_status.orders import prepare; prepare()"],
        cwd=ROOT, env={**os.environ, **places}, check=True,
    )  # fmt: skip
    with postroom.sync.connect(places["POSTROOM_URL"]) as mq:
        mq.create_topic("order-events")
        for event in ("shipped", "paid", "created", "delivered"):
            mq.send("order-events", b"{}", key="42", headers={"event": event}, id=f"42-{event}")
        with (
            program("postroom", "worker", "examples.order_status.orders:app", **places),
            closing(sqlite3.connect(places["SHOP_DB"])) as shop,
        ):
            until(lambda: shop.execute("SELECT status FROM orders").fetchall() == [("delivered",)])
            events = [row[0] for row in shop.execute("SELECT event FROM history ORDER BY number")]
    assert events == ["created", "paid", "shipped", "delivered"]
