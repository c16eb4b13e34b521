"""What stopped, over HTTP: the list, the three decisions, who may make them, and the figures (R23, R48)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from postroom.clock import ManualClock
from postroom.endpoint.values import PollRequest, Settle, Verdict
from tests.unit.http.http_client import API, Stage, staged

GROUP = "/topics/orders/groups/billing"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def stage(clock: ManualClock) -> AsyncIterator[Stage]:
    """a1 and b1 have stopped; a2, a3 and b2 wait behind them. That was a minute ago."""
    async with staged(clock=clock) as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
        wish = {"group": "billing", "mode": "ordered", "exhausted": "stop", "max_attempts": 1}
        await stage.post("/topics/orders/groups", wish, 201)
        values = ("a1", "b1", "a2", "b2", "a3")
        messages = [{"value": value, "key": value[0], "id": value} for value in values]
        await stage.post("/topics/orders/messages", {"messages": messages}, 202)
        request = PollRequest("orders", "billing", "ann", 77, 100, 1 << 20, 0, True)
        (grant,) = (await stage.broker.poll(request)).grants
        failed = tuple(Verdict("retry", at, at, reason="broken") for at in (0, 1))
        await stage.broker.settle("orders", "billing", [Settle("orders", grant.partition_id, 77, failed)])
        clock.advance(60)
        yield stage


async def left(stage: Stage) -> list[str]:
    return [one["id"] for one in await stage.get(f"{GROUP}/stopped")]


async def test_what_stopped_is_listed(stage: Stage, clock: ManualClock) -> None:
    one, other = await stage.get(f"{GROUP}/stopped")
    since = clock.now_ms() - 60_000
    assert one == {
        "id": "a1", "topic": "orders", "group": "billing", "partition": 0, "offset": 0, "key": "a",
        "value": "a1", "value_b64": None, "headers": {}, "timestamp": since, "reason": "broken",
        "attempts": 1, "since": since, "behind": 2, "more_behind": False,
    }  # fmt: skip
    assert (other["id"], other["behind"]) == ("b1", 1)
    assert len(await stage.get(f"{GROUP}/stopped?limit=1")) == 1


async def test_they_are_restarted_skipped_and_dropped(stage: Stage) -> None:
    assert await stage.post(f"{GROUP}/stopped/restart", {"ids": ["b1"]}) == {"restarted": 1}
    assert await left(stage) == ["a1"]
    assert await stage.post(f"{GROUP}/stopped/skip", {"keys": ["a"]}) == {"skipped": 1}
    (letter,) = await stage.get(f"{GROUP}/dead-letters")
    assert (letter["id"], letter["reason"]) == ("a1", "broken")
    assert await stage.post(f"{GROUP}/stopped/drop", {"all": True}) == {"dropped": 0}


async def test_all_are_dropped(stage: Stage) -> None:
    assert await stage.post(f"{GROUP}/stopped/drop", {"all": True}) == {"dropped": 2}
    assert await left(stage) == [] and await stage.get(f"{GROUP}/dead-letters") == []


@pytest.mark.parametrize("verb", ["restart", "skip", "drop"])
async def test_what_is_asked_wrongly_changes_nothing(stage: Stage, verb: str) -> None:
    path = f"{API}{GROUP}/stopped/{verb}"
    for wish in ({}, {"ids": ["a1"], "all": True}, {"ids": ["a1"], "keys": ["a"]}):
        said = await stage.error("POST", path, 400, json=wish)
        assert 'say which: {"ids": [...]}, {"keys": [...]}, or {"all": true}' in str(said)
    said = await stage.error("POST", path, 404, json={"keys": ["a", "c"]})
    assert "has no stopped message with the key 'c'" in str(said)
    assert await left(stage) == ["a1", "b1"]


async def test_who_may_consume_may_decide_and_nobody_else(stage: Stage) -> None:
    stage.add("ann", "consume:orders")
    stage.add("bob", "send:orders")
    assert len(await stage.get(f"{GROUP}/stopped", who="ann")) == 2
    await stage.error("GET", f"{API}{GROUP}/stopped", 403, who="bob")
    for verb in ("restart", "skip", "drop"):
        await stage.error("POST", f"{API}{GROUP}/stopped/{verb}", 403, who="bob", json={"all": True})
    assert await stage.post(f"{GROUP}/stopped/drop", {"ids": ["a1"]}, who="ann") == {"dropped": 1}


async def test_the_age_of_the_oldest_and_what_waits_are_measured(stage: Stage) -> None:
    async def figures() -> tuple[float, ...]:
        stage.app.state.metrics.sampler.last.taken_at = None
        text = (await stage.call("GET", "/metrics")).text
        found = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
        names = ("stopped_messages", "stopped_oldest_age_seconds", "stopped_behind_messages")
        return tuple(found[f"postroom_group_{name}"] for name in names)

    assert await figures() == (2, 60, 3)
    await stage.post(f"{GROUP}/stopped/drop", {"all": True})
    assert await figures() == (0, 0, 0)
