"""Sending over HTTP: as JSON, as it is, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

import postroom
from postroom.config import DEFAULTS
from postroom.errors import StoreFull, StoreUnavailable
from postroom.model.access import ANONYMOUS
from postroom.model.messages.slot import slot_of
from tests.unit.http.http_client import API, Stage, staged

PATH = f"{API}/topics/orders/messages"


@pytest.fixture
async def stage() -> Any:
    async with staged() as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 2, "dedup_window": "10m"}, 201)
        yield stage


async def messages(stage: Stage) -> list[postroom.Received]:
    mq = stage.service.caller(ANONYMOUS).mq
    return [message async for message in mq.read("orders")]


async def test_a_list_of_messages(stage: Stage) -> None:
    sent = [
        {"value": "päid", "key": "42", "headers": {"source": "web"}, "id": "o-1"},
        {"value": {"json": {"n": [1, 2.5, None]}}, "key": "42"},
        {"value_b64": base64.b64encode(b"\xff\x00").decode(), "key": "42", "source": "till"},
        {"value": "", "key": "42", "expires": "1h"},
    ]
    found = await stage.post("/topics/orders/messages", {"messages": sent}, 202)
    assert [receipt["offset"] for receipt in found["receipts"]] == [0, 1, 2, 3]
    assert found["receipts"][0]["id"] == "o-1"
    stored = await messages(stage)
    assert [m.value for m in stored] == ["päid".encode(), b'{"n":[1,2.5,null]}', b"\xff\x00", b""]
    assert {m.key for m in stored} == {b"42"}
    assert stored[0].headers == {"source": b"web"} and stored[2].source == "till"
    assert stored[3].expires is not None


async def test_the_key_decides_as_it_does_in_the_sdk(stage: Stage) -> None:
    found = await stage.post(
        "/topics/orders/messages", {"messages": [{"value": "x", "key": f"k{n}"} for n in range(20)]}, 202
    )
    route = await stage.broker.route("orders")
    wanted = [route.of_slot(slot_of(b"k%d" % n)).partition for n in range(20)]
    assert [receipt["partition"] for receipt in found["receipts"]] == wanted


async def test_one_message_as_it_is(stage: Stage) -> None:
    headers = {
        "Content-Type": "text/plain",
        "X-Postroom-Key": "42",
        "X-Postroom-Id": "o-7",
        "X-Postroom-Source": "till",
        "X-Postroom-Header-Kind": "test",
    }
    body = b'{"messages": "not looked into"}\xff'
    found = (await stage.call("POST", PATH, 202, content=body, headers=headers)).json()
    assert found["receipts"] == [
        {
            "partition": found["receipts"][0]["partition"],
            "offset": 0,
            "id": "o-7",
            "duplicate": False,
            "due": None,
        }
    ]
    (stored,) = await messages(stage)
    assert (stored.value, stored.key, stored.source) == (body, b"42", "till")
    assert stored.headers == {"kind": b"test"}


async def test_an_id_sent_again_is_a_duplicate(stage: Stage) -> None:
    body = {"messages": [{"value": "x", "id": "o-1"}]}
    first = (await stage.post("/topics/orders/messages", body, 202))["receipts"][0]
    again = (await stage.post("/topics/orders/messages", body, 202))["receipts"][0]
    assert again == {**first, "duplicate": True}
    assert len(await messages(stage)) == 1


async def test_a_delayed_message_is_due_later_and_can_be_taken_back(stage: Stage) -> None:
    body = {"messages": [{"value": "x", "id": "late/1", "delay": "1h"}]}
    (receipt,) = (await stage.post("/topics/orders/messages", body, 202))["receipts"]
    assert receipt["offset"] == -1 and receipt["due"] is not None
    gone = await stage.call("DELETE", f"{API}/topics/orders/delayed/late/1")
    assert gone.json() == {"cancelled": True}
    again = await stage.call("DELETE", f"{API}/topics/orders/delayed/late/1")
    assert again.json() == {"cancelled": False}


WRONG = (
    b"not json",
    b"[]",
    b"{}",
    b'{"messages": []}',
    b'{"messages": [{}]}',
    b'{"messages": [{"value": "x", "value_b64": "eA=="}]}',
    b'{"messages": [{"value_b64": "%%%"}]}',
    b'{"messages": [{"value": 5}]}',
    b'{"messages": [{"value": "x", "kee": "42"}]}',
    b'{"messages": [{"value": "x", "delay": "soon"}]}',
    b'{"messages": [{"value": "x", "headers": {"postroom-id": "mine"}}]}',
    b'{"messages": [{"value": "x", "at": "yesterday"}]}',
    b'{"messages": [{"value": "\\ud800"}]}',
    b"\xff\xfe",
)


async def test_what_is_wrong_is_refused_and_nothing_is_stored(stage: Stage) -> None:
    for body in WRONG:
        await stage.error("POST", PATH, 400, content=body, headers={"Content-Type": "application/json"})
    assert await messages(stage) == []


async def test_if_one_is_wrong_none_is_sent(stage: Stage) -> None:
    body = {"messages": [{"value": "good"}, {"value": "x", "expires": "whenever"}]}
    error = await stage.error("POST", PATH, 400, json=body)
    assert "messages[1]" in error["message"] and await messages(stage) == []


async def test_a_message_over_the_limit_is_too_large(stage: Stage) -> None:
    error = await stage.error("POST", PATH, 413, content=b"x" * (DEFAULTS.max_message_bytes + 1))
    assert error["code"] == "message_too_large"


async def test_a_mistyped_topic_is_named(stage: Stage) -> None:
    error = await stage.error("POST", f"{API}/topics/ordres/messages", 404, content=b"x")
    assert error["code"] == "unknown_topic" and "orders" in error["message"]


async def test_a_full_backlog_is_told_as_such(stage: Stage) -> None:
    await stage.post("/topics", {"name": "small", "max_backlog": 1}, 201)
    await stage.call("POST", f"{API}/topics/small/messages", 202, content=b"1")
    await asyncio.sleep(DEFAULTS.backlog_look_ms / 1000 + 0.05)  # until it is measured again
    found = await stage.call("POST", f"{API}/topics/small/messages", 429, content=b"2")
    assert found.headers["Retry-After"] == "1" and found.json()["error"]["code"] == "backlog_full"


@pytest.mark.parametrize(("error", "status"), [(StoreFull("no space"), 507), (StoreUnavailable("away"), 504)])
async def test_a_store_that_cannot(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    """Away: nobody knows whether a try was stored, and that is what is said."""

    async def refused(*args: Any, **named: Any) -> Any:
        raise error

    monkeypatch.setattr(stage.broker, "append", refused)
    found = await stage.call("POST", f"{PATH}?timeout=0.2", status, content=b"x")
    assert found.json()["error"]["retriable"] is (status == 507)
    assert ("Retry-After" in found.headers) is (status == 507)


async def test_a_store_that_is_away_before_anything_was_tried(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*args: Any, **named: Any) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(stage.service.broker, "route", refused)
    found = await stage.call("POST", f"{PATH}?timeout=0.2", 503, content=b"x")
    assert "Retry-After" in found.headers


async def test_concurrent_requests_share_batches(stage: Stage) -> None:
    await stage.post("/topics", {"name": "one", "partitions": 1}, 201)
    sends = [stage.call("POST", f"{API}/topics/one/messages", 202, content=b"%d" % n) for n in range(50)]
    found = await asyncio.gather(*sends)
    offsets = sorted(response.json()["receipts"][0]["offset"] for response in found)
    assert offsets == list(range(50))
    batches = dict(stage.service.figures.batches.items())[("one",)]
    assert batches < 25


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_what_is_no_json_is_not_stored_as_json(stage: Stage, number: str) -> None:
    body = f'{{"messages": [{{"value": "ok"}}, {{"value": {{"json": {{"n": [{number}]}}}}}}]}}'
    headers = {"Content-Type": "application/json"}
    error = await stage.error("POST", PATH, 400, content=body.encode(), headers=headers)
    assert error["code"] == "invalid_request" and "messages.1" in error["message"]
    assert await messages(stage) == []
