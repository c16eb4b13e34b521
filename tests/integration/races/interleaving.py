"""Steps of two transactions put in a wanted order, on real servers.

    with stopped_at_commit(store) as stop:      a verb that runs now stops before its COMMIT, its locks held
        first = soon(append, …)
        stop.reached.wait(…)
        …
        stop.go_on.set()

Nothing here sleeps to let something happen: `until` waits for what the server itself reports.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import pymysql

from postroom.store import SqlStore
from postroom.store.sql.session import Area
from tests.ready import Ground

__all__ = [
    "SECONDS",
    "Stop",
    "kill",
    "lock_waits",
    "run_all",
    "soon",
    "stopped_after_lock",
    "stopped_at_commit",
    "until",
]

SECONDS = 30
T = TypeVar("T")

_WAITING = {
    "postgres": "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'",
    # of the whole server, hence `undisturbed`; INNODB_TRX is stale if it is asked often
    "mariadb": """SELECT CAST(VARIABLE_VALUE AS SIGNED) FROM information_schema.GLOBAL_STATUS
                  WHERE VARIABLE_NAME = 'INNODB_ROW_LOCK_CURRENT_WAITS' AND %s <> ''""",
}
_KILL = {
    "postgres": """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE datname = %s AND pid <> pg_backend_pid() AND state IN ({states})""",
    "mariadb": """SELECT p.ID FROM information_schema.PROCESSLIST p
                  LEFT JOIN information_schema.INNODB_TRX t ON p.ID = t.trx_mysql_thread_id
                  WHERE p.DB = %s AND p.ID <> CONNECTION_ID() AND ({states})""",
}
_STATES = {
    ("postgres", True): "'idle in transaction'",
    ("postgres", False): "'idle', 'idle in transaction', 'active'",
    ("mariadb", True): "t.trx_state = 'RUNNING' AND p.COMMAND = 'Sleep'",
    ("mariadb", False): "TRUE",
}


class Stop:
    """Where a transaction was stopped, and the way to let it go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        assert self.reached.wait(SECONDS), "no transaction came as far as its commit"


@contextmanager
def stopped_at_commit(store: SqlStore, *, times: int = 1, synced: bool = True) -> Iterator[Stop]:
    """The next transaction (or so many) of this store stops when all is done but the commit.

    Not `synced`: on PostgreSQL, in the middle of a pipeline, as a process is that stands still anywhere.
    """
    dialect, stop, left = store.session.dialect, Stop(), times
    original = dialect.end

    def end(connection: Any, area: Area, *, commit: bool) -> None:
        nonlocal left
        if commit and left:
            left -= 1
            if synced:
                run_all(connection)
            stop.reached.set()
            assert stop.go_on.wait(SECONDS), "the test forgot a transaction that it had stopped"
        original(connection, area, commit=commit)

    with (
        mock.patch.object(dialect, "end", end),
        mock.patch.object(dialect, "append_lone", return_value=None),  # which cannot be stopped in between
    ):
        try:
            yield stop
        finally:
            stop.go_on.set()


@contextmanager
def stopped_after_lock(store: SqlStore) -> Iterator[Stop]:
    """The next transaction of this store stops as soon as it has its locks, as it is."""
    dialect, stop = store.session.dialect, Stop()
    original = dialect.locked

    def locked(*args: Any) -> Any:
        found = original(*args)
        if not stop.reached.is_set():
            stop.reached.set()
            assert stop.go_on.wait(SECONDS), "the test forgot a transaction that it had stopped"
        return found

    with mock.patch.object(dialect, "locked", locked):
        try:
            yield stop
        finally:
            stop.go_on.set()


def run_all(connection: Any) -> None:
    """On a server, statements whose answer nobody asked for yet leave with the COMMIT: run them now."""
    statements = getattr(connection, "statements", None)
    if statements is not None:
        statements.sync()
    deferred = getattr(connection, "postroom_deferred", None)
    if deferred:
        with connection.cursor() as cursor:
            cursor.execute("; ".join(deferred))
        deferred.clear()


def soon(call: Callable[..., T], *args: Any) -> Future[T]:
    """Runs in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(condition: Callable[[], object], limit_s: float = SECONDS) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {limit_s} s"
        time.sleep(0.005)


def lock_waits(ground: Ground, count: int = 1) -> Callable[[], bool]:
    """Whether so many transactions of this database wait for a row's lock, says the server."""
    return lambda: ground.rows(_WAITING[ground.kind], ground.name, admin=True)[0][0] >= count


def kill(ground: Ground, *, in_transaction: bool = False) -> int:
    """End the server's side of all connections, or of those that have a transaction open and do nothing:
    there is one then, and it is asked for until the server says so (INNODB_TRX may be of a moment ago)."""
    find = _KILL[ground.kind].format(states=_STATES[ground.kind, in_transaction])
    found = ground.rows(find, ground.name, admin=True)
    while in_transaction and not found:
        time.sleep(0.12)  # what was read is kept for 0.1 s
        found = ground.rows(find, ground.name, admin=True)
    for (process,) in found if ground.kind == "mariadb" else ():
        with contextlib.suppress(pymysql.err.OperationalError):  # it left by itself meanwhile
            ground.rows("KILL %s", process, admin=True)
    return len(found)
