"""Tables and migrations. A migration is a number and its statements per area; none is ever edited.

`{blob}`, `{hash}`, `{serial}` and `{offset}` are the dialect's types. Log tables, one per partition, are made
with their topic.

The project had another name once. Tables of a queue under that name are refused: an empty queue must never be
made beside them. They are told by their shape, and only where there is no schema of ours.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection

from ...errors import SchemaMismatch, how_to_update
from .session import Area, Dialect, Session, Transaction

__all__ = [
    "MIGRATIONS",
    "ROLLING_SINCE",
    "VERSION",
    "check_schema",
    "create_log",
    "former_prefix",
    "log_table",
    "migrate",
    "refuse_former",
    "script",
    "statements",
    "version_of",
]

Statements = tuple[str, ...]

_1_LOG: Statements = (
    # settings of the store itself: its UUID, the version of the catalog
    "CREATE TABLE postroom_settings (name VARCHAR(60) PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE postroom_topics (
        id {serial},
        name VARCHAR(250) NOT NULL UNIQUE,
        settings TEXT NOT NULL,
        route_version INTEGER NOT NULL,
        created_at BIGINT NOT NULL)""",
    # one row per range of the newest and of every earlier route
    """CREATE TABLE postroom_ranges (
        topic_id BIGINT NOT NULL,
        version INTEGER NOT NULL,
        first_slot INTEGER NOT NULL,
        last_slot INTEGER NOT NULL,
        partition_id BIGINT NOT NULL,
        PRIMARY KEY (topic_id, version, first_slot))""",
    # this row's lock orders all appends to the partition: nothing else may lock it
    """CREATE TABLE postroom_partitions (
        id {serial},
        topic_id BIGINT NOT NULL,
        number INTEGER NOT NULL,
        state VARCHAR(10) NOT NULL,
        next_offset BIGINT NOT NULL,
        next_bytes BIGINT NOT NULL,
        appended_at BIGINT NOT NULL)""",
    # where each log starts; apart from the partition's row, which appends lock
    "CREATE TABLE postroom_trims (partition_id BIGINT PRIMARY KEY, log_start BIGINT NOT NULL)",
    """CREATE TABLE postroom_sequences (
        producer_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        state {blob} NOT NULL,
        seen_at BIGINT NOT NULL,
        PRIMARY KEY (producer_id, partition_id))""",
    """CREATE TABLE postroom_groups (
        id {serial},
        topic_id BIGINT NOT NULL,
        name VARCHAR(60) NOT NULL,
        settings TEXT NOT NULL,
        generation INTEGER NOT NULL,
        paused INTEGER NOT NULL,
        created_at BIGINT NOT NULL,
        UNIQUE (topic_id, name))""",
    """CREATE TABLE postroom_starts (
        group_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        start_offset BIGINT NOT NULL,
        PRIMARY KEY (group_id, partition_id))""",
    """CREATE TABLE postroom_duties (
        name VARCHAR(60) PRIMARY KEY,
        holder VARCHAR(120) NOT NULL,
        until_ms BIGINT NOT NULL)""",
)

