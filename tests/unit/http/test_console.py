"""The console's door: who gets a cookie, and what a cookie is worth to pages of others (R50)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from postroom.address import parse
from postroom.broker.access import Gatekeeper
from postroom.broker.broker import open_endpoint
from postroom.clock import SystemClock
from postroom.console.pages import add_console
from postroom.http.app import make_app
from tests.unit.http.http_client import Stage


@asynccontextmanager
async def staged(*, dev: bool = False, key: str | None = None) -> AsyncIterator[Stage]:
    broker = await open_endpoint(parse("memory://"))
    try:
        app = make_app(broker, Gatekeeper(broker.store, broker.in_thread, SystemClock(), dev=dev))
        add_console(app, key=key)
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1234))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            yield Stage(broker, app, client)
    finally:
        await broker.close()


async def log_in(stage: Stage, token: str, status: int = 200, **headers: str) -> Any:
    return await stage.call("POST", "/console/login", status, json={"token": token}, headers=headers)


async def test_a_change_needs_the_secret_of_the_page_beside_the_cookie() -> None:
    async with staged() as stage:
        stage.add("boss", "manage:*", "send:*", "consume:*")
        await log_in(stage, stage.tokens["boss"])
        session = (await stage.call("GET", "/console/session")).json()
        body = {"name": "orders"}
        await stage.post("/topics", body, 403)
        await stage.post("/topics", body, 403, headers={"X-Postroom-Csrf": "wrong"})
        right = {"X-Postroom-Csrf": session["csrf"]}
        foreign = {**right, "Origin": "https://evil.example"}
        await stage.post("/topics", body, 403, headers=foreign)
        await stage.post("/topics", body, 403, headers={**right, "Sec-Fetch-Site": "cross-site"})
        await stage.post("/topics", body, 201, headers=right)


async def test_a_cookie_is_worth_what_the_token_is_worth_now() -> None:
    async with staged() as stage:
        stage.add("shop", "send:orders")
        await log_in(stage, stage.tokens["shop"])
        await stage.get("/topics")
        await stage.get("/shards", 403)
        stage.broker.store.access.remove("shop")
        stage.service.gatekeeper._known.clear()  # it is remembered for two seconds
        await stage.get("/topics", 401)
        await stage.get("/topics", 401)


async def test_a_log_out_ends_the_session_and_not_only_the_cookie() -> None:
    async with staged() as stage:
        stage.add("shop", "send:orders")
        answer = await log_in(stage, stage.tokens["shop"])
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie
        session = (await stage.call("GET", "/console/session")).json()
        await stage.call("POST", "/console/logout", headers={"X-Postroom-Csrf": session["csrf"]})
        await stage.call("GET", "/console/session", 401, headers={"Cookie": cookie.partition(";")[0]})


async def test_a_log_in_is_small_is_json_and_comes_from_the_page_itself() -> None:
    async with staged() as stage:
        stage.add("shop", "send:orders")
        token = stage.tokens["shop"]
        await log_in(stage, "pst_wrong", 401)
        await log_in(stage, token, 403, Origin="https://evil.example")
        await stage.call(
            "POST", "/console/login", 401, content=b"x" * 9000, headers={"Content-Type": "application/json"}
        )
        await stage.call("POST", "/console/login", 400, content=b"token=x")
        await stage.call(
            "POST", "/console/login", 400, content=b"[1", headers={"Content-Type": "application/json"}
        )
        await stage.get("/topics", 401)


async def test_a_console_with_a_key_opens_once_and_by_names_of_this_machine() -> None:
    async with staged(key="open-sesame") as stage:
        await stage.get("/topics", 401)
        await log_in(stage, "open-sesame-", 401)
        rebound = {"Host": "evil.example"}
        await log_in(stage, "open-sesame", 403, **rebound)
        await log_in(stage, "open-sesame")
        stage.client.cookies.clear()
        await log_in(stage, "open-sesame", 401)


async def test_a_key_gives_everything_to_the_browser_that_was_first() -> None:
    async with staged(key="open-sesame") as stage:
        await log_in(stage, "open-sesame")
        assert await stage.get("/topics") == []
        await stage.get("/topics", 403, headers={"Host": "evil.example"})


async def test_a_dev_broker_is_no_console_for_names_that_are_not_this_machines() -> None:
    async with staged(dev=True) as stage:
        await stage.call("GET", "/console/session")
        await stage.call("GET", "/console/session", 403, headers={"Host": "evil.example"})


async def test_the_page_may_load_nothing_from_elsewhere_and_run_nothing_in_its_text() -> None:
    async with staged() as stage:
        page = await stage.call("GET", "/console")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "https:" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "access-control-allow-origin" not in page.headers
        for name in stage.app.state.console_files:
            await stage.call("GET", f"/console/static/{name}")
        await stage.call("GET", "/console/static/../pages.py", 401)
        await stage.call("GET", "/console/static/%2e%2e%2fpages.py", 401)


async def test_figures_are_those_of_the_topics_that_one_is_shown() -> None:
    async with staged() as stage:
        stage.add("boss", "manage:*", "send:*", "consume:*")
        stage.add("shop", "send:orders")
        for name in ("orders", "secret"):
            await stage.post("/topics", {"name": name}, 201, who="boss")
        sampler = stage.app.state.sampler
        with sampler.viewing():
            async with asyncio.timeout(60):
                while "secret" not in sampler.last.topics:
                    await sampler.next(sampler.number)
        path = "/console/data/overview"
        mine = (await stage.call("GET", path, who="shop")).json()
        assert [topic["name"] for topic in mine["topics"]] == ["orders"]
        assert (mine["totals"]["topics"], mine["shards"]) == (1, [])
        await stage.call("GET", "/console/data/charts", 403, who="shop")
        await stage.call("GET", "/console/data/charts?topic=secret", 403, who="shop")
        await stage.call("GET", "/console/data/topics/secret/messages", 403, who="shop")
