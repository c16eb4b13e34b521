"""The table of the peers: what each did in this run, and Postroom's figure divided by it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

from ..measure import Latency
from .contenders import OURS
from .run import Result, What

__all__ = ["latency_table", "speed_table", "ways"]

COLUMNS: tuple[tuple[What, str], ...] = (
    ("publish", "publish/s"),
    ("consume + ack", "consume + ack/s"),
    ("publish beside", "both at once: publish/s"),
    ("consume + ack beside", "consume + ack/s"),
)


def ours(results: Sequence[Result]) -> Result | None:
    """The server where it ran, else embedded."""
    found = {result.contender: result for result in results if result.speeds}
    return next((found[name] for name in OURS if name in found), None)


def speed_table(results: Sequence[Result]) -> Table:
    """`ratio` is Postroom's figure divided by the contender's: above 1 Postroom is faster."""
    reference = ours(results)
    title = "One producer process, one consumer process; durable, confirmed, acked"
    table = Table(Column("contender", max_width=40), "bytes", title=title)
    for _, heading in COLUMNS:
        table.add_column(heading, justify="right")
        table.add_column("ratio", justify="right")
    sizes = sorted({speed.size for result in results for speed in result.speeds})
    for result in results:
        for size in sizes:
            cells: list[str] = []
            for what, _ in COLUMNS:
                rate = _rate(result, what, size)
                cells += [_count(rate), _ratio(_rate(reference, what, size), rate)]
            if result.speeds:
                table.add_row(result.contender, str(size), *cells)
        if result.reason:
            table.add_row(Text(f"{result.contender}: {result.reason}"))
    return table


def latency_table(results: Sequence[Result], commit: Latency) -> Table:
    """Each p99 divided by Postroom's: above 1 Postroom is faster."""
    reference = ours(results)
    best = reference.latency.p99_ms if reference and reference.latency else None
    table = Table("contender", "what", title="Latency at a steady 1,000 messages of 100 bytes a second")
    for heading in ("p50 ms", "p99 ms", "max ms", "p99 / Postroom's", "p99 / one flushed commit's"):
        table.add_column(heading, justify="right")
    for found in (commit, *(result.latency for result in results if result.latency)):
        times = [f"{ms:.2f}" for ms in (found.p50_ms, found.p99_ms, found.max_ms)]
        table.add_row(
            found.contender,
            found.what,
            *times,
            _ratio(found.p99_ms, best),
            _ratio(found.p99_ms, commit.p99_ms),
        )
    return table


def ways(results: Sequence[Result]) -> str:
    """How each was used, so that a reader can judge."""
    return "\n".join(f"{result.contender}: {result.how}" for result in results)


def _rate(result: Result | None, what: What, size: int) -> float | None:
    speeds = result.speeds if result else []
    return next((speed.per_s for speed in speeds if (speed.what, speed.size) == (what, size)), None)


def _count(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:,.0f}"


def _ratio(mine: float | None, other: float | None) -> str:
    return f"{mine / other:,.1f}" if mine is not None and other else "–"
