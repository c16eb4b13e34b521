"""Reads beside changes, at the worst moment: between two statements of one verb.

A read is not a transaction: each statement sees what was committed when it starts. The change is made by
another store from the trace of the reader's connection, right before the statement that is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from postroom.errors import UnknownPartition, UnknownTopic
from postroom.model.delivery.delivery import OrderedAsk
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append, Group, Store, Topic
from postroom.store.sql.schema import log_table
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import (
    MovableClock,
    acks,
    append,
    ask,
    batch,
    partitions,
    read_all,
)
from tests.integration.store.pooled import pooled


class Scene:
    """Two stores on one file; what `other` does happens in the middle of a read of `store`."""

    def __init__(self, path: Path) -> None:
        self.clock = MovableClock()
        store, other = open_sqlite(path, self.clock), open_sqlite(path, self.clock)
        assert isinstance(store, SqlStore)
        self.store, self.other = store, other
        self.topic: Topic = store.catalog.create_topic("orders", TopicSettings(), 1)
        (self.place,) = partitions(self.topic)
        self.group: Group = store.catalog.create_group("orders", "billing", GroupSettings())

    @contextmanager
    def before(
        self, statement: str, change: Callable[[Store], object], area: Area = Area.LOG
    ) -> Iterator[None]:
        waiting = [change]

        def traced(sql: str) -> None:
            if statement in sql and waiting:
                waiting.pop()(self.other)

        connection = pooled(self.store, area)
        connection.set_trace_callback(traced)
        try:
            yield
        finally:
            connection.set_trace_callback(None)
        assert not waiting, f"{statement!r} was not run"

    def sweep(self, below: int) -> Callable[[Store], object]:
        def change(store: Store) -> None:
            store.log.trim(self.place, below)
            store.log.sweep(self.place, rows=1000)

        return change


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "orders.db")
    with closing(made.store), closing(made.other):
        yield made


@pytest.mark.parametrize("statement", ["SELECT next_offset", "SELECT base_offset, records, appended_at"])
@pytest.mark.parametrize("below", [1, 50, 99, 100])
@pytest.mark.timeout(20)
def test_a_time_is_found_though_the_log_is_swept_meanwhile(scene: Scene, below: int, statement: str) -> None:
    for _ in range(50):
        append(scene.store, scene.place, batch(2))
        scene.clock.ms += 10
    with scene.before(statement, scene.sweep(below)):
        found = scene.store.log.offset_at(scene.place, scene.clock.ms - 100)
    assert found == max(80, below // 2 * 2)


def test_a_read_goes_on_behind_what_was_swept_meanwhile(scene: Scene) -> None:
    append(scene.store, scene.place, batch(2), batch(2), batch(2))
    with scene.before("SELECT base_offset, records, appended_at, batch", scene.sweep(4)):
        found = scene.store.log.read(scene.place, 0, max_messages=2, max_bytes=1)
    assert [piece.base_offset for piece in found] == [4]


@pytest.mark.parametrize("statement", ["FROM postroom_ranges", "SELECT name FROM postroom_topics"])
def test_a_topic_deleted_while_it_is_read_is_unknown(scene: Scene, statement: str) -> None:
    name = "orders" if "ranges" in statement else "nothing"
    with (
        scene.before(statement, lambda other: other.catalog.delete_topic("orders")),
        pytest.raises(UnknownTopic),
    ):
        scene.store.catalog.topic(name)


def test_topics_are_listed_while_one_is_deleted(scene: Scene) -> None:
    scene.store.catalog.create_topic("stays", TopicSettings(), 1)
    with scene.before("FROM postroom_topics ORDER", lambda other: other.catalog.delete_topic("orders")):
        assert [topic.name for topic in scene.store.catalog.topics()] == ["stays"]


def drop(other: Store) -> None:
    for place in other.catalog.delete_topic("orders"):
        other.catalog.drop_log(place)


def test_a_log_dropped_while_it_is_read_is_unknown(scene: Scene) -> None:
    append(scene.store, scene.place, batch(2))
    with (
        scene.before("SELECT base_offset, records, appended_at, batch", drop),
        pytest.raises(UnknownPartition),
    ):
        scene.store.log.read(scene.place, 0, max_messages=2, max_bytes=1)


def test_a_log_dropped_while_a_backlog_is_measured_is_unknown(scene: Scene) -> None:
    append(scene.store, scene.place, batch(2))
    with scene.before("SELECT next_offset, next_bytes", drop), pytest.raises(UnknownPartition):
        scene.store.progress.backlog(scene.group, [scene.place])


def test_a_backlog_is_measured_while_the_log_is_swept(scene: Scene) -> None:
    """What is still there has its size and its age, though the group's own place is gone."""
    append(scene.store, scene.place, batch(2), batch(2))
    scene.clock.ms += 500
    append(scene.store, scene.place, batch(3))
    scene.clock.ms += 100
    with scene.before("SELECT next_offset, next_bytes", scene.sweep(4)):
        (found,) = scene.store.progress.backlog(scene.group, [scene.place])
    assert (found.bytes, found.oldest_age_ms, found.end) == (len(batch(3)), 100, 7)


