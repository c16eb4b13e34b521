"""Checks that every database server gets: can it be reached, its tables, its clock, its speed.

What only one kind of server has is in `postgres` and `mysql`. Asks the server as the store does, through a
session of the store, and changes nothing: the one thing written is the lease of a duty of its own, which is
given back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ...address import Address
from ...config import DEFAULTS, Limits
from ...errors import PostroomError, SchemaMismatch, how_to_update
from ...store.admin import VERSION, Area, Row, Session, SqlDuties, check_schema, open_session
from . import Checks, Finding, made

__all__ = ["Examination", "check_room", "examine_server", "per_process"]

_TRIPS = 20
_COMMITS = 10
_DUTY = "doctor"
_ADVICE = "see what the server said; if that is no help, please report it"


@dataclass(frozen=True, slots=True)
class Examination:
    """The database under examination."""

    address: Address
    session: Session
    limits: Limits = DEFAULTS

    def row(self, sql: str, *args: Any) -> Row:
        with self.session.read(Area.LOG) as tx:
            return tx.one(sql, *args) or ()

    def rows(self, sql: str, *args: Any) -> list[Row]:
        with self.session.read(Area.LOG) as tx:
            return tx.all(sql, *args)

    def value(self, sql: str, *args: Any) -> Any:
        return (self.row(sql, *args) or (None,))[0]

    def migrated(self) -> bool:
        with self.session.read(Area.LOG) as tx:
            return self.session.dialect.has_table(tx, "postroom_duties")

    def inside(self, sql: str) -> Any:
        """Asked inside a transaction of the log, as the store begins one."""
        with self.session.write(Area.LOG) as tx:
            return (tx.one(sql) or (None,))[0]


def examine_server(address: Address, begin: Callable[[str, int], None]) -> list[Finding]:
    if address.kind == "postgresql":
        from .postgres import CHECKS, check_version
    else:
        from .mysql import CHECKS, check_version
    try:
        session = open_session(address)
    except PostroomError as error:  # no driver
        return [Finding("driver", "fail", str(error))]
    with closing(session):
        exam, checks = Examination(address, session), (*_COMMON, *CHECKS)
        begin("server", len(checks) + 1)
        found = _reached(exam, check_version)
        if any(finding.state == "fail" for finding in found):
            return found  # nothing else can be asked
        for name, check in checks:
            begin(name, len(checks) + 1)
            found += made(name, check, exam, advice=_ADVICE)
    return found


def _reached(exam: Examination, check: Callable[[Examination], Iterator[Finding]]) -> list[Finding]:
    """The store's own words say what to do when a server cannot be reached, refuses, or takes no writes."""
    try:
        return list(check(exam))
    except PostroomError as error:
        return [Finding("server", "fail", str(error))]


def check_tables(exam: Examination) -> Iterator[Finding]:
    try:
        check_schema(exam.session)
        yield Finding("schema", "ok", f"version {VERSION}")
    except SchemaMismatch as error:
        if "former" in error.details:
            yield Finding("schema", "fail", str(error))
            return
        found, known = error.details["found"], error.details["known"]
        if found > known:
            said, advice = f"version {found} is newer than this postroom's {known}", how_to_update()
        elif found:
            said, advice = f"version {found}, and this postroom needs {known}", "run `postroom migrate`"
        else:
            said, advice = "there are no Postroom tables", "make them: `postroom migrate`"
        yield Finding("schema", "fail", said, advice)


def check_clock(exam: Examination) -> Iterator[Finding]:
    before = time.time()
    with exam.session.read(Area.LOG) as tx:
        server_ms = tx.now_ms()
    ours_ms = (before + time.time()) * 500
    apart_ms = abs(server_ms - ours_ms)
    said = f"{apart_ms:,.0f} ms apart from this machine's"
    if apart_ms > exam.limits.tuning.cli.server_clock_ms:
        advice = (
            "Postroom goes by the server's clock: delayed messages, schedules and retention are as wrong as "
            "that one is. Set both by NTP"
        )
        yield Finding("clock", "warn", said, advice)
    else:
        yield Finding("clock", "ok", said)


def check_trip(exam: Examination) -> Iterator[Finding]:
    times = []
    with exam.session.read(Area.LOG) as tx:
        for _ in range(_TRIPS):
            before = time.perf_counter()
            tx.one("SELECT 1")
            times.append((time.perf_counter() - before) * 1000)
    yield _timed(
        "round trip", times, exam.limits.tuning.cli.slow_trip_ms, "run the programs nearer to the server"
    )


def check_commit(exam: Examination) -> Iterator[Finding]:
    """Measure how long a flushed commit takes, from here to the disk and back."""
    if not exam.migrated():
        yield Finding("commit", "skip", "not measured before there are tables")
        return
    duties, holder, times = SqlDuties(exam.session), f"doctor-{time.time_ns()}", []
    for _ in range(_COMMITS):
        before = time.perf_counter()
        taken = duties.acquire(_DUTY, holder, exam.limits.tuning.cli.test_lease_ms)
        times.append((time.perf_counter() - before) * 1000)
        if not taken:
            yield Finding("commit", "skip", "another doctor is at work", "try again in some seconds")
            return
    duties.release(_DUTY, holder)
    yield _timed(
        "commit",
        times,
        exam.limits.tuning.cli.slow_commit_ms,
        "every send waits that long: send several at a time",
    )


def _timed(name: str, times_ms: list[float], slow_ms: float, advice: str) -> Finding:
    typical, worst = statistics.median(times_ms), max(times_ms)
    said = f"{typical:.2f} ms typically, {worst:.2f} ms at worst ({len(times_ms)} measured)"
    return Finding(name, "warn", said, advice) if typical > slow_ms else Finding(name, "ok", said)


# ---- connections ----


def per_process(limits: Limits, *, wakes: bool) -> int:
    """Connections that one `postroom.connect` opens under load: who may use each area at the same time.

    `wakes`: whether the server wakes waiters, for which one listens and one notifies. Volatile topics take
    up to 4 more; they are rare, and this is advice.
    """
    writer, heartbeat, watcher, schedule = 1, 1, 1, 1
    log = writer + limits.reader_threads + heartbeat + watcher + schedule
    progress = limits.reader_threads + heartbeat + watcher
    return log + progress + (2 if wakes else 0)


def check_room(most: int, used: int, ours: int | None, each: int) -> Finding:
    """Check whether the server has room for another process of ours."""
    mine = "" if ours is None else f", {ours} of them Postroom's"
    said = f"{used} of {most} in use{mine}; a process needs up to {each}"
    advice = f"raise max_connections, or run fewer processes ({most} are enough for {most // each} at once)"
    left = most - used
    if left <= 0:
        return Finding("connections", "fail", said, advice)
    return Finding(
        "connections", "warn" if left < 2 * each else "ok", said, advice if left < 2 * each else ""
    )


_COMMON: Checks[Examination] = (
    ("schema", check_tables),
    ("clock", check_clock),
    ("round trip", check_trip),
    ("commit", check_commit),
)
