"""A topic's table in the archive: Parquet files with a Delta log, by delta-rs; it is read without Spark, too.

The table itself says how far it is: each commit has the offsets it goes from and to, and a number, as a
transaction of Delta's log. Files and offsets are committed in one step, so that what a killed run has left is
in no commit, and is written again. Two runs at once: one commit fails, and nothing of it is seen.

Must never touch a table that is not an archive of this topic. Runs on the driver and needs no Spark.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidSetting, StagingConflict, StoreCorrupt, UsageError
from ...install import how_to_install
from ...model.names import check_topic

__all__ = ["COLUMNS", "Compacted", "File", "Lake", "Mark", "arrow_schema", "flush_log", "is_uri"]

COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers", "date")

_APP = "postroom-archive"
_BATCH, _START, _END = "postroom.batch", "postroom.start", "postroom.end"
_DAY = re.compile(r"/date=([0-9-]+)/")
_LOOK = 20  # commits that are looked at first
_TARGET_BYTES = 256 * 1024 * 1024  # of a file, after compaction


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


class Lake:
    """The table of one topic: FOLDER/TOPIC."""

    def __init__(self, folder: str, topic: str) -> None:
        self._delta = _deltalake()
        self.topic = check_topic(topic)
        self.path = (
            f"{folder.rstrip('/')}/{topic}" if is_uri(folder) else str(Path(folder).absolute() / topic)
        )

    # ---- what is there ----

    def mark(self) -> Mark | None:
        """None: there is no table yet."""
        table = self._table()
        if table is None:
            return None
        self._check(table)
        found, restored = _newest(_commits(table))
        known = table.transaction_version(_APP)
        if found is None or known is None or (found.batch != known and not restored):
            raise StoreCorrupt(
                f"the Delta table {self.path} does not say how far it is archived: its log was cut off, or "
                "somebody else has made it; archive into another folder"
            )
        return Mark(max(found.batch, known), found.offsets)

    def files(self, first: str = "", last: str = "9") -> list[str]:
        """Addresses of the files of these days (2026-01-31), as Spark takes them."""
        uris: list[str] = self.there().file_uris()
        days = ((uri, found[1]) for uri in uris if (found := _DAY.search(uri)))
        return sorted(uri for uri, day in days if first <= day <= last)

    def there(self) -> Any:
        """The table. UsageError if there is none."""
        table = self._table()
        if table is None:
            raise UsageError(
                f"there is no archive of topic {self.topic!r} in {os.path.dirname(self.path)}: name the "
                "folder that `postroom pipeline archive` wrote to"
            )
        self._check(table)
        return table

    @property
    def version(self) -> int:
        version: int = self.there().version()
        return version

    # ---- what is written ----

    def create(self, offsets: dict[str, Any]) -> Mark:
        """An empty table that says where it begins."""
        try:
            self._delta.DeltaTable.create(
                self.path,
                arrow_schema(),
                partition_by=["date"],
                name=self.topic,
                commit_properties=self._commit(0, offsets, offsets),
            )
        except self._delta.exceptions.DeltaError as error:
            raise self._conflict() from error
        self._flush(0)
        return Mark(0, offsets)

    def append(self, mark: Mark, files: Sequence[File], end: dict[str, Any]) -> Mark:
        """One more batch. StagingConflict, and nothing is there, if somebody else has written one."""
        table, batch = self.there(), mark.batch + 1
        if table.transaction_version(_APP) != mark.batch:
            raise self._conflict()
        now_ms = int(time.time() * 1000)
        added = [
            self._delta.transaction.AddAction(f.path, f.bytes, {"date": f.date}, now_ms, True, f.stats)
            for f in files
        ]
        try:
            table.create_write_transaction(
                added,
                "append",
                table.schema(),
                partition_by=["date"],
                commit_properties=self._commit(batch, mark.offsets, end),
            )
        except self._delta.exceptions.CommitFailedError as error:
            raise self._conflict() from error
        self._flush(self.there().version())
        return Mark(batch, end)

    def compact(self) -> Compacted:
        """Few large files instead of many small ones; deletes files that are in no version for a week."""
        table, mark = self.there(), self.mark()
        assert mark is not None, "the table is there"
        carried = self._delta.CommitProperties(
            custom_metadata=_metadata(mark.batch, mark.offsets, mark.offsets)
        )
        before = len(table.file_uris())
        table.optimize.compact(target_size=_TARGET_BYTES, commit_properties=carried)
        deleted = table.vacuum(dry_run=False, full=True, commit_properties=carried)
        return Compacted(before, len(self.there().file_uris()), len(deleted))

    # ---- help ----

    def _table(self) -> Any:
        try:
            return self._delta.DeltaTable(self.path)
        except self._delta.exceptions.TableNotFoundError:
            if not is_uri(self.path) and os.path.isdir(self.path) and os.listdir(self.path):
                raise UsageError(
                    f"{self.path} is not empty, and holds no Delta table: archive into another folder"
                ) from None
            return None

    def _check(self, table: Any) -> None:
        has = {f.name: _kind(f) for f in table.schema().fields}
        wants = {f.name: _kind(f) for f in self._delta.Schema.from_arrow(arrow_schema()).fields}
        wrong = [
            f"column {n} is {has.get(n, 'missing')}, not {k}" for n, k in wants.items() if has.get(n) != k
        ]
        wrong += [f"there is a column {name}" for name in has if name not in wants]
        partitions = list(table.metadata().partition_columns)
        if not wrong and partitions != ["date"]:
            wrong = [f"it is partitioned by {', '.join(partitions) or 'nothing'}, not by date"]
        if wrong:
            raise InvalidSetting(
                f"the Delta table {self.path} has another schema: {'; '.join(wrong)}. Nothing was written; "
                "archive into another folder"
            )
        if (name := table.metadata().name) != self.topic:
            what = f"of topic {name!r}" if name else "no archive of a topic"
            raise InvalidSetting(
                f"the Delta table {self.path} is {what}, and not of {self.topic!r}: archive into another "
                "folder"
            )

    def _commit(self, batch: int, start: dict[str, Any], end: dict[str, Any]) -> Any:
        return self._delta.CommitProperties(
            custom_metadata=_metadata(batch, start, end),
            app_transactions=[self._delta.Transaction(_APP, batch)],
        )

    def _conflict(self) -> StagingConflict:
        return StagingConflict(
            f"another run has written to the Delta table {self.path} meanwhile, and this one nothing: see "
            "that one alone archives this topic into this folder, and start it again"
        )

    def _flush(self, version: int) -> None:
        flush_log(self.path, version)


def flush_log(table: str, version: int) -> None:
    """To the disk, before the queue is told that it may drop what is archived."""
    if is_uri(table):
        return
    log = os.path.join(table, "_delta_log")
    for path in (os.path.join(log, f"{version:020}.json"), log):
        if os.path.exists(path):
            at = os.open(path, os.O_RDONLY)
            try:
                os.fsync(at)
            finally:
                os.close(at)


def _metadata(batch: int, start: dict[str, Any], end: dict[str, Any]) -> dict[str, str]:
    return {_BATCH: str(batch), _START: json.dumps(start), _END: json.dumps(end)}


def _commits(table: Any) -> Iterator[dict[str, Any]]:
    """The newest first; few are read if few are asked for."""
    some = table.history(_LOOK)
    yield from some
    if len(some) == _LOOK:
        yield from table.history()[_LOOK:]


def _newest(commits: Iterator[dict[str, Any]]) -> tuple[Mark | None, bool]:
    """What the last batch says, and whether the table was set back: it counts as what it was set back to.

    Compaction carries it on, for when the log is cut off behind it; but a batch may have come in between, so
    that batches are believed first.
    """
    carried: Mark | None = None
    limit: int | None = None
    for commit in commits:
        if limit is not None and commit["version"] > limit:
            continue
        if commit["operation"] == "RESTORE":
            limit = int(commit["operationParameters"].get("version", commit["version"] - 1))
        if _BATCH not in commit:
            continue
        found = Mark(int(commit[_BATCH]), json.loads(commit[_END]))
        if commit["operation"] in ("WRITE", "CREATE TABLE"):
            return found, limit is not None
        carried = max(found, carried or found, key=lambda mark: mark.batch)
    return carried, limit is not None


def _kind(field: Any) -> str:
    kind = json.loads(field.to_json())["type"]
    return kind if isinstance(kind, str) else json.dumps(_plain(kind), sort_keys=True)


def _plain(kind: Any) -> Any:
    """Without what is the same for all, or of no matter."""
    if isinstance(kind, dict):
        return {
            name: _plain(part)
            for name, part in kind.items()
            if name not in ("metadata", "nullable", "containsNull")
        }
    return [_plain(part) for part in kind] if isinstance(kind, list) else kind


def _deltalake() -> Any:
    try:
        import deltalake.exceptions
        import deltalake.transaction
    except ImportError:
        raise UsageError(f"the archive needs deltalake here: {how_to_install('spark-local')}") from None
    return deltalake
