"""Streams through splits, merges, moves, restarts and kills: every message once, and keys in order."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postroom.errors import DataLoss, InvalidSetting
from postroom.spark.options import Position, Reach, ReadOptions, Topics
from postroom.spark.planning import VERSION, Span
from postroom.spark.streaming import Stream
from tests.model.examples import examples
from tests.unit.spark.spark_world import SLOTS, Driver, Killed, World

OPTIONS = ReadOptions(
    Reach("sqlite:////nowhere.db"),
    Topics(names=("t",)),
    Position("startingOffsets", "earliest"),
    Position("endingOffsets", "latest"),
)
LATEST = replace(OPTIONS, start=Position("startingOffsets", "latest"))


class Streams(RuleBasedStateMachine):
    @initialize(partitions=st.integers(1, 3), latest=st.booleans(), before=st.integers(0, 5))
    def begin(self, partitions: int, latest: bool, before: int) -> None:
        self.world = World(partitions=partitions)
        self.world.send(0, before)
        self.begin_with(latest)
        self.missed: set[int] | None = None if latest else set()
        self.start(available_now=False)

    def begin_with(self, latest: bool) -> None:
        self.driver = Driver(LATEST if latest else OPTIONS, self.world)

    def start(self, available_now: bool) -> None:
        self.driver.start(available_now=available_now)
        self.pin()

    def pin(self) -> None:
        """A stream from "latest" misses what was there when its first batch was logged, and nothing else."""
        if self.missed is None and self.driver.offsets:
            stream = self.driver.stream
            assert stream is not None
            at = stream.decode(json.loads(self.driver.offsets[0])).at
            self.missed = {
                row[1]
                for n, log in self.world.logs.items()
                for row in log.rows[: at.get(("t", n), 0)]
                if row is not None
            }

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, 6))
    def send(self, slot: int, count: int) -> None:
        self.world.send(slot, count)

    @rule(which=st.integers(0, 7), what=st.sampled_from(["split", "merge", "move"]))
    def change(self, which: int, what: str) -> None:
        open_now = self.world.open
        getattr(self.world, what)(open_now[which % len(open_now)])

    @rule(limit=st.none() | st.integers(1, 5), kill=st.sampled_from([None, None, "logged", "ran"]))
    def step(self, limit: int | None, kill: str | None) -> None:
        try:
            self.driver.step(limit, kill=kill)
        except Killed:
            self.pin()
            self.start(available_now=False)
        self.pin()

    @rule(available_now=st.booleans())
    def restart(self, available_now: bool) -> None:
        self.start(available_now)

    @rule(limit=st.none() | st.integers(1, 5))
    def drain(self, limit: int | None) -> None:
        """A run with the trigger availableNow reads all that is there."""
        self.driver.run(limit)
        self.pin()
        assert self.missed is not None
        assert sorted(row[1] for row in self.driver.rows) == sorted(set(range(self.world.sent)) - self.missed)

    @precondition(lambda self: self.driver.commits)
    @rule(which=st.integers(0, 7))
    def drop(self, which: int) -> None:
        """Retention drops a sealed partition that the checkpoint says is read."""
        stream = self.driver.stream
        assert stream is not None
        read = stream.decode(json.loads(self.driver.offsets[self.driver.commits - 1])).sealed
        gone = sorted(n for _, n in read if n in self.world.logs)
        if gone:
            self.world.drop(gone[which % len(gone)])

    @invariant()
    def once(self) -> None:
        assert self.driver.repeated() == []

    @invariant()
    def in_order(self) -> None:
        """Of a slot, what is in a later batch was sent later."""
        newest: dict[int, int] = {}
        for batch in sorted(self.driver.sink):
            seen: dict[int, list[int]] = {}
            for slot, number in self.driver.sink[batch]:
                seen.setdefault(slot, []).append(number)
            for slot, numbers in seen.items():
                assert min(numbers) > newest.get(slot, -1)
                newest[slot] = max(numbers)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.drain(None)


Streams.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=25, deadline=None)
TestStreams = Streams.TestCase


def test_a_stream_from_latest_is_pinned_before_its_first_message() -> None:
    world = World()
    world.send(0, 5)
    driver = Driver(LATEST, world)
    driver.start()
    world.send(0, 2)  # between the two questions of where it begins
    with pytest.raises(Killed):
        driver.step(kill="logged")
    world.send(0, 3)
    driver.run()
    assert [number for _, number in driver.rows] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("kill", ["logged", "ran"])
def test_available_now_goes_on_when_only_the_first_batch_was_logged(kill: str) -> None:
    """The first batch is run again, and the end is not taken for reached."""
    world = World()
    world.send(0, 5)
    driver = Driver(OPTIONS, world)
    driver.start(available_now=True)
    with pytest.raises(Killed):
        driver.step(kill=kill)
    driver.run()
    assert len(driver.rows) == 5


def test_available_now_ends_though_messages_keep_coming() -> None:
    world = World()
    world.send(0, 10)
    driver = Driver(OPTIONS, world)
    driver.start(available_now=True)
    while driver.step(3):
        world.send(0, 5)
    assert len(driver.rows) == 10
    driver.run(7)
    assert len(driver.rows) == world.sent


def test_a_successor_waits_until_its_predecessor_is_read() -> None:
    world = World(partitions=1)
    world.send(0, 4)
    world.split(0)
    world.send(0, 1)
    driver = Driver(OPTIONS, world)
    driver.start()
    sizes = []
    while driver.step(2):
        sizes.append(len(driver.sink[len(driver.offsets) - 1]))
    assert sizes == [0, 2, 2, 0, 1]  # nothing, the old one, its seal, the new one


def test_little_is_held_back_until_it_is_enough_or_late() -> None:
    world = World()
    driver = Driver(replace(OPTIONS, min_offsets=10, max_delay_ms=60_000), world)
    driver.start()
    driver.step()
    world.send(0, 9)
    assert not driver.step()
    world.send(0, 1)
    assert driver.step()
    world.send(0, 1)
    driver.now += 59
    assert not driver.step()
    driver.now += 2
    assert driver.step()
    world.send(0, 1)
    driver.run()  # available now does not wait
    assert len(driver.rows) == 12


def test_dropped_before_it_was_read() -> None:
    world = World(partitions=1)
    world.send(0, 10)
    driver = Driver(OPTIONS, world)
    driver.start()
    driver.step()
    world.logs[0].start = 4
    with pytest.raises(DataLoss, match=r"4 offsets .* topic 't' partition 0, 0 to 3.*failOnDataLoss"):
        driver.step()
    lenient = Driver(replace(OPTIONS, fail_on_data_loss=False), world, lambda span: [(span.first, span.end)])
    lenient.offsets, lenient.commits = driver.offsets, driver.commits
    lenient.start()  # the batch that was logged is run again
    assert lenient.rows == [(0, 10)]  # whoever reads it steps over what is gone


@pytest.mark.parametrize("fail", [True, False])
def test_a_partition_that_is_gone_and_was_not_read(fail: bool) -> None:
    world = World(partitions=1)
    world.send(0, 3)
    driver = Driver(replace(OPTIONS, fail_on_data_loss=fail), world)
    driver.start()
    driver.step()
    world.send(0, 1)
    world.split(0)
    world.send(0, 2)
    world.drop(0)
    if fail:
        with pytest.raises(DataLoss, match="topic 't' partition 0: gone, and was not read to its end"):
            driver.step()
    else:
        assert driver.step()
        assert [number for _, number in driver.rows] == [4, 5]


@pytest.mark.parametrize("available_now", [True, False])
def test_read_to_the_end_and_dropped_after_a_split_is_no_loss(available_now: bool) -> None:
    """The stream was down, and never saw the seal."""
    world = World(partitions=1)
    world.send(0, 3)
    driver = Driver(OPTIONS, world)
    driver.run()
    world.split(0)
    world.send(0, 2)
    world.drop(0)
    driver.start(available_now=available_now)
    while driver.step():
        pass
    assert [number for _, number in driver.rows] == [0, 1, 2, 3, 4]


def test_dropped_after_it_was_restored_is_a_loss() -> None:
    """What ended before the stream's offset, or in another incarnation, is not what was read."""
    for wrong in ("end", "incarnation"):
        world = World(partitions=1)
        world.send(0, 3)
        driver = Driver(OPTIONS, world)
        driver.run()
        world.split(0)
        world.drop(0)
        if wrong == "end":
            world.removed[0] = 2  # one message and the seal, and the stream has read three
        else:
            world.incarnation = "second"
        driver.start()
        with pytest.raises(DataLoss, match="gone, and was not read"):
            driver.step()


