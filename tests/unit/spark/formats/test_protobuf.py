"""Protobuf values as columns: types, presence, messages of a registry, and hostile bytes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import InvalidSetting
from postroom.spark.formats.arrow import arrow_type, gather
from postroom.spark.formats.protobuf_values import ProtobufValues
from postroom.spark.formats.typed import Typed
from tests.unit.spark.formats.spark_formats import (
    ORDER,
    ORDER_COLUMNS,
    decode,
    descriptor_set,
    framed,
    order_file,
    proto_class,
    proto_file,
    proto_message,
    proto_order,
    registry,
    rows,
    typed,
)

KNOWN = "google.protobuf"
IMPORTS = tuple(
    f"google/protobuf/{n}.proto" for n in ("timestamp", "duration", "wrappers", "struct", "empty")
)


def file_of(*fields: str) -> Any:
    file = proto_file("m.proto", imports=IMPORTS)
    kinds = file.enum_type.add(name="Kind")
    kinds.value.add(name="NONE", number=0)
    kinds.value.add(name="SOME", number=1)
    proto_message(file, "Inner", "int32 q")
    proto_message(file, "M", *fields)
    return file


def read(file: Any, fill: Any) -> Any:
    """The only field, `a`, of a message that `fill` has filled."""
    values = ProtobufValues((file.SerializeToString(),), "shop.M")
    message = proto_class(file, "shop.M")()
    fill(message)
    parser = values.parser()
    found, bad = gather(parser.shape, [parser(message.SerializeToString())])
    assert not bad
    found.validate(full=True)
    assert found.type.equals(arrow_type(values.type))
    return values.type["a"].dataType.simpleString(), found[0].as_py()["a"]


def to(value: Any) -> Any:
    return lambda message: setattr(message, "a", value)


@pytest.mark.parametrize(
    ("field", "fill", "column", "value"),
    [
        ("int32 a", to(-5), "int", -5),
        ("sint64 a", to(-(2**63)), "bigint", -(2**63)),
        ("uint32 a", to(2**32 - 1), "bigint", 2**32 - 1),
        ("uint64 a", to(2**64 - 1), "decimal(20,0)", Decimal(2**64 - 1)),
        ("fixed64 a", to(2**64 - 1), "decimal(20,0)", Decimal(2**64 - 1)),
        ("sfixed32 a", to(-1), "int", -1),
        ("double a", to(0.1), "double", 0.1),
        ("float a", to(0.5), "float", 0.5),
        ("bool a", to(True), "boolean", True),
        ("string a", to("é"), "string", "é"),
        ("bytes a", to(b"\xff"), "binary", b"\xff"),
        ("enum:.shop.Kind a", to(1), "string", "SOME"),
        ("enum:.shop.Kind a", to(9), "string", "9"),
        ("int32 a", lambda m: None, "int", 0),
        ("optional int32 a", lambda m: None, "int", None),
        ("optional int32 a", to(0), "int", 0),
        ("repeated int32 a", lambda m: m.a.extend([1, 2]), "array<int>", [1, 2]),
        ("repeated int32 a", lambda m: None, "array<int>", []),
        (
            "repeated enum:.shop.Kind a",
            lambda m: m.a.extend([1, 0]),
            "array<string>",
            ["SOME", "NONE"],
        ),
        (".shop.Inner a", lambda m: None, "struct<q:int>", None),
        (".shop.Inner a", lambda m: m.a.SetInParent(), "struct<q:int>", {"q": 0}),
        ("repeated .shop.Inner a", lambda m: m.a.add(q=4), "array<struct<q:int>>", [{"q": 4}]),
        ("map string int32 a", lambda m: m.a.update(x=1), "map<string,int>", [("x", 1)]),
        (
            "map int32 .shop.Inner a",
            lambda m: m.a[5].MergeFrom(m.a[5]),
            "map<int,struct<q:int>>",
            [(5, {"q": 0})],
        ),
        (
            f".{KNOWN}.Timestamp a",
            lambda m: m.a.FromJsonString("2024-02-03T04:05:06.789Z"),
            "timestamp",
            datetime(2024, 2, 3, 4, 5, 6, 789_000, tzinfo=UTC),
        ),
        (f".{KNOWN}.Timestamp a", lambda m: None, "timestamp", None),
        (
            f".{KNOWN}.Duration a",
            lambda m: m.a.FromJsonString("-1.5s"),
            "interval day to second",
            timedelta(seconds=-1.5),
        ),
        (f".{KNOWN}.StringValue a", lambda m: setattr(m.a, "value", "x"), "string", "x"),
        (f".{KNOWN}.Int64Value a", lambda m: None, "bigint", None),
        (f".{KNOWN}.UInt64Value a", lambda m: setattr(m.a, "value", 5), "decimal(20,0)", Decimal(5)),
        (f".{KNOWN}.Struct a", lambda m: m.a.update({"b": [1]}), "string", '{"b": [1.0]}'),
        (f".{KNOWN}.Empty a", lambda m: m.a.SetInParent(), "boolean", True),
        (f".{KNOWN}.Empty a", lambda m: None, "boolean", None),
    ],
)
def test_types(field: str, fill: Any, column: str, value: Any) -> None:
    assert read(file_of(field), fill) == (column, value)


def test_a_oneof() -> None:
    file = file_of("int32 a", "string b")
    message = file.message_type[1]
    message.oneof_decl.add(name="which")
    for field in message.field:
        field.oneof_index = 0
    assert read(file, lambda m: setattr(m, "b", "x")) == ("int", None)
    assert read(file, to(0)) == ("int", 0)


def test_an_order(tmp_path: Path) -> None:
    path = descriptor_set(tmp_path / "orders.desc", order_file())
    form = typed(valueFormat="protobuf", valueSchema=path, valueMessage="shop.Order")
    assert form.columns()["value"].simpleString() == ORDER_COLUMNS
    assert rows(form, proto_order(), None) == [ORDER, None]
    assert rows(form, b"") == [{"id": 0, "name": None, "items": [], "tags": []}]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("shop.Oder", "there is no message 'shop.Oder' in it; there are shop.Tree, shop.Loop"),
        ("shop.Tree", "value.left: shop.Tree contains itself"),
        ("shop.Loop", "shop.Loop contains itself"),
    ],
)
def test_messages_that_have_no_columns(tmp_path: Path, message: str, why: str) -> None:
    file = proto_file("tree.proto")
    proto_message(file, "Tree", "int32 n", ".shop.Tree left")
    proto_message(file, "Loop", "map string .shop.Loop more")
    path = descriptor_set(tmp_path / "tree.desc", file)
    with pytest.raises(InvalidSetting, match=f"option valueSchema: .*{why}"):
        typed(valueFormat="protobuf", valueSchema=path, valueMessage=message)


def test_files_that_describe_nothing(tmp_path: Path) -> None:
    odd = tmp_path / "odd.desc"
    for data, why in ((b"\xff\xff", "no descriptor set: write it with protoc"), (b"", "has no file")):
        odd.write_bytes(data)
        with pytest.raises(InvalidSetting, match=why):
            typed(valueFormat="protobuf", valueSchema=odd)
    path = descriptor_set(odd, proto_file("a.proto", imports=("b.proto",)))
    with pytest.raises(InvalidSetting, match=r"imports b.proto, which is missing: .* --include_imports"):
        typed(valueFormat="protobuf", valueSchema=path)
    path = descriptor_set(odd, proto_file("a.proto"))
    with pytest.raises(InvalidSetting, match="there is no message 0 in it"):
        typed(valueFormat="protobuf", valueSchema=path)


FORM = Typed("protobuf", ProtobufValues((order_file().SerializeToString(),), "shop.Order"), None, True)


@given(st.lists(st.binary(max_size=60), max_size=4), st.binary(max_size=6), st.integers(0, 40))
def test_any_bytes(values: list[bytes], some: bytes, at: int) -> None:
    whole = proto_order()
    damaged = whole[:at] + some + whole[at + len(some) :]
    found = decode(FORM, *values, damaged, whole)
    assert found["value"][-1].is_valid
    for row, why in zip(found["value"], found["valueError"], strict=True):
        assert row.is_valid != why.is_valid


# ---- a registry ----


def test_messages_of_a_registry() -> None:
    """A later version of the same message is read; another message, or another kind of schema, is not."""
    newer = order_file("bool paid")
    with registry() as there:
        new = there.add("orders-value", newer, "PROTOBUF")
        own = there.add("orders-value", order_file(), "PROTOBUF")
        avro = there.add("x", '"string"')
        form = typed(
            valueFormat="protobuf", schemaRegistry=there.url, valueMessage="shop.Order", valueErrors="null"
        )
        assert form.columns()["value"].simpleString() == ORDER_COLUMNS
        second, first, nested = b"\x02\x02", b"\0", b"\x04\x02\0"  # [1], [0], [1, 0]
        later = proto_class(newer, "shop.Order")(id=8, paid=True).SerializeToString()
        values = [
            framed(own, proto_order(), second),
            framed(new, later, second),
            framed(own, b"", first),
            framed(own, b"", nested),
            framed(own, b"", b"\x06"),
            framed(own, b"", b"\x02\x10"),
            framed(own, b"", b"\x01"),
            framed(avro, b"", first),
            framed(9, b"", first),
            b"\x08\x07",
        ]
        found = decode(form, *values)
        assert [row["id"] for row in found["value"].to_pylist()[:2]] == [7, 8]
        assert [str(why) for why in found["valueError"].to_pylist()] == [
            "None",
            "None",
            f"schema {own}: its type is shop.Item, and shop.Order is read",
            f"schema {own}: its type is shop.Order.TagsEntry, and shop.Order is read",
            "the header of the registry is cut off",
            f"schema {own}: its type is none: there is no message 8 in it, and shop.Order is read",
            "its header names -1 message indexes",
            f"schema {avro} is of type AVRO, and valueFormat is protobuf",
            "the registry has no schema 9",
            "it does not begin as a message of a schema registry: a zero byte, and an id",
        ]


def test_the_first_message_and_references() -> None:
    item = proto_file("item.proto")
    proto_message(item, "Item", "string sku")
    order = proto_file("order.proto", imports=("item.proto",))
    proto_message(order, "Order", "repeated .shop.Item items")
    with registry() as there:
        there.add("item", item, "PROTOBUF")
        refers = [{"name": "item.proto", "subject": "item", "version": 1}]
        number = there.add("orders-value", order, "PROTOBUF", refers)
        form = typed(valueFormat="protobuf", schemaRegistry=there.url)
        assert form.columns()["value"].simpleString() == "struct<items:array<struct<sku:string>>>"
        value = b"\x0a\x03\x0a\x01x"
        assert rows(form, framed(number, value, b"\0")) == [{"items": [{"sku": "x"}]}]
