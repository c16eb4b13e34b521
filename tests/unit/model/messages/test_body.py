"""Bodies: what is sent is what a handler gets, for every type there are rules for."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any, NamedTuple, NewType, TypedDict
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from postroom import DecodeError, InvalidMessage, UsageError
from postroom.client.codec import listed
from postroom.model.messages.body import decode, decoder, encode, encoder, from_json, text


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: int


class Line(TypedDict):
    name: str
    points: list[Point]


@dataclass
class Order:
    number: int
    names: list[str] = field(default_factory=list)
    paid: Decimal | None = None
    at: datetime | None = None
    colour: Colour = Colour.RED
    raw: bytes = b""


class Parcel(msgspec.Struct):
    weight: float
    orders: list[Order]
    id: UUID
    days: timedelta


class Customer(BaseModel):
    model_config = ConfigDict(frozen=True)
    number: int = Field(alias="customerNumber")
    name: str
    born: date | None = None


@dataclass
class Visit:
    customer: Customer
    raw: bytes


Number = NewType("Number", int)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
orders = st.builds(
    Order,
    st.integers(-(2**63), 2**63 - 1),
    st.lists(texts, max_size=3),
    st.none() | st.decimals(allow_nan=False, allow_infinity=False, places=2),
    st.none() | st.datetimes(min_value=datetime(1, 1, 2), timezones=st.just(UTC)),
    st.sampled_from(Colour),
    st.binary(max_size=20),
)
customers = st.builds(
    lambda number, name, born: Customer(customerNumber=number, name=name, born=born),
    st.integers(-(2**63), 2**63 - 1),
    texts,
    st.none() | st.dates(),
)
parcels = st.builds(
    Parcel,
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(orders, max_size=2),
    st.uuids(),
    st.timedeltas(timedelta(0), timedelta(days=1000)),
)
points = st.builds(Point, st.integers(0, 9), st.integers(0, 9))
lines = st.fixed_dictionaries({"name": texts, "points": st.lists(points, max_size=3)})
TYPED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (bytes, st.binary()),
    (bytearray, st.binary().map(bytearray)),
    (str, texts),
    (int, st.integers(-(2**63), 2**63 - 1)),
    (Number, st.integers(0, 9)),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bool, st.booleans()),
    (Colour, st.sampled_from(Colour)),
    (Level, st.sampled_from(Level)),
    (dict[str, int], st.dictionaries(texts, st.integers(0, 9), max_size=3)),
    (list[str | None], st.lists(st.none() | texts, max_size=3)),
    (tuple[int, str], st.tuples(st.integers(0, 9), texts)),
    (Order, orders),
    (Parcel, parcels),
    (Point, points),
    (Line, lines),
    (Customer, customers),
    (list[Customer], st.lists(customers, max_size=3)),
    (dict[str, Customer], st.dictionaries(texts, customers, max_size=2)),
    (Visit, st.builds(Visit, customers, st.binary(max_size=0))),
]


@pytest.mark.parametrize(("annotation", "values"), TYPED, ids=[str(one) for one, _ in TYPED])
@given(data=st.data())
def test_what_is_sent_is_what_a_handler_gets(
    annotation: Any, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    value = data.draw(values)
    assert decoder(annotation, where="h")(encode(value)) == value
    assert decoder(annotation, where="h")(encoder(annotation, where="h")(value)) == value


@given(value=st.none() | texts | orders)
def test_who_knows_the_annotation_sends_what_the_value_alone_does_not_tell(value: Any) -> None:
    annotation = Order | str | None
    assert decode(encoder(annotation, where="task")(value), annotation) == value


def test_bytes_are_sent_as_they_are() -> None:
    value = b"\xff{"
    assert encode(value) is value or encode(value) == value
    assert encode(memoryview(value)) == value
    assert encoder(Order, where="task")(value) is value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "type object cannot be sent .*send bytes, str, a dataclass"),
        ([1, {"a": {"b": complex(1)}}], "type list cannot be sent .*type complex"),
        (float("nan"), "type float cannot be sent .*nan"),
        ({"deep": [1.5, float("inf")]}, "nan and infinity"),
        (None, "None is no body"),
        ("\ud800", "type str cannot be sent .*UTF-8"),
        ((n for n in ()), "type generator cannot be sent"),
    ],
)
def test_what_cannot_be_encoded_names_its_type_and_what_to_do(value: Any, says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        encode(value)


def test_a_null_that_was_meant_is_sent() -> None:
    assert from_json(encode({"a": None, "b": 1.5})) == {"a": None, "b": 1.5}


def test_a_model_with_a_wrong_field_is_refused_and_no_warning_is_left() -> None:
    wrong = Customer.model_construct(number="no number", name="ann")
    with pytest.raises(InvalidMessage, match="type Customer cannot be sent"):
        encode(wrong)


def test_one_value_is_not_taken_for_a_list_of_them() -> None:
    for one in ("abc", b"abc", {"a": 1}, Point(1, 2), Customer(customerNumber=1, name="ann"), 7):
        with pytest.raises(InvalidMessage, match="send_many takes a list"):
            listed(one)  # type: ignore[arg-type]
    assert listed(n for n in (1, 2)) == [1, 2]


def test_a_body_that_is_no_text_or_no_json_is_told() -> None:
    with pytest.raises(DecodeError, match="not UTF-8 text: byte 1"):
        text(b"a\xff")
    with pytest.raises(DecodeError, match="does not fit JSON"):
        from_json(b"{")
    with pytest.raises(DecodeError, match="does not fit Order: it is empty"):
        decode(b"", Order)
    with pytest.raises(UsageError, match="task bill: a body cannot be decoded into object"):
        encoder(list[type(object())], where="task bill")  # type: ignore[misc]
