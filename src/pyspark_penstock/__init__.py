"""Spark looks for modules named `pyspark_…`: `spark.read.format("penstock")` needs no registration."""

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
