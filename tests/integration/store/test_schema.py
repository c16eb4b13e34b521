"""Migrations: from every earlier version to this one, and never from a newer one."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from postroom.clock import SystemClock
from postroom.errors import PermissionDenied, SchemaMismatch, StoreError
from postroom.model.moves.staging import StagedQuery, Wish
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.store import open_sqlite
from postroom.store.contract import Bounds
from postroom.store.dialects.sqlite import SqliteDialect
from postroom.store.sql import schema
from postroom.store.sql.schema import MIGRATIONS, ROLLING_SINCE, VERSION, migrate, version_of
from postroom.store.sql.session import Area, Session
from postroom.testing.store_contract.harness import (
    MovableClock,
    acks,
    append,
    ask,
    batch,
    partitions,
    read_all,
    spans,
)

EVERY = range(1, VERSION + 1)
FIRST_FILES = {1: (Area.LOG, Area.PROGRESS)}  # versions that had fewer files than this one
STORES = Path(__file__).parent / "stores"


def session_at(path: Path) -> Session:
    return Session(SqliteDialect(path, SystemClock()))


def build(path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store as a postroom of that version made it."""
    with monkeypatch.context() as patch, closing(session_at(path)) as session:
        patch.setattr(schema, "VERSION", version)
        patch.setattr(session.dialect, "areas", FIRST_FILES.get(version, session.dialect.areas))
        migrate(session)
    for area, file in files(path).items():
        assert file.exists() == (area in FIRST_FILES.get(version, Area))


def files(path: Path) -> dict[Area, Path]:
    return {area: path if area is Area.LOG else path.with_name(f"{path.name}.{area.value}") for area in Area}


def shape(path: Path) -> dict[str, list[tuple[str, str, str]]]:
    """Tables and indexes of all files, without regard to spaces; logs belong to topics."""
    found = {}
    for area, file in files(path).items():
        with closing(sqlite3.connect(file)) as connection:
            rows = connection.execute(
                "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL "
                "AND name NOT LIKE '%!_log!_%' ESCAPE '!'"
            )
            found[area.value] = sorted((kind, name, re.sub(r"\s+", " ", sql)) for kind, name, sql in rows)
    return found


def dump(path: Path) -> list[str]:
    lines = []
    for file in files(path).values():
        with closing(sqlite3.connect(file)) as connection:
            lines += list(connection.iterdump())
    return lines


def versions(path: Path) -> dict[Area, int]:
    with closing(session_at(path)) as session:
        return {area: version_of(session, area) for area in Area}


# ---- upwards ----------------------------------------------------------------------------------------------


def test_migrations_are_numbered_without_gaps() -> None:
    assert list(MIGRATIONS) == list(range(1, VERSION + 1))


def test_what_came_since_only_adds_so_that_older_programs_go_on() -> None:
    """Else the upgrade is not a rolling one any more, which users are promised: see `tests.upgrade`."""
    adds = re.compile(
        r"CREATE TABLE |CREATE INDEX |ALTER TABLE \w+ ADD COLUMN \w+ [\w()]+( NOT NULL DEFAULT \S+)?$"
    )
    for number in range(ROLLING_SINCE + 1, VERSION + 1):
        for statement in (s for statements in MIGRATIONS[number].values() for s in statements):
            assert adds.match(statement), f"migration {number}: {statement}"


@pytest.mark.parametrize("version", EVERY)
def test_every_version_there_was_becomes_this_one(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "old.db", version, monkeypatch)
    open_sqlite(tmp_path / "old.db").close()
    open_sqlite(tmp_path / "new.db").close()
    assert shape(tmp_path / "old.db") == shape(tmp_path / "new.db")


def load(path: Path, version: int) -> None:
    """A store as it was left by a postroom of that version: its own files, written down as SQL."""
    for area in FIRST_FILES.get(version, tuple(Area)):
        with closing(sqlite3.connect(files(path)[area])) as connection:
            connection.executescript((STORES / f"version-{version}.{area.value}.sql").read_text())


