"""Avro values as columns: types, the rules between writer and reader, and hostile bytes."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import DecodeError, InvalidSetting
from postroom.spark.formats.arrow import arrow_type
from tests.unit.spark.formats.spark_formats import (
    ORDER,
    ORDER_AVRO,
    ORDER_COLUMNS,
    avro,
    decode,
    framed,
    registry,
    rows,
    typed,
)


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": field, "type": kind} for field, kind in fields.items()],
    }


def logical(base: Any, kind: str, **more: Any) -> dict[str, Any]:
    return {**(base if isinstance(base, dict) else {"type": base}), "logicalType": kind, **more}


DAY = datetime(2024, 2, 3, 4, 5, 6, 789_000, tzinfo=UTC)
FIXED = {"type": "fixed", "name": "F", "size": 2}
KINDS: dict[str, tuple[Any, str, Any, Any]] = {  # schema, column, what is written, what is read
    "boolean": ("boolean", "boolean", True, True),
    "int": ("int", "int", -5, -5),
    "long": ("long", "bigint", 2**63 - 1, 2**63 - 1),
    "float": ("float", "float", 0.5, 0.5),
    "double": ("double", "double", 0.1, 0.1),
    "bytes": ("bytes", "binary", b"\xff", b"\xff"),
    "string": ("string", "string", "é", "é"),
    "fixed": (FIXED, "binary", b"ab", b"ab"),
    "enum": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "string", "B", "B"),
    "union": (["null", "string"], "string", None, None),
    "union_back": (["string", "null"], "string", "x", "x"),
    "union_numbers": (["null", "int", "long"], "bigint", 2**40, 2**40),
    "array": ({"type": "array", "items": ["null", "int"]}, "array<int>", [1, None], [1, None]),
    "map": ({"type": "map", "values": "double"}, "map<string,double>", {"a": 1.5}, {"a": 1.5}),
    "record": (["null", record("I", q="int")], "struct<q:int>", {"q": 1}, {"q": 1}),
    "no_record": (["null", record("I2", q="int")], "struct<q:int>", None, None),
    "date": (logical("int", "date"), "date", date(2024, 2, 3), date(2024, 2, 3)),
    "millis": (logical("long", "timestamp-millis"), "timestamp", DAY, DAY),
    "micros": (["null", logical("long", "timestamp-micros")], "timestamp", DAY, DAY),
    "local": (
        logical("long", "local-timestamp-micros"),
        "timestamp_ntz",
        DAY.replace(tzinfo=None),
        DAY.replace(tzinfo=None),
    ),
    "decimal": (
        logical("bytes", "decimal", precision=9, scale=2),
        "decimal(9,2)",
        Decimal("-1.25"),
        Decimal("-1.25"),
    ),
    "decimal_fixed": (
        logical({"type": "fixed", "name": "D", "size": 8}, "decimal", precision=18, scale=3),
        "decimal(18,3)",
        Decimal("1.250"),
        Decimal("1.250"),
    ),
    "uuid": (logical("string", "uuid"), "string", UUID(int=5), str(UUID(int=5))),
    "time": (logical("int", "time-millis"), "int", None, 5),
    "odd": (logical("string", "our-own"), "string", "x", "x"),
}


@pytest.mark.parametrize("name", KINDS)
def test_types(name: str) -> None:
    schema, column, written, read = KINDS[name]
    whole = record("R", a=schema, b="int")
    form = typed(valueFormat="avro", valueSchema=json.dumps(whole))
    assert form.columns()["value"].simpleString() == f"struct<a:{column},b:int>"
    if name == "time":  # it is the number below
        whole, written = record("R", a="int", b="int"), read
    found = decode(form, avro(whole, {"a": written, "b": 3}))["value"]
    assert found.type.equals(arrow_type(form.columns()["value"]))
    assert rows(form, avro(whole, {"a": written, "b": 3}), None) == [{"a": read, "b": 3}, None]


def test_an_order(tmp_path: Path) -> None:
    path = tmp_path / "order.avsc"
    path.write_text(json.dumps(ORDER_AVRO))
    form = typed(valueFormat="avro", valueSchema=path)
    assert form.columns()["value"].simpleString() == ORDER_COLUMNS
    assert rows(form, avro(ORDER_AVRO, ORDER)) == [ORDER]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("/no/such/file.avsc", "cannot be read on the driver: No such file"),
        ("{", "it is no Avro schema"),
        ('{"type": "recor"}', "it is no Avro schema"),
        ('"string"', "the schema of a value is a record"),
        (record("R", a=["int", "string"]), "value.a: a union of several types"),
        (record("R", a=["null", "R"]), "R contains itself"),
        (record("R", a=record("S", b={"type": "array", "items": "R"})), "R contains itself"),
        (record("R", a={"type": "array", "items": "null"}), "'null' cannot be a column"),
        (record("R", a="null"), "'null' cannot be a column"),
        (record("R", a=record("S")), "the record S has no fields"),
        (record("R", a=logical("bytes", "decimal", precision=50)), "38 digits at most"),
        (record("R", a={"type": "array", "items": {**FIXED, "size": 0}}), "takes no bytes"),
    ],
)
def test_schemas_that_have_no_columns(schema: Any, why: str) -> None:
    with pytest.raises(InvalidSetting, match=f"option valueSchema: .*{why}"):
        typed(valueFormat="avro", valueSchema=schema if isinstance(schema, str) else json.dumps(schema))


FORM = typed(valueFormat="avro", valueErrors="null", valueSchema=json.dumps(ORDER_AVRO))


def test_bytes_that_do_not_fit() -> None:
    whole = avro(ORDER_AVRO, ORDER)
    long = b"\xfe" + b"\xff" * 8 + b"\x01"  # 2**63 - 1
    for huge in (b"\0\x02" + long, b"\0\0" + long, b"\0\0" + long + b"\x02a\0" * 9, b"\0\0\0" + long):
        assert decode(FORM, huge)["valueError"][0].is_valid
    found = decode(FORM, whole, whole[:-1], whole + b"\0\0", b"", whole)
    assert [why and why.split(" (")[0] for why in found["valueError"].to_pylist()] == [
        None,
        "it is not as its schema says",
        "2 bytes are left over: was it written in another schema?",
        "it is not as its schema says",
        None,
    ]
    with pytest.raises(DecodeError, match="row 0: the value cannot be read as avro"):
        decode(typed(valueFormat="avro", valueSchema=json.dumps(ORDER_AVRO)), b"x")


def test_times_beyond_the_years() -> None:
    schema = record("R", a=logical("long", "timestamp-micros"))
    form = typed(valueFormat="avro", valueErrors="null", valueSchema=json.dumps(schema))
    plain = record("R", a="long")
    found = decode(form, avro(plain, {"a": 0}), avro(plain, {"a": 2**62}))
    assert found["value"].to_pylist() == [{"a": datetime(1970, 1, 1, tzinfo=UTC)}, None]
    assert found["valueError"][1].is_valid


@given(st.lists(st.binary(max_size=60), max_size=4), st.binary(max_size=6), st.integers(0, 60))
def test_any_bytes(values: list[bytes], some: bytes, at: int) -> None:
    whole = avro(ORDER_AVRO, ORDER)
    damaged = whole[:at] + some + whole[at + len(some) :]
    found = decode(FORM, *values, damaged, whole)
    assert found["value"][-1].is_valid
    for read, why in zip(found["value"], found["valueError"], strict=True):
        assert read.is_valid != why.is_valid


# ---- a registry ----


def test_what_was_written_in_other_schemas() -> None:
    """Of each value the schema is asked for, once; what it lacks has the reader's default."""
    older = {**ORDER_AVRO, "fields": [f for f in ORDER_AVRO["fields"] if f["name"] != "name"]}
    newer = {**ORDER_AVRO, "fields": [*ORDER_AVRO["fields"], {"name": "more", "type": "int", "default": 0}]}
    with registry() as there:
        old, new = there.add("x", older), there.add("x", newer)
        own = there.add("orders-value", ORDER_AVRO)
        form = typed(valueFormat="avro", schemaRegistry=there.url)
        assert form.columns()["value"].simpleString() == ORDER_COLUMNS
        values = [
            framed(own, avro(ORDER_AVRO, ORDER)),
            framed(old, avro(older, ORDER)),
            framed(new, avro(newer, {**ORDER, "more": 9})),
        ]
        assert rows(form, *values, *values) == [ORDER, {**ORDER, "name": None}, ORDER] * 2
        assert sorted(there.asked) == sorted(
            ["/subjects/orders-value/versions/latest", *(f"/schemas/ids/{n}" for n in (own, old, new))]
        )


