"""Processes beside the test: they come from a fork server, so that one takes milliseconds.

What a child reports through its pipe it had been told by the store; what it had not reported when it was
killed is of unknown fate.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from postroom.store.sql.session import Area, Dialect
from postroom.testing.store_contract.harness import batch

__all__ = ["CONTEXT", "POINTS", "Connection", "child", "die_in", "drained", "numbered", "received"]

CONTEXT: Any = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "psycopg",
        "pymysql",
        "postroom.store",
        "postroom.testing.store_contract",
        "postroom.client.connection",
        "postroom.client.forward.outbox",
    ]
)


POINTS = ["begun", "before commit", "after commit"]


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


def numbered(number: int) -> bytes:
    """The batch of that number, of a producer whose batches have three messages each."""
    return batch(3, producer=7, sequence=3 * number, value=b"%d" % number)


def die_in(dialect: Dialect, point: str, number: int | None = None) -> None:
    """From now on this process dies at that point: of its `number`th transaction, or of any."""
    begin, end = dialect.begin, dialect.end
    transactions = 0

    def die_at(here: str) -> None:
        if here == point and number in (None, transactions):
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_begin(connection: Any, area: Area, *, flush: bool, at_once: bool = False) -> None:
        nonlocal transactions
        begin(connection, area, flush=flush, at_once=at_once)
        transactions += 1
        die_at("begun")

    def dying_end(connection: Any, area: Area, *, commit: bool) -> None:
        if commit:
            die_at("before commit")
        end(connection, area, commit=commit)
        if commit:
            die_at("after commit")

    dialect.begin, dialect.end = dying_begin, dying_end  # type: ignore[method-assign]
