"""A registry that is slow, away, large, in the way or not one at all; and what it is told."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from postroom.errors import InvalidSetting, UsageError
from postroom.spark.formats.typed import format_options
from tests.tuned import Tune
from tests.unit.spark.formats.spark_formats import (
    ORDER,
    ORDER_AVRO,
    Registry,
    avro,
    decode,
    framed,
    registry,
    rows,
    typed,
)


@pytest.fixture(autouse=True)
def impatient(tune: Tune) -> None:
    tune(spark={"registry_pauses_s": (0.0, 0.0, 0.0)})


def read(there: Registry, **options: object) -> Any:
    return typed(valueFormat="avro", schemaRegistry=there.url, **options)


def test_what_fails_for_a_moment_is_asked_again() -> None:
    with registry() as there:
        there.add("orders-value", ORDER_AVRO)
        there.answers = [(503, b""), (500, b""), (429, b"")]
        assert "id" in read(there).columns()["value"].names
        assert len(there.asked) == 4


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([(500, b"")] * 4, "it answers 500 to /subjects/orders-value/versions/latest: check the address"),
        ([(401, b"")], "it refuses .401.: give schemaRegistryUser"),
        ([(403, b"")], "it refuses .403."),
        ([(302, b"")], "it answers 302"),
        ([(400, b"")], "it answers 400"),
        ([(404, b"")], "there is no subject 'orders-value': name the subject with the option schemaSubject"),
        ([(200, b"<html>")], "is no JSON object: is that a schema registry?"),
        ([(200, b"[" * 100_000)], "is no JSON object"),
        ([(200, b"[]")], "is no JSON object"),
        ([(200, b" " * ((4 << 20) + 1))], "more than 4 MB"),
        ([(200, b"{}")], "has no schema in it"),
        ([(200, b'{"schema": "{"}')], "it is no Avro schema"),
        ([(200, b'{"schema": "{}", "schemaType": "JSON"}')], "is of type JSON, and valueFormat is avro"),
    ],
)
def test_answers_that_are_none(answers: list[tuple[int, bytes]], why: str) -> None:
    with registry() as there:
        there.answers = list(answers)
        with pytest.raises(UsageError, match=f"option schemaRegistry: .*{why}"):
            read(there)


def test_a_registry_that_is_away_is_no_fault_of_a_message() -> None:
    """Even where bad values are null: the task fails, and Spark tries it again."""
    with registry() as there:
        number = there.add("orders-value", ORDER_AVRO)
        form = read(there, valueErrors="null")
    with pytest.raises(UsageError, match=r"it cannot be reached .*: check that it runs"):
        decode(form, framed(number + 1, b""))


def test_what_is_found_is_asked_for_once_in_a_process() -> None:
    with registry() as there:
        number = there.add("orders-value", ORDER_AVRO)
        form = pickle.loads(pickle.dumps(read(there)))
        value = framed(number, avro(ORDER_AVRO, ORDER))
        for _ in range(3):
            assert rows(form, value, value) == [ORDER, ORDER]
        assert there.asked.count(f"/schemas/ids/{number}") == 1


def test_what_was_missing_may_come(tune: Tune) -> None:
    tune(spark={"registry_again_s": -1.0})
    with registry() as there:
        own = there.add("orders-value", ORDER_AVRO)
        form = read(there, valueErrors="null")
        value = framed(own + 1, avro(ORDER_AVRO, ORDER))
        assert rows(form, value) == [None]
        assert there.add("orders-value", {**ORDER_AVRO, "doc": "newer"}) == own + 1
        assert rows(form, value) == [ORDER]


def test_credentials() -> None:
    with registry() as there:
        there.add("orders-value", ORDER_AVRO)
        forms = [
            read(there, schemaRegistryUser="ada", schemaRegistryPassword="hush:hush"),
            read(there, schemaRegistryToken="hush"),
        ]
        assert there.authorization == ["Basic YWRhOmh1c2g6aHVzaA==", "Bearer hush"]
        assert "hush" not in repr(forms)
        there.answers = [(401, b"hush")]
        with pytest.raises(UsageError) as error:
            read(there, schemaRegistryToken="hush")
        assert "hush" not in str(error.value)


def test_options_with_secrets_are_among_those_that_spark_redacts() -> None:
    """Its default: (?i)secret|password|token|access[.]?key."""
    from postroom.spark.options import FORMATS

    secret = [name for name in FORMATS if "password" in name.lower() or "token" in name.lower()]
    assert secret == ["schemaRegistryPassword", "schemaRegistryToken"]


def test_a_json_schema() -> None:
    schema = {
        "type": "object",
        "definitions": {"item": {"type": "object", "properties": {"sku": {"type": "string"}}}},
        "properties": {
            "id": {"type": "integer"},
            "price": {"type": ["null", "number"]},
            "ok": {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
            "day": {"type": "string", "format": "date"},
            "at": {"type": "string", "format": "date-time"},
            "items": {"type": "array", "items": {"$ref": "#/definitions/item"}},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
            "either": {"type": ["string", "integer"]},
            "any": {},
        },
    }
    with registry() as there:
        number = there.add("orders-value", schema, "JSON")
        form = typed(valueFormat="json", schemaRegistry=there.url)
        assert form.columns()["value"].simpleString() == (
            "struct<id:bigint,price:double,ok:boolean,day:date,at:timestamp,items:array<struct<sku:string>>,"
            "counts:map<string,bigint>,either:string,any:string>"
        )
        value = {"id": 1, "items": [{"sku": "x"}], "counts": {"a": 2}, "either": 5, "any": {"b": 1}}
        (row,) = rows(form, framed(number, json.dumps(value).encode()))
        assert {name: row[name] for name in value} == {**value, "either": "5", "any": '{"b":1}'}
        there.add("orders-value", {"properties": {"a": {"$ref": "#"}}, "type": "object"}, "JSON")
        with pytest.raises(InvalidSetting, match=r"value\.a\.a: # contains itself"):
            typed(valueFormat="json", schemaRegistry=there.url)
        plain = typed(valueFormat="json", schemaRegistry=there.url, valueSchema="id int", valueErrors="null")
        found = decode(plain, framed(1, b'{"id": 3}'), b'{"id": 3}')
        assert found["value"].to_pylist() == [{"id": 3}, None]


# ---- options ----


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"valueFormat": "xml"},
            "option valueFormat: 'xml': choose one of binary, string, json, avro, protobuf",
        ),
        ({"keyFormat": "json"}, "option keyFormat: 'json': choose one of binary, string"),
        ({"valueSchema": "a int"}, "option valueSchema: it goes with valueFormat"),
        ({"valueErrors": "null"}, "option valueErrors: it goes with valueFormat or keyFormat"),
        (
            {"valueFormat": "json", "valueErrors": "drop"},
            "option valueErrors: 'drop': choose one of fail, null",
        ),
        ({"valueFormat": "json", "valueMessage": "a"}, "option valueMessage: .*protobuf"),
        (
            {"valueFormat": "avro"},
            "option valueSchema: it is missing: give an Avro schema, or schemaRegistry",
        ),
        ({"valueFormat": "protobuf"}, "option valueSchema: it is missing: give a descriptor set"),
        ({"schemaRegistry": "http://r"}, "option schemaRegistry: it goes with valueFormat"),
        ({"valueFormat": "avro", "schemaSubject": "x"}, "option schemaSubject: it goes with schemaRegistry"),
        (
            {"valueFormat": "avro", "schemaRegistry": "registry:8081"},
            "option schemaRegistry: write an address",
        ),
        ({"valueFormat": "avro", "schemaRegistry": "http://[x"}, "option schemaRegistry: write an address"),
        (
            {"valueFormat": "avro", "schemaRegistry": "http://a:b@r"},
            "option schemaRegistry: the address has a password in it",
        ),
        (
            {"valueFormat": "avro", "schemaRegistry": "http://r", "schemaRegistryUser": "a"},
            "option schemaRegistryPassword: it is missing",
        ),
        (
            {
                "valueFormat": "avro",
                "schemaRegistry": "http://r",
                "schemaRegistryUser": "a",
                "schemaRegistryPassword": "b",
                "schemaRegistryToken": "c",
            },
            "option schemaRegistryToken: it contradicts schemaRegistryUser",
        ),
        (
            {"valueFormat": "avro", "schemaRegistry": "http://r", "subscribe": "a,b"},
            "option schemaSubject: it is missing",
        ),
    ],
)
def test_options_that_contradict(options: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidSetting, match=why):
        format_options({"subscribe": "orders", **options})
