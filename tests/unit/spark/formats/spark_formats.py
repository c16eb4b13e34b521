"""Typed values without Spark: what options settle, a registry to ask, and one order in each format."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)

from postroom.spark.formats.typed import Typed, format_options, settle

ORDER_DDL = "id bigint, name string, items array<struct<sku:string,n:int>>, tags map<string,string>"

ORDER_AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
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
        {"name": "tags", "type": {"type": "map", "values": "string"}},
    ],
}

ORDER = {"id": 7, "name": "Ada", "items": [{"sku": "x", "n": 2}], "tags": {"a": "b"}}
ORDER_COLUMNS = "struct<id:bigint,name:string,items:array<struct<sku:string,n:int>>,tags:map<string,string>>"


def typed(**options: object) -> Typed:
    found = settle(format_options({"subscribe": "orders", **{k: str(v) for k, v in options.items()}}))
    assert found is not None
    return found


def decode(form: Typed, *values: bytes | None) -> dict[str, Any]:
    """Columns, checked: as long as the values, of the type that was promised."""
    found = form.decode({"value": pa.array(values, pa.binary())}, lambda row: f"row {row}")
    for name, column in found.items():
        column.validate(full=True)
        assert len(column) == len(values), name
    return found


def rows(form: Typed, *values: bytes | None) -> list[Any]:
    return [_dicts(one) for one in decode(form, *values)["value"].to_pylist()]


def _dicts(value: Any) -> Any:
    """Arrow gives maps as lists of pairs."""
    if isinstance(value, dict):
        return {name: _dicts(one) for name, one in value.items()}
    if isinstance(value, list):
        return dict(value) if value and isinstance(value[0], tuple) else [_dicts(one) for one in value]
    return value


def avro(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, value)
    return out.getvalue()


def framed(number: int, value: bytes, indexes: bytes = b"") -> bytes:
    """As clients of a registry write it."""
    return b"\0" + number.to_bytes(4, "big") + indexes + value


# ---- protobuf, without protoc ----

_TYPES = {
    name.removeprefix("TYPE_").lower(): number
    for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}


def proto_file(name: str, package: str = "shop", imports: tuple[str, ...] = ()) -> Any:
    return descriptor_pb2.FileDescriptorProto(
        name=name, package=package, syntax="proto3", dependency=list(imports)
    )


def proto_message(parent: Any, name: str, *fields: str, package: str = "shop") -> Any:
    """`fields`: "int64 id", "repeated .shop.Item items", "optional string note", "map string string tags"."""
    add = parent.nested_type if isinstance(parent, descriptor_pb2.DescriptorProto) else parent.message_type
    made = add.add(name=name)
    for number, text in enumerate(fields, 1):
        *words, kind, field_name = text.split()
        if words[:1] == ["map"]:
            entry = proto_message(made, f"{field_name.title()}Entry", f"{words[1]} key", f"{kind} value")
            entry.options.map_entry = True
            words, kind = ["repeated"], f".{package}.{name}.{entry.name}"
        field = made.field.add(name=field_name, number=number, label=3 if "repeated" in words else 1)
        if "optional" in words:
            field.proto3_optional = True
            field.oneof_index = len(made.oneof_decl)
            made.oneof_decl.add(name=f"_{field_name}")
        if kind in _TYPES:
            field.type = _TYPES[kind]
        elif kind.startswith("enum:"):
            field.type, field.type_name = _TYPES["enum"], kind.removeprefix("enum:")
        else:
            field.type, field.type_name = _TYPES["message"], kind
    return made


def order_file(*further: str) -> Any:
    file = proto_file("order.proto", imports=("google/protobuf/timestamp.proto",))
    proto_message(file, "Item", "string sku", "int32 n")
    fields = ("int64 id", "optional string name", "repeated .shop.Item items", "map string string tags")
    proto_message(file, "Order", *fields, *further)
    return file


def proto_class(file: Any, name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    for module in (duration_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def descriptor_set(path: Path, *files: Any) -> str:
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=list(files)).SerializeToString())
    return str(path)


def proto_order() -> bytes:
    made = proto_class(order_file(), "shop.Order")(id=7, name="Ada", tags={"a": "b"})
    made.items.add(sku="x", n=2)
    data: bytes = made.SerializeToString()
    return data


# ---- a registry ----


class Registry:
    """A real HTTP server with schemas in memory."""

    def __init__(self) -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.subjects: dict[str, list[int]] = {}
        self.asked: list[str] = []
        self.authorization: list[str | None] = []
        self.answers: list[tuple[int, bytes]] = []  # instead of what is asked for
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.authorization.append(self.headers.get("Authorization"))
                status, body = outer.answers.pop(0) if outer.answers else outer.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, subject: str, schema: Any, kind: str = "AVRO", references: Any = ()) -> int:
        number = len(self.schemas) + 100
        if kind != "PROTOBUF":
            text = schema if isinstance(schema, str) else json.dumps(schema)
        else:
            bare = descriptor_pb2.FileDescriptorProto()
            bare.CopyFrom(schema)
            bare.ClearField("name")
            text = base64.b64encode(bare.SerializeToString()).decode()
        self.schemas[number] = {
            "schema": text,
            **({"schemaType": kind} if kind != "AVRO" else {}),
            **({"references": list(references)} if references else {}),
        }
        self.subjects.setdefault(subject, []).append(number)
        return number

    def answer(self, asked: str) -> tuple[int, bytes]:
        path, _, query = asked.partition("?")
        match path.strip("/").split("/"):
            case ["schemas", "ids", number] if int(number) in self.schemas:
                found = self.schemas[int(number)]
            case ["subjects", subject, "versions", version] if subject in self.subjects:
                at = -1 if version == "latest" else int(version) - 1
                number = self.subjects[subject][at]
                found = {"id": number, "version": 1, "subject": subject, **self.schemas[number]}
            case _:
                return 404, b'{"error_code": 40403, "message": "not found"}'
        if found.get("schemaType") == "PROTOBUF" and query != "format=serialized":
            found = {**found, "schema": 'syntax = "proto3"; ...'}
        return 200, json.dumps(found).encode()

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def registry() -> Iterator[Registry]:
    made = Registry()
    made.start()
    try:
        yield made
    finally:
        made.stop()
