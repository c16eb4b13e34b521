"""Level 1 of the audit: running numbers. Each stream, such as a key, counts its messages from one number on.

In the order in which they are stored the numbers of a stream go up by one. What is missing between the lowest
and the highest was lost; what is there a second time was repeated; what is there once, but behind a higher
one, is out of order. Numbers behind the highest cannot be missed here: journals show those.
"""

from __future__ import annotations

from typing import Any

from .audit_report import Check, Flag
from .fields import Field, rank_column, text_of_bytes
from .stored import Stored

__all__ = ["number_check", "offset_check"]


def number_check(spark: Any, stored: Stored, number: Field, stream: Field, first: int | None) -> Check:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    columns = list(dict.fromkeys(("partition", "offset", *number.columns, *stream.columns)))
    rows = stored.frame(spark, columns, lossy=True).select(
        stream.bytes().alias("stream"),
        number.text().try_cast("bigint").alias("number"),
        "partition",
        "offset",
        rank_column(stored).alias("rank"),
    )
    told = F.col("stream").isNotNull() & F.col("number").isNotNull()
    # what has no number is in no stream: else all of it would be one stream, and one task
    rows = rows.withColumn("spread", F.when(told, F.lit(None)).otherwise(F.xxhash64("partition", "offset")))
    streams = ("stream", "spread")
    as_stored = Window.partitionBy(*streams).orderBy("rank", "offset")
    by_number = Window.partitionBy(*streams).orderBy("number", "rank", "offset")
    rows = rows.withColumns(
        {
            "highest": F.max("number").over(as_stored.rowsBetween(Window.unboundedPreceding, -1)),
            "lower": F.lag("number").over(by_number),
        }
    )
    before = F.col("lower") if first is None else F.coalesce(F.col("lower"), F.lit(first - 1))
    repeated = told & (F.col("lower") == F.col("number"))
    missing = F.col("number") - before - 1
    return Check(
        what=f"the running numbers in {number}",
        by="number",
        rows=rows,
        flags=(
            Flag(
                "stored",
                "lost",
                told & (missing > 0),
                missing,
                {
                    "number": before + 1,
                    "last_number": F.col("number") - 1,
                    "partition": F.lit(None),
                    "offset": F.lit(None),
                },
            ),
            Flag("stored", "repeated", repeated),
            Flag("stored", "out of order", told & ~repeated & (F.col("number") < F.col("highest"))),
        ),
        counts={"numbered": told, "unnumbered": ~told},
        fields={
            "key": text_of_bytes("stream"),
            "number": F.col("number"),
            "partition": F.col("partition"),
            "offset": F.col("offset"),
        },
    )


def offset_check(spark: Any, stored: Stored) -> Check:
    """Offsets between the first and the last of a partition that no message has."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    before = F.lag("offset").over(Window.partitionBy("partition").orderBy("offset"))
    rows = stored.frame(spark, ["partition", "offset"], lossy=True).withColumn("before", before)
    missing = F.col("offset") - F.col("before") - 1
    fields = {
        "partition": F.col("partition"),
        "offset": F.col("before") + 1,
        "last_offset": F.col("offset") - 1,
    }
    return Check("offsets", "offset", rows, (Flag("stored", "gap", missing > 0, missing),), {}, fields)
