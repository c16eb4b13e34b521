"""Health and readiness: what they look at, how long, and how often."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from postroom.errors import StoreFull, StoreUnavailable
from postroom.http.monitoring import Readiness
from postroom.store.sql.session import Area
from tests.tuned import Tune, tuned
from tests.unit.http.http_client import Stage, staged


async def test_health_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(dev=False) as stage:

        def touched(*args: Any) -> Any:
            raise AssertionError("the store was asked")

        monkeypatch.setattr(stage.broker, "_in_thread", touched)
        assert (await stage.client.get("/health")).json() == {"status": "ok"}
        monkeypatch.undo()


async def test_ready_while_the_store_answers() -> None:
    async with staged(dev=False) as stage:
        assert (await stage.client.get("/ready")).json() == {"status": "ready"}
        for path in ("/health", "/ready"):  # as load balancers ask
            assert (await stage.client.head(path)).status_code == 200


async def test_not_ready_while_the_store_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged() as stage:

        def away(*args: Any) -> Any:
            raise StoreUnavailable("password=hunter2 cannot be reached")

        monkeypatch.setattr(stage.broker.store.duties, "acquire", away)
        error = await stage.error("GET", "/ready", 503)
        assert error["retriable"] is True and "store_unavailable" in error["message"]
        assert "hunter2" not in str(error)
        monkeypatch.undo()
        await until_ready(stage)


async def until_ready(stage: Stage) -> None:
    async with asyncio.timeout(20):
        while (await stage.client.get("/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_not_ready_while_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or one that became read-only, can be read; and it says why."""
    async with staged() as stage:

        def full(*args: Any) -> Any:
            raise StoreFull("no space left for /secret/path")

        monkeypatch.setattr(stage.broker.store.duties, "acquire", full)
        error = await stage.error("GET", "/ready", 503)
        assert "no space left" in error["message"] and "/secret" not in str(error)
        monkeypatch.undo()
        await until_ready(stage)


async def test_not_ready_while_messages_find_no_space(monkeypatch: pytest.MonkeyPatch, tune: Tune) -> None:
    """A row of some bytes may still find room where a message does not."""
    tune(http={"ready_fresh_s": 0})
    async with staged() as stage:
        await stage.post("/topics", {"name": "orders"}, 201)

        async def full(*args: Any, **named: Any) -> Any:
            raise StoreFull("no space left")

        monkeypatch.setattr(stage.broker, "append", full)
        await stage.client.post("/api/v1/topics/orders/messages", content=b"x", params={"timeout": 0.2})
        error = await stage.error("GET", "/ready", 503)
        assert "no space left" in error["message"]
        monkeypatch.undo()
        await stage.call("POST", "/api/v1/topics/orders/messages", 202, content=b"x")
        await until_ready(stage)


async def test_a_probe_writes_one_row_and_no_more_for_each_broker() -> None:
    async with staged() as stage:
        for readiness in (Readiness(stage.service), Readiness(stage.service)):
            assert await readiness.why_not() is None
        with stage.broker.store.session.read(Area.LOG) as tx:  # type: ignore[attr-defined]
            assert tx.all("SELECT name FROM postroom_duties WHERE name LIKE 'ready%'") == [("ready",)]


async def test_not_ready_while_the_store_hangs_and_one_question_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with staged() as stage:
        asked, go_on = [], threading.Event()

        def hangs(*args: Any) -> Any:
            asked.append(True)
            go_on.wait(20)
            return True

        monkeypatch.setattr(stage.broker.store.duties, "acquire", hangs)
        readiness = Readiness(stage.service, tuned(http={"ready_answer_s": 0.1}).tuning.http)
        for _ in range(3):
            errors = await asyncio.gather(*(readiness.why_not() for _ in range(5)))
            assert all(error is not None and "0.1 seconds" in str(error) for error in errors)
        assert len(asked) == 1
        go_on.set()
        async with asyncio.timeout(20):
            while await readiness.why_not() is not None:
                pass
        assert len(asked) <= 2


async def test_an_answer_is_remembered_for_a_moment(monkeypatch: pytest.MonkeyPatch, tune: Tune) -> None:
    async with staged() as stage:
        asked = []
        monkeypatch.setattr(stage.broker.store.duties, "acquire", lambda *args: asked.append(True) or True)
        readiness = Readiness(stage.service)
        for _ in range(5):
            assert await readiness.why_not() is None
        assert len(asked) == 1
        tune(http={"ready_fresh_s": 0})
        assert await readiness.why_not() is None
        assert len(asked) == 2


async def test_not_ready_while_stopping() -> None:
    async with staged() as stage:
        stage.service.stop()
        assert "stopping" in (await stage.error("GET", "/ready", 503))["message"]
        assert (await stage.client.get("/health")).status_code == 200