def test_values_and_schemas_that_are_odd() -> None:
    recursive = record("Tree", left=["null", "Tree"])
    with registry() as there:
        own = there.add("orders-value", ORDER_AVRO)
        tree, text = there.add("x", recursive), there.add("x", "{", "JSON")
        other = there.add("x", record("Other", id="string"))
        form = typed(valueFormat="avro", schemaRegistry=there.url, valueErrors="null")
        whole = avro(ORDER_AVRO, ORDER)
        values = [
            b"",
            whole,
            framed(1, whole),
            framed(tree, b""),
            framed(text, b""),
            framed(other, b"\0"),
            None,
        ]
        found = decode(form, *values, framed(1, b""), framed(own, whole))
        assert [str(why).split(" (")[0] for why in found["valueError"].to_pylist()] == [
            "it does not begin as a message of a schema registry: a zero byte, and an id",
            "it does not begin as a message of a schema registry: a zero byte, and an id",
            "the registry has no schema 1",
            f"schema {tree}: Tree contains itself, and a column cannot: use a schema without that field",
            f"schema {text} is of type JSON, and valueFormat is avro",
            "it is not as its schema says",
            "None",
            "the registry has no schema 1",
            "None",
        ]
        assert there.asked.count("/schemas/ids/1") == 1


def test_references() -> None:
    item = record("shop.Item", sku="string")
    order = record("shop.Order", items={"type": "array", "items": "shop.Item"})
    with registry() as there:
        there.add("item", item)
        refers = [{"name": "shop.Item", "subject": "item", "version": 1}]
        number = there.add("orders-value", order, references=refers)
        form = typed(valueFormat="avro", schemaRegistry=there.url)
        assert form.columns()["value"].simpleString() == "struct<items:array<struct<sku:string>>>"
        whole = record("shop.Order", items={"type": "array", "items": item})
        assert rows(form, framed(number, avro(whole, {"items": [{"sku": "x"}]}))) == [
            {"items": [{"sku": "x"}]}
        ]


def test_a_readers_schema_beside_the_registry() -> None:
    few = record("shop.Order", id="double")
    with registry() as there:
        number = there.add("any", ORDER_AVRO)
        form = typed(valueFormat="avro", schemaRegistry=there.url, valueSchema=json.dumps(few))
        assert rows(form, framed(number, avro(ORDER_AVRO, ORDER))) == [{"id": 7.0}]
