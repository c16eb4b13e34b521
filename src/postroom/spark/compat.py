"""What the versions of PySpark differ in: 4.0 and 4.1 on one side, 4.2 and newer on the other.

Since 4.2 Spark says where a micro-batch begins, asks for so many rows, and announces a run that ends
(`availableNow`). Before, it asks for the newest offsets and nothing else, and runs `availableNow` as a single
micro-batch, which a source cannot tell from the first of many. So there each micro-batch reads all that is
there, and options that would cut it short are refused: a run must never end early in silence.

Imports Spark; everything that does not is elsewhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, GeneratorType
from typing import Any, TypeVar

import pyspark
from pyspark.sql import datasource
from pyspark.sql.pandas.types import to_arrow_schema

from ..errors import PostroomError
from .options import ReadOptions
from .streaming import Stream, WholeStream, refuse_short_runs

__all__ = ["StreamArrowWriter", "StreamReading", "arrow_schema", "one_sentence"]


# ---- the border to Spark's Python processes: an error of ours crosses it as one sentence ----
# Spark sends the text of an error to Java, and a user finds it in the message of another one. A traceback
# would come before the sentence, and there is nothing in it that helps. So it is left out, in the way
# that Spark has for it; the process ends with the error, so that no other one loses its traceback. Errors
# that are none of ours keep theirs.

C = TypeVar("C", bound=type)

_HIDE = "SPARK_HIDE_TRACEBACK"


def one_sentence(spark_calls: C) -> C:
    """A class with methods that Spark calls: whatever of ours they raise has no traceback."""
    for name, found in list(vars(spark_calls).items()):
        if isinstance(found, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(spark_calls, name, _crossing(found))
    return spark_calls


def _crossing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _cut():
            found = method(*args, **kwargs)
        return _each(found) if isinstance(found, GeneratorType) else found

    return called


def _each(rows: Iterator[Any]) -> Iterator[Any]:
    with _cut():
        yield from rows


@contextmanager
def _cut() -> Iterator[None]:
    try:
        yield
    except PostroomError:
        if _in_spark():
            os.environ[_HIDE] = "1"
        raise


def _in_spark() -> bool:
    """In a process that Spark has started, and not in one that uses these classes itself."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


# ---- what differs between versions of Spark ----

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
