"""Tables and migrations. A migration is a number and its statements per lane; none is ever edited.

`{blob}`, `{serial}` and `{offset}` are the dialect's types. Log tables, one per partition, are made with
their topic.
"""

from __future__ import annotations

import uuid

from ..errors import SchemaMismatch
from .session import Dialect, Lane, Session

__all__ = ["MIGRATIONS", "VERSION", "create_log", "log_table", "migrate", "version_of"]

Statements = tuple[str, ...]

_1_LOG: Statements = (
    # settings of the store itself: its UUID, the version of the catalog
    "CREATE TABLE penstock_settings (name VARCHAR(60) PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE penstock_topics (
        id {serial},
        name VARCHAR(250) NOT NULL UNIQUE,
        settings TEXT NOT NULL,
        route_version INTEGER NOT NULL,
        created_at BIGINT NOT NULL)""",
    # one row per range of the newest and of every earlier route
    """CREATE TABLE penstock_ranges (
        topic_id BIGINT NOT NULL,
        version INTEGER NOT NULL,
        first_slot INTEGER NOT NULL,
        last_slot INTEGER NOT NULL,
        partition_id BIGINT NOT NULL,
        PRIMARY KEY (topic_id, version, first_slot))""",
    # this row's lock orders all appends to the partition: nothing else may lock it
    """CREATE TABLE penstock_partitions (
        id {serial},
        topic_id BIGINT NOT NULL,
        number INTEGER NOT NULL,
        state VARCHAR(10) NOT NULL,
        next_offset BIGINT NOT NULL,
        next_bytes BIGINT NOT NULL,
        appended_at BIGINT NOT NULL)""",
    # where each log starts; apart from the partition's row, which appends lock
    "CREATE TABLE penstock_trims (partition_id BIGINT PRIMARY KEY, log_start BIGINT NOT NULL)",
    """CREATE TABLE penstock_sequences (
        producer_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        state {blob} NOT NULL,
        seen_at BIGINT NOT NULL,
        PRIMARY KEY (producer_id, partition_id))""",
    """CREATE TABLE penstock_groups (
        id {serial},
        topic_id BIGINT NOT NULL,
        name VARCHAR(60) NOT NULL,
        settings TEXT NOT NULL,
        generation INTEGER NOT NULL,
        paused INTEGER NOT NULL,
        created_at BIGINT NOT NULL,
        UNIQUE (topic_id, name))""",
    """CREATE TABLE penstock_starts (
        group_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        start_offset BIGINT NOT NULL,
        PRIMARY KEY (group_id, partition_id))""",
    """CREATE TABLE penstock_duties (
        name VARCHAR(60) PRIMARY KEY,
        holder VARCHAR(120) NOT NULL,
        until_ms BIGINT NOT NULL)""",
)

_1_PROGRESS: Statements = (
    # the UUID of the log that these cursors belong to
    "CREATE TABLE penstock_owner (uuid VARCHAR(36) PRIMARY KEY)",
    """CREATE TABLE penstock_progress (
        group_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        generation INTEGER NOT NULL,
        next_new BIGINT NOT NULL,
        next_due BIGINT,
        settled BIGINT NOT NULL,
        first_wait_ms BIGINT NOT NULL,
        sampled_at BIGINT NOT NULL,
        sampled BIGINT NOT NULL,
        earlier_at BIGINT NOT NULL,
        earlier BIGINT NOT NULL,
        PRIMARY KEY (group_id, partition_id))""",
    """CREATE TABLE penstock_deliveries (
        group_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        first_offset BIGINT NOT NULL,
        last_offset BIGINT NOT NULL,
        visible_at BIGINT NOT NULL,
        token BIGINT NOT NULL,
        holder VARCHAR(120) NOT NULL,
        spent INTEGER NOT NULL,
        failures INTEGER NOT NULL,
        suspect INTEGER NOT NULL,
        alone INTEGER NOT NULL,
        stamp_producer BIGINT,
        stamp_partition BIGINT,
        reason TEXT NOT NULL,
        PRIMARY KEY (group_id, partition_id, first_offset))""",
    "CREATE INDEX penstock_deliveries_due ON penstock_deliveries (group_id, partition_id, visible_at)",
    "CREATE INDEX penstock_deliveries_token ON penstock_deliveries (token)",
    """CREATE TABLE penstock_members (
        group_id BIGINT NOT NULL,
        name VARCHAR(120) NOT NULL,
        client VARCHAR(250) NOT NULL,
        joined_at BIGINT NOT NULL,
        until_ms BIGINT NOT NULL,
        PRIMARY KEY (group_id, name))""",
)

MIGRATIONS: dict[int, dict[Lane, Statements]] = {
    1: {Lane.LOG: _1_LOG, Lane.PROGRESS: _1_PROGRESS},
}
VERSION = max(MIGRATIONS)

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS penstock_schema (version INTEGER PRIMARY KEY, applied_at BIGINT NOT NULL)"
)


def migrate(session: Session) -> None:
    """Bring both lanes to this version. Many processes may do so at once.

    Nothing is changed if either lane is newer than this program.
    """
    behind = [lane for lane in Lane if version_of(session, lane) < VERSION]
    for lane in behind:
        with session.write(lane) as tx:
            tx.run(_SCHEMA)
            row = tx.one("SELECT MAX(version) FROM penstock_schema")
            have = int(row[0] or 0) if row else 0
            for number in range(have + 1, VERSION + 1):
                for statement in MIGRATIONS[number].get(lane, ()):
                    tx.run(_typed(statement, session.dialect))
                tx.run("INSERT INTO penstock_schema (version, applied_at) VALUES (?, ?)", number, tx.now_ms())
            if lane is Lane.LOG and have == 0:
                insert = "INSERT INTO penstock_settings (name, value) VALUES (?, ?)"
                tx.many(insert, [("uuid", str(uuid.uuid4())), ("catalog_version", "0")])


def version_of(session: Session, lane: Lane) -> int:
    """The schema's version; 0 for an empty database. SchemaMismatch if it is newer than this program."""
    with session.read(lane) as tx:
        if not session.dialect.has_table(tx, "penstock_schema"):
            return 0
        row = tx.one("SELECT MAX(version) FROM penstock_schema")
    version = int(row[0] or 0) if row else 0
    if version > VERSION:
        raise SchemaMismatch(
            f"the database has schema version {version}, and this penstock knows {VERSION} at most: "
            "install the newer penstock that wrote it (pip install -U penstock)",
            found=version,
            known=VERSION,
        )
    return version


def _typed(statement: str, dialect: Dialect) -> str:
    for word in ("blob", "serial", "offset"):
        statement = statement.replace("{" + word + "}", getattr(dialect, word))
    return statement


def log_table(partition_id: int) -> str:
    return f"penstock_log_{partition_id:d}"


def create_log(session: Session, partition_id: int) -> None:
    """The table of a partition: a batch is a row. A step of its own, since DDL commits on MySQL (I19)."""
    with session.write(Lane.LOG) as tx:
        tx.run(
            _typed(
                f"""CREATE TABLE IF NOT EXISTS {log_table(partition_id)} (
                    base_offset {{offset}} PRIMARY KEY,
                    records INTEGER NOT NULL,
                    bytes INTEGER NOT NULL,
                    bytes_before BIGINT NOT NULL,
                    appended_at BIGINT NOT NULL,
                    first_ts BIGINT NOT NULL,
                    last_ts BIGINT NOT NULL,
                    ids {{blob}},
                    batch {{blob}} NOT NULL)""",
                session.dialect,
            )
        )
