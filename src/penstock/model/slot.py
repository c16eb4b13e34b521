"""Which slot a key belongs to: CRC-32 of its bytes, modulo 1024.

Decides it for every client in every language, for ever (R24, R29): order per key depends on it, so this
function and its vectors must never change. Routes map slots to partitions elsewhere.
"""

from __future__ import annotations

from zlib import crc32

from ..config import SLOTS

__all__ = ["TEST_VECTORS", "slot_of"]


def slot_of(key: bytes) -> int:
    return crc32(key) % SLOTS


TEST_VECTORS: tuple[tuple[bytes, int], ...] = (
    (b"", 0),
    (b"\x00", 909),
    (b"a", 579),
    (b"42", 136),
    (b"123456789", 294),
    (b"customer-1", 125),
    (b"customer-2", 455),
    (b"order:2024-01-31", 476),
    (b" ", 837),
    (b"\xff", 0),
    (b"\x00\x00\x00\x00", 796),
    (b"\xde\xad\xbe\xef", 858),
    (bytes(range(16)), 648),
    ("Zürich".encode(), 318),
    ("注文".encode(), 287),
    ("🐟".encode(), 697),
    (b"x" * 1000, 486),
)
"""(key, slot) for whoever writes a client; also in docs/PROTOCOL.md."""
