"""Where a storm takes place: a queue of two shards, on files or on a server of our own, behind a proxy."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from tests.servers import MariaServer, MySqlServer, PostgresServer, Proxy
from tests.servers.processes import children
from tests.servers.server import Server

__all__ = ["SERVERS", "Files", "OnServer", "Store", "made"]

SERVERS: dict[str, Callable[[], Server]] = {
    "postgres": PostgresServer,
    "mariadb": MariaServer,
    "mysql": MySqlServer,
}


class Store:
    """`url` and `shards` are for those who are at work, `safe` and `safe_shards` lead around the proxy."""

    kind: str
    url: str
    safe: str
    shards: dict[str, str]
    safe_shards: dict[str, str]

    def writers(self) -> list[int]:
        """Return the processes that write to the disk, if it is not those at work."""
        return []


class Files(Store):
    kind = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "queue.db"
        self.folder = folder
        self.url = self.safe = f"sqlite:///{self.path}"
        self.shards = self.safe_shards = {"b": f"sqlite:///{folder / 'other.db'}"}

    def hold_lock(self, seconds: float) -> None:
        """As a stranger does who writes to the file: a shell, a backup."""
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=30)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            connection.execute("ROLLBACK")


class OnServer(Store):
    def __init__(self, server: Server, stack: ExitStack) -> None:
        self.server = stack.enter_context(server)
        self.folder, self.kind = server.folder, server.kind
        self.proxy = stack.enter_context(Proxy(server.port))
        first, second = server.create_database(), server.create_database()
        self.url, self.safe = server.url(first, port=self.proxy.port), server.url(first)
        self.shards = {"b": server.url(second, port=self.proxy.port)}
        self.safe_shards = {"b": server.url(second)}

    def writers(self) -> list[int]:
        return [self.server.pid, *children(self.server.pid)]


def made(kind: str, folder: Path, stack: ExitStack) -> Files | OnServer:
    """Return a new, empty one."""
    return Files(folder) if kind == "sqlite" else OnServer(SERVERS[kind](), stack)