_1_PROGRESS: Statements = (
    # the UUID of the log that these cursors belong to
    "CREATE TABLE postroom_owner (uuid VARCHAR(36) PRIMARY KEY)",
    """CREATE TABLE postroom_progress (
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
    """CREATE TABLE postroom_deliveries (
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
    "CREATE INDEX postroom_deliveries_due ON postroom_deliveries (group_id, partition_id, visible_at)",
    "CREATE INDEX postroom_deliveries_token ON postroom_deliveries (token)",
    """CREATE TABLE postroom_members (
        group_id BIGINT NOT NULL,
        name VARCHAR(120) NOT NULL,
        client VARCHAR(250) NOT NULL,
        joined_at BIGINT NOT NULL,
        until_ms BIGINT NOT NULL,
        PRIMARY KEY (group_id, name))""",
)

_2_LOG: Statements = (
    "ALTER TABLE postroom_partitions ADD COLUMN volatile INTEGER NOT NULL DEFAULT 0",
    # delayed messages: a batch that is due at one moment is a row
    """CREATE TABLE postroom_schedule (
        id {serial},
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        due_at BIGINT NOT NULL,
        records INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        id_hash {hash},
        ids {blob},
        batch {blob} NOT NULL)""",
    "CREATE INDEX postroom_schedule_due ON postroom_schedule (due_at, id)",
    "CREATE INDEX postroom_schedule_id ON postroom_schedule (topic_id, id_hash, id)",
    # what was scheduled since somebody last looked, in topics that look at ids (I13)
    "CREATE INDEX postroom_schedule_new ON postroom_schedule (partition_id, id)",
    # how many delayed messages wait: counted, since there may be millions of rows
    """CREATE TABLE postroom_delayed (
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        messages BIGINT NOT NULL,
        PRIMARY KEY (topic_id, partition_id))""",
    # a move of due messages into logs that is under way: its stamp (I12)
    """CREATE TABLE postroom_moves (
        id {offset} PRIMARY KEY,
        producer_id BIGINT NOT NULL,
        plan {blob} NOT NULL)""",
)

_2_PROGRESS: Statements = (
    # ordered groups: who holds the partition (I5)
    "ALTER TABLE postroom_progress ADD COLUMN holder_token BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE postroom_progress ADD COLUMN holder VARCHAR(120) NOT NULL DEFAULT ''",
    "ALTER TABLE postroom_progress ADD COLUMN holder_until BIGINT NOT NULL DEFAULT 0",
    # where reads of deliveries begin, the lowest unsettled offset or the cursor; how many there are (I19)
    "ALTER TABLE postroom_progress ADD COLUMN lowest BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE postroom_progress ADD COLUMN deliveries INTEGER NOT NULL DEFAULT 0",
    """UPDATE postroom_progress SET
        lowest = COALESCE((SELECT MIN(d.first_offset) FROM postroom_deliveries d
          WHERE d.group_id = postroom_progress.group_id AND d.partition_id = postroom_progress.partition_id),
          next_new),
        deliveries = (SELECT COUNT(*) FROM postroom_deliveries d
          WHERE d.group_id = postroom_progress.group_id AND d.partition_id = postroom_progress.partition_id
          )""",
    # its beginning was that of the primary key: databases chose it for what it is not good at
    "DROP INDEX postroom_deliveries_due ON postroom_deliveries",
    # ordered groups: since when a failing message holds its key (I10); 0: it has not failed
    "ALTER TABLE postroom_deliveries ADD COLUMN failing_since BIGINT NOT NULL DEFAULT 0",
    # a stamped delivery that leaves through the schedule (I17): when it is due; 0: it leaves at once
    "ALTER TABLE postroom_deliveries ADD COLUMN stamp_due BIGINT NOT NULL DEFAULT 0",
    # when somebody last used a group (R44)
    "CREATE TABLE postroom_activity (group_id BIGINT PRIMARY KEY, seen_at BIGINT NOT NULL)",
)

_3_LOG: Statements = (
    # where a partition is, and its slots: they never change
    "ALTER TABLE postroom_partitions ADD COLUMN shard VARCHAR(60) NOT NULL DEFAULT ''",
    "ALTER TABLE postroom_partitions ADD COLUMN first_slot INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE postroom_partitions ADD COLUMN last_slot INTEGER NOT NULL DEFAULT 0",
    """UPDATE postroom_partitions SET
        first_slot = COALESCE((SELECT MIN(r.first_slot) FROM postroom_ranges r
          WHERE r.partition_id = postroom_partitions.id), 0),
        last_slot = COALESCE((SELECT MAX(r.last_slot) FROM postroom_ranges r
          WHERE r.partition_id = postroom_partitions.id), 0)""",
    # which partitions a partition follows: sealed ones whose log is still there (I10)
    """CREATE TABLE postroom_lineage (
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        predecessor_id BIGINT NOT NULL,
        PRIMARY KEY (partition_id, predecessor_id))""",
    # a change of a route under way: at most one for a topic (R26)
    """CREATE TABLE postroom_changes (
        topic_id BIGINT PRIMARY KEY,
        id BIGINT NOT NULL,
        plan TEXT NOT NULL,
        begun_at BIGINT NOT NULL,
        worked_at BIGINT NOT NULL)""",
    # the other databases by name; addresses are in the configuration alone (R6)
    """CREATE TABLE postroom_shards (
        name VARCHAR(60) PRIMARY KEY,
        uuid VARCHAR(36) NOT NULL,
        state VARCHAR(10) NOT NULL,
        added_at BIGINT NOT NULL)""",
)

_3_PROGRESS: Statements = (
    # a sealed partition of which the group has settled everything, durably (I10)
    "ALTER TABLE postroom_progress ADD COLUMN drained INTEGER NOT NULL DEFAULT 0",
)

_4_LOG: Statements = (
    # who may use served brokers, and for what; of the secret a hash (R48)
    """CREATE TABLE postroom_principals (
        name VARCHAR(120) PRIMARY KEY,
        secret_hash VARCHAR(64) NOT NULL,
        permissions TEXT NOT NULL,
        created_at BIGINT NOT NULL)""",
    # limits on what a topic, a group or a producer takes in a second (R40); name: "topic:orders"
    """CREATE TABLE postroom_rates (
        name VARCHAR(330) PRIMARY KEY,
        messages_per_s DOUBLE PRECISION NOT NULL,
        bytes_per_s BIGINT NOT NULL)""",
)

_4_PROGRESS: Statements = (
    # brokers that are served now (R2)
    """CREATE TABLE postroom_brokers (
        id VARCHAR(36) PRIMARY KEY,
        address VARCHAR(250) NOT NULL,
        zone VARCHAR(60) NOT NULL,
        started_at BIGINT NOT NULL,
        until_ms BIGINT NOT NULL)""",
    # how far ahead of its rate each limit is spent, in microseconds of the clock (I17)
    """CREATE TABLE postroom_spent (
        name VARCHAR(330) PRIMARY KEY,
        messages_at BIGINT NOT NULL,
        bytes_at BIGINT NOT NULL)""",
)

_5_LOG: Statements = (
    # what jobs write, batch by batch of a query: invisible until it is decided (I20)
    """CREATE TABLE postroom_staged (
        id {serial},
        query VARCHAR(120) NOT NULL,
        batch BIGINT NOT NULL,
        segment VARCHAR(120) NOT NULL,
        number INTEGER NOT NULL,
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        staged_at BIGINT NOT NULL,
        records INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        data {blob} NOT NULL)""",
    "CREATE UNIQUE INDEX postroom_staged_place ON postroom_staged (query, batch, segment, number)",
    "CREATE INDEX postroom_staged_age ON postroom_staged (staged_at)",
    # how far each query is; its row is locked by whoever decides
    """CREATE TABLE postroom_queries (
        query VARCHAR(120) PRIMARY KEY,
        batch BIGINT NOT NULL,
        marks {blob} NOT NULL,
        decided_at BIGINT NOT NULL)""",
    # which segments a batch consists of, and how far they are published; with the stamp of a move (I12)
    """CREATE TABLE postroom_decisions (
        query VARCHAR(120) NOT NULL,
        batch BIGINT NOT NULL,
        revision INTEGER NOT NULL,
        decided_at BIGINT NOT NULL,
        published_at BIGINT NOT NULL,
        producer_id BIGINT NOT NULL,
        step INTEGER NOT NULL,
        wish {blob} NOT NULL,
        progress {blob} NOT NULL,
        plan {blob},
        PRIMARY KEY (query, batch, revision))""",
    "CREATE INDEX postroom_decisions_open ON postroom_decisions (published_at)",
)

_6_PROGRESS: Statements = (
    # sources that are slow (R42); the row without a name is locked by whoever counts, for its group
    """CREATE TABLE postroom_lanes (
        group_id BIGINT NOT NULL,
        source VARCHAR(120) NOT NULL,
        since BIGINT NOT NULL,
        failed_at BIGINT NOT NULL,
        handled_at BIGINT NOT NULL,
        reason VARCHAR(200) NOT NULL,
        PRIMARY KEY (group_id, source))""",
    # what became of messages of those sources that fail, or take long, by bucket of time
    """CREATE TABLE postroom_lane_counts (
        group_id BIGINT NOT NULL,
        source VARCHAR(120) NOT NULL,
        bucket BIGINT NOT NULL,
        handled BIGINT NOT NULL,
        failed BIGINT NOT NULL,
        spent_ms BIGINT NOT NULL,
        PRIMARY KEY (group_id, source, bucket))""",
)

_7_PROGRESS: Statements = (
    # what waits behind a failing message of its key: every message of the key from first to last (I27)
    """CREATE TABLE postroom_parked (
        group_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        line BIGINT NOT NULL,
        line_key {blob},
        first_offset BIGINT NOT NULL,
        last_offset BIGINT NOT NULL,
        messages BIGINT NOT NULL,
        PRIMARY KEY (group_id, partition_id, line))""",
    "ALTER TABLE postroom_progress ADD COLUMN delivered_from BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE postroom_progress ADD COLUMN parked_from BIGINT",
    "ALTER TABLE postroom_progress ADD COLUMN parked BIGINT NOT NULL DEFAULT 0",
    "UPDATE postroom_progress SET delivered_from = lowest",
    # ordered groups: somebody decided about what stopped, and the holder is to hand the partition over (R23)
    "ALTER TABLE postroom_progress ADD COLUMN recalled INTEGER NOT NULL DEFAULT 0",
    # processes that use the queue now, and the shards whose addresses each was given: names, as JSON (R6)
    """CREATE TABLE postroom_processes (
        id VARCHAR(36) PRIMARY KEY,
        name VARCHAR(250) NOT NULL,
        shards TEXT NOT NULL,
        until_ms BIGINT NOT NULL)""",
)

_7_LOG: Statements = (
    # the generation in which a start was set: progress that is as new as that goes on from where it is (I10)
    "ALTER TABLE postroom_starts ADD COLUMN since INTEGER NOT NULL DEFAULT 0",
    """UPDATE postroom_starts SET since = COALESCE(
        (SELECT g.generation FROM postroom_groups g WHERE g.id = postroom_starts.group_id), 0)""",
)

_8_LOG: Statements = (
    # the principal that staged or decided it first (I23); '': a job with the database itself; NULL: from
    # before there were owners, whoever uses it next
    "ALTER TABLE postroom_queries ADD COLUMN owner VARCHAR(120)",
)

_9_LOG: Statements = (
    # the offset of the first message for Kafka clients: lower ones are in the partitions it follows (I28)
    "ALTER TABLE postroom_partitions ADD COLUMN origin BIGINT NOT NULL DEFAULT 0",
)

_9_PROGRESS: Statements = (
    # brokers that listen for Kafka clients now: these know brokers by small numbers
    """CREATE TABLE postroom_kafka_nodes (
        node_id INTEGER PRIMARY KEY,
        broker_id VARCHAR(36) NOT NULL,
        address VARCHAR(250) NOT NULL,
        until_ms BIGINT NOT NULL)""",
)

_10_PROGRESS: Statements = (
    # consumer groups of Kafka clients: who coordinates them, and the last complete generation; the id is a
    # digest of the name, which is any text
    """CREATE TABLE postroom_kafka_groups (
        id {hash} NOT NULL PRIMARY KEY,
        name {blob} NOT NULL,
        generation {blob} NOT NULL,
        holder VARCHAR(36) NOT NULL,
        until_ms BIGINT NOT NULL)""",
    "CREATE INDEX postroom_kafka_groups_holder ON postroom_kafka_groups (holder)",
    # what they have committed, by partition as Kafka clients count them (I28)
    """CREATE TABLE postroom_kafka_offsets (
        group_id {hash} NOT NULL,
        topic_id BIGINT NOT NULL,
        kafka_partition INTEGER NOT NULL,
        committed BIGINT NOT NULL,
        leader_epoch INTEGER NOT NULL,
        metadata {blob} NOT NULL,
        committed_at BIGINT NOT NULL,
        PRIMARY KEY (group_id, topic_id, kafka_partition))""",
    "CREATE INDEX postroom_kafka_offsets_topic ON postroom_kafka_offsets (topic_id)",
)

_11_LOG: Statements = (
    # who changed what: see `model.audit`; a bounded number, the oldest go first
    """CREATE TABLE postroom_audit (
        id {serial}, begun_at BIGINT NOT NULL,
        who VARCHAR(250) NOT NULL, door VARCHAR(20) NOT NULL, address VARCHAR(250) NOT NULL,
        action VARCHAR(60) NOT NULL, topic VARCHAR(250) NOT NULL, group_name VARCHAR(250) NOT NULL,
        outcome VARCHAR(60) NOT NULL,
        asked TEXT NOT NULL, state_before TEXT NOT NULL, state_after TEXT NOT NULL)""",
)

_12_PROGRESS: Statements = (
    # share groups of Kafka clients that have a config, or a name that no group here can have: the id is a
    # digest of the name, which is any text
    """CREATE TABLE postroom_share_groups (
        id {hash} NOT NULL PRIMARY KEY,
        name {blob} NOT NULL,
        configs {blob} NOT NULL)""",
)

_13_LOG: Statements = (
    # the delayed messages of a topic, the soonest first: for whoever lists them
    "CREATE INDEX postroom_schedule_topic ON postroom_schedule (topic_id, due_at, id)",
)

_13_PROGRESS: Statements = (
    # how long messages waited until they were first read, of late (`model.delivery.first_waits`)
    "ALTER TABLE postroom_progress ADD COLUMN first_waits VARCHAR(1200) NOT NULL DEFAULT ''",
)

# Where volatile topics have a place of their own: what an append touches, and which life of the place it is.
_2_VOLATILE: Statements = (
    "CREATE TABLE postroom_settings (name VARCHAR(60) PRIMARY KEY, value TEXT NOT NULL)",
    *(
        s
        for s in _1_LOG
        if any(t in s for t in ("postroom_partitions", "postroom_trims", "postroom_sequences"))
    ),
)

MIGRATIONS: dict[int, dict[Area, Statements]] = {
    1: {Area.LOG: _1_LOG, Area.PROGRESS: _1_PROGRESS},
    2: {Area.LOG: _2_LOG, Area.PROGRESS: _2_PROGRESS, Area.VOLATILE: _2_VOLATILE},
    3: {Area.LOG: _3_LOG, Area.PROGRESS: _3_PROGRESS},
    4: {Area.LOG: _4_LOG, Area.PROGRESS: _4_PROGRESS},
    5: {Area.LOG: _5_LOG},
    6: {Area.PROGRESS: _6_PROGRESS},
    7: {Area.LOG: _7_LOG, Area.PROGRESS: _7_PROGRESS},
    8: {Area.LOG: _8_LOG},
    9: {Area.LOG: _9_LOG, Area.PROGRESS: _9_PROGRESS},
    10: {Area.PROGRESS: _10_PROGRESS},
    11: {Area.LOG: _11_LOG},
    12: {Area.PROGRESS: _12_PROGRESS},
    13: {Area.LOG: _13_LOG, Area.PROGRESS: _13_PROGRESS},
}
VERSION = max(MIGRATIONS)
# Programs of this version and newer ones go on while their tables are brought up to date, and after it:
ROLLING_SINCE = 8  # what came since only adds tables, indexes, and columns that have a default

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS postroom_schema "
    "(version INTEGER PRIMARY KEY, applied_at BIGINT NOT NULL){table}"
)
_NOTE = "INSERT INTO postroom_schema (version, applied_at) VALUES (?, ?)"


