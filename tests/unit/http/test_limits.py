"""The door: who, how large, how long. Requests come as raw ASGI, so that chunks and silence can be chosen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from postroom.http.app import HttpLimits
from tests.unit.http.http_client import API, Stage, staged

SMALL = HttpLimits(body_bytes=1000, all_bodies_bytes=1500, body_s=0.2, drained_bytes=2000)
FOREVER = b"(waits)"


class Ask:
    """One request: chunks of a body, and what was answered."""

    def __init__(self, stage: Stage, path: str, chunks: Iterable[bytes], **headers: str) -> None:
        self._stage, self._chunks = stage, list(chunks)
        self.taken = 0
        self.reading = asyncio.Event()
        self._sent: list[dict[str, Any]] = []
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
            "asgi": {"version": "3.0"},
        }

    async def _receive(self) -> dict[str, Any]:
        self.reading.set()
        if not self._chunks or self._chunks[0] is FOREVER:
            await asyncio.Event().wait()
        self.taken += 1
        chunk = self._chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}

    async def _send(self, message: Any) -> None:
        self._sent.append(message)

    async def run(self) -> tuple[int, dict[str, Any]]:
        async with asyncio.timeout(20):
            await self._stage.app(self._scope, self._receive, self._send)
        body = b"".join(message.get("body", b"") for message in self._sent[1:])
        return self._sent[0]["status"], json.loads(body)

    def header(self, name: bytes) -> bytes | None:
        return dict(self._sent[0]["headers"]).get(name)


@pytest.fixture
async def stage() -> Any:
    async with staged(limits=SMALL) as stage:
        await stage.post("/topics", {"name": "orders"}, 201)
        yield stage


PATH = f"{API}/topics/orders/messages"


async def test_a_body_that_says_it_is_too_large_is_not_read(stage: Stage) -> None:
    ask = Ask(stage, PATH, [b"x" * 10], host="localhost", content_length="4000000000")
    status, body = await ask.run()
    assert (
        status == 413 and body["error"]["code"] == "too_large" and body["error"]["details"] == {"limit": 1000}
    )
    assert ask.taken == 0
    assert ask.header(b"connection") == b"close"


async def test_a_body_that_grows_too_large_is_cut_off(stage: Stage) -> None:
    """After a bounded rest of it was thrown away, so that its sender comes to read the answer."""
    ask = Ask(stage, PATH, [b"x" * 400] * 50, host="localhost")
    status, _ = await ask.run()
    assert status == 413 and ask.taken == 3 + 5


async def test_a_body_in_pieces_is_put_together(stage: Stage) -> None:
    status, body = await Ask(stage, PATH, [b"pa", b"", b"id"], host="localhost").run()
    assert status == 202 and body["receipts"][0]["offset"] == 0
    found = await stage.post("/topics/orders/groups/g/poll", {})
    assert [message["value"] for message in found["messages"]] == ["paid"]


async def test_a_body_that_does_not_come_is_not_waited_for(stage: Stage) -> None:
    status, body = await Ask(stage, PATH, [b"pa", FOREVER], host="localhost").run()
    assert status == 408 and body["error"]["retriable"] is True


async def test_all_bodies_together_are_limited(stage: Stage) -> None:
    slow = Ask(stage, PATH, [b"x" * 900, FOREVER], host="localhost")
    waiting = asyncio.create_task(slow.run())
    while slow.taken < 1:
        await slow.reading.wait()
        await asyncio.sleep(0)
    status, body = await Ask(stage, PATH, [b"y" * 900], host="localhost").run()
    assert status == 503 and body["error"]["retriable"] is True
    assert (await waiting)[0] == 408
    status, _ = await Ask(stage, PATH, [b"y" * 900], host="localhost").run()
    assert status == 202  # what the others held is free again


async def test_nobody_unknown_can_send_a_body() -> None:
    async with staged(dev=False, limits=SMALL) as stage:
        ask = Ask(stage, PATH, [b"x"] * 10, host="localhost")
        status, _ = await ask.run()
        assert status == 401 and ask.taken == 0


async def test_a_request_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async with staged(limits=HttpLimits(request_s=0.5)) as stage:
        monkeypatch.setattr(stage.service.broker, "shards", never)
        error = await stage.error("GET", f"{API}/shards", 504)
    assert error["code"] == "timeout"


async def test_a_fault_is_answered_and_hidden(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise ZeroDivisionError("an inner thing")

    monkeypatch.setattr(stage.service.broker, "shards", broken)
    error = await stage.error("GET", f"{API}/shards", 500)
    assert error["code"] == "unexpected" and "inner" not in str(error)


async def test_requests_are_counted_by_route_and_never_by_what_clients_make_up(stage: Stage) -> None:
    await stage.get("/topics/orders")
    await stage.get("/topics/nothing", 404)
    await stage.client.request("BREW", "/made/up")
    counted = dict(stage.service.figures.http.items())
    assert counted[("GET", "/api/v1/topics/{topic}", "200")] == 1
    assert counted[("GET", "/api/v1/topics/{topic}", "404")] == 1
    assert counted[("other", "(none)", "404")] == 1
