"""Every route of openapi.json, with hostile values made from its own description: never a broker's fault.

`POSTROOM_HOSTILE=all` sends every one of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

import pytest

from postroom.http.app import HttpLimits
from postroom.http.models import Handle
from tests.unit.http.http_client import API, Stage, staged

EVERYTHING = os.environ.get("POSTROOM_HOSTILE") == "all"
NUMBERS = (-(2**63), -1, 0, 1, 1001, 2**31, 2**53, 2**62, 2**63, 2**70, 1e400, 0.5)
TEXTS = (
    "",
    "x" * 61,
    "x" * 251,
    "x" * 3000,
    "a\0b",
    "..",
    "a/b",
    "\u202e",
    "a" + ".g.dead" * 30,
    "10m",
    "-1",
)
OWN = {"topic": "orders", "group": "g", "name": "first", "id": "i", "to": "earliest", "handle": "x"}


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged(dev=False) as stage:
        for right in ("send", "consume", "manage"):
            stage.add(right, f"{right}:orders")
        stage.add("nobody")
        stage.add("all", "send:*", "consume:*", "manage:*")
        await renewed(stage)
        yield stage


async def renewed(stage: Stage) -> None:
    topics = await stage.get("/topics", who="all")
    if "orders" not in [topic["name"] for topic in topics]:
        await stage.post("/topics", {"name": "orders", "partitions": 1}, 201, who="all")
    groups = await stage.get("/topics/orders/groups", who="all")
    if "g" not in [group["name"] for group in groups]:
        await stage.post("/topics/orders/groups", {"group": "g"}, 201, who="all")


# ---- from the description ----


def resolved(schema: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def sound(schema: dict[str, Any], described: dict[str, Any], name: str = "") -> Any:
    schema = resolved(schema, described)
    if name in OWN:
        return OWN[name]
    if "default" in schema:
        return schema["default"]
    if "enum" in schema or "const" in schema:
        return schema.get("const") or schema["enum"][0]
    if "anyOf" in schema:
        return sound(schema["anyOf"][0], described)
    if schema.get("type") == "object":
        wanted = schema.get("required", ())
        return {one: sound(schema["properties"][one], described, one) for one in wanted}
    if schema.get("type") == "array":
        return [sound(schema["items"], described)] if schema.get("minItems") else []
    return {"integer": 1, "number": 1, "boolean": True, "string": "x"}.get(schema.get("type", ""))


def hostile(schema: dict[str, Any], described: dict[str, Any], depth: int = 3) -> Iterator[Any]:
    """Values that are taken, and values that are not."""
    schema = resolved(schema, described)
    for one in schema.get("anyOf", ()):
        yield from hostile(one, described, depth)
    kind = schema.get("type")
    if kind in ("integer", "number"):
        yield from NUMBERS
    elif kind == "string":
        yield from (*TEXTS, "x" * 100_000)
    elif kind == "array":
        one = sound(schema["items"], described)
        yield from ([], [one, one], [one] * 10_000, [one] * 10_001, [None])
        yield from ([value] for value in hostile(schema["items"], described, depth - 1) if depth)
    elif kind == "object" and "properties" in schema:
        base = sound(schema, described)
        for name, one in schema["properties"].items():
            for value in hostile(one, described, depth - 1) if depth else ():
                yield {**base, name: value}
        yield {**base, "unknown": 1}
    elif kind == "object":
        yield from ({}, {"0": 2**70}, {str(n): n for n in range(10_001)}, {"-1": -1}, {"x" * 1000: 1})
    yield from (None, [], {}, "x", 5)


def calls(described: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Method, path with its query, and body."""
    for path, verbs in described["paths"].items():
        for method, about in verbs.items():
            places = [one for one in about.get("parameters", ()) if one["in"] == "path"]
            queries = [one for one in about.get("parameters", ()) if one["in"] == "query"]
            named = path.format(**{one["name"]: OWN.get(one["name"], "x") for one in places})
            content = about.get("requestBody", {}).get("content", {}).get("application/json")
            body = sound(content["schema"], described) if content else None
            for place in places:
                for text in TEXTS:
                    others = {one["name"]: OWN.get(one["name"], "x") for one in places}
                    yield method, path.format(**{**others, place["name"]: quote(text, safe="")}), body
            for query in queries:
                for value in (*NUMBERS, *TEXTS[:5]):
                    yield method, f"{named}?{query['name']}={quote(str(value))}", body
            for value in hostile(content["schema"], described) if content else ():
                yield method, named, value
            yield method, named, body


async def test_no_route_has_a_fault_for_anybody(stage: Stage) -> None:
    described = (await stage.client.get("/openapi.json")).json()
    seen: dict[int, int] = {}
    rights = [*stage.tokens]
    for number, (method, path, body) in enumerate(calls(described)):
        if path == "/ready" or (number % 4 and not EVERYTHING):
            continue
        who = rights[number // 4 % len(rights)] if number % 3 else "all"
        headers = {"Authorization": f"Bearer {stage.tokens[who]}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body).encode()
        came = await stage.client.request(method.upper(), path, headers=headers, content=content)
        assert came.status_code not in (500, 501, 502), (
            f"{who}: {method} {path} {str(body)[:200]}: {came.text}"
        )
        assert len(came.content) < 100_000 or came.status_code < 300, f"{method} {path[:200]}: repeats it"
        seen[came.status_code] = seen.get(came.status_code, 0) + 1
        if method == "delete":
            await renewed(stage)
    assert seen[200] > 20
    assert seen[400] > 100
    assert seen[403] > 50


# ---- limits ----


async def test_names_in_a_path_are_short(stage: Stage) -> None:
    path = f"{API}/topics/{'x' * 5000}"
    error = await stage.error("GET", path, 414, who="nobody")
    assert error["code"] == "too_large"


async def test_only_messages_may_be_many_megabytes() -> None:
    async with staged(limits=HttpLimits(body_bytes=5 << 20, other_bytes=1 << 20)) as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
        large = b"x" * (2 << 20)
        await stage.call("POST", f"{API}/topics/orders/messages", 202, content=large)
        error = await stage.error("POST", f"{API}/topics/orders/groups/g/settle", 413, content=large)
        assert error["details"]["limit"] == 1 << 20


async def test_a_handle_of_another_topics_partition_settles_nothing(stage: Stage) -> None:
    await stage.post("/topics", {"name": "others", "partitions": 1}, 201, who="all")
    store = stage.broker.store
    elsewhere = store.catalog.topic("others").route.ranges[0].partition_id
    for place in (elsewhere, 10**6):
        handle = Handle("orders", place, 7, 5).encode()
        for how in ("acks", "extends"):
            error = await stage.error(
                "POST", f"{API}/topics/orders/groups/g/settle", 404, who="consume", json={how: [handle]}
            )
            assert error["code"] == "unknown_partition"
        assert store.progress.peek(store.catalog.group("orders", "g"), [place]) == {}


async def test_many_handles_are_answered_in_one_pass(stage: Stage) -> None:
    """Each that was lost was compared with each that was named."""
    place = stage.broker.store.catalog.topic("orders").route.ranges[0].partition_id
    acks = [Handle("orders", place, 7, offset * 2).encode() for offset in range(10_000)]
    begun = time.thread_time()
    error = await stage.error(
        "POST", f"{API}/topics/orders/groups/g/settle", 409, who="consume", json={"acks": acks}
    )
    assert time.thread_time() - begun < 2
    assert len(error["details"]["lost"]) == 10_000
