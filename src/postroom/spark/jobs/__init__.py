"""Jobs on Spark, one module each: a function from a session and typed options to a typed result.

Import them from their modules, such as `from postroom.spark.jobs.archive import ArchiveOptions, archive`.
"""
