"""Migrations: from every earlier version to this one, and never from a newer one."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock.clock import SystemClock
from penstock.errors import SchemaMismatch, StoreError
from penstock.model.settings import GroupSettings, TopicSettings
from penstock.store import open_sqlite, schema
from penstock.store.schema import MIGRATIONS, VERSION, migrate, version_of
from penstock.store.session import Lane, Session
from penstock.store.sqlite import SqliteDialect
from penstock.testing.store_contract.harness import append, ask, batch, partitions, read_all, spans

EVERY = range(1, VERSION + 1)


def session_at(path: Path) -> Session:
    return Session(SqliteDialect(path, SystemClock()))


def build(path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store as a penstock of that version made it."""
    with monkeypatch.context() as patch, closing(session_at(path)) as session:
        patch.setattr(schema, "VERSION", version)
        migrate(session)


def files(path: Path) -> dict[Lane, Path]:
    return {Lane.LOG: path, Lane.PROGRESS: path.with_name(path.name + ".progress")}


def shape(path: Path) -> dict[str, list[tuple[str, str, str]]]:
    """Tables and indexes of both files, without regard to spaces; logs belong to topics."""
    found = {}
    for lane, file in files(path).items():
        with closing(sqlite3.connect(file)) as connection:
            rows = connection.execute(
                "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL "
                "AND name NOT LIKE '%!_log!_%' ESCAPE '!'"
            )
            found[lane.value] = sorted((kind, name, re.sub(r"\s+", " ", sql)) for kind, name, sql in rows)
    return found


def dump(path: Path) -> list[str]:
    lines = []
    for file in files(path).values():
        with closing(sqlite3.connect(file)) as connection:
            lines += list(connection.iterdump())
    return lines


def versions(path: Path) -> dict[Lane, int]:
    with closing(session_at(path)) as session:
        return {lane: version_of(session, lane) for lane in Lane}


# ---- upwards ----------------------------------------------------------------------------------------------


def test_migrations_are_numbered_without_gaps() -> None:
    assert list(MIGRATIONS) == list(range(1, VERSION + 1))


@pytest.mark.parametrize("version", EVERY)
def test_every_version_there_was_becomes_this_one(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "old.db", version, monkeypatch)
    open_sqlite(tmp_path / "old.db").close()
    open_sqlite(tmp_path / "new.db").close()
    assert shape(tmp_path / "old.db") == shape(tmp_path / "new.db")


def test_a_new_store_has_this_version_in_both_files(tmp_path: Path) -> None:
    open_sqlite(tmp_path / "new.db").close()
    assert versions(tmp_path / "new.db") == dict.fromkeys(Lane, VERSION)
    before = dump(tmp_path / "new.db")
    open_sqlite(tmp_path / "new.db").close()
    assert dump(tmp_path / "new.db") == before


def add_version(monkeypatch: pytest.MonkeyPatch, *statements: str) -> None:
    """A version of tomorrow, so that the way upwards is walked even while there is only one."""
    lanes = {
        Lane.LOG: ("ALTER TABLE penstock_topics ADD COLUMN colour TEXT", *statements),
        Lane.PROGRESS: ("CREATE TABLE penstock_extra (id {serial}, data {blob})",),
    }
    monkeypatch.setitem(MIGRATIONS, VERSION + 1, lanes)
    monkeypatch.setattr(schema, "VERSION", VERSION + 1)


def test_an_upgrade_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "orders.db"
    with closing(open_sqlite(path)) as store:
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        group = store.catalog.create_group("orders", "billing", GroupSettings())
        append(store, place, batch(5, producer=7))
        store.progress.poll(group, place, ask(1, 5, messages=2))
    add_version(monkeypatch)
    with closing(open_sqlite(path)) as store:
        assert len(read_all(store, place)) == 1
        assert append(store, place, batch(5, producer=7))[0].duplicate
        assert spans(store.progress.poll(group, place, ask(1, 5))) == [(0, 1)]
    assert versions(path) == dict.fromkeys(Lane, VERSION + 1)
    open_sqlite(tmp_path / "new.db").close()
    assert shape(path) == shape(tmp_path / "new.db")


def test_the_harness_notices_a_migration_that_ends_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_sqlite(tmp_path / "old.db").close()
    add_version(monkeypatch)
    open_sqlite(tmp_path / "old.db").close()
    monkeypatch.setitem(MIGRATIONS, VERSION + 1, {})
    open_sqlite(tmp_path / "new.db").close()
    assert shape(tmp_path / "old.db") != shape(tmp_path / "new.db")


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "orders.db"
    open_sqlite(path).close()
    before = dump(path)
    with monkeypatch.context() as patch:
        add_version(patch, "CREATE TABLE penstock_topics (id INTEGER)")
        with pytest.raises(StoreError, match="already exists"):
            open_sqlite(path)
    assert dump(path) == before
    open_sqlite(path).close()


# ---- newer ------------------------------------------------------------------------------------------------


def write_version(file: Path, version: int) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("INSERT INTO penstock_schema (version, applied_at) VALUES (?, 0)", (version,))


@pytest.mark.parametrize("lane", list(Lane))
def test_a_newer_store_is_refused_and_left_alone(tmp_path: Path, lane: Lane) -> None:
    path = tmp_path / "orders.db"
    open_sqlite(path).close()
    write_version(files(path)[lane], VERSION + 3)
    before = dump(path)
    with pytest.raises(SchemaMismatch, match=f"schema version {VERSION + 3}") as caught:
        open_sqlite(path)
    assert caught.value.details == {"found": VERSION + 3, "known": VERSION}
    assert not caught.value.retriable
    assert dump(path) == before


def test_a_log_is_not_made_beside_newer_progress(tmp_path: Path) -> None:
    """Both versions are looked at before either file is changed."""
    path = tmp_path / "orders.db"
    open_sqlite(path).close()
    write_version(files(path)[Lane.PROGRESS], VERSION + 1)
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    with pytest.raises(SchemaMismatch):
        open_sqlite(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (0,)