def migrate(session: Session) -> None:
    """Bring every place to this version, if none is newer than that. Many processes may do so at once."""
    places = session.dialect.areas
    behind = [area for area in places if version_of(session, area) < VERSION]
    for area in behind:
        with session.migrating(area) as tx:
            tx.do(_typed(_SCHEMA, session.dialect))
            have = _newest(tx)
            for number in range(have + 1, VERSION + 1):
                for statement in statements(number, area, places):
                    session.dialect.change(tx, _typed(statement, session.dialect))
                if area is Area.LOG and number == 1:
                    upsert = session.dialect.upsert("postroom_settings", ("name",), ("value",))
                    tx.many(upsert, [("uuid", str(uuid.uuid4())), ("catalog_version", "0")])
                tx.do(_NOTE, number, tx.now_ms())


def statements(number: int, area: Area, places: tuple[Area, ...]) -> Statements:
    """Return what a migration runs in an area; where all areas are one database, what it runs in any."""
    parts = MIGRATIONS[number]
    if len(places) > 1:
        return parts.get(area, ())
    return (*parts.get(Area.LOG, ()), *parts.get(Area.PROGRESS, ()))


def script(session: Session) -> list[str]:
    """The statements that would bring this database to this version, to be read or run by somebody."""
    found: list[str] = []
    for area in session.dialect.areas:
        have = version_of(session, area)
        if have < VERSION:
            found.append(_typed(_SCHEMA, session.dialect))
        for number in range(have + 1, VERSION + 1):
            found += [_typed(s, session.dialect) for s in statements(number, area, session.dialect.areas)]
            if area is Area.LOG and number == 1:
                settings = f"('uuid', '{uuid.uuid4()}'), ('catalog_version', '0')"
                found.append(f"INSERT INTO postroom_settings (name, value) VALUES {settings}")
            found.append(
                f"INSERT INTO postroom_schema (version, applied_at) VALUES ({number}, {session.now_ms()})"
            )
    return found


