"""How fast Spark gets typed values: with valueFormat, and with its own from_json on the same topic.

Orders of about 130 bytes with five fields, one of them a list: the same ones in each format.
"""

from __future__ import annotations

import io
import json
from typing import Any

import postroom
import postroom.sync

from .spark_ground import Place, Rate, measured

__all__ = ["run"]

DDL = "id bigint, customer string, price double, at timestamp, items array<struct<sku:string,n:int>>"
_AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "price", "type": "double"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {
            "name": "items",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Item",
                    "fields": [{"name": "sku", "type": "string"}, {"name": "n", "type": "int"}],
                },
            },
        },
    ],
}
_SOME = 20_000
_MS = 1_700_000_000_000


def run(here: Place) -> list[Rate]:
    from fastavro import parse_schema, schemaless_writer

    schema, rows = parse_schema(_AVRO), here.messages

    def avro(n: int) -> bytes:
        out = io.BytesIO()
        schemaless_writer(out, schema, {**_order(n), "at": _MS + n})
        return out.getvalue()

    spark, url = here.spark, f"sqlite:///{here.fresh()}.db"
    with postroom.sync.connect(url) as mq:
        for topic, made in (("json", lambda n: json.dumps(_order(n)).encode()), ("avro", avro)):
            mq.create_topic(topic, partitions=4)
            for first in range(0, rows, _SOME):
                some = range(first, min(rows, first + _SOME))
                mq.send_many(topic, [postroom.Message(made(n)) for n in some], timeout=120)
    spark.conf.set("spark.sql.session.timeZone", "UTC")

    def read(topic: str, **options: str) -> Any:
        return spark.read.format("postroom").options(url=url, subscribe=topic, **options).load()

    theirs, ours = f"from_json(cast(value as string), '{DDL}') v", {"valueFormat": "json", "valueSchema": DDL}
    typed = {"valueFormat": "avro", "valueSchema": json.dumps(_AVRO)}
    for frame in (read("json").selectExpr(theirs), read("json", **ours).selectExpr("value v")):
        assert frame.where("v.id >= 0 and v.at is not null and v.items[0].n = 2").count() == rows
    return [
        measured(here, "JSON -> noop, as bytes", rows, lambda: _noop(read("json"))),
        measured(here, "JSON -> noop, from_json", rows, lambda: _noop(read("json").selectExpr(theirs))),
        measured(here, "JSON -> noop, valueFormat=json", rows, lambda: _noop(read("json", **ours))),
        measured(here, "Avro -> noop, valueFormat=avro", rows, lambda: _noop(read("avro", **typed))),
    ]


def _order(n: int) -> dict[str, Any]:
    return {
        "id": n,
        "customer": f"customer-{n % 1000}",
        "price": n / 7,
        "at": f"2024-02-03T04:05:06.{n % 1000:03}Z",
        "items": [{"sku": f"sku-{n % 100}", "n": 2}],
    }


def _noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()
