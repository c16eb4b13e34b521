"""What is fuzzed: everything that reads bytes of a stranger. Only errors of our tree may come out.

Each target takes any bytes. `SEEDS` are sound inputs from which a fuzzer may set out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS
from postroom.errors import PostroomError, ProtocolError
from postroom.kafka import connection as kafka_connection
from postroom.kafka import hot as kafka_hot
from postroom.kafka import messages as kafka_messages
from postroom.kafka import session as kafka_session
from postroom.model.messages.admission import admit
from postroom.model.messages.batch import BatchBuilder, records, stamp, verify
from postroom.model.share_session import OPENS, Acquired, InvalidAckError, ShareSession, acknowledged
from postroom.model.subscription import topics_wanted
from postroom.wire import messages as m
from postroom.wire.frames import PREFIX_BYTES, REPLY, Frame, FrameParser, encode
from postroom.wire.messages import raised
from postroom.wire.replies import unpacked

from .served import SERVED_SEEDS, http_bodies, http_bytes, sessions

__all__ = ["SEEDS", "TARGETS", "everything"]

_LIMIT = 4096
_OPERATIONS = (m.LIST_BROKERS, *OPERATIONS.values())
_OTHERS: tuple[Any, ...] = (m.Hello, m.Welcome, m.Cancel, r.Ask, r.Answer, m.Failure)


def frames(data: bytes) -> None:
    """The first byte says how the rest is cut into pieces; the frames are the same as of the whole."""
    step, stream = max(1, data[0] if data else 1), data[1:]
    whole = _parsed([stream])
    cut = _parsed([stream[at : at + step] for at in range(0, len(stream), step)])
    assert whole == cut


def _parsed(pieces: list[bytes]) -> tuple[list[Any], bool]:
    parser, found = FrameParser(_LIMIT), []
    try:
        for piece in pieces:
            for frame in parser.feed(piece):
                assert len(frame.header) + len(frame.body) + PREFIX_BYTES - 4 <= _LIMIT
                found.append(frame)
            assert parser.waiting <= _LIMIT + 4
    except ProtocolError:
        assert parser.waiting == 0
        return found, True
    return found, False


def _acknowledge(request: Any) -> None:
    """What a share consumer says of its messages costs no more than what it has."""
    session = ShareSession()
    session.advance(OPENS)
    session.acquire((None, 0), Acquired(0, 9, "orders", 1, 0, 1, 1, 1))
    for topic in request.topics:
        for one in topic.partitions:
            batches = one.acknowledgement_batches
            each = ((b.first_offset, b.last_offset, b.acknowledge_types) for b in batches)
            try:
                for said in acknowledged(each, renews=True):
                    found, _ = session.settle((None, 0), said)
                    assert all(said.first <= row.first <= row.last <= said.last for row in found)
            except InvalidAckError:
                pass
    assert 0 <= session.in_flight <= 10


def kafka(data: bytes) -> None:
    """A stream of a Kafka client: frames, headers and requests, whole or cut into pieces."""
    step, stream = max(1, data[0] if data else 1), data[1:]
    found = [kafka_connection.FrameParser(_LIMIT), kafka_connection.FrameParser(_LIMIT)]
    try:
        whole = found[0].feed(stream)
        cut = [one for at in range(0, len(stream), step) for one in found[1].feed(stream[at : at + step])]
        assert whole == cut
    except ProtocolError:
        return
    for frame in whole:
        try:
            asked = kafka_session.read_header(memoryview(frame))
            if asked.api.name == "produce":
                for sent in kafka_hot.read_produce(asked.version, asked.body).sent:
                    verify(sent.batch or b"")
            elif asked.api.name != "api_versions":
                request = kafka_messages.read_request(asked.api.key, asked.version, asked.body)
                if asked.api.name in ("share_fetch", "share_acknowledge"):
                    _acknowledge(request)
                if asked.api.name == "join_group":
                    protocols = tuple((one.name, one.metadata) for one in request.protocols)
                    topics_wanted("consumer", protocols)
        except PostroomError:
            pass


def requests(data: bytes) -> None:
    """The first byte chooses the operation, the rest is its header."""
    if data:
        _decoded(data[1:], _OPERATIONS[data[0] % len(_OPERATIONS)].request)


def replies(data: bytes) -> None:
    """The first two bytes choose the operation, and how much of the rest is the header."""
    if len(data) < 2:
        return
    operation, at = _OPERATIONS[data[0] % len(_OPERATIONS)], 2 + data[1]
    try:
        unpacked(operation, Frame(operation.kind, REPLY, 1, data[2:at], data[at:]))
    except PostroomError:
        pass


def others(data: bytes) -> None:
    """Hello, Welcome and the like; a failure becomes an error."""
    if data:
        found = _decoded(data[1:], _OTHERS[data[0] % len(_OTHERS)])
        if isinstance(found, m.Failure):
            assert isinstance(raised(found), PostroomError)


def _decoded(header: bytes, kind: Any) -> Any:
    try:
        return m.decode(header, kind)
    except PostroomError:
        return None


def batches(data: bytes) -> None:
    """What a producer appends, and what a consumer opens."""
    for read in (verify, records):
        try:
            read(data)
        except PostroomError:
            pass
    try:
        admit(data, 1_700_000_000_000)
    except PostroomError:
        return
    assert records(stamp(data, 7, 0, 0)), "what is admitted can be read, once its checksum is right"


TARGETS: dict[str, Callable[[bytes], None]] = {
    one.__name__: one
    for one in (frames, kafka, requests, replies, others, batches, sessions, http_bodies, http_bytes)
}


def everything(data: bytes) -> None:
    """The first byte chooses the target."""
    if data:
        tuple(TARGETS.values())[data[0] % len(TARGETS)](data[1:])


def _batch(compression: str) -> bytes:
    builder = BatchBuilder(compression)
    builder.append(1_700_000_000_000, b"key", b"value" * 10, [("source", b"web"), ("none", None)])
    return builder.build(7, 1, 40)


def _place(name: str) -> bytes:
    return bytes([[one.name for one in _OPERATIONS].index(name)])


_HELLO = m.encode_header(m.Hello(1, 1, "shop-1", "pst_x"))
_FETCHED = m.encode_header([[[0, 1, 5, 4]], 0, 1, False])
_ROUTE = m.encode_header({"topic": "a", "version": 1, "ranges": [
    {"first_slot": 0, "last_slot": 1023, "partition": 0, "partition_id": 7}]})  # fmt: skip


def _kafka_frame(key: int, version: int, body: bytes) -> bytes:
    header = struct.pack(">hhih", key, version, 7, -1)
    return struct.pack(">i", len(header) + len(body)) + header + body


_KAFKA = (
    (18, 0, b""),
    (3, 1, struct.pack(">ih", 1, 6) + b"orders"),
    (
        0,
        7,
        struct.pack(">hhiih", -1, -1, 1000, 1, 1)
        + b"a"
        + struct.pack(">iii", 1, 0, 70)
        + _batch("none")[:70],
    ),
    (1, 4, struct.pack(">iiiibih", -1, 500, 1, 100, 0, 1, 1) + b"a" + struct.pack(">iiqi", 1, 0, 0, 100)),
    (2, 1, struct.pack(">iih", -1, 1, 1) + b"a" + struct.pack(">iiq", 1, 0, -1)),
    # JoinGroup, SyncGroup, OffsetCommit, OffsetFetch
    (
        11,
        0,
        struct.pack(">h", 1)
        + b"g"
        + struct.pack(">ihh", 10_000, 0, 8)
        + b"consumer"
        + struct.pack(">ih", 1, 1)
        + b"r"
        + struct.pack(">i", 10)
        + b"\0\1\0\0\0\1\0\1ab",
    ),
    (14, 0, struct.pack(">h", 1) + b"g" + struct.pack(">ihih", 1, 0, 1, 1) + b"m" + struct.pack(">i", 0)),
    (
        8,
        2,
        struct.pack(">h", 1)
        + b"g"
        + struct.pack(">ihqih", 1, 0, -1, 1, 1)
        + b"a"
        + struct.pack(">iiqh", 1, 0, 5, -1),
    ),
    (9, 1, struct.pack(">h", 1) + b"g" + struct.pack(">ih", 1, 1) + b"a" + struct.pack(">ii", 1, 0)),
    (76, 1, b"\0\2g\2m" + struct.pack(">i", 0) + b"\0\2\2a\0"),
    (
        79,
        1,
        b"\0\2g\2m" + struct.pack(">i", 1) + b"\2" + bytes(16) + b"\2" + struct.pack(">i", 0)
        + b"\2" + struct.pack(">qq", 0, 2) + b"\4\1\2\3\0\0\0\0",
    ),
)  # fmt: skip

SEEDS: dict[str, list[bytes]] = {
    "kafka": [b"\x05" + _kafka_frame(*one) for one in _KAFKA],
    "frames": [b"\x03" + b"".join(encode(1, 1, _HELLO) + encode(10, 2, b"\x92\xa1a\x01", [b"batch"]))],
    "requests": [
        _place("append") + m.encode_header(r.Append("orders", 7, 0, b"x" * 16)),
        _place("create_topic") + m.encode_header(["orders", {"retention_ms": 5}, 4, False]),
        _place("settle")
        + m.encode_header(["a", "g", [{"topic": "a", "partition_id": 1, "token": 2,
                                       "verdicts": [{"kind": "ack", "first": 0, "last": 9}]}]]),
    ],
    "replies": [
        _place("fetch") + bytes([len(_FETCHED)]) + _FETCHED + b"body",
        _place("route") + bytes([len(_ROUTE)]) + _ROUTE,
    ],
    "others": [b"\0" + _HELLO, b"\5" + m.encode_header(m.Failure("unknown_topic", "no", False, {"a": 1}))],
    "batches": [_batch(name) for name in ("none", "gzip", "snappy", "lz4", "zstd")],
    **SERVED_SEEDS,
}  # fmt: skip
SEEDS["everything"] = [bytes([place]) + seed for place, name in enumerate(TARGETS) for seed in SEEDS[name]]