# ---- a restored queue ----


def numbers(driver: Driver) -> list[int]:
    return [number for _, number in driver.rows]


@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("sent", [0, 500, 2000])
def test_a_queue_that_was_restored_is_noticed_at_once(sent: int, down: bool) -> None:
    """Also if it has grown past the offset that was read."""
    world = World(partitions=1)
    world.send(0, 1000)
    backup = world.backup()
    world.send(0, 1000)
    driver = Driver(OPTIONS, world)
    driver.start()
    while driver.step():
        pass
    world.restore(backup)
    world.send(0, sent)
    if down:
        driver.start()
    with pytest.raises(
        DataLoss,
        match=r"restored from an older backup .* topic 't' partition 0: offsets up to 1999 were read, and "
        rf"the log now ends at {999 + sent}\. To read again .* failOnDataLoss .* new checkpointLocation",
    ):
        driver.step()
    driver.options = replace(OPTIONS, fail_on_data_loss=False)
    driver.run()
    assert numbers(driver) == [*range(2000), *range(1000), *range(2000, 2000 + sent)]
    assert not driver.step()
    driver.options = OPTIONS
    world.send(0, 3)
    driver.run()  # from now on it is the log that was read
    assert len(driver.rows) == 3003 + sent


def test_a_restored_queue_that_has_all_that_was_read_goes_on() -> None:
    """Whoever restored it has said so; nothing of this partition was lost."""
    world = World(partitions=1)
    world.send(0, 5)
    driver = Driver(OPTIONS, world)
    driver.run()
    backup = world.backup()
    world.send(0, 5)
    world.restore(backup)
    world.incarnation = "second"
    world.send(0, 2)
    driver.run()
    assert len(driver.rows) == 7 and not driver.repeated()


