"""Polling and settling over HTTP: nothing is lost, nothing is taken by who is gone, nothing is made up."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest

from postroom.clock import ManualClock
from postroom.endpoint.values import Verdict
from postroom.http.models import Handle, merged, spans_of
from tests.damage import garbage
from tests.unit.http.http_client import API, Stage, staged

GROUP = "/topics/orders/groups/billing"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def stage(clock: ManualClock) -> Any:
    async with staged(clock=clock) as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
        yield stage


async def send(stage: Stage, *values: str, **more: Any) -> None:
    body = {"messages": [{"value": value, **more} for value in values]}
    await stage.post("/topics/orders/messages", body, 202)


async def poll(stage: Stage, **wish: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await stage.post(f"{GROUP}/poll", wish))["messages"]
    return found


async def unsettled(stage: Stage) -> tuple[int, int]:
    total = (await stage.get(f"{GROUP}/lag"))["total"]
    return total["messages"], total["unsettled"]


async def test_poll_and_ack(stage: Stage) -> None:
    await send(stage, "a", "b", key="42", headers={"source": "web"})
    found = await poll(stage)
    assert [m["value"] for m in found] == ["a", "b"]
    assert found[0] == {
        "handle": found[0]["handle"],
        "topic": "orders",
        "partition": 0,
        "offset": 0,
        "id": "1-0",
        "key": "42",
        "key_b64": None,
        "value": "a",
        "value_b64": None,
        "headers": {"source": "web"},
        "timestamp": found[0]["timestamp"],
        "attempt": 1,
    }
    assert await unsettled(stage) == (2, 2) and await poll(stage) == []
    done = await stage.post(f"{GROUP}/settle", {"acks": [m["handle"] for m in found]})
    assert done == {"settled": 2, "extended": 0} and await unsettled(stage) == (0, 0)


async def test_no_more_than_asked_for(stage: Stage) -> None:
    await send(stage, *map(str, range(5)))
    assert [len(await poll(stage, max_messages=n)) for n in (2, 1, 1000)] == [2, 1, 2]


async def test_what_is_no_text_comes_as_base64(stage: Stage) -> None:
    body = {"messages": [{"value_b64": base64.b64encode(b"\xff").decode()}, {"value": "text"}]}
    await stage.post("/topics/orders/messages", body, 202)
    first, second = await poll(stage)
    assert (first["value"], first["value_b64"]) == (None, "/w==") and second["value"] == "text"
    await stage.post(f"{GROUP}/settle", {"releases": [{"handle": m["handle"]} for m in (first, second)]})
    again = await poll(stage, base64=True)
    assert [base64.b64decode(m["value_b64"]) for m in again] == [b"\xff", b"text"]


async def test_retry_release_and_dead(stage: Stage, clock: ManualClock) -> None:
    await send(stage, "retry", "release", "dead")
    first, second, third = await poll(stage)
    await stage.post(
        f"{GROUP}/settle",
        {
            "retries": [{"handle": first["handle"], "delay_s": 60, "reason": "busy"}],
            "releases": [{"handle": second["handle"]}],
            "dead": [{"handle": third["handle"], "reason": "hopeless"}],
        },
    )
    (released,) = await poll(stage)
    assert (released["value"], released["attempt"]) == ("release", 1)
    await stage.post(f"{GROUP}/settle", {"acks": [released["handle"]]})
    clock.advance(61)
    (retried,) = await poll(stage)
    assert (retried["value"], retried["attempt"]) == ("retry", 2)
    (letter,) = await stage.get(f"{GROUP}/dead-letters")
    assert (letter["value"], letter["reason"], letter["offset"]) == ("dead", "hopeless", 2)


async def test_dead_letters_are_redriven_and_discarded(stage: Stage) -> None:
    await send(stage, "one", "two", "three")
    dead = [{"handle": m["handle"], "reason": "no"} for m in await poll(stage)]
    await stage.post(f"{GROUP}/settle", {"dead": dead})
    letters = await stage.get(f"{GROUP}/dead-letters?limit=2")
    assert [letter["value"] for letter in letters] == ["one", "two"]
    for wish in ({}, {"ids": ["x"], "all": True}):
        await stage.error("POST", f"{API}{GROUP}/dead-letters/discard", 400, json=wish)
    await stage.error("POST", f"{API}{GROUP}/dead-letters/redrive", 404, json={"ids": ["not there"]})
    assert await stage.post(f"{GROUP}/dead-letters/redrive", {"ids": [letters[0]["id"]]}) == {"redriven": 1}
    assert await stage.post(f"{GROUP}/dead-letters/discard", {"all": True}) == {"discarded": 2}
    (again,) = await poll(stage)  # it is in the group's retry topic now: its handle says so
    assert (again["value"], again["topic"], again["offset"]) == ("one", "orders", 0)
    assert Handle.decode(again["handle"]).topic == "orders.billing.retry"
    await stage.post(f"{GROUP}/settle", {"acks": [again["handle"]]})
    assert await unsettled(stage) == (0, 0)


async def test_a_lease_that_ended_is_told(stage: Stage, clock: ManualClock) -> None:
    await send(stage, "a", "b")
    first, second = await poll(stage)
    await stage.post(f"{GROUP}/settle", {"acks": [first["handle"]]})
    clock.advance(31)
    (again,) = await poll(stage)
    assert again["value"] == "b"
    wish = {"acks": [first["handle"], second["handle"]]}  # the first one once more is harmless
    error = await stage.error("POST", f"{API}{GROUP}/settle", 409, json=wish)
    assert error["code"] == "lease_lost"
    assert error["details"] == {"lost": [second["handle"]], "settled": 1}
    await stage.post(f"{GROUP}/settle", {"acks": [again["handle"]]})


async def test_extending_keeps_a_lease(stage: Stage, clock: ManualClock) -> None:
    await send(stage, "a", "b")
    kept, left = await poll(stage)
    for _ in range(3):
        clock.advance(20)
        await stage.post(f"{GROUP}/settle", {"extends": [kept["handle"]]})
    (again,) = await poll(stage, member="another")
    assert again["value"] == "b"
    await stage.post(f"{GROUP}/settle", {"acks": [kept["handle"]]})
    error = await stage.error("POST", f"{API}{GROUP}/settle", 409, json={"extends": [left["handle"]]})
    assert error["details"]["lost"] == [left["handle"]]


async def test_an_ordered_group_is_for_the_sdk(stage: Stage) -> None:
    await stage.post("/topics/orders/groups", {"group": "billing", "mode": "ordered"}, 201)
    error = await stage.error("POST", f"{API}{GROUP}/poll", 409, json={})
    assert error["code"] == "group_conflict" and "ordered" in error["message"]
    (group,) = await stage.get("/topics/orders/groups")
    assert group["members"] == []  # else it would be given partitions that it never reads


async def test_expired_messages_are_not_shown_and_settled(stage: Stage, clock: ManualClock) -> None:
    await send(stage, "short", expires=10)
    await send(stage, "long")
    clock.advance(11)
    assert [m["value"] for m in await poll(stage)] == ["long"]
    assert await unsettled(stage) == (1, 1)


async def test_a_split_partition_is_read_to_its_end(stage: Stage) -> None:
    await send(stage, "before")
    await stage.post("/topics/orders/route/split", {"partition": 0})
    await send(stage, "after")
    values = []
    while found := await poll(stage):
        values += [m["value"] for m in found]
        await stage.post(f"{GROUP}/settle", {"acks": [m["handle"] for m in found]})
    assert sorted(values) == ["after", "before"] and await unsettled(stage) == (0, 0)


async def test_messages_that_retention_took_are_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(stage, "gone", "there")
    real = stage.broker.poll

    async def without_the_first(request: Any) -> Any:
        reply = await real(request)
        return replace(reply, grants=tuple(replace(grant, batches=()) for grant in reply.grants))

    monkeypatch.setattr(stage.broker, "poll", without_the_first)
    assert await poll(stage) == []
    monkeypatch.undo()
    assert [m["value"] for m in await poll(stage)] == ["gone", "there"]  # released: the log has them
    await stage.call("POST", f"{API}/topics/orders/purge")
    assert await unsettled(stage) == (0, 0)


# ---- waiting ----


async def somebody_waits(stage: Stage) -> None:
    async with asyncio.timeout(20):
        while not stage.service._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def ended(task: asyncio.Task[Any]) -> Any:
    """Long before its own time is over; and not because it was cancelled here."""
    done, _ = await asyncio.wait((task,), timeout=15)
    assert done, "it still waits"
    return task.result()


async def test_a_poll_waits_for_what_comes(stage: Stage) -> None:
    waiting = asyncio.create_task(poll(stage, wait_s=20))
    await somebody_waits(stage)
    await send(stage, "late")
    async with asyncio.timeout(20):
        assert [m["value"] for m in await waiting] == ["late"]


async def test_a_client_that_goes_away_takes_nothing(stage: Stage) -> None:
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not told:
            told.append(True)
            return {"type": "http.request", "body": b'{"wait_s": 25}', "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def answer(message: Any) -> None: ...

    told: list[bool] = []
    scope = {
        "type": "http", "method": "POST", "path": f"{API}{GROUP}/poll", "query_string": b"", "scheme": "http",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("localhost", 80), "http_version": "1.1",
    }  # fmt: skip
    asking = asyncio.create_task(stage.app(scope, receive, answer))
    await somebody_waits(stage)
    gone.set()
    await ended(asking)
    await send(stage, "still there")
    assert await unsettled(stage) == (1, 0)
    assert [m["value"] for m in await poll(stage)] == ["still there"]


async def test_a_stop_ends_what_waits(stage: Stage) -> None:
    waiting = asyncio.create_task(stage.call("POST", f"{API}{GROUP}/poll", 503, json={"wait_s": 25}))
    await somebody_waits(stage)
    stage.service.stop()
    assert "Retry-After" in (await ended(waiting)).headers
    error = await stage.error("GET", f"{API}/topics", 503)
    assert error["retriable"] is True


# ---- handles ----


async def test_what_is_no_handle_is_refused(stage: Stage) -> None:
    await send(stage, "a")
    (message,) = await poll(stage)
    good = Handle.decode(message["handle"])
    for wrong in (
        "",
        "x",
        "%",
        "AA",
        message["handle"][:-3],
        "A" * 1000,
        "AZM",
        Handle("orders", 1, 2, -1).encode(),
    ):
        error = await stage.error("POST", f"{API}{GROUP}/settle", 400, json={"acks": [wrong]})
        assert "handle" in error["message"]
    twice = {"acks": [message["handle"]], "extends": [message["handle"]]}
    await stage.error("POST", f"{API}{GROUP}/settle", 400, json=twice)
    guessed = Handle(good.topic, good.partition_id, good.token ^ 2, good.offset).encode()
    await stage.error("POST", f"{API}{GROUP}/settle", 409, json={"extends": [guessed]})
    assert await unsettled(stage) == (1, 1)


async def test_bad_wishes_are_refused(stage: Stage) -> None:
    for wish in (
        {"max_messages": 0},
        {"max_messages": 10**9},
        {"wait_s": -1},
        {"wait_s": 1e9},
        {"member": ""},
        {"x": 1},
    ):
        await stage.error("POST", f"{API}{GROUP}/poll", 400, json=wish)
    await stage.error("POST", f"{API}/topics/orders/groups/no.dots/poll", 400, json={})
    await stage.error("POST", f"{API}/topics/nothing/groups/g/poll", 404, json={})


def test_a_handle_comes_back_as_it_was() -> None:
    handle = Handle("orders.billing.retry", 2**40, 2**63 - 1, 2**62)
    assert Handle.decode(handle.encode()) == handle
    assert "/" not in handle.encode() and "+" not in handle.encode()


def test_neighbours_are_settled_together() -> None:
    acks = [Verdict("ack", n, n) for n in (5, 3, 4, 9)]
    assert merged(acks) == (Verdict("ack", 3, 5), Verdict("ack", 9, 9))
    mixed = [Verdict("ack", 1, 1), Verdict("retry", 2, 2), Verdict("retry", 3, 3, 5)]
    assert merged(mixed) == tuple(mixed)
    assert spans_of([2, 1, 7]) == ((1, 2), (7, 7))


async def test_a_batch_that_cannot_be_read_is_given_up(stage: Stage) -> None:
    """Not a 400, as if the poller were wrong: the messages around it come, its bytes are a dead letter."""
    await send(stage, "a")
    place = (await stage.broker.route("orders")).ranges[0].partition_id
    await stage.broker.append("orders", place, garbage())
    await send(stage, "b")
    found = await poll(stage)
    assert [message["value"] for message in found] == ["a", "b"]
    await stage.post(f"{GROUP}/settle", {"acks": [message["handle"] for message in found]})
    assert await unsettled(stage) == (0, 0)
    (letter,) = await stage.get(f"{GROUP}/dead-letters")
    assert letter["offset"] == 1 and "cannot be read" in letter["reason"]
    exposed = await stage.client.get("/metrics")
    assert 'postroom_unreadable_batches_total{found_by="delivery",topic="orders"} 1.0' in exposed.text
