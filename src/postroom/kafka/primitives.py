"""Kafka's primitive types: how numbers, strings and arrays are written, in the old way and the flexible one.

What is read comes from strangers: a length that the bytes do not have is `ProtocolError`, and nothing is
allocated by a length before the bytes are there (I22). What is written is a list of pieces, so that batches
are passed on without a copy. No message is known here: `hot` and `messages` know them.
"""

from __future__ import annotations

import struct
from uuid import UUID

from ..errors import ProtocolError

__all__ = ["NO_UUID", "Piece", "Reader", "Writer", "framed"]

Piece = bytes | memoryview

NO_UUID = UUID(int=0)
"""What stands where there is no topic id."""

_I8 = struct.Struct(">b")
_I16, _I32, _I64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
_U32 = struct.Struct(">I")
_LONGEST_STRING = 32_767
_VARINT_BYTES = 5


class Reader:
    """Reads one message, from its beginning to its end."""

    __slots__ = ("at", "view")

    def __init__(self, view: memoryview, at: int = 0) -> None:
        self.view, self.at = view, at

    def _take(self, kind: struct.Struct) -> int:
        at = self.at
        self.at = at + kind.size
        if self.at > len(self.view):
            raise _cut_off()
        found: int = kind.unpack_from(self.view, at)[0]
        return found

    def i8(self) -> int:
        return self._take(_I8)

    def i16(self) -> int:
        return self._take(_I16)

    def i32(self) -> int:
        return self._take(_I32)

    def i64(self) -> int:
        return self._take(_I64)

    def uvarint(self) -> int:
        found = shift = 0
        for _ in range(_VARINT_BYTES):
            if self.at >= len(self.view):
                raise _cut_off()
            byte = self.view[self.at]
            self.at += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
            shift += 7
        raise ProtocolError("a length in a request has more than five bytes; this is not Kafka's protocol")

    def view_of(self, size: int) -> memoryview:
        at = self.at
        if not 0 <= size <= len(self.view) - at:
            raise _cut_off()
        self.at = at + size
        return self.view[at : self.at]

    def string(self, flexible: bool) -> str | None:
        """A string; None: null."""
        size = self.uvarint() - 1 if flexible else self.i16()
        if size < 0:
            return None
        if size > _LONGEST_STRING:
            raise _cut_off()
        try:
            return str(self.view_of(size), "utf-8")
        except UnicodeDecodeError:
            raise ProtocolError("a string in a request is not UTF-8") from None

    def name(self, flexible: bool) -> str:
        found = self.string(flexible)
        if found is None:
            raise ProtocolError("a request has no name where one must stand")
        return found

    def data(self, flexible: bool) -> memoryview | None:
        """Bytes, which are not copied; None: null."""
        size = self.uvarint() - 1 if flexible else self.i32()
        return None if size < 0 else self.view_of(size)

    def owned(self, flexible: bool) -> bytes | None:
        """Bytes that outlive the frame; None: null."""
        found = self.data(flexible)
        return None if found is None else found.tobytes()

    def uuid(self) -> UUID | None:
        """None: there is none."""
        found = UUID(bytes=self.view_of(16).tobytes())
        return None if found == NO_UUID else found

    def array(self, flexible: bool) -> int:
        """How many elements an array has, each of which takes a byte at least; -1 for null."""
        size = self.uvarint() - 1 if flexible else self.i32()
        if not -1 <= size <= len(self.view) - self.at:
            raise _cut_off()
        return size

    def count(self, flexible: bool) -> int:
        """The same, with 0 for null."""
        return max(0, self.array(flexible))

    def tags(self) -> None:
        """Tagged fields, of which none is needed."""
        for _ in range(self.uvarint()):
            self.uvarint()
            self.view_of(self.uvarint())


def _cut_off() -> ProtocolError:
    return ProtocolError("a request says that it is longer than it is: it was cut off, or is not Kafka's")


class Writer:
    """Gathers the pieces of one answer. `flexible`: lengths are varints, and tags follow each structure."""

    __slots__ = ("_buffer", "flexible", "pieces")

    def __init__(self, flexible: bool) -> None:
        self.flexible = flexible
        self.pieces: list[Piece] = []
        self._buffer = bytearray()

    def i8(self, value: int) -> None:
        self._buffer.append(value & 0xFF)

    def i16(self, value: int) -> None:
        self._buffer += _I16.pack(value)

    def i32(self, value: int) -> None:
        self._buffer += _I32.pack(value)

    def i64(self, value: int) -> None:
        self._buffer += _I64.pack(value)

    def uvarint(self, value: int) -> None:
        while value >= 0x80:
            self._buffer.append(value & 0x7F | 0x80)
            value >>= 7
        self._buffer.append(value)

    def count(self, size: int) -> None:
        """The length of an array or of bytes; -1: null."""
        if self.flexible:
            self.uvarint(size + 1)
        else:
            self.i32(size)

    def string(self, value: str | None) -> None:
        data = None if value is None else value.encode("utf-8", "replace")[:_LONGEST_STRING]
        if self.flexible:
            self.uvarint(0 if data is None else len(data) + 1)
        else:
            self.i16(-1 if data is None else len(data))
        self._buffer += data or b""

    def uuid(self, value: UUID) -> None:
        self._buffer += value.bytes

    def numbers(self, values: tuple[int, ...]) -> None:
        self.count(len(values))
        for value in values:
            self.i32(value)

    def tags(self) -> None:
        """No tagged field, where there might be some."""
        if self.flexible:
            self._buffer.append(0)

    def raw(self, pieces: list[Piece]) -> None:
        """Pass these pieces on as they are."""
        if self._buffer:
            self.pieces.append(bytes(self._buffer))
            self._buffer.clear()
        self.pieces += pieces

    def done(self) -> list[Piece]:
        self.raw([])
        return self.pieces


def framed(correlation_id: int, tagged: bool, pieces: list[Piece]) -> list[Piece]:
    """An answer as it is sent. `tagged`: its header has tags, as those of flexible answers have."""
    size = 4 + int(tagged) + sum(map(len, pieces))
    return [_U32.pack(size) + _I32.pack(correlation_id) + (b"\0" if tagged else b""), *pieces]
