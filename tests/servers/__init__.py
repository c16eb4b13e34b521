"""Real database servers for tests and benchmarks, and a proxy that can break the way to them.

Nothing here knows Postroom or pytest, except `fixtures`, which pytest loads as a plug-in.
"""

from __future__ import annotations

from .binaries import MissingServer
from .mariadb import MariaServer
from .mysql import MySqlServer
from .pgbouncer import PgBouncer
from .postgres import PostgresServer
from .proxy import Proxy
from .replica import MariaReplica
from .standby import PostgresStandby

__all__ = [
    "MariaReplica",
    "MariaServer",
    "MissingServer",
    "MySqlServer",
    "PgBouncer",
    "PostgresServer",
    "PostgresStandby",
    "Proxy",
]
