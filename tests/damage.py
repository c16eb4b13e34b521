"""Batches that nobody can read, for tests of what becomes of them."""

from __future__ import annotations

from postroom.model.messages.batch import HEADER_SIZE, BatchBuilder, stamp

__all__ = ["garbage"]


def garbage(count: int = 3, size: int = 60, compression: int = 0) -> bytes:
    """A header of so many messages with a right checksum, and nothing that could be read behind it."""
    builder = BatchBuilder(max_bytes=2**31 - 1)
    for _ in range(count):
        builder.append(1, b"k", bytes(size), [])
    batch = bytearray(builder.build())
    batch[HEADER_SIZE:] = b"\xff" * (len(batch) - HEADER_SIZE)
    batch[22] = compression
    return stamp(batch, -1, -1, -1)
