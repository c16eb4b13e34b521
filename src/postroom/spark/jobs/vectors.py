"""Rows of a Delta table without those that it has deleted.

Delta deletes a row by a deletion vector beside the file, which keeps it: whoever reads the file alone sees it
again. Files without a vector are read by Spark as they are. Those with one are read by executors through
Arrow, each together with its vector. Must never read a file whose vector is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from ...errors import StoreCorrupt
from .lake import is_uri

__all__ = ["delta_rows", "kept_rows"]

_BATCH_ROWS = 65_536


def delta_rows(spark: Any, table: Any, columns: Sequence[str], uris: Sequence[str]) -> Any:
    """A DataFrame with these columns, which are in files and no partitions, of these files of the table."""
    schema = _spark_schema(table, columns)
    vectors = _vectors(table)
    if vectors.keys() - {_plain(uri) for uri in table.file_uris()}:
        raise StoreCorrupt(
            f"the Delta table {table.table_uri} has deletion vectors of files that are not in it: repair the "
            "table, or compact it by the program that deleted rows"
        )
    whole = [_plain(uri) for uri in uris if _plain(uri) not in vectors]
    holed = [(uri, vectors[_plain(uri)]) for uri in uris if _plain(uri) in vectors]
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

    system, name = FileSystem.from_uri(path) if is_uri(path) else (LocalFileSystem(), _plain(path))
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
            found[_plain(path.as_py())] = np.packbits(whole).tobytes()
    return found


def _plain(uri: str) -> str:
    """As Spark takes it. Addresses come as paths and as URLs, and encoded in either case."""
    return unquote(uri.removeprefix("file://"))


def _arrow_schema(table: Any, columns: Sequence[str]) -> Any:
    import pyarrow as pa

    whole = pa.schema(table.schema().to_arrow())
    return pa.schema([pa.field(name, whole.field(name).type) for name in columns])


def _spark_schema(table: Any, columns: Sequence[str]) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(_arrow_schema(table, columns))
