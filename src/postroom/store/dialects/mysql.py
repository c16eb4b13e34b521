"""MySQL and MariaDB through PyMySQL. Tested on MariaDB.

READ COMMITTED on every connection: at the default isolation a read before the lock would fix a snapshot,
and a repeated batch would not be seen (I1). There is no limit on idle transactions in MySQL, so the
server closes connections that stay silent (`wait_timeout`), locks are taken with few round trips, and
MariaDB's own limit is used where it is there (I15). Commits are as durable as the server is set (`doctor`
looks at that): one connection cannot ask for more, or for less. DDL commits by itself, so each
migration's statement may be found done. On MariaDB a lone append is prepared and sent without waiting
(`mysql_connection`); MySQL has no blocks of statements, and takes it as text. Nobody is woken here:
waiters look, less and less often (`watching`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from typing import Any

import pymysql
from pymysql.constants import CLIENT, SERVER_STATUS

from ...clock import Clock
from ...config import DEFAULTS, Limits
from ...errors import AccessDenied, StoreBusy, StoreCorrupt, StoreError
from ..contract import Watcher
from ..sql.log.lone_append import ADVANCE, INSERT, INSERTED, REMEMBER, LoneAppend, SentLone
from ..sql.schema import log_table
from ..sql.session import Area, Row, Session, Transaction, by_key
from .mysql_connection import MysqlConnection, Sent
from .server import ServerDialect
from .watchers import LookingWatcher

__all__ = ["MysqlDialect"]

_MIGRATION_LOCK = "CONCAT('postroom-migrate-', LEFT(SHA2(DATABASE(), 256), 40))"  # else it is the server's
_EXISTS = (1050, 1060, 1061, 1091)  # table, column, key, no key: a migration that was cut off did it
_UNKNOWN_VARIABLE = 1193
_TOGETHER_CHARS = 1 << 20  # what is deferred is sent before it is more
_GONE = (0, 1053, 1077, 1079, 1080, 1152, 1153, 1158, 1159, 1160, 1161, 1927, 2006, 2013, 2014, 2055, 4031)
_UNDONE = (1020, 1062, 1213, *_GONE)
_DENIED = (1044, 1045, 1142, 1143, 1227, 1370, 1410, 1698, 2059, 2061)
_NO_DATABASE = 1049
_READ_ONLY = (1290, 1792, 1836)
_FULL = (1021, 1026, 1114, 1041, 1037)
_NO_SPACE = re.compile(r"(?:Errcode|errno|error)[: ]+28\b", re.IGNORECASE)  # other codes say what for it was
_CROWDED = (1040, 1203, 1226)
_BUSY = (1020, 1062, 1205, 1213, 1317, 1969, 3024)
_SPOILT = (126, 127, 1034, 1194, 1195, 1712)

# Each statement is for what the one before it met. The last of them fails where one met nothing, and what
# follows a failure is not run. One UPDATE of both tables takes three times as long as two.
_LONE = (
    "START TRANSACTION",
    f"{ADVANCE} AND {{now}} BETWEEN ? AND ?",
    f"{REMEMBER} AND ROW_COUNT() = 1",
    f"{INSERT} VALUES ({INSERTED.replace('?', 'IF(ROW_COUNT() = 1, ?, NULL)', 1)})",
    "COMMIT",
)
_UNDO = "DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END"
_OTHERWISE = 1048  # no offset
_DEADLOCK = 1213


@lru_cache(maxsize=10_000)
def _lone(partition_id: int, now: str, *, block: bool) -> str:
    """`block`: the server can take all as one statement, with one answer instead of five."""
    text = _statements(partition_id, now).replace("?", "%s")
    return f"BEGIN NOT ATOMIC {text}; END" if block else text


@lru_cache(maxsize=10_000)
def _prepared(partition_id: int, now: str) -> str:
    """For whoever has no time to undo what met an error."""
    return f"BEGIN NOT ATOMIC {_UNDO}; {_statements(partition_id, now)}; END"


def _statements(partition_id: int, now: str) -> str:
    return "; ".join(_LONE).format(now=now.removeprefix("SELECT "), log=log_table(partition_id))


def _takes_blocks(connection: MysqlConnection) -> bool:
    return "MariaDB" in connection.server_version


class MysqlDialect(ServerDialect):
    kind = "mysql"
    failures = (pymysql.Error,)
    blob = "LONGBLOB"
    hash = "BINARY(16)"
    serial = "BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY"
    table = " ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin"
    indexes_by_table = True
    shows_flushed = False
    now = "SELECT CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)"
    replica = "replica"
    on_conflict = "ON DUPLICATE KEY UPDATE"
    change_column = "{column} = VALUES({column})"

    def __init__(
        self, address: dict[str, Any], shown: str, *, clock: Clock | None = None, limits: Limits = DEFAULTS
    ) -> None:
        super().__init__(shown, clock, limits)
        self._address = address
        self._started = 0

    # ---- connections ----

    def connect(self, area: Area, *, at_once: bool = False) -> Any:
        limits = self._limits
        connecting = max(1, limits.connect_timeout_ms // 1000)
        try:
            connection = MysqlConnection(
                **self._address,
                charset="utf8mb4",
                autocommit=True,
                binary_prefix=True,
                connect_timeout=connecting,
                read_timeout=connecting,
                write_timeout=connecting,
                client_flag=CLIENT.FOUND_ROWS | CLIENT.MULTI_STATEMENTS,
            )
        except pymysql.MySQLError as error:
            if _code(error) in _GONE:  # before it was there
                raise self._unreachable(str(error.args[-1]), code=_code(error)) from error
            raise
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        connection.postroom_begin, connection.postroom_deferred = False, []
        self._be_patient(connection, (limits.lock_timeout_ms + limits.idle_timeout_ms) // 1000)
        return connection

    def _be_patient(self, connection: Any, seconds: int) -> None:
        """How long one answer may take. PyMySQL can be told so only before it connects."""
        connection._read_timeout = connection._write_timeout = seconds

    def _prepare(self, connection: Any) -> None:
        limits = self._limits
        patience = self._patience()
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            # Of a whole table, too: whoever waits to change one holds up everybody who comes after (I15).
            cursor.execute(
                f"SET SESSION time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
                f"innodb_lock_wait_timeout = {patience}, lock_wait_timeout = {patience}, "
                f"wait_timeout = {2 * limits.idle_timeout_ms // 1000}"
            )
            try:
                cursor.execute(f"SET SESSION idle_transaction_timeout = {limits.idle_timeout_ms // 1000}")
            except pymysql.MySQLError as error:  # MySQL has only wait_timeout
                if error.args[:1] != (_UNKNOWN_VARIABLE,):
                    raise
            cursor.execute("SELECT @@global.read_only, @@max_allowed_packet")
            read_only, packet = cursor.fetchone()
            if read_only:
                raise self._read_only()
            if packet < 2 * limits.max_batch_bytes:  # quoting may double it
                raise StoreError(
                    f"{self.shown} takes packets of {packet} bytes at most, too few for a batch: set "
                    f"max_allowed_packet to {2 * limits.max_batch_bytes >> 20}M or more"
                )

    def _fileno(self, connection: Any) -> int:
        return int(connection._sock.fileno())

    def usable(self, connection: Any) -> bool:
        return bool(connection.idle)

    # ---- transactions ----

    def begin(self, connection: Any, area: Area, *, flush: bool, at_once: bool = False) -> None:
        connection.postroom_begin = True  # goes out with the first statement

    def end(self, connection: Any, area: Area, *, commit: bool) -> None:
        if commit and connection.postroom_deferred:
            try:
                self._answered(connection, "DO 0")
            except pymysql.MySQLError as error:
                error.before_commit = True
                self._roll_back(connection)
                raise
        begun, connection.postroom_begin = not connection.postroom_begin, False
        if commit and begun:
            connection.commit()
        elif begun:
            connection.postroom_deferred.clear()
            self._roll_back(connection)

    def _roll_back(self, connection: Any) -> None:
        if connection.open:
            try:
                connection.rollback()
            except pymysql.MySQLError:
                pass  # it is not usable any more, and will be thrown away

    def end_stuck(self) -> None:
        """The server's own limits do it."""

    # ---- statements ----
    # What nobody needs the answer to is deferred: it goes out with the next question, or before the commit.

    def do(self, connection: Any, sql: str, args: Sequence[Any]) -> None:
        deferred = connection.postroom_deferred
        if connection.postroom_begin:
            deferred.append("START TRANSACTION")
            connection.postroom_begin = False
        deferred.append(connection.cursor().mogrify(self.sql(sql), args))
        if sum(map(len, deferred)) > _TOGETHER_CHARS:
            *before, last = deferred
            connection.postroom_deferred = before
            self._answered(connection, last)

    def ask(self, connection: Any, sql: str, args: Sequence[Any]) -> Any:
        cursor = connection.cursor()
        if not connection.postroom_deferred and not connection.postroom_begin:
            cursor.execute(self.sql(sql), args)
            return cursor
        return self._answered(connection, cursor.mogrify(self.sql(sql), args))

    def _answered(self, connection: Any, *statements: str) -> Any:
        """Send the statements behind what was deferred; return a cursor at the answer to the first."""
        before = len(connection.postroom_deferred) + connection.postroom_begin
        cursor = self._sent(connection, *statements)
        for _ in range(before):
            cursor.nextset()
        return cursor

    def _sent(self, connection: Any, *statements: str) -> Any:
        first = ("START TRANSACTION",) if connection.postroom_begin else ()
        together = "; ".join((*first, *connection.postroom_deferred, *statements))
        connection.postroom_begin, connection.postroom_deferred = False, []
        cursor = connection.cursor()
        cursor.execute(together)
        return cursor

    def many(self, connection: Any, sql: str, rows: Sequence[Row]) -> None:
        if len(rows) == 1:
            return self.do(connection, sql, rows[0])
        if connection.postroom_begin or connection.postroom_deferred:
            self._answered(connection, "DO 0")
        connection.cursor().executemany(self.sql(sql), rows)
        return None

    def insert(self, connection: Any, sql: str, args: Sequence[Any]) -> int:
        return int(self.ask(connection, sql, args).lastrowid)

    def locked(
        self,
        connection: Any,
        sql: str,
        each: Sequence[Sequence[Any]],
        then: Sequence[tuple[str, Sequence[Any]]],
    ) -> tuple[list[Row | None], list[Row], int]:
        """One round trip: begin, lock, ask behind the locks, and read the clock once they are ours."""
        form = connection.cursor().mogrify
        asked = [form(self._locking(sql), args) for args in each]
        asked += [form(self.sql(query), args) for query, args in then]
        began = self._time.begin()
        cursor = self._answered(connection, *asked, self.now)
        rows: list[Row | None] = []
        for _ in each:
            rows.append(cursor.fetchone())
            cursor.nextset()
        found: list[Row] = []
        for _ in then:
            found += cursor.fetchall()
            cursor.nextset()
        now = int(cursor.fetchone()[0])
        cursor.close()
        if self.clock is not None:
            return rows, found, self.clock.now_ms()
        self._time.told(now, began)
        return rows, found, now

    def send_lone(self, connection: MysqlConnection, lone: LoneAppend) -> SentLone | None:
        timing = self._lone_time(lone.appended_at)
        if timing is None or not _takes_blocks(connection):
            return None
        at, *between = timing
        ends, producer, batch = lone.arguments(at)
        args = (*ends, *between, *producer, *batch)
        sent = connection.start(_prepared(lone.partition_id, self.now), args)
        return Sent(connection, at, _OTHERWISE) if sent else None

    def append_lone(self, connection: MysqlConnection, lone: LoneAppend) -> int | None:
        timing = self._lone_time(lone.appended_at)
        if timing is None:
            return None
        at, *between = timing
        ends, producer, batch = lone.arguments(at)
        block = _takes_blocks(connection)
        sql = _lone(lone.partition_id, self.now, block=block)
        values = [
            f"x'{arg.hex()}'" if isinstance(arg, bytes) else arg
            for arg in (*ends, *between, *producer, *batch)
        ]
        try:
            connection.query(sql % tuple(values))  # a cursor would take 20 us more
            while connection.server_status & SERVER_STATUS.SERVER_MORE_RESULTS_EXISTS:
                connection.next_result()
        except pymysql.MySQLError as error:
            begun = self._still_begun(connection)
            self._roll_back(connection)
            if _code(error) == _OTHERWISE:
                return None
            if not connection.open:  # lost on its way: it may have been committed
                error.in_doubt = error.run_once = True
            elif not begun and _code(error) != _DEADLOCK:  # by the commit itself
                error.in_doubt = True
            raise
        if block:
            connection.prepare(_prepared(lone.partition_id, self.now))  # for `send_lone`
        return at

    def _still_begun(self, connection: Any) -> bool:
        """Return whether a transaction that met an error is open: an error does not tell, an answer does."""
        with suppress(pymysql.MySQLError):
            connection.query("DO 0")
            return connection.open and not self.usable(connection)
        return False

    @cache  # noqa: B019 - one dialect per store, a handful of statements
    def newest(self, sql: str, table: str, key: tuple[str, ...]) -> str:
        return sql + by_key(key)

    at_newest = newest

    def started_ms(self, connection: Any) -> int:
        """0 where every commit is flushed: then no renewal is lost."""
        if self.clock is not None:
            return 0
        known: int | None = getattr(connection, "postroom_started", None)
        if known is None:
            known = connection.postroom_started = self._look_at_start(connection)
        return known

    def _look_at_start(self, connection: Any) -> int:
        flushed = self.ask(connection, "SELECT @@global.innodb_flush_log_at_trx_commit", ()).fetchone()[0]
        if flushed == 1:
            return 0
        uptime = self.ask(connection, "SHOW GLOBAL STATUS LIKE 'Uptime'", ()).fetchone()[1]
        started = self.now_ms(connection) - 1000 * int(uptime)
        if abs(started - self._started) > self.tuning.uptime_ms:  # else it is the same start
            self._started = started
        return self._started

    # ---- schema ----

    def has_table(self, tx: Transaction, name: str) -> bool:
        look = "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ?"
        return tx.one(look, name) is not None

    def tables(self, tx: Transaction) -> list[str]:
        look = "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
        return [name for (name,) in tx.all(look)]

    @contextmanager
    def migrating(self, connection: Any) -> Iterator[None]:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT GET_LOCK({_MIGRATION_LOCK}, %s)", (self._patience(),))
            if cursor.fetchone()[0] != 1:
                raise StoreBusy(
                    f"{self.shown} is being migrated by somebody else; try again when that is done"
                )
        patience = connection._read_timeout
        self._be_patient(connection, self.tuning.migration_s)
        try:
            yield
        finally:
            self._be_patient(connection, patience)
            if connection.open:
                with connection.cursor() as cursor:
                    cursor.execute(f"SELECT RELEASE_LOCK({_MIGRATION_LOCK})")

    def _patience(self) -> int:
        return max(1, self._limits.lock_timeout_ms // 1000)

    def change(self, tx: Transaction, statement: str) -> None:
        try:
            self.ask(tx.connection, statement, ())
        except pymysql.MySQLError as error:
            if error.args[0] not in _EXISTS:
                raise

    def create_log(self, tx: Transaction, statement: str, table: str, *, volatile: bool) -> None:
        self.ask(tx.connection, statement, ())

    # ---- wake-ups ----

    def announce(self, area: Area) -> None:
        pass  # whoever waits looks by himself

    def watch(self, session: Session) -> Watcher:
        return LookingWatcher(session, self._limits)

    def close(self) -> None:
        pass

    # ---- errors ----

    def undone(self, error: Exception) -> bool:
        return isinstance(error, pymysql.MySQLError) and _code(error) in _UNDONE

    def error(self, error: Exception, area: Area) -> StoreError | None:
        if not isinstance(error, pymysql.MySQLError):
            return None
        code, said = _code(error), str(error.args[1] if len(error.args) > 1 else error)
        if code in _DENIED:
            return AccessDenied(f"{self.shown} refuses: {said}; {_cure(code)}", code=code)
        if code == _NO_DATABASE:
            return self._no_database(said, code=code)
        if code in _READ_ONLY:
            return self._read_only()
        if code in _FULL or _NO_SPACE.search(said):
            return self._full(said)
        if code in _CROWDED:
            return self._crowded(said, "max_connections, max_user_connections", code=code)
        if code in _BUSY:
            return StoreBusy(
                f"{self.shown} was busy ({said}); find who holds a transaction open "
                "(SHOW ENGINE INNODB STATUS), then try again"
            )
        if code in _SPOILT:
            return StoreCorrupt(f"{self.shown} is damaged ({said}); restore it from a backup")
        if code in _GONE:
            return self._ended(said, code=code)
        if 2000 <= code < 3000:
            return self._unreachable(said, code=code)
        return StoreError(f"{self.shown}: {said}", code=code)


def _code(error: pymysql.MySQLError) -> int:
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def _cure(code: int) -> str:
    if code in (1142, 1143, 1227, 1370):
        return (
            "grant the missing right: the user needs CREATE, ALTER, DROP, INDEX, SELECT, INSERT, UPDATE and "
            "DELETE on the database (each partition is a table)"
        )
    return "check user, password and database in the address"
