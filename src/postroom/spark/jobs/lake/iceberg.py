"""A topic's table in Apache Iceberg's format, by PyIceberg: Parquet files, listed in a catalog.

Files and how far they go are committed in one transaction: as properties of the snapshot, and of the table,
which stay when snapshots expire. A commit that others get ahead of is looked at again before it is tried
again: PyIceberg would repeat it by itself, also behind another run's. The table is partitioned by the day of
the timestamp.

Must never touch a table that is not an archive of this topic. Runs on the driver; rows with deletes beside
them are read by executors.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import secrets
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

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

__all__ = ["CATALOG", "IcebergLake", "is_iceberg"]

CATALOG = "catalog.db"
"""A file in the folder of the archive, if no other catalog is named."""

_NAMESPACE = "postroom"
_TOPIC, _BATCH = "postroom.topic", "postroom.batch"
_FIRST, _END = "postroom.first", "postroom.end"  # offsets that the table began with, and goes to
_TRIES = 20  # of a commit that others get ahead of
_KEPT = timedelta(days=7)


class IcebergLake:
    """The table of one topic: its files are in FOLDER/TOPIC."""

    def __init__(self, folder: str, topic: str, catalog: str = "") -> None:
        self.topic = topic
        self.path = table_path(folder, topic)
        self._folder, self._named = folder, catalog
        self._name = (_NAMESPACE, topic)
        _pyiceberg()
        if not catalog and is_uri(folder):
            raise InvalidSetting(
                f"a catalog in a file needs a folder here, and {folder} is elsewhere: name one, such as "
                "https://catalog.example or postgresql+psycopg2://host/db"
            )

    # ---- what is there ----

    def mark(self) -> Mark | None:
        table = self._table()
        if table is None:
            return None
        self._check(table)
        return self._mark(table)

    def check(self) -> None:
        self.there()

    def there(self) -> Any:
        """The table of PyIceberg."""
        table = self._table()
        if table is None:
            raise missing(os.path.dirname(self.path), self.topic)
        self._check(table)
        return table

    @property
    def version(self) -> int:
        return int(self.there().last_sequence_number)

    def frame(self, spark: Any, first: str = "", last: str = "9") -> Any:
        from pyspark.sql.pandas.types import from_arrow_schema

        table = self.there()
        tasks = _planned(table, first, last)
        schema = from_arrow_schema(arrow_schema(date=False))
        whole = [task.file.file_path.removeprefix("file://") for task in tasks if not task.delete_files]
        holed = [(pickle.dumps(task),) for task in tasks if task.delete_files]
        rows = spark.read.schema(schema).parquet(*whole) if whole else spark.createDataFrame([], schema)
        if holed:
            scanned = partial(_scanned, pickle.dumps((table.metadata, table.io)))
            some = spark.createDataFrame(holed, "task binary").repartition(len(holed))
            rows = rows.unionAll(some.mapInArrow(scanned, schema))
        return with_date(rows)

    # ---- what is written ----

    def create(self, offsets: dict[str, Any]) -> Mark:
        from pyiceberg.exceptions import TableAlreadyExistsError
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.transforms import DayTransform

        schema = _schema()
        by_day = PartitionField(schema.find_field("timestamp").field_id, 1000, DayTransform(), "date")
        catalog = self._catalog(make=True)
        catalog.create_namespace_if_not_exists(_NAMESPACE)
        said = {_TOPIC: self.topic, _FIRST: json.dumps(offsets), **_properties(Mark(0, offsets))}
        mapping = {"schema.name-mapping.default": schema.name_mapping.model_dump_json()}
        try:
            catalog.create_table(
                self._name,
                schema,
                location=self.path,
                partition_spec=PartitionSpec(by_day),
                properties={**said, **mapping},
            )
        except TableAlreadyExistsError as error:
            raise conflict(self.path) from error
        self._flush()
        return Mark(0, offsets)

    def append(self, mark: Mark, files: Sequence[File], end: dict[str, Any]) -> Mark:
        from pyiceberg.exceptions import CommitFailedException

        after = Mark(mark.batch + 1, end)
        for _ in range(_TRIES):
            table = self.there()
            found = self._mark(table)
            if found.batch != mark.batch:
                raise conflict(self.path)
            if found.offsets != json.loads(json.dumps(mark.offsets)):
                raise set_back(self.path)
            change = _once(table).transaction()
            with change.update_snapshot(snapshot_properties=_properties(after)).fast_append() as added:
                for file in files:
                    added.append_data_file(_data_file(table, f"{self.path}/{file.path}"))
            change.set_properties(_properties(after))
            try:
                change.commit_transaction()
            except CommitFailedException as error:
                failed = error  # somebody else was first: who it was shows in the table
                continue
            self._flush()
            return after
        raise conflict(self.path) from failed

    def compact(self) -> Compacted:
        table = self.there()
        before = len(_planned(table))
        for day in sorted({_day(task) for task in _planned(table)}):
            self._compact_day(day)
        oldest = datetime.now(UTC) - _KEPT
        table = self.there()
        if any(one.timestamp_ms < oldest.timestamp() * 1000 for one in table.snapshots()):
            table.maintenance.expire_snapshots().older_than(oldest).commit()
        deleted = self._clean_up(oldest)
        return Compacted(before, len(_planned(self.there())), deleted)

    # ---- compaction ----

    def _compact_day(self, day: str) -> None:
        """Rows that others have deleted are left out. If others write meanwhile, it is left for later."""
        from pyiceberg.exceptions import CommitFailedException

        table = self.there()
        tasks = [
            task
            for task in _planned(table, day, day)
            if task.delete_files or task.file.file_size_in_bytes < TARGET_BYTES // 2
        ]
        if len(tasks) < 2 and not any(task.delete_files for task in tasks):
            return
        change = _once(table).transaction()
        with change.update_snapshot().overwrite() as replaced:
            for task in tasks:
                replaced.delete_data_file(task.file)
            for path in _rewritten(table, tasks, f"{self.path}/date={day}"):
                replaced.append_data_file(_data_file(table, path))
        try:
            change.commit_transaction()
        except CommitFailedException:
            return
        self._flush()

    def _clean_up(self, oldest: datetime) -> int:
        """Deletes files that no snapshot has, of compactions, and of runs that were killed."""
        from pyarrow.fs import FileSelector

        table = self.there()
        kept = {_name_of(path) for path in table.inspect.all_files()["file_path"].to_pylist()}
        system, root = _system(self.path)
        found = system.get_file_info(FileSelector(root, recursive=True))
        gone = [
            info.path
            for info in found
            if "/date=" in info.path
            and info.path.endswith(".parquet")
            and _name_of(info.path) not in kept
            and info.mtime.timestamp() < oldest.timestamp()
        ]
        for path in gone:
            system.delete_file(path)
        return len(gone)

    # ---- help ----

    def _catalog(self, *, make: bool = False) -> Any:
        """None: there is none yet."""
        from pyiceberg.catalog import load_catalog

        if self._named and not is_uri(self._named):
            return _unpooled(load_catalog(self._named))  # of ~/.pyiceberg.yaml, or the environment
        if self._named:
            return _unpooled(load_catalog(_NAMESPACE, uri=self._named, warehouse=self._folder))
        folder = Path(self._folder).absolute()
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        elif not (folder / CATALOG).exists():
            return None
        uri = f"sqlite:///{folder / CATALOG}"
        return _unpooled(load_catalog(_NAMESPACE, type="sql", uri=uri, warehouse=str(folder)))

    def _table(self) -> Any:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        catalog = self._catalog()
        try:
            if catalog is not None:
                return catalog.load_table(self._name)
        except (NoSuchTableError, NoSuchNamespaceError):
            pass
        if not is_uri(self.path) and os.path.isdir(self.path) and os.listdir(self.path):
            raise UsageError(
                f"{self.path} is not empty, and the catalog has no table {'.'.join(self._name)}: name "
                "its catalog, or archive into another folder"
            )
        return None

    def _mark(self, table: Any) -> Mark:
        said = table.properties
        if _BATCH not in said or _END not in said or _FIRST not in said:
            raise StoreCorrupt(
                f"the Iceberg table {self.path} does not say how far it is archived: somebody has removed "
                "its properties postroom.…; set them again, or archive into another folder"
            )
        batch = int(said[_BATCH])
        snapshot = table.current_snapshot()
        while snapshot is not None:
            if _BATCH in snapshot.summary.additional_properties:
                return Mark(batch, json.loads(snapshot.summary.additional_properties[_END]))
            if snapshot.sequence_number == 1:  # set back to before the first batch
                return Mark(batch, json.loads(said[_FIRST]))
            snapshot = table.snapshot_by_id(snapshot.parent_snapshot_id or 0)
        return Mark(batch, json.loads(said[_END]))  # those of the batches have expired, or there is none

    def _check(self, table: Any) -> None:
        if (topic := table.properties.get(_TOPIC)) != self.topic:
            what = f"of topic {topic!r}" if topic else "no archive of a topic"
            raise InvalidSetting(
                f"the Iceberg table {self.path} is {what}, and not of {self.topic!r}: archive into another "
                "folder"
            )
        wants = {field.name: _kind(field.field_type) for field in _schema().fields}
        has = {field.name: _kind(field.field_type) for field in table.schema().fields}
        wrong = [
            f"column {n} is {has.get(n, 'missing')}, not {k}" for n, k in wants.items() if has.get(n) != k
        ]
        wrong += [f"column {f.name} must not be null" for f in table.schema().fields if f.required]
        parts = [f"{field.transform}({table.schema().find_column_name(field.source_id)})"
                 for field in table.spec().fields]  # fmt: skip
        if parts != ["day(timestamp)"]:
            wrong.append(f"it is partitioned by {', '.join(parts) or 'nothing'}, not by day(timestamp)")
        if wrong:
            raise InvalidSetting(
                f"the Iceberg table {self.path} has another schema: {'; '.join(wrong)}. Nothing was written; "
                "undo that, or archive into another folder"
            )

    def _flush(self) -> None:
        """To the disk, before the queue is told that it may drop messages. SQLite flushes itself."""
        if is_uri(self.path):
            return
        folder = os.path.join(self.path, "metadata")
        newest = sorted(os.scandir(folder), key=lambda one: one.stat().st_mtime_ns)[-8:]
        for path in (*(one.path for one in newest), folder):
            flush(path)


def _unpooled(catalog: Any) -> Any:
    """A catalog that closes its connection to a database after each use.

    It lives as long as a table that was loaded from it: there is no moment to close it, and a pool would
    leave a file open for each.
    """
    engine = getattr(catalog, "engine", None)  # of a catalog in a database, and of no other
    if engine is not None:
        from sqlalchemy import NullPool, create_engine

        catalog.engine = create_engine(engine.url, poolclass=NullPool)
        engine.dispose()
    return catalog


def is_iceberg(path: str) -> bool:
    """An archive's table whose catalog is a file in the folder above."""
    return os.path.isdir(os.path.join(path, "metadata")) and (Path(path).absolute().parent / CATALOG).exists()


