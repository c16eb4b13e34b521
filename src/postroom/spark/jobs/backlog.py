"""The job `backlog`: what arrived, what was handled and how long messages waited, by window (R43, R46).

Arrival is the time of a stored message. Handling comes from a journal: ids with the time at which each was
handled; its percentiles are of the messages handled in a window. Without one, samples of how far a group was
behind will do: what was handled is then what arrived and is not behind any more, and the waiting time is an
estimate, the messages behind over the rate at which they go (Little). With neither, only arrival is known.
The first time a message was handled counts. Only messages of the range are looked at.

A message with a time that cannot be is counted as odd, and is in no window: one before 1970 or more than a
day ahead of now; and one that has arrived more than a day outside of the range, where that is named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ...clock import wall_ms
from ...config import DEFAULTS
from ...errors import InvalidSetting, UsageError, how_to_install
from ...model.messages.timestamps import latest_sent
from ...units import moment_ms
from .failures import explained
from .fields import Field, Journal, Stored, look

__all__ = ["BacklogOptions", "Backlogged", "Sample", "Waits", "Window", "backlog", "draw", "read_samples"]


# ---- samples of how far a group was behind: JSON lines with `time` and `messages`, in any order ----
# `time` is a moment with a zone, such as 2026-01-31T08:00:00Z, or milliseconds since 1970. Decides what a
# sample is, and refuses the rest with the number of its line. There are few: they are read on the driver.

MAX_SAMPLES = 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class Sample:
    time_ms: int
    behind: int


def read_samples(path: str) -> list[Sample]:
    """The oldest first."""
    found: list[Sample] = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append(_sample(line, f"samples {path}, line {number}"))
                if len(found) > MAX_SAMPLES:
                    raise InvalidSetting(
                        f"samples {path}: there are more than {MAX_SAMPLES:,}; leave some out"
                    )
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"samples {path} cannot be read: {error}") from None
    if not found:
        raise InvalidSetting(f"samples {path}: there are none in it")
    return sorted(found)


def _sample(line: str, where: str) -> Sample:
    try:
        fields: Any = json.loads(line)
        time, behind = fields["time"], fields["messages"]
    except (ValueError, KeyError, TypeError):
        raise InvalidSetting(
            f'{where}: write {{"time": "2026-01-31T08:00:00Z", "messages": 12}}, not {line.strip()[:60]!r}'
        ) from None
    if type(behind) is not int or behind < 0:
        raise InvalidSetting(f"{where}: messages={behind!r}: a whole number from 0 up")
    return Sample(time if type(time) is int else moment_ms(time, name=f"{where}: time"), behind)


# ---- the job ----

MAX_WINDOWS = 10_000
_ODD = -1  # the window of what is in none

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BacklogOptions:
    queue: Mapping[str, str] = field(repr=False)  # how it is reached: url, token, …
    topic: str
    start_ms: int | None = None  # by the time of the messages
    end_ms: int | None = None
    window_ms: int = 60_000
    id: str = "id"  # where the id of a stored message is
    handled: Journal | None = None
    samples: str | None = None  # a file of JSON lines: {"time": …, "messages": how far it was behind}
    charts: str | None = None  # a folder

    def __post_init__(self) -> None:
        Field.parse(self.id, "id")
        if self.window_ms < 1:
            raise InvalidSetting(f"window={self.window_ms}: choose a duration, such as 1m")
        if self.handled is not None and self.samples is not None:
            raise InvalidSetting("handled and samples contradict each other: give one of them")
        if self.handled is not None and not self.handled.has_order:
            raise InvalidSetting(
                f"the journal {self.handled.source} has ids only: name the column with the time at which "
                "each was handled"
            )


@dataclass(frozen=True, slots=True)
class Waits:
    """How long messages waited, from arrival until they were handled."""

    p50_ms: int
    p95_ms: int
    p99_ms: int
    max_ms: int


@dataclass(frozen=True, slots=True)
class Window:
    start_ms: int
    arrived: int
    handled: int | None = None  # None: nobody knows
    behind: int | None = None  # at its end
    waits: Waits | None = None  # of what was handled in it
    about_wait_ms: int | None = None  # an estimate, from samples


@dataclass(frozen=True, slots=True)
class Backlogged:
    topic: str
    source: Literal["journal", "samples", "arrival"]
    window_ms: int
    windows: tuple[Window, ...]
    arrived: int
    handled: int | None
    waits: Waits | None
    charts: tuple[str, ...] = ()
    odd: int = 0  # messages with a time that cannot be, which are in no window
    seconds: float = 0.0

    @property
    def peak(self) -> int | None:
        """The most that was behind at the end of a window."""
        return max((w.behind for w in self.windows if w.behind is not None), default=None)


def backlog(spark: Any, options: BacklogOptions, *, progress: Progress = lambda text: None) -> Backlogged:
    began = time.monotonic()
    samples = read_samples(options.samples) if options.samples is not None else []
    with explained():
        stored = look(options.queue, options.topic, start_ms=options.start_ms, end_ms=options.end_ms)
        progress("adding up arrival and waiting times")
        rows = _by_window(_events(spark, stored, options), options) if stored.offsets else []
    total = next((row for row in rows if row["window"] is None), None)
    odd = sum(row["arrived"] for row in rows if row["window"] == _ODD)
    windows = _windows([row for row in rows if row["window"] is not None and row["window"] != _ODD], options)
    if samples:
        windows = _with_samples(windows, samples, options.window_ms)
    found = Backlogged(
        topic=options.topic,
        source="journal" if options.handled else "samples" if samples else "arrival",
        window_ms=options.window_ms,
        windows=tuple(windows),
        arrived=total["arrived"] - odd if total is not None else 0,
        handled=_handled(windows),
        waits=_waits(total) if total is not None else None,
        odd=odd,
    )
    if options.charts is not None and windows:
        progress("drawing")
        found = replace(found, charts=tuple(draw(found, options.charts)))
    return replace(found, seconds=time.monotonic() - began)


def _handled(windows: Sequence[Window]) -> int | None:
    known = [window.handled for window in windows if window.handled is not None]
    return sum(known) if known else None


# ---- in Spark ----


def _events(spark: Any, stored: Stored, options: BacklogOptions) -> Any:
    """arrived_ms and handled_ms of each message."""
    from pyspark.sql import functions as F

    arrived = F.unix_millis("timestamp").alias("arrived_ms")
    if options.handled is None:
        never = F.lit(None).cast("bigint").alias("handled_ms")
        return stored.frame(spark, ["timestamp"]).select(arrived, never)
    id = Field.parse(options.id, "id")
    frame = stored.frame(spark, list(dict.fromkeys(("timestamp", *id.columns))))
    journal = options.handled.ids(spark, stored.queue, time=True)
    handled = journal.groupBy("id").agg(F.min("at").alias("handled_ms"))
    return frame.select(id.text().alias("id"), arrived).join(handled, "id", "left")


def _by_window(events: Any, options: BacklogOptions) -> list[Any]:
    """A row for each window, and one for all, in which `window` is null.

    What is odd has a window of its own, as if it had only arrived.
    """
    from pyspark.sql import functions as F

    now = wall_ms()
    sane = F.col("arrived_ms").between(*_sane(options, now)) & F.coalesce(
        F.col("handled_ms").between(0, latest_sent(now)), F.lit(True)
    )
    is_odd = ~F.coalesce(sane, F.lit(False))
    wait = F.greatest(F.col("handled_ms") - F.col("arrived_ms"), F.lit(0))  # clocks differ
    arrival = F.struct(F.col("arrived_ms").alias("at"), F.lit(None).cast("bigint").alias("wait"))
    handling = F.struct(F.col("handled_ms").alias("at"), wait.alias("wait"))
    each = F.when(is_odd | F.col("handled_ms").isNull(), F.array(arrival)).otherwise(
        F.array(arrival, handling)
    )
    rows = events.select(is_odd.alias("odd"), F.inline(each))
    window = F.floor(F.col("at") / options.window_ms).cast("bigint")
    rows = rows.withColumn("window", F.when(F.col("odd"), F.lit(_ODD)).otherwise(window))
    sums = (
        rows.rollup("window")
        .agg(
            F.count_if(F.col("wait").isNull()).alias("arrived"),
            F.count("wait").alias("handled"),
            F.percentile_approx("wait", [0.5, 0.95, 0.99], 10_000).alias("waits"),
            F.max("wait").alias("longest"),
        )
        .limit(MAX_WINDOWS + 3)
    )
    found: list[Any] = sums.collect()
    return found


def _sane(options: BacklogOptions, now: int) -> tuple[int, int]:
    """Between which times a message of the range may have arrived."""
    first = 0 if options.start_ms is None else max(0, options.start_ms - DEFAULTS.timestamp_ahead_ms)
    return first, latest_sent(now if options.end_ms is None else min(now, options.end_ms))


# ---- from windows to a table ----


def _windows(rows: Sequence[Any], options: BacklogOptions) -> list[Window]:
    """Without holes: a window in which nothing happened is a row, too."""
    if not rows:
        return []
    by_number = {row["window"]: row for row in rows}
    first, last = min(by_number), max(by_number)
    if last - first >= MAX_WINDOWS:
        raise InvalidSetting(
            f"the range has {last - first + 1:,} windows, and there may be {MAX_WINDOWS:,}: choose longer "
            "ones, or a shorter range; messages of more than a day before its start are set aside"
        )
    found: list[Window] = []
    behind = 0
    for number in range(first, last + 1):
        row = by_number.get(number)
        arrived = row["arrived"] if row is not None else 0
        if options.handled is None:
            found.append(Window(number * options.window_ms, arrived))
            continue
        handled = row["handled"] if row is not None else 0
        behind += arrived - handled
        waits = _waits(row) if row is not None else None
        found.append(Window(number * options.window_ms, arrived, handled, behind, waits))
    return found


def _waits(row: Any) -> Waits | None:
    if not row["waits"]:
        return None
    p50_ms, p95_ms, p99_ms = row["waits"]
    return Waits(p50_ms, p95_ms, p99_ms, row["longest"])


def _with_samples(windows: Sequence[Window], samples: Sequence[Sample], window_ms: int) -> list[Window]:
    """Each window has its last sample; between two that are known, what went is what came less the rise."""
    last = {sample.time_ms // window_ms: sample.behind for sample in samples}
    found: list[Window] = []
    before: int | None = None
    for window in windows:
        behind = last.get(window.start_ms // window_ms)
        if behind is None:
            before = None
            found.append(window)
            continue
        handled = None if before is None else max(0, window.arrived - (behind - before))
        about = round(behind * window_ms / handled) if handled else None
        found.append(replace(window, handled=handled, behind=behind, about_wait_ms=about))
        before = behind
    return found


# ---- charts of a backlog: PNG files, drawn without a screen ----

_BLUE, _ORANGE, _RED, _GREY = "#1f6fb4", "#e08214", "#b2182b", "#888888"


def draw(found: Backlogged, folder: str) -> list[str]:
    """Files in the folder, which is made: arrival.png, and if they are known backlog.png and waiting.png."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"charts need matplotlib: {how_to_install('spark')}") from None
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSetting(f"charts={folder!r}: the folder cannot be made: {error.strerror}") from None
    times = [datetime.fromtimestamp(w.start_ms / 1000, UTC) for w in found.windows]
    files = []
    for name, title, unit, lines in _charts(found):
        figure = Figure(figsize=(10, 4), layout="constrained")  # has no window, whatever the backend
        axes: Any = figure.subplots()
        for label, colour, values in lines:
            axes.plot(
                times, values, label=label, color=colour, linewidth=1.5, marker="." if len(times) < 50 else ""
            )
        axes.set_title(f"{found.topic}: {title}", loc="left")
        axes.set_ylabel(unit)
        axes.set_xlabel("UTC")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", frameon=False)
        figure.autofmt_xdate()
        files.append(str(Path(folder, name)))
        figure.savefig(files[-1], dpi=100)
    return files


