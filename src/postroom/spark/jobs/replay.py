"""The job `replay`: messages of an archive, or of a topic, into a topic again, each once for a job id.

Keys, values and headers are kept; where a message was is added as headers, `replayed-topic`,
`replayed-partition`, `replayed-offset`, `replayed-timestamp`, and `replayed-id` if it had an id. (Names that
start with `postroom-` are Postroom's own, and handlers do not see them.) A message that is replayed a second
time keeps the first ones. Messages of a key keep their order.

What a job has published is known by its id, and by partition and offset of the source (I20): the job may be
run again after whatever happened, and with a range that has grown. Must never write without an id.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias

from ...errors import InvalidSetting
from ...model.moves.staging import check_name
from ...model.topology.names import HEADER_PREFIX, check_topic
from .failures import connected, explained
from .lake import Format, Lake, open_lake

__all__ = ["ORIGIN", "Bound", "ReplayOptions", "Replayed", "check", "replay"]

Bound: TypeAlias = datetime | Mapping[int, int] | None
"""A moment, offsets by partition, or None: all of it. What ends a range is not in it."""

ORIGIN = "replayed-"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    queue: Mapping[str, str] = field(repr=False)  # how it is reached: url, token, …
    topic: str  # where the messages were
    to: str  # where they go
    job: str  # its id: what it has published is not published again
    folder: str | None = None  # of the archive; None: read from the topic
    format: Format = "delta"  # of the archive
    catalog: str = ""
    start: Bound = None
    end: Bound = None
    partitions: tuple[int, ...] = ()  # only these; none: all

    def lake(self) -> Lake | None:
        if self.folder is None:
            return None
        return open_lake(self.folder, self.topic, self.format, self.catalog)


@dataclass(frozen=True, slots=True)
class Replayed:
    topic: str
    to: str
    job: str
    source: str  # the table of the archive, or the topic
    messages: int  # that were published now
    before: int  # that this job had published before, and that were left out
    seconds: float


def replay(spark: Any, options: ReplayOptions) -> Replayed:
    """Stages the messages, and publishes them when all are there."""
    since = time.monotonic()
    check(options)
    with connected(options.queue) as mq:
        marks = mq.staging(options.job).marks([options.to])
    lake = options.lake()
    with explained():
        counts = _publish(_rows(spark, options, lake), options, marks)
    source = options.topic if lake is None else lake.path
    return Replayed(options.topic, options.to, options.job, source, *counts, time.monotonic() - since)


def check(options: ReplayOptions) -> None:
    """Refuses what cannot be replayed, before anything is started."""
    check_topic(options.topic)
    check_topic(options.to)
    check_name(options.job, "job")
    for name, place in (("start", options.start), ("end", options.end)):
        if isinstance(place, datetime) and place.utcoffset() is None:
            raise InvalidSetting(f"{name} has no time zone: use timezone.utc; not {place!r}")
    if isinstance(options.start, datetime) and isinstance(options.end, datetime):
        empty = options.start >= options.end
    elif isinstance(options.start, Mapping) and isinstance(options.end, Mapping):
        empty = any(first >= options.end[n] for n, first in options.start.items() if n in options.end)
    else:
        empty = False
    if (lake := options.lake()) is not None:
        lake.check()
    with connected(options.queue) as mq:
        for topic in {options.to} if options.folder is not None else {options.topic, options.to}:
            mq.topic(topic)  # raises, and says what was probably meant
    if empty:
        raise InvalidSetting(
            f"end={options.end!r} is not behind start={options.start!r}: there is nothing between"
        )


# ---- what is read ----


def _rows(spark: Any, options: ReplayOptions, lake: Lake | None) -> Any:
    if lake is None:
        found = _of_topic(spark, options)
    else:
        found = lake.frame(spark, _day(options.start) or "", _day(options.end) or "9")
    for condition in _conditions(options):
        found = found.where(condition)
    return found


def _of_topic(spark: Any, options: ReplayOptions) -> Any:
    read = {**options.queue, "includeHeaders": "true"}
    if options.partitions:
        read["assign"] = json.dumps({options.topic: list(options.partitions)})
    else:
        read["subscribe"] = options.topic
    if isinstance(options.start, datetime):
        read["startingTimestamp"] = str(_ms(options.start))
        read["startingOffsetsByTimestampStrategy"] = "latest"
    elif options.start is not None:
        read["startingOffsets"] = _by_partition(options.topic, options.start)
    if isinstance(options.end, Mapping):
        read["endingOffsets"] = _by_partition(options.topic, options.end)
    return spark.read.format("postroom").options(**read).load()


def _by_partition(topic: str, offsets: Mapping[int, int]) -> str:
    return json.dumps({topic: {str(number): offset for number, offset in offsets.items()}})


def _day(place: Bound) -> str | None:
    return place.astimezone(UTC).date().isoformat() if isinstance(place, datetime) else None


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _conditions(options: ReplayOptions) -> list[str]:
    found = [f"topic = '{options.topic}'"]  # an allowed name has no quotes
    if options.partitions:
        found.append(f"partition in ({', '.join(str(int(n)) for n in options.partitions)})")
    for sign, place in ((">=", options.start), ("<", options.end)):
        if isinstance(place, datetime):
            found.append(f"timestamp {sign} timestamp_millis({_ms(place)})")
        elif place is not None:
            cases = " ".join(
                f"when {int(number)} then `offset` {sign} {int(o)}" for number, o in place.items()
            )
            found.append(f"case partition {cases} else true end")
    return found


# ---- what is written ----


def _publish(rows: Any, options: ReplayOptions, marks: Mapping[str, int]) -> tuple[int, int]:
    """How many messages were published, and how many had been before."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    rows = rows.selectExpr(
        "key",
        "coalesce(value, X'') value",
        f"{_headers()} headers",
        "concat(topic, '/', partition) source_partition",
        "`offset` source_offset",
        "partition",
    )
    spread = f.coalesce(f.col("key"), f.col("source_partition").cast("binary"))
    ordered = _spread(rows, spread).sortWithinPartitions("partition", "source_offset")
    seen = Observation()
    new = " ".join(f"when '{name}' then source_offset > {int(mark)}" for name, mark in marks.items())
    is_new = f.expr(f"case source_partition {new} else true end" if new else "true")
    counted = ordered.drop("partition").observe(
        seen, f.count(f.lit(1)).alias("rows"), f.count_if(is_new).alias("new")
    )
    write = {**options.queue, "topic": options.to, "query": options.job}
    counted.write.format("postroom").options(**write).mode("append").save()
    return int(seen.get["new"]), int(seen.get["rows"]) - int(seen.get["new"])


