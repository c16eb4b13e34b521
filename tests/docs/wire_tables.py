"""The tables of the protocol's pages, as the code has them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS, Operation
from postroom.wire import messages
from postroom.wire import replies as batches

__all__ = ["ARRAYS", "answer_of", "every_operation", "fields_of", "operation_rows", "type_text", "value_rows"]

ARRAYS = (
    messages.Hello, messages.Welcome, messages.BrokerInfo, messages.BrokerList, messages.Cancel, r.Ask,
    r.Answer, messages.Failure, batches.BatchHead, batches.FetchedHead, batches.PollHead,
    batches.GrantHead, batches.LettersHead, batches.StoppedHead, batches.DelayedHead,
)  # fmt: skip
"""Those that travel as arrays, besides requests."""


def every_operation() -> list[Operation]:
    """What a client may ask a broker: of its queue, and which brokers there are."""
    return [messages.LIST_BROKERS, *OPERATIONS.values()]


def type_text(kind: Any) -> str:
    """A type in a few characters: int, str, [int, int], [Range], {int: int}, "ack" | "retry", None."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " | ".join(f'"{one}"' for one in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(type_text, arguments))
    if origin in (list, tuple) and (origin is list or arguments[-1] is Ellipsis):
        return f"[{type_text(arguments[0])}, …]"
    if origin is tuple:
        return f"[{', '.join(map(type_text, arguments))}]"
    if origin in (dict, Mapping):
        return f"{{{type_text(arguments[0])}: {type_text(arguments[1])}}}"
    if kind is Any:
        return "any"
    if kind is None or kind is type(None):
        return "nil"
    name: str = kind.__name__
    return {"RouteHead": "Route", "FetchedHead": "Fetched", "PollHead": "Polled", "GrantHead": "Grant",
            "LettersHead": "Letters", "StoppedHead": "Stopped", "DelayedHead": "Delayed",
            "BatchHead": "Batch"}.get(name, name)  # fmt: skip


def fields_of(kind: Any) -> list[tuple[str, str, bool]]:
    """Name, type and whether it may be left out."""
    hints = typing.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        return [
            (
                f.name,
                type_text(hints[f.name]),
                f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING,
            )
            for f in dataclasses.fields(kind)
        ]
    if issubclass(kind, msgspec.Struct):
        return [(f.name, type_text(hints[f.name]), not f.required) for f in msgspec.structs.fields(kind)]
    return [(name, type_text(hints[name]), False) for name in kind._fields]


def shown(fields: list[tuple[str, str, bool]]) -> str:
    return ", ".join(f"{name}{'?' if optional else ''}: {text}" for name, text, optional in fields)


def answer_of(operation: Operation) -> str:
    last = type_text(batches.head_of(operation))
    return f"{type_text(operation.early_reply)}, then {last}" if operation.early else last


def operation_rows() -> list[tuple[str, str, str, str, str]]:
    """Kind, name, request, answer, and whether it may be asked again."""
    return [
        (
            str(one.kind),
            one.name,
            shown(fields_of(one.request)) or "–",
            answer_of(one),
            "yes" if one.repeatable else "no",
        )
        for one in every_operation()
    ]


def value_rows() -> dict[str, str]:
    """Every value that is in a request or an answer, by name: its fields."""
    found: dict[str, str] = {}
    waiting: list[Any] = [*ARRAYS]
    for one in every_operation():
        waiting += [*typing.get_type_hints(one.request).values(), batches.head_of(one)]
    while waiting:
        kind = waiting.pop()
        waiting += [one for one in typing.get_args(kind) if one is not Ellipsis]
        is_record = isinstance(kind, type) and (
            dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct) or hasattr(kind, "_fields")
        )
        if is_record and type_text(kind) not in found:
            found[type_text(kind)] = shown(fields_of(kind))
            waiting += typing.get_type_hints(kind).values()
    return found
