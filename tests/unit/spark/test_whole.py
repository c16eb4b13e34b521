"""Streams under Spark 4.0 and 4.1: the same rules, and a run of one micro-batch reads everything."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from postroom.errors import InvalidSetting
from postroom.spark.options import Position
from postroom.spark.streaming import WholeStream, refuse_short_runs
from tests.model.examples import examples
from tests.unit.spark.spark_world import Driver, Killed, World
from tests.unit.spark.test_stream import LATEST, OPTIONS, Streams


class OldDriver(Driver):
    """Asks as Spark 4.0 does: it names the newest offsets of the checkpoint once, and then nothing."""

    def start(self, *, available_now: bool = False) -> None:
        self.stream = WholeStream(self.options, lambda: self.world, lambda: self.now)
        if self.offsets:
            seen = self.stream.decode(json.loads(self.offsets[-1]))
            assert self.stream.tasks(seen, seen) == []
        if len(self.offsets) > self.commits:
            self._run(len(self.offsets) - 1, None)

    def _next_end(self, batch: int, limit: int | None) -> str:
        assert isinstance(self.stream, WholeStream)
        return json.dumps(self.stream.next().encode())  # of a new stream before it is asked where that begins

    def run(self, limit: int | None = None) -> None:
        """With the trigger availableNow: one micro-batch."""
        self.start(available_now=True)
        self.step()


class WholeStreams(Streams):
    def begin_with(self, latest: bool) -> None:
        self.driver = OldDriver(LATEST if latest else OPTIONS, self.world)

    @rule(limit=st.none())
    def drain(self, limit: int | None) -> None:
        super().drain(None)


WholeStreams.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=25, deadline=None)
TestWholeStreams = WholeStreams.TestCase


@pytest.mark.parametrize("kill", ["logged", "ran"])
def test_a_stream_from_latest_is_pinned(kill: str) -> None:
    world = World()
    world.send(0, 5)
    driver = OldDriver(LATEST, world)
    driver.start()
    with pytest.raises(Killed):
        driver.step(kill=kill)
    world.send(0, 3)
    driver.run()
    assert [number for _, number in driver.rows] == [5, 6, 7]


def test_one_micro_batch_passes_through_all_successors() -> None:
    world = World(partitions=1)
    world.send(0, 3)
    world.split(0)
    world.send(0, 3)
    world.move(1)
    world.send(0, 3)
    driver = OldDriver(OPTIONS, world)
    driver.run()
    assert len(driver.offsets) == 1 and [number for _, number in driver.rows] == list(range(9))


def test_the_group_is_told_what_is_in_the_checkpoint() -> None:
    world = World(partitions=1)
    world.send(0, 3)
    driver = OldDriver(replace(OPTIONS, group="lake"), world)
    driver.start()
    driver.step()
    assert world.groups["lake"] == {0: 0}  # not committed for sure
    driver.now += 2
    driver.step()
    assert world.groups["lake"] == {0: 3}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (replace(OPTIONS, max_offsets=5), r"option maxOffsetsPerTrigger: it needs PySpark 4\.2 or newer"),
        (replace(OPTIONS, min_offsets=5), r"option minOffsetsPerTrigger: .* this is 4\.1\.4, .*leave it out"),
        (
            replace(OPTIONS, start=Position("startingOffsets", "offsets", at={("t", 0): 3, ("t", 1): -1})),
            r"option startingOffsets: -1 \(latest\) needs PySpark 4\.2",
        ),
    ],
)
def test_what_would_end_early_is_refused(wanted: object, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        refuse_short_runs(wanted, "4.1.4")  # type: ignore[arg-type]
    refuse_short_runs(LATEST, "4.1.4")
    refuse_short_runs(OPTIONS, "4.1.4")


@pytest.mark.parametrize("kill", [None, "logged", "ran"])
def test_a_newer_spark_goes_on_with_the_checkpoint(kill: str | None) -> None:
    world = World()
    world.send(0, 5)
    old = OldDriver(OPTIONS, world)
    old.start()
    if kill is None:
        old.step()
    else:
        with pytest.raises(Killed):
            old.step(kill=kill)
    world.split(0)
    world.send(0, 4)
    new = Driver(OPTIONS, world)
    new.offsets, new.commits, new.sink = old.offsets, old.commits, old.sink
    new.run(limit=2)
    assert [number for _, number in new.rows] == list(range(9))
