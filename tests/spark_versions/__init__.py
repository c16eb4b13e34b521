"""Postroom on every version of PySpark that it is said to work on: `python -m tests.spark_versions`."""
