"""A topic's table as Parquet files with a Delta log, by delta-rs; it is read without Spark, too.

How far the table is stands in each commit: as metadata, for people and for the next run, and as transactions
of Delta's log, which stay when the commits behind a checkpoint are cleaned up. A commit that loses a race to
somebody who compacts, deletes or adds a column is tried again; one that loses it to another run is not.

Must never touch a table that is not an archive of this topic, nor read one with a feature that is not known
here. Runs on the driver and needs no Spark, but to read rows.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from ....errors import InvalidSetting, StoreCorrupt, UsageError, how_to_install
from . import (
    COLUMNS,
    TARGET_BYTES,
    Compacted,
    File,
    Mark,
    arrow_schema,
    conflict,
    flush,
    is_uri,
    missing,
    set_back,
    table_path,
    with_date,
)

__all__ = ["DeltaLake", "delta_rows", "flush_log", "is_delta", "journal_rows", "kept_rows", "newest"]


# ---- rows of a Delta table without those that it has deleted ----
# Delta deletes a row by a deletion vector beside the file, which keeps it: whoever reads the file alone
# sees it again. Files without a vector are read by Spark as they are. Those with one are read by
# executors through Arrow, each together with its vector. Must never read a file whose vector is not
# known.

_BATCH_ROWS = 65_536


def delta_rows(spark: Any, table: Any, columns: Sequence[str], uris: Sequence[str]) -> Any:
    """A DataFrame with these columns, which are in files and no partitions, of these files of the table."""
    schema = _spark_schema(table, columns)
    vectors = _vectors(table)
    if vectors.keys() - {_vectors_plain(uri) for uri in table.file_uris()}:
        raise StoreCorrupt(
            f"the Delta table {table.table_uri} has deletion vectors of files that are not in it: repair the "
            "table, or compact it by the program that deleted rows"
        )
    whole = [_vectors_plain(uri) for uri in uris if _vectors_plain(uri) not in vectors]
    holed = [(uri, vectors[_vectors_plain(uri)]) for uri in uris if _vectors_plain(uri) in vectors]
    found = spark.read.schema(schema).parquet(*whole) if whole else spark.createDataFrame([], schema)
    if not holed:
        return found
    files = spark.createDataFrame(holed, "path string, kept binary").repartition(len(holed))
    return found.unionAll(files.mapInArrow(partial(kept_rows, _arrow_schema(table, columns)), schema))


def kept_rows(schema: Any, files: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: files and which of their rows they keep come in, rows go out. Runs on executors."""
    for some in files:
        for path, kept in zip(some.column(0).to_pylist(), some.column(1).to_pylist(), strict=True):
            yield from _rows_of(path, kept, schema)


def _rows_of(path: str, kept: bytes, schema: Any) -> Iterator[Any]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSystem, LocalFileSystem

    system, name = FileSystem.from_uri(path) if is_uri(path) else (LocalFileSystem(), _vectors_plain(path))
    bits = np.unpackbits(np.frombuffer(kept, np.uint8)).astype(bool)
    at = 0
    with system.open_input_file(name) as source:
        file = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
        there = set(file.schema_arrow.names)
        wanted = [field.name for field in schema if field.name in there]
        for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
            mask = bits[at : at + batch.num_rows]
            at += batch.num_rows
            rows = batch.filter(pa.array(np.pad(mask, (0, batch.num_rows - len(mask)), constant_values=True)))
            yield pa.RecordBatch.from_arrays(
                [
                    rows.column(field.name).cast(field.type)
                    if field.name in there
                    else pa.nulls(rows.num_rows, field.type)
                    for field in schema
                ],
                schema=schema,
            )


def _vectors(table: Any) -> dict[str, bytes]:
    """By file: a bit for each row, set if the row is kept. Rows behind the last bit are kept."""
    import numpy as np
    import pyarrow as pa

    found: dict[str, bytes] = {}
    for batch in table.deletion_vectors():
        for path, kept in zip(*(pa.record_batch(batch).column(n) for n in range(2)), strict=True):
            bits = kept.values.to_numpy(zero_copy_only=False)
            whole = np.pad(bits, (0, -len(bits) % 8), constant_values=True)
            found[_vectors_plain(path.as_py())] = np.packbits(whole).tobytes()
    return found


