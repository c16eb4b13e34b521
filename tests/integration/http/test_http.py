"""HTTP on a real port: what comes is not always HTTP, not always soon, and not always from a friend."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import postroom
from postroom.address import parse
from postroom.broker.access import Gatekeeper
from postroom.broker.broker import Broker, open_endpoint
from postroom.broker.served import measured
from postroom.clock import SystemClock
from postroom.errors import UsageError
from postroom.http.app import HttpLimits, make_app
from postroom.http.server import HttpServer, serve_http
from postroom.model.access import Principal, parse_permissions
from postroom.wire.server.listening import Listening
from postroom.wire.server.server import WireServer
from tests.certificates import Authority
from tests.tuned import Tune

SECONDS = 20


@asynccontextmanager
async def served(
    *, dev: bool = True, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Broker, WireServer, HttpServer]]:
    """A broker with its two ports, as `postroom serve` has them."""
    broker = measured(await open_endpoint(parse("memory://")))
    gatekeeper = Gatekeeper(broker.store, broker.in_thread, SystemClock(), dev=dev)
    wire = WireServer(broker, Listening("127.0.0.1", 0), gatekeeper)
    await wire.start()
    limits = HttpLimits(drained_s=0.3)
    http = await serve_http(make_app(broker, gatekeeper, server=wire, limits=limits), "127.0.0.1", 0, tls)
    try:
        yield broker, wire, http
    finally:
        await http.stop(5)
        await wire.stop(0)
        await broker.close()


def client(http: HttpServer, **more: Any) -> httpx.AsyncClient:
    scheme = "https" if "verify" in more else "http"
    return httpx.AsyncClient(base_url=f"{scheme}://127.0.0.1:{http.port}", timeout=SECONDS, **more)


async def say(port: int, data: bytes, *, end: bool = True) -> bytes:
    """What comes back until the server closes."""
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            if end:
                writer.write_eof()
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


async def test_the_wire_and_http_are_one_broker_and_both_are_counted() -> None:
    async with served() as (_, wire, http), client(http) as web, postroom.connect(wire.url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send("orders", b"by wire")
        sent = await web.post("/api/v1/topics/orders/messages", content=b"by http")
        assert sent.status_code == 202
        found = (await web.post("/api/v1/topics/orders/groups/g/poll", json={"max_messages": 10})).json()
        assert [message["value"] for message in found["messages"]] == ["by wire", "by http"]
        text = (await web.get("/metrics")).text
        assert 'postroom_messages_published_total{topic="orders"} 2.0' in text
        assert "postroom_connections 1.0" in text and "postroom_connections_limit 10000.0" in text
        assert "postroom_brokers 1.0" in text
        (broker,) = (await web.get("/api/v1/brokers")).json()
        assert broker["address"] == wire.address


async def test_what_is_not_http_does_no_harm() -> None:
    made = random.Random(7)
    async with served() as (_, _, http), client(http) as web:
        for _ in range(20):
            await say(http.port, made.randbytes(made.randrange(1, 3000)))
        assert b"400" in await say(http.port, b"\x16\x03\x01 this is no request\r\n\r\n")
        long = b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000
        assert b"400" in await say(http.port, long, end=False)
        assert (await web.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "request_head",
    [
        b"POST /api/v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 99999999999\r\n\r\n",
        b"POST /api/v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + b"x" * 0x100000 + b"\r\n") * 20,
    ],
    ids=["says so", "just comes"],
)
async def test_a_body_that_is_too_large_ends_the_connection(request_head: bytes) -> None:
    async with served() as (_, _, http), client(http) as web:
        answer = await say(http.port, request_head, end=False)
        assert answer.startswith(b"HTTP/1.1 413") or answer == b""  # it may be reset while it still sends
        if b"99999999999" in request_head:
            assert b'"code":"too_large"' in answer
        assert (await web.get("/health")).status_code == 200


async def test_who_is_slow_with_headers_is_let_go(tune: Tune) -> None:
    tune(http={"headers_s": 0.3})
    async with served() as (_, _, http), client(http) as web:
        assert await say(http.port, b"", end=False) == b""  # says nothing
        assert await say(http.port, b"GET /health HTTP/1.1\r\nHo", end=False) == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(SECONDS):
            assert await reader.readuntil(b'"ok"}')
            writer.write(b"GET /hea")  # and it is never finished
            assert await reader.read() == b""
        writer.close()
        assert (await web.get("/health")).status_code == 200


async def test_a_slow_answer_is_no_slow_header(tune: Tune) -> None:
    tune(http={"headers_s": 0.2})
    async with served() as (_, _, http), client(http) as web:
        await web.post("/api/v1/topics", json={"name": "orders"})
        for _ in range(2):  # the second on the same connection
            found = await web.post("/api/v1/topics/orders/groups/g/poll", json={"wait_s": 0.5})
            assert found.json()["messages"] == []


async def test_a_stop_ends_polls_and_lets_others_finish() -> None:
    async with served() as (_, _, http), client(http) as web:
        await web.post("/api/v1/topics", json={"name": "orders"})
        service = http._app.state.service
        poll = asyncio.create_task(web.post("/api/v1/topics/orders/groups/g/poll", json={"wait_s": 25}))
        async with asyncio.timeout(SECONDS):
            while not service._waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await http.stop(10)
            assert (await poll).status_code == 503
        await http.stop(10)  # harmless
        with pytest.raises(httpx.ConnectError):
            await web.get("/health")


async def test_a_client_that_hangs_up_takes_nothing() -> None:
    async with served() as (broker, _, http), client(http) as web:
        await web.post("/api/v1/topics", json={"name": "orders", "partitions": 1})
        body = b'{"wait_s": 25}'
        head = (
            b"POST /api/v1/topics/orders/groups/g/poll HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        _, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(head + body)
        service = http._app.state.service
        async with asyncio.timeout(SECONDS):
            while not service._waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            writer.close()
            while service._waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await web.post("/api/v1/topics/orders/messages", content=b"x")
        assert (await broker.lag("orders", "g")).total.unsettled == 0


async def test_tls_and_the_name_in_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, shop = authority.issue("broker"), authority.issue("shop")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(own.cert, own.key)
    tls.load_verify_locations(authority.ca)
    tls.verify_mode = ssl.CERT_OPTIONAL
    async with served(dev=False, tls=tls) as (broker, _, http):
        broker.store.access.add(Principal("shop", parse_permissions(["manage:*"])), "")
        without = ssl.create_default_context(cafile=authority.ca)
        async with client(http, verify=without) as web:
            assert (await web.get("/health")).status_code == 200
            assert (await web.get("/api/v1/topics")).status_code == 401
        named = ssl.create_default_context(cafile=authority.ca)
        named.load_cert_chain(shop.cert, shop.key)
        async with client(http, verify=named) as web:
            assert (await web.post("/api/v1/topics", json={"name": "orders"})).status_code == 201
        assert b"HTTP/1.1 2" not in await say(http.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_a_port_that_is_taken_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with served() as (broker, _, http):
            app = make_app(broker, http._app.state.service.gatekeeper)
            with pytest.raises(UsageError, match="http_port"):
                await serve_http(app, "127.0.0.1", taken.getsockname()[1])


async def test_a_large_answer_waits_for_its_reader_and_counts_while_it_does() -> None:
    """One message of 4 MB whose JSON is six times as large: most of it stays out of the socket's buffer."""
    async with served() as (_, wire, http), client(http) as web, postroom.connect(wire.url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send("orders", bytes(4_000_000))
        _, writer = await asyncio.open_connection("127.0.0.1", http.port, limit=1 << 16)
        writer.write(
            b"POST /api/v1/topics/orders/groups/slow/poll HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        async with asyncio.timeout(SECONDS):
            while wire.answers.held < 20_000_000:  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.01)
        writer.transport.abort()
        async with asyncio.timeout(SECONDS):
            while wire.answers.held:  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.01)
        found = await web.post("/api/v1/topics/orders/groups/quick/poll", json={})
        assert found.json()["messages"][0]["value"] == "\0" * 4_000_000
