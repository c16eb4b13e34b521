"""A topic's table in a data lake: what archive, replay and audit ask of it, whichever format it has.

The table itself says how far it is: files and the offsets they go to are committed in one step, with the
number of the batch, so that what a killed run has left is in no commit, and is written again. Other programs
may delete rows, add columns, compact and clean up at any time, as in any other table. `delta` and `iceberg`
hold the two formats.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from ....errors import InvalidSetting, StagingConflict, UsageError
from ....model.topology.names import check_topic

__all__ = [
    "COLUMNS",
    "Compacted",
    "File",
    "Format",
    "Lake",
    "Mark",
    "SetBack",
    "Sink",
    "arrow_schema",
    "is_uri",
    "open_lake",
    "table_path",
]


COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers", "date")

TARGET_BYTES = 256 * 1024 * 1024
"""Of a file, after compaction."""

Format: TypeAlias = Literal["delta", "iceberg"]


@dataclass(frozen=True, slots=True)
class File:
    """A Parquet file that a task has written."""

    path: str  # below the table
    date: str
    bytes: int
    rows: int
    stats: str  # as Delta has them


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a table is."""

    batch: int
    offsets: dict[str, Any]  # encoded `Offsets`


@dataclass(frozen=True, slots=True)
class Compacted:
    files_before: int
    files_after: int
    files_deleted: int  # of earlier compactions, and of runs that were killed


class SetBack(StagingConflict):
    """Somebody has set the table back to an earlier version: `mark` says how far it is now."""


class Lake(Protocol):
    """The table of one topic."""

    @property
    def topic(self) -> str: ...

    @property
    def path(self) -> str:
        """Where it is; files that are added are below."""

    @property
    def version(self) -> int: ...

    def mark(self) -> Mark | None:
        """None: there is no table yet. InvalidSetting if it is not one that can be archived into."""

    def check(self) -> None:
        """UsageError if there is no table; InvalidSetting if it cannot be read."""

    def create(self, offsets: dict[str, Any]) -> Mark:
        """An empty table that says where it begins."""

    def append(self, mark: Mark, files: Sequence[File], end: dict[str, Any]) -> Mark:
        """One more batch. StagingConflict, and nothing is there, if another run has written one."""

    def frame(self, spark: Any, first: str = "", last: str = "9") -> Any:
        """A DataFrame of the rows of these days (2026-01-31), without what was deleted from the table."""

    def compact(self) -> Compacted:
        """Few large files instead of many small ones; deletes files that no version has needed for a week."""


def open_lake(folder: str, topic: str, format: str = "delta", catalog: str = "") -> Lake:
    """The table of this topic; it need not be there yet."""
    if format == "delta":
        if catalog:
            raise InvalidSetting(
                "a catalog goes with the format iceberg: leave it out, or choose that format"
            )
        from .delta import DeltaLake

        return DeltaLake(folder, topic)
    if format == "iceberg":
        from .iceberg import IcebergLake

        return IcebergLake(folder, topic, catalog)
    raise InvalidSetting(f"format={format!r}: choose delta or iceberg")


def table_path(folder: str, topic: str) -> str:
    """FOLDER/TOPIC."""
    check_topic(topic)
    return f"{folder.rstrip('/')}/{topic}" if is_uri(folder) else str(Path(folder).absolute() / topic)


def is_uri(path: str) -> bool:
    return "://" in path


def arrow_schema(*, date: bool = True) -> Any:
    """Of the table; files lack the date, which is in their path."""
    import pyarrow as pa

    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    kinds = (
        pa.string(), pa.int32(), pa.int64(), pa.timestamp("us", "UTC"), pa.binary(), pa.binary(),
        pa.list_(header), pa.date32(),
    )  # fmt: skip
    fields = list(zip(COLUMNS, kinds, strict=True))
    return pa.schema(fields if date else fields[:-1])


def with_date(rows: Any) -> Any:
    """A DataFrame with the day of the timestamp, in UTC whatever the session's time zone is."""
    from pyspark.sql import functions as f

    day = f.floor(f.unix_micros("timestamp") / f.lit(86_400_000_000))
    return rows.withColumn("date", f.date_from_unix_date(day.cast("int")))


def missing(folder: str, topic: str) -> UsageError:
    return UsageError(
        f"there is no archive of topic {topic!r} in {folder}: name the folder that `postroom pipeline "
        "archive` wrote to"
    )


def conflict(path: str) -> StagingConflict:
    return StagingConflict(
        f"another run has written to the table {path} meanwhile, and this one nothing: see that one alone "
        "archives this topic into this folder, and start it again"
    )


def set_back(path: str) -> SetBack:
    return SetBack(
        f"the table {path} was set back to an earlier version meanwhile, and nothing was written: start the "
        "archive again, and it goes on from there"
    )


def flush(path: str) -> None:
    """To the disk, file or folder, if it is there."""
    if os.path.exists(path):
        at = os.open(path, os.O_RDONLY)
        try:
            os.fsync(at)
        finally:
            os.close(at)


# ---- a file below a table, where the table is: in a folder here, or at an address of an object store ----
# What is in a folder is on the disk when the file is closed.


class Sink:
    def __init__(self, table: str, path: str) -> None:
        """`path` is below the table; a file that is there already is an error."""
        self._local = None if is_uri(table) else os.path.join(table, path)
        if self._local is not None:
            os.makedirs(os.path.dirname(self._local), exist_ok=True)
            self.stream: Any = open(self._local, "xb")  # noqa: SIM115  (closed by `close`)
        else:
            from pyarrow.fs import FileSystem

            system, root = FileSystem.from_uri(table)
            self.stream = system.open_output_stream(f"{root}/{path}")

    def close(self) -> int:
        """How many bytes it has."""
        size: int = self.stream.tell()
        if self._local is not None:
            self.stream.flush()
            os.fsync(self.stream.fileno())
        self.stream.close()
        return size