def check_schema(session: Session) -> None:
    """SchemaMismatch if the database is not at this program's version."""
    for area in session.dialect.areas:
        version = version_of(session, area)
        if version < VERSION:
            have = f"has schema version {version}" if version else "has no Postroom tables"
            raise SchemaMismatch(
                f"the database {have}, and this postroom needs {VERSION}: run `postroom migrate`, or connect "
                "with migrate=True",
                found=version,
                known=VERSION,
            )


def version_of(session: Session, area: Area) -> int:
    """The schema's version; 0 for an empty database.

    SchemaMismatch if it is newer than this program, or if a queue under the former name is there instead.
    """
    with session.read(area) as tx:
        if not session.dialect.has_table(tx, "postroom_schema"):
            refuse_former(session.dialect.tables(tx), session.dialect, area)
            return 0
        version = _newest(tx)
    if version > VERSION:
        raise SchemaMismatch(
            f"the database has schema version {version}, and this postroom knows {VERSION} at most: "
            f"{how_to_update()}",
            found=version,
            known=VERSION,
        )
    return version


_MADE = re.compile(r"CREATE TABLE postroom_(\w+)")


def refuse_former(tables: Collection[str], dialect: Dialect, area: Area) -> None:
    """SchemaMismatch if these, the tables of one place, are a queue's under the former name."""
    made = (statements(number, area, dialect.areas) for number in sorted(MIGRATIONS))
    first = next(filter(None, made))  # what the oldest version made in this place
    prefix = former_prefix(tables, _MADE.findall("\n".join(first)))
    if prefix is None:
        return
    cure = (
        "Name another file, or move this one away together with the files beside it"
        if dialect.kind == "sqlite"
        else "Name another database, or drop those tables"
    )
    raise SchemaMismatch(
        "the database has a queue from before this project was called Postroom (tables "
        f"{prefix}_schema, {prefix}_partitions and others): this postroom cannot read it, and there is no "
        f"upgrade. {cure}; first read what you still need with the program that wrote it",
        found=0,
        known=VERSION,
        former=prefix,
    )


