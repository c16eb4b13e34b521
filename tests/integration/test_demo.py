"""`penstock demo --fast` tells its story, and its figures are what the queue promises (R1, R14, R20)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

SECONDS = 110


def _demo(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "penstock", "demo", "--fast", *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.timeout(SECONDS + 10)
def test_the_figures(tmp_path: Path) -> None:
    done = _demo(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["well"] is True and figures["lost"] == 0 and figures["sent"] > 0
    for group in figures["groups"].values():
        assert group["handled"] == group["sent"] == figures["sent"]
    assert figures["groups"]["billing"]["again"] > 0  # what the killed process held came again
    assert figures["groups"]["search"]["again"] == 0  # groups do not affect each other
    poison = figures["poison"]
    assert poison["dead_letters"] == poison["redriven"] == poison["redriven_handled"] == 1
    assert poison["dead_is_poison"] and poison["deaths"] >= 2
    assert poison["neighbours"]["lost"] == 0
    assert asyncio.run(_left(tmp_path)) == (figures["sent"], 0)


async def _left(folder: Path) -> tuple[int, int]:
    """The queue is kept: its messages, and how many dead letters are left."""
    async with penstock.connect(f"sqlite:///{folder / 'penstock-demo' / 'demo.db'}") as mq:
        topic = await mq.topic("orders")
        return topic.messages, len(await mq.dead_letters("payments", "charge"))


@pytest.mark.timeout(2 * SECONDS)
def test_the_story_reads_well_in_a_plain_log_and_can_be_told_again(tmp_path: Path) -> None:
    (tmp_path / "penstock-demo").mkdir()
    refused = _demo(tmp_path)
    assert refused.returncode == 1 and "was not made by the demo" in refused.stderr
    (tmp_path / "penstock-demo").rmdir()
    done = _demo(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 100
    assert "0 messages lost" in done.stdout and "behind" in done.stdout
    assert done.stdout.count("penstock -u sqlite:///penstock-demo/demo.db") == 3
