"""What survives. `contract` says what a store promises; the SQL modules keep it on any dialect."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..address import Address
from ..clock import Clock, SteadyClock, SystemClock
from ..config import DEFAULTS, Limits
from ..errors import InvalidSetting, StoreCorrupt, UsageError, how_to_install
from .contract import (
    Access,
    Audit,
    Brokers,
    Catalog,
    Duties,
    Lanes,
    Log,
    Progress,
    Rates,
    Routes,
    Schedule,
    ShardState,
    Staging,
    Store,
    Usage,
    Watcher,
)
from .contract.kafka import KafkaGroups
from .contract.values import AtOnce
from .dialects.sqlite import SqliteDialect
from .dialects.sqlite_clock import keep_steady
from .sharded.store import ShardSource, open_sharded
from .sharded.table import SqlShards
from .sql.access import SqlAccess
from .sql.brokers import SqlBrokers, SqlDuties
from .sql.catalog.audit import SqlAudit
from .sql.catalog.catalog import SqlCatalog
from .sql.catalog.routes import SqlRoutes
from .sql.identity import check_alone, check_pair
from .sql.kafka_groups import SqlKafkaGroups
from .sql.log.log import SqlLog
from .sql.log.volatile import check_volatile
from .sql.outbox import SqlOutboxes
from .sql.progress.progress import SqlProgress
from .sql.progress.usage import SqlUsage
from .sql.rates import SqlRates
from .sql.schedule import SqlSchedule
from .sql.schema import check_schema, migrate
from .sql.session import Area, Dialect, Session
from .sql.slow_lanes import SqlLanes
from .sql.staging import SqlStaging

__all__ = ["SqlStore", "open_memory", "open_server", "open_session", "open_sqlite", "open_store"]


class SqlStore:
    """A store on one database. Implements `contract.Store`."""

    def __init__(
        self,
        session: Session,
        limits: Limits = DEFAULTS,
        *,
        catalog: Callable[[Session], SqlCatalog] = SqlCatalog,
        home: SqlCatalog | None = None,
        closing: Callable[[], None] | None = None,
    ) -> None:
        """`home`: the catalog, if it is on another shard. `closing`: ends the session in its stead."""
        self.session = session
        self._closing = closing or session.close
        own = catalog(session)
        home = home or own
        self.log: Log = SqlLog(session, home, limits)
        self.catalog: Catalog = own
        self.routes: Routes = SqlRoutes(session, own)
        self.progress: Progress = SqlProgress(session, home, limits)
        self.usage: Usage = SqlUsage(session, home)
        self.schedule: Schedule = SqlSchedule(session)
        self.duties: Duties = SqlDuties(session)
        self.brokers: Brokers = SqlBrokers(session)
        self.access: Access = SqlAccess(session)
        self.audit: Audit = SqlAudit(session)
        self.rates: Rates = SqlRates(session, own)
        self.lanes: Lanes = SqlLanes(session)
        self.staging: Staging = SqlStaging(session)
        self.kafka_groups: KafkaGroups = SqlKafkaGroups(session)
        self.outboxes = SqlOutboxes(session)  # of callers who keep theirs in this database
        self.at_once: AtOnce | None = session.at_once if session.dialect.quick else None
        self.now_ms: Callable[[], int] = session.now_ms

    def version(self) -> Hashable | None:
        return self.session.version()

    def others_version(self) -> Hashable | None:
        dialect = self.session.dialect
        return None if dialect.one_connection else self.session.version(dialect.areas)  # else all share it

    def watch(self) -> Watcher:
        return self.session.dialect.watch(self.session)

    def close(self) -> None:
        self._closing()

    # ---- the only shard ----

    def parts(self) -> Mapping[str, Store]:
        return {"": self}

    def shards(self) -> list[ShardState]:
        counts = SqlShards(self.session).counts().get("", {})
        delayed = sum(self.schedule.delayed().values())
        partitions = counts.get("new", 0) + counts.get("open", 0)
        kind = self.session.dialect.kind
        return [ShardState("", kind, "open", False, partitions, counts.get("sealed", 0), delayed)]

    def set_shard(self, name: str, state: str) -> None:
        raise InvalidSetting(
            "the queue has one shard only, the first; connect with shards= to name others",
            _served="the queue has one shard only, the first; ask the operator of the brokers to add others",
        )

    def shard_of(self, partition_id: int) -> str:
        return ""

    def known_shard(self, partition_id: int) -> str | None:
        return ""

    def present(self, partition_ids: Iterable[int]) -> list[int]:
        return list(partition_ids)

    def on_return(self, told: Callable[[], None]) -> None:
        """A single database is asked again by whoever needs it."""

    def add_shard(self, name: str, address: Address) -> None:
        raise InvalidSetting(
            f"shard {name!r} cannot be added to a queue on one database while it is in use: restart this "
            "process with it"
        )


_log = logging.getLogger("postroom.store")

_shared: dict[str, tuple[SqlStore, int]] = {}
_sharing = threading.Lock()


def open_memory(name: str = "", clock: Clock | None = None, limits: Limits = DEFAULTS) -> Store:
    """A store in memory: a private one, or the one of that name, which lasts as long as somebody has it."""
    if not name:
        return open_sqlite(None, clock, limits)
    with _sharing:
        store, users = _shared.get(name) or (_SharedStore(name, _open(None, clock, limits), limits), 0)
        _shared[name] = (store, users + 1)
        return store


class _SharedStore(SqlStore):
    """A named store in memory: closed when its last user closes it."""

    def __init__(self, name: str, session: Session, limits: Limits) -> None:
        super().__init__(session, limits)
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
    clock = clock or SteadyClock()
    dialect = SqliteDialect(path, clock, limits)
    session = Session(dialect)
    with _closed_on_error(session):
        try:
            _make_ready(session)
        except StoreCorrupt as error:
            if error.details.get("area") is not Area.VOLATILE:
                raise
            _log.warning("the messages of volatile topics are lost: %s", error)
            session.forget(Area.VOLATILE)
            dialect.discard(Area.VOLATILE)
            _make_ready(session)
        if path is not None and isinstance(clock, SteadyClock):
            dialect.opened_ms = keep_steady(session, clock)
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
    return SqlStore(_connect(address, clock, limits, make_tables), limits)


def _connect(address: Address, clock: Clock | None, limits: Limits, make_tables: bool) -> Session:
    session = Session(_dialect(address, clock, limits))
    with _closed_on_error(session):
        if make_tables:
            migrate(session)
        check_schema(session)
        check_pair(session)
        session.now_ms()
    return session


def open_store(
    address: Address,
    clock: Clock | None = None,
    limits: Limits = DEFAULTS,
    *,
    make_tables: bool = False,
    shards: Mapping[str, Address] | None = None,
    growing: bool = False,
) -> Store:
    """The store an address names; with `shards`, its partitions are on those too (R6).

    `growing`: shards may be added later, if the first database is a server's.
    """

    def opening(address: Address, **how: Any) -> SqlStore:
        if address.kind == "memory":
            shared = open_memory(address.name, clock, limits)
            assert isinstance(shared, SqlStore), "it is one"
            return SqlStore(shared.session, limits, closing=shared.close, **how)
        if address.kind == "sqlite":
            return SqlStore(_open(address.path, clock, limits), limits, **how)
        return SqlStore(_connect(address, clock, limits, make_tables), limits, **how)

    def member(one: Address) -> ShardSource:
        return ShardSource(one.kind, partial(opening, one))

    if shards or (growing and address.kind in ("postgresql", "mysql")):
        members = {name: member(one) for name, one in (shards or {}).items()}
        store = open_sharded(member(address), members, limits.tuning.store)
        store.member = member
        return store
    single = open_memory(address.name, clock, limits) if address.kind == "memory" else opening(address)
    assert isinstance(single, SqlStore), "it is one"
    with _closed_on_error(single):
        check_alone(single.session)
    return single


def open_session(address: Address, limits: Limits = DEFAULTS) -> Session:
    """A session without a look at its tables: for `migrate` and `doctor`."""
    if address.kind in ("memory", "sqlite"):
        return Session(SqliteDialect(address.path, SystemClock(), limits))
    return Session(_dialect(address, None, limits))


def _dialect(address: Address, clock: Clock | None, limits: Limits) -> Dialect:
    """Drivers are extras: imported where they are needed."""
    try:
        if address.kind == "postgresql":
            from .dialects.postgres import PostgresDialect

            return PostgresDialect(
                address.dsn, address.shown, pgbouncer=address.pgbouncer, clock=clock, limits=limits
            )
        from .dialects.mysql import MysqlDialect

        return MysqlDialect(dict(address.server), address.shown, clock=clock, limits=limits)
    except ImportError as error:
        extra = "postgres" if address.kind == "postgresql" else "mysql"
        raise UsageError(
            f"{address.kind}:// needs a driver that is not installed ({error}): {how_to_install(extra)}"
        ) from error


@contextmanager
def _closed_on_error(opened: Session | SqlStore) -> Iterator[None]:
    try:
        yield
    except BaseException:
        opened.close()
        raise