def _properties(mark: Mark) -> dict[str, str]:
    return {_BATCH: str(mark.batch), _END: json.dumps(mark.offsets)}


def _once(table: Any) -> Any:
    """Not repeated by PyIceberg: what it would be repeated behind has to be looked at."""
    table.metadata.properties["commit.retry.num-retries"] = "0"
    return table


# ---- rows ----


def _planned(table: Any, first: str = "", last: str = "9") -> list[Any]:
    from pyiceberg.expressions import AlwaysTrue, And, GreaterThanOrEqual, LessThan

    wanted: Any = AlwaysTrue()
    if first:
        wanted = And(wanted, GreaterThanOrEqual("timestamp", f"{first}T00:00:00+00:00"))
    if last != "9":
        behind = datetime.fromisoformat(last) + timedelta(days=1)
        wanted = And(wanted, LessThan("timestamp", f"{behind.isoformat()}+00:00"))
    try:
        return list(table.scan(row_filter=wanted, selected_fields=COLUMNS[:-1]).plan_files())
    except (ValueError, NotImplementedError) as error:
        if "equality deletes" not in str(error):
            raise
        raise InvalidSetting(
            f"the Iceberg table {table.location()} has equality deletes, which cannot be read here: rewrite "
            "its data files by the program that deleted rows"
        ) from error


