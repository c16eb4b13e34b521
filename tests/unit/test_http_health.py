"""Health and readiness: what they look at, how long, and how often."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from postroom.errors import StoreUnavailable
from postroom.http import health
from postroom.http.health import Readiness
from tests.unit.http_client import staged


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

        def away() -> Any:
            raise StoreUnavailable("password=hunter2 cannot be reached")

        monkeypatch.setattr(stage.broker.store.brokers, "live", away)
        error = await stage.error("GET", "/ready", 503)
        assert error["retriable"] is True and "store_unavailable" in error["message"]
        assert "hunter2" not in str(error)
        monkeypatch.undo()
        assert (await stage.client.get("/ready")).status_code == 200


async def test_not_ready_while_the_store_hangs_and_one_question_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with staged() as stage:
        asked, go_on = [], threading.Event()

        def hangs() -> Any:
            asked.append(True)
            go_on.wait(20)
            return []

        monkeypatch.setattr(stage.broker.store.brokers, "live", hangs)
        readiness = Readiness(stage.service, answer_s=0.1)
        for _ in range(3):
            errors = await asyncio.gather(*(readiness.why_not() for _ in range(5)))
            assert all(error is not None and "0.1 seconds" in str(error) for error in errors)
        assert len(asked) == 1
        go_on.set()
        async with asyncio.timeout(20):
            while await readiness.why_not() is not None:
                pass
        assert len(asked) <= 2


async def test_an_answer_is_remembered_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged() as stage:
        asked = []
        monkeypatch.setattr(stage.broker.store.brokers, "live", lambda: asked.append(True) or [])
        readiness = Readiness(stage.service)
        for _ in range(5):
            assert await readiness.why_not() is None
        assert len(asked) == 1
        monkeypatch.setattr(health, "_REMEMBER_S", 0)
        assert await readiness.why_not() is None
        assert len(asked) == 2


async def test_not_ready_while_stopping() -> None:
    async with staged() as stage:
        stage.service.stop()
        assert "stopping" in (await stage.error("GET", "/ready", 503))["message"]
        assert (await stage.client.get("/health")).status_code == 200
