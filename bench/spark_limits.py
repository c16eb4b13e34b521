"""Spark's own limit: a source in Python that repeats one prebuilt Arrow batch, as a batch and as a stream,
and a sink in Python that drops what it gets.

What any source and sink in Python can reach at most, with the columns of a topic and 100 bytes in each value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from postroom.spark.columns import schema_text
from postroom.spark.reading import set_apart

__all__ = ["BATCH_ROWS", "VALUE", "Prebuilt"]

VALUE = b"x" * 100
BATCH_ROWS = 10_000
_TASKS = 2


class Prebuilt(DataSource):  # type: ignore[misc]
    """Options: `rows` in all, and `maxOffsetsPerTrigger`: of a micro-batch."""

    @classmethod
    def name(cls) -> str:
        return "prebuilt"

    def schema(self) -> str:
        return schema_text(False)

    def reader(self, schema: Any) -> _Batch:
        return _Batch(int(self.options["rows"]), schema)

    def streamReader(self, schema: Any) -> _Stream:
        return _Stream(int(self.options["rows"]), int(self.options["maxOffsetsPerTrigger"]), schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> _Dropping:
        return _Dropping()


class _Batch(DataSourceReader):  # type: ignore[misc]
    def __init__(self, rows: int, schema: Any) -> None:
        self._rows, self._schema = rows, schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self._rows // _TASKS) for _ in range(_TASKS)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _repeated(partition.value, self._schema)


class _Stream(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, rows: int, each: int, schema: Any) -> None:
        self._rows, self._each, self._schema = rows, each, schema

    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._each)

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        most = self._rows if isinstance(limit, ReadAllAvailable) else start["at"] + self._each
        return {"at": min(self._rows, most)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        rows = end["at"] - start["at"]
        tasks = _TASKS if rows >= BATCH_ROWS else 1
        return [InputPartition(rows // tasks) for _ in range(tasks)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _repeated(partition.value, self._schema)


class _Dropping(DataSourceStreamArrowWriter):  # type: ignore[misc]
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        set_apart()
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: Any, batchId: int) -> None:
        pass

    def abort(self, messages: Any, batchId: int) -> None:
        pass


def _repeated(rows: int, schema: Any) -> Iterator[Any]:
    set_apart()  # the limit is not what Spark takes to look for garbage
    batch = _batch(schema.json())
    whole, left = divmod(rows, BATCH_ROWS)
    for _ in range(whole):
        yield batch
    if left:
        yield batch.slice(0, left)


@cache
def _batch(schema: str) -> Any:
    """Made once in a process: later tasks in it begin at once."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    columns = {
        "key": [b"k%d" % (n % 1000) for n in range(BATCH_ROWS)],
        "value": [VALUE] * BATCH_ROWS,
        "topic": ["t"] * BATCH_ROWS,
        "partition": [0] * BATCH_ROWS,
        "offset": list(range(BATCH_ROWS)),
        "timestamp": [1_700_000_000_000_000] * BATCH_ROWS,
        "timestampType": [0] * BATCH_ROWS,
    }
    kinds = StructType.fromJson(json.loads(schema))
    return pa.RecordBatch.from_pydict(columns, schema=to_arrow_schema(kinds, timezone="UTC"))
