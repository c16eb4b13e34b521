"""A short storm, and what it is made of; `make storm HOURS=1` is a long one, on MariaDB, too."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from .plan import PROCESSES, SURROUNDINGS, plan
from .report import Judged, Report
from .storm import Storm
from .strikes import Strikes

SECONDS = float(os.environ.get("POSTROOM_STORM_SECONDS", "20"))


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 600)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_storm_loses_nothing_and_keeps_the_order(kind: str, tmp_path: Path) -> None:
    report = await Storm(kind, tmp_path, seed=SEEDS[kind], seconds=SECONDS).run()
    print(report.markdown())
    assert report.clean, report.markdown()
    assert report.confirmed > 50 and report.strikes.get("kill"), report.figures()


SEEDS = {"sqlite": 1, "postgres": 2}
"""Any will do; these strike the database, the network and the processes within seconds."""


def test_a_seed_gives_the_same_faults_again() -> None:
    def some(seed: int) -> list[object]:
        return list(itertools.islice(plan(seed, SURROUNDINGS["postgres"], (0, 1)), 50))

    assert some(1) == some(1) != some(2)


def test_every_fault_of_every_plan_can_strike_and_comes_up() -> None:
    for kinds in (PROCESSES, *SURROUNDINGS.values()):
        drawn = {fault.kind for fault in itertools.islice(plan(1, kinds, (0, 1)), 500)}
        assert drawn == set(kinds) and drawn <= set(Strikes._STRIKES)


def test_a_report_says_what_is_wrong(tmp_path: Path) -> None:
    report = Report("sqlite", 7, "2026-01-01", 60.0, "cgroup", strikes={"kill": 3})
    assert report.clean and "# Storm on sqlite: clean" in report.markdown()
    report.judged.append(Judged("orders/billing", 9, 8, {"lost": 1}, ["lost: k/1/1/ack/0"], {}))
    page = report.write(tmp_path)
    assert not report.clean and report.figures()["lost"] == 1
    assert "NOT CLEAN" in page.read_text() and "lost: k/1/1/ack/0" in page.read_text()
    assert '"lost": 1' in page.with_suffix(".json").read_text()


def test_a_storm_that_broke_off_or_missed_some_is_not_clean() -> None:
    assert not Report("sqlite", 7, "", 1.0, "", broken="stuck").clean
    assert not Report("sqlite", 7, "", 1.0, "", missed={"ann": 1}).clean
