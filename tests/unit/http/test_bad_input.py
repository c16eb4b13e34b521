"""Whatever is sent to the API is answered, and never with a fault of the broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.http.http_client import API, Stage, staged

DEEP = "[" * 50_000 + "]" * 50_000
ODD: list[str] = [
    *("null", "true", "-1", "0", "0.05", "NaN", "Infinity", "1e400", str(2**31), str(2**63), str(2**70)),
    *('""', '"x"', '"10m"', '"\\u0000"', '"\\ud800"', json.dumps("y" * 5000)),
    *("[]", "[[]]", "{}", '{"0": 1}', '{"a": "b"}', f'{{"0": {2**70}}}', '{"-1": -1}'),
]
TOPIC = {"retention": "1d", "retention_bytes": 1, "keep": "needed", "drop_settled": False, "dedup_window": 0}
TOPIC |= {"max_backlog": 0, "max_backlog_bytes": 0}
GROUP = {"lease": 30, "max_attempts": 3, "exhausted": "dead", "max_hold": 60, "expires": 0}
LISTS = {"acks": [], "retries": [], "releases": [], "dead": [], "extends": []}
MESSAGE = {
    "value": "x",
    "key": "k",
    "headers": {"a": "b"},
    "id": "i",
    "source": "s",
    "delay": 1,
    "expires": 60,
}
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/topics", {**TOPIC, "name": "new", "exist_ok": True, "partitions": 1, "storage": "durable"}),
    ("PATCH", "/topics/orders", TOPIC),
    ("POST", "/topics/orders/groups", {**GROUP, "group": "made", "mode": "ordered", "start": "earliest"}),
    ("PATCH", "/topics/orders/groups/line", GROUP),
    ("POST", "/topics/orders/groups/g/reset", {"to": "earliest", "force": True}),
    ("POST", "/topics/orders/groups/g/convert", {"mode": "kafka", "force": False, "dry_run": True}),
    ("POST", "/topics/orders/groups/g/poll", {"max_messages": 1, "wait_s": 0, "member": "m", "base64": True}),
    ("POST", "/topics/orders/groups/g/settle", {**LISTS, "member": "m"}),
    ("POST", "/topics/orders/groups/g/dead-letters/redrive", {"ids": []}),
    ("POST", "/topics/orders/groups/g/dead-letters/discard", {"ids": []}),
    ("POST", "/topics/orders/route/split", {"partition": 99, "at": 5}),
    ("POST", "/topics/orders/route/merge", {"one": 99, "other": 98}),
    ("POST", "/topics/orders/route/move", {"partition": 99, "shard": "first"}),
    ("PUT", "/rates", {"topic": "orders", "group": "g", "messages_per_s": 5, "bytes_per_s": 5}),
    ("POST", "/topics/orders/messages", {"messages": [{"value": "x"}]}),
]


@pytest.fixture
async def stage() -> Any:
    async with staged() as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
        await stage.post("/topics/orders/groups", {"group": "g"}, 201)
        await stage.post("/topics/orders/groups", {"group": "line", "mode": "ordered"}, 201)
        yield stage


def spoiled(body: dict[str, Any]) -> Iterator[bytes]:
    """The body with each of its fields replaced by each odd value in turn."""
    for name in body:
        for odd in ODD:
            marked = json.dumps({**body, name: "MARK"})
            yield marked.replace('"MARK"', odd).encode()


async def answered(stage: Stage, method: str, path: str, body: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    found = await stage.client.request(method, API + path, content=body, headers=headers)
    assert found.status_code < 500, f"{method} {path} {body[:300]!r}: {found.status_code} {found.text}"
    return found.status_code


@pytest.mark.few(3, "goes through all routes")
@pytest.mark.parametrize(("method", "path", "body"), BODIES, ids=[f"{m} {p}" for m, p, _ in BODIES])
async def test_odd_values_are_refused_or_taken(
    stage: Stage, method: str, path: str, body: dict[str, Any]
) -> None:
    assert await answered(stage, method, path, json.dumps(body).encode()) in (200, 201, 202, 404)
    found = [await answered(stage, method, path, one) for one in spoiled(body)]
    assert 400 in found
    for whole in (
        b"",
        b"{",
        b"null",
        b"5",
        b"[]",
        b"\xff",
        DEEP.encode(),
        b'{"json":' + DEEP.encode() + b"}",
    ):
        await answered(stage, method, path, whole)


async def test_odd_messages_are_refused_or_stored(stage: Stage) -> None:
    for one in spoiled(MESSAGE):
        await answered(stage, "POST", "/topics/orders/messages", b'{"messages": [' + one + b"]}")
    deep = b'{"messages": [{"value": {"json": ' + DEEP.encode() + b"}}]}"
    assert await answered(stage, "POST", "/topics/orders/messages", deep) == 400


async def test_odd_verdicts_on_real_messages(stage: Stage) -> None:
    for kind in ("retries", "releases", "dead"):
        await stage.post("/topics/orders/messages", {"messages": [{"value": "x"}]}, 202)
        (message,) = (await stage.post("/topics/orders/groups/g/poll", {"max_messages": 1}))["messages"]
        for one in spoiled({"delay_s": 1, "reason": "r", "handle": message["handle"]}):
            await answered(
                stage, "POST", "/topics/orders/groups/g/settle", b'{"%s": [%s]}' % (kind.encode(), one)
            )


async def test_odd_headers_of_a_single_message(stage: Stage) -> None:
    for name in ("Key", "Id", "Source", "Delay", "At", "Expires", "Header-X", "Header-"):
        for value in ("", "x", "\xff", "-1", "NaN", "1e400", "y" * 5000, "postroom-"):
            found = await stage.client.post(
                f"{API}/topics/orders/messages",
                content=b"x",
                headers=[(f"X-Postroom-{name}".encode(), value.encode("latin-1"))],
            )
            assert found.status_code in (202, 400), f"{name}: {value!r}: {found.text}"


async def test_odd_names_in_the_path(stage: Stage) -> None:
    for odd in (
        "%00",
        "%2e%2e",
        "a%2Fb",
        "x" * 3000,
        "%F0%9F%98%80",
        "%ff",
        "_own",
        "a.b.dead",
        "-1",
        "orders%20",
    ):
        for path in (
            f"/topics/{odd}", f"/topics/{odd}/groups", f"/topics/{odd}/groups/g/lag", f"/topics/{odd}/route",
            f"/topics/orders/groups/{odd}/lag", f"/topics/orders/groups/{odd}/dead-letters",
        ):  # fmt: skip
            assert await answered(stage, "GET", path, b"") in (200, 400, 404)
        await answered(stage, "POST", f"/topics/orders/groups/{odd}/poll", b"{}")
        await answered(stage, "DELETE", f"/topics/orders/delayed/{odd}", b"")
        await answered(stage, "POST", f"/shards/{odd}/drain", b"")
    for query in ("limit=0", "limit=x", f"limit={2**70}", "limit=-1"):
        path = f"/topics/orders/groups/g/dead-letters?{query}"
        assert await answered(stage, "GET", path, b"") == 400
    for query in ("timeout=0", "timeout=nan", "timeout=inf", "timeout=x", "timeout=1e9"):
        assert await answered(stage, "POST", f"/topics/orders/messages?{query}", b"x") == 400
