"""The last act: archive, audit and hotspots, on Spark, of what the acts before have produced (R46, R47).

The audit reads the topic itself and two journals; with the demo's own check of order it shares nothing but
what senders and handlers wrote down. Both must come to the same verdict, or the demo fails. Must import
neither Spark nor a job where Spark is not installed.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, how_to_install
from ...units import format_bytes
from ..framework.command import Run
from .figures import HANDLED, SENT, Figures, Pipeline
from .scene import Scene

if TYPE_CHECKING:
    from ...spark.jobs.audit import Audited
    from ...spark.jobs.hotspots import Hotspots

__all__ = ["agrees", "run_jobs", "why_not"]

_NEEDED = ("pyspark", "pyarrow", "deltalake")
_SMALL = {  # for jobs of a second: the least that Java compiles; it halves the time of this act
    "spark.driver.extraJavaOptions": "-Xss8m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": False,
}
_TOLD = ("lost", "gap", "unknown", "out of order")  # what may never be; handled twice is at-least-once


def why_not() -> str | None:
    """Return what to do if Spark cannot be started here; None if it can."""
    if any(find_spec(name) is None for name in _NEEDED):
        return f"Spark is not installed here: {how_to_install('spark-local')}, then run the demo again"
    from ...spark.session import find_java

    try:
        find_java()
    except UsageError as error:
        return str(error)
    return None


def run_jobs(scene: Scene, run: Run) -> None:
    from ..pipeline.frame import spark_session

    began, stage = time.perf_counter(), scene.stage
    stage.heading("8  The data pipeline, on Spark")
    run = replace(run, url=scene.figures.url, chosen=True, shards={})
    with ExitStack() as stack:
        with stage.working("Spark is starting …"):
            spark = stack.enter_context(spark_session(run, memory="1g", config=_SMALL))
        stage.say(f"Spark started in {time.perf_counter() - began:.1f} s.", style="dim")
        jobs = _Jobs(scene, spark)
        jobs.archive()
        jobs.audit()
        jobs.hotspots()
    jobs.result.seconds = time.perf_counter() - began
    scene.figures.pipeline = jobs.result
    _say_verdict(scene, jobs.result)


def agrees(figures: Figures, found: Audited) -> bool:
    """Tell whether the audit agrees with what the demo counted: is all well, and did any trade come twice?"""
    well = figures.trades.lost == 0 and figures.trades_out_of_order == 0
    repeated = found.count("handled", "repeated") > 0
    return well == _nothing_bad(found) and repeated == (figures.trades.twice > 0)


def _nothing_bad(found: Audited) -> bool:
    return not any(one.kind in _TOLD or one.stage == "stored" for one in found.bad)


class _Jobs:
    def __init__(self, scene: Scene, spark: Any) -> None:
        self.scene, self.spark = scene, spark
        self.stage, self.figures, self.folder = scene.stage, scene.figures, scene.folder
        self.queue = {"url": scene.figures.url}
        self.orders, self.trades = scene.topic("orders"), scene.topic("trades")
        self.result = Pipeline()

    def archive(self) -> None:
        from ...spark.jobs.archive import ArchiveOptions, archive

        lake = self.folder / "lake"
        options = ArchiveOptions(self.queue, self.orders, str(lake))
        with self.stage.working(f"archiving topic {self.orders} …"):
            done = archive(self.spark, options)
        self.result.archived, self.result.table = done.messages, done.table
        self.stage.say(
            f"**Archived {done.messages:,} of {self.figures.sent:,}** messages of topic {self.orders}, each "
            f"once: {format_bytes(done.bytes)} of Parquet with a Delta log, in {lake / self.orders}."
        )

    def audit(self) -> None:
        from ...spark.jobs.audit import AuditOptions, audit
        from ...spark.jobs.fields import Journal

        options = AuditOptions(
            self.queue, self.trades, number="json:trade", first_number=0, id="place",
            sent=Journal(str(self.folder / SENT), "place", "at"),
            handled=(Journal(str(self.folder / HANDLED), "place", "at"),),
            report=str(self.folder / f"audit-{self.trades}.jsonl"),
        )  # fmt: skip
        with self.stage.working(f"auditing topic {self.trades} …") as step:
            found = audit(self.spark, options, progress=lambda text: step(f"{text} …"))
        self._note(found)
        self.stage.say(
            f"**Audited {found.messages:,} messages** of topic {self.trades}, in {len(found.partitions)} "
            f"partitions of {self.figures.changes + 1} versions of its route:"
        )
        columns = ("", "messages", "lost", "repeated", "out of order")
        kinds = columns[2:]
        rows = [
            (stage, f"{found.counts[stage]:,}", *(f"{found.count(stage, kind):,}" for kind in kinds))
            for stage in ("stored", "handled")
        ]
        self.stage.columns([columns, *rows])

    def _note(self, found: Audited) -> None:
        result = self.result
        result.audited, result.verdict = found.messages, found.verdict
        result.bad = {f"{one.stage} {one.kind}": one.messages for one in found.bad}
        result.nothing_bad, result.agrees = _nothing_bad(found), agrees(self.figures, found)
        result.report = found.report

    def hotspots(self) -> None:
        from ...spark.jobs.hotspots import HotspotsOptions, hotspots

        with self.stage.working(f"looking for hotspots of topic {self.trades} …"):
            found = hotspots(self.spark, HotspotsOptions(self.queue, self.trades))
        self.stage.say(
            f"**Hotspots:** of {len(found.partitions)} partitions the heaviest has "
            f"**{_times(found.plan.before)}** the mean load. {self._plan(found)}"
        )

    def _plan(self, found: Hotspots) -> str:
        from ...files import write_private
        from ...model.split_plan_file import plan_to_text

        if not found.plan.steps:
            return "No split is needed."
        path = self.folder / f"split-plan-{self.trades}.json"
        write_private(path, plan_to_text(found.plan))
        self.result.plan, self.result.steps = str(path), len(found.plan.steps)
        return f"With the plan {path} it will be {_times(found.plan.after)}."


def _times(pieces: Any) -> str:
    from ...model.topology.split_plan import heaviest

    return f"{heaviest(pieces):.1f} times"


def _say_verdict(scene: Scene, result: Pipeline) -> None:
    both = "What the demo counted by itself says the same"
    if not result.agrees:
        both = "What the demo counted by itself says something else: please report it"
    more = f" Each message that is bad is in {result.report}." if result.report else ""
    style = "green" if result.well else ""
    scene.stage.say(f"**The audit's verdict: {result.verdict}.** {both}.{more}", style=style)
