"""What the tests of streams share: a query into files, and what came out of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import postroom
import postroom.sync

__all__ = ["Query", "numbers", "send"]

COLUMNS = "cast(value as string) value", "topic", "partition", "`offset`"


def send(mq: Any, topic: str, first: int, count: int) -> None:
    """Messages with the numbers from `first` on, over some keys, in several batches."""
    for at in range(first, first + count, 25):
        some = range(at, min(at + 25, first + count))
        mq.send_many(topic, [postroom.Message(b"%d" % n, key=f"k{n % 7}") for n in some])


def numbers(rows: list[Any]) -> list[int]:
    return sorted(int(row.value) for row in rows)


class Query:
    """A stream into Parquet files, with its checkpoint, over several runs."""

    def __init__(self, spark: Any, where: Path, **options: object) -> None:
        self.spark, self.where, self.options = spark, where, options

    def start(self, **trigger: Any) -> Any:
        reading = self.spark.readStream.format("postroom").options(**self.options).load()
        writing = reading.selectExpr(*COLUMNS).writeStream.format("parquet")
        writing = writing.option("checkpointLocation", str(self.where / "checkpoint"))
        return writing.trigger(**trigger).start(str(self.where / "out"))

    def run(self) -> Any:
        """All that is there now."""
        query = self.start(availableNow=True)
        query.awaitTermination(240)
        return query

    def rows(self) -> list[Any]:
        found: list[Any] = self.spark.read.parquet(str(self.where / "out")).collect()
        assert max(Counter((r.topic, r.partition, r.offset) for r in found).values(), default=1) == 1
        return found

    @property
    def batches(self) -> int:
        """How many are done."""
        done = self.where / "checkpoint" / "commits"
        return len([one for one in done.glob("*") if one.name.isdecimal()]) if done.exists() else 0

    def offsets(self, batch: int) -> dict[str, Any]:
        text = (self.where / "checkpoint" / "offsets" / str(batch)).read_text()
        found: dict[str, Any] = json.loads(text.splitlines()[2])
        return found
