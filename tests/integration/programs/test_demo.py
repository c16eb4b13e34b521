"""`postroom demo --fast` tells its story, and its figures are what the queue promises (R1, R14, R20, R23).

Without Spark; the act with Spark is in tests/integration/spark.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.cli.demo import fresh
from postroom.cli.demo.figures import Audit, Figures, out_of_order
from postroom.cli.demo.pipeline import agrees, why_not
from postroom.cli.root import run
from postroom.errors import StoreUnavailable
from postroom.spark.jobs.audit import Audited, Bad

SECONDS = 110


def _demo(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "postroom", "demo", "--fast", *words]
    env = {**os.environ, **environ}
    return subprocess.run(
        line, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.mark.slow("runs the demo, of some 20 processes")
@pytest.mark.timeout(SECONDS + 10)
def test_the_story_and_its_figures(tmp_path: Path) -> None:
    """In a plain log, on a machine without Spark; what it says is what is in its figures."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pyspark'] = None")
    done = _demo(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "\x1b" not in done.stdout and max(len(line) for line in said if " -u " not in line) <= 100
    assert "0 messages lost" in done.stdout and "behind" in done.stdout
    assert "40 keys, 3 changes of the route, in order: yes" in done.stdout
    assert done.stdout.count("postroom -u sqlite:///postroom-demo/demo.db") == 3
    assert "postroom console sqlite:///postroom-demo/demo.db" in done.stdout
    how = "were not shown. Spark is not installed here: run `pip install '.[spark-local]'` in a checkout of"
    assert f"{how} Postroom, then run the demo again." in " ".join(done.stdout.split())
    figures = json.loads((tmp_path / "postroom-demo" / "figures.json").read_text())
    assert figures["pipeline"] is None
    _assert_queue(figures)
    assert asyncio.run(_left(tmp_path)) == (figures["sent"], 0)


def _assert_queue(figures: dict[str, Any]) -> None:
    assert figures["well"] is True and figures["lost"] == 0 and figures["sent"] > 0
    for group in figures["groups"].values():
        assert group["handled"] == group["sent"] == figures["sent"]
    assert figures["groups"]["billing"]["again"] > 0  # what the killed process held came again
    assert figures["groups"]["search"]["again"] == 0  # groups do not affect each other
    poison = figures["poison"]
    assert poison["dead_letters"] == poison["redriven"] == poison["redriven_handled"] == 1
    assert poison["dead_is_poison"] and poison["deaths"] >= 2
    assert poison["neighbours"]["lost"] == 0
    _assert_order_and_delay(figures)


def _assert_order_and_delay(figures: dict[str, Any]) -> None:
    ordered, split, delayed = figures["ordered"], figures["split"], figures["delayed"]
    assert ordered["handled"] == ordered["sent"] > 0 and ordered["out_of_order"] == 0
    assert ordered["again"] > 0  # what the killed member held came again
    assert split["handled"] == split["sent"] > 0 and split["twice"] == 0
    assert split["changes"] == 3 and split["out_of_order"] == 0
    assert delayed["arrived"] == delayed["sent"] > 0 and delayed["early"] == 0 and delayed["cancelled"]


@pytest.mark.slow("the whole demo once more")
@pytest.mark.timeout(SECONDS + 10)
def test_on_a_database_server(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only if it is asked for by option: an address in the environment may be anybody's."""
    monkeypatch.chdir(tmp_path)
    line = ["demo", "--fast", "--queue-only", "--url", postgres_url]
    assert run(line) == 1 and "run `postroom migrate`" in capfd.readouterr().err
    assert run(["migrate", "--url", postgres_url]) == 0
    capfd.readouterr()
    assert run([*line, "--json"]) == 0
    said = capfd.readouterr().out
    assert "p%40ss" not in said
    _assert_queue(json.loads(said))
    assert run(line) == 1 and "demo-orders" in capfd.readouterr().err


async def _left(folder: Path) -> tuple[int, int]:
    """The queue is kept: its messages, and how many dead letters are left."""
    async with postroom.connect(f"sqlite:///{folder / 'postroom-demo' / 'demo.db'}") as mq:
        topic = await mq.topic("orders")
        return topic.messages, len(await mq.dead_letters("payments", "charge"))


def test_only_its_own_folder_is_emptied(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    with pytest.raises(StoreUnavailable, match="was not made by the demo"):
        fresh(theirs)
    fresh(ours)
    (ours / "demo.db").write_text("of the last time")
    fresh(ours)
    assert theirs.is_dir() and [path.name for path in ours.iterdir()] == [".gitignore"]


def test_without_java_it_says_how_to_see_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(import_module("postroom.spark.session"), "_bundled", lambda: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "run `pip install '.[spark-local]'` in a checkout of Postroom" in str(why_not())


@pytest.mark.parametrize(
    ("lost", "twice", "wrong", "bad", "same"),
    [
        (0, 0, 0, (), True),
        (0, 3, 0, (Bad("handled", "repeated", "id", 3),), True),  # at-least-once: nobody calls it a fault
        (0, 3, 0, (), False),
        (1, 0, 1, (Bad("handled", "lost", "id", 1),), True),
        (0, 0, 0, (Bad("handled", "lost", "id", 1),), False),
        (0, 0, 0, (Bad("stored", "out of order", "number", 1),), False),
        (0, 0, 0, (Bad("stored", "repeated", "number", 1),), False),
        (0, 0, 2, (), False),
    ],
)
def test_two_audits_agree_or_not(lost: int, twice: int, wrong: int, bad: tuple[Bad, ...], same: bool) -> None:
    figures = Figures("", "", trades=Audit(9, 9 - lost, lost, twice, 0), trades_out_of_order=wrong)
    assert agrees(figures, Audited("trades", 2, (), {}, bad)) is same


@pytest.mark.parametrize(
    ("handled", "wrong"),
    [
        (["0 1 2", ""], 0),
        (["0 1", "1 2"], 0),  # taken over: repeated from the lowest that was not settled
        (["0 2 1", ""], 1),
        (["0", "2"], 1),
        (["1", "0 1 2"], 1),
    ],
)
def test_the_audit_of_order_notices(tmp_path: Path, handled: list[str], wrong: int) -> None:
    """One key, three messages at offsets 0, 1 and 2; the second process writes after the first."""
    numbers = {(0, offset): ("account", offset) for offset in range(3)}
    ledgers = [tmp_path / "one", tmp_path / "two"]
    clock = 0
    for path, offsets in zip(ledgers, handled, strict=True):
        lines = []
        for offset in offsets.split():
            clock += 1
            lines.append(f"0 {offset} 1 {clock}\n")
        path.write_text("".join(lines))
    assert out_of_order(numbers, ledgers) == wrong
