"""Answers over HTTP are as large as they may be, whatever batches unpack to, and what is left comes later."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postroom.clock import ManualClock
from postroom.http.app import HttpLimits
from postroom.http.models import ANSWER_BYTES, json_bytes
from postroom.model.messages.batch import BatchBuilder
from tests.unit.http.http_client import API, Stage, staged

GROUP = "/topics/orders/groups/billing"
MB = 1 << 20
CLOSE = 64 << 10  # how far an estimate may be off


@pytest.fixture
async def stage() -> Any:
    async with staged(clock=ManualClock(), limits=HttpLimits(answer_s=0.3)) as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
        yield stage


async def append(stage: Stage, *values: bytes) -> None:
    """One batch, small once it is compressed."""
    builder = BatchBuilder("lz4", max_bytes=2**31 - 1)
    for value in values:
        builder.append(1, None, value, [])
    partition_id = (await stage.broker.route("orders")).ranges[0].partition_id
    await stage.broker.append("orders", partition_id, builder.build())


async def poll(stage: Stage, **wish: Any) -> tuple[list[dict[str, Any]], int]:
    answer = await stage.call("POST", f"{API}{GROUP}/poll", json={"max_messages": 1000, **wish})
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found, len(answer.content)


async def drain(stage: Stage, most: int, **wish: Any) -> list[int]:
    """Poll and ack until nothing is left; the offsets as they came."""
    offsets: list[int] = []
    while True:
        found, size = await poll(stage, **wish)
        if not found:
            return offsets
        assert size <= most
        assert all(message["attempt"] == 1 for message in found)
        offsets += [message["offset"] for message in found]
        await stage.post(f"{GROUP}/settle", {"acks": [message["handle"] for message in found]})


async def test_small_batches_that_are_large_when_opened_come_poll_by_poll(stage: Stage) -> None:
    """120 messages of 500 KB in 120 batches of a few KB: 60 MB at once before."""
    for _ in range(120):
        await append(stage, b"a" * 500_000)
    assert await drain(stage, ANSWER_BYTES + CLOSE) == list(range(120))


async def test_a_batch_is_cut_where_the_answer_is_full(stage: Stage) -> None:
    await append(stage, *[b"b" * 900_000] * 10)
    await append(stage, b"small")
    found, size = await poll(stage)
    assert [message["offset"] for message in found] == [0, 1, 2, 3]
    assert size <= ANSWER_BYTES + CLOSE
    total = (await stage.get(f"{GROUP}/lag"))["total"]
    assert total["messages"] == 11
    assert await drain(stage, ANSWER_BYTES + CLOSE) == [4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("wish", [{}, {"base64": True}])
async def test_what_json_makes_larger_is_counted_as_it_is_sent(stage: Stage, wish: dict[str, Any]) -> None:
    """NUL takes six bytes in JSON."""
    for _ in range(12):
        await append(stage, b"\0" * 500_000)
    assert await drain(stage, ANSWER_BYTES + CLOSE, **wish) == list(range(12))


async def test_one_message_is_answered_however_large_it_is(stage: Stage) -> None:
    await append(stage, b"\0" * 3 * MB)
    await append(stage, b"\0" * 3 * MB)
    found, size = await poll(stage)
    assert [message["offset"] for message in found] == [0]
    assert 18 * MB < size < 18 * MB + CLOSE
    assert await drain(stage, 19 * MB) == [1]


async def test_dead_letters_are_listed_as_far_as_they_fit(stage: Stage) -> None:
    for _ in range(12):
        await append(stage, b"c" * 900_000)
    for _ in range(3):
        found, _ = await poll(stage)
        await stage.post(f"{GROUP}/settle", {"dead": [{"handle": m["handle"]} for m in found]})
    answer = await stage.call("GET", f"{API}{GROUP}/dead-letters?limit=1000")
    assert [letter["offset"] for letter in answer.json()] == [0, 1, 2, 3]
    assert len(answer.content) <= ANSWER_BYTES + CLOSE
    chosen = {"ids": [f"{answer.json()[0]['id'].split('-')[0]}-11"]}
    assert await stage.post(f"{GROUP}/dead-letters/discard", chosen) == {"discarded": 1}


async def test_without_room_a_poll_takes_nothing(stage: Stage) -> None:
    await append(stage, b"d" * 500_000)
    others = stage.service.answers.share("others")
    others.hold(stage.service.answers.most)
    error = await stage.error("POST", f"{API}{GROUP}/poll", 503, json={})
    assert error["code"] == "broker_unavailable" and error["retriable"] is True
    others.hold(-others.held)
    (found,), _ = await poll(stage)
    assert (found["offset"], found["attempt"]) == (0, 1)
    assert stage.service.answers.held == 0


async def test_a_client_that_does_not_read_is_cut_off(stage: Stage) -> None:
    await append(stage, *[b"e" * 900_000] * 3)
    sent: list[Any] = []
    most = 0

    async def send(message: Any) -> None:
        nonlocal most
        sent.append(message)
        most = max(most, stage.service.answers.held)
        if len(sent) > 3:
            await asyncio.Event().wait()

    asked = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        if asked:
            return asked.pop()
        return await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST", "path": f"{API}{GROUP}/poll", "raw_path": b"", "query_string": b"",
        "root_path": "", "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1), "server": None,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            await stage.app(scope, receive, send)
    assert max(len(one.get("body", b"")) for one in sent) <= 64 << 10
    assert most > 2 * MB and stage.service.answers.held == 0


def test_the_size_in_json_is_what_json_has() -> None:
    import json

    for value in (b"plain", b'"\\\n\t' * 100, bytes(range(32)) * 9, "Grüße 你好".encode() * 50):
        shown = len(json.dumps(value.decode(), ensure_ascii=False).encode())
        said = json_bytes(value, None, {}) - json_bytes(b"", None, {})
        assert shown - 2 <= said
