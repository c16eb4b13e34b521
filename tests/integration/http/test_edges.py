"""HTTP at its edges: strangers who crowd the port, framing in two ways at once, pages of other sites."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from postroom.http import server as module
from postroom.model.access import Principal, parse_permissions
from tests.certificates import Authority
from tests.integration.http.test_http import SECONDS, client, say, served
from tests.tuned import Tune

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def server_tls(authority: Authority) -> ssl.SSLContext:
    own = authority.issue("broker")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(own.cert, own.key)
    tls.load_verify_locations(authority.ca)
    tls.verify_mode = ssl.CERT_OPTIONAL
    return tls


async def idle(stack: AsyncExitStack, port: int, count: int) -> list[asyncio.StreamReader]:
    """Connections that say nothing."""
    found = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        found.append(reader)
    return found


# ---- strangers who crowd the port ----


async def test_idle_strangers_do_not_turn_health_to_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of those who ask for nothing are let go, and whoever comes is answered."""
    monkeypatch.setattr(module, "_MOST", 20)
    async with served() as (_, _, http), AsyncExitStack() as stack, client(http) as web:
        strangers = await idle(stack, http.port, 25)
        for path in ("/health", "/ready", "/metrics", "/api/v1/topics"):
            assert (await web.get(path)).status_code == 200, path
        async with asyncio.timeout(SECONDS):
            assert await strangers[0].read() == b""  # closed


async def test_health_is_answered_while_requests_take_all_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    async with served() as (_, _, http), client(http) as web, client(http) as other:
        await web.post("/api/v1/topics", json={"name": "orders"})
        polls = [
            asyncio.create_task(web.post("/api/v1/topics/orders/groups/g/poll", json={"wait_s": 25}))
            for _ in range(3)
        ]
        service = http._app.state.service
        async with asyncio.timeout(SECONDS):
            while len(service._waiting) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for _ in range(5):
            assert (await other.get("/health")).status_code == 200
        refused = await other.get("/api/v1/topics")
        assert refused.status_code == 503 and refused.json()["error"]["retriable"] is True
        assert len(service._waiting) == 3  # nobody at work was let go
        await http.stop(5)
        await asyncio.gather(*polls, return_exceptions=True)


async def test_handshakes_that_do_not_begin_are_few_and_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: Tune
) -> None:
    monkeypatch.setattr(module, "HANDSHAKES", 10)
    tune(wire={"handshake_s": 2.0})
    authority = Authority(tmp_path)
    trusting = ssl.create_default_context(cafile=authority.ca)
    async with (
        served(tls=server_tls(authority)) as (_, _, http),
        AsyncExitStack() as stack,
        client(http, verify=trusting) as web,
    ):
        strangers = await idle(stack, http.port, 15)
        assert (await web.get("/health")).status_code == 200
        async with asyncio.timeout(SECONDS):
            for stranger in strangers[:5]:  # beyond the limit: at once
                assert await stranger.read() == b""
            for stranger in strangers[5:]:  # the others: in time
                assert await stranger.read() == b""


# ---- framing ----


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["length first", "encoding first", "HTTP/1.0"],
)
async def test_two_framings_at_once_are_refused(head: bytes) -> None:
    async with served() as (_, _, http):
        answer = await say(http.port, b"POST /api/v1/topics " + head + b"0\r\n\r\n" + HEALTH, end=False)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1 ") == 1
        assert b"nosniff" in answer


async def test_a_body_that_is_too_large_is_told_so_readably() -> None:
    """Whoever sends all of it before it reads finds the answer, and no reset."""
    head = b"POST /api/v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\n"
    size = 20 << 20
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    for body in (
        b"Content-Length: %d\r\n\r\n" % size + b"x" * size,
        b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 20 + b"0\r\n\r\n",
    ):
        async with served() as (_, _, http), asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
            writer.write(head + body)
            await writer.drain()
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 413") and b'"code":"too_large"' in answer


async def test_an_endless_body_is_not_read_for_ever() -> None:
    async with served() as (_, _, http):
        _, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(
            b"POST /api/v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        chunk, sent = b"100000\r\n" + b"x" * 0x100000 + b"\r\n", 0
        async with asyncio.timeout(SECONDS * 3):
            with contextlib.suppress(ConnectionError):
                while sent < 300 << 20:
                    writer.write(chunk)
                    sent += len(chunk)
                    await writer.drain()
        assert sent < 300 << 20
        writer.close()


# ---- pages of other sites ----

POST = {"Content-Type": "text/plain"}


async def test_a_page_of_another_site_cannot_use_a_certificate(tmp_path: Path) -> None:
    """The browser adds the certificate by itself: only who can set headers, or is of this site, comes in."""
    authority = Authority(tmp_path)
    shop = authority.issue("shop")
    async with served(dev=False, tls=server_tls(authority)) as (broker, _, http):
        rights = parse_permissions(["manage:*", "send:*", "consume:*"])
        broker.store.access.add(Principal("shop", rights), "")
        named = ssl.create_default_context(cafile=authority.ca)
        named.load_cert_chain(shop.cert, shop.key)
        async with client(http, verify=named) as web:
            assert (await web.post("/api/v1/topics", json={"name": "orders"})).status_code == 201
            own = f"https://127.0.0.1:{http.port}"
            cases: list[tuple[dict[str, str], int]] = [
                ({"Origin": "https://evil.example"}, 403),
                ({"Origin": "null"}, 403),
                ({"Origin": f"http://127.0.0.1:{http.port}"}, 403),
                ({"Origin": f"https://127.0.0.1:{http.port + 1}"}, 403),
                ({"Sec-Fetch-Site": "cross-site"}, 403),
                ({"Sec-Fetch-Site": "same-site"}, 403),
                ({"Sec-Fetch-Site": "same-origin", "Origin": own}, 202),
                ({"Origin": own}, 202),
                ({}, 202),
            ]
            for headers, status in cases:
                found = await web.post(
                    "/api/v1/topics/orders/messages", content=b"x", headers={**POST, **headers}
                )
                assert found.status_code == status, (headers, found.text)
            evil = {**POST, "Origin": "https://evil.example"}
            assert (await web.post("/api/v1/topics/orders/purge", headers=evil)).status_code == 403
            assert (
                await web.get("/api/v1/topics", headers={"Sec-Fetch-Site": "cross-site"})
            ).status_code == 403


async def test_every_answer_tells_browsers_to_be_careful() -> None:
    async with served() as (_, _, http), client(http) as web:
        answers: list[Any] = [
            await web.get(path)
            for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json", "/api/v1/topics", "/none")
        ]
        answers.append(await web.get("/api/v1/topics", headers={"Authorization": "Bearer pst_wrong"}))
        for answer in answers:
            headers = answer.headers
            assert headers["X-Content-Type-Options"] == "nosniff", answer.url
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cache-Control"] == "no-store"
            assert headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
            assert "unsafe" not in headers["Content-Security-Policy"]


async def test_the_page_about_the_api_is_of_this_broker_alone() -> None:
    async with served() as (_, _, http), client(http) as web:
        page = await web.get("/docs")
        assert page.headers["Content-Type"].startswith("text/html")
        assert "<script" not in page.text and "//" not in page.text.replace("<!doctype", "")
        described = (await web.get("/openapi.json")).json()
        for path, operations in described["paths"].items():
            assert path in page.text
            for method in operations:
                assert method.upper() in page.text
        for name in ("max_messages", "value_b64", "dedup_window"):  # fields of bodies
            assert name in page.text
