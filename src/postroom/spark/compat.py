"""What the versions of PySpark differ in: 4.0 and 4.1 on one side, 4.2 and newer on the other.

Since 4.2 Spark says where a micro-batch begins, asks for so many rows, and announces a run that ends
(`availableNow`). Before, it asks for the newest offsets and nothing else, and runs `availableNow` as a single
micro-batch, which a source cannot tell from the first of many. So there each micro-batch reads all that is
there, and options that would cut it short are refused: a run must never end early in silence.

Imports Spark; everything that does not is elsewhere.
"""

from __future__ import annotations

from typing import Any

import pyspark
from pyspark.sql import datasource
from pyspark.sql.pandas.types import to_arrow_schema

from .border import one_sentence
from .options import ReadOptions
from .streaming import Stream
from .whole import WholeStream, refuse_short_runs

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:
    _ADMISSION = False
else:
    _ADMISSION = True

__all__ = ["StreamArrowWriter", "StreamReading", "arrow_schema"]

# Spark 4.0 gives Arrow batches to any writer of this class, also to that of a stream
StreamArrowWriter: Any = getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceArrowWriter)


def arrow_schema(schema: Any) -> Any:
    """As Spark expects it to the letter, with timestamps in UTC."""
    return to_arrow_schema(schema, timezone="UTC") if _ADMISSION else to_arrow_schema(schema)


class _Reading(datasource.DataSourceStreamReader):  # type: ignore[misc]
    @staticmethod
    def check(options: ReadOptions) -> None:
        """Refuses what this version of Spark cannot do."""

    @staticmethod
    def stream(options: ReadOptions) -> Stream:
        return Stream(options)


if _ADMISSION:

    @one_sentence
    class StreamReading(_Reading, SupportsTriggerAvailableNow):  # type: ignore[misc]
        """How Spark asks how far the next micro-batch goes."""

        def getDefaultReadLimit(self) -> ReadLimit:
            most = self._options.max_offsets
            return ReadAllAvailable() if most is None else ReadMaxRows(most)

        def prepareForTriggerAvailableNow(self) -> None:
            self._stream.freeze()

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> Any:
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            return self._stream.latest(self._stream.decode(start), most).encode()

        def reportLatestOffset(self) -> Any:
            return self._stream.newest().encode()

else:

    @one_sentence
    class StreamReading(_Reading):  # type: ignore[no-redef]
        """How Spark asks how far the next micro-batch goes."""

        @staticmethod
        def check(options: ReadOptions) -> None:
            refuse_short_runs(options, pyspark.__version__)

        @staticmethod
        def stream(options: ReadOptions) -> Stream:
            return WholeStream(options)

        def latestOffset(self) -> Any:
            return self._stream.next().encode()
