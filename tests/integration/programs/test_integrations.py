"""FastAPI, Flask and Django, for real: a web request sends, a worker beside it handles."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.requests import HTTPConnection

import postroom
import postroom.sync
from postroom import UsageError
from postroom.integrations.fastapi import Health, Queue, app_health, health, queue
from postroom.integrations.flask import Postroom
from postroom.integrations.process import PerProcess

LONG = 60


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path}/queue.db"
    with postroom.sync.connect(found) as mq:
        mq.create_topic("orders", partitions=1)
    return found


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


# ---- one connection for each process ----


def test_threads_share_a_connection_and_a_child_has_its_own(url: str) -> None:
    connections = PerProcess(url)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(connections.get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert found[0].send("orders", b"1").offset == 0
    connections.close()
    assert connections.get() is not found[0] and connections.get().send("orders", b"2").offset == 1
    connections.close()
    connections.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_opens_its_own(url: str) -> None:
    """As a pre-fork server does: the program was loaded, and used, before."""
    program = """
        import os, sys
        from postroom.integrations.process import PerProcess
        connections = PerProcess(sys.argv[1])
        connections.get().send("orders", b"parent")
        here, there = os.pipe(), os.pipe()
        if os.fork() == 0:
            connections.get().send("orders", b"child")
            os.write(here[1], b"x"), os.read(there[0], 1)  # the parent opens and closes its own meanwhile
            connections.get().send("orders", b"child, later")
            sys.exit(0)
        os.read(here[0], 1)
        connections.get().send("orders", b"parent again")
        connections.close()
        os.write(there[1], b"x")
        _, status = os.wait()
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), url], timeout=LONG, check=False
    )
    assert ran.returncode == 0
    with postroom.sync.connect(url) as mq:
        values = [m.value for m in mq.read("orders")]
    assert values == [b"parent", b"child", b"parent again", b"child, later"]


# ---- FastAPI ----


