"""How fast Spark writes into a topic, staged and published exactly once; and the archive, from end to end.

Rows of 100 bytes that do not compress, beside what Spark needs to make them (noop). The archive reads the
topic and commits a Delta table, in one run of the job from nothing.
"""

from __future__ import annotations

import shutil
from typing import Any

import deltalake

import postroom.sync
from postroom.spark.jobs.archive import ArchiveOptions, archive

from .spark_ground import Place, Rate, measured

__all__ = ["archiving", "writing"]

_VALUE = "substring(concat(sha2(cast(id as string), 256), sha2(cast(id as string), 256)), 1, 100)"
_TURNS = 3


def writing(here: Place) -> list[Rate]:
    rows = here.messages
    frame = here.spark.range(0, rows, 1, 2).selectExpr("cast(id % 1000 as string) key", f"{_VALUE} value")
    frame = frame.selectExpr("cast(key as binary) key", "cast(value as binary) value")
    noop = frame.write.format("noop").mode("overwrite")
    with postroom.sync.connect(here.url) as mq:
        mq.create_topic("out", partitions=4)
        return [
            measured(here, "made rows -> noop", rows, noop.save, _TURNS),
            measured(here, "made rows -> topic", rows, lambda: _written(here, mq, frame), _TURNS),
        ]


def _written(here: Place, mq: Any, frame: Any) -> int:
    before = mq.topic("out").messages
    frame.write.format("postroom").options(url=here.url, topic="out").mode("append").save()
    return int(mq.topic("out").messages - before)


def archiving(here: Place) -> list[Rate]:
    def run() -> int:
        folder = here.fresh()
        done = archive(here.spark, ArchiveOptions({"url": here.url}, "t", folder))
        there = deltalake.DeltaTable(done.table).count()
        shutil.rmtree(folder)
        return int(there)

    return [measured(here, "archive job: topic -> Delta table", here.messages, run, _TURNS)]
