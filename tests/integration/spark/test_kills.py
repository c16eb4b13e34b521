"""Drivers that are killed without warning, at every step of a batch: no row is lost, and none is there twice.

One driver runs all cases at once. When each has come to its step, the topics are split under it, messages are
sent, and the whole of it is killed; then all of it is run again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import pytest

import postroom
from postroom.spark.jobs.lake.delta import DeltaLake
from tests.integration.spark.killing import FEW, Case, archived, finished, listed

ROOT = Path(__file__).resolve().parents[3]
CHAOS_S = float(os.environ.get("POSTROOM_CHAOS_SECONDS", "0"))
"""How long it goes on after the first kill, with kills at steps by chance."""

MORE = {"maxOffsetsPerTrigger": "170"}
CASES = [
    Case("asked", "topic", "asked"),
    Case("pinned", "topic", "committed@0", start="latest"),
    Case("staged", "topic", "staged@1", options={**FEW, "minPartitions": "2"}),
    Case("decided", "topic", "decided@1"),
    Case("appended", "topic", "appended@1"),
    Case("committed", "topic", "committed@1"),
    Case("back", "topic", "committed@2"),
    Case("foreach", "foreach", "committed@1"),
    Case("files", "files", "reading", start="latest"),
    Case("lake-begun", "delta", "begun"),
    Case("lake-created", "delta", "created", start="latest"),
    Case("lake-writing", "delta", "writing@2"),
    Case("lake-written", "delta", "written@2"),
    Case("lake-appended", "delta", "appended@2"),
    Case("lake-back", "delta", "appended@2"),
]
SPLIT = ("pinned", "staged", "decided", "appended", "files", "lake-created", "lake-writing")
"""Their topics are split while they are at their step."""

STEPS = {
    "topic": ("staged", "decided", "appended", "committed"),
    "foreach": ("committed",),
    "files": ("planned", "reading"),
    "delta": ("writing", "written", "appended"),
}


def wait_for(true: Any, what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Kills:
    """What is sent to the topics of each case, and what has come of it."""

    def __init__(self, mq: Any, url: str, folder: Path) -> None:
        self.mq, self.url, self.folder = mq, url, folder
        self.expected: dict[str, list[int]] = {case.name: [] for case in CASES}
        self._next = 0

    def send(self, case: Case, count: int, *, expected: bool = True) -> None:
        some = range(self._next, self._next + count)
        self.mq.send_many(case.source, [postroom.Message(b"%d" % n, key=f"k{n % 7}") for n in some])
        if expected:
            self.expected[case.name] += some
        self._next += count

    def split(self, case: Case) -> None:
        """All topics of it, in the middle of what it does."""
        for topic in (case.source, case.target) if case.into in ("topic", "foreach") else (case.source,):
            self.mq.split(topic, self.mq.route(topic).ranges[0].partition)

    @contextmanager
    def driver(self, cases: list[Case]) -> Iterator[subprocess.Popen[bytes]]:
        """It is killed in the end, JVM and all."""
        for mark in self.folder.glob("*.reached"):
            mark.unlink()
        (self.folder / "cases.json").write_text(listed(self.url, cases))
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.spark.killing", str(self.folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield child
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def reached(self, cases: list[Case], child: subprocess.Popen[bytes]) -> bool:
        failed = next(self.folder.glob("*.failed"), None)
        assert failed is None, failed.read_text()
        assert child.poll() is None, "the driver ended by itself"
        return all((self.folder / f"{case.name}.reached").exists() for case in cases)

    def logged(self, case: Case, kind: str = "offsets") -> int:
        """The last batch that is in the checkpoint, -1 if there is none."""
        there = (self.folder / f"{case.name}-checkpoint" / kind).glob("*")
        return max((int(one.name) for one in there if one.name.isdecimal()), default=-1)

    def set_back(self, case: Case) -> None:
        """The last batch was never heard of: as after a loss of power."""
        if case.into == "delta":
            log = self.folder / "lake" / case.source / "_delta_log"
            max(log.glob("*.json")).unlink()
            return
        last = self.logged(case)
        for kind in ("offsets", "commits"):
            for name in (str(last), f".{last}.crc"):
                (self.folder / f"{case.name}-checkpoint" / kind / name).unlink(missing_ok=True)

    def found(self, spark: Any, case: Case) -> list[int]:
        """What is there, at its other end."""
        if case.into in ("topic", "foreach"):
            values = [message.value for message in self.mq.read(case.target, end="latest")]
        elif case.into == "files":
            where = self.folder / case.target
            values = [row.value for row in spark.read.parquet(str(where)).collect()] if where.exists() else []
        else:
            where = self.folder / "lake" / case.source
            there = deltalake.DeltaTable.is_deltatable(str(where))
            values = deltalake.DeltaTable(where).to_pyarrow_table()["value"].to_pylist() if there else []
        return [int(value) for value in values]

    def run_again(self, spark: Any) -> None:
        """To the end of what is there."""
        for case in CASES:
            options = {**case.options, **(MORE if case.name.endswith("back") else {})}  # another end
            case = replace(case, stop="", options=options)
            (archived if case.into == "delta" else finished)(spark, case, self.url, self.folder)

    def check(self, spark: Any) -> None:
        wrong: dict[str, dict[str, list[int]]] = {}
        for case in CASES:
            found, wanted = Counter(self.found(spark, case)), set(self.expected[case.name])
            repeated = {n for n, times in found.items() if times > 1}
            faults = {"lost": wanted - found.keys(), "extra": found.keys() - wanted, "repeated": repeated}
            if any(faults.values()):
                wrong[case.name] = {kind: sorted(some) for kind, some in faults.items() if some}
        assert wrong == {}


@pytest.mark.timeout(600 + 2 * CHAOS_S)
def test_at_every_step(spark: Any, mq: Any, url: str, tmp_path: Path) -> None:
    kills = Kills(mq, url, tmp_path)
    for case in CASES:
        mq.create_topic(case.source, partitions=2)
        mq.create_topic(case.target, partitions=2)
        kills.send(case, 300, expected=case.start == "earliest")
    with kills.driver(CASES) as child:
        files = next(case for case in CASES if case.into == "files")  # it goes on when there is something
        wait_for(lambda: kills.reached([], child) and kills.logged(files, "commits") >= 0, "no batch 0")
        kills.send(files, 60)
        wait_for(lambda: kills.reached(CASES, child), "not all have come to their steps")
        for case in CASES:
            if case.name in SPLIT:
                kills.send(case, 30)
                kills.split(case)
            kills.send(case, 30)
    so_far = {case.name: len(kills.found(spark, case)) for case in CASES}
    for name in ("asked", "pinned", "staged", "files", "lake-begun", "lake-created"):
        assert (name, so_far[name]) == (name, 0)
    for name in ("appended", "committed", "foreach", "lake-writing", "lake-written"):
        assert (name, so_far[name]) == (name, pytest.approx(100, abs=2))  # of two partitions, rounded down
    for name in ("back", "lake-appended", "lake-back"):
        assert (name, so_far[name]) == (name, pytest.approx(200, abs=4))
    for case in CASES:
        if case.into == "delta":  # the group was never told more than the table has
            left = mq.lag(case.source, "archive").total.messages
            assert left >= len(kills.expected[case.name]) - so_far[case.name]
        if case.name.endswith("back"):
            kills.set_back(case)
        kills.send(case, 20)
    for _ in chances():
        again(kills, spark)
    kills.run_again(spark)
    kills.check(spark)


def chances() -> Iterator[int]:
    until, number = time.monotonic() + CHAOS_S, 0
    while time.monotonic() < until:
        yield (number := number + 1)


def again(kills: Kills, spark: Any) -> None:
    """Killed once more, at steps by chance of the batches that come next."""
    chance, cases = random.Random(time.time_ns()), []
    for case in CASES:
        step = chance.choice(STEPS[case.into])
        if case.into == "delta":
            batch = DeltaLake(str(kills.folder / "lake"), case.source).mark()
            number = 1 if batch is None else batch.batch + 1
        else:
            number = max(1, kills.logged(case, "commits") + chance.randint(1, 2))  # batch 0 has no rows
        cases.append(replace(case, stop=step if case.into == "files" else f"{step}@{number}"))
        kills.send(case, 250)
    with kills.driver(cases) as child:
        wait_for(lambda: kills.reached(cases, child), f"not all have come to their steps: {cases}")
        for case in cases:
            if chance.random() < 0.2:
                kills.split(case)
            kills.send(case, 20)
