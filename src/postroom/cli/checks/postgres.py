"""Checks of a queue on PostgreSQL: what a confirmed message survives there, and what slows it down.

`synchronous_commit` is looked at as the store sets it, and as the role has it: the store does not rely on the
latter (I8). Sessions of other roles show little of themselves; what cannot be seen is said so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from ...store.admin import Area
from ...units import format_duration
from . import Checks, Finding
from .server import Examination, check_room, per_process

__all__ = ["CHECKS", "check_version"]

_OLDEST, _TESTED = 130000, "15"
_MANY_DEAD = 100_000  # dead rows in a table; more of them than live ones, too
_OURS = "relname LIKE ? AND relkind IN ('r', 'p') AND relnamespace = current_schema()::regnamespace"
_NAMES = "postroom\\_%"
_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")
_UNSAFE = "off", "local", "remote_write"


def check_version(exam: Examination) -> Iterator[Finding]:
    version, number = exam.row(
        "SELECT current_setting('server_version'), current_setting('server_version_num')::int"
    )
    said = f"PostgreSQL {version.partition(' ')[0]}"
    if number >= _OLDEST:
        yield Finding("server", "ok", said)
    else:
        advice = f"PostgreSQL 13 or newer is wanted; {_TESTED} is what is tested"
        yield Finding("server", "warn", said, advice)


def check_rights(exam: Examination) -> Iterator[Finding]:
    role, schema, create = exam.row(
        "SELECT current_user::text, current_schema()::text, "
        "has_schema_privilege(current_schema()::text, 'CREATE')"
    )
    if schema is None or not create:
        where = f"schema {schema}" if schema else "any schema of its search_path"
        advice = f"each partition is a table: GRANT USAGE, CREATE ON SCHEMA {schema or 'public'} TO {role}"
        yield Finding("rights", "fail", f"{role} may not create tables in {where}", advice)
        return
    refused = [right for right in _RIGHTS if exam.value(_REFUSED, _NAMES, right)]
    foreign = exam.value(_FOREIGN, _NAMES)
    if refused:
        advice = f"GRANT {', '.join(_RIGHTS)} ON ALL TABLES IN SCHEMA {schema} TO {role}"
        yield Finding("rights", "fail", f"{role} lacks {', '.join(refused)} on Postroom's tables", advice)
    elif foreign:
        advice = "use one role for all programs, or make each a member of the role that owns the tables"
        said = f"{foreign} tables belong to another role: {role} can neither change nor drop them"
        yield Finding("rights", "warn", said, advice)
    else:
        yield Finding("rights", "ok", f"{role} may create tables in schema {schema}, and owns Postroom's")


_REFUSED = f"SELECT COUNT(*) FROM pg_class WHERE {_OURS} AND NOT has_table_privilege(oid, ?)"
_FOREIGN = f"SELECT COUNT(*) FROM pg_class WHERE {_OURS} AND NOT pg_has_role(relowner, 'USAGE')"


def check_flushing(exam: Examination) -> Iterator[Finding]:
    fsync, pages, role = exam.row(
        "SELECT current_setting('fsync'), current_setting('full_page_writes'), "
        "COALESCE((SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'), 'on')"
    )
    ours = exam.inside("SHOW synchronous_commit")
    if fsync == "on":
        yield Finding("fsync", "ok", "on")
    else:
        advice = "confirmed messages are lost when the machine crashes: set fsync = on"
        yield Finding("fsync", "fail", fsync, advice)
    if pages == "on":
        yield Finding("full_page_writes", "ok", "on")
    else:
        advice = "a crash can spoil pages for good: set full_page_writes = on"
        yield Finding("full_page_writes", "fail", pages, advice)
    if ours in _UNSAFE:
        advice = "something between here and the server changes it: look for a proxy"
        yield Finding("synchronous_commit", "fail", f"{ours} for messages", advice)
    elif role in _UNSAFE:
        said = f"{ours} for messages, since Postroom sets it; the default of this role is {role}"
        advice = f"whatever else this role commits is not safe: ALTER ROLE … SET synchronous_commit = {ours}"
        yield Finding("synchronous_commit", "warn", said, advice)
    else:
        yield Finding("synchronous_commit", "ok", f"{ours} for messages; progress need not wait")


def check_isolation(exam: Examination) -> Iterator[Finding]:
    ours, usual = exam.inside("SHOW transaction_isolation"), exam.value("SHOW default_transaction_isolation")
    if ours != "read committed":
        advice = "a repeated batch may be stored twice: set default_transaction_isolation = 'read committed'"
        yield Finding("isolation", "fail", f"{ours} in Postroom's transactions", advice)
    else:
        other = "" if usual == ours else f"; the default here is {usual}, which Postroom does not use"
        yield Finding("isolation", "ok", f"read committed{other}")


def check_connections(exam: Examination) -> Iterator[Finding]:
    most, used, ours = exam.row(_CONNECTIONS)
    each = per_process(exam.limits, wakes=not exam.address.pgbouncer)
    yield check_room(most, used, ours, each)


_CONNECTIONS = """
    SELECT LEAST(current_setting('max_connections')::int
                   - current_setting('superuser_reserved_connections')::int,
                 NULLIF((SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user), -1),
                 NULLIF((SELECT datconnlimit FROM pg_database WHERE datname = current_database()), -1)),
           (SELECT SUM(numbackends)::int FROM pg_stat_database),
           (SELECT COUNT(*)::int FROM pg_stat_activity WHERE application_name = 'postroom')"""


def check_pooler(exam: Examination) -> Iterator[Finding]:
    """A pooler tells clients a process id of its own; the server that answers has another."""
    with closing(exam.session.dialect.connect(Area.LOG)) as connection:
        told, real = connection.info.backend_pid, connection.execute("SELECT pg_backend_pid()").fetchone()[0]
    pooled, asked = told != real, exam.address.pgbouncer
    if pooled and not asked:
        said = "there is a pooler (PgBouncer) between here and the server"
        advice = "add ?pgbouncer=1 to the address, unless it pools by session: else sends fail now and then"
        yield Finding("pooler", "fail", said, advice)
    elif asked and not pooled:
        said = "?pgbouncer=1, but no pooler was noticed"
        advice = "leave it out: it costs prepared statements, and waiting consumers are woken later"
        yield Finding("pooler", "warn", said, advice)
    else:
        yield Finding("pooler", "ok", "PgBouncer, and the address says so" if pooled else "none")


def check_replication(exam: Examination) -> Iterator[Finding]:
    """Check what is needed so that "confirmed" survives a failover (R6)."""
    names = exam.value("SHOW synchronous_standby_names")
    standbys = exam.value("SELECT COUNT(*) FROM pg_stat_replication")
    if names:
        said = f"{standbys} connected; commits wait for synchronous_standby_names = {names!r}"
        yield Finding("standbys", "ok", said)
    elif standbys:
        said = f"{standbys} connected, none of them synchronous: a failover may lose confirmed messages"
        advice = "set synchronous_standby_names, such as 'ANY 1 (*)', and fail over to a synchronous one only"
        yield Finding("standbys", "warn", said, advice)
    else:
        said = "none: confirmed messages survive a crash, but not the loss of the server's disk"
        advice = "for more: a standby, and synchronous_standby_names = 'ANY 1 (*)'"
        yield Finding("standbys", "ok", said, advice)


def check_transactions(exam: Examination) -> Iterator[Finding]:
    """An old snapshot keeps dead rows alive, and every poll steps over them (I19)."""
    oldest = exam.row(_OLDEST_TRANSACTION)
    hidden = exam.value(_HIDDEN)
    unseen = f" ({hidden} sessions of other roles cannot be looked at: GRANT pg_monitor)" if hidden else ""
    if oldest and oldest[2] > exam.limits.tuning.cli.old_transaction_ms:
        who, state, age_ms = oldest
        said = f"{who} has had one open for {format_duration(int(age_ms))} ({state})"
        advice = "end it: polls grow slower for as long as it lasts; set idle_in_transaction_session_timeout"
        yield Finding("transactions", "warn", said + unseen, advice)
    else:
        age = format_duration(int(oldest[2])) if oldest else "none is open"
        yield Finding("transactions", "ok", f"oldest: {age}{unseen}")


_OLDEST_TRANSACTION = """
    SELECT who, state, (extract(epoch FROM clock_timestamp() - since) * 1000)::bigint AS age_ms FROM (
        SELECT 'process ' || pid || ' of ' || COALESCE(usename::text, 'somebody'), state, xact_start
        FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid()
              AND backend_type = 'client backend'
        UNION ALL
        SELECT 'the prepared transaction ' || gid, 'prepared', prepared FROM pg_prepared_xacts
    ) AS found (who, state, since) ORDER BY since LIMIT 1"""
_HIDDEN = """SELECT COUNT(*) FROM pg_stat_activity
             WHERE backend_type IS NULL AND datname IS NOT NULL AND usename IS NOT NULL"""


def check_vacuum(exam: Examination) -> Iterator[Finding]:
    on = exam.value("SELECT current_setting('autovacuum') = 'on' AND current_setting('track_counts') = 'on'")
    dead = exam.rows(_DEAD, _NAMES, _MANY_DEAD)
    if not on:
        advice = "progress is updated all the time: set autovacuum = on, and track_counts = on"
        yield Finding("autovacuum", "fail", "off", advice)
    elif dead:
        table, rows = dead[0]
        advice = "look for an old transaction or replication slot, then VACUUM it"
        yield Finding("autovacuum", "warn", f"on, but {table} has {rows:,} dead rows", advice)
    else:
        yield Finding("autovacuum", "ok", "on, and it keeps up")


_DEAD = """SELECT relname::text, n_dead_tup FROM pg_stat_user_tables
           WHERE relname LIKE ? AND n_dead_tup > ? AND n_dead_tup > n_live_tup
           ORDER BY n_dead_tup DESC LIMIT 1"""

CHECKS: Checks[Examination] = (
    ("rights", check_rights),
    ("flushing", check_flushing),
    ("isolation", check_isolation),
    ("connections", check_connections),
    ("pooler", check_pooler),
    ("standbys", check_replication),
    ("transactions", check_transactions),
    ("autovacuum", check_vacuum),
)