@pytest.mark.parametrize(
    ("statement", "area", "expected"),
    [("FROM postroom_progress", Area.PROGRESS, 10), ("FROM postroom_groups g", Area.LOG, 0)],
)
def test_committed_is_never_ahead_of_what_is_settled(
    scene: Scene, statement: str, area: Area, expected: int
) -> None:
    """Retention trusts it. Before each of its two looks everything moves on by ten."""
    store, place, group = scene.store, scene.place, scene.group
    append(store, place, batch(30))
    store.progress.poll(group, place, ask(1, 30, messages=10))

    def move_on(other: Store) -> None:
        other.progress.poll(group, place, ask(2, 30, messages=10))
        other.progress.settle(group, place, 1, acks((0, 9)))

    with scene.before(statement, move_on, area):
        assert store.progress.committed(group.id, place) == expected


@pytest.mark.parametrize(
    ("statement", "area"), [("FROM postroom_progress", Area.PROGRESS), ("FROM postroom_starts", Area.LOG)]
)
def test_of_all_groups_too(scene: Scene, statement: str, area: Area) -> None:
    """A reset counts, whenever it comes (I19)."""
    store, place, group = scene.store, scene.place, scene.group
    append(store, place, batch(30))
    store.progress.poll(group, place, ask(1, 30, messages=10))
    store.progress.settle(group, place, 1, acks((0, 9)))

    def reset(other: Store) -> None:
        again = other.catalog.reset_group("orders", "billing", Start("offsets", offsets=((0, 4),)))
        other.progress.rewind(again, [place])

    with scene.before(statement, reset, area):
        assert store.usage.committed([group], [place]) == {group.id: {place: 4}}


def test_a_reset_between_reset_and_rewind_counts_for_retention(scene: Scene) -> None:
    """A crash may come between the two: what the group was sent back to must not be trimmed away."""
    store, place, group = scene.store, scene.place, scene.group
    append(store, place, batch(30))
    store.progress.poll(group, place, ask(1, 30))
    store.progress.settle(group, place, 1, acks((0, 29)))
    assert store.progress.committed(group.id, place) == 30
    again = store.catalog.reset_group("orders", "billing", Start("offsets", offsets=((0, 4),)))
    assert store.progress.committed(group.id, place) is None
    assert store.catalog.start_of(group.id, place) == (again.generation, 4)


