"""What is flushed, and when (I8): the log always, progress only where losing it would do harm.

First as SQLite is told (`PRAGMA synchronous` when each transaction is committed), then as the system sees
it (`strace` counts the flushes of each verb).
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.model.delivery import Kind, Settlement, Stamp
from penstock.model.settings import GroupSettings, Start, TopicSettings
from penstock.store import SqlStore, open_sqlite, sqlite
from penstock.store.contract import Group
from penstock.store.session import Lane
from penstock.testing.store_contract.harness import (
    LEASE,
    MovableClock,
    acks,
    append,
    ask,
    batch,
    in_threads,
    partitions,
)

NORMAL, FULL = 1, 2
DEAD = Stamp(producer_id=77, partition_id=9)


class Scene:
    """A group that holds offsets 0 to 9 under token 1 and has 90 before it; each commit is written down."""

    def __init__(self, path: Path) -> None:
        self.clock = MovableClock()
        store = open_sqlite(path, self.clock)
        assert isinstance(store, SqlStore)
        self.store = store
        self.log, self.catalog, self.progress = store.log, store.catalog, store.progress
        (self.place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        settings = GroupSettings(lease_ms=LEASE, max_attempts=3)
        self.group: Group = store.catalog.create_group("orders", "billing", settings)
        self.other = store.catalog.create_group("orders", "other", settings)
        append(store, self.place, batch(100))
        store.progress.poll(self.group, self.place, ask(1, 100, messages=10))

    def poll(self, token: int, **more: Any) -> object:
        return self.progress.poll(self.group, self.place, ask(token, 100, messages=5, **more))

    def settle(self, kind: Kind, offset: int, stamp: Stamp | None = None) -> object:
        settlement = Settlement(kind, offset, offset, visible_at=self.clock.ms, stamp=stamp)
        return self.progress.settle(self.group, self.place, 1, [settlement])

    def expire(self) -> None:
        self.clock.ms += LEASE

    def leave_stamped(self) -> None:
        """One was stamped, and its mover went away; nothing else is due."""
        self.settle(Kind.MOVE, 3, DEAD)
        self.progress.settle(self.group, self.place, 1, acks((0, 2), (4, 9)))
        self.clock.ms += 60_000

    def reset(self) -> None:
        self.group = self.catalog.reset_group("orders", "billing", Start())


def nothing(scene: Scene) -> None:
    pass


Step = Callable[[Scene], object]

FLUSHED: dict[str, tuple[Step, Step]] = {  # name → what happens before, the verb
    "append": (nothing, lambda s: append(s.store, s.place, batch())),
    "trim": (nothing, lambda s: s.log.trim(s.place, 1)),
    "create a group": (nothing, lambda s: s.catalog.create_group("orders", "more", GroupSettings())),
    "reset a group": (nothing, Scene.reset),
    "delete a group": (nothing, lambda s: s.catalog.delete_group("orders", "other")),
    "first touch of a partition": (
        nothing,
        lambda s: s.progress.poll(s.other, s.place, ask(1, 100, messages=5)),
    ),
    "rewind": (Scene.reset, lambda s: s.progress.rewind(s.group, [s.place])),
    "forget": (nothing, lambda s: s.progress.forget(s.group.id)),
    "redelivery after a lease ended": (Scene.expire, lambda s: s.poll(2)),
    "redelivery of a retry": (lambda s: s.settle(Kind.RETRY, 3), lambda s: s.poll(2)),
    "hand-out that settles": (nothing, lambda s: s.poll(2, on_delivery=True)),
    "stamp of a settlement": (nothing, lambda s: s.settle(Kind.MOVE, 3, DEAD)),
    "stamp taken over by a poll": (Scene.leave_stamped, lambda s: s.poll(2)),
    "seize": (nothing, lambda s: s.progress.seize(s.group, s.place, ask(2, 100), [(20, 21)])),
}
LAZY: dict[str, tuple[Step, Step]] = {
    "first hand-out": (nothing, lambda s: s.poll(2)),
    "the same poll again": (nothing, lambda s: s.poll(1)),
    "ack": (nothing, lambda s: s.settle(Kind.ACK, 3)),
    "retry": (nothing, lambda s: s.settle(Kind.RETRY, 3)),
    "release": (nothing, lambda s: s.settle(Kind.RELEASE, 3)),
    "extend": (nothing, lambda s: s.progress.extend(s.group, s.place, 1, [(0, 9)])),
    "join": (nothing, lambda s: s.progress.join(s.group.id, "ann", "host", 1000)),
    "leave": (
        lambda s: s.progress.join(s.group.id, "ann", "host", 1000),
        lambda s: s.progress.leave(s.group.id, "ann"),
    ),
}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "orders.db")
    with closing(made.store):
        yield made


def commits(scene: Scene, verb: Step, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Lane, int]]:
    """Lane and `synchronous` of every commit of the verb that changes something."""
    found = []
    dialect = scene.store.session.dialect
    begin, end = dialect.begin, dialect.end
    changes = {}

    def watched_begin(connection: sqlite3.Connection, lane: Lane, *, flush: bool) -> None:
        begin(connection, lane, flush=flush)
        changes[lane] = connection.total_changes

    def watched_end(connection: sqlite3.Connection, lane: Lane, *, commit: bool) -> None:
        if commit and connection.total_changes != changes[lane]:
            found.append((lane, pragma(connection, "synchronous")))
        end(connection, lane, commit=commit)

    with monkeypatch.context() as patch:
        patch.setattr(dialect, "begin", watched_begin)
        patch.setattr(dialect, "end", watched_end)
        verb(scene)
    return found


def pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


# ---- as SQLite is told ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLUSHED)
def test_what_must_not_be_lost_is_flushed(scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, verb = FLUSHED[name]
    before(scene)
    found = commits(scene, verb, monkeypatch)
    assert found
    assert {level for _, level in found} == {FULL}


@pytest.mark.parametrize("name", LAZY)
def test_what_only_costs_a_redelivery_is_not(
    scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, verb = LAZY[name]
    before(scene)
    assert commits(scene, verb, monkeypatch) == [(Lane.PROGRESS, NORMAL)]


def test_a_flushed_verb_does_not_make_later_ones_flush(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        taken = [(20 + number, 20 + number)]
        seize: Step = lambda s, n=number, t=taken: s.progress.seize(s.group, s.place, ask(9 + n, 100), t)  # noqa: E731
        assert commits(scene, seize, monkeypatch) == [(Lane.PROGRESS, FULL)]
        ack: Step = lambda s, n=number: s.settle(Kind.ACK, n)  # noqa: E731
        assert commits(scene, ack, monkeypatch) == [(Lane.PROGRESS, NORMAL)]


def levels(store: SqlStore) -> dict[Lane, tuple[int, str, int]]:
    """Of this thread's connections: synchronous, journal, and how many files are attached."""
    found = {}
    for lane in Lane:
        connection = store.session._connection(lane)
        attached = connection.execute("PRAGMA database_list").fetchall()
        found[lane] = (pragma(connection, "synchronous"), pragma(connection, "journal_mode"), len(attached))
    return found