def test_without_a_mark_the_incarnation_decides() -> None:
    for said in (True, False):
        world = World(partitions=1)
        world.send(0, 5)
        driver = Driver(OPTIONS, world)
        driver.run()
        world.send(0, 1)
        world.logs[0].start = 5  # retention has dropped the batch that was marked
        if said:
            world.incarnation = "second"
            with pytest.raises(DataLoss, match="restored"):
                driver.run()
        else:
            driver.run()
            assert len(driver.rows) == 6


@pytest.mark.parametrize("sent", [0, 10])
def test_restored_while_a_micro_batch_is_due_again(sent: int) -> None:
    """It was logged and not run: what is there now is not what it meant."""
    world = World(partitions=2)
    world.send(0, 2)
    world.send(SLOTS - 1, 4)
    backup = world.backup()
    world.send(0, 3)
    driver = Driver(OPTIONS, world)
    driver.start()
    driver.step()
    with pytest.raises(Killed):
        driver.step(kill="logged")
    world.restore(backup)
    world.send(0, sent)
    with pytest.raises(DataLoss, match="restored"):
        driver.start()
    driver.options = replace(OPTIONS, fail_on_data_loss=False)
    driver.run()
    assert sorted(numbers(driver)) == [*range(6), *range(9, 9 + sent)]


