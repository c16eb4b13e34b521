"""Bad input on a live port: a clear answer where one is possible, and others are served as before."""

from __future__ import annotations

import random
import struct
from contextlib import AsyncExitStack

import pytest

import postroom
from postroom.model.messages.batch import BatchBuilder
from postroom.wire.server.listening import Listening
from postroom.wire.server.server import WireServer
from tests.integration.wire.wire_raw import ASK, CANCEL, HELLO, REPLY, Raw, frame, healthy, served

TOPIC, APPEND, FETCH, SUBSCRIBE, POLL, SETTLE = 32, 10, 11, 20, 22, 23

QUICK = Listening(port=0, unauthenticated_ms=300, frame_ms=300, silent_ms=1500)


# ---- before Hello ----

STRANGERS = {
    "random bytes": random.Random(4).randbytes(5000),
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "a frame of 4 GB": struct.pack(">IIIBBH", 0xFFFF_FFFF, 1, 10, HELLO, 0, 0),
    "a header of 4 GB": struct.pack(">IIIBBH", 1000, 1, 0xFFFF_FFFF, HELLO, 0, 0),
    "more than a stranger may say": struct.pack(">IIIBBH", 65 * 1024, 1, 10, HELLO, 0, 0),
    "an unknown flag": frame(HELLO, [1, 1, "raw"], flags=64),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "SSH": b"SSH-2.0-OpenSSH_9.9\r\n",
    "a request without Hello": frame(TOPIC, ["orders"]),
    "an answer": frame(ASK, [[], []], flags=REPLY),
    "a cancel": frame(CANCEL, [1]),
    "a Hello that cannot be read": frame(HELLO, {"a": 1}),
    "a Hello of no UTF-8": frame(HELLO, b"\x94\x01\x01\xa2\xff\xfe\xa0"),
    "a Hello too deep to read": frame(HELLO, b"\x96\x01\x01\xa1a\xa0\xa0" + b"\x91" * 50_000),
    "a Hello, and a request behind it": frame(HELLO, [1, 1, "raw"]) + frame(TOPIC, ["orders"], id=2),
    "Hello twice at once": frame(HELLO, [1, 1, "raw"]) + frame(HELLO, [1, 1, "raw"], id=2),
    "a version to come": frame(HELLO, [2, 9, "raw"]),
    "versions upside down": frame(HELLO, [5, 1, "raw"]),
}


async def test_strangers_are_told_why_and_let_go() -> None:
    async with served() as (_, server):
        for name, said in STRANGERS.items():
            async with Raw.open(server.port, hello=False) as raw:
                raw.writer.write(said)
                came = await raw.refused()
                assert came.code == "protocol", name
                assert len(came.header[1]) > 20, name
        await healthy(server)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("a frame of 4 GB", "4,294,967,295 bytes was announced, and 65,536 is the most"),
        ("TLS", "speaks Postroom's own protocol, and not TLS"),
        ("a version to come", "speaks versions 2 to 9 of the protocol, and this broker 1 to 1"),
        ("a request without Hello", "begins with Hello"),
    ],
)
async def test_the_answer_says_what_to_do(said: str, told: str) -> None:
    async with served() as (_, server), Raw.open(server.port, hello=False) as raw:
        raw.writer.write(STRANGERS[said])
        assert told in (await raw.refused()).header[1]


async def test_a_browser_is_answered_in_its_own_words() -> None:
    async with served() as (_, server), Raw.open(server.port, hello=False) as raw:
        raw.writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await raw.ended()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"Postroom's own protocol" in answer


async def test_time_is_up_for_those_who_say_nothing() -> None:
    async with served(QUICK) as (_, server):
        async with Raw.open(server.port, hello=False) as silent, Raw.open(server.port, hello=False) as slow:
            slow.writer.write(frame(HELLO, [1, 1, "raw"])[:7])
            assert "no Hello within 300 ms" in (await silent.refused()).header[1]
            assert "no Hello within 300 ms" in (await slow.refused()).header[1]
        await healthy(server)


