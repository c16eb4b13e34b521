"""The publisher on a store: what was decided is stored once, in order, wherever it is cut off (I20, I12).

The publisher is the broker's; the promises it leans on are the store's, so it is run on every store.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, product
from typing import Any

import pytest

from ...broker.moves.staged import FinishDecisions, Publisher
from ...config import DEFAULTS
from ...errors import PostroomError, StagingConflict, StoreUnavailable
from ...model.messages.batch import SEAL, build_control
from ...model.moves.staging import Decision
from ...model.policy.settings import TopicSettings
from ...model.topology.route import split
from ...store.contract import Store, StoredBatch, Topic
from .harness import MovableClock, StoreHarness, in_threads, partitions, read_all, values
from .moving import Cut, CutError
from .staging import stage, wish

__all__ = ["PublishContract"]

STEPS = ("stamp", "append", "finish")
KEYS = 7


def publisher(store: Any, **how: Any) -> Publisher:
    return Publisher(store, sleep=lambda seconds: None, move_messages=12, **how)


def topic_of(store: Store, parts: int = 2) -> Topic:
    return store.catalog.create_topic("pair", TopicSettings(), parts)


def staged(store: Store, topic: Topic, batch: int = 0, tasks: int = 2, rows: int = 5) -> list[list[str]]:
    """Tasks that have staged `rows` batches each, of a message for every key; what each of them staged."""
    sent = []
    for task in range(tasks):
        at, mine = 0, list[str]()
        for row in range(rows):
            some = [f"k{key}.{batch}.{task}.{row}" for key in range(KEYS)]
            at = stage(store, topic, "q", batch, f"task {task}", *some, first=at)
            mine += some
        sent.append(mine)
    return sent


def decided(store: Store, batch: int = 0, tasks: int = 2, rows: int = 5) -> Decision:
    return publisher(store).decide("q", batch, wish({f"task {task}": KEYS * rows for task in range(tasks)}))


def check(store: Store, topic: str, sent: list[list[str]]) -> None:
    """Check that everything is there once, and that what one task wrote for one key is in order."""
    route = store.catalog.topic(topic).route
    found = [v.decode() for piece in route.partitions for v in values(read_all(store, piece.partition_id))]
    assert sorted(found) == sorted(value for task in sent for value in task)
    for task in sent:
        for key in range(KEYS):
            mine = [value for value in task if value.startswith(f"k{key}.")]
            there = set(mine)
            assert [value for value in found if value in there] == mine


def split_now(store: Store, topic: str, partition: int) -> None:
    old = store.catalog.topic(topic).route
    change = store.routes.begin(split(old, partition))
    store.routes.make(change)
    for piece in change.seals:
        store.log.seal(piece.partition_id, build_control(SEAL))
    store.routes.activate(change)


class PublishContract(StoreHarness):
    def test_what_was_decided_is_published_once_in_order(self, store: Store) -> None:
        topic = topic_of(store)
        sent = staged(store, topic)
        stage(store, topic, "q", 0, "a failed attempt", "k0.x", "k1.x")
        decided(store)
        told: list[tuple[int, StoredBatch]] = []
        for _ in range(2):
            done = publisher(store, moved=told.extend).publish("q", 0)
        check(store, "pair", sent)
        assert done.published_at > 0 and done.move is None
        assert sum(batch.records for _, batch in told) == 70
        for place, where in done.progress.places.items():
            log = read_all(store, place)
            assert (where.topic_id, where.first, where.last) == (topic.id, 0, log[-1].last_offset)
            assert where.messages == log[-1].last_offset + 1
        assert store.staging.unfinished() == []
        assert store.staging.drop("q", 0) == 2

    def test_rows_are_put_together_and_large_ones_are_not_opened(self, store: Store) -> None:
        topic = topic_of(store, 1)
        at = 0
        for row in range(30):
            at = stage(store, topic, "q", 0, "task", *(f"k.{row}.{n}" for n in range(10)), first=at)
        many = [f"k.many.{n}" for n in range(300)]
        at = stage(store, topic, "q", 0, "task", *many, first=at)
        Publisher(store).decide("q", 0, wish({"task": 600}))
        Publisher(store).publish("q", 0)
        assert [one.records for one in read_all(store, partitions(topic)[0])] == [300, 300]

    def test_what_was_not_decided_is_not_published(self, store: Store) -> None:
        staged(store, topic_of(store))
        with pytest.raises(StagingConflict, match="not decided"):
            publisher(store).publish("q", 0)
        publisher(store).decide("q", 0, wish({}))
        assert publisher(store).publish("q", 0).published_at > 0  # of nothing, at once

    def test_batches_follow_each_other(self, store: Store) -> None:
        """The second is decided before anybody has published the first."""
        topic = topic_of(store)
        sent = [staged(store, topic, batch) for batch in range(3)]
        for batch in range(3):
            decided(store, batch)
        publisher(store).publish("q", 2)
        one_after_the_other = [[v for batch in sent for v in batch[task]] for task in range(2)]
        check(store, "pair", one_after_the_other)

    def test_without_more_time_it_is_gone_on_with_later(self, store: Store, other: Store) -> None:
        topic = topic_of(store)
        sent = staged(store, topic)
        decided(store)
        turns = 0
        for turn in count():
            asked = iter((True, False, False))
            if publisher((store, other)[turn % 2]).publish("q", 0, lambda a=asked: next(a)).published_at:  # type: ignore[misc]
                break
            turns += 1
        assert turns >= 4
        check(store, "pair", sent)

    # ---- cut off ----

    def test_it_is_cut_off_at_every_step(self, store: Store, other: Store) -> None:
        """Before and after every verb of a publishing, each time of another batch."""
        topic, batch = topic_of(store), count()
        for step in STEPS:
            for after in (False, True):
                for call in count(1):
                    number = next(batch)
                    sent = staged(store, topic, number, tasks=1, rows=3)
                    decided(store, number, tasks=1, rows=3)
                    try:
                        publisher(Cut(store, step, after=after, call=call)).publish("q", number)
                        was_cut = False
                    except CutError:
                        was_cut = True
                    assert publisher(other).publish("q", number).published_at
                    there = _of_batch(store, "pair", number)
                    assert sorted(there) == sorted(sent[0])
                    for key in range(KEYS):
                        mine = [v for v in sent[0] if v.startswith(f"k{key}.")]
                        assert [v for v in there if v in set(mine)] == mine
                    if not was_cut:
                        break
                assert call > 1

    def test_publishers_cut_off_one_after_the_other_finish_it_in_the_end(
        self, store: Store, other: Store
    ) -> None:
        topic = topic_of(store)
        sent = staged(store, topic, rows=8)
        decided(store, rows=8)
        for turn, (step, after) in enumerate((s, a) for s in STEPS for a in (False, True)):
            with pytest.raises(CutError):
                publisher(Cut((store, other)[turn % 2], step, after=after)).publish("q", 0)
        publisher(store).publish("q", 0)
        check(store, "pair", sent)

    def test_a_decision_is_cut_off(self, store: Store, other: Store) -> None:
        topic = topic_of(store)
        segments = wish({"task 0": KEYS * 2})
        sent = list[str]()
        for batch, after in enumerate((False, True)):
            sent += staged(store, topic, batch, tasks=1, rows=2)[0]
            with pytest.raises(CutError):
                publisher(Cut(store, "decide", after=after)).decide("q", batch, segments)
            publisher(other).decide("q", batch, segments)
            publisher(other).publish("q", batch)
        check(store, "pair", [sent])

    def test_a_store_that_fails_for_a_while(self, store: Store) -> None:
        topic = topic_of(store)
        sent = staged(store, topic)
        decided(store)
        for _ in range(2):
            with pytest.raises(StoreUnavailable), self.failing_commits(store):
                publisher(store).publish("q", 0)
        publisher(store).publish("q", 0)
        check(store, "pair", sent)

    # ---- routes that change ----

    def test_a_partition_is_split_in_the_middle(self, store: Store, other: Store) -> None:
        """Between any two verbs of a publishing; a topic for each case."""
        cuts = [("stamp", 1), ("append", 2), ("finish", 1)]
        for batch, ((step, call), after) in enumerate(product(cuts, (False, True))):
            name = f"{step}-{call}-{after}"
            topic = store.catalog.create_topic(name, TopicSettings(), 2)
            sent = staged(store, topic, batch)
            decided(store, batch)
            with pytest.raises(CutError):
                publisher(Cut(store, step, after=after, call=call)).publish("q", batch)
            split_now(store, name, 0)
            done = publisher(other).publish("q", batch)
            check(store, name, sent)
            there = {place.partition_id: place.messages for place in done.progress.places.values()}
            assert sum(there.values()) == 70
            for piece in store.catalog.topic(name).route.partitions:
                assert len(values(read_all(store, piece.partition_id))) == there.get(piece.partition_id, 0)

    def test_a_sealed_partition_without_successors_is_waited_for(self, store: Store) -> None:
        """Somebody who was asked for help goes on with the change."""
        topic = topic_of(store)
        sent = staged(store, topic)
        decided(store)
        change = store.routes.begin(split(topic.route, 0))
        store.routes.make(change)
        asked: list[str] = []

        class Sealing(Cut):
            def call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
                if name == "append" and not self.done:
                    self.done = True
                    store.log.seal(change.seals[0].partition_id, build_control(SEAL))
                return verb(*args, **named)

        def help(name: str) -> None:
            asked.append(name)
            if len(asked) == 3:
                store.routes.activate(change)

        publisher(Sealing(store, "", after=False), help=help).publish("q", 0)
        assert asked == ["pair"] * 3
        check(store, "pair", sent)

    def test_rows_staged_before_and_after_a_split_keep_their_order(self, store: Store) -> None:
        topic = topic_of(store)
        at = stage(store, topic, "q", 0, "task 0", *(early := [f"k{key}.0" for key in range(KEYS)]))
        split_now(store, "pair", 0)
        newer = store.catalog.topic("pair")
        stage(store, newer, "q", 0, "task 0", *(late := [f"k{key}.1" for key in range(KEYS)]), first=at)
        publisher(store).decide("q", 0, wish({"task 0": 2 * KEYS}))
        publisher(store).publish("q", 0)
        check(store, "pair", [early + late])

    def test_a_topic_that_was_deleted_takes_its_rows_with_it(self, store: Store) -> None:
        topic, other = topic_of(store), store.catalog.create_topic("gone", TopicSettings(), 1)
        sent = staged(store, topic, tasks=1)
        stage(store, other, "q", 0, "task 1", *(f"k{key}.x" for key in range(KEYS)))
        publisher(store).decide("q", 0, wish({"task 1": KEYS, "task 0": KEYS * 5}))
        store.catalog.delete_topic("gone")
        done = publisher(store).publish("q", 0)
        assert (done.progress.dropped, done.published_at > 0) == (KEYS, True)
        check(store, "pair", sent)
        assert store.staging.drop("q", 0) == 0

    # ---- several at once ----

    def test_two_committers_at_once(self, store: Store, other: Store) -> None:
        topic = topic_of(store)
        sent = [staged(store, topic, batch, rows=6) for batch in range(3)]
        segments = wish({f"task {task}": KEYS * 6 for task in range(2)})

        def commit(through: Store) -> None:
            for batch in range(3):
                one = publisher(through)
                one.decide("q", batch, segments)
                assert one.publish("q", batch).published_at

        in_threads(lambda: commit(store), lambda: commit(other))
        check(store, "pair", [[v for batch in sent for v in batch[task]] for task in range(2)])

    def test_a_publisher_that_slept_does_no_harm(self, store: Store, other: Store) -> None:
        """The other one has published everything, or even more than is remembered, when it wakes up."""
        topic, all_sent = topic_of(store, 1), list[str]()

        class Asleep(Cut):
            def call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
                if name == self._verb and not self.done:
                    self.done = True
                    publisher(other).publish("q", batch)
                return verb(*args, **named)

        for batch, (step, rows) in enumerate(product(STEPS, (2, 30))):
            all_sent += staged(store, topic, batch, tasks=1, rows=rows)[0]
            decided(store, batch, tasks=1, rows=rows)
            assert publisher(Asleep(store, step, after=False)).publish("q", batch).published_at
        check(store, "pair", [all_sent])

    def test_an_error_of_unknown_fate_leaves_the_stamp_of_a_decision(self, store: Store) -> None:
        topic = topic_of(store)
        sent = staged(store, topic)
        decided(store)

        class Unsure(Cut):
            def call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
                result = verb(*args, **named)
                return [PostroomError("who knows")] if name == "append" else result

        with pytest.raises(PostroomError, match="who knows"):
            publisher(Unsure(store, "", after=False)).publish("q", 0)
        [left] = store.staging.unfinished()
        assert left.move is not None
        publisher(store).publish("q", 0)
        check(store, "pair", sent)

    # ---- the duty ----

    def test_what_its_job_has_left_is_published_by_the_duty(self, store: Store, clock: MovableClock) -> None:
        topic = topic_of(store)
        sent = staged(store, topic)
        decided(store)
        with pytest.raises(CutError):
            publisher(Cut(store, "append", after=True)).publish("q", 0)
        duty = FinishDecisions(store, publisher(store), DEFAULTS)
        duty.run_once()
        assert len(store.staging.unfinished()) == 1  # its job may be at it
        clock.ms += 60_000
        duty.run_once()
        check(store, "pair", sent)
        stage(store, topic, "q", 1, "task", "k0.x")
        clock.ms += DEFAULTS.staged_ms + 1
        duty.run_once()
        assert store.staging.drop("q", 1) == 0


def _of_batch(store: Store, topic: str, batch: int) -> list[str]:
    route = store.catalog.topic(topic).route
    found = [v.decode() for piece in route.partitions for v in values(read_all(store, piece.partition_id))]
    return [value for value in found if value.split(".")[1] == str(batch)]
