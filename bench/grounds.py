"""Where the contenders meet: each store with Postroom and the queues of the usual kind on that very store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.servers import MariaServer, PostgresServer

from .contenders import Contender, PostroomQueue, RowQueue
from .server_rows import MariaRowQueue, PostgresRowQueue

__all__ = ["STORES", "Ground", "ground"]

STORES = ("sqlite", "postgresql", "mariadb")


@dataclass(frozen=True)
class Ground:
    store: str
    fresh: Callable[[Path], str]  # the address of a new, empty store; a folder is at its disposal
    others: tuple[Callable[[], Contender], ...]  # the first is what ratios are to

    @property
    def contenders(self) -> list[Callable[[], Contender]]:
        return [partial(PostroomQueue, self.fresh), *self.others]


@contextmanager
def ground(store: str) -> Iterator[Ground]:
    """Servers are started for it, and stopped after."""
    if store == "sqlite":
        yield Ground(store, lambda folder: f"sqlite:///{folder / 'postroom.db'}", (RowQueue,))
    elif store == "postgresql":
        with PostgresServer() as server:
            url = server.url(server.create_database())
            plain = partial(PostgresRowQueue, url, publishing="executemany")
            others = (partial(PostgresRowQueue, url), plain, partial(PostgresRowQueue, url, "delete"))
            yield Ground(store, lambda _: server.url(server.create_database()), others)
    else:
        with MariaServer() as server:
            url = server.url(server.create_database())
            others_there = (partial(MariaRowQueue, url), partial(MariaRowQueue, url, "delete"))
            yield Ground(store, lambda _: server.url(server.create_database()), others_there)
