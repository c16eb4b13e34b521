"""Checks of a queue on MySQL or MariaDB: what a confirmed message survives there, and what gets in its way.

A connection cannot ask for a flush of its own, so the server's settings decide (I8). The names of
variables differ between MySQL and MariaDB, and between versions: one that a server does not have counts as
not set.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import AccessDenied
from ...units import format_bytes, format_duration
from . import Checks, Finding
from .server import Examination, check_room, per_process

__all__ = ["CHECKS", "check_version"]

_OLDEST_MARIADB, _OLDEST_MYSQL = (10, 6), (8, 0)
_NEEDED = ("CREATE", "ALTER", "DROP", "INDEX", "SELECT", "INSERT", "UPDATE", "DELETE")


def check_version(exam: Examination) -> Iterator[Finding]:
    version = str(exam.value("SELECT VERSION()"))
    maria = "mariadb" in version.lower()
    name = "MariaDB" if maria else "MySQL"
    said = f"{name} {version.partition('-')[0]}"
    if _numbers(version) < (_OLDEST_MARIADB if maria else _OLDEST_MYSQL):
        advice = "MariaDB 10.6, MySQL 8.0 or newer is wanted; MariaDB 10.11 is what is tested"
        yield Finding("server", "warn", said, advice)
    elif not maria:
        advice = "MariaDB 10.11 is what is tested: try what you rely on before you do"
        yield Finding("server", "ok", said, advice)
    else:
        yield Finding("server", "ok", said)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("-")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def check_rights(exam: Examination) -> Iterator[Finding]:
    user, database, role = exam.row("SELECT CURRENT_USER(), DATABASE(), CURRENT_ROLE()")
    have = {row[0] for row in exam.rows(_GRANTED)}
    missing = [right for right in _NEEDED if right not in have]
    if not missing:
        yield Finding("rights", "ok", f"{user} may do in {database} what Postroom needs")
        return
    who = "`" + str(user).replace("@", "`@`") + "`"
    advice = f"each partition is a table: GRANT {', '.join(_NEEDED)} ON `{database}`.* TO {who}"
    said = f"{user} itself has no right to {', '.join(missing)} in {database}"
    by_role = role not in (None, "", "NONE")
    yield Finding("rights", "warn" if by_role else "fail", said, advice)


_GRANTED = """
    SELECT PRIVILEGE_TYPE FROM information_schema.USER_PRIVILEGES WHERE GRANTEE = {me}
    UNION
    SELECT PRIVILEGE_TYPE FROM information_schema.SCHEMA_PRIVILEGES
    WHERE GRANTEE = {me} AND DATABASE() LIKE TABLE_SCHEMA""".format(
    me="CONCAT('''', REPLACE(CURRENT_USER(), '@', '''@'''), '''')"
)


def check_flushing(exam: Examination) -> Iterator[Finding]:
    settings = _variables(
        exam, "innodb_flush_log_at_trx_commit", "innodb_doublewrite", "log_bin", "sync_binlog"
    )
    flush = settings.get("innodb_flush_log_at_trx_commit", "?")
    if flush == "1":
        yield Finding("innodb_flush_log_at_trx_commit", "ok", "1")
    else:
        advice = (
            "confirmed messages are lost when the machine crashes: set innodb_flush_log_at_trx_commit = 1"
        )
        yield Finding("innodb_flush_log_at_trx_commit", "fail", flush, advice)
    if settings.get("innodb_doublewrite", "ON").startswith(("ON", "1", "DETECT")):
        yield Finding("innodb_doublewrite", "ok", "on")
    else:
        advice = "a crash can spoil pages for good: set innodb_doublewrite = ON"
        yield Finding("innodb_doublewrite", "fail", settings["innodb_doublewrite"], advice)
    if settings.get("log_bin", "OFF") == "OFF":
        yield Finding("sync_binlog", "ok", "there is no binary log")
    elif settings.get("sync_binlog") == "1":
        yield Finding("sync_binlog", "ok", "1")
    else:
        advice = "after a crash replicas may lack confirmed messages: set sync_binlog = 1"
        yield Finding("sync_binlog", "warn", settings.get("sync_binlog", "?"), advice)


def check_isolation(exam: Examination) -> Iterator[Finding]:
    ours = exam.rows(_SESSION, "tx_isolation", "transaction_isolation")
    level = str(ours[0][1]) if ours else "?"
    binlog = _variables(exam, "log_bin", "binlog_format")
    if level != "READ-COMMITTED":
        advice = "a repeated batch may be stored twice: look for a proxy that changes it"
        yield Finding("isolation", "fail", f"{level} on Postroom's connections", advice)
    elif binlog.get("log_bin") == "ON" and binlog.get("binlog_format") == "STATEMENT":
        advice = "at READ COMMITTED the server then refuses to write: set binlog_format = ROW"
        yield Finding("isolation", "fail", "READ-COMMITTED, and binlog_format is STATEMENT", advice)
    else:
        yield Finding("isolation", "ok", "READ-COMMITTED, since Postroom sets it")


_SESSION = "SHOW SESSION VARIABLES WHERE Variable_name IN (?, ?)"


def check_connections(exam: Examination) -> Iterator[Finding]:
    limits = _variables(exam, "max_connections", "max_user_connections")
    used = int(exam.row("SHOW GLOBAL STATUS LIKE 'Threads_connected'")[1])
    most = min(int(value) for value in limits.values() if int(value))
    yield check_room(most, used, None, per_process(exam.limits, wakes=False))


def check_packet(exam: Examination) -> Iterator[Finding]:
    """A batch goes as one packet, and bytes that have to be escaped are sent as two.

    The store refuses a server that takes less: that is found when it is reached.
    """
    largest, needed = int(exam.value("SELECT @@max_allowed_packet")), 2 * exam.limits.max_batch_bytes
    said = f"{format_bytes(largest)}; a batch needs up to {format_bytes(needed)}"
    yield Finding("max_allowed_packet", "ok", said)


def check_replication(exam: Examination) -> Iterator[Finding]:
    """Check what is needed so that "confirmed" survives a failover (R6)."""
    names = ("rpl_semi_sync_master", "rpl_semi_sync_source")
    settings = _variables(
        exam, "log_bin", *(f"{n}_{what}" for n in names for what in ("enabled", "wait_point"))
    )
    semi = next((n for n in names if settings.get(f"{n}_enabled") == "ON"), None)
    how = "rpl_semi_sync_master_enabled = ON and rpl_semi_sync_master_wait_point = AFTER_SYNC"
    if settings.get("log_bin", "OFF") == "OFF":
        said = "none: confirmed messages survive a crash, but not the loss of the server's disk"
        yield Finding("replicas", "ok", said, f"for more: a replica, and {how}")
    elif semi is None:
        said = "the binary log is on and replicas need not confirm: a failover may lose confirmed messages"
        yield Finding("replicas", "warn", said, f"set {how} (rpl_semi_sync_source_… on MySQL 8)")
    elif settings.get(f"{semi}_wait_point") != "AFTER_SYNC":
        advice = f"set {semi}_wait_point = AFTER_SYNC"
        yield Finding(
            "replicas", "warn", "semi-synchronous, but others see a commit before replicas do", advice
        )
    else:
        said = "commits wait for a replica (semi-synchronous, AFTER_SYNC)"
        yield Finding(
            "replicas", "ok", said, f"when {semi}_timeout has passed the server goes on alone: watch it"
        )


def check_transactions(exam: Examination) -> Iterator[Finding]:
    """An old one keeps what was deleted, and may hold locks (I15)."""
    try:
        oldest = exam.row(_OLDEST_TRANSACTION)
    except AccessDenied:
        advice = "GRANT PROCESS ON *.* to see those of others; sends that find a row locked say so themselves"
        yield Finding("transactions", "skip", "may not be looked at without the right PROCESS", advice)
        return
    if oldest and oldest[2] * 1000 > exam.limits.tuning.cli.old_transaction_ms:
        connection, user, age_s = oldest
        said = f"connection {connection} of {user} has had one open for {format_duration(int(age_s) * 1000)}"
        yield Finding("transactions", "warn", said, f"end it: KILL {connection}")
    else:
        age = format_duration(int(oldest[2]) * 1000) if oldest else "none is open"
        yield Finding("transactions", "ok", f"oldest: {age}")


_OLDEST_TRANSACTION = """
    SELECT t.trx_mysql_thread_id, COALESCE(p.USER, 'somebody'),
           TIMESTAMPDIFF(SECOND, t.trx_started, SYSDATE())
    FROM information_schema.INNODB_TRX t
    LEFT JOIN information_schema.PROCESSLIST p ON p.ID = t.trx_mysql_thread_id
    WHERE t.trx_mysql_thread_id <> CONNECTION_ID() ORDER BY t.trx_started LIMIT 1"""


def _variables(exam: Examination, *names: str) -> dict[str, str]:
    """Settings of the server; those that it does not have are left out."""
    marks = ", ".join("?" * len(names))
    found = exam.rows(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({marks})", *names)
    return {str(name).lower(): str(value) for name, value in found}


CHECKS: Checks[Examination] = (
    ("rights", check_rights),
    ("flushing", check_flushing),
    ("isolation", check_isolation),
    ("connections", check_connections),
    ("max_allowed_packet", check_packet),
    ("replicas", check_replication),
    ("transactions", check_transactions),
)
