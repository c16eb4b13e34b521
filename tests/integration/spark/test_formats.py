"""Typed values in real Spark: each format, in a batch and as a stream; and JSON beside Spark's from_json."""

from __future__ import annotations

import json
import os
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import postroom
from tests.unit.spark.formats.spark_formats import (
    ORDER,
    ORDER_AVRO,
    ORDER_DDL,
    avro,
    descriptor_set,
    framed,
    order_file,
    proto_order,
    registry,
)

ROW = ORDER["id"], ORDER["name"], ORDER["items"][0]["sku"], ORDER["tags"]  # type: ignore[index]
PARTS = "value.id", "value.name", "value.items[0].sku sku", "value.tags"


def read(spark: Any, url: str, **options: object) -> Any:
    return spark.read.format("postroom").options(url=url, subscribe="orders", **options).load()


@pytest.mark.parametrize("form", ["json", "avro", "protobuf"])
def test_in_batches_and_streams(spark: Any, url: str, mq: Any, tmp_path: Path, form: str) -> None:
    mq.create_topic("orders", partitions=1)
    with registry() as there:
        number = there.add("orders-value", ORDER_AVRO)
        value, options = {
            "json": (json.dumps(ORDER).encode(), {"valueSchema": ORDER_DDL}),
            "avro": (framed(number, avro(ORDER_AVRO, ORDER)), {"schemaRegistry": there.url}),
            "protobuf": (
                proto_order(),
                {
                    "valueSchema": descriptor_set(tmp_path / "orders.desc", order_file()),
                    "valueMessage": "shop.Order",
                },
            ),
        }[form]
        mq.send_many("orders", [postroom.Message(value, key="ada") for _ in range(3)])
        chosen = {"valueFormat": form, "keyFormat": "string", **options}
        frame = read(spark, url, **chosen)
        assert [tuple(row) for row in frame.selectExpr("key", *PARTS).collect()] == [("ada", *ROW)] * 3
        assert frame.where("value.id = 7").count() == 3
        kind = frame.schema["value"].dataType.simpleString()
        given = spark.read.format("postroom").schema(f"value {kind}, `offset` bigint")
        some = given.options(url=url, subscribe="orders", **chosen).load()
        assert sorted(row.offset for row in some.where("value.name = 'Ada'").collect()) == [0, 1, 2]

        mq.send("orders", b"\xff\xff")
        with pytest.raises(Exception, match=f"offset 3: the value cannot be read as {form}: .*valueErrors"):
            read(spark, url, **chosen).collect()
        streaming = spark.readStream.format("postroom").options(
            url=url, subscribe="orders", startingOffsets="earliest", valueErrors="null", **chosen
        )
        query = (
            streaming.load()
            .selectExpr(*PARTS, "valueError", "valueRaw")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        query.awaitTermination(240)
        found = spark.read.parquet(str(tmp_path / "out")).collect()
        good = [tuple(row)[:4] for row in found if row.valueError is None]
        (bad,) = [row for row in found if row.valueError is not None]
        assert good == [ROW] * 3
        assert bytes(bad.valueRaw) == b"\xff\xff" and bad.id is None


ALL = (
    "a bigint, b int, c double, d float, e string, f boolean, g date, h timestamp, i decimal(12,3), "
    "j binary, k array<bigint>, l map<string,double>, m struct<x:string,y:array<struct<z:int>>>, "
    "n timestamp_ntz"
)


@pytest.fixture
def utc(spark: Any) -> Iterator[None]:
    """A time without a zone is in the session's for from_json, and in UTC for us."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield
    spark.conf.set("spark.sql.session.timeZone", zone)


@pytest.mark.usefixtures("utc")
def test_json_means_what_from_json_means(spark: Any, url: str, mq: Any) -> None:
    """Random documents, some of them odd: the same ones are refused, and the others are equal."""
    seed = int(os.environ.get("POSTROOM_SEED", "17"))  # another one tries other documents
    rolled = random.Random(seed)
    mq.create_topic("orders", partitions=1)
    documents = [_document(rolled) for _ in range(2000)]
    mq.send_many("orders", [postroom.Message(text.encode()) for text in documents])
    raw = read(spark, url)
    marked = f"'{ALL}, bad string', map('columnNameOfCorruptRecord', 'bad')"
    theirs = raw.selectExpr("`offset` at", f"from_json(cast(value as string), {marked}) v").selectExpr(
        "at", "v.bad is not null odd", f"to_json(struct({', '.join('v.' + name for name in NAMES)})) v"
    )
    ours = read(spark, url, valueFormat="json", valueSchema=ALL, valueErrors="null").selectExpr(
        "`offset` at", "valueError is not null odd", "to_json(value) v", "valueError why"
    )
    both = ours.join(theirs.withColumnsRenamed({"v": "their_v", "odd": "their_odd"}), "at").collect()
    assert len(both) == len(documents)
    wrong = [
        (documents[row.at], row.why, row.v, row.their_v)
        for row in both
        if row.odd != row.their_odd or (not row.odd and row.v != row.their_v)
    ]
    assert wrong == [], f"seed {seed}"
    assert 100 < sum(row.odd for row in both) < 1900


NAMES = "abcdefghijklmn"


def _document(rolled: random.Random) -> str:
    named = {name: _value(name, rolled) for name in NAMES if rolled.random() < 0.5}
    if rolled.random() < 0.03:
        name = rolled.choice(NAMES)  # "1" is a date for Spark, a day after 1970, and none for us
        named[name] = rolled.choice(['"x"', "[]", "{}", "1.5", "true", '"x"' if name == "g" else '"1"'])
    listed = [f'"{name}"{rolled.choice(["", " "])}: {value}' for name, value in named.items()]
    rolled.shuffle(listed)
    whole = "{" + ",\n".join([*listed, '"unknown": [{"a": 1}]'][: len(listed) + rolled.randrange(2)]) + "}"
    return whole if rolled.random() > 0.02 else rolled.choice([whole[:-1], whole[1:], "[" + whole])


def _value(name: str, rolled: random.Random) -> str:
    if rolled.random() < 0.1:
        return "null"
    number = rolled.randrange(-(2**31), 2**31)
    text = "".join(rolled.choices(string.ascii_letters + 'é€😀 "\\\n', k=rolled.randrange(8)))
    day = f"{rolled.randrange(1900, 2100)}-{rolled.randrange(1, 13):02}-{rolled.randrange(1, 29):02}"
    hour = f"{rolled.randrange(24):02}:{rolled.randrange(60):02}:{rolled.randrange(60):02}"
    fraction = rolled.choice(["", f".{rolled.randrange(1000):03}", f".{rolled.randrange(10**6):06}"])
    match name:
        case "a":
            return str(rolled.randrange(-(2**63), 2**63))
        case "b":
            return str(number)
        case "c" | "d":
            return rolled.choice([str(number), repr(number / 1024), f"{number}e-3", '"NaN"', '"-Infinity"'])
        case "e":
            return rolled.choice(
                [json.dumps(text), json.dumps(text, ensure_ascii=False), str(number), '{"q":[1,true]}']
            )
        case "f":
            return rolled.choice(["true", "false"])
        case "g":
            return f'"{day}"'
        case "h":
            zone = rolled.choice(["Z", "+05:30", "-08:00", ""])
            return rolled.choice(
                [f'"{day}T{hour}{fraction}{zone}"', f'"{day} {hour}"', f'"{day}"', str(number)]
            )
        case "i":
            return rolled.choice(
                [f"{number / 10**4:.4f}", f'"{number}.5"', str(number // 10), f"{number}000"]
            )
        case "j":
            return rolled.choice(['"aGk="', '""', '"AAEC"'])
        case "k":
            return json.dumps([rolled.choice([None, number]) for _ in range(rolled.randrange(4))])
        case "l":
            return json.dumps({letter: rolled.choice([None, 1.5, 2]) for letter in text if letter.isascii()})
        case "m":
            return json.dumps({"x": text, "y": rolled.choice([None, [], [{"z": 1}, None, {}]]), "w": 0})
    return f'"{day}T{hour}{fraction}"'