@pytest.mark.parametrize("statement", ["SELECT next_offset", "SELECT base_offset FROM"])
def test_what_is_sent_while_lost_batches_are_passed_over_is_kept(scene: Scene, statement: str) -> None:
    (place,) = partitions(scene.store.catalog.create_topic("ticks", TopicSettings(storage="volatile"), 1))
    append(scene.store, place, batch(3))
    with scene.store.session.write(Area.VOLATILE) as tx:
        tx.run(f"DELETE FROM {log_table(place)}")
    with scene.before(statement, lambda other: append(other, place, batch(2)), Area.VOLATILE):
        assert scene.store.log.skip_lost(place) == 3
    assert [piece.base_offset for piece in read_all(scene.store, place)] == [3]


# ---- lock, then look (I1) ---------------------------------------------------------------------------------


def statements(scene: Scene, area: Area, verb: Callable[[], object]) -> list[str]:
    """What the verb says to the database in its last transaction, without its arguments."""
    said: list[str] = []
    connection = pooled(scene.store, area)
    connection.set_trace_callback(said.append)
    try:
        verb()
    finally:
        connection.set_trace_callback(None)
    begun = max(number for number, sql in enumerate(said) if sql.startswith("BEGIN"))
    assert said[begun] == "BEGIN IMMEDIATE"
    return said[begun + 1 :]


def test_an_append_locks_its_partitions_first_and_in_order(scene: Scene) -> None:
    """On SQLite one lock is all; on the others this order is what keeps two appends from a deadlock."""
    places = partitions(scene.store.catalog.create_topic("wide", TopicSettings(), 5))
    calls = [
        Append(place, batch(producer=who))
        for who, place in enumerate([places[n] for n in (3, 0, 4, 1, 2, 0)])
    ]
    said = statements(scene, Area.LOG, lambda: scene.store.log.append(calls))
    locks = [int(sql.rsplit("=", 1)[1]) for sql in said[:5]]
    assert locks == sorted(places)
    assert all("FROM postroom_partitions" in sql for sql in said[:5])
    assert not any("FROM postroom_partitions" in sql for sql in said[5:])


@pytest.mark.parametrize("verb", ["touch", "retire"])
def test_activity_is_locked_first(scene: Scene, verb: str) -> None:
    usage, group = scene.store.usage, scene.group
    usage.touch(group.id)
    calls = {"touch": lambda: usage.touch(group.id), "retire": lambda: usage.retire(group.id, 0)}
    assert "FROM postroom_activity WHERE group_id" in statements(scene, Area.PROGRESS, calls[verb])[0]


ORDERED = OrderedAsk("ann", token=9, messages=5, end=5)


@pytest.mark.parametrize(
    "verb",
    ["poll", "settle", "extend", "seize", "rewind", "poll_ordered", "hand_over", "restart_stopped"],
)
def test_a_verb_on_progress_locks_its_row_first(scene: Scene, verb: str) -> None:
    progress, place = scene.store.progress, scene.place
    settings = GroupSettings(mode="ordered" if "_" in verb else "shared")
    group = scene.store.catalog.create_group("orders", "locks", settings)
    append(scene.store, place, batch(5))
    if settings.mode == "ordered":
        progress.poll_ordered(group, place, ORDERED)
    else:
        progress.poll(group, place, ask(1, 5, messages=2))
    verbs: dict[str, Callable[[], object]] = {
        "poll_ordered": lambda: progress.poll_ordered(group, place, ORDERED),
        "hand_over": lambda: progress.hand_over(group, place, 9),
        "restart_stopped": lambda: progress.restart_stopped(group, place),
        "poll": lambda: progress.poll(group, place, ask(2, 5)),
        "settle": lambda: progress.settle(group, place, 1, acks((0, 0))),
        "extend": lambda: progress.extend(group, place, 1, [(0, 0)]),
        "seize": lambda: progress.seize(group, place, ask(2, 5), [(3, 3)]),
        "rewind": lambda: progress.rewind(group, [place]),
    }
    said = statements(scene, Area.PROGRESS, verbs[verb])
    assert "FROM postroom_progress WHERE group_id" in said[0]
