"""Where in a message a job finds what it needs: `key`, `value`, `id`, `place`, `header:NAME` or `json:FIELD`.

And where it finds it beside the queue: in a journal, which is a topic or a file. Decides how such words are
understood, and refuses those that are not, with the option's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...errors import InvalidSetting
from ...model.messages.ids import ID_HEADER
from ...model.topology.route import Route
from .. import queue as positions
from ..columns import COLUMNS, HEADERS
from ..options import read_options
from ..queue import Queue
from .lake.delta import is_delta, journal_rows
from .lake.iceberg import IcebergLake, is_iceberg

__all__ = ["Field", "Journal", "Stored", "look", "rank_column", "ranks", "text_of_bytes"]


# ---- the offsets of a topic that a job reads, decided once, so that every query sees the same ----
# Looks at the queue before the first query and pins the offsets of every partition. Also knows which
# partitions come before which, so that the messages of a key have an order across splits and merges
# (R26).


@dataclass(frozen=True, slots=True)
class Stored:
    """Offsets of the partitions of a topic, by number: from `start` up to, and without, `end`."""

    topic: str
    route: Route
    start: Mapping[int, int] = field(hash=False)
    end: Mapping[int, int] = field(hash=False)
    queue: Mapping[str, str] = field(repr=False, hash=False)

    @property
    def offsets(self) -> int:
        return sum(self.end[number] - self.start[number] for number in self.end)

    def frame(self, spark: Any, columns: Sequence[str], *, lossy: bool = False) -> Any:
        """A DataFrame with these columns only. `lossy`: what is not there any more is left out."""
        kinds = {**COLUMNS, "headers": HEADERS}
        options = {
            **self.queue,
            "subscribe": self.topic,
            "failOnDataLoss": str(not lossy).lower(),
            "startingOffsets": json.dumps({self.topic: {str(n): at for n, at in self.start.items()}}),
            "endingOffsets": json.dumps({self.topic: {str(n): at for n, at in self.end.items()}}),
        }
        schema = ", ".join(f"`{name}` {kinds[name]}" for name in columns)
        return spark.read.format("postroom").schema(schema).options(**options).load()


def look(
    queue: Mapping[str, str], topic: str, *, start_ms: int | None = None, end_ms: int | None = None
) -> Stored:
    """By the time of the messages: since `start_ms`, and before `end_ms`; else all that is there now."""
    if start_ms is not None and end_ms is not None and start_ms >= end_ms:
        raise InvalidSetting("the range is empty: it begins where it ends, or after that")
    given = {**queue, "subscribe": topic, "startingOffsetsByTimestampStrategy": "latest"}
    if start_ms is not None:
        given["startingTimestamp"] = str(start_ms)
    if end_ms is not None:
        given["endingTimestamp"] = str(end_ms)
    options = read_options(given, streaming=False)
    with Queue(options.reach) as opened:
        now = positions.look(opened, options.topics)
        first, last = positions.starts(opened, options, now), positions.ends(opened, options, now)
        route = opened.routes(options.topics)[0]
    start = {number: at for (_, number), at in first.at.items()}
    end = {number: max(at, start[number]) for (_, number), at in last.at.items()}
    return Stored(topic, route, start, end, dict(queue))


def ranks(route: Route) -> dict[int, int]:
    """By number: a partition has a higher rank than all that it follows."""
    numbers = {piece.partition_id: piece.partition for piece in route.partitions}
    found: dict[int, int] = {}
    for piece in route.partitions:  # whatever follows comes later
        before = [numbers[id] for id in route.predecessors.get(piece.partition_id, ()) if id in numbers]
        found[piece.partition] = 1 + max((found.get(number, 0) for number in before), default=0)
    return found


# ---- the fields of messages ----

_WORDS = ("key", "value", "id", "place")
_JSON_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
_JSON = (".json", ".jsonl", ".ndjson")
_FILES = {".parquet": "parquet", ".csv": "csv", ".txt": "text", **dict.fromkeys(_JSON, "json")}


@dataclass(frozen=True, slots=True)
class Field:
    kind: Literal["key", "value", "id", "place", "header", "json"]
    name: str = ""

    @classmethod
    def parse(cls, text: str, option: str) -> Field:
        kind, colon, name = text.partition(":")
        if kind in _WORDS and not colon:
            return cls(kind)  # type: ignore[arg-type]
        if (kind == "header" and name) or (kind == "json" and _JSON_NAME.fullmatch(name)):
            return cls(kind, name)  # type: ignore[arg-type]
        raise InvalidSetting(
            f"{option}={text!r}: choose {', '.join(_WORDS)}, header:NAME or json:FIELD (of a JSON value)"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the data source."""
        match self.kind:
            case "id" | "header":
                return ("headers",)
            case "place":
                return ("partition", "offset")
            case "json":
                return ("value",)
            case kind:
                return (kind,)

    def bytes(self) -> Any:
        """A Spark column: what is there, null if nothing is."""
        from pyspark.sql import functions as F

        match self.kind:
            case "id" | "header":
                name = ID_HEADER if self.kind == "id" else self.name
                return F.get(F.filter("headers", lambda pair: pair["key"] == name), F.lit(0))["value"]
            case "json":
                return F.get_json_object(F.col("value").cast("string"), f"$.{self.name}").cast("binary")
            case "place":
                return F.concat_ws(":", F.col("partition"), F.col("offset")).cast("binary")
            case kind:
                return F.col(kind)

    def text(self) -> Any:
        return self.bytes().cast("string")

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True)
class Journal:
    """Ids that somebody wrote down: `topic:NAME`, or a file.

    A file is Parquet, CSV with a header, JSON lines (`.jsonl`), or text with an id on each line (`.txt`); a
    folder is an archive's table, any other of Delta, or Parquet. `id`: where the id is, in a message, or the
    column of a file; `at`: the column with the order or the time. A topic has those by itself.
    """

    source: str
    id: str = "id"
    at: str = ""

    @property
    def topic(self) -> str | None:
        return self.source.removeprefix("topic:") if self.source.startswith("topic:") else None

    @property
    def has_order(self) -> bool:
        return self.topic is not None or bool(self.at)

    def ids(self, spark: Any, queue: Mapping[str, str], *, time: bool = False) -> Any:
        """A DataFrame: `id`, and `at`, a number that grows. `time`: `at` is milliseconds since 1970."""
        if self.topic is not None:
            return self._of_topic(spark, look(queue, self.topic), time)
        return self._of_file(spark, time)

    def _of_topic(self, spark: Any, stored: Stored, time: bool) -> Any:
        from pyspark.sql import functions as F

        id = Field.parse(self.id, "id")
        columns = dict.fromkeys((*id.columns, *(("timestamp",) if time else ("partition", "offset"))))
        at = F.unix_millis("timestamp") if time else rank_column(stored) * F.lit(1 << 48) + F.col("offset")
        return stored.frame(spark, list(columns)).select(id.text().alias("id"), at.alias("at"))

    def _of_file(self, spark: Any, time: bool) -> Any:
        from pyspark.errors import AnalysisException
        from pyspark.sql import functions as F

        try:
            frame = self._rows(spark)
        except AnalysisException as error:
            if "PATH_NOT_FOUND" in (error.getCondition() or ""):
                raise InvalidSetting(
                    f"there is no journal {self.source}: name a file, or topic:NAME"
                ) from None
            raise
        wanted = [name for name in (self.id, self.at) if name]
        missing = [name for name in wanted if name not in frame.columns]
        if missing:
            raise InvalidSetting(
                f"the journal {self.source} has no column {missing[0]!r}; it has {', '.join(frame.columns)}"
            )
        at = _as_number(frame, self.at, time) if self.at else F.lit(None).cast("bigint")
        return frame.select(F.col(f"`{self.id}`").cast("string").alias("id"), at.alias("at"))

    @property
    def _path(self) -> str:
        """Spark has a working directory and a file system of its own: what is here is named in full."""
        here = Path(self.source)
        return f"file://{here.absolute()}" if here.exists() else self.source

    def _rows(self, spark: Any) -> Any:
        path = Path(self.source)
        suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        match _FILES.get(suffix.lower()):
            case "csv":
                return spark.read.option("header", "true").csv(self._path)
            case "json":
                return spark.read.option("primitivesAsString", "true").json(self._path)
            case "text":
                return spark.read.text(self._path).withColumnRenamed("value", self.id)
            case "parquet":
                return spark.read.parquet(self._path)
            case _ if is_delta(self.source):
                return journal_rows(spark, self.source)
            case _ if is_iceberg(self.source):
                return IcebergLake(str(path.parent), path.name).frame(spark)
            case _ if not suffix:
                return spark.read.parquet(self._path)
        raise InvalidSetting(
            f"the journal {self.source} is of no kind that is known: {', '.join(_FILES)}, a Delta table, a "
            "folder of Parquet files, or topic:NAME"
        )


def _as_number(frame: Any, name: str, time: bool) -> Any:
    """Moments as milliseconds, or as microseconds where only the order counts."""
    from pyspark.sql import functions as F

    kind = frame.schema[name].dataType.typeName()
    column = F.col(f"`{name}`")
    moment = F.unix_millis if time else F.unix_micros
    if kind in ("timestamp", "date"):
        return moment(column.cast("timestamp"))
    if kind != "string":
        return column.cast("bigint")
    return F.coalesce(column.try_cast("bigint"), moment(column.try_cast("timestamp")))


def rank_column(stored: Stored) -> Any:
    """Of a row's partition: messages of one key are in the order of (rank, offset)."""
    from pyspark.sql import functions as F

    pairs = [F.lit(one) for pair in sorted(ranks(stored.route).items()) for one in pair]
    return F.element_at(F.create_map(*pairs), F.col("partition")).cast("bigint")


def text_of_bytes(name: str) -> Any:
    """Bytes as people read them: text, or `hex:…`."""
    from pyspark.sql import functions as F

    text = F.col(name).cast("string")
    return F.when(F.is_valid_utf8(text), text).otherwise(F.concat(F.lit("hex:"), F.hex(name)))
