"""Dagster: a topic's archive as an asset, every hour, with an audit as its check; compaction every night.

A retry is safe at any point. Each run goes on from the last commit of the table and writes every message
exactly once. `dagster dev -f examples/dagster_job/postroom_archive.py`, where Postroom is installed with its
extra `spark-local`.
"""

import os

import dagster as dg

TOPIC, LAKE = "orders", os.environ.get("POSTROOM_LAKE", "/data/lake")
QUEUE = {"url": os.environ.get("POSTROOM_URL", "postroom://localhost:7070")}  # and POSTROOM_TOKEN
SAFE = dg.RetryPolicy(max_retries=3, delay=120)
ONE_WRITER = {"dagster/concurrency_key": "postroom_lake"}  # a limit of 1: a table has one writer


@dg.asset(retry_policy=SAFE, op_tags=ONE_WRITER)
def orders_archive() -> dg.MaterializeResult:
    """All messages of the topic, as a Delta table."""
    import postroom.spark
    from postroom.spark.jobs.archive import ArchiveOptions, archive

    done = archive(postroom.spark.session("archive"), ArchiveOptions(QUEUE, TOPIC, LAKE))
    return dg.MaterializeResult(
        metadata={"messages": done.messages, "behind": done.behind, "version": done.version}
    )


@dg.asset_check(asset=orders_archive)
def nothing_is_missing() -> dg.AssetCheckResult:
    """By the running number that producers put into the header `seq`."""
    import postroom.spark
    from postroom.spark.jobs.audit import AuditOptions, audit

    found = audit(postroom.spark.session("audit"), AuditOptions(QUEUE, TOPIC, number="header:seq"))
    return dg.AssetCheckResult(passed=not found.bad, metadata={"bad": len(found.bad)})


@dg.asset(deps=[orders_archive], retry_policy=SAFE, op_tags=ONE_WRITER)
def orders_compacted() -> dg.MaterializeResult:
    """The same table with fewer and larger files. Needs no Spark."""
    from postroom.spark.jobs.archive import ArchiveOptions, compact

    done = compact(ArchiveOptions(QUEUE, TOPIC, LAKE))
    return dg.MaterializeResult(metadata={"before": done.files_before, "after": done.files_after})


hourly = dg.ScheduleDefinition(
    job=dg.define_asset_job("archive_hourly", [orders_archive]), cron_schedule="5 * * * *"
)
nightly = dg.ScheduleDefinition(
    job=dg.define_asset_job("compact_nightly", [orders_compacted]), cron_schedule="15 3 * * *"
)
defs = dg.Definitions(
    assets=[orders_archive, orders_compacted],
    asset_checks=[nothing_is_missing],
    schedules=[hourly, nightly],
)
