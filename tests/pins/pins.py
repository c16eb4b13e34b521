"""All pins: the file of each, how it is made, and what a change of it does to users."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from tests.servers import MariaServer, PostgresServer
from tests.servers.server import Server

from .citations import citations
from .command_help import command_help_text
from .golden import frames_text
from .public_names import public_names_text
from .schemas import mariadb_schema_text, migrations_text, postgres_schema_text, sqlite_schema_text
from .served_names import http_api_text, metrics_text, names_text

__all__ = ["PINS", "SERVER_PINS", "Pin", "ServerPin"]

_SCHEMA = (
    "Queues that exist have the old tables: without a new migration (never an edited one) this version "
    "cannot work on them, nor an older one beside it."
)


class Pin(NamedTuple):
    file: str
    made: Callable[[], str]
    means: str


class ServerPin(NamedTuple):
    file: str
    made: Callable[[Server], str]
    server: type[Server]
    fixture: str
    means: str = _SCHEMA


def _citations_text() -> str:
    return json.dumps(citations(), indent=1) + "\n"


PINS = (
    Pin(
        "public_names.txt",
        public_names_text,
        "Programs import these names and call them so: what is gone, renamed or asks for more breaks them; "
        "what is new, with a default, does not. Types are shown by their names alone, wherever they live.",
    ),
    Pin(
        "command_help.txt",
        command_help_text,
        "Scripts call these commands with these options: what is gone or renamed breaks them; new wording "
        "does not.",
    ),
    Pin(
        "frames.json",
        frames_text,
        "Clients and brokers of other versions send and expect exactly these bytes: a field may be added at "
        "the end of a request, with a default, or to a map; a new operation gets a new number; all else "
        "breaks them.",
    ),
    Pin("schema_sqlite.txt", sqlite_schema_text, _SCHEMA),
    Pin(
        "schema_migrations.txt",
        migrations_text,
        "A migration that was released is never edited: queues that ran it keep what it made. Only a new "
        "version is added behind the last.",
    ),
    Pin(
        "metrics.txt",
        metrics_text,
        "Dashboards and alerts ask for these names and labels: what is gone or renamed is silent there.",
    ),
    Pin(
        "http_api.json",
        http_api_text,
        "Programs call these paths with these bodies: what is gone, renamed or newly required breaks them.",
    ),
    Pin(
        "names.txt",
        names_text,
        "Deployments set these names and rely on the defaults; permissions decide who may do what: a change "
        "of one is a change of security.",
    ),
    Pin(
        "citations.json",
        _citations_text,
        "Each citation tells which promise a line keeps.",
    ),
)
SERVER_PINS = (
    ServerPin("schema_postgres.txt", postgres_schema_text, PostgresServer, "postgres_server"),
    ServerPin("schema_mariadb.txt", mariadb_schema_text, MariaServer, "mariadb_server"),
)
