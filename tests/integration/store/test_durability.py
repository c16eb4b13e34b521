"""What is flushed, and when (I8): the log always, progress only where losing it would do harm, and
volatile topics never (R3).

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postroom.model.delivery.delivery import Kind, OrderedAsk, Settlement, Stamp
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append, Group
from postroom.store.dialects import sqlite
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import (
    LEASE,
    MovableClock,
    acks,
    append,
    ask,
    batch,
    in_threads,
    partitions,
)
from tests.integration.store.pooled import pooled

ROOT = Path(__file__).resolve().parents[3]
OFF, NORMAL, FULL = 0, 1, 2
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
        in_order = replace(settings, mode="ordered", exhausted="stop")
        self.ordered = store.catalog.create_group("orders", "ordered", in_order)
        (self.ticks,) = partitions(store.catalog.create_topic("ticks", TopicSettings(storage="volatile"), 1))
        append(store, self.place, batch(100))
        append(store, self.ticks, batch(100))
        store.progress.poll(self.group, self.place, ask(1, 100, messages=10))
        self.progress.rewind(self.ordered, [self.place])

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

    def hold(self, token: int = 7, expects: int | None = None) -> object:
        asked = OrderedAsk("ann", token, messages=5, end=100, expects=expects)
        return self.progress.poll_ordered(self.ordered, self.place, asked)

    def settle_in_order(self, kind: Kind) -> object:
        settlement = Settlement(kind, 0, 0, visible_at=self.clock.ms)
        return self.progress.settle(self.ordered, self.place, 7, [settlement])

    def stop(self) -> None:
        self.hold()
        for _ in range(3):
            self.settle_in_order(Kind.RETRY)

    def touch(self) -> object:
        return self.store.usage.touch(self.other.id)

    def retire(self) -> object:
        return self.store.usage.retire(self.other.id, 0)

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
    "retire a group": (Scene.touch, Scene.retire),
    "take a partition": (nothing, Scene.hold),
    "take over a partition": (lambda s: (s.hold(), s.expire()), lambda s: s.hold(8)),
    "hand over a partition": (Scene.hold, lambda s: s.progress.hand_over(s.ordered, s.place, 7)),
    "restart what was stopped": (Scene.stop, lambda s: s.progress.restart_stopped(s.ordered, s.place)),
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
    "touch a group": (Scene.touch, Scene.touch),
    "next poll of a held partition": (Scene.hold, lambda s: s.hold(expects=5)),
    "ack in order": (Scene.hold, lambda s: s.settle_in_order(Kind.ACK)),
    "extend a held partition": (Scene.hold, lambda s: s.progress.extend(s.ordered, s.place, 7, [(0, 4)])),
}
VOLATILE: dict[str, tuple[Step, Step]] = {
    "volatile append": (nothing, lambda s: append(s.store, s.ticks, batch())),
    "volatile trim": (nothing, lambda s: s.log.trim(s.ticks, 50)),
    "volatile sweep": (lambda s: s.log.trim(s.ticks, 100), lambda s: s.log.sweep(s.ticks, rows=9)),
}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "orders.db")
    with closing(made.store):
        yield made


def commits(scene: Scene, verb: Step, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Area, int]]:
    """Lane and `synchronous` of every commit of the verb that changes something."""
    found = []
    dialect = scene.store.session.dialect
    begin, end = dialect.begin, dialect.end
    changes = {}

    def watched_begin(
        connection: sqlite3.Connection, area: Area, *, flush: bool, at_once: bool = False
    ) -> None:
        begin(connection, area, flush=flush, at_once=at_once)
        changes[area] = connection.total_changes

    def watched_end(connection: sqlite3.Connection, area: Area, *, commit: bool) -> None:
        if commit and connection.total_changes != changes[area]:
            found.append((area, pragma(connection, "synchronous")))
        end(connection, area, commit=commit)

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
    assert commits(scene, verb, monkeypatch) == [(Area.PROGRESS, NORMAL)]


@pytest.mark.parametrize("name", VOLATILE)
def test_volatile_topics_are_never_flushed(scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, verb = VOLATILE[name]
    before(scene)
    assert commits(scene, verb, monkeypatch) == [(Area.VOLATILE, OFF)]


def test_volatile_and_durable_batches_of_one_call_are_two_transactions(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [Append(place, batch()) for place in (scene.ticks, scene.place, scene.ticks)]
    found = commits(scene, lambda s: s.log.append(calls), monkeypatch)
    assert sorted(found, key=str) == [(Area.LOG, FULL), (Area.VOLATILE, OFF)]


def test_a_flushed_verb_does_not_make_later_ones_flush(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        taken = [(20 + number, 20 + number)]
        seize: Step = lambda s, n=number, t=taken: s.progress.seize(s.group, s.place, ask(9 + n, 100), t)  # noqa: E731
        assert commits(scene, seize, monkeypatch) == [(Area.PROGRESS, FULL)]
        ack: Step = lambda s, n=number: s.settle(Kind.ACK, n)  # noqa: E731
        assert commits(scene, ack, monkeypatch) == [(Area.PROGRESS, NORMAL)]


def levels(store: SqlStore) -> dict[Area, tuple[int, str, int]]:
    """Of the connections that are free: synchronous, journal, and how many files are attached."""
    found = {}
    for area in Area:
        with store.session.read(area) as tx:
            connection = tx.connection
            attached = connection.execute("PRAGMA database_list").fetchall()
            journal = pragma(connection, "journal_mode")
            found[area] = (pragma(connection, "synchronous"), journal, len(attached))
    return found


def test_every_connection_is_told_whatever_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some builds of SQLite do not flush in WAL mode unless told to. In every thread, and beside watchers.

    A progress connection flushes until a verb tells it that it need not.
    """

    class Careless(sqlite._Connection):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.execute("PRAGMA synchronous=OFF")

    monkeypatch.setattr(sqlite, "_Connection", Careless)
    store = open_sqlite(tmp_path / "orders.db")
    assert isinstance(store, SqlStore)
    expected = {Area.LOG: (FULL, "wal", 1), Area.PROGRESS: (FULL, "wal", 1), Area.VOLATILE: (OFF, "wal", 1)}
    with closing(store):
        assert levels(store) == expected
        for _ in range(5):  # connections that come and go: the memory of one must not pass for another's
            store.watch().close()
            assert in_threads(lambda: levels(store), lambda: levels(store)) == [expected] * 2


