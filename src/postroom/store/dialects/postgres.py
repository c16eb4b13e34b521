"""PostgreSQL through psycopg 3.

Write transactions run in pipeline mode: statements whose answer nobody needs are sent with the next one
that does, and COMMIT goes out with the last writes, so that a row's lock is held for few round trips. Log
commits are flushed, whatever the server's default; progress is not, except where I8 asks. Waiters are
woken by NOTIFY, sent after the commit on a connection of its own (I19). Behind PgBouncer (`?pgbouncer=1`)
nothing is kept in a server session: no prepared statements, settings per transaction, and wake-ups by
looking.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from itertools import count
from typing import Any

import psycopg
from psycopg.errors import InvalidSqlStatementName, error_from_result
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from ...clock import Clock
from ...config import DEFAULTS, Limits
from ...errors import AccessDenied, StoreBusy, StoreCorrupt, StoreError
from ..contract import Watcher
from ..sql.log.lone_append import ADVANCE, INSERT, INSERTED, REMEMBER, LoneAppend, SentLone
from ..sql.schema import log_table
from ..sql.session import Area, Row, Session, Transaction
from .server import ServerDialect
from .watchers import Listener, LookingWatcher, Notifier

__all__ = ["ImpatientConnection", "PostgresDialect"]

_MOST_NAMES = 500  # statements that a connection has prepared
_UNPREPARED = b""


class ImpatientConnection(psycopg.Connection[Any]):  # type: ignore[misc, unused-ignore]
    """A connection to PostgreSQL that does not wait for ever.

    TCP notices a peer that is gone (keepalives, user time-out), but not one that takes our bytes and never
    answers: a server that hangs, a proxy with nothing behind it. Whoever waits for longer than `patience_s`
    is told so, and the connection is given up: what it was waiting for is of unknown fate (I15, I2).
    """

    patience_s = 3600.0  # for one answer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._names: dict[str, bytes] = {}  # of statements that were run, and how they are prepared
        self._numbers = count()
        self._found: PGresult | None = None  # of an answer, as far as it has come

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        return super().wait(self._limited(gen), *args, **kwargs)

    def _limited(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Take the same steps; those who run them also look in when nothing has come for a while."""
        deadline = time.monotonic() + self.patience_s
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"no answer for {self.patience_s:g} s")
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value

    def run(self, sql: str, types: Sequence[int], args: Sequence[int | bytes]) -> int:
        """Run a statement that is a transaction by itself, prepared from its second time on; return how many
        rows it met. Past cursors and adapters, which take longer than all else that a lone append does."""
        values = [arg if isinstance(arg, bytes) else b"%d" % arg for arg in args]
        binary = [isinstance(arg, bytes) for arg in args]
        if sql in self._names:
            try:
                self.pgconn.send_query_prepared(self._names[sql] or self._prepare(sql, types), values, binary)
                return self._answer().command_tuples or 0
            except InvalidSqlStatementName:  # psycopg drops all that is prepared, ours too, after a rollback
                self._names.clear()  # and nothing was run
        self._make_room()
        self._names[sql] = _UNPREPARED
        self.pgconn.send_query_params(_numbered(sql), values, types, binary)
        return self._answer().command_tuples or 0

    def start(self, sql: str, args: Sequence[int | bytes]) -> bool:
        """Send a statement that is prepared already, as far as that goes without waiting; return whether it
        is. `_Sent` goes on with it."""
        name = self._names.get(sql)
        if name:
            values = [arg if isinstance(arg, bytes) else b"%d" % arg for arg in args]
            self.pgconn.send_query_prepared(name, values, [isinstance(arg, bytes) for arg in args])
        return bool(name)

    def _prepare(self, sql: str, types: Sequence[int]) -> bytes:
        name = b"postroom_%d" % next(self._numbers)
        self.pgconn.send_prepare(name, _numbered(sql), types)
        self._answer()
        self._names[sql] = name
        return name

    def _make_room(self) -> None:
        if len(self._names) >= _MOST_NAMES:
            oldest = self._names.pop(next(iter(self._names)))
            if oldest:
                with suppress(InvalidSqlStatementName):  # it may be dropped already, as said above
                    self.execute(f"DEALLOCATE {oldest.decode()}")

    def _answer(self) -> PGresult:
        """Return the answer to what was sent, or raise the error that it is."""
        pgconn, deadline = self.pgconn, time.monotonic() + self.patience_s
        asked = select.poll()
        asked.register(pgconn.socket, select.POLLIN)
        while (unsent := pgconn.flush()) or not self.has_come():
            asked.modify(pgconn.socket, select.POLLIN | select.POLLOUT if unsent else select.POLLIN)
            ready = asked.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                pgconn.finish()
                raise psycopg.OperationalError(f"no answer for {self.patience_s:g} s")
            if ready[0][1] != select.POLLOUT:
                pgconn.consume_input()
        return self.answer()

    def has_come(self) -> bool:
        """Take what was read of the answer, without waiting; return whether that is all."""
        while not self.pgconn.is_busy():
            found = self.pgconn.get_result()
            if found is None:
                return True
            self._found = self._found or found
        return False

    def answer(self) -> PGresult:
        """Return the answer that has come, or raise the error that it is."""
        answer, self._found = self._found, None
        if answer is None:
            raise psycopg.OperationalError("the connection is lost")
        if answer.status != ExecStatus.COMMAND_OK:
            raise error_from_result(answer)
        return answer


