"""Kafka clients log in with Postroom's tokens, over TLS or not, and may do what these allow (R48)."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

import postroom
from postroom.broker.access import new_token
from postroom.model.access import Principal, hash_of, parse_permission
from tests.kafka.integration.clients import PATIENCE_S, Sender, admin, read


def login(token: str) -> dict[str, Any]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "any",
        "sasl.password": token,
    }


@pytest.fixture
async def mq(tmp_path: Path) -> Any:
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        await mq.create_topic("secret", kafka_partitions=1)
        yield mq


def allow(mq: postroom.Connection, *permissions: str, name: str = "shop") -> str:
    token = new_token()
    granted = tuple(parse_permission(one) for one in permissions)
    mq._endpoint.store.access.add(Principal(name, granted), hash_of(token))  # type: ignore[attr-defined]
    return token


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_token_is_the_password_and_permissions_are_those_of_the_token(
    mq: postroom.Connection,
) -> None:
    token = allow(mq, "send:orders", "consume:orders")
    async with await mq.serve(port=0, token="unused", kafka=0) as served:
        address = str(served.kafka)
        sender = Sender(address, **login(token))
        await asyncio.to_thread(sender.send, "orders", [b"one"])
        found = await asyncio.to_thread(lambda: read(address, "orders", 1, **login(token)))
        assert found == [(0, b"one")]
        listed = await asyncio.to_thread(admin(address, **login(token)).list_topics, None, PATIENCE_S)
        assert set(listed.topics) == {"orders"}, "what it may not see is not shown"
        other = Sender(address, **login(token))
        with pytest.raises(AssertionError, match="not confirmed"):
            await asyncio.to_thread(other.send, "secret", [b"two"])
        making = admin(address, **login(token))
        with pytest.raises(Exception, match="may not manage"):
            await asyncio.to_thread(
                lambda: making.create_topics([NewTopic("made", 1, 1)])["made"].result(PATIENCE_S)
            )


@pytest.mark.slow("waits for clients of Kafka")
async def test_nobody_comes_in_with_a_wrong_token_or_without_one(mq: postroom.Connection) -> None:
    async with await mq.serve(port=0, token="right", kafka=0) as served:
        address = str(served.kafka)
        for more in (login("wrong"), {}):
            client = admin(address, **more)
            with pytest.raises(Exception, match=r"transport failure|Timed out"):  # it goes on trying
                await asyncio.to_thread(client.list_topics, None, 3)
        welcome = await asyncio.to_thread(admin(address, **login("right")).list_topics, None, PATIENCE_S)
        assert set(welcome.topics) == {"orders", "secret"}


@pytest.mark.slow("waits for clients of Kafka")
async def test_kafka_clients_speak_tls_as_all_others_do(mq: postroom.Connection, tmp_path: Path) -> None:
    from tests.certificates import Authority

    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = authority.issue("localhost")
    context.load_cert_chain(pair.cert, pair.key)
    async with await mq.serve("127.0.0.1", 0, tls=context, kafka=0, kafka_advertised="") as served:
        address = str(served.kafka)
        more = {"security.protocol": "SSL", "ssl.ca.location": authority.ca,
                "ssl.endpoint.identification.algorithm": "none"}  # fmt: skip
        await asyncio.to_thread(Sender(address, **more).send, "orders", [b"one"])
        assert await asyncio.to_thread(lambda: read(address, "orders", 1, **more)) == [(0, b"one")]
