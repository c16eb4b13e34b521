"""Requests are read as `kio` wrote them, in every version that is served; other bytes are refused."""

from __future__ import annotations

import dataclasses
import datetime
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema
from kio.serial import entity_writer

from postroom.errors import ProtocolError
from postroom.kafka.apis import APIS
from postroom.kafka.messages import read_request

BY_HAND = ("produce", "api_versions")
SERVED = [
    (api.key, version)
    for api in APIS.values()
    if api.name not in BY_HAND
    for version in range(api.lowest, api.highest + 1)
]
EMPTY = [(16, 0), (16, 1), (16, 2)]  # ListGroups has no fields there
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int8": st.integers(-128, 127),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "string": st.text(max_size=20),
    "bytes": st.binary(max_size=20),
    "uuid": st.uuids(),
    "timedelta_i32": st.integers(0, 2**31 - 1).map(lambda ms: datetime.timedelta(milliseconds=ms)),
    "timedelta_i64": st.integers(0, 2**40).map(lambda ms: datetime.timedelta(milliseconds=ms)),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {
        one.name: value_of(hints[one.name], one.metadata.get("kafka_type", ""))
        for one in dataclasses.fields(kind)
        if "tag" not in one.metadata
    }
    return st.builds(kind, **fields)


def value_of(hint: Any, kafka_type: str) -> st.SearchStrategy[Any]:
    nullable = type(None) in typing.get_args(hint) and kafka_type != "uuid"
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is tuple:
            first = typing.get_args(part)[0]
            inner = values_of(first) if dataclasses.is_dataclass(first) else VALUES[kafka_type]
            found: st.SearchStrategy[Any] = st.lists(inner, max_size=3).map(tuple)
            break
    else:
        found = VALUES[kafka_type]
    return st.none() | found if nullable else found


def plain(value: Any) -> Any:
    """A request as plain values, without tagged fields."""
    if dataclasses.is_dataclass(value):
        return {
            one.name: plain(getattr(value, one.name))
            for one in dataclasses.fields(value)
            if "tag" not in one.metadata
        }
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    if isinstance(value, datetime.timedelta):
        return round(value.total_seconds() * 1000)
    return {name: plain(one) for name, one in vars(value).items()} if hasattr(value, "__dict__") else value


class _Sink:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.write = self.pieces.append


@pytest.mark.few(24, "kio is slow")
@pytest.mark.parametrize(("key", "version"), SERVED)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_request_that_kio_wrote_is_read_as_it_was(key: int, version: int, data: st.DataObject) -> None:
    kind: Any = load_request_schema(key, version)
    request = data.draw(values_of(kind))
    sink = _Sink()
    entity_writer(kind)(sink, request)  # type: ignore[arg-type]
    found = read_request(key, version, memoryview(b"".join(sink.pieces)))
    assert plain(found) == plain(request)


@given(st.sampled_from(SERVED), st.binary(max_size=100))
def test_any_bytes_are_a_request_or_refused(served: tuple[int, int], data: bytes) -> None:
    try:
        read_request(*served, memoryview(data))
    except ProtocolError:
        pass


@pytest.mark.few(24, "kio is slow")
@pytest.mark.parametrize(("key", "version"), [one for one in SERVED if one not in EMPTY])
def test_a_length_that_the_bytes_do_not_have_is_refused(key: int, version: int) -> None:
    """`kio`'s own reader makes room for as many as it is told, and ends the process (I22)."""
    length = b"\xff\xff\xff\xff\x0f" if version >= APIS[key].flexible else b"\x7f\xff\xff\xff"
    with pytest.raises(ProtocolError):
        read_request(key, version, memoryview(length))