def _vectors_plain(uri: str) -> str:
    """As Spark takes it. Addresses come as paths and as URLs, and encoded in either case."""
    return unquote(uri.removeprefix("file://"))


def _arrow_schema(table: Any, columns: Sequence[str]) -> Any:
    import pyarrow as pa

    whole = pa.schema(table.schema().to_arrow())
    return pa.schema([pa.field(name, whole.field(name).type) for name in columns])


def _spark_schema(table: Any, columns: Sequence[str]) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(_arrow_schema(table, columns))


# ---- the table ----

_APP = "postroom-archive"
_BATCH, _START, _END = "postroom.batch", "postroom.start", "postroom.end"
_LOOKS = (1, 20, None)  # so many commits are looked at, then more
_TRIES = 20  # of a commit that others get ahead of
_CHUNK = 7  # bytes of the offsets in one transaction's number, which is a positive one of 64 bits

_READS = {
    "columnMapping",  # if it is not switched on
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
    "variantType",
    "variantType-preview",
}
_WRITES = _READS | {"appendOnly", "changeDataFeed", "checkConstraints", "generatedColumns", "invariants"}
_NEVER_NULL = ("topic", "partition", "offset", "timestamp", "date")


class DeltaLake:
    """The table of one topic: FOLDER/TOPIC."""

    def __init__(self, folder: str, topic: str) -> None:
        self._delta = _deltalake()
        self.topic = topic
        self.path = table_path(folder, topic)

    # ---- what is there ----

    def mark(self) -> Mark | None:
        table = self._table()
        if table is None:
            return None
        self._check(table)
        _check_writing(table, self.path)
        return self._mark(table)

    def check(self) -> None:
        self.there()

    def there(self) -> Any:
        """The table of delta-rs."""
        table = self._table()
        if table is None:
            raise missing(os.path.dirname(self.path), self.topic)
        self._check(table)
        return table

    @property
    def version(self) -> int:
        version: int = self.there().version()
        return version

    def frame(self, spark: Any, first: str = "", last: str = "9") -> Any:
        table = self.there()
        days = [("date", sign, day) for sign, day in ((">=", first), ("<=", last)) if day not in ("", "9")]
        uris = table.file_uris(file_pruning_predicate=days or None)
        return with_date(delta_rows(spark, table, COLUMNS[:-1], uris))

    # ---- what is written ----

    def create(self, offsets: dict[str, Any]) -> Mark:
        try:
            self._delta.DeltaTable.create(
                self.path,
                arrow_schema(),
                partition_by=["date"],
                name=self.topic,
                commit_properties=self._commit(0, offsets, offsets),
            )
        except self._delta.exceptions.DeltaError as error:
            raise conflict(self.path) from error
        flush_log(self.path, 0)
        return Mark(0, offsets)

    def append(self, mark: Mark, files: Sequence[File], end: dict[str, Any]) -> Mark:
        now_ms = int(time.time() * 1000)
        added = [
            self._delta.transaction.AddAction(f.path, f.bytes, {"date": f.date}, now_ms, True, f.stats)
            for f in files
        ]
        for _ in range(_TRIES):
            table = self.there()
            _check_writing(table, self.path)
            found = self._mark(table)
            if found.batch != mark.batch:
                raise conflict(self.path)
            if found.offsets != json.loads(json.dumps(mark.offsets)):
                raise set_back(self.path)
            try:
                table.create_write_transaction(
                    added,
                    "append",
                    table.schema(),
                    partition_by=["date"],
                    commit_properties=self._commit(mark.batch + 1, mark.offsets, end),
                )
            except self._delta.exceptions.CommitFailedError as error:
                failed = error  # somebody else was first: who it was shows in the table
                continue
            flush_log(self.path, self.there().version())
            return Mark(mark.batch + 1, end)
        raise conflict(self.path) from failed

    def compact(self) -> Compacted:
        table = self.there()
        before = len(table.file_uris())
        for tries in range(_TRIES):
            try:
                table.optimize.compact(target_size=TARGET_BYTES)
                break
            except self._delta.exceptions.CommitFailedError:  # somebody has deleted rows meanwhile
                if tries == _TRIES - 1:
                    raise
                table = self.there()
        deleted = table.vacuum(dry_run=False, full=True)
        return Compacted(before, len(self.there().file_uris()), len(deleted))

    # ---- help ----

    def _table(self) -> Any:
        try:
            return _opened(self.path)
        except self._delta.exceptions.TableNotFoundError:
            if not is_uri(self.path) and os.path.isdir(self.path) and os.listdir(self.path):
                raise UsageError(
                    f"{self.path} is not empty, and holds no Delta table: archive into another folder"
                ) from None
            return None

    def _mark(self, table: Any) -> Mark:
        known = table.transaction_version(_APP)
        found, restored = newest(_commits(table))
        if found is None and known is not None:  # the log was cleaned up behind a checkpoint
            found = self._kept(restored) if restored is not None else _of_transactions(table)
        if found is None or known is None or (found.batch != known and restored is None):
            raise StoreCorrupt(
                f"the Delta table {self.path} does not say how far it is archived: its log was cut off, or "
                "somebody else has made it; archive into another folder"
            )
        return Mark(max(found.batch, known), found.offsets)

    def _kept(self, version: int) -> Mark | None:
        """How far the table was at a version that it was set back to."""
        try:
            return _of_transactions(self._delta.DeltaTable(self.path, version=version))
        except self._delta.exceptions.DeltaError:
            return None

    def _check(self, table: Any) -> None:
        _check_reading(table, self.path)
        has = {f.name: _kind(f) for f in table.schema().fields}
        wants = {f.name: _kind(f) for f in self._delta.Schema.from_arrow(arrow_schema()).fields}
        wrong = [
            f"column {n} is {has.get(n, 'missing')}, not {k}" for n, k in wants.items() if has.get(n) != k
        ]
        partitions = list(table.metadata().partition_columns)
        if not wrong and partitions != ["date"]:
            wrong = [f"it is partitioned by {', '.join(partitions) or 'nothing'}, not by date"]
        if wrong:
            raise InvalidSetting(
                f"the Delta table {self.path} has another schema: {'; '.join(wrong)}. Nothing was written; "
                "undo that, or archive into another folder"
            )
        if (name := table.metadata().name) != self.topic:
            what = f"of topic {name!r}" if name else "no archive of a topic"
            raise InvalidSetting(
                f"the Delta table {self.path} is {what}, and not of {self.topic!r}: archive into another "
                "folder"
            )

    def _commit(self, batch: int, start: dict[str, Any], end: dict[str, Any]) -> Any:
        numbers = {_APP: batch, **_transactions(Mark(batch, end))}
        return self._delta.CommitProperties(
            custom_metadata={_BATCH: str(batch), _START: json.dumps(start), _END: json.dumps(end)},
            app_transactions=[self._delta.Transaction(app, number) for app, number in numbers.items()],
        )