class _Sent:
    """A statement that was started on a connection. Implements `SentLone`."""

    def __init__(self, connection: ImpatientConnection, at: int) -> None:
        self._connection, self.at, self.patience_s = connection, at, connection.patience_s
        self._socket = int(connection.pgconn.socket)  # kept: a connection that is lost has none
        self.unsent = bool(connection.pgconn.flush())

    def fileno(self) -> int:
        return self._socket

    def answered(self) -> bool:
        pgconn = self._connection.pgconn
        pgconn.consume_input()
        self.unsent = bool(pgconn.flush())
        return not self.unsent and self._connection.has_come()

    def stored(self) -> bool:
        try:
            return bool(self._connection.answer().command_tuples)
        except InvalidSqlStatementName:  # see `run`
            self._connection._names.clear()
            return False


# Statistics are reset when the server recovers from the crash of one of its processes without a new start.
_STARTED = """SELECT (extract(epoch FROM greatest(pg_postmaster_start_time(), stats_reset)) * 1000)::bigint
              FROM pg_stat_bgwriter"""
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"  # whatever the role's default is (I1)
_END_STUCK = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE datname = current_database() AND usename = current_user
                AND application_name = current_setting('application_name') AND query LIKE '%%postroom\\_%%'
                AND state = 'active' AND wait_event = 'ClientRead' AND xact_start IS NOT NULL
                AND state_change < clock_timestamp() - %s * interval '1 ms'"""
# What is written depends on what is met: nothing at all, if the partition is otherwise; and a sequence that
# is otherwise divides by zero, which undoes the rest. A row that another just changed is met as it is then.
_LONE = f"""WITH p AS ({ADVANCE} AND {{now}} BETWEEN ? AND ? RETURNING id),
            s AS ({REMEMBER} AND EXISTS (SELECT 1 FROM p) RETURNING 1)
            {INSERT} SELECT {INSERTED}
            WHERE CASE WHEN EXISTS (SELECT 1 FROM p) THEN 1 / (SELECT COUNT(*) FROM s) = 1 ELSE FALSE END"""
_INT, _BIGINT, _BYTES = 23, 20, 17  # types by their numbers in the catalog
_LONE_TYPES = (
    *(_BIGINT,) * 8,
    *(_BYTES, _BIGINT, _BIGINT, _BIGINT, _BYTES),
    *(_BIGINT, _INT, _INT, *(_BIGINT,) * 4, _BYTES),
)
_MIGRATION_LOCK = 7_235_801_226
_UNKNOWN_DATABASE, _TOO_MANY = "3D000", "53300"
_UNDONE = ("40001", "40P01", "23505", "25P03", "57P01", "57P02", "57P03", "08")
_DENIED = ("28", "42501")
_FULL = ("53100", "53200", "54000")
_BUSY = ("55P03", "57014", "40001", "40P01", "23505")
_CROWDED = ("too many connections", "too many clients", "connection slots are reserved")
_NOT_PREPARED = ("26000", "42P05")
_SPOILT = ("XX001", "XX002")


def _was_idle(error: psycopg.Error) -> bool:
    """Whether the server had ended the session because its transaction stood still: it waited for a statement
    then, so that none of those that were sent since was run, and no commit either (I15)."""
    return getattr(error, "sqlstate", None) == "25P03" or "idle-in-transaction timeout" in str(error)


def _numbered(sql: str) -> bytes:
    """Return a statement with PostgreSQL's own marks: $1, $2 …"""
    first, *others = sql.encode().split(b"?")
    return b"".join([first, *(b"$%d%s" % one for one in enumerate(others, start=1))])


