"""HTTP on database servers: the same there, and what it says while the database is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tests.ready import Ground
from tests.servers.proxy import Proxy
from tests.tuned import Tune
from tests.unit.http.http_client import API, Stage, staged


async def test_the_life_of_a_message(ground: Ground) -> None:
    async with staged(address=ground.url) as stage:
        stage.add("shop", "send:orders")
        await stage.post("/topics", {"name": "orders", "partitions": 2, "dedup_window": "1m"}, 201)
        values = ["päid", "x", "\u0000"]
        body = {"messages": [{"value": value, "key": "k\u0000", "id": f"i-{value}"} for value in values]}
        await stage.post("/topics/orders/messages", body, 202, who="shop")
        again = await stage.post("/topics/orders/messages", body, 202, who="shop")
        assert all(receipt["duplicate"] for receipt in again["receipts"])
        base = "/topics/orders/groups/billing"
        found = (await stage.post(f"{base}/poll", {"wait_s": 5}))["messages"]
        assert [message["value"] for message in found] == values
        handles = [message["handle"] for message in found]
        wish = {
            "acks": handles[:1],
            "dead": [{"handle": handles[1], "reason": "\u0000 no"}],
            "extends": handles[2:],
        }
        assert await stage.post(f"{base}/settle", wish) == {"settled": 2, "extended": 1}
        (letter,) = await stage.get(f"{base}/dead-letters")
        assert letter["value"] == "x"
        assert await stage.post(f"{base}/dead-letters/redrive", {"all": True}) == {"redriven": 1}
        text = (await stage.call("GET", "/metrics")).text
        assert 'postroom_group_lag_messages{group="billing",topic="orders"} 2.0' in text
        assert 'postroom_messages_dead_total{group="billing",topic="orders"} 1.0' in text


async def test_a_database_that_is_away(ground: Ground, proxy_to: Callable[[int], Proxy], tune: Tune) -> None:
    tune(http={"ready_fresh_s": 0})
    proxy = proxy_to(ground.server.port)
    async with staged(address=ground.server.url(ground.name, port=proxy.port)) as stage:
        await stage.post("/topics", {"name": "orders"}, 201)
        assert (await stage.client.get("/ready")).status_code == 200
        await asyncio.to_thread(proxy.refuse)
        await asyncio.to_thread(proxy.cut)
        began = time.monotonic()
        assert (await stage.client.get("/ready")).status_code == 503
        assert time.monotonic() - began < 10
        assert (await stage.client.get("/health")).status_code == 200
        assert (await stage.client.get("/metrics")).status_code == 200
        refused = await stage.call("GET", f"{API}/topics/orders/groups", 503)
        assert "Retry-After" in refused.headers and refused.json()["error"]["code"] == "store_unavailable"
        sent = await stage.client.post(f"{API}/topics/orders/messages?timeout=0.5", content=b"x")
        assert sent.status_code in (503, 504)
        await asyncio.to_thread(proxy.heal)
        await until_ready(stage)
        await stage.call("POST", f"{API}/topics/orders/messages", 202, content=b"x")


async def until_ready(stage: Stage) -> None:
    async with asyncio.timeout(20):
        while (await stage.client.get("/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
