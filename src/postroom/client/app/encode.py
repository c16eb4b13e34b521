"""How what a handler returns becomes the body of a reply: the other way round from `decode`.

    bytes, bytearray, memoryview   the body as it is
    str                            UTF-8
    None                           an empty body
    postroom.Message               its value, by these same rules, and its headers
    a pydantic model               its JSON
    anything else                  JSON by msgspec: dataclass, Struct, dict, list, int, …

Must never guess: what none of them can encode is a UsageError that names the type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...errors import UsageError
from ..message import Message

__all__ = ["Reply", "encoded"]

Reply = tuple[bytes, Mapping[str, str | bytes] | None]


def encoded(returned: Any) -> Reply:
    """The body and the headers of a reply."""
    if isinstance(returned, Message):
        return _body(returned.value), returned.headers
    return _body(returned), None


def _body(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode()
    dump = getattr(value, "model_dump_json", None)
    if dump is not None and hasattr(type(value), "__pydantic_validator__"):
        return str(dump()).encode()
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"the handler returned {type(value).__name__}, which cannot be sent ({error}): return bytes, "
            "str, a dataclass, a msgspec Struct, a pydantic model, a dict, or a postroom.Message with headers"
        ) from None
