"""Frames of Kafka clients: whole, in any pieces, and never more memory than their bytes."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import ProtocolError
from postroom.kafka.connection import FrameParser

FRAMES = st.lists(st.binary(min_size=1, max_size=300), max_size=8)


def on_the_wire(frames: list[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


@given(frames=FRAMES, cuts=st.randoms(use_true_random=False), longest=st.integers(1, 700))
def test_frames_are_the_same_whatever_pieces_they_come_in(
    frames: list[bytes], cuts: random.Random, longest: int
) -> None:
    data, parser, found, at = on_the_wire(frames), FrameParser(300), list[bytes](), 0
    while at < len(data):
        piece = data[at : at + cuts.randint(1, longest)]
        found += map(bytes, parser.feed(piece))
        at += len(piece)
        assert parser.begun == at - len(on_the_wire(found)), "what is not whole is counted"
    assert found == frames
    assert parser.begun == 0


@pytest.mark.parametrize("size", [-1, 0, 301, 2**31 - 1])
@pytest.mark.parametrize("before", [0, 3])
def test_a_frame_of_no_size_or_too_large_is_refused_by_its_length(size: int, before: int) -> None:
    data, parser = size.to_bytes(4, "big", signed=True), FrameParser(300)
    assert parser.feed(data[:before]) == []
    with pytest.raises(ProtocolError):
        parser.feed(data[before:])


def test_small_pieces_take_no_more_room_than_their_bytes() -> None:
    """I22: whoever sends two bytes at a time is kept as two bytes at a time, not as objects."""
    parser, size = FrameParser(1 << 20), 200_000
    parser.feed(size.to_bytes(4, "big"))
    for _ in range(size // 2 - 1):
        assert parser.feed(b"ab") == []
    kept = sum(map(sys.getsizeof, parser._pieces)) + sys.getsizeof(parser._pieces)
    assert kept < 1.1 * size
