"""The job `triage`: a group's dead letters by error, so that one can see what to repair and what to redrive.

Reasons that differ in numbers and ids alone are one error. The list for `postroom dead redrive --from` has a
line for each letter, with its error, so that a part of it can be chosen with `grep`. Looks, and changes
nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InvalidSetting
from ...files import open_private
from ...model.delivery.reason import NO_REASON, PLAIN, PLAIN_CHARS
from .failures import connected, explained

__all__ = ["Error", "Sample", "Triage", "TriageOptions", "plain_reason", "triage"]

_START_BYTES = 200  # of a value, in a sample


@dataclass(frozen=True, slots=True)
class TriageOptions:
    queue: Mapping[str, str] = field(repr=False)  # how it is reached: url, token, …
    topic: str
    group: str
    limit: int = 1_000_000  # letters, the oldest first
    samples: int = 3  # of each error
    error: str = ""  # only errors with this text in them
    redrive_list: str | None = None  # a file that is made


@dataclass(frozen=True, slots=True)
class Sample:
    id: str
    partition: int  # of the topic
    offset: int
    key: bytes | None
    headers: Mapping[str, bytes]
    value: bytes  # its start
    reason: str
    dead_ms: int


@dataclass(frozen=True, slots=True)
class Error:
    error: str
    letters: int
    keys: int  # different ones
    attempts: int  # at most
    first_ms: int
    last_ms: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Triage:
    topic: str
    group: str
    letters: int
    more: bool  # there are more than `limit`
    errors: tuple[Error, ...]  # the most frequent first
    redrive_list: str | None


def triage(spark: Any, options: TriageOptions) -> Triage:
    if options.limit < 1 or options.samples < 0:
        raise InvalidSetting(
            f"limit={options.limit}, samples={options.samples}: whole numbers from 1 and 0 up"
        )
    if options.redrive_list is not None and os.path.exists(options.redrive_list):
        raise InvalidSetting(
            f"{options.redrive_list} is there already: name another file for the redrive list"
        )
    with connected(options.queue) as mq:
        letters = mq.dead_letters(options.topic, options.group, limit=options.limit + 1)
    more, letters = len(letters) > options.limit, letters[: options.limit]
    if not letters:
        return Triage(options.topic, options.group, 0, False, (), None)
    with explained():
        rows = _rows(spark, letters, options.error).cache()
        try:
            errors = _errors(rows, options.samples)
            if options.redrive_list is not None:
                _write_list(rows, options)
        finally:
            rows.unpersist()
    total = sum(error.letters for error in errors)
    return Triage(options.topic, options.group, total, more, errors, options.redrive_list)


def plain_reason(column: str) -> str:
    """SQL: the first line of a reason, without numbers and ids."""
    found = f"substring_index(trim({column}), '\\n', 1)"
    for pattern, word in PLAIN:
        found = f"regexp_replace({found}, r'{pattern}', '{word}')"
    found = f"left(trim({found}), {PLAIN_CHARS})"
    return f"if({found} = '', '{NO_REASON}', {found})"


# ---- letters ----


def _rows(spark: Any, letters: list[Any], error: str) -> Any:
    import pyarrow as pa
    from pyspark.sql import functions as f

    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    columns = {
        "id": pa.array([one.id for one in letters], pa.string()),
        "partition": pa.array([one.partition for one in letters], pa.int32()),
        "offset": pa.array([one.offset for one in letters], pa.int64()),
        "key": pa.array([one.key for one in letters], pa.binary()),
        "headers": pa.array([list(one.headers.items()) for one in letters], pa.list_(header)),
        "value": pa.array([one.value[:_START_BYTES] for one in letters], pa.binary()),
        "reason": pa.array([one.reason for one in letters], pa.string()),
        "attempts": pa.array([one.attempts for one in letters], pa.int32()),
        "dead_ms": pa.array([one.dead_at for one in letters], pa.int64()),
    }
    rows = spark.createDataFrame(pa.table(columns)).withColumn("error", f.expr(plain_reason("reason")))
    return rows.where(f.contains(f.lower("error"), f.lit(error.lower()))) if error else rows


def _errors(rows: Any, samples: int) -> tuple[Error, ...]:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    newest = Window.partitionBy("error").orderBy(f.desc("dead_ms"), f.desc("offset"))
    whole = f.struct("number", *(name for name in rows.columns if name != "error"))
    shown = f.collect_list(f.when(f.col("number") <= samples, whole))
    counted = (
        rows.withColumn("number", f.row_number().over(newest))
        .groupBy("error")
        .agg(
            f.count(f.lit(1)).alias("letters"),
            f.count_distinct("key").alias("keys"),
            f.max("attempts").alias("attempts"),
            f.min("dead_ms").alias("first_ms"),
            f.max("dead_ms").alias("last_ms"),
            f.sort_array(shown).alias("samples"),
        )
    )
    found = [_error(row) for row in counted.collect()]
    return tuple(sorted(found, key=lambda error: (-error.letters, error.error)))


def _error(row: Any) -> Error:
    return Error(**{**row.asDict(), "samples": tuple(_sample(one) for one in row["samples"])})


def _sample(row: Any) -> Sample:
    return Sample(
        id=row["id"],
        partition=row["partition"],
        offset=row["offset"],
        key=None if row["key"] is None else bytes(row["key"]),
        headers={pair["key"]: bytes(pair["value"]) for pair in row["headers"] or ()},
        value=bytes(row["value"]),
        reason=row["reason"],
        dead_ms=row["dead_ms"],
    )


# ---- the list ----


def _write_list(rows: Any, options: TriageOptions) -> None:
    """A whole file or none."""
    assert options.redrive_list is not None, "it was asked for"
    unfinished = f"{options.redrive_list}.part"
    wanted = rows.select("id", "partition", "offset", "error").toArrow()
    with open(open_private(Path(unfinished), like=Path(options.redrive_list)), "w", encoding="utf-8") as file:
        file.truncate()  # of an earlier run
        for row in wanted.sort_by([("partition", "ascending"), ("offset", "ascending")]).to_pylist():
            line = {"topic": options.topic, "group": options.group, **row}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(unfinished, options.redrive_list)
