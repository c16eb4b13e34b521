"""Tables are changed while others use them: a migration that waits does not make everybody wait (I15)."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg
import pymysql
import pytest

from postroom.address import parse
from postroom.config import DEFAULTS
from postroom.errors import StoreBusy
from postroom.store import open_session
from postroom.store.sql import schema
from postroom.store.sql.schema import VERSION, migrate, version_of
from postroom.store.sql.session import Area, Session

IMPATIENT = replace(DEFAULTS, lock_timeout_ms=1_000)
READ = "SELECT COUNT(*) FROM postroom_progress"


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_migration_gives_up_rather_than_hold_up_those_who_come_after_it(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report, or a dump, has read a table that is to be changed, and its transaction is still open."""
    url = request.getfixturevalue(f"{kind}_url")
    with closing(_session(url)) as session:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "VERSION", VERSION - 1)
            migrate(session)
        with closing(_plain(url)) as report:
            report.cursor().execute(READ)
            began, raised = time.monotonic(), _migrated_aside(session, report)
            assert isinstance(raised, StoreBusy), raised
            assert time.monotonic() - began < 30
            with closing(_plain(url)) as another, another.cursor() as cursor:
                cursor.execute(READ)  # nobody waits for a lock on it any more
            assert version_of(session, Area.LOG) == VERSION - 1
        migrate(session)
        assert version_of(session, Area.LOG) == VERSION


def _migrated_aside(session: Session, report: Any) -> BaseException | None:
    """What it raised; the report ends should it never give up, so that the test does."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            migrate(session)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    if thread.is_alive():
        report.rollback()
        thread.join()
    return raised[0] if raised else None


def _session(url: str) -> Session:
    return open_session(parse(url), IMPATIENT)


def _plain(url: str) -> Any:
    address = parse(url)
    if address.kind == "postgresql":
        return psycopg.connect(address.dsn)
    return pymysql.connect(**dict(address.server), read_timeout=30)  # type: ignore[arg-type]
