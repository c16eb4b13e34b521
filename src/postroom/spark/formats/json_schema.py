"""A JSON Schema, as registries keep it, becomes a Spark type.

What has no type of its own in Spark (several types, anything at all) is a string with the JSON in it: so
nothing is lost, and from_json can go on from there.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["type_of"]

_PLAIN = {"integer": "LongType", "number": "DoubleType", "boolean": "BooleanType", "string": "StringType"}
_FORMATS = {"date": "DateType", "date-time": "TimestampType"}


def type_of(text: str) -> Any:
    """A StructType. ValueError says what is wrong."""
    from pyspark.sql.types import StructType

    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON Schema ({error})") from None
    made = _Types(schema).of(schema, "value", ())
    if not isinstance(made, StructType):
        raise ValueError("the JSON Schema of a value is an object with properties: give valueSchema")
    return made


class _Types:
    def __init__(self, root: Any) -> None:
        self._root = root

    def of(self, schema: Any, path: str, inside: tuple[str, ...]) -> Any:
        from pyspark.sql import types

        if not isinstance(schema, dict):  # true: anything
            return types.StringType()
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in inside:
                raise ValueError(
                    f"{path}: {ref} contains itself, and a column cannot: give a schema without that field "
                    "with valueSchema"
                )
            return self.of(self._referred(ref), path, (*inside, ref))
        for choice in ("oneOf", "anyOf"):
            rest = [one for one in schema.get(choice, ()) if one != {"type": "null"}]
            if len(rest) == 1:
                return self.of(rest[0], path, inside)
        kind = schema.get("type")
        if isinstance(kind, list):
            rest = [one for one in kind if one != "null"]
            kind = rest[0] if len(rest) == 1 else None
        if kind == "object":
            return self._object(schema, path, inside)
        if kind == "array":
            return types.ArrayType(self.of(schema.get("items", True), path, inside))
        if kind == "string" and schema.get("format") in _FORMATS:
            return getattr(types, _FORMATS[schema["format"]])()
        return getattr(types, _PLAIN.get(kind, "StringType") if isinstance(kind, str) else "StringType")()

    def _object(self, schema: dict[str, Any], path: str, inside: tuple[str, ...]) -> Any:
        from pyspark.sql import types

        listed = schema.get("properties")
        if isinstance(listed, dict) and listed:
            return types.StructType(
                [
                    types.StructField(name, self.of(one, f"{path}.{name}", inside))
                    for name, one in listed.items()
                ]
            )
        further = schema.get("additionalProperties", True)
        if isinstance(further, dict):
            return types.MapType(types.StringType(), self.of(further, path, inside))
        return types.StringType()

    def _referred(self, ref: Any) -> Any:
        found = self._root
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise ValueError(f"{ref!r} refers to another schema: give the schema with valueSchema")
        for part in ref.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or part not in found:
                raise ValueError(f"{ref!r} refers to nothing")
            found = found[part]
        return found
