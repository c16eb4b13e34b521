"""What survives. `contract` says what a store promises; the SQL modules keep it on any dialect."""

from __future__ import annotations

from pathlib import Path

from ..clock import Clock, SystemClock
from .catalog import SqlCatalog
from .contract import Catalog, Duties, Log, Progress, Store
from .duties import SqlDuties
from .log import SqlLog
from .progress import SqlProgress
from .schema import migrate
from .session import Session
from .sqlite import SqliteDialect

__all__ = ["SqlStore", "open_sqlite"]


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

    def changed(self) -> tuple[bool, bool]:
        return self.session.dialect.changed()

    def close(self) -> None:
        self.session.close()


def open_sqlite(path: Path | None, clock: Clock | None = None) -> Store:
    """Open a file and the progress file beside it, made if they are not there; None: in memory."""
    session = Session(SqliteDialect(path, clock or SystemClock()))
    try:
        migrate(session)
    except BaseException:
        session.close()
        raise
    return SqlStore(session)