@contextlib.contextmanager
def served(api: FastAPI) -> Iterator[str]:
    """The application in a real server, in a thread."""
    server = uvicorn.Server(uvicorn.Config(api, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(LONG)


def test_fastapi_sends_from_a_request_and_handles_beside_it(url: str) -> None:
    messages, handled = postroom.App(url), threading.Event()
    api = FastAPI(lifespan=messages.lifespan)

    @messages.subscribe("orders", group="billing")
    async def bill(order: dict[str, int]) -> None:
        assert order == {"number": 7}
        handled.set()

    @api.post("/orders", status_code=202)
    async def order(mq: Queue) -> dict[str, Any]:
        receipt = await mq.send("orders", b'{"number": 7}')
        return {"offset": receipt.offset}

    with served(api) as address:
        answer = httpx.post(f"{address}/orders", timeout=LONG)
        assert (answer.status_code, answer.json()) == (202, {"offset": 0})
        assert handled.wait(LONG)
    assert not messages.running
    with postroom.sync.connect(url) as mq:
        assert mq.lag("orders", "billing").total.messages == 0


def test_fastapi_without_the_lifespan_says_what_is_missing() -> None:
    with pytest.raises(UsageError, match=r"lifespan=app\.lifespan"):
        queue(HTTPConnection({"type": "http"}))
    with pytest.raises(UsageError, match=r"lifespan=app\.lifespan"):
        app_health(HTTPConnection({"type": "http"}))


def test_fastapi_shows_a_handler_that_waits_for_its_topic(url: str) -> None:
    messages = postroom.App(url)
    api = FastAPI(lifespan=messages.lifespan)
    api.add_api_route("/health", health)

    @messages.subscribe("orders", group="billing")
    async def bill(order: bytes) -> None: ...

    @messages.subscribe("parcels", group="billing")
    async def pack(order: bytes) -> None: ...

    @api.get("/handlers")
    async def handlers(found: Health) -> list[str]:
        return [f"{one.name} {one.state}" for one in found.handlers]

    with served(api) as address:
        answer = httpx.get(f"{address}/health", timeout=LONG)
        assert answer.status_code == 503 and not answer.json()["ok"]
        assert [one["state"] for one in answer.json()["handlers"]] == ["running", "waiting"]
        assert "topic 'parcels' does not exist yet; waiting for it" in answer.json()["handlers"][1]["error"]
        with postroom.sync.connect(url) as mq:
            mq.create_topic("parcels")
        until(lambda: httpx.get(f"{address}/health", timeout=LONG).status_code == 200)
        shown = httpx.get(f"{address}/handlers", timeout=LONG).json()
        assert shown == ["orders/billing (bill) running", "parcels/billing (pack) running"]


# ---- Flask ----


def test_flask_sends_from_a_request(url: str) -> None:
    app, shop = flask.Flask("shop"), Postroom()
    app.config["POSTROOM_URL"] = url
    with pytest.raises(UsageError, match="init_app"):
        shop.mq  # noqa: B018
    shop.init_app(app)

    @app.post("/orders")
    def order() -> dict[str, int]:
        return {"offset": shop.mq.send("orders", b"1").offset}

    assert app.test_client().post("/orders").json == {"offset": 0}
    assert app.extensions["postroom"] is shop
    shop.close()


async def test_handlers_have_the_application_of_flask(url: str) -> None:
    web, shop = flask.Flask("shop"), Postroom()
    web.config.update(POSTROOM_URL=url, CURRENCY="EUR")
    shop.init_app(web)
    app, seen = postroom.App(url), asyncio.Queue[str]()
    loop = asyncio.get_running_loop()
    app.middleware(shop.context)

    @app.subscribe("orders", group="billing")
    def bill(order: bytes) -> None:
        loop.call_soon_threadsafe(seen.put_nowait, flask.current_app.config["CURRENCY"])

    async with app:
        await app.send("orders", b"1")
        assert await asyncio.wait_for(seen.get(), LONG) == "EUR"


async def test_flask_sees_the_handlers_of_its_worker(url: str) -> None:
    web = flask.Flask("shop")
    web.config["POSTROOM_URL"] = url
    shop, messages = Postroom(web), postroom.App(url)

    @messages.subscribe("orders", group="billing")
    async def bill(order: bytes) -> None: ...

    @messages.subscribe("orders", group="cache", mode="broadcast", member="shop-1")
    async def refresh(order: bytes) -> None: ...

    @messages.subscribe("parcels", group="billing")
    async def pack(order: bytes) -> None: ...

    @web.get("/health")
    def health() -> tuple[dict[str, Any], int]:
        found = shop.health(messages)
        return found.as_dict(), 200 if found.ok else 503

    def states() -> list[str]:
        answer = web.test_client().get("/health")
        assert answer.json is not None and answer.status_code == (200 if answer.json["ok"] else 503)
        return [one["state"] for one in answer.json["handlers"]]

    assert await asyncio.to_thread(states) == ["failed", "failed", "waiting"]  # there is no worker
    async with postroom.connect(url) as mq:
        await mq.create_topic("parcels")
    async with messages:  # as `postroom worker` does in its own process
        assert await asyncio.to_thread(states) == ["running"] * 3
    assert await asyncio.to_thread(states) == ["failed"] * 3
    await asyncio.to_thread(shop.close)


def test_flask_says_that_the_queue_is_away(tmp_path: Path) -> None:
    web = flask.Flask("shop")
    web.config["POSTROOM_URL"] = f"sqlite:///{tmp_path}/no/such/folder.db"
    messages = postroom.App("memory://")

    @messages.subscribe("orders", group="billing")
    async def bill(order: bytes) -> None: ...

    found = Postroom(web).health(messages)
    assert not found.ok and str(found.handlers[0].error).startswith("the queue cannot be asked: ")


def test_flask_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTROOM_URL", raising=False)
    with pytest.raises(UsageError, match="POSTROOM_URL"):
        Postroom(flask.Flask("shop"))


# ---- Django ----

SETTINGS = """
    SECRET_KEY = "x"
    INSTALLED_APPS = ["postroom.integrations.django", "shop"]
    DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "{path}/shop.db",
                              "OPTIONS": {{"timeout": 30}}}}}}
    ROOT_URLCONF = "shop.urls"
    ALLOWED_HOSTS = ["*"]
    USE_TZ = True
    DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
    POSTROOM_URL = "{url}"
    POSTROOM_APP = "shop.messages:app"
"""
MODELS = """
    from django.db import models

    class Bill(models.Model):
        text = models.CharField(max_length=50)
        fresh = models.BooleanField()  # the handler found no connection open
"""
URLS = """
    from django.http import JsonResponse
    from django.urls import path
    from postroom.integrations.django import health_view, queue

    def buy(request):
        receipt = queue().send("orders", request.GET["what"].encode())
        return JsonResponse({"offset": receipt.offset}, status=202)

    urlpatterns = [path("buy", buy), path("health", health_view)]
"""
MESSAGES = """
    from asgiref.sync import sync_to_async
    from django.db import connection
    from postroom.integrations.django import App
    from shop.models import Bill

    app = App(grace=5)

    def opened():
        return connection.connection is not None

    @app.subscribe("orders", group="billing", concurrency=1)
    def bill(order: str) -> None:
        fresh = not opened()
        Bill.objects.create(text=order, fresh=fresh)

    @app.subscribe("orders", group="mailing", concurrency=1)
    async def mail(order: str) -> None:
        fresh = not await sync_to_async(opened)()
        await Bill.objects.acreate(text="mail " + order, fresh=fresh)
"""
BUY = """
    import django, sys
    django.setup()
    from django.test import Client
    for what in sys.argv[1:]:
        assert Client().get("/buy?what=" + what).status_code == 202
"""
HEALTH = """
    import django
    django.setup()
    from django.test import Client
    answer = Client().get("/health")
    print(answer.status_code, *(one["state"] for one in answer.json()["handlers"]))
"""


@pytest.fixture
def project(tmp_path: Path, url: str) -> Path:
    """A small project of Django, with its tables."""
    shop = tmp_path / "shop"
    shop.mkdir()
    for name, text in {
        "__init__.py": "",
        "settings.py": SETTINGS.format(path=tmp_path, url=url),
        "models.py": MODELS,
        "urls.py": URLS,
        "messages.py": MESSAGES,
    }.items():
        (shop / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


def environment(project: Path) -> dict[str, str]:
    paths = [str(project), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DJANGO_SETTINGS_MODULE": "shop.settings"}


def manage(project: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "django", *args], cwd=project, env=environment(project), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LONG, check=False,
    )  # fmt: skip


@contextlib.contextmanager
def worker(project: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "django", "postroom_worker"], cwd=project, env=environment(project), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def health_of(project: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HEALTH)], cwd=project, env=environment(project), text=True,
        stdout=subprocess.PIPE, timeout=LONG, check=True,
    ).stdout.strip()  # fmt: skip


def bills(project: Path) -> list[tuple[str, int]]:
    with contextlib.closing(sqlite3.connect(project / "shop.db", timeout=30)) as database:
        return database.execute("SELECT text, fresh FROM shop_bill ORDER BY id").fetchall()


@pytest.mark.slow("starts programs")
def test_django_views_send_and_a_worker_handles_with_fresh_connections(project: Path) -> None:
    assert manage(project, "migrate", "--run-syncdb", "-v", "0").returncode == 0
    bought = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BUY), "book", "pen"],
        cwd=project, env=environment(project), timeout=LONG, check=False,
    )  # fmt: skip
    assert bought.returncode == 0
    assert health_of(project) == "503 failed failed"  # no worker runs
    with worker(project) as process:
        until(lambda: len(bills(project)) == 4 or process.poll() is not None)
        assert health_of(project) == "200 running running"
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LONG)
    assert process.returncode == 0, said
    assert "orders/billing (bill)" in said and said.splitlines()[-1].startswith("stopped")
    assert sorted(bills(project)) == [("book", 1), ("mail book", 1), ("mail pen", 1), ("pen", 1)]


@pytest.fixture
def settings() -> Any:
    """Django's, in this process."""
    from django.conf import settings

    if not settings.configured:
        settings.configure(POSTROOM_URL="sqlite:///x.db")
    return settings


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("POSTROOM_URL", "", "postroom.E001"),
        ("POSTROOM_URL", "oracle://x", "postroom.E002"),
        ("POSTROOM_URL", "memory://", "postroom.W001"),
        ("POSTROOM_APP", "shop.messages", "postroom.E003"),
    ],
)
def test_django_checks_the_settings(name: str, value: str, said: str) -> None:
    from django.test import override_settings

    from postroom.integrations.django.apps import check_settings

    with override_settings(**{"POSTROOM_URL": "sqlite:///x.db", name: value}):
        assert [found.id for found in check_settings(None)] == [said]
    assert check_settings(None) == []


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("app", "said"),
    [(None, "POSTROOM_APP"), ("test_nothing:app", "no module"), ("json:app", "no App at all")],
)
def test_the_worker_says_which_app_is_missing(app: str | None, said: str) -> None:
    from django.core.management.base import CommandError

    from postroom.integrations.django.management.commands.postroom_worker import Command

    with pytest.raises(CommandError, match=said):
        Command().handle(app=app)
