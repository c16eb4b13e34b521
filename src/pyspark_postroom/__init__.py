"""Spark looks for modules named `pyspark_…`: `spark.read.format("postroom")` needs no registration."""

from postroom.spark.source import PostroomSource as DefaultSource

__all__ = ["DefaultSource"]