def test_a_partition_that_begins_again_has_another_name_as_a_source() -> None:
    """Else a sink that leaves out what it has written would leave out what is new."""
    world = World(partitions=1)
    world.send(0, 2)
    backup = world.backup()
    world.send(0, 2)
    names: list[tuple[str, int, int]] = []

    def read(span: Span) -> list[tuple[int, int]]:
        names.append((span.source, span.first, span.end))
        return world.read(span)

    driver = Driver(replace(OPTIONS, fail_on_data_loss=False), world, read)
    driver.run()
    world.restore(backup)
    world.send(0, 1)
    driver.run()
    world.restore(backup)
    world.send(0, 1)
    driver.run()
    assert names == [("t/0@1", 0, 4), ("t/0@1.1", 0, 3), ("t/0@1.2", 0, 3)]


def test_a_group_is_set_back_with_a_restored_queue() -> None:
    """What is not read again yet is not to be dropped."""
    world = World(partitions=1)
    world.send(0, 2)
    backup = world.backup()
    world.send(0, 2)
    driver = Driver(replace(OPTIONS, fail_on_data_loss=False, group="lake"), world)
    driver.run()
    assert world.groups["lake"] == {0: 4}
    world.restore(backup)
    driver.start()
    driver.step()
    assert world.groups["lake"] == {0: 0}


def test_a_checkpoint_of_version_1_goes_on() -> None:
    world = World(partitions=1)
    world.send(0, 3)
    driver = Driver(OPTIONS, world)
    driver.run()
    old = json.loads(driver.offsets[-1])
    driver.offsets[-1] = json.dumps({"v": 1, "topics": old["topics"], "ids": old["ids"]})
    world.send(0, 2)
    driver.run()
    assert len(driver.rows) == 5
    assert json.loads(driver.offsets[-1])["v"] == 2 and "marks" in json.loads(driver.offsets[-1])


# ---- topics that are made again ----


@pytest.mark.parametrize("restart", [True, False])
def test_a_topic_that_is_made_again_is_another_topic(restart: bool) -> None:
    world = World()
    world.send(0, 3)
    driver = Driver(OPTIONS, world)
    driver.run()
    world.make()
    world.send(0, 4)
    if restart:
        driver.start()
    with pytest.raises(DataLoss, match="topic 't' was deleted, and made again"):
        driver.step()
    driver.options = replace(OPTIONS, fail_on_data_loss=False)
    driver.run()
    assert [number for _, number in driver.rows] == [0, 1, 2, 3, 4, 5, 6]


def test_a_group_is_told_what_the_checkpoint_has_and_never_more() -> None:
    world = World(partitions=1)
    world.send(0, 3)
    driver = Driver(replace(LATEST, group="lake"), world)
    driver.start()
    assert world.groups["lake"] == {0: 3}  # nothing that comes from now on is dropped
    driver.step()
    world.send(0, 4)
    driver.step()
    assert world.groups["lake"] == {0: 3}
    driver.now += 2
    world.send(0, 1)
    with pytest.raises(Killed):
        driver.step(kill="logged")
    assert world.groups["lake"] == {0: 7}
    driver.run()
    assert world.groups["lake"] == {0: 8}


def test_a_group_is_not_told_all_the_time() -> None:
    world = World()
    driver = Driver(replace(OPTIONS, group="lake"), world)
    driver.start()
    for _ in range(20):
        world.send(0)
        driver.step()
        driver.now += 0.1
    assert 2 <= world.told <= 4


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"orders": 3}, "not written by a stream from Postroom"),
        ([], "not written by a stream from Postroom"),
        ({"v": VERSION + 1, "topics": {}}, "newer Postroom"),
        ({"v": VERSION, "topics": {"other": {"0": 3}}}, "of topic 'other', and this query reads 't'"),
        ({"v": VERSION, "topics": {"t": 3}}, "damaged"),
        ({"v": VERSION}, "damaged"),
    ],
)
def test_checkpoints_of_others(data: object, text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        Stream(OPTIONS).decode(data)
