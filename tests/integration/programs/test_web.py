"""Video upload, product centre, SMS gateway and the shop on Flask, run as their pages say."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import postroom.sync
from tests.integration.programs.programs import LIMIT, ROOT, ran, until
from tests.servers.places import free_port


class Programs:
    """What a test has started; all of it ends with the test."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = {**os.environ, **environment}
        self._stack = contextlib.ExitStack()
        self.started: list[subprocess.Popen[bytes]] = []
        self._waiting: list[tuple[httpx.Client, str]] = []

    def run(self, *args: str) -> None:
        subprocess.run(
            [sys.executable, "-m", *args], cwd=ROOT, env=self.environment, timeout=LIMIT, check=True
        )

    def start(self, *args: str, **more: str) -> None:
        process = subprocess.Popen([sys.executable, "-m", *args], cwd=ROOT, env={**self.environment, **more})
        self.started.append(process)
        self._stack.callback(process.wait, LIMIT)
        self._stack.callback(process.send_signal, signal.SIGCONT)  # one that stands still does not end
        self._stack.callback(process.terminate)

    def web(self, *args: str, port: str = "--port", path: str = "/openapi.json", **more: str) -> httpx.Client:
        """A program that listens, and a client that talks to it."""
        number = free_port()
        self.start(*args, *([port] if port else []), str(number), **more)
        client = self._stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{number}", timeout=LIMIT, trust_env=False)
        )
        self._waiting.append((client, path))
        return client

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def all_answer(self) -> None:
        while self._waiting:
            until(lambda: answers(*self._waiting[0]))
            del self._waiting[0]


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code < 500
    except httpx.TransportError:
        return False


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    places = {"POSTROOM_URL": f"sqlite:///{tmp_path}/queue.db", "VIDEOS": str(tmp_path / "videos")}
    places |= {"PRODUCTS_DB": str(tmp_path / "products.db"), "SHOP_DB": str(tmp_path / "shop.db")}
    places |= {"SECONDS_EACH": "0.2", "GATEWAY_RATE": "10", "PER_SECOND": "100"}
    with Programs(places) as programs:
        yield programs


@pytest.mark.slow("starts programs")
def test_a_video_is_accepted_at_once_and_ready_later(programs: Programs) -> None:
    web = programs.web("uvicorn", "examples.video_upload.web:web", "--log-level", "warning")
    programs.all_answer()
    content = b"VIDEO of a cat"
    accepted = web.post("/videos", content=content, headers={"Idempotency-Key": "cat"})
    assert (accepted.status_code, accepted.headers["Location"]) == (202, "/videos/cat")
    assert web.get("/videos/cat").json() == {"id": "cat", "state": "accepted"}  # nobody works on it yet
    assert web.post("/videos", content=content, headers={"Idempotency-Key": "cat"}).status_code == 202
    assert_refused(web)
    other = web.post("/videos", content=b"a shopping list").json()["status"]
    assert web.get("/videos/dog").status_code == web.get("/videos/..%2Fcat").status_code == 404
    programs.start("postroom", "worker", "examples.video_upload.worker:app")
    until(lambda: web.get("/videos/cat").json()["state"] == "ready")
    assert_refused(web)  # nor when it is ready
    assert web.get("/videos/cat").json()["checksum"] == hashlib.sha256(content).hexdigest()
    assert Path(programs.environment["VIDEOS"], "cat.upload").read_bytes() == content
    assert web.post("/videos", content=content, headers={"Idempotency-Key": "cat"}).status_code == 202
    until(lambda: web.get(other).json()["state"] == "failed")
    with postroom.sync.connect(programs.environment["POSTROOM_URL"]) as mq:
        assert mq.topic("videos").messages == 2  # the cat was stored once
        until(
            lambda: [dead.reason for dead in mq.dead_letters("videos", "transcoding")] == ["this is no video"]
        )


def assert_refused(web: httpx.Client) -> None:
    other = web.post("/videos", content=b"VIDEO of another cat", headers={"Idempotency-Key": "cat"})
    assert other.status_code == 409
    assert other.json()["detail"] == "cat was uploaded before, with other bytes: choose another name"


@pytest.mark.slow("starts many programs")
def test_every_shop_of_the_product_centre_forgets_what_changed(programs: Programs) -> None:
    centre = programs.web("uvicorn", "examples.product_centre.centre:web", "--log-level", "warning")
    programs.all_answer()  # it makes the topic
    shops = [
        programs.web("uvicorn", "examples.product_centre.shop:web", "--log-level", "warning")
        for _ in range(2)
    ]
    programs.start("postroom", "worker", "examples.product_centre.centre:app")
    programs.all_answer()
    for price in (30, 20, 9):
        new = {"title": f"Tea for {price}", "price": price}
        version = centre.put("/products/tea", json=new).json()["version"]
        for shop in shops:  # each had it in its cache, and each is told
            until(lambda: shop.get("/products/tea").json()["version"] == version)  # noqa: B023
    assert shops[0].get("/products/coffee").status_code == 404

    def found(query: str) -> list[object]:
        with contextlib.closing(sqlite3.connect(programs.environment["PRODUCTS_DB"])) as rows:
            return [row[0] for row in rows.execute(query)]

    until(lambda: found("SELECT word FROM found_by ORDER BY word") == ["9", "for", "tea"])
    until(lambda: found("SELECT price FROM alerts") == [9])


