"""docs/howto/example-logs-to-the-lake.md to its end: archived, queried and audited in real Spark."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from postroom.integrations.logging import PostroomHandler
from postroom.spark.jobs.archive import ArchiveOptions, archive
from postroom.spark.jobs.audit import AuditOptions, audit
from postroom.spark.jobs.lake import open_lake

LONG = 60


def test_records_are_archived_queried_and_audited(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("logs", partitions=2)
    shop = logging.Logger("shop", logging.INFO)
    handler = PostroomHandler("logs", url, buffer_bytes="1 MB")
    shop.addHandler(handler)
    for number in range(100):
        shop.info("order %d", number)
    shop.error("order %d", 100)
    assert handler.flushed(LONG)
    lake = str(tmp_path / "lake")
    assert archive(spark, ArchiveOptions({"url": url}, "logs", lake)).messages == 101
    open_lake(lake, "logs").frame(spark).createOrReplaceTempView("logs")
    level = "get_json_object(cast(value AS string), '$.level')"
    rows = spark.sql(f"SELECT {level} level, count(*) records FROM logs GROUP BY 1 ORDER BY 1").collect()
    assert [tuple(row) for row in rows] == [("ERROR", 1), ("INFO", 100)]

    def audited() -> Any:
        options = AuditOptions(
            {"url": url},
            "logs",
            number="header:seq",
            stream="header:producer",
            report=str(tmp_path / "bad.jsonl"),
        )
        return audit(spark, options)

    assert audited().verdict == "clean"
    shop.info("x" * (1 << 21))  # is cut, and fits
    shop.info("y", extra={"blob": "z" * (2 << 20)})  # does not fit into the buffer: dropped, and numbered
    shop.info("the last")
    assert handler.flushed(LONG) and (handler.sent, handler.dropped) == (103, 1)
    handler.close()
    found = audited()
    assert found.verdict == "not clean" and found.count("stored", "lost") == 1
