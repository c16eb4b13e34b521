"""Processes beside the test: they come from a fork server, so that one takes milliseconds.

What a child reports through its pipe it had been told by the store; what it had not reported when it was
killed is of unknown fate.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["CONTEXT", "Connection", "child", "drained", "received"]

CONTEXT: Any = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
CONTEXT.set_forkserver_preload(
    ["pytest", "psycopg", "pymysql", "penstock.store", "penstock.testing.store_contract"]
)


@contextlib.contextmanager
def child(work: Callable[..., None], *args: object) -> Iterator[tuple[Any, Connection]]:
    """A process that runs `work(*args, pipe)`, and our end of the pipe; killed at the end."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=work, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(30)
        ours.close()


def received(pipe: Connection, limit_s: float = 30) -> Any:
    assert pipe.poll(limit_s), f"a child was silent for {limit_s} s"
    return pipe.recv()


def drained(pipe: Connection) -> list[Any]:
    """All that a child sent before it died."""
    found = []
    with contextlib.suppress(EOFError, ConnectionResetError):
        while pipe.poll(30):
            found.append(pipe.recv())
    return found
