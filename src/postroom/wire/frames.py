"""Frames: how requests and answers are cut out of a stream of bytes. No socket, no clock, no loop.

    0        4        8        12   13    14      16
    | length | id     | header | kind | flags | 0 | header … | body …

`length` counts what follows it. `id` is the asker's: an answer carries the id of its request, so requests are
pipelined and answered in any order. `header` is the length of the MessagePack header; what is left is the
body: raw batches, never copied into the header. All numbers are big-endian.

Must never believe a length: one over the limit, or that contradicts itself, is the peer's fault
(`ProtocolError`) before any of it is kept. Everything that reads bytes of a peer is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from ..errors import ProtocolError

__all__ = ["ERROR", "PART", "PREFIX_BYTES", "REPLY", "Frame", "FrameParser", "encode"]

_PREFIX = Struct(">IIIBBH")
PREFIX_BYTES = _PREFIX.size
_LENGTH_BYTES = 4
_AFTER_LENGTH = PREFIX_BYTES - _LENGTH_BYTES

# flags
REPLY = 1  # an answer
ERROR = 2  # an answer that says why not: its header is a failure
PART = 4  # the first part of an answer that comes in two
_FLAGS = frozenset({0, REPLY, ERROR, REPLY | ERROR, REPLY | PART})

_FOREIGN = {
    **dict.fromkeys((b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"PRI "), "HTTP"),
    b"\x16\x03": "TLS",
    b"SSH-": "SSH",
}


class Frame(NamedTuple):
    kind: int
    flags: int
    id: int
    header: bytes
    body: bytes


def encode(kind: int, id: int, header: bytes, body: Sequence[bytes] = (), flags: int = 0) -> list[bytes]:
    """A frame in pieces, to be written one after the other."""
    size = _AFTER_LENGTH + len(header) + sum(map(len, body))
    return [_PREFIX.pack(size, id, len(header), kind, flags, 0) + header, *body]


class FrameParser:
    """Bytes in, whole frames out. After a `ProtocolError` it takes nothing any more."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # of a frame; may be raised once a peer is trusted
        self._buffer = bytearray()
        self._needed = _LENGTH_BYTES  # enough to know a stranger by
        self._fault: ProtocolError | None = None

    @property
    def waiting(self) -> int:
        """Bytes of a frame that has begun and is not whole."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now. As a rule there are such frames alone: then nothing is kept."""
        if self._fault is not None:
            raise self._fault
        kept = self._buffer
        source: bytes | memoryview = data
        if kept:
            kept += data
            if len(kept) < self._needed:
                return
            source = memoryview(kept)
        start = 0
        try:
            while (frame := self._next(source, start)) is not None:
                start += PREFIX_BYTES + len(frame.header) + len(frame.body)
                yield frame
        except ProtocolError as error:
            self._fault = error
            start = len(source)
            raise
        finally:
            if isinstance(source, memoryview):
                source.release()
                del kept[:start]
            else:
                kept += source[start:]

    def _next(self, source: bytes | memoryview, start: int) -> Frame | None:
        left = len(source) - start
        if left < PREFIX_BYTES:
            self._needed = _LENGTH_BYTES
            if left >= _LENGTH_BYTES:
                self._needed = PREFIX_BYTES
                self._check_length(bytes(source[start : start + _LENGTH_BYTES]))
            return None
        size, id, header_size, kind, flags, reserved = _PREFIX.unpack_from(source, start)
        if size > self.max_bytes:
            self._check_length(bytes(source[start : start + _LENGTH_BYTES]))
        if size < _AFTER_LENGTH or header_size > size - _AFTER_LENGTH or flags not in _FLAGS or reserved:
            raise ProtocolError("this is no frame of Postroom's protocol: its lengths or flags are wrong")
        end = start + _LENGTH_BYTES + size
        if len(source) < end:
            self._needed = _LENGTH_BYTES + size
            return None
        header_start = start + PREFIX_BYTES
        body_start = header_start + header_size
        return Frame(kind, flags, id, bytes(source[header_start:body_start]), bytes(source[body_start:end]))

    def _check_length(self, first: bytes) -> None:
        size = int.from_bytes(first)
        if size <= self.max_bytes:
            return
        spoke = _FOREIGN.get(first) or _FOREIGN.get(first[:2])
        if spoke:
            raise ProtocolError(f"this port speaks Postroom's own protocol, and not {spoke}", spoke=spoke)
        raise ProtocolError(
            f"a frame of {size:,} bytes was announced, and {self.max_bytes:,} is the most that is taken: "
            "send smaller batches",
            max_bytes=self.max_bytes,
        )