@lru_cache(maxsize=10_000)
def _lone(partition_id: int, now: str) -> str:
    return _LONE.format(now=now.removeprefix("SELECT "), log=log_table(partition_id))


class PostgresDialect(ServerDialect):
    kind = "postgresql"
    failures = (psycopg.Error,)
    blob = hash = "BYTEA"
    serial = "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"
    table = ""
    indexes_by_table = False
    now = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
    replica = "standby"
    on_conflict = "ON CONFLICT ({key}) DO UPDATE SET"
    change_column = "{column} = excluded.{column}"

    def __init__(
        self,
        dsn: str,
        shown: str,
        *,
        pgbouncer: bool = False,
        clock: Clock | None = None,
        limits: Limits = DEFAULTS,
    ) -> None:
        super().__init__(shown, clock, limits)
        self._dsn = dsn
        self._bouncer = pgbouncer
        self.commits_lone = not pgbouncer  # whose sessions are set to flush
        self._notifier = Notifier(self._plain, self.failures, self.tuning)
        self._server_start = self._met_ms = self._moved_ms = 0  # of the server; met last; another took over
        self._ending = threading.Lock()
        self._ended_at = 0.0  # by the monotonic clock

    # ---- connections ----

    def connect(self, area: Area, *, at_once: bool = False) -> Any:
        connection = self._plain()
        connection.postroom_migrating = False
        if self._bouncer:
            connection.prepare_threshold = None
        else:
            connection.prepare_threshold = 2
            connection.prepared_max = _MOST_NAMES
            commit = "off" if area is Area.PROGRESS else "on"
            connection.execute(f"SET synchronous_commit = {commit}; {self._timeouts('SET')}")
        return connection

    def _plain(self) -> Any:
        limits = self._limits
        connection = ImpatientConnection.connect(
            self._dsn,
            autocommit=True,
            connect_timeout=max(2, limits.connect_timeout_ms // 1000),
            target_session_attrs="read-write",
            tcp_user_timeout=limits.idle_timeout_ms,
            keepalives_idle=self.tuning.keepalive_idle_s,
            keepalives_interval=self.tuning.keepalive_pause_s,
            keepalives_count=3,
            fallback_application_name="postroom",
            client_encoding="utf8",
        )
        connection.patience_s = (limits.lock_timeout_ms + limits.idle_timeout_ms) / 1000
        encoding = connection.info.parameter_status("server_encoding")
        if encoding not in ("UTF8", None):
            connection.close()
            raise StoreError(
                f"{self.shown} has the encoding {encoding}, which cannot hold all text: make the database "
                "anew (CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0)"
            )
        return connection

    def _timeouts(self, how: str) -> str:
        """Locks end (I15)."""
        limits = self._limits
        return (
            f"{how} lock_timeout = {limits.lock_timeout_ms}; "
            f"{how} idle_in_transaction_session_timeout = {limits.idle_timeout_ms}"
        )

    def _fileno(self, connection: Any) -> int:
        return int(connection.fileno())

    def usable(self, connection: Any) -> bool:
        idle = connection.info.transaction_status == TransactionStatus.IDLE
        return not connection.closed and not connection.broken and idle

    # ---- transactions ----

    def begin(self, connection: Any, area: Area, *, flush: bool, at_once: bool = False) -> None:
        lazily = area is Area.VOLATILE or (area is Area.PROGRESS and not flush)
        usual = area is Area.PROGRESS  # what the connection is set to
        start = _BEGIN
        if self._bouncer or lazily is not usual:
            start += f"; SET LOCAL synchronous_commit = {'off' if lazily else 'on'}"
        if self._bouncer:
            start += f"; {self._timeouts('SET LOCAL')}"
        if connection.postroom_migrating:
            start += f"; SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"
        if ";" in start:  # several at once go by the simple protocol, before the pipeline
            connection.execute(start)
        entered = connection.pipeline()
        connection.postroom_pipeline = entered, entered.__enter__()
        if ";" not in start:
            try:
                connection.execute(start)
            except psycopg.Error:
                self._leave_pipeline(connection, commit=False)
                raise

    def end(self, connection: Any, area: Area, *, commit: bool) -> None:
        failed = self._leave_pipeline(connection, commit)
        self._roll_back(connection)
        if failed is not None and commit:  # else it is being raised already
            if _was_idle(failed):
                failed.before_commit = True  # type: ignore[attr-defined]
            raise failed

    def _leave_pipeline(self, connection: Any, commit: bool) -> psycopg.Error | None:
        """The first error of a statement on the way: none after it was run, and no commit either."""
        failed: psycopg.Error | None = None
        done = None
        try:
            done = connection.execute("COMMIT") if commit else None
        except psycopg.Error as error:
            failed = error
        try:
            connection.postroom_pipeline[0].__exit__(None, None, None)
        except psycopg.Error as error:
            failed = failed or error
        if failed is None and done is not None and done.statusmessage != "COMMIT":
            failed = psycopg.errors.InFailedSqlTransaction("an error before it was passed over")
        return failed

    def _roll_back(self, connection: Any) -> None:
        if connection.closed or connection.info.transaction_status == TransactionStatus.IDLE:
            return
        if connection.info.transaction_status == TransactionStatus.INERROR:
            # Prepared statements that were sent behind the one that failed: psycopg takes them for made.
            connection._prepared.clear()
        try:
            connection.execute("ROLLBACK")
        except psycopg.Error:
            connection.close()

    def end_stuck(self) -> None:
        """Whoever stands still between a statement and the Sync behind it is "active" to the server."""
        with self._ending:
            if time.monotonic() < self._ended_at + self.tuning.end_stuck_s:
                return
            self._ended_at = time.monotonic()
        with suppress(psycopg.Error, StoreError), self._plain() as connection:
            connection.execute(_END_STUCK, (self._limits.idle_timeout_ms,))

    # ---- statements ----

    def do(self, connection: Any, sql: str, args: Sequence[Any]) -> None:
        connection.execute(self.sql(sql), args, binary=True)

    def ask(self, connection: Any, sql: str, args: Sequence[Any]) -> Any:
        cursor = connection.execute(self.sql(sql), args, binary=True)
        self._await_answers(connection)  # the count of rows comes with them
        return cursor

    def _await_answers(self, connection: Any) -> None:
        """With a Sync behind what was sent: without one a session whose client stands still is "active", not
        idle in its transaction, and no limit of the server would ever end its locks (I15)."""
        if connection.pgconn.pipeline_status:
            connection.postroom_pipeline[1].sync()

    def many(self, connection: Any, sql: str, rows: Sequence[Row]) -> None:
        if len(rows) == 1:
            connection.execute(self.sql(sql), rows[0])
        else:
            connection.cursor().executemany(self.sql(sql), rows)

    def insert(self, connection: Any, sql: str, args: Sequence[Any]) -> int:
        return int(self.ask(connection, sql + " RETURNING id", args).fetchone()[0])

    def locked(
        self,
        connection: Any,
        sql: str,
        each: Sequence[Sequence[Any]],
        then: Sequence[tuple[str, Sequence[Any]]],
    ) -> tuple[list[Row | None], list[Row], int]:
        """One round trip: each statement runs once those before it are done, so behind the locks."""
        text = self._locking(sql)
        locking = [connection.execute(text, args, binary=True) for args in each]
        asked = [connection.execute(self.sql(query), args, binary=True) for query, args in then]
        began = self._time.begin()
        clock = connection.execute(self.now, binary=True)  # by itself: it runs once the locks are ours
        self._await_answers(connection)
        rows = [cursor.fetchone() for cursor in locking]
        found = [row for cursor in asked for row in cursor]
        if self.clock is not None:
            return rows, found, self.clock.now_ms()
        now = int(clock.fetchone()[0])
        self._time.told(now, began)
        return rows, found, now

    def send_lone(self, connection: Any, lone: LoneAppend) -> SentLone | None:
        timing = self._lone_time(lone.appended_at)
        if timing is None or self._bouncer:
            return None
        at, *between = timing
        ends, producer, batch = lone.arguments(at)
        args = (*ends, *between, *producer, *batch)
        return _Sent(connection, at) if connection.start(_lone(lone.partition_id, self.now), args) else None

    def append_lone(self, connection: Any, lone: LoneAppend) -> int | None:
        timing = self._lone_time(lone.appended_at)
        if timing is None:
            return None
        at, *between = timing
        ends, producer, batch = lone.arguments(at)
        sql, args = _lone(lone.partition_id, self.now), (*ends, *between, *producer, *batch)
        try:
            if self._bouncer:
                stored = self.ask(connection, sql, args).rowcount
            else:
                stored = connection.run(sql, _LONE_TYPES, args)
        except (psycopg.errors.DivisionByZero, psycopg.errors.UndefinedTable):  # the topic is being deleted
            return None
        except psycopg.Error as error:
            if not self.usable(connection):  # lost on its way: it may have been committed
                error.in_doubt = error.run_once = True  # type: ignore[attr-defined]
            raise
        return at if stored else None

    @cache  # noqa: B019 - one dialect per store, a handful of statements
    def newest(self, sql: str, table: str, key: tuple[str, ...]) -> str:
        """Backwards through the index: the newest version is the last one there.

        A range for the last column, since an order by what is equal to a constant would be dropped.
        """
        *equal, last = key
        same = "".join(f"{column} = ? AND " for column in equal)
        return f"{sql}{same}{last} >= ? AND {last} <= ? ORDER BY {last} DESC LIMIT 1"

    @cache  # noqa: B019
    def at_newest(self, sql: str, table: str, key: tuple[str, ...]) -> str:
        return f"{sql}ctid = ({self.newest(f'SELECT ctid FROM {table} WHERE ', table, key)})"

    def started_ms(self, connection: Any) -> int:
        if self.clock is not None:
            return 0
        known: int | None = getattr(connection, "postroom_started", None)
        if known is None or self._bouncer:  # who may have another server behind it by now
            known = connection.postroom_started = int(self.ask(connection, _STARTED, ()).fetchone()[0])
            if self._server_start not in (0, known) and known < self._met_ms:  # else it was started again
                self._moved_ms = self.now_ms(connection)
            self._server_start = known
        self._met_ms = self._time.now_ms() or 0
        return known

    def stepped_ms(self) -> int:
        """Or when another server took over: it was started before that, and may lack renewals (I8)."""
        return max(super().stepped_ms(), self._moved_ms)

    # ---- schema ----

    def has_table(self, tx: Transaction, name: str) -> bool:
        row = tx.one("SELECT to_regclass(?::text)::text", name)
        return row is not None and row[0] is not None

    def tables(self, tx: Transaction) -> list[str]:
        look = "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND pg_table_is_visible(oid)"
        return [name for (name,) in tx.all(look)]

    @contextmanager
    def migrating(self, connection: Any) -> Iterator[None]:
        """Locked until the transaction ends: behind PgBouncer a session's lock would outlive it."""
        patience_s, connection.patience_s = connection.patience_s, self.tuning.migration_s
        connection.postroom_migrating = True
        try:
            yield
        finally:
            connection.postroom_migrating = False
            connection.patience_s = patience_s

    def change(self, tx: Transaction, statement: str) -> None:
        tx.do(statement)

    def create_log(self, tx: Transaction, statement: str, table: str, *, volatile: bool) -> None:
        tx.do(statement.replace("CREATE TABLE", "CREATE UNLOGGED TABLE", 1) if volatile else statement)
        for column in ("batch", "ids"):  # batches are compressed already
            tx.do(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")

    # ---- wake-ups ----

    def announce(self, area: Area) -> None:
        self._notifier.notify(area)

    def watch(self, session: Session) -> Watcher:
        if self._bouncer:
            return LookingWatcher(session, self._limits)
        return Listener(self._plain, self.failures, self.tuning)

    def close(self) -> None:
        self._notifier.close()

    # ---- errors ----

    def undone(self, error: Exception) -> bool:
        if not isinstance(error, psycopg.Error):
            return False
        state = getattr(error, "sqlstate", None)
        if state is None:  # the connection is gone, unless there never was one
            never = isinstance(error, psycopg.errors.ConnectionTimeout) or "connection failed" in str(error)
            return isinstance(error, psycopg.OperationalError) and not never
        return str(state).startswith(_UNDONE)

    def error(self, error: Exception, area: Area) -> StoreError | None:
        if not isinstance(error, psycopg.Error):
            return None
        state = getattr(error, "sqlstate", None) or ""
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not state and not isinstance(error, psycopg.OperationalError):
            return StoreError(f"{self.shown}: {said}")  # the driver did not take what it was given
        if not state or state == _TOO_MANY:
            return self._refused(str(error), said)
        if state.startswith(_DENIED):
            return AccessDenied(f"{self.shown} refuses: {said}; {_cure(state)}", sqlstate=state)
        if state == _UNKNOWN_DATABASE:
            return self._no_database(said, sqlstate=state)
        if state == "25006":
            return self._read_only()
        if state.startswith(_FULL):
            return self._full(said)
        if state.startswith(_BUSY):
            return StoreBusy(
                f"{self.shown} was busy ({said}); find who holds a transaction open (pg_stat_activity), "
                "then try again"
            )
        if state.startswith(_SPOILT):
            return StoreCorrupt(f"{self.shown} is damaged ({said}); restore it from a backup")
        if state.startswith(("57P", "08", "25P03")):
            return self._ended(said, sqlstate=state)
        if state in _NOT_PREPARED and not self._bouncer:
            said += "; if there is a pool in between, such as PgBouncer, add ?pgbouncer=1 to the address"
        return StoreError(f"{self.shown}: {said}", sqlstate=state)

    def _refused(self, text: str, said: str) -> StoreError:
        """Return the error for a connection that was not made: most of these carry no code."""
        if "read-only" in text:
            return self._read_only()
        if (
            "password authentication failed" in text
            or "no password supplied" in text
            or "pg_hba.conf" in text
        ):
            return AccessDenied(f"{self.shown} refuses: {said}; {_cure('28P01')}")
        if 'role "' in text and "does not exist" in text:
            return AccessDenied(f"{self.shown} refuses: {said}; {_cure('28P01')}")
        if 'database "' in text and "does not exist" in text:
            return self._no_database(said)
        if any(words in text for words in _CROWDED):
            return self._crowded(said, "max_connections, CONNECTION LIMIT")
        return self._unreachable(said)


def _cure(state: str) -> str:
    if state == "42501":
        return (
            "grant the missing right: the user needs CREATE on the schema (each partition is a table) and "
            "all rights on the tables that begin with postroom_"
        )
    return "check user and password in the address"
