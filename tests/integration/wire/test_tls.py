"""The protocol through TLS, and both ends that do not agree about it."""

from __future__ import annotations

import asyncio
import ssl

import pytest

import postroom
from postroom.endpoint.requests import Beats
from postroom.endpoint.values import Beat
from postroom.errors import BrokerUnavailable
from postroom.serve_settings import ServeSettings
from postroom.tls import server_context
from postroom.wire.client.remote import _BlockingLink
from postroom.wire.messages import Hello
from postroom.wire.server.listening import Listening
from tests.certificates import Authority
from tests.integration.wire.wire_raw import Raw, healthy, served


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls(authority: Authority) -> ssl.SSLContext:
    pair = authority.issue("mq")
    found = server_context(ServeSettings(tls_cert=pair.cert, tls_key=pair.key))
    assert found is not None
    return found


async def test_messages_and_heartbeats_go_through(authority: Authority, tls: ssl.SSLContext) -> None:
    listening = Listening(port=0, tls=tls)
    async with served(listening) as (_, server), postroom.connect(server.url, tls=authority.ca) as client:
        await client.create_topic("orders", partitions=1)
        large = b"x" * 3_000_000
        await client.send("orders", large)
        async with client.consumer("orders", group="g") as consumer:
            (message,) = await consumer.poll(max_messages=1, wait=20)
            assert message.value == large
            trust = ssl.create_default_context(cafile=authority.ca)
            link = await asyncio.to_thread(_BlockingLink, server.address, Hello(1, 1, "thread"), trust, 10.0)
            beats = Beats((Beat("orders", "g", "m", "c", ()),))
            assert await asyncio.to_thread(link.call, beats) == []
            link.close()
            await message.ack()


async def test_a_handshake_that_does_not_end_is_ended(tls: ssl.SSLContext) -> None:
    listening = Listening(port=0, tls=tls, unauthenticated_ms=300)
    async with served(listening) as (_, server), Raw.open(server.port, hello=False) as raw:
        raw.writer.write(b"\x16\x03\x01")
        await raw.ended()


async def test_a_client_without_tls_is_let_go(authority: Authority, tls: ssl.SSLContext) -> None:
    async with served(Listening(port=0, tls=tls)) as (_, server):
        with pytest.raises(BrokerUnavailable):
            await postroom.connect(server.url)
        async with Raw.open(server.port, hello=False) as raw:
            raw.writer.write(b"anything but TLS")
            await raw.ended()
        async with postroom.connect(server.url, tls=authority.ca) as mq:
            assert await mq.topics() == []


async def test_a_client_that_wants_tls_is_told_that_there_is_none(authority: Authority) -> None:
    async with served() as (_, server):
        with pytest.raises(BrokerUnavailable, match=r"no TLS with 127.0.0.1:\d+: .*tls= of connect"):
            await postroom.connect(server.url, tls=authority.ca)
        await healthy(server)


async def test_a_certificate_that_nobody_vouches_for_is_told(tls: ssl.SSLContext) -> None:
    async with served(Listening(port=0, tls=tls)) as (_, server):
        with pytest.raises(BrokerUnavailable, match="check its certificate"):
            await postroom.connect(server.url, tls=True)
