"""What survives. `contract` says what a store promises; the SQL modules keep it on any dialect."""

from __future__ import annotations

import threading
from pathlib import Path

from ..clock import Clock, SystemClock
from ..config import DEFAULTS, Limits
from .catalog import SqlCatalog
from .contract import Catalog, Duties, Log, Progress, Store, Watcher
from .duties import SqlDuties
from .log import SqlLog
from .pairing import check_pair
from .progress import SqlProgress
from .schema import migrate
from .session import Session
from .sqlite import SqliteDialect

__all__ = ["SqlStore", "open_memory", "open_sqlite"]


class SqlStore:
    """A store on one database. Implements `contract.Store`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.log: Log = SqlLog(session)
        self.catalog: Catalog = SqlCatalog(session)
        self.progress: Progress = SqlProgress(session, self.catalog)
        self.duties: Duties = SqlDuties(session)

    def now_ms(self) -> int:
        return self.session.now_ms()

    def watch(self) -> Watcher:
        return self.session.dialect.watch()

    def close(self) -> None:
        self.session.close()


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
    """Open a file and the progress file beside it, made if they are not there; None: in memory."""
    return SqlStore(_open(path, clock, limits))


def _open(path: Path | None, clock: Clock | None, limits: Limits = DEFAULTS) -> Session:
    session = Session(SqliteDialect(path, clock or SystemClock(), limits))
    try:
        migrate(session)
        check_pair(session)
    except BaseException:
        session.close()
        raise
    return session
