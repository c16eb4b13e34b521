"""Typed reading as the data source offers it: the schema that Spark is told, and batches that match it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.pandas.types import to_arrow_schema

from postroom.errors import DecodeError, InvalidSetting, UsageError
from postroom.model.messages.batch import BatchBuilder, with_base_offset
from postroom.spark.columns import Columns, schema_text
from postroom.spark.formats.arrow import parse_schema
from postroom.spark.planning import Span
from postroom.spark.source import PostroomSource
from postroom.store.contract import StoredBatch
from tests.unit.spark.formats.spark_formats import ORDER_AVRO, registry

GIVEN = {"url": "postroom://h:7070", "subscribe": "orders"}
JSON = {"valueFormat": "json", "valueSchema": "id bigint, name string"}
SPAN = Span("orders", 3, 7, 0, 1000)


def stored(base: int, values: Sequence[bytes | None], key: bytes = b"k") -> StoredBatch:
    builder = BatchBuilder("none")
    for value in values:
        builder.append(1_700_000_000_000, key, value, [])
    return StoredBatch(base, len(values), 1, with_base_offset(builder.build(), base))


def read(options: dict[str, str], schema: Any, *batches: StoredBatch) -> pa.RecordBatch:
    """As an executor does it: with what was pickled on the driver."""
    reader = cloudpickle.loads(cloudpickle.dumps(PostroomSource({**GIVEN, **options}).reader(schema)))
    columns = Columns(reader._schema, typed=reader._typed)
    for batch in batches:
        columns.add(batch, SPAN)
    found = columns.flush(SPAN)
    assert found.schema.equals(to_arrow_schema(schema, timezone="UTC"))
    return found


def test_without_a_format_nothing_changes() -> None:
    assert PostroomSource(GIVEN).schema() == schema_text(False)
    plain = {"valueFormat": "binary", "keyFormat": "BINARY"}
    assert PostroomSource({**GIVEN, **plain}).schema() == schema_text(False)


def test_the_schema_that_spark_is_told() -> None:
    source = PostroomSource({**GIVEN, **JSON, "keyFormat": "string", "includeHeaders": "true"})
    own = "struct<id:bigint,name:string>"
    changed = schema_text(True).replace("value binary,", f"value {own},").replace("key binary", "key string")
    assert source.schema() == parse_schema(changed)
    kept = PostroomSource({**GIVEN, **JSON, "valueErrors": "null"}).schema()
    assert kept.names[-2:] == ["valueError", "valueRaw"]


def test_batches_have_that_schema() -> None:
    options = {**JSON, "keyFormat": "string", "valueErrors": "null"}
    schema = PostroomSource({**GIVEN, **options}).schema()
    found = read(options, schema, stored(5, [b'{"id": 1}', b"?", None])).to_pylist()
    assert [(row["offset"], row["key"], row["value"]) for row in found] == [
        (5, "k", {"id": 1, "name": None}),
        (6, "k", None),
        (7, "k", None),
    ]
    assert [row["valueRaw"] for row in found] == [None, b"?", None]


@pytest.mark.parametrize(
    "text",
    [
        "offset bigint, value struct<id:bigint,name:string>",
        "value struct<id:bigint,name:string>, valueError string",
        "valueError string, offset bigint",
        "valueRaw binary",
        "offset bigint, topic string",
        "key binary",
    ],
)
def test_some_columns(text: str) -> None:
    found = read({**JSON, "valueErrors": "null"}, parse_schema(text), stored(5, [b'{"id": 1}', b"?"]))
    rows = found.to_pylist()
    if "valueError" in text:
        assert rows[0]["valueError"] is None and rows[1]["valueError"].startswith("it is no JSON")
    if "valueRaw" in text:
        assert [row["valueRaw"] for row in rows] == [None, b"?"]
    if "value struct" in text:
        assert [row["value"] for row in rows] == [{"id": 1, "name": None}, None]


def test_bytes_of_values_that_are_not_decoded() -> None:
    options = {"keyFormat": "string", "valueErrors": "null"}
    found = read(options, parse_schema("valueRaw binary"), stored(5, [b"a", b"b"]))
    assert found.to_pylist() == [{"valueRaw": None}] * 2


def test_of_json_the_schema_of_the_user_is_enough() -> None:
    """It may have fewer fields than valueSchema, or stand alone."""
    schema = parse_schema("value struct<id:bigint>")
    for options in (JSON, {"valueFormat": "json"}):
        assert read(options, schema, stored(5, [b'{"id": 1}'])).to_pylist() == [{"value": {"id": 1}}]


@pytest.mark.parametrize(
    ("options", "text", "why"),
    [
        (JSON, "value binary", "the column value is struct<id:bigint,name:string>, not binary"),
        (JSON, "valueError string", "there is no column 'valueError'"),
        (JSON, "value struct<id:bigint not null>", "value.id is NOT NULL, and may be missing"),
        ({"keyFormat": "string"}, "key binary", "the column key is string, not binary"),
        ({"valueFormat": "string"}, "value binary", "the column value is string, not binary"),
        ({}, "value struct<id:bigint>", "the column value is binary, not struct<id:bigint>"),
        (
            {"valueFormat": "avro", "valueSchema": json.dumps(ORDER_AVRO)},
            "value struct<id:bigint>",
            "the column value is struct<id:bigint,name:string,",
        ),
    ],
)
def test_schemas_that_do_not_fit(options: dict[str, str], text: str, why: str) -> None:
    with pytest.raises(InvalidSetting, match=why):
        PostroomSource({**GIVEN, **options}).reader(parse_schema(text))


@pytest.mark.parametrize(("form", "package"), [("avro", "fastavro"), ("protobuf", "google.protobuf")])
def test_without_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str, package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package.partition(".")[0]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "schema").write_text(json.dumps(ORDER_AVRO))
    source = PostroomSource({**GIVEN, "valueFormat": form, "valueSchema": str(tmp_path / "schema")})
    with pytest.raises(UsageError, match=rf"{form} needs \w+ here: run `pip install '\.\[spark-formats\]'`"):
        source.schema()


def test_a_value_that_fails_is_named_by_its_offset() -> None:
    schema = PostroomSource({**GIVEN, **JSON}).schema()
    said = r"topic 'orders' partition 3 offset 12: the value cannot be read as json: .*\$\.id"
    with pytest.raises(DecodeError, match=said):
        read(JSON, schema, stored(5, [b"{}"]), stored(11, [b"{}", b'{"id": "x"}']))


def test_the_columns_stay_what_they_were_when_the_registry_moves_on() -> None:
    """Spark keeps the source between its schema and its readers."""
    with registry() as there:
        there.add("orders-value", ORDER_AVRO)
        options = {**GIVEN, "valueFormat": "avro", "schemaRegistry": there.url}
        source = PostroomSource({**options, "schemaRegistryToken": "hush"})
        schema = source.schema()
        there.add("orders-value", {**ORDER_AVRO, "fields": ORDER_AVRO["fields"][:1]})
        source = cloudpickle.loads(cloudpickle.dumps(source))
        for reader in (source.reader(schema), source.streamReader(schema)):
            assert "hush" not in repr(reader) + repr(vars(reader))
        assert len(there.asked) == 1
