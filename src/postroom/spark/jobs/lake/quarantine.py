"""What the archive sets aside: messages that have no place in a topic's table, in a table of their own.

A row of the table FOLDER/_quarantine/TOPIC says where a message was, what it holds and why it is there: a
`timestamp` that no calendar has (so that there is no date to file it under), or a batch that is `unreadable`;
its bytes are then the value. No topic has a name that begins with `_`.

A batch of the archive is committed here first, with its number and where it ends, and then in the topic's
table. A run that was cut off in between is repeated by the next one as it was, up to the same end: it gives
the same rows, which are known by the number and not written again. So each message is in one of the two
tables, once. `Aside` runs on executors, `Quarantine` on the driver.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import CorruptBatch, StagingConflict, UsageError
from ....store.contract import StoredBatch
from ...planning import Span
from . import File, Sink, is_uri
from .delta import flush_log

__all__ = ["REASONS", "Aside", "Quarantine", "quarantine_path", "quarantine_schema"]

REASONS = {
    "timestamp": "with a timestamp that no calendar has",
    "unreadable": "as batches that cannot be read",
}
"""Why something is set aside, in words."""

_APP = "postroom-quarantine"
_BATCH, _END = "postroom.batch", "postroom.end"
_LOOK = 20  # commits in which the last batch is looked for
_BUFFER_BYTES = 32 * 1024 * 1024


def quarantine_path(folder: str, topic: str) -> str:
    if is_uri(folder):
        return f"{folder.rstrip('/')}/_quarantine/{topic}"
    return str(Path(folder).absolute() / "_quarantine" / topic)


def quarantine_schema() -> Any:
    import pyarrow as pa

    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.schema(
        [
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),  # the first one, of a batch
            ("messages", pa.int32()),  # 1, or as many as the batch has
            ("timestamp_ms", pa.int64()),  # as it was sent
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", pa.list_(header)),
            ("reason", pa.string()),
            ("detail", pa.string()),
        ]
    )


class Aside:
    """What one task of the archive sets aside."""

    def __init__(self, table: str, name: str) -> None:
        self._table, self._name = table, name
        self._odd: list[int] = []  # timestamps of the batch that comes next
        self._files: dict[str, _File] = {}

    def odd(self, span: Span, found: Sequence[tuple[int, int]]) -> None:
        """Is told by `Columns` which rows of the next batch have no timestamp."""
        self._odd = [timestamp for _, timestamp in found]

    def sift(self, rows: Any) -> Any:
        """The rows that have a timestamp; the others are set aside."""
        if not self._odd:
            return rows
        import pyarrow as pa
        import pyarrow.compute as pc

        empty = pc.is_null(rows.column("timestamp"))
        aside = pa.Table.from_batches([rows.filter(empty)]).drop_columns("timestamp")
        details = [f"timestamp {stamp} is outside of the years 1 to 9999" for stamp in self._odd]
        self._add(
            "timestamp",
            aside.append_column("messages", pa.repeat(pa.scalar(1, pa.int32()), len(details)))
            .append_column("timestamp_ms", pa.array(self._odd, pa.int64()))
            .append_column("detail", pa.array(details, pa.string())),
        )
        self._odd = []
        return rows.filter(pc.invert(empty))

    def unreadable(self, span: Span, batch: StoredBatch, error: CorruptBatch) -> None:
        """A batch that spans share is set aside by the one that begins it."""
        import pyarrow as pa

        if batch.base_offset < span.first:
            return
        found = {
            "topic": span.topic,
            "partition": span.partition,
            "offset": batch.base_offset,
            "messages": batch.records,
            "value": batch.data,
            "detail": str(error),
        }
        self._add("unreadable", pa.Table.from_pylist([found], schema=quarantine_schema()))

    def _add(self, reason: str, rows: Any) -> None:
        import pyarrow as pa

        schema = quarantine_schema()
        given = {name: rows.column(name) for name in rows.column_names}
        given["reason"] = pa.chunked_array([pa.repeat(pa.scalar(reason, pa.string()), rows.num_rows)])
        columns = [
            given[field.name].cast(field.type) if field.name in given else pa.nulls(rows.num_rows, field.type)
            for field in schema
        ]
        if reason not in self._files:
            self._files[reason] = _File(self._table, f"{self._name}-{secrets.token_hex(8)}.parquet", schema)
        self._files[reason].add(pa.Table.from_arrays(columns, schema=schema))

    def close(self) -> dict[str, File]:
        """By reason, the file that was written."""
        return {reason: file.close() for reason, file in self._files.items()}


class _File:
    def __init__(self, table: str, path: str, schema: Any) -> None:
        import pyarrow.parquet as pq

        self._path, self._sink = path, Sink(table, path)
        self._writer = pq.ParquetWriter(self._sink.stream, schema, compression="zstd")
        self._waiting: list[Any] = []
        self._rows = self._buffered = 0

    def add(self, rows: Any) -> None:
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self._buffered += rows.nbytes
        if self._buffered >= _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting, self._buffered = [], 0

    def close(self) -> File:
        self._flush()
        self._writer.close()
        return File(self._path, "", self._sink.close(), self._rows, json.dumps({"numRecords": self._rows}))


class Quarantine:
    """The table of one topic."""

    def __init__(self, folder: str, topic: str) -> None:
        import deltalake.exceptions
        import deltalake.transaction

        self._delta, self._topic = deltalake, topic
        self.path = quarantine_path(folder, topic)

    def end_of(self, batch: int) -> dict[str, Any] | None:
        """Where this batch ends, if something of it was set aside before."""
        table = self._table()
        if table is None or table.transaction_version(_APP) != batch:
            return None
        for commit in table.history(_LOOK):
            if commit.get(_BATCH) == str(batch):
                found: dict[str, Any] = json.loads(commit[_END])
                return found
        return None

    def append(self, batch: int, files: Sequence[File], end: Mapping[str, Any]) -> None:
        """Before the topic's table has this batch. If it was done before, nothing is done."""
        if not files or self.end_of(batch) == end:
            return
        table = self._table() or self._create()
        now_ms = int(time.time() * 1000)
        added = [self._delta.transaction.AddAction(f.path, f.bytes, {}, now_ms, True, f.stats) for f in files]
        properties = self._delta.CommitProperties(
            custom_metadata={_BATCH: str(batch), _END: json.dumps(end)},
            app_transactions=[self._delta.Transaction(_APP, batch)],
        )
        try:
            table.create_write_transaction(added, "append", table.schema(), commit_properties=properties)
        except self._delta.exceptions.CommitFailedError as error:
            raise StagingConflict(
                f"another run has written to the Delta table {self.path} meanwhile: see that one alone "
                "archives this topic into this folder, and start it again"
            ) from error
        flush_log(self.path, self._there().version())

    def _there(self) -> Any:
        return self._delta.DeltaTable(self.path)

    def _table(self) -> Any:
        """None: nothing was ever set aside."""
        try:
            table = self._there()
        except self._delta.exceptions.TableNotFoundError:
            return None
        missing = [
            name for name in quarantine_schema().names if name not in {f.name for f in table.schema().fields}
        ]
        if missing:
            raise UsageError(
                f"the Delta table {self.path} has no column {missing[0]}, and is not ours: move it away"
            )
        return table

    def _create(self) -> Any:
        name = f"{self._topic}: what the archive has set aside"
        return self._delta.DeltaTable.create(self.path, quarantine_schema(), name=name)