def flush_log(table: str, version: int) -> None:
    """To the disk, before the queue is told that it may drop what is archived."""
    if not is_uri(table):
        log = os.path.join(table, "_delta_log")
        flush(os.path.join(log, f"{version:020}.json"))
        flush(log)


# ---- how far a table is ----


def _commits(table: Any) -> Iterator[dict[str, Any]]:
    """Up to the table's version, the newest first; few are read if few are asked for."""
    seen = 0
    for limit in _LOOKS:
        some = table.history(limit)
        yield from (commit for commit in some[seen:] if commit["version"] <= table.version())
        seen = len(some)
        if limit is None or seen < limit:
            return


def newest(commits: Iterator[dict[str, Any]]) -> tuple[Mark | None, int | None]:
    """What the last batch says, if its commit is there; and the version that the table was set back to.

    A table that was set back is as far as it was then, and may have been set back more than once.
    """
    limit: int | None = None
    for commit in commits:
        if limit is not None and commit["version"] > limit:
            continue
        if commit["operation"] == "RESTORE":
            limit = int(commit["operationParameters"].get("version", commit["version"] - 1))
        elif _BATCH in commit and commit["operation"] in ("WRITE", "CREATE TABLE"):
            return Mark(int(commit[_BATCH]), json.loads(commit[_END])), limit
    return None, limit


