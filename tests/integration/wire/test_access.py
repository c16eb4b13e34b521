"""Who is let in at a live port, and what each may ask there (R48)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import postroom
from postroom.broker.access import SHOWN, new_token
from postroom.errors import NotAuthenticated, PermissionDenied, UnknownPartition
from postroom.model.access import ALL, Principal, hash_of, parse_permissions
from postroom.wire.server.server import WireServer
from tests.integration.wire.wire_raw import HELLO, Raw, broker_of, served

SHOP, BOSS, CLERK = new_token(), new_token(), new_token()
APPEND, TOPICS, TOPIC, SHARDS, POLL, SETTLE, BEAT = 10, 31, 32, 46, 22, 23, 25


@pytest.fixture
async def server() -> AsyncIterator[WireServer]:
    async with served(dev=False) as (mq, server):
        store = broker_of(mq).store
        store.access.add(Principal("shop", parse_permissions(["send:orders"])), hash_of(SHOP))
        store.access.add(Principal("boss", ALL), hash_of(BOSS))
        store.access.add(Principal("clerk", parse_permissions(["consume:orders"])), hash_of(CLERK))
        for topic in ("orders", "secrets"):
            await mq.create_topic(topic, partitions=1)
        yield server


@pytest.mark.parametrize("token", ["", "wrong", "pst_" + "x" * 43, "pst_ü" + "x" * 42])
async def test_whoever_has_no_token_is_told_so(server: WireServer, token: str) -> None:
    async with Raw.open(server.port, hello=False) as raw:
        raw.send(HELLO, [1, 1, "raw", token], id=9)
        came = await raw.refused()
        assert (came.code, came.id) == ("not_authenticated", 9)
        assert "token" in came.header[1]
        assert token[4:] not in came.header[1] or not token[4:]


async def test_the_sdk_raises_what_the_broker_says(server: WireServer) -> None:
    with pytest.raises(NotAuthenticated, match="asks for a token"):
        await postroom.connect(server.url)
    with pytest.raises(NotAuthenticated, match="invalid token"):
        await postroom.connect(server.url, token=new_token())
    async with postroom.connect(server.url, token=SHOP) as mq:
        await mq.send("orders", b"1")
        assert [topic.name for topic in await mq.topics()] == ["orders"]
        with pytest.raises(PermissionDenied, match="postroom access grant shop send:secrets"):
            await mq.send("secrets", b"1")
        with pytest.raises(PermissionDenied, match="may not manage"):
            await mq.delete_topic("orders")


async def test_a_handler_that_may_only_consume_keeps_the_settings_of_its_group(
    server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = postroom.App(server.url, token=CLERK), asyncio.Event()

    @app.subscribe("orders", group="billing", max_attempts=5)
    async def bill(order: bytes) -> None:
        seen.set()

    async with postroom.connect(server.url, token=BOSS) as boss:
        await boss.create_group("orders", "billing", max_attempts=16)
        await boss.send("orders", b"1")
        async with app:
            await asyncio.wait_for(seen.wait(), 30)
            assert app.health().ok
        (group,) = await boss.groups("orders")
        assert group.settings.max_attempts == 16
    assert "group billing of orders keeps max_attempts 16, not 5 as its handler asks: " in caplog.text
    assert "postroom access grant clerk manage:orders" in caplog.text


async def test_a_handler_of_a_topic_that_it_may_not_read_ends_the_start(server: WireServer) -> None:
    app = postroom.App(server.url, token=CLERK)

    @app.subscribe("secrets", group="billing")
    async def spy(secret: bytes) -> None: ...

    with pytest.raises(PermissionDenied, match="postroom access grant clerk consume:secrets"):
        await app.start()
    assert not app.running and not app.health().ok


async def test_what_is_not_permitted_is_answered_and_the_connection_lives(server: WireServer) -> None:
    held = {"topic": "secrets", "partition_id": 2, "token": 1, "spans": [[0, 1]]}
    poll = {"topic": "secrets", "group": "g", "member": "m", "token": 1, "messages": 1, "bytes": 1,
            "wait_ms": 0, "empty_handed": True}  # fmt: skip
    beat = {"topic": "orders", "group": "g", "member": "m", "client": "c", "held": [held]}
    verdicts = [{"kind": "ack", "first": 0, "last": 1}]
    part = {"topic": "secrets", "partition_id": 2, "token": 1, "verdicts": verdicts}
    async with Raw.open(server.port, token=SHOP) as raw:
        for kind, header in {
            TOPIC: ["secrets"],
            SHARDS: [],
            POLL: [poll],
            BEAT: [[beat]],
            SETTLE: ["orders", "g", [part]],
            APPEND: ["secrets", 2],
        }.items():
            came = await raw.ask(kind, header)
            assert came.code == "permission_denied", kind
            assert came.header[3]["principal"] == "shop"
        assert await raw.alive()


async def test_a_permission_on_a_topic_is_none_on_partitions_of_another(server: WireServer) -> None:
    async with postroom.connect(server.url, token=BOSS) as boss:
        secret = (await boss.route("secrets")).ranges[0].partition_id
    async with postroom.connect(server.url, token=SHOP) as shop:
        with pytest.raises(UnknownPartition):
            await shop._endpoint.append("orders", secret, b"")
    async with postroom.connect(server.url, token=BOSS) as boss:
        with pytest.raises(UnknownPartition):  # nor is it a slip that anybody may make
            await boss._endpoint.append("orders", secret, b"")


async def test_settling_nothing_needs_the_permission_too(server: WireServer) -> None:
    async with Raw.open(server.port, token=CLERK) as clerk:
        assert (await clerk.ask(SETTLE, ["secrets", "g", []])).code == "permission_denied"
    async with Raw.open(server.port, token=SHOP) as shop:
        assert (await shop.ask(SETTLE, ["orders", "g", []])).code == "permission_denied"


async def test_a_flood_of_wrong_greetings_is_some_lines_in_the_log(
    server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(SHOWN + 5):
        async with Raw.open(server.port, hello=False) as raw:
            raw.send(HELLO, [1, 1, "raw", "wrong"])
            await raw.refused()
    lines = [record for record in caplog.records if "was refused" in record.getMessage()]
    assert len(lines) == SHOWN
