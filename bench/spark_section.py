"""The data pipeline on Spark: what it reads, writes and archives a second, beside Spark's own limits, and
beside Spark's own Kafka source.

One session on two cores (`local[2]`), messages of 100 bytes. The audit is the one part that is not about
speed: it has to find what was planted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.table import Table

from . import spark_audit, spark_beside, spark_formats, spark_reading, spark_writing
from .spark_audit import Audit
from .spark_beside import Beside
from .spark_ground import Place, Rate, place

__all__ = ["Figures", "audit_alone", "audit_table", "goals_table", "rates_table", "run"]

GOAL_STREAM, GOAL_ARCHIVE, GOAL_FLOOR_MS = 0.4, 400_000, 250
AUDITED = 2_000_000

Told = Callable[[str], None]


@dataclass(frozen=True)
class Figures:
    rates: list[Rate]
    stream_of_limit: float
    floor_ms: float
    archive_per_s: float
    beside: Beside
    audit: Audit

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run(messages: int, told: Told, audited: int = AUDITED) -> Figures:
    with place(messages, lambda rate: told(_line(rate))) as here:
        reading = spark_reading.run(here)
        written, archived = spark_writing.writing(here), spark_writing.archiving(here)
        rates = [*reading.rates, *written, *archived, *spark_formats.run(here)]
        return Figures(
            rates,
            reading.stream_of_limit,
            reading.floor_ms,
            archived[0].per_s,
            spark_beside.run(here, told),
            _audited(here, audited, told),
        )


def audit_alone(told: Told, audited: int = AUDITED) -> Audit:
    with place(0, lambda rate: told(_line(rate))) as here:
        return _audited(here, audited, told)


def _audited(here: Place, messages: int, told: Told) -> Audit:
    told(f"auditing {messages:,} messages with faults among them")
    return spark_audit.run(here, messages)


def _line(rate: Rate) -> str:
    return f"{rate.what:36} {rate.per_s:12,.0f} rows/s  best {rate.best:12,.0f}"


# ---- tables ----


def rates_table(found: Figures) -> Table:
    table = Table("what", title="Spark on local[2], 100 bytes a message")
    for name in ("rows", "rows/s", "best", "MB/s of values"):
        table.add_column(name, justify="right")
    for rate in found.rates:
        speeds = (f"{rate.per_s:,.0f}", f"{rate.best:,.0f}", f"{rate.per_s / 10_000:,.0f}")
        table.add_row(rate.what, f"{rate.rows:,}", *speeds)
    return table


def goals_table(found: Figures) -> Table:
    table = Table("goal", "wanted", "found", "", title="Goals of the pipeline")
    rows = [
        (
            "a streaming read, of the prebuilt source's rate",
            f"{GOAL_STREAM:.0%} at least",
            f"{found.stream_of_limit:.0%}",
            found.stream_of_limit >= GOAL_STREAM,
        ),
        (
            "archive, rows/s",
            f"{GOAL_ARCHIVE:,} at least",
            f"{found.archive_per_s:,.0f}",
            found.archive_per_s >= GOAL_ARCHIVE,
        ),
        (
            "a micro-batch, ms",
            f"under {GOAL_FLOOR_MS}",
            f"{found.floor_ms:.0f}",
            found.floor_ms < GOAL_FLOOR_MS,
        ),
    ]
    for what, wanted, value, met in [*rows, *spark_beside.goals(found.beside)]:
        table.add_row(what, wanted, value, "met" if met else "missed")
    return table


def audit_table(found: Audit) -> Table:
    table = Table(title="The audit, with faults that were planted")
    for name in ("messages", "faults planted", "found", "missed", "invented", "seconds", "verdict"):
        table.add_column(name, justify="right")
    counts = (found.messages, found.planted, found.found, found.missed, found.invented)
    verdict = "all, and nothing else" if found.good else "wrong"
    table.add_row(*(f"{count:,}" for count in counts), f"{found.seconds:.1f}", verdict)
    return table