def _transactions(mark: Mark) -> dict[str, int]:
    """A mark as transactions: clean-up of the log keeps the last number of each application, and only that.

    The first one says how many bytes follow in the others.
    """
    text = zlib.compress(json.dumps([mark.batch, mark.offsets]).encode(), 9)
    chunks = [text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK)]
    numbers = [len(text), *(int.from_bytes(chunk.ljust(_CHUNK, b"\0")) for chunk in chunks)]
    return {f"{_APP}/{place}": number for place, number in enumerate(numbers)}


def _of_transactions(table: Any) -> Mark | None:
    size = table.transaction_version(f"{_APP}/0")
    if size is None:  # an older Postroom has written it
        return None
    numbers = [table.transaction_version(f"{_APP}/{n}") for n in range(1, 1 + -(-size // _CHUNK))]
    try:
        text = b"".join(number.to_bytes(_CHUNK) for number in numbers)[:size]
        batch, offsets = json.loads(zlib.decompress(text))
    except (AttributeError, OverflowError, ValueError, zlib.error):
        return None
    return Mark(batch, offsets)


# ---- what can be read and written ----


def _opened(path: str) -> Any:
    delta = _deltalake()
    try:
        return delta.DeltaTable(path)
    except delta.exceptions.DeltaError as error:
        if "not supported" not in str(error):
            raise
        raise InvalidSetting(
            f"the Delta table {path} has a feature that is not known here: {error}. Drop it (ALTER TABLE … "
            "DROP FEATURE, by Spark with Delta), install a newer deltalake, or archive into another folder"
        ) from error


def is_delta(path: str) -> bool:
    return os.path.isdir(os.path.join(path, "_delta_log"))


def journal_rows(spark: Any, path: str) -> Any:
    """A DataFrame of any Delta table's columns, but those it is partitioned by."""
    table = _opened(path)
    _check_reading(table, path)
    apart = set(table.metadata().partition_columns)
    columns = [field.name for field in table.schema().fields if field.name not in apart]
    return delta_rows(spark, table, columns, table.file_uris())


def _check_reading(table: Any, path: str) -> None:
    protocol, settings = table.protocol(), table.metadata().configuration
    unknown = sorted(set(protocol.reader_features or ()) - _READS)
    if settings.get("delta.columnMapping.mode", "none") != "none":
        unknown.append("columnMapping")
    if unknown:
        raise _unknown(path, unknown, "read")


def _check_writing(table: Any, path: str) -> None:
    """Refuses what would make a commit of ours a wrong one: it is not looked at by the table."""
    unknown = sorted(set(table.protocol().writer_features or ()) - _WRITES)
    if unknown:
        raise _unknown(path, unknown, "written")
    checks = [n for n in table.metadata().configuration if n.startswith("delta.constraints.")]
    wrong = [f"a CHECK constraint ({name.removeprefix('delta.constraints.')})" for name in checks]
    for field in table.schema().fields:
        metadata = json.loads(field.to_json()).get("metadata", {})
        if not field.nullable and field.name not in _NEVER_NULL:
            wrong.append(f"NOT NULL on the column {field.name}")
        if any(name in metadata for name in ("delta.generationExpression", "delta.invariants")):
            wrong.append(f"a rule for the column {field.name}")
    if wrong:
        raise InvalidSetting(
            f"the Delta table {path} has {', '.join(wrong)}, and an archive takes every message as it is: "
            "drop it (ALTER TABLE … DROP CONSTRAINT, DROP NOT NULL), or archive into another folder"
        )


def _unknown(path: str, features: Sequence[str], what: str) -> InvalidSetting:
    return InvalidSetting(
        f"the Delta table {path} has a feature with which it cannot be {what} here: {', '.join(features)}. "
        "Drop it (ALTER TABLE … DROP FEATURE, by Spark with Delta), or archive into another folder"
    )


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