def _scanned(packed: bytes, tasks: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: files and what is deleted of them come in, rows go out. Runs on executors."""
    metadata, io = pickle.loads(packed)
    schema = arrow_schema(date=False)
    for some in tasks:
        for task in some.column(0).to_pylist():
            for batch in _scan(metadata, io, metadata.schema().select(*schema.names), [pickle.loads(task)]):
                yield _as(batch, schema)


def _scan(metadata: Any, io: Any, schema: Any, tasks: Sequence[Any]) -> Iterator[Any]:
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    yield from ArrowScan(metadata, io, schema, AlwaysTrue()).to_record_batches(tasks)


def _as(batch: Any, schema: Any) -> Any:
    import pyarrow as pa

    columns = [batch.column(field.name).cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _rewritten(table: Any, tasks: Sequence[Any], folder: str) -> Iterator[str]:
    """Paths of new files, with all columns that the table has, and without deleted rows."""
    import pyarrow.parquet as pq
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    rows = _scan(table.metadata, table.io, table.schema(), tasks)
    batch = next(rows, None)
    system, root = _system(folder)
    while batch is not None:
        name = f"compacted-{int(time.time())}-{secrets.token_hex(8)}.parquet"
        sink = system.open_output_stream(f"{root}/{name}")
        with sink, pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            while batch is not None and sink.tell() < TARGET_BYTES:
                writer.write_batch(_as(batch, schema))
                batch = next(rows, None)
        if not is_uri(folder):
            flush(f"{root}/{name}")
        yield f"{folder}/{name}"


def _data_file(table: Any, path: str) -> Any:
    from pyiceberg.io.pyarrow import parquet_file_to_data_file

    return parquet_file_to_data_file(table.io, table.metadata, path)


def _day(task: Any) -> str:
    days: int = task.file.partition[0]
    return (datetime(1970, 1, 1) + timedelta(days=days)).date().isoformat()


def _system(path: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem, LocalFileSystem

    return FileSystem.from_uri(path) if is_uri(path) else (LocalFileSystem(), path)


def _name_of(path: str) -> str:
    return path.rsplit("/", 1)[-1]


# ---- the schema ----


def _schema() -> Any:
    """As Delta's, without the date: Iceberg partitions by the day of the timestamp itself."""
    from pyiceberg import types as t
    from pyiceberg.schema import Schema

    header = t.StructType(t.NestedField(9, "key", t.StringType()), t.NestedField(10, "value", t.BinaryType()))
    kinds = (
        t.StringType(), t.IntegerType(), t.LongType(), t.TimestamptzType(), t.BinaryType(), t.BinaryType(),
        t.ListType(8, header, element_required=False),
    )  # fmt: skip
    named = enumerate(zip(COLUMNS, kinds, strict=False), 1)
    return Schema(*(t.NestedField(number, name, kind) for number, (name, kind) in named))


def _kind(kind: Any) -> str:
    """Without the ids of fields, which every table numbers by itself."""
    if hasattr(kind, "element_type"):
        return f"list<{_kind(kind.element_type)}>"
    if hasattr(kind, "fields"):
        return f"struct<{', '.join(f'{field.name}: {_kind(field.field_type)}' for field in kind.fields)}>"
    return str(kind)


def _pyiceberg() -> None:
    try:
        importlib.import_module("pyiceberg.catalog.sql")
    except ImportError:
        raise UsageError(f"the format iceberg needs pyiceberg here: {how_to_install('iceberg')}") from None