def test_every_connection_is_told_whatever_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some builds of SQLite do not flush in WAL mode unless told to. In every thread, and beside watchers."""

    class Careless(sqlite._Connection):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.execute("PRAGMA synchronous=OFF")

    monkeypatch.setattr(sqlite, "_Connection", Careless)
    store = open_sqlite(tmp_path / "orders.db")
    assert isinstance(store, SqlStore)
    expected = {Lane.LOG: (FULL, "wal", 1), Lane.PROGRESS: (NORMAL, "wal", 1)}
    with closing(store):
        assert levels(store)[Lane.LOG] == expected[Lane.LOG]
        for _ in range(5):  # connections that come and go: the memory of one must not pass for another's
            store.watch().close()
            assert in_threads(lambda: levels(store), lambda: levels(store)) == [expected] * 2


def test_log_and_progress_are_two_files(scene: Scene) -> None:
    found = [pragma_files(scene.store, lane) for lane in Lane]
    assert found[0] == f"{found[1]}".removesuffix(".progress") != found[1]


def pragma_files(store: SqlStore, lane: Lane) -> str:
    return str(store.session._connection(lane).execute("PRAGMA database_list").fetchone()[2])


# ---- as the system sees it --------------------------------------------------------------------------------

MARK = "penstock-verb:"


def traced(folder: Path) -> None:
    """Run every verb in turn, with a mark before each that `strace` shows between the flushes."""
    for name, (before, verb) in {**FLUSHED, **LAZY}.items():
        scene = Scene(folder / f"{name.replace(' ', '-')}.db")
        before(scene)
        scene.progress.join(scene.group.id, "bob", "host", 1000)  # so that the write-ahead log has begun
        print(f"{MARK}{name}", file=sys.stderr, flush=True)
        verb(scene)
        print(f"{MARK}end", file=sys.stderr, flush=True)
        scene.store.close()


def flushes(trace: str) -> dict[str, int]:
    """How many flushes follow each mark."""
    found: dict[str, int] = {}
    name = "end"
    for line in trace.splitlines():
        mark = re.search(rf'write\(2, "{MARK}([^"\\]+)', line)
        if mark:
            name = mark[1]
        elif re.search(r"\b(fsync|fdatasync)\(", line):
            found[name] = found.get(name, 0) + 1
        found.setdefault(name, 0)
    return found


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace; the levels were checked above")
def test_the_system_flushes_for_those_verbs_and_no_others(tmp_path: Path) -> None:
    output = tmp_path / "trace"
    strace = ["strace", "-f", "-qq", "-s", "80", "-e", "trace=fsync,fdatasync,write", "-o", str(output)]
    command = [*strace, sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if "ptrace" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("strace is not allowed to trace here")
    assert done.returncode == 0, done.stderr
    found = flushes(output.read_text())
    assert set(found) - {"end"} == {*FLUSHED, *LAZY}
    assert {name: found[name] for name in FLUSHED if found[name] == 0} == {}
    assert {name: found[name] for name in LAZY if found[name] > 0} == {}
    print({name: found[name] for name in FLUSHED})


if __name__ == "__main__":
    traced(Path(sys.argv[1]))
