"""Lines from standard input, as they come, without holding up the loop or the way out.

A thread of its own reads what is there and hands it over in chunks; the queue between is bounded, so a
fast writer waits. It reads the file descriptor itself: a thread that waits inside `sys.stdin` would hold
its lock when the program ends.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from collections.abc import AsyncIterator

__all__ = ["line_chunks", "size_of_stdin"]

_CHUNK_BYTES = 1024 * 1024
_QUEUED_CHUNKS = 2


async def line_chunks() -> AsyncIterator[list[bytes]]:
    """Lists of whole lines without their newline; the last one may lack it."""
    rest = b""
    async for data in _chunks():
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


async def _chunks() -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_QUEUED_CHUNKS)

    def read_all() -> None:
        data: bytes | OSError = b"?"
        while data and not isinstance(data, OSError):
            try:
                data = _read()
            except OSError as error:
                data = error
            room.acquire()
            try:
                loop.call_soon_threadsafe(queue.put_nowait, data)
            except RuntimeError:  # the loop is closed: nobody wants more
                return

    threading.Thread(target=read_all, name="postroom-stdin", daemon=True).start()
    while data := await queue.get():
        room.release()
        if isinstance(data, OSError):
            raise data
        yield data


def _read() -> bytes:
    try:
        descriptor = sys.stdin.fileno()
    except (OSError, ValueError):  # replaced by a test, or closed
        return sys.stdin.buffer.read(_CHUNK_BYTES)
    return os.read(descriptor, _CHUNK_BYTES)


def size_of_stdin() -> int | None:
    """Bytes to come, if it is a file."""
    try:
        found = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
