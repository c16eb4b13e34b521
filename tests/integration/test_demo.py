"""`penstock demo --fast` tells its story, and its figures are what the queue promises (R1, R14, R20, R23)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.demo.ledger import out_of_order

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
    _assert_order_and_delay(figures)
    assert asyncio.run(_left(tmp_path)) == (figures["sent"], 0)


def _assert_order_and_delay(figures: dict[str, Any]) -> None:
    ordered, split, delayed = figures["ordered"], figures["split"], figures["delayed"]
    assert ordered["handled"] == ordered["sent"] > 0 and ordered["out_of_order"] == 0
    assert ordered["again"] > 0  # what the killed member held came again
    assert split["handled"] == split["sent"] > 0 and split["twice"] == 0
    assert split["changes"] == 3 and split["out_of_order"] == 0
    assert delayed["arrived"] == delayed["sent"] > 0 and delayed["early"] == 0 and delayed["cancelled"]


@pytest.mark.timeout(SECONDS + 10)
def test_on_a_database_server(tmp_path: Path, postgres_url: str) -> None:
    """Only if it is asked for by option: an address in the environment may be anybody's."""
    assert "run `penstock migrate`" in _demo(tmp_path, "--url", postgres_url).stderr
    migrate = [sys.executable, "-m", "penstock", "migrate", "--url", postgres_url]
    subprocess.run(migrate, check=True, capture_output=True, timeout=SECONDS)
    done = _demo(tmp_path, "--json", "--url", postgres_url)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["well"] is True and "p%40ss" not in done.stdout
    _assert_order_and_delay(figures)
    again = _demo(tmp_path, "--url", postgres_url)
    assert again.returncode == 1 and "demo-orders" in again.stderr


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
    assert "40 keys, 3 changes of the route, in order: yes" in done.stdout
    assert done.stdout.count("penstock -u sqlite:///penstock-demo/demo.db") == 3


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
