"""Each case is fed whole, byte by byte, and with bytes behind it."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postroom.errors import ProtocolError
from postroom.wire.frames import ERROR, PREFIX_BYTES, REPLY, Frame, FrameParser, encode

LIMIT = 1000

CASES = {
    "nothing in it": Frame(3, 0, 1, b"", b""),
    "a header": Frame(10, 0, 7, b"\x91\x01", b""),
    "a body": Frame(10, REPLY, 7, b"", b"batch"),
    "both": Frame(255, REPLY | ERROR, 0xFFFF_FFFF, b"header", b"body" * 20),
    "as large as may be": Frame(1, 0, 0, b"h" * 500, b"b" * (LIMIT - 500 - PREFIX_BYTES + 4)),
}

frames = st.builds(
    Frame,
    kind=st.integers(0, 255),
    flags=st.integers(0, 3),
    id=st.integers(0, 2**32 - 1),
    header=st.binary(max_size=300),
    body=st.binary(max_size=300),
)


def on_the_wire(frame: Frame) -> bytes:
    half = len(frame.body) // 2
    body = [frame.body[:half], frame.body[half:]] if frame.body else []
    return b"".join(encode(frame.kind, frame.id, frame.header, body, frame.flags))


def prefix(size: int, header: int, *, flags: int = 0, reserved: int = 0) -> bytes:
    return struct.pack(">IIIBBH", size, 1, header, 10, flags, reserved)


def fed(pieces: Iterable[bytes], limit: int = LIMIT) -> list[Frame]:
    parser = FrameParser(limit)
    return [frame for piece in pieces for frame in parser.feed(piece)]


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


# ---- sound frames ----


@pytest.mark.parametrize("frame", CASES.values(), ids=CASES)
def test_a_frame_comes_out_as_it_went_in(frame: Frame) -> None:
    data = on_the_wire(frame)
    assert fed([data]) == [frame]
    assert fed(bytewise(data)) == [frame]
    assert fed([data + data[:-1]]) == [frame]
    assert fed([data + data]) == [frame, frame]


@pytest.mark.parametrize("frame", CASES.values(), ids=CASES)
def test_what_is_left_of_a_frame_is_waited_for(frame: Frame) -> None:
    data, parser = on_the_wire(frame), FrameParser(LIMIT)
    assert list(parser.feed(data + data[:5])) == [frame]
    assert parser.waiting == 5
    assert list(parser.feed(data[5:])) == [frame]
    assert parser.waiting == 0


@given(st.lists(frames, max_size=6), st.data())
def test_frames_cut_anywhere_come_out_the_same(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(on_the_wire, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert fed(pieces) == sent


def test_a_reader_that_stops_in_the_middle_loses_nothing() -> None:
    parser = FrameParser(LIMIT)
    one, two = CASES["a header"], CASES["a body"]
    assert next(iter(parser.feed(on_the_wire(one) + on_the_wire(two)))) == one
    assert list(parser.feed(b"")) == [two]


def test_the_limit_may_be_raised_once_a_peer_is_known() -> None:
    parser, large = FrameParser(100), Frame(10, 0, 1, b"", b"x" * 500)
    first = on_the_wire(CASES["a header"])
    assert list(parser.feed(first))
    parser.max_bytes = LIMIT
    assert list(parser.feed(on_the_wire(large))) == [large]


# ---- lengths that lie ----

LIES = {
    "4 GB": prefix(0xFFFF_FFFF, 0),
    "one byte too many": prefix(LIMIT + 1, 0),
    "shorter than its own fields": prefix(11, 0),
    "of no length": prefix(0, 0),
    "a header longer than the frame": prefix(20, 9),
    "a header of 4 GB": prefix(20, 0xFFFF_FFFF),
    "flags that nobody knows": prefix(12, 0, flags=4),
    "reserved bytes that are used": prefix(12, 0, reserved=1),
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_a_frame_that_lies_is_refused(data: bytes) -> None:
    sound = on_the_wire(CASES["a header"])
    for pieces in ([data], bytewise(data), [data + b"behind it" * 9], [sound + data]):
        with pytest.raises(ProtocolError):
            fed(pieces)


def test_four_bytes_are_enough_to_refuse_a_length() -> None:
    parser = FrameParser(LIMIT)
    assert list(parser.feed(b"\xff\xff\xff")) == []
    with pytest.raises(ProtocolError, match=r"4,294,967,295 bytes was announced, and 1,000 is the most"):
        list(parser.feed(b"\xff"))


def test_sound_frames_before_a_lie_come_out() -> None:
    came = iter(FrameParser(LIMIT).feed(on_the_wire(CASES["a header"]) + LIES["4 GB"]))
    assert next(came) == CASES["a header"]
    with pytest.raises(ProtocolError):
        next(came)


def test_after_a_fault_nothing_is_taken_and_nothing_kept() -> None:
    parser = FrameParser(LIMIT)
    with pytest.raises(ProtocolError) as first:
        list(parser.feed(LIES["of no length"] + b"x" * 500))
    assert parser.waiting == 0
    with pytest.raises(ProtocolError) as second:
        list(parser.feed(on_the_wire(CASES["a header"])))
    assert second.value is first.value
    assert parser.waiting == 0


SPOKEN = {
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n": "HTTP",
    b"GET ": "HTTP",
    b"POST /topics HTTP/1.1\r\n": "HTTP",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "HTTP",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32): "TLS",
    b"SSH-2.0-OpenSSH_9.9\r\n": "SSH",
}


@pytest.mark.parametrize("data", SPOKEN, ids=[f"{name} {i}" for i, name in enumerate(SPOKEN.values())])
def test_other_protocols_are_named(data: bytes) -> None:
    for pieces in ([data], bytewise(data), [data * 3]):
        with pytest.raises(ProtocolError, match=f"and not {SPOKEN[data]}") as caught:
            fed(pieces, limit=64 * 1024 * 1024)
        assert caught.value.details == {"spoke": SPOKEN[data]}


@given(st.lists(st.binary(max_size=400), max_size=8))
@example([prefix(LIMIT, 0)] + [b"x" * 400] * 2)
def test_no_bytes_do_harm(pieces: list[bytes]) -> None:
    parser = FrameParser(LIMIT)
    try:
        for piece in pieces:
            for frame in parser.feed(piece):
                assert len(frame.header) + len(frame.body) + PREFIX_BYTES - 4 <= LIMIT
            assert parser.waiting <= LIMIT + 4
    except ProtocolError:
        assert parser.waiting == 0
