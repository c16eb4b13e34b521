"""The job backlog: windows, percentiles and charts, from a journal, from samples, and from arrival alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.errors import InvalidSetting
from postroom.spark.jobs.backlog import BacklogOptions, Waits, backlog
from postroom.spark.jobs.fields import Journal
from tests.contract.cli_runner import Cli

WINDOW_MS = 1000


@pytest.fixture
def times(mq: Any) -> list[int]:
    """40 messages, with the time each has by the queue's clock."""
    mq.create_topic("orders", partitions=2)
    mq.send_many("orders", [postroom.Message(b"x", key=str(n), id=f"m{n}") for n in range(40)])
    found = {message.id: message.timestamp for message in mq.read("orders", end="latest")}
    return [found[f"m{n}"] for n in range(40)]


def test_from_a_journal(spark: Any, url: str, times: list[int], tmp_path: Path) -> None:
    """30 of 40 are handled, n × 100 ms after they came: by arithmetic everything else is known."""
    journal = tmp_path / "handled.jsonl"
    done = [(n, times[n] + n * 100) for n in range(30)]
    rows = [*done, (3, done[3][1] + 60_000), (99, times[0])]  # a second time; one that was never stored
    journal.write_text("".join(json.dumps({"id": f"m{n}", "at": at}) + "\n" for n, at in rows))
    found = backlog(
        spark,
        BacklogOptions(
            {"url": url}, "orders", window_ms=WINDOW_MS, handled=Journal(str(journal), at="at"),
            charts=str(tmp_path / "charts"),
        ),
    )  # fmt: skip
    assert (found.source, found.arrived, found.handled) == ("journal", 40, 30)
    assert found.waits == Waits(1400, 2800, 2900, 2900)
    numbers = [window.start_ms // WINDOW_MS for window in found.windows]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    for window in found.windows:
        here = [n for n, at in done if at // WINDOW_MS * WINDOW_MS == window.start_ms]
        arrived = [n for n in range(40) if times[n] // WINDOW_MS * WINDOW_MS == window.start_ms]
        assert (window.arrived, window.handled) == (len(arrived), len(here))
        assert (window.waits.max_ms if window.waits else None) == (max(here) * 100 if here else None)
    assert found.windows[-1].behind == 10 and found.peak == max(w.behind or 0 for w in found.windows)
    assert [Path(chart).name for chart in found.charts] == ["arrival.png", "backlog.png", "waiting.png"]
    for chart in found.charts:
        data = Path(chart).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000


def test_from_samples_and_from_arrival(spark: Any, url: str, times: list[int], tmp_path: Path) -> None:
    samples = tmp_path / "lag.jsonl"
    hour = 3_600_000
    start = times[0] // hour * hour
    rows = [{"time": start - 1, "messages": 5}, {"time": start + hour - 1, "messages": 25}]
    samples.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    found = backlog(spark, BacklogOptions({"url": url}, "orders", window_ms=hour, samples=str(samples)))
    assert found.source == "samples" and found.arrived == 40 and found.waits is None
    if times[-1] < start + hour:  # not over the full hour
        assert [(w.arrived, w.behind, w.handled) for w in found.windows] == [(40, 25, None)]
    charts = str(tmp_path / "charts")
    alone = backlog(spark, BacklogOptions({"url": url}, "orders", window_ms=hour, charts=charts))
    assert (alone.source, alone.handled, alone.peak, len(alone.charts)) == ("arrival", None, None, 1)


def test_refused(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=1)
    empty = backlog(spark, BacklogOptions({"url": url}, "orders", charts=str(tmp_path / "charts")))
    assert (empty.windows, empty.arrived, empty.charts) == ((), 0, ())
    with pytest.raises(InvalidSetting, match="has ids only: name the column with the time"):
        BacklogOptions({"url": url}, "orders", handled=Journal("a.csv"))
    with pytest.raises(InvalidSetting, match="contradict each other"):
        BacklogOptions({"url": url}, "orders", handled=Journal("topic:done"), samples="x")
    bad = tmp_path / "bad.jsonl"
    for text, said in (
        ('{"time": 1}', "line 1: write"), ("", "there are none"), ('{"time": "now", "messages": 1}', "time"),
    ):  # fmt: skip
        bad.write_text(f"{text}\n")
        with pytest.raises(InvalidSetting, match=said):
            backlog(spark, BacklogOptions({"url": url}, "orders", samples=str(bad)))


@pytest.mark.usefixtures("spark")
def test_on_the_command_line(url: str, times: list[int], tmp_path: Path) -> None:
    journal = tmp_path / "handled.csv"
    journal.write_text("id,done\n" + "".join(f"m{n},{at + 1500}\n" for n, at in enumerate(times)))
    cli, words = Cli(tmp_path, url), ["pipeline", "backlog", "orders", "--handled", str(journal)]
    shown = cli.ok(*words, "--handled-at", "done", "--window", "1h").out
    assert "40 messages arrived, 40 handled; at most" in shown and "half waited up to 1.5s" in shown
    refused = cli(*words)
    assert refused.code == 2 and "has ids only: name the column with the time" in refused.err
