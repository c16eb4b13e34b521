"""JSON values as columns: what is read, what is not, and that no bytes do anything else."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from math import inf, isnan
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import DecodeError, InvalidSetting
from postroom.spark.formats.arrow import arrow_type, parse_schema
from tests.unit.spark.formats.spark_formats import ORDER, ORDER_COLUMNS, ORDER_DDL, decode, rows, typed

DAY = datetime(2024, 2, 3, 4, 5, 6, tzinfo=UTC)


def one(kind: str, text: str) -> Any:
    """The field `a` of that type, read from this JSON; an error as its text."""
    found = decode(typed(valueFormat="json", valueSchema=f"a {kind}", valueErrors="null"), text.encode())
    why = found["valueError"][0].as_py()
    return ValueError(why) if why else found["value"][0].as_py()["a"]


def test_an_order() -> None:
    form = typed(valueFormat="json", valueSchema=ORDER_DDL)
    assert form.columns()["value"].simpleString() == ORDER_COLUMNS
    whole = json.dumps(ORDER).encode()
    assert rows(form, whole, None, b' \n{"id": 8, "more": [1]}\r\n') == [
        ORDER,
        None,
        {"id": 8, "name": None, "items": None, "tags": None},
    ]
    assert decode(form, whole)["value"].type.equals(arrow_type(form.columns()["value"]))
    assert decode(form)["value"].type.equals(arrow_type(form.columns()["value"]))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("bigint", '{"a": 9223372036854775807}', 2**63 - 1),
        ("tinyint", '{"a": -128}', -128),
        ("double", '{"a": 3}', 3.0),
        ("double", '{"a": "-Infinity"}', -inf),
        ("double", '{"a": 1e400}', inf),
        ("float", '{"a": 0.5}', 0.5),
        ("boolean", '{"a": false}', False),
        ("string", '{"a": "é\\n\\u00e9"}', "é\né"),
        ("string", '{"a": 1.10}', "1.10"),
        ("string", '{"a": {"b": [true, null]}}', '{"b":[true,null]}'),
        ("binary", '{"a": "aGk="}', b"hi"),
        ("date", '{"a": "2024-02-03"}', date(2024, 2, 3)),
        ("timestamp", '{"a": "2024-02-03T04:05:06Z"}', DAY),
        ("timestamp", '{"a": "2024-02-03T05:05:06+01:00"}', DAY),
        ("timestamp", '{"a": "2024-02-03 04:05:06"}', DAY),
        ("timestamp", '{"a": "2024-02-03"}', DAY.replace(hour=0, minute=0, second=0)),
        ("timestamp", '{"a": 1706933106}', DAY),
        ("timestamp_ntz", '{"a": "2024-02-03T04:05:06"}', DAY.replace(tzinfo=None)),
        ("decimal(5, 2)", '{"a": 1.005}', Decimal("1.01")),
        ("decimal(5, 2)", '{"a": "999.99"}', Decimal("999.99")),
        (
            "decimal(38, 0)",
            '{"a": 12345678901234567890123456789012345678}',
            int("1234567890" * 3 + "12345678"),
        ),
        ("array<int>", '{"a": [1, null]}', [1, None]),
        ("map<string, int>", '{"a": {"x": 1, "y": null}}', [("x", 1), ("y", None)]),
        ("int", '{"a": 1, "a": 2}', 2),
        ("int", '{"A": 1}', None),
        ("struct<b: struct<c: int>>", '{"a": {"b": {"c": 1}}}', {"b": {"c": 1}}),
        ("struct<b: struct<c: int>>", '{"a": {"b": null}}', {"b": None}),
    ],
)
def test_values(kind: str, text: str, value: Any) -> None:
    assert one(kind, text) == value


def test_not_a_number() -> None:
    assert isnan(one("double", '{"a": "NaN"}'))


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("int", "", "no JSON"),
        ("int", "{", "no JSON"),
        ("int", '{"a": 1}{"a": 2}', "trailing characters"),
        ("int", "null", "Expected `object`, got `null`"),
        ("int", "[1]", "got `array`"),
        ("int", '{"a": "1"}', "got `str` - at `$.a`"),
        ("int", '{"a": 1.0}', "got `float`"),
        ("int", '{"a": true}', "got `bool`"),
        ("int", '{"a": 2147483648}', "<= 2147483647"),
        ("bigint", '{"a": 9223372036854775808}', "<= 9223372036854775807"),
        ("double", '{"a": "1"}', "Expected a number"),
        ("double", '{"a": true}', "Expected a number"),
        ("boolean", '{"a": "true"}', "got `str`"),
        ("date", '{"a": "2024-02-30"}', "date"),
        ("timestamp", '{"a": "soon"}', "isoformat"),
        ("timestamp", '{"a": 1706933106000}', "declare the field as bigint"),
        ("timestamp", '{"a": "9999-12-31T23:59:59-14:00"}', "outside of the years"),
        ("timestamp_ntz", '{"a": "2024-02-03T04:05:06Z"}', "use timestamp"),
        ("decimal(5, 2)", '{"a": 1000}', "does not fit into decimal(5, 2)"),
        ("decimal(5, 2)", '{"a": 999.999}', "does not fit"),
        ("decimal(5, 2)", '{"a": 1e999999}', "does not fit"),
        ("decimal(5, 2)", '{"a": "NaN"}', "does not fit"),
        ("binary", '{"a": "?"}', "base64"),
        ("array<int>", '{"a": [1, "x"]}', "at `$.a[1]`"),
        ("string", '{"a": ' + "[" * 100_000, "recursion"),
        ("string", '{"a": ' + "9" * 100_000 + "}", "out of range"),
    ],
)
def test_values_that_do_not_fit(kind: str, text: str, why: str) -> None:
    found = one(kind, text)
    assert isinstance(found, ValueError)
    assert why.lower() in str(found).lower()


def test_one_odd_message_stays_alone() -> None:
    """It is null, with its bytes and the reason; its neighbours are read; no value is null without one."""
    form = typed(valueFormat="json", valueSchema="a decimal(3, 1)", valueErrors="null")
    good = [b'{"a": %d}' % n for n in range(50)]
    values = [*good, b'{"a": 1000}', None, b"no JSON", *good]
    found = decode(form, *values)
    bad = {n for n, why in enumerate(found["valueError"].to_pylist()) if why is not None}
    assert bad == {50, 52}
    assert {n: raw for n, raw in enumerate(found["valueRaw"].to_pylist()) if raw is not None} == {
        50: b'{"a": 1000}',
        52: b"no JSON",
    }
    assert [row and int(row["a"]) for row in found["value"].to_pylist()] == [
        *range(50),
        None,
        None,
        None,
        *range(50),
    ]


def test_failing_names_the_message() -> None:
    form = typed(valueFormat="json", valueSchema="a int")
    with pytest.raises(
        DecodeError, match=r"row 1: the value cannot be read as json: .*\$\.a.*1 more.*valueErrors"
    ):
        decode(form, b"{}", b'{"a": "x"}', b"x")


def test_strings() -> None:
    form = typed(valueFormat="string", keyFormat="string", valueErrors="null")
    raw = {"key": pa.array([b"k", b"\xff", None]), "value": pa.array([b"v", "é".encode(), b"\xfe"])}
    found = form.decode(raw, str)
    assert found["key"].to_pylist() == ["k", None, None]
    assert found["value"].to_pylist() == ["v", "é", None]
    assert found["valueRaw"].to_pylist() == [None, None, b"\xfe"]
    first, second, third = found["valueError"].to_pylist()
    assert (
        first is None and second.startswith("key ff: it is no UTF-8") and third.startswith("it is no UTF-8")
    )
    with pytest.raises(DecodeError, match="row 1: the key cannot be read as string"):
        typed(valueFormat="string", keyFormat="string").decode(raw, lambda row: f"row {row}")


@given(st.lists(st.binary() | st.sampled_from([b"{}", b'{"id":1}', b'{"name":[[]]}', None]), max_size=8))
def test_any_bytes(values: list[bytes | None]) -> None:
    form = typed(
        valueFormat="json", valueSchema=ORDER_DDL + ", t timestamp, d decimal(4,2)", valueErrors="null"
    )
    found = decode(form, *values)
    for value, read, why in zip(values, found["value"], found["valueError"], strict=True):
        assert read.is_valid == (value is not None and not why.is_valid)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcdefgh"), inner, max_size=8)
    ),
    max_leaves=12,
)
_ALL = (
    "a string, b double, c timestamp, d decimal(9,3), e array<map<string,date>>, f struct<a:binary,b:float>, "
    "g timestamp_ntz, h smallint"
)


@given(st.lists(st.dictionaries(st.sampled_from("abcdefgh"), _JSON), min_size=1, max_size=5))
def test_any_json(documents: list[Any]) -> None:
    form = typed(valueFormat="json", valueSchema=_ALL, valueErrors="null")
    found = decode(form, *[json.dumps(one).encode() for one in documents])
    assert [why is None for why in found["valueError"].to_pylist()] == [
        value is not None for value in found["value"].to_pylist()
    ]


# ---- schemas ----


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("id bigint", "struct<id:bigint>"),
        ("struct<id: LONG, `odd ``name` string>", "struct<id:bigint,odd `name:string>"),
        ("a decimal, b DECIMAL(4), c dec(5,2)", "struct<a:decimal(10,0),b:decimal(4,0),c:decimal(5,2)>"),
        ("a: int NOT NULL COMMENT 'it''s', b real", "struct<a:int,b:float>"),
        ("m map<string,array<struct<x:timestamp_ltz>>>", "struct<m:map<string,array<struct<x:timestamp>>>>"),
    ],
)
def test_a_schema_is_read_as_spark_reads_it(text: str, simple: str) -> None:
    text = text.replace("it''s", "its")
    assert parse_schema(text).simpleString() == simple


def test_a_schema_in_sparks_json() -> None:
    text = parse_schema("a int not null, b array<string>").json()
    form = typed(valueFormat="json", valueSchema=text)
    assert form.columns()["value"] == parse_schema("a int, b array<string>")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is missing: write the fields as in Spark"),
        ("id", "is no type behind 'id'"),
        ("id bigit", "'bigit' is no type behind 'id'; there are boolean"),
        ("id bigint,", "the name of a field is missing behind ','"),
        ("id array<int", "'>' is missing behind 'int'"),
        ("id map<int,int>", "the keys of a map are strings"),
        ("a int, a int", "the field 'a' twice"),
        ("a decimal(39)", "1 to 38 digits"),
        ("a int; drop", "'; drop' is no part"),
        ("a int b", "'b' was not expected"),
        ('{"type": "struct"}', r"df.schema.json\(\)"),
        (parse_schema("a int").json().replace("integer", "variant"), "variant cannot be read from JSON"),
    ],
)
def test_a_schema_that_is_none(text: str, why: str) -> None:
    with pytest.raises(InvalidSetting, match=f"option valueSchema: .*{why}"):
        typed(valueFormat="json", valueSchema=text)
