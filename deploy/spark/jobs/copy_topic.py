"""A stream from one topic into another, each message exactly once: `copy_topic.py FROM TO CHECKPOINT`.

The queue is POSTROOM_URL, with POSTROOM_TOKEN if it is a broker with tokens.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

import postroom.spark


def main(source: str, target: str, checkpoint: str) -> None:
    spark = SparkSession.builder.appName("copy").getOrCreate()  # as spark-submit has set it up
    spark.streams.addListener(postroom.spark.lag_listener())
    url = os.environ["POSTROOM_URL"]
    orders = spark.readStream.format("postroom").options(
        url=url, subscribe=source, startingOffsets="earliest", group=f"copy-{target}"
    )
    rows = orders.load().selectExpr(
        "key", "value", "concat(topic, '-', partition) source_partition", "`offset` source_offset"
    )
    query = rows.writeStream.format("postroom").options(url=url, topic=target)
    query.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
