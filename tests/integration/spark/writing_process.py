"""A driver that copies a topic into another until it is killed: `python -m … URL CHECKPOINT`."""

from __future__ import annotations

import sys

import postroom.spark


def main(url: str, checkpoint: str) -> None:
    spark = postroom.spark.session("copy", master="local[2]", memory="700m")
    spark.sparkContext.setLogLevel("FATAL")
    copy(spark, url, checkpoint, maxOffsetsPerTrigger=200).start().awaitTermination()


def copy(spark: object, url: str, checkpoint: str, source: bool = True, **options: object):  # type: ignore[no-untyped-def]
    """The stream; rows carry where they come from, if `source`."""
    reading = spark.readStream.format("postroom").options(url=url, subscribe="in", startingOffsets="earliest")  # type: ignore[attr-defined]
    columns = ["key", "value"]
    if source:
        columns += ["source_partition", "source_offset"]
    rows = reading.options(includeSource=True, **options).load().selectExpr(*columns)
    writing = rows.writeStream.format("postroom").options(url=url, topic="out")
    return writing.option("checkpointLocation", checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