Line = tuple[str, str, list[float]]


def _charts(found: Backlogged) -> list[tuple[str, str, str, Sequence[Line]]]:
    windows, second = found.windows, found.window_ms / 1000
    per_s: list[Line] = [("arrived", _BLUE, [w.arrived / second for w in windows])]
    charts: list[tuple[str, str, str, Sequence[Line]]] = []
    if found.source != "arrival":
        per_s.append(("handled", _ORANGE, _numbers([w.handled for w in windows], 1 / second)))
    charts.append(("arrival.png", "arrival and handling", "messages a second", per_s))
    if found.source == "arrival":
        return charts
    behind: list[Line] = [("behind", _RED, _numbers([w.behind for w in windows], 1))]
    charts.append(("backlog.png", "messages behind", "messages", behind))
    if found.source == "journal":
        waits = [w.waits for w in windows]
        lines: list[Line] = [
            (name, colour, _numbers([None if w is None else getattr(w, f"{name}_ms") for w in waits], 0.001))
            for name, colour in (("p50", _BLUE), ("p95", _ORANGE), ("p99", _RED), ("max", _GREY))
        ]
    else:
        lines = [("about", _BLUE, _numbers([w.about_wait_ms for w in windows], 0.001))]
    charts.append(("waiting.png", "waiting time", "seconds", lines))
    return charts


def _numbers(values: Sequence[Any], times: float) -> list[float]:
    """A hole in the line where nobody knows."""
    return [float("nan") if value is None else value * times for value in values]
