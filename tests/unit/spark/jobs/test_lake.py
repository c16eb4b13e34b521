"""Tables of the archive, each format: batches once and in order, whatever others do with the table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from postroom.errors import InvalidSetting, StagingConflict, UsageError
from postroom.spark.jobs.lake import Lake, Mark, SetBack, open_lake
from tests.unit.spark.jobs.lakes import WORLDS, filled, offsets, overtaken, written


@pytest.fixture(params=WORLDS, ids=lambda world: world.format)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(tmp_path / "lake")


def numbers(world: Any) -> list[int]:
    return [row["offset"] for row in world.rows()]


def test_batches_come_once(world: Any) -> None:
    lake: Lake = world.lake()
    assert lake.mark() is None
    with pytest.raises(UsageError, match="there is no archive of topic 'orders' in"):
        lake.check()
    first = filled(lake, None, range(10))
    assert first == Mark(1, offsets(10)) == world.lake().mark()
    files = written(lake, 2, range(10, 15))
    second = world.lake().append(first, files, offsets(15))
    with pytest.raises(StagingConflict, match="another run has written"):  # killed after it, and done again
        lake.append(first, written(lake, 2, range(10, 15)), offsets(15))
    with pytest.raises(StagingConflict, match="another run has written"):
        lake.create(offsets(0))
    assert lake.mark() == second
    third = lake.append(second, [], offsets(20))  # offsets may go on without rows
    assert lake.mark() == third == Mark(3, offsets(20))
    assert numbers(world) == list(range(15))
    row = world.rows()[3]
    assert (row["value"], str(row["date"]), row["headers"]) == (
        b"3",
        "2026-01-02",
        [{"key": "h", "value": b"x"}],
    )


def test_others_at_any_time(world: Any) -> None:
    """Between batches, and between the look at the table and the commit."""
    lake = world.lake()
    mark = filled(lake, None, range(10))
    between = (world.add_column, world.set_property, lambda: world.delete(3), world.rewrite)
    for step, others in enumerate(between, 1):
        others()
        mark = filled(lake, mark, range(10 * step, 10 * step + 10))
    for step, others in enumerate(
        (lambda: world.delete(5), world.rewrite, lambda: world.add_column("later"))
    ):
        files = written(lake, mark.batch + 1, range(50 + 10 * step, 60 + 10 * step))
        with overtaken(lake, others):
            mark = lake.append(mark, files, offsets(60 + 10 * step))
    assert numbers(world) == [n for n in range(80) if n not in (3, 5)]
    assert world.lake().mark() == mark
    assert lake.compact().files_after <= 4
    assert numbers(world) == [n for n in range(80) if n not in (3, 5)]
    assert world.lake().mark() == mark


def test_two_runs_at_once(world: Any) -> None:
    """A commit of the same number that was on its way all the time: one is there, the other is told."""
    lake, other = world.lake(), world.lake()
    mark = filled(lake, None, range(10))
    mine, theirs = written(lake, 2, range(10, 20)), written(other, 2, range(10, 15))
    first = overtaken(lake, lambda: other.append(mark, theirs, offsets(15)))
    with first, pytest.raises(StagingConflict, match="another run has written"):
        lake.append(mark, mine, offsets(20))
    assert numbers(world) == list(range(15)) and lake.mark() == Mark(2, offsets(15))


def test_the_mark_outlives_the_history(world: Any) -> None:
    lake = world.lake()
    mark = filled(lake, None, range(10))
    mark = filled(lake, mark, range(10, 15))
    for _ in range(25):
        world.set_property()
    world.clean_up()
    assert world.lake().mark() == mark
    mark = filled(world.lake(), mark, range(15, 20))
    assert numbers(world) == list(range(20)) and world.lake().mark() == mark


def test_set_back(world: Any) -> None:
    """It is as far as it was then, also for a run that is under way, and while it commits."""
    lake = world.lake()
    mark = filled(lake, None, range(10))
    late = filled(lake, mark, range(10, 20))
    world.set_back()
    assert numbers(world) == list(range(10))
    with pytest.raises(SetBack, match="was set back to an earlier version"):
        filled(lake, late, range(20, 30))
    now = lake.mark()
    assert now is not None and now.offsets == mark.offsets and now.batch >= late.batch
    again = filled(lake, now, range(10, 20))
    files = written(lake, again.batch + 1, range(20, 30))
    with overtaken(lake, world.set_back), pytest.raises(SetBack):
        lake.append(again, files, offsets(30))
    now = lake.mark()
    assert now is not None and now.offsets == mark.offsets and numbers(world) == list(range(10))


def test_refused(world: Any, tmp_path: Path) -> None:
    filled(world.lake(), None, range(10))
    world.add_column()
    world.widen()
    with pytest.raises(InvalidSetting, match=r"has another schema: column partition is .*undo that"):
        world.lake().mark()
    with pytest.raises(InvalidSetting, match="choose delta or iceberg"):
        open_lake(str(tmp_path), "orders", "hudi")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are not listed here")
def test_a_catalog_in_a_file_is_open_only_while_it_is_asked(tmp_path: Path) -> None:
    """A stream opens it for each batch, and nobody closes a table."""
    pytest.importorskip("pyiceberg")
    lake = open_lake(str(tmp_path), "orders", "iceberg")
    lake.create(offsets(0))
    kept = [lake.there() for _ in range(3)]
    open_files = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    assert len(kept) == 3 and [name for name in open_files if name.startswith(str(tmp_path))] == []