def _spread(rows: Any, by: Any) -> Any:
    """Equal values in one task: as many tasks as cores, which Spark Connect keeps to itself."""
    spark = rows.sparkSession
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        return rows.repartition(by)
    return rows.repartition(spark.sparkContext.defaultParallelism, by)


def _headers() -> str:
    """The message's own, and where it was."""
    kept = f"filter(coalesce(headers, array()), h -> not startswith(h.key, '{HEADER_PREFIX}'))"
    origin = {
        "topic": "topic",
        "partition": "cast(partition as string)",
        "offset": "cast(`offset` as string)",
        "timestamp": "cast(unix_millis(timestamp) as string)",
    }
    made = ", ".join(
        f"named_struct('key', '{ORIGIN}{name}', 'value', cast({value} as binary))"
        for name, value in origin.items()
    )
    known = f"filter(array({made}), h -> h.value is not null)"  # a timestamp may be none
    ids = (
        f"transform(filter(coalesce(headers, array()), h -> h.key = '{HEADER_PREFIX}id'), "
        f"h -> named_struct('key', '{ORIGIN}id', 'value', h.value))"
    )
    again = f"exists(coalesce(headers, array()), h -> h.key = '{ORIGIN}topic')"
    return f"if({again}, {kept}, concat({kept}, {known}, {ids}))"