async def test_more_connections_than_allowed_are_told_so() -> None:
    async with served(Listening(port=0, max_connections=2)) as (_, server):
        async with Raw.open(server.port) as one, Raw.open(server.port) as two:
            async with Raw.open(server.port, hello=False) as three:
                came = await three.refused()
                assert (came.code, came.id) == ("broker_unavailable", 0)
                assert "2 connections, which is its limit (max_connections)" in came.header[1]
            assert await one.alive()
            assert await two.alive()
        await healthy(server)


# ---- after Hello ----


@pytest.fixture
async def server() -> object:
    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        await mq.send_many("orders", [postroom.Message(b"1"), postroom.Message(b"2")])
        yield server
        await healthy(server)


async def test_an_unknown_request_is_answered_and_the_connection_lives(server: WireServer) -> None:
    async with Raw.open(server.port) as raw:
        for kind in (0, 5, 99, 255):
            came = await raw.ask(kind, [], id=kind + 10)
            assert came.code == "protocol"
            assert f"no request of kind {kind}" in came.header[1]
        assert await raw.alive()


UNREADABLE = {
    "no MessagePack": b"\xc1\xc1",
    "nothing": b"",
    "of another type": frame(TOPIC, {"name": "orders"})[16:],
    "too short": frame(TOPIC, [])[16:],
    "no UTF-8": b"\x91\xa2\xff\xfe",
    "something behind it": b"\x91\xa1a\xff",
}