def test_each_lane_is_a_file(scene: Scene) -> None:
    log, progress, volatile = (
        file_of(scene.store, area) for area in (Area.LOG, Area.PROGRESS, Area.VOLATILE)
    )
    assert (progress, volatile) == (f"{log}.progress", f"{log}.volatile")


def file_of(store: SqlStore, area: Area) -> str:
    return str(pooled(store, area).execute("PRAGMA database_list").fetchone()[2])


# ---- as the system sees it --------------------------------------------------------------------------------

MARK = "postroom-verb:"


def traced(folder: Path) -> None:
    """Run every verb in turn, with a mark before each that `strace` shows between the flushes."""
    for name, (before, verb) in {**FLUSHED, **LAZY, **VOLATILE}.items():
        scene = Scene(folder / f"{name.replace(' ', '-')}.db")
        before(scene)
        scene.progress.join(scene.group.id, "bob", "host", 1000)  # so that the write-ahead logs have begun
        append(scene.store, scene.ticks, batch())
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
    command = [*strace, sys.executable, "-m", "tests.integration.store.test_durability", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    if "ptrace" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("strace is not allowed to trace here")
    assert done.returncode == 0, done.stderr
    found = flushes(output.read_text())
    assert set(found) - {"end"} == {*FLUSHED, *LAZY, *VOLATILE}
    assert {name: found[name] for name in FLUSHED if found[name] == 0} == {}
    assert {name: found[name] for name in (*LAZY, *VOLATILE) if found[name] > 0} == {}
    print({name: found[name] for name in FLUSHED})


if __name__ == "__main__":
    traced(Path(sys.argv[1]))