def former_prefix(tables: Collection[str], ours: Collection[str]) -> str | None:
    """Another prefix than ours that has a `_schema` and every one of these tables; None: there is none.

    All of them, since a database on a server is shared with programs that have tables of their own.
    """
    there = set(tables)
    for table in sorted(there):
        prefix, _, last = table.rpartition("_")
        if last == "schema" and prefix not in ("", "postroom") and {f"{prefix}_{n}" for n in ours} <= there:
            return prefix
    return None


def _newest(tx: Transaction) -> int:
    row = tx.one("SELECT MAX(version) FROM postroom_schema")
    return int(row[0] or 0) if row else 0


def _typed(statement: str, dialect: Dialect) -> str:
    if statement.startswith("CREATE TABLE") and not statement.endswith("{table}"):
        statement += "{table}"
    if statement.startswith("DROP INDEX") and not dialect.indexes_by_table:
        statement = statement.partition(" ON ")[0]
    for word in ("blob", "hash", "serial", "offset", "table"):
        statement = statement.replace("{" + word + "}", getattr(dialect, word))
    return statement


def log_table(partition_id: int) -> str:
    return f"postroom_log_{partition_id:d}"


def create_log(session: Session, partition_id: int, area: Area = Area.LOG) -> None:
    """The table of a partition: a batch is a row. A step of its own, since DDL commits on MySQL (I19)."""
    statement = f"""CREATE TABLE IF NOT EXISTS {log_table(partition_id)} (
        base_offset {{offset}} PRIMARY KEY,
        records INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        bytes_before BIGINT NOT NULL,
        appended_at BIGINT NOT NULL,
        first_ts BIGINT NOT NULL,
        last_ts BIGINT NOT NULL,
        ids {{blob}},
        batch {{blob}} NOT NULL)"""
    with session.write(area) as tx:
        text = _typed(statement, session.dialect)
        session.dialect.create_log(tx, text, log_table(partition_id), volatile=area is Area.VOLATILE)
