"""What is due later, over HTTP: delayed messages page by page, and schedules (R35)."""

from __future__ import annotations

from tests.unit.http.http_client import staged

DELAYED = "/topics/orders/delayed"


async def test_delayed_messages_come_page_by_page() -> None:
    async with staged() as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
        assert await stage.get(DELAYED) == {"messages": [], "next": None}
        messages = [{"value": str(n), "id": f"o-{n}", "key": "ann", "delay": 60 + n} for n in range(5)]
        await stage.post("/topics/orders/messages", {"messages": messages}, 202)
        first = await stage.get(f"{DELAYED}?limit=2")
        rest = await stage.get(f"{DELAYED}?limit=3&after={first['next']}")
        found = [*first["messages"], *rest["messages"]]
        assert [one["id"] for one in found] == [f"o-{n}" for n in range(5)]
        assert rest["next"] is None
        assert (found[0]["key"], found[0]["value"], found[0]["bytes"]) == ("ann", "0", 1)
        assert [one["due_ms"] for one in found] == sorted(one["due_ms"] for one in found)


async def test_an_answer_has_a_limit_and_one_message_is_in_it_however_large() -> None:
    async with staged() as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
        for n in range(3):
            one = {"value": "x" * 3_000_000, "id": f"o-{n}", "delay": 60 + n}
            await stage.post("/topics/orders/messages", {"messages": [one]}, 202)
        page = await stage.get(DELAYED)
        assert [one["id"] for one in page["messages"]] == ["o-0"] and page["next"]
        page = await stage.get(f"{DELAYED}?after={page['next']}")
        assert [one["id"] for one in page["messages"]] == ["o-1"]


async def test_a_cursor_that_is_none_and_a_topic_that_is_not_there_are_refused() -> None:
    async with staged() as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 1}, 201)
        for wrong in ("after=x", "after=1-2", "limit=0", "limit=100000", f"after={'9' * 200}"):
            await stage.get(f"{DELAYED}?{wrong}", 400)
        await stage.get("/topics/nowhere/delayed", 404)


async def test_schedules_are_listed() -> None:
    async with staged() as stage:
        assert await stage.get("/schedules") == []
        await stage.post("/topics", {"name": "every.nightly", "partitions": 1}, 201)
        (found,) = await stage.get("/schedules")
        assert (found["name"], found["rule"], found["workers"]) == ("nightly", "", [])