@pytest.mark.parametrize("header", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_header_that_cannot_be_read_ends_the_connection(server: WireServer, header: bytes) -> None:
    async with Raw.open(server.port) as raw:
        raw.send(TOPIC, header, id=7)
        came = await raw.refused()
        assert (came.code, came.id) == ("protocol", 7)
        assert "cannot be read" in came.header[1]


MOST = f"{Listening().max_frame_bytes:,} is the most"
FAULTS = {
    "Hello again": (frame(HELLO, [1, 1, "raw"]), "Hello came twice"),
    "an answer to nothing": (frame(ASK, [[], []], id=5, flags=REPLY), "answer to nothing"),
    "an answer of another kind": (frame(TOPIC, [[], []], id=5, flags=REPLY), "answer to nothing"),
    "a cancel that cannot be read": (frame(CANCEL, "no"), "cannot be read"),
    "4 GB": (struct.pack(">IIIBBH", 0xFFFF_FFFF, 1, 0, TOPIC, 0, 0), MOST),
    "a header of 4 GB": (struct.pack(">IIIBBH", 100, 1, 0xFFFF_FFFF, TOPIC, 0, 0), "lengths or flags"),
}


@pytest.mark.parametrize(("said", "told"), FAULTS.values(), ids=FAULTS)
async def test_faults_end_the_connection(server: WireServer, said: bytes, told: str) -> None:
    async with Raw.open(server.port) as raw:
        raw.writer.write(said)
        came = await raw.refused()
        assert came.code == "protocol"
        assert told in came.header[1]


async def test_an_id_that_is_under_way_cannot_be_used(server: WireServer) -> None:
    async with Raw.open(server.port) as raw:
        raw.send(FETCH, ["orders", 1, 2, 10, 1000, 5000], id=8)
        raw.send(FETCH, ["orders", 1, 2, 10, 1000, 5000], id=8)
        assert "request 8 is under way already" in (await raw.refused()).header[1]


async def test_an_id_may_be_used_again_once_it_was_answered(server: WireServer) -> None:
    async with Raw.open(server.port) as raw:
        for _ in range(50):
            assert (await raw.ask(TOPIC, ["orders"], id=8)).header["name"] == "orders"


async def test_a_cancel_of_nothing_is_nothing(server: WireServer) -> None:
    async with Raw.open(server.port) as raw:
        for id in (0, 5, -1, 2**40):
            raw.send(CANCEL, [id], id=0)
        assert await raw.alive()


async def test_a_cancelled_request_is_answered(server: WireServer) -> None:
    async with Raw.open(server.port) as raw:
        raw.send(FETCH, ["orders", 1, 2, 10, 1000, 60_000], id=8)
        raw.send(CANCEL, [8], id=0)
        came = await raw.receive()
        assert (came.id, came.code) == (8, "broker_unavailable")
        assert await raw.alive()


NEGATIVE = -(2**63)
WISH = {"start": {"kind": "earliest"}}


def a_poll(**changed: object) -> list[object]:
    request = {"topic": "orders", "group": "g", "member": "m", "token": 1, "messages": 1, "bytes": 1000,
               "wait_ms": 0, "empty_handed": True}  # fmt: skip
    return [{**request, **changed}]


def a_batch(messages: int, size: int = 0) -> bytes:
    builder = BatchBuilder(max_bytes=1 << 30)
    for _ in range(messages):
        builder.append(1, b"", b"x" * size, [])
    return builder.build()


NONSENSE = {
    "too many messages": (APPEND, ["orders", 1], a_batch(10_001), "message_too_large"),
    "too many bytes": (APPEND, ["orders", 1], a_batch(9, 1 << 20), "message_too_large"),
    "as many messages as may be": (APPEND, ["orders", 1], a_batch(10_000), None),
    "ids that are none": (APPEND, ["orders", 1, 2**40, b"xyz"], a_batch(2), "corrupt_batch"),
    "a partition beyond all": (APPEND, ["orders", 2**63 - 1], a_batch(1), "unknown_partition"),
    "a batch that is none": (APPEND, ["orders", 1], b"nothing", "corrupt_batch"),
    "a batch of nothing": (APPEND, ["orders", 1], b"", "corrupt_batch"),
    "a topic that is not there": (TOPIC, ["nobody"], b"", "unknown_topic"),
    "a partition that is not there": (FETCH, ["orders", 77, 0, 1, 1, 0], b"", "unknown_partition"),
    "an offset beyond all": (FETCH, ["orders", 1, 2**63 - 1, 1, 1, 0], b"", "invalid_setting"),
    "an offset before all": (FETCH, ["orders", 1, NEGATIVE, 1, 1, NEGATIVE], b"", "invalid_setting"),
    "an offset that is not there": (FETCH, ["orders", 1, 2**62, 1, 1, 0], b"", None),
    "a number that no database keeps": (APPEND, ["orders", 2**63], a_batch(1), "invalid_setting"),
    "a name of a megabyte": (TOPIC, ["x" * 2**20], b"", "message_too_large"),
    "a name of a kilobyte": (TOPIC, ["x" * 2**10], b"", "invalid_name"),
    "nobody's token": (POLL, a_poll(token=0), b"", "invalid_setting"),
    "a poll for less than nothing": (POLL, a_poll(messages=-5, bytes=-5), b"", "invalid_setting"),
    "a poll that waits for less than nothing": (POLL, a_poll(wait_ms=NEGATIVE), b"", "invalid_setting"),
    "a name with a zero in it": (TOPIC, ["a\0b"], b"", "unknown_topic"),
    "a setting that is not allowed": (30, ["new", {"retention_ms": -1}, 1, False], b"", "invalid_setting"),
    "no partitions": (30, ["new", {}, 0, False], b"", "invalid_setting"),
    "a name that is not allowed": (30, ["a b", {}, 1, False], b"", "invalid_name"),
    "a span upside down": (
        SETTLE,
        ["orders", "g", [{"topic": "orders", "partition_id": 1, "token": 5,
                          "verdicts": [{"kind": "ack", "first": 9, "last": 1}]}]],
        b"",
        None,
    ),
}  # fmt: skip


@pytest.mark.slow("breaks connections for seconds")
@pytest.mark.parametrize(("kind", "header", "body", "code"), NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_is_answered_and_the_connection_lives(
    server: WireServer, kind: int, header: object, body: bytes, code: str | None
) -> None:
    async with Raw.open(server.port) as raw:
        await raw.ask(SUBSCRIBE, ["orders", "g", WISH, "m", "raw"])
        came = await raw.ask(kind, header, body=body)
        if code is None:
            assert came.flags == REPLY
        else:
            assert came.code == code, came
        assert await raw.alive()


async def test_strangers_who_say_nothing_keep_no_client_out() -> None:
    async with served(Listening(port=0, max_connections=5)) as (_, server), AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(Raw.open(server.port, hello=False)) for _ in range(5)]
        client = await stack.enter_async_context(Raw.open(server.port))
        assert "max_connections" in (await strangers[0].refused()).header[1]  # the oldest gave way
        more = [await stack.enter_async_context(Raw.open(server.port, hello=False)) for _ in range(20)]
        assert await client.alive()  # who is known stays
        assert "max_connections" in (await more[0].refused()).header[1]
