"""`postroom demo` ends with the data pipeline, and its audit would notice (R46)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import postroom.sync
from postroom.cli.demo.figures import HANDLED, SENT, Audit, Figures
from postroom.cli.demo.pipeline import run_jobs
from postroom.cli.demo.scene import Scale, Scene, Stage
from postroom.cli.framework.command import Run
from tests.integration.spark.test_session import without_java


def test_it_ends_with_the_verdict_of_the_audit(tmp_path: Path) -> None:
    """On a machine without Java: with that of the package. Of what Spark itself says nothing is seen."""
    line = [sys.executable, "-m", "postroom", "demo", "--fast"]
    environ = without_java(tmp_path / "bin")
    done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    assert "Spark is starting …" in done.stdout and "WARN" not in done.stdout
    assert "The audit's verdict: clean. What the demo counted by itself says the same." in done.stdout
    assert "were not shown" not in done.stdout and "\x1b" not in done.stdout
    folder = tmp_path / "postroom-demo"
    figures = json.loads((folder / "figures.json").read_text())
    found = figures["pipeline"]
    assert (
        figures["well"]
        and found["archived"] == figures["sent"]
        and found["audited"] == figures["split"]["sent"]
    )
    assert found["verdict"] == "clean" and found["agrees"] and found["bad"] == {} and found["report"] is None
    plan = folder / "split-plan-trades.json"
    assert found["steps"] > 0 and f"route apply postroom-demo/{plan.name}" in done.stdout
    apply = [sys.executable, "-m", "postroom", "-u", "sqlite:///postroom-demo/demo.db", "route", "apply"]
    subprocess.run([*apply, str(plan), "--yes"], cwd=tmp_path, check=True, capture_output=True, timeout=120)


def _queue(url: str, mq: postroom.sync.Connection, folder: Path) -> Figures:
    """As the acts before leave it: orders, and trades of two keys, all handled in order."""
    mq.create_topic("orders", partitions=1)
    mq.send_many("orders", [postroom.Message(b"{}") for _ in range(10)])
    mq.create_topic("trades", partitions=2)
    named = [(f"key-{n % 2}", n // 2) for n in range(20)]
    trades = [postroom.Message(b'{"trade": %d}' % number, key=key) for key, number in named]
    places = [f"{r.partition}:{r.offset},{at}\n" for at, r in enumerate(mq.send_many("trades", trades))]
    for name in (SENT, HANDLED):
        (folder / name).write_text("".join(("place,at\n", *places)))
    return Figures(url, url, sent=10, trades=Audit(20, 20, 0, 0, 0), changes=3)


def test_the_audit_contradicts_a_demo_that_counted_wrong(
    url: str, mq: postroom.sync.Connection, spark: Any, tmp_path: Path, capsys: Any
) -> None:
    figures = _queue(url, mq, tmp_path)
    scene = Scene(tmp_path, Scale(), Stage(quiet=False), figures)
    run = Run(url="sqlite:///elsewhere.db", chosen=False, named=False, json=False, debug=False)
    run_jobs(scene, run)
    assert figures.pipeline is not None and figures.pipeline.well and figures.pipeline.verdict == "clean"
    assert spark.range(1).count() == 1  # a session that was there before is left alone
    heading, *lines = (tmp_path / HANDLED).read_text().splitlines(keepends=True)
    lost, late = lines[4], lines[8].replace(",8\n", ",99\n")
    (tmp_path / HANDLED).write_text("".join((heading, *lines[:4], *lines[5:8], late, *lines[9:])))
    run_jobs(scene, run)
    found = figures.pipeline
    assert found is not None and found.verdict == "not clean" and not found.agrees and not found.well
    assert found.bad == {"handled lost": 1, "handled out of order": 1}
    report = [json.loads(line) for line in (tmp_path / "audit-trades.jsonl").read_text().splitlines()]
    assert {(one["kind"], one["id"]) for one in report} == {
        ("lost", lost.split(",")[0]),
        ("out of order", late.split(",")[0]),
    }
    said = " ".join(capsys.readouterr().out.split())
    assert "says something else: please report it. Each message that is bad is in" in said