def test_a_store_of_version_1_becomes_this_one_and_keeps_what_is_there(tmp_path: Path) -> None:
    """Group `billing` has a retry and a hand-out, the rest is settled; group `late` never polled."""
    path, clock = tmp_path / "orders.db", MovableClock()
    load(path, 1)
    with closing(open_sqlite(path, clock)) as store:
        topic = store.catalog.topic("orders")
        one, two = partitions(topic)
        assert topic.settings == TopicSettings(retention_ms=0, drop_settled=True)
        assert store.log.bounds([one, two]) == {one: Bounds(0, 8), two: Bounds(2, 5)}
        assert [len(read_all(store, place)) for place in (one, two)] == [2, 2]
        assert append(store, one, batch(3, producer=7, sequence=5))[0].duplicate
        assert append(store, one, batch(1, producer=7, sequence=8))[0].base_offset == 8

        billing, late = (store.catalog.group("orders", name) for name in ("billing", "late"))
        assert billing.settings == GroupSettings(lease_ms=1000, max_attempts=3)
        assert late.settings == GroupSettings(start=Start("latest"))
        assert store.usage.committed([billing, late], [one, two]) == {
            billing.id: {one: 2, two: 5},
            late.id: {one: 8, two: 4},
        }
        assert [m.name for m in store.progress.members(billing.id)] == ["ann"]
        (backlog,) = store.progress.backlog(billing, [one], open_spans=9)
        assert (backlog.committed, backlog.cursor, backlog.open) == (2, 6, ((2, 2), (5, 5)))
        assert store.progress.settle(billing, one, 1, acks((5, 5))).lost == ()  # by its old token
        clock.ms += 5000
        granted = store.progress.poll(billing, one, ask(5, 9), log_start=0)
        assert [(d.first, d.last, d.attempt) for d in granted.deliveries] == [(2, 2, 2), (6, 8, 1)]
        assert spans(store.progress.poll(late, two, ask(6, 5))) == [(4, 4)]

        ticks = store.catalog.create_topic("ticks", TopicSettings(storage="volatile"), 1)
        assert ticks.id == 2 and partitions(ticks) == [3]  # ids are never used again (I11)
        append(store, 3, batch(2))
    assert versions(path) == dict.fromkeys(Area, VERSION)
    open_sqlite(tmp_path / "new.db").close()
    assert shape(path) == shape(tmp_path / "new.db")


def test_a_query_from_before_there_were_owners_is_whoever_uses_it_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I23: a stream that runs through the upgrade goes on; then it is its own."""
    build(tmp_path / "store.db", 7, monkeypatch)
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection, connection:
        row = ("q", 3, msgspec.msgpack.encode({"s": 5}), 1)
        connection.execute("INSERT INTO postroom_queries VALUES (?, ?, ?, ?)", row)
    with closing(open_sqlite(tmp_path / "store.db")) as store:
        assert store.staging.known("q") == StagedQuery(3, {"s": 5})
        assert store.staging.drop("q", 4) == 0  # as the duty does that drops what is old
        assert store.staging.known("q").owner is None
        assert store.staging.decide("q", 4, Wish(), 7, owner="shop").batch == 4
        with pytest.raises(PermissionDenied):
            store.staging.decide("q", 5, Wish(), 7, owner="evil")
        assert store.staging.known("q").owner == "shop"


def test_a_new_store_has_this_version_in_all_files(tmp_path: Path) -> None:
    open_sqlite(tmp_path / "new.db").close()
    assert versions(tmp_path / "new.db") == dict.fromkeys(Area, VERSION)
    before = dump(tmp_path / "new.db")
    open_sqlite(tmp_path / "new.db").close()
    assert dump(tmp_path / "new.db") == before


def add_version(monkeypatch: pytest.MonkeyPatch, *statements: str) -> None:
    """A version of tomorrow, so that the way upwards is walked even while there is only one."""
    areas = {
        Area.LOG: ("ALTER TABLE postroom_topics ADD COLUMN colour TEXT", *statements),
        Area.PROGRESS: ("CREATE TABLE postroom_extra (id {serial}, data {blob})",),
        Area.VOLATILE: ("ALTER TABLE postroom_trims ADD COLUMN extra INTEGER NOT NULL DEFAULT 0",),
    }
    monkeypatch.setitem(MIGRATIONS, VERSION + 1, areas)
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
    assert versions(path) == dict.fromkeys(Area, VERSION + 1)
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
        add_version(patch, "CREATE TABLE postroom_topics (id INTEGER)")
        with pytest.raises(StoreError, match="already exists"):
            open_sqlite(path)
    assert dump(path) == before
    open_sqlite(path).close()


# ---- newer ------------------------------------------------------------------------------------------------


def write_version(file: Path, version: int) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("INSERT INTO postroom_schema (version, applied_at) VALUES (?, 0)", (version,))


@pytest.mark.parametrize("area", list(Area))
def test_a_newer_store_is_refused_and_left_alone(tmp_path: Path, area: Area) -> None:
    path = tmp_path / "orders.db"
    open_sqlite(path).close()
    write_version(files(path)[area], VERSION + 3)
    before = dump(path)
    with pytest.raises(SchemaMismatch, match=f"schema version {VERSION + 3}") as caught:
        open_sqlite(path)
    assert caught.value.details == {"found": VERSION + 3, "known": VERSION}
    assert not caught.value.retriable
    assert dump(path) == before


@pytest.mark.parametrize("area", [Area.PROGRESS, Area.VOLATILE])
def test_a_log_is_not_made_beside_newer_files(tmp_path: Path, area: Area) -> None:
    """All versions are looked at before any file is changed."""
    path = tmp_path / "orders.db"
    open_sqlite(path).close()
    write_version(files(path)[area], VERSION + 1)
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    with pytest.raises(SchemaMismatch):
        open_sqlite(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (0,)