@pytest.mark.slow("starts many programs")
def test_a_shop_that_was_closed_or_forgotten_shows_what_is_new(programs: Programs, tmp_path: Path) -> None:
    """Of a shop that stood still for too long nobody knew; it showed the old price for ever."""
    centre = programs.web("uvicorn", "examples.product_centre.centre:web", "--log-level", "warning")

    def shop(**name: str) -> tuple[httpx.Client, subprocess.Popen[bytes]]:
        web = programs.web("uvicorn", "examples.product_centre.shop:web", "--log-level", "warning", **name)
        programs.all_answer()
        return web, programs.started[-1]

    def change(price: int) -> None:
        assert centre.put("/products/tea", json={"title": "Tea", "price": price}).status_code == 200

    def shows(web: httpx.Client, price: int) -> bool:
        return bool(web.get("/products/tea").json()["price"] == price)

    programs.all_answer()
    change(30)
    named = {"SHOP": "north", "SHOP_CACHE": str(tmp_path / "north.cache")}
    (south, still), (north, closed) = shop(), shop(**named)
    assert shows(south, 30) and shows(north, 30)
    closed.terminate()
    closed.wait(LIMIT)
    change(20)
    north, paused = shop(**named)  # with the cache it had
    until(lambda: shows(north, 20) and shows(south, 20))
    with postroom.sync.connect(programs.environment["POSTROOM_URL"]) as mq:
        for process in (still, paused):
            process.send_signal(signal.SIGSTOP)
        for group in mq.groups("products"):
            if group.name.startswith("cache@"):
                mq.delete_group("products", group.name, force=True)  # as is done after ten idle minutes
        change(9)
        for process in (still, paused):
            process.send_signal(signal.SIGCONT)
    until(lambda: shows(north, 9) and shows(south, 9))
    change(8)
    until(lambda: shows(north, 8) and shows(south, 8))


def test_a_video_may_take_hours() -> None:
    from examples.video_upload.worker import app

    assert app.subscriptions[0].consumer["max_handling"] == "12h"


@pytest.mark.slow("starts programs")
def test_all_sms_come_through_a_gateway_that_refuses_some(programs: Programs) -> None:
    gateway = programs.web("examples.sms_gateway.gateway", port="", path="/")
    programs.environment["GATEWAY"] = str(gateway.base_url)
    programs.run("examples.sms_gateway.sms", "prepare")
    programs.start("postroom", "worker", "examples.sms_gateway.sms:app")
    numbers = [f"+49{n:03}" for n in range(25)]
    programs.run("examples.sms_gateway.sms", "send", *numbers, "not-a-number", "Hello")
    programs.all_answer()
    until(lambda: gateway.get("/").json()["sent"] == numbers)
    assert gateway.get("/").json()["refused"] > 0
    with postroom.sync.connect(programs.environment["POSTROOM_URL"]) as mq:
        until(lambda: mq.lag("sms", "gateway").total.messages == 0)
        assert [dead.reason for dead in mq.dead_letters("sms", "gateway")] == ["'not-a-number' is no number"]
        assert [rate.messages_per_s for rate in mq.rates()] == [100]


@pytest.mark.slow("starts programs")
def test_the_shop_on_flask_sends_from_a_request_and_bills_in_the_worker(programs: Programs) -> None:
    programs.run("flask", "--app", "examples.flask_app.shop", "prepare")
    web = programs.web("flask", "--app", "examples.flask_app.shop", "run", path="/")
    programs.start("postroom", "worker", "examples.flask_app.shop:messages")
    programs.all_answer()
    assert web.post("/orders/7", data={"total": 990}).json() == {"number": "7", "bill": "/orders/7/bill"}
    wrong = web.post("/orders/8", data={"total": "much"})
    assert (wrong.status_code, wrong.json()["error"]) == (400, "name the total, a number of cents: total=990")
    until(lambda: web.get("/orders/7/bill").status_code == 200)
    assert web.get("/orders/7/bill").json() == {"number": "7", "total": 990}


@pytest.mark.slow("starts programs")
@pytest.mark.parametrize(
    ("module", "args", "said"),
    [
        ("sms_gateway.gateway", [], "usage: python -m examples.sms_gateway.gateway PORT"),
        ("sms_gateway.gateway", ["door"], "usage: python -m examples.sms_gateway.gateway PORT"),
        ("sms_gateway.sms", [], "usage: python -m examples.sms_gateway.sms prepare | send NUMBER … TEXT"),
        ("sms_gateway.sms", ["send", "Hi"], "usage: python -m examples.sms_gateway.sms prepare | send"),
        ("sms_gateway.sms", ["send", "+491", "Hi"], "there is no topic 'sms'"),
        ("flash_sale.stock", ["phone"], "usage: python -m examples.flash_sale.stock ITEM COUNT"),
        ("order_status.orders", ["prepared"], "usage: python -m examples.order_status.orders prepare"),
        ("bank_transfer.bank", ["rob"], "usage: python -m examples.bank_transfer.bank prepare | transfer"),
    ],
)  # fmt: skip
def test_what_is_typed_wrongly_gets_a_sentence(
    programs: Programs, module: str, args: list[str], said: str
) -> None:
    assert ran(f"examples.{module}", *args, status=1, **programs.environment).startswith(said)
