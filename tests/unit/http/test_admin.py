"""The admin API: topics, groups, routes, shards, rates, brokers; and what it says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.http.http_client import API, Stage, staged


@pytest.fixture
async def stage() -> Any:
    async with staged() as stage:
        yield stage


async def test_topics(stage: Stage) -> None:
    made = await stage.post("/topics", {"name": "orders", "partitions": 2, "retention": "1d"}, 201)
    assert (made["partitions"], made["settings"]["retention_ms"]) == (2, 86_400_000)
    await stage.error("POST", f"{API}/topics", 409, json={"name": "orders"})
    await stage.post("/topics", {"name": "orders", "exist_ok": True}, 201)
    found = await stage.error(
        "POST", f"{API}/topics", 409, json={"name": "orders", "exist_ok": True, "partitions": 4}
    )
    assert "partitions 2 (asked for: 4)" in str(found)
    await stage.call("POST", f"{API}/topics/orders/messages", 202, content=b"x")
    changed = (await stage.call("PATCH", f"{API}/topics/orders", json={"max_backlog": 10})).json()
    assert (changed["settings"]["max_backlog"], changed["settings"]["retention_ms"]) == (10, 86_400_000)
    assert (await stage.get("/topics/orders"))["messages"] == 1
    assert await stage.post("/topics/orders/purge") == {"purged": 1}
    await stage.call("DELETE", f"{API}/topics/orders", 204)
    assert await stage.get("/topics") == []
    await stage.error("DELETE", f"{API}/topics/orders", 404)


async def test_a_topic_for_kafka_clients(stage: Stage) -> None:
    made = await stage.post("/topics", {"name": "orders", "kafka_partitions": 3}, 201)
    assert (made["partitions"], made["settings"]["kafka_partitions"]) == (3, 3)
    wrong = {"name": "others", "kafka_partitions": 3, "partitions": 4}
    await stage.error("POST", f"{API}/topics", 400, json=wrong)


async def test_groups(stage: Stage) -> None:
    await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
    for _ in range(3):
        await stage.call("POST", f"{API}/topics/orders/messages", 202, content=b"x")
    base = "/topics/orders/groups"
    made = await stage.post(base, {"group": "billing", "lease": "1m", "start": {"0": 1}}, 201)
    assert made["settings"]["lease_ms"] == 60_000
    await stage.post(base, {"group": "billing", "lease": "1m", "exist_ok": True}, 201)
    await stage.error("POST", f"{API}{base}", 409, json={"group": "billing", "lease": "2m", "exist_ok": True})
    assert (await stage.get(f"{base}/billing/lag"))["total"]["messages"] == 2
    await stage.error("POST", f"{API}{base}", 409, json={"group": "billing"})
    altered = (await stage.call("PATCH", f"{API}{base}/billing", json={"max_attempts": 3})).json()
    assert altered["settings"]["max_attempts"] == 3
    assert (await stage.post(f"{base}/billing/pause"))["paused"] is True
    assert (await stage.post(f"{base}/billing/poll", {}))["messages"] == []
    assert (await stage.post(f"{base}/billing/resume"))["paused"] is False
    await stage.error("POST", f"{API}{base}/billing/reset", 409, json={"to": "latest"})  # a member lives
    for to, left in (("latest", 0), ("earliest", 3), ("2020-01-01T00:00:00Z", 3), ({"0": 2}, 1)):
        await stage.post(f"{base}/billing/reset", {"to": to, "force": True})
        assert (await stage.get(f"{base}/billing/lag"))["total"]["messages"] == left
    await stage.error("POST", f"{API}{base}/billing/reset", 400, json={"to": "someday", "force": True})
    planned = await stage.post(f"{base}/billing/reset", {"to": {"0": 1}, "dry_run": True})
    done = await stage.post(f"{base}/billing/reset", {"to": {"0": 1}, "force": True})
    assert planned["partitions"] == done["partitions"] and done["partitions"][0]["after"] == 1
    assert (planned["dry_run"], done["dry_run"]) == (True, False)
    await stage.error("POST", f"{API}{base}/billing/reset", 400, json={"to": {"0": 99}, "force": True})
    await stage.error("DELETE", f"{API}{base}/billing", 409)
    await stage.call("DELETE", f"{API}{base}/billing?force=true", 204)
    assert await stage.get(base) == []
    await stage.error("GET", f"{API}{base}/billing/lag", 404)


async def test_a_group_is_converted_and_goes_on_where_it_was(stage: Stage) -> None:
    await stage.post("/topics", {"name": "orders", "kafka_partitions": 1}, 201)
    for _ in range(3):
        await stage.call("POST", f"{API}/topics/orders/messages", 202, content=b"x")
    base = "/topics/orders/groups"
    await stage.post(base, {"group": "billing", "start": {"0": 1}}, 201)
    planned = await stage.post(f"{base}/billing/convert", {"mode": "kafka", "dry_run": True})
    assert planned["dry_run"] and (await stage.get(base))[0]["settings"]["mode"] == "shared"
    await stage.post(f"{base}/billing/convert", {"mode": "kafka"})
    assert (await stage.get(base))[0]["settings"]["mode"] == "kafka"
    await stage.error("POST", f"{API}{base}/billing/convert", 409, json={"mode": "kafka"})
    await stage.post(f"{base}/billing/convert", {"mode": "ordered"})
    assert (await stage.get(base))[0]["settings"]["mode"] == "ordered"
    assert (await stage.get(f"{base}/billing/lag"))["total"]["messages"] == 2
    await stage.error("POST", f"{API}{base}/nobody/convert", 404, json={"mode": "kafka"})


async def test_routes(stage: Stage) -> None:
    await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
    base = "/topics/orders/route"
    assert (await stage.get(base))["ranges"] == [
        {"partition": 0, "first_slot": 0, "last_slot": 1023, "shard": "first"}
    ]
    split = await stage.post(f"{base}/split", {"partition": 0, "at": 100})
    assert [(r["partition"], r["first_slot"]) for r in split["ranges"]] == [(1, 0), (2, 100)]
    merged = await stage.post(f"{base}/merge", {"one": 1, "other": 2})
    there = {"partition": merged["ranges"][0]["partition"], "shard": "first"}
    await stage.error("POST", f"{API}{base}/move", 400, json=there)  # it is on that shard already
    assert [version["version"] for version in await stage.get(f"{base}/history")] == [1, 2, 3]
    await stage.error("POST", f"{API}{base}/split", 404, json={"partition": 99})


async def test_shards_rates_and_brokers(stage: Stage) -> None:
    await stage.post("/topics", {"name": "orders"}, 201)
    (shard,) = await stage.get("/shards")
    assert (shard["name"], shard["state"]) == ("first", "open")
    await stage.error("POST", f"{API}/shards/nothing/drain", 400)
    wish = {"topic": "orders", "messages_per_s": 100, "bytes_per_s": "1MB"}
    (rate,) = (await stage.call("PUT", f"{API}/rates", json=wish)).json()
    assert (rate["kind"], rate["messages_per_s"], rate["bytes_per_s"]) == ("topic", 100, 1 << 20)
    assert [one["topic"] for one in await stage.get("/rates")] == ["orders"]
    assert (await stage.call("PUT", f"{API}/rates", json={"topic": "orders"})).json() == []
    await stage.error("PUT", f"{API}/rates", 400, json={"messages_per_s": 5})
    stage.broker.store.brokers.enter("b1", "host:7070", "zone-a", 1, 60_000)
    assert await stage.get("/brokers") == [
        {"id": "b1", "address": "host:7070", "zone": "zone-a", "started_at": 1}
    ]


async def test_what_is_not_known_is_refused(stage: Stage) -> None:
    for body in (
        {"name": "x", "partitoins": 3},
        {"name": "a b"},
        {"name": "_own"},
        {"name": "x", "partitions": 0},
        [],
    ):
        await stage.error("POST", f"{API}/topics", 400, json=body)
    error = await stage.error(
        "POST", f"{API}/topics", 400, content=b"{", headers={"Content-Type": "application/json"}
    )
    assert error["code"] == "invalid_request"
    assert (await stage.error("GET", "/api/v2/topics", 404))["code"] == "not_found"
    assert (await stage.error("PUT", f"{API}/topics", 405))["code"] == "method_not_allowed"


async def test_values_are_not_echoed_by_what_refuses_them(stage: Stage) -> None:
    error = await stage.error(
        "POST", f"{API}/topics", 400, json={"name": "x", "retention": {"secret": "s3cret"}}
    )
    assert "s3cret" not in str(error)


async def test_the_page_about_the_api_names_everything_with_its_models(stage: Stage) -> None:
    found = (await stage.client.get("/openapi.json")).json()
    calls = {(method, path) for path, methods in found["paths"].items() for method in methods}
    assert ("post", f"{API}/topics/{{topic}}/messages") in calls
    assert ("post", f"{API}/topics/{{topic}}/groups/{{group}}/settle") in calls
    assert len(calls) > 30
    known = found["components"]["schemas"]
    for name in ("CreateTopic", "TopicInfo", "Lag", "SendMessage", "Polled", "SettleBody"):
        assert name in known
    missing = {ref for ref in refs(found) if ref.removeprefix("#/components/schemas/") not in known}
    assert missing == set()


def refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(refs, value.values()))
    return set().union(*map(refs, value)) if isinstance(value, list) else set()
