"""What survives. `contract` says what a store promises; the SQL modules keep it on any dialect."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..address import Address
from ..clock import Clock, SystemClock
from ..config import DEFAULTS, Limits
from ..errors import StoreCorrupt, UsageError
from .catalog import SqlCatalog
from .contract import Catalog, Duties, Log, Progress, Routes, Schedule, Store, Usage, Watcher
from .duties import SqlDuties
from .log import SqlLog
from .pairing import check_pair
from .progress import SqlProgress
from .routes import SqlRoutes
from .schedule import SqlSchedule
from .schema import check_schema, migrate
from .session import Dialect, Lane, Session
from .sqlite import SqliteDialect
from .usage import SqlUsage
from .volatile import check_volatile

__all__ = ["SqlStore", "open_memory", "open_server", "open_session", "open_sqlite", "open_store"]


class SqlStore:
    """A store on one database. Implements `contract.Store`."""

    def __init__(self, session: Session, limits: Limits = DEFAULTS) -> None:
        self.session = session
        catalog = SqlCatalog(session)
        self.log: Log = SqlLog(session, catalog, limits)
        self.catalog: Catalog = catalog
        self.routes: Routes = SqlRoutes(session, catalog)
        self.progress: Progress = SqlProgress(session, self.catalog)
        self.usage: Usage = SqlUsage(session, catalog)
        self.schedule: Schedule = SqlSchedule(session)
        self.duties: Duties = SqlDuties(session)

    def now_ms(self) -> int:
        return self.session.now_ms()

    def watch(self) -> Watcher:
        return self.session.dialect.watch(self.session)

    def close(self) -> None:
        self.session.close()


_log = logging.getLogger("penstock.store")

_shared: dict[str, tuple[SqlStore, int]] = {}
_sharing = threading.Lock()


def open_memory(name: str = "", clock: Clock | None = None) -> Store:
    """A store in memory: a private one, or the one of that name, which lasts as long as somebody has it."""
    if not name:
        return open_sqlite(None, clock)
    with _sharing:
        store, users = _shared.get(name) or (_SharedStore(name, _open(None, clock)), 0)
        _shared[name] = (store, users + 1)
        return store


class _SharedStore(SqlStore):
    """A named store in memory: closed when its last user closes it."""

    def __init__(self, name: str, session: Session) -> None:
        super().__init__(session)
        self._name = name

    def close(self) -> None:
        with _sharing:
            store, users = _shared.pop(self._name)
            if users > 1:
                _shared[self._name] = (store, users - 1)
                return
        super().close()


def open_sqlite(path: Path | None, clock: Clock | None = None, limits: Limits = DEFAULTS) -> Store:
    """Open a file and the files beside it, made if they are not there; None: in memory."""
    return SqlStore(_open(path, clock, limits), limits)


def _open(path: Path | None, clock: Clock | None, limits: Limits = DEFAULTS) -> Session:
    dialect = SqliteDialect(path, clock or SystemClock(), limits)
    session = Session(dialect)
    with _closed_on_error(session):
        try:
            _make_ready(session)
        except StoreCorrupt as error:
            if error.details.get("lane") is not Lane.VOLATILE:
                raise
            _log.warning("the messages of volatile topics are lost: %s", error)
            session.forget(Lane.VOLATILE)
            dialect.discard(Lane.VOLATILE)
            _make_ready(session)
    return session


def _make_ready(session: Session) -> None:
    migrate(session)
    check_pair(session)
    check_volatile(session)


def open_server(
    address: Address, clock: Clock | None = None, limits: Limits = DEFAULTS, *, make_tables: bool = False
) -> Store:
    """Open a database on a server. Tables are made or changed only if that is asked for.

    `clock` is for tests; without one the server's counts (I16).
    """
    session = Session(_dialect(address, clock, limits))
    with _closed_on_error(session):
        if make_tables:
            migrate(session)
        check_schema(session)
        check_pair(session)
        session.now_ms()
    return SqlStore(session, limits)


def open_store(
    address: Address, clock: Clock | None = None, limits: Limits = DEFAULTS, *, make_tables: bool = False
) -> Store:
    """The store an address names."""
    if address.kind == "memory":
        return open_memory(address.name, clock)
    if address.kind == "sqlite":
        return open_sqlite(address.path, clock, limits)
    return open_server(address, clock, limits, make_tables=make_tables)


def open_session(address: Address, limits: Limits = DEFAULTS) -> Session:
    """A session without a look at its tables: for `migrate` and `doctor`."""
    if address.kind in ("memory", "sqlite"):
        return Session(SqliteDialect(address.path, SystemClock(), limits))
    return Session(_dialect(address, None, limits))


def _dialect(address: Address, clock: Clock | None, limits: Limits) -> Dialect:
    """Drivers are extras: imported where they are needed."""
    try:
        if address.kind == "postgresql":
            from .postgres import PostgresDialect

            return PostgresDialect(
                address.dsn, address.shown, pgbouncer=address.pgbouncer, clock=clock, limits=limits
            )
        from .mysql import MysqlDialect

        return MysqlDialect(dict(address.server), address.shown, clock=clock, limits=limits)
    except ImportError as error:
        extra = "postgres" if address.kind == "postgresql" else "mysql"
        raise UsageError(
            f"{address.kind}:// needs a driver that is not installed ({error}): "
            f"pip install 'penstock[{extra}]'"
        ) from error


@contextmanager
def _closed_on_error(session: Session) -> Iterator[None]:
    try:
        yield
    except BaseException:
        session.close()
        raise
