"""The end of a write-ahead log: whether its last commit is whole.

SQLite leaves out what it finds damaged at the end of its log, without a word: most often that is a commit
that a crash cut off, and nobody was told that it was done. A disk that loses what it had flushed looks the
same. So this is a hint, and no proof; a log cut exactly between two commits cannot be told from a whole one.
"""

from __future__ import annotations

import struct
from pathlib import Path

__all__ = ["damaged_end"]

_HEADER, _FRAME = 32, 24
_MAGIC = (0x377F0682, 0x377F0683)  # the second: checksums of big-endian words


def damaged_end(wal: Path) -> bool:
    """Whether the log ends in a frame of its present run that is cut short, or whose checksum is wrong."""
    with wal.open("rb") as file:
        header = file.read(_HEADER)
        if len(header) < _HEADER or struct.unpack(">I", header[:4])[0] not in _MAGIC:
            return False
        page, salts = struct.unpack(">I", header[8:12])[0], header[16:24]
        order = ">" if header[3] & 1 else "<"
        before, at, last = header[24:32], _HEADER, b""
        while True:
            file.seek(at)
            found = file.read(_FRAME)
            if len(found) < _FRAME or found[8:16] != salts:  # the end, or left from an earlier run
                break
            if last:
                before = last[16:24]
            last, at = found, at + _FRAME + page
        if not last:
            return False
        file.seek(at - page)
        data = file.read(page)
    return len(data) < page or _sum(order, last[:8] + data, before) != last[16:24]


def _sum(order: str, data: bytes, before: bytes) -> bytes:
    one, two = struct.unpack(">II", before)
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for at in range(0, len(words), 2):
        one = (one + words[at] + two) & 0xFFFFFFFF
        two = (two + words[at + 1] + one) & 0xFFFFFFFF
    return struct.pack(">II", one, two)
