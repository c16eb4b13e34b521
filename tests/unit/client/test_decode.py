"""Annotations and parameters of handlers: what a body becomes, and what is refused when it is registered."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict

import msgspec
import pydantic
import pytest

from postroom import Backoff, Dead, DecodeError, InvalidSetting, Received, RetryLater, UsageError, sync
from postroom.client.app.handler import Handler, Outcome, outcome_of
from postroom.model.messages.body import decoder


@dataclass
class Order:
    id: int
    note: str = ""


class Struct(msgspec.Struct):
    id: int


class Model(pydantic.BaseModel):
    id: int
    tags: list[str] = []


class Typed(TypedDict):
    id: int


class Pair(NamedTuple):
    a: int
    b: str


@dataclass
class WithModel:
    model: Model


@pydantic.dataclasses.dataclass
class Checked:
    id: Annotated[int, pydantic.Field(gt=10)]


class Node(msgspec.Struct):
    children: list[Node] = []


class Stranger:
    pass


Name = NewType("Name", str)

BODY = b'{"id": 7}'


@pytest.mark.parametrize(
    ("annotation", "body", "expected"),
    [
        (bytes, b"\xff\x00", b"\xff\x00"),
        (Any, b"\xff", b"\xff"),
        (str, "é".encode(), "é"),
        (Annotated[str, "a note"], b"x", "x"),
        (Name, b"x", "x"),
        (Order, BODY, Order(7)),
        (Struct, BODY, Struct(7)),
        (Model, BODY, Model(id=7)),
        (Typed, BODY, {"id": 7}),
        (Pair, b'[1, "x"]', Pair(1, "x")),
        (dict, BODY, {"id": 7}),
        (dict[str, int], BODY, {"id": 7}),
        (list, b"[1, null]", [1, None]),
        (list[Order], b'[{"id": 1}]', [Order(1)]),
        (list[Model], b'[{"id": 1}]', [Model(id=1)]),
        (WithModel, b'{"model": {"id": 1}}', WithModel(Model(id=1))),
        (Checked, b'{"id": 11}', Checked(11)),
        (Order | None, b"null", None),
        (int, b"3", 3),
        (Literal["a", "b"], b'"a"', "a"),
        (Node, b'{"children": [{}]}', Node([Node()])),
    ],
)
def test_a_body_becomes_what_the_annotation_says(annotation: Any, body: bytes, expected: Any) -> None:
    found = decoder(annotation, where="h")(body)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "body", "said"),
    [
        (str, b"ok\xff", "byte 2"),
        (Order, b"", "Order: it is empty"),
        (Order, b"{", "Order"),
        (Order, b'{"id": "7"}', "$.id"),
        (Order, b"{}", "missing required field `id`"),
        (Struct, b"[]", "Expected `object`"),
        (dict, b"[]", "dict"),
        (list, b"[" * 100_000, "list"),
        (Model, b'{"id": "x"}', "Model: id: "),
        (Model, b"nonsense", "Model: body: "),
        (list[Model], b'[{"id": 1}, {}]', "1.id: Field required"),
        (Checked, b'{"id": 3}', "greater than 10"),
    ],
)
def test_a_body_that_does_not_fit_says_what_did_not_fit(annotation: Any, body: bytes, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decoder(annotation, where="h")(body)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600


def test_many_problems_are_summed_up() -> None:
    class Wide(pydantic.BaseModel):
        a: int
        b: int
        c: int
        d: int
        e: int

    with pytest.raises(DecodeError, match="and 2 more"):
        decoder(Wide, where="h")(b"{}")


@dataclass
class WithStranger:
    odd: Stranger


@pytest.mark.parametrize("annotation", [Stranger, WithStranger, list[Stranger], dict[str, Stranger]])
def test_a_type_that_nothing_can_make_is_refused_at_once(annotation: Any) -> None:
    with pytest.raises(UsageError, match=r"handler bill: .*Stranger"):
        decoder(annotation, where="handler bill")


def test_what_a_users_class_raises_is_not_a_misfit() -> None:
    class Fussy(msgspec.Struct):
        id: int

        def __post_init__(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decoder(Fussy, where="h")(BODY)


# ---- parameters ----


def of(function: Any, *, many: bool = False) -> Handler:
    return Handler.of(function, many=many, scope={})


def arguments(function: Any, *, many: bool = False) -> dict[str, Any]:
    return of(function, many=many).arguments("BODY", "MESSAGE")


def test_the_body_and_the_message_go_where_they_are_asked_for() -> None:
    def both(order: Order, message: Any) -> None: ...
    def turned(message: Any, order: Order) -> None: ...
    def typed(order: Order, it: Received) -> None: ...
    def plain(order: Order, it: sync.Received) -> None: ...
    def only_message(message: Any) -> None: ...
    def only_body(order: Order) -> None: ...
    def own_affair(order: Order, limit: int = 3, *rest: Any, **more: Any) -> None: ...
    def by_name(*, order: Order, message: Any) -> None: ...

    def a_body_called_message(message: Order) -> None: ...

    assert arguments(both) == arguments(turned) == {"order": "BODY", "message": "MESSAGE"}
    assert arguments(typed) == arguments(plain) == {"order": "BODY", "it": "MESSAGE"}
    assert arguments(only_message) == {"message": "MESSAGE"}
    assert arguments(only_body) == arguments(own_affair) == {"order": "BODY"}
    assert arguments(by_name) == {"order": "BODY", "message": "MESSAGE"}
    assert arguments(a_body_called_message) == {"message": "BODY"}
    assert of(only_message).decode is None


def test_a_body_without_annotation_is_bytes() -> None:
    decode = of(lambda body: None).decode
    assert decode is not None and decode(b"\xff") == b"\xff"


def test_lists_go_where_they_are_asked_for() -> None:
    def both(orders: list[Order], messages: Any) -> None: ...
    def typed(orders: list[Order], got: list[Received]) -> None: ...
    def bare(orders: list) -> None: ...  # type: ignore[type-arg]
    def wrong(orders: Order) -> None: ...

    assert arguments(both, many=True) == {"orders": "BODY", "messages": "MESSAGE"}
    assert arguments(typed, many=True) == {"orders": "BODY", "got": "MESSAGE"}
    decode = of(both, many=True).decode
    assert decode is not None and decode(BODY) == Order(7)
    raw = of(bare, many=True).decode
    assert raw is not None and raw(b"x") == b"x"
    with pytest.raises(UsageError, match=r"list\[…\]"):
        of(wrong, many=True)


def test_what_cannot_be_a_handler_is_refused_with_its_name() -> None:
    def nothing() -> None: ...
    def twice(a: Order, b: Order) -> None: ...
    def yields(order: Order) -> Any:
        yield order

    async def ayields(order: Order) -> Any:
        yield order

    def positional(order: Order, /) -> None: ...
    def unknown(order: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function, said in [
        (nothing, "takes nothing"),
        (twice, "'a' and 'b'"),
        (yields, "yield"),
        (ayields, "yield"),
        (positional, "positional-only"),
        (unknown, "Missing"),
    ]:
        with pytest.raises(UsageError, match=said) as caught:
            of(function)
        assert function.__name__ in str(caught.value)
    with pytest.raises(UsageError, match="a handler is a function"):
        of(3)


def test_coroutine_functions_are_recognised_in_every_dress() -> None:
    async def handle(limit: int, order: Order) -> None: ...
    def plain(order: Order) -> None: ...

    class Callable:
        async def __call__(self, order: Order) -> None: ...

    class Methods:
        async def handle(self, order: Order) -> None: ...

    assert of(functools.partial(handle, 3)).is_async
    assert of(Callable()).is_async and of(Callable()).body == "order"
    assert of(Methods().handle).is_async
    assert not of(plain).is_async


# ---- endings ----

RETRY = Backoff(1, 2, "10m")


def test_an_ending_is_turned_into_a_verdict() -> None:
    assert outcome_of(ValueError("boom"), RETRY, 1, 0) == Outcome("retry", 1000, None, "ValueError: boom")
    assert outcome_of(ValueError(), RETRY, 3, 0) == Outcome("retry", 4000, None, "ValueError")
    assert outcome_of(ValueError(), RETRY, 1, 0.5).delay_ms == 1100
    assert outcome_of(RetryLater(delay="1m", reason="shut"), RETRY, 1, 0) == Outcome(
        "retry", 60_000, None, "shut"
    )
    assert outcome_of(RetryLater(at=1_800_000_000), RETRY, 1, 0).at_ms == 1_800_000_000_000
    assert outcome_of(RetryLater(), RETRY, 2, 0).delay_ms == 2000
    assert outcome_of(RetryLater(0), RETRY, 2, 0).delay_ms == 0
    assert outcome_of(Dead("no"), RETRY, 1, 0) == Outcome("dead", reason="no")
    assert outcome_of(DecodeError("does not fit"), RETRY, 1, 0) == Outcome("dead", reason="does not fit")
    assert len(outcome_of(ValueError("x" * 10_000), RETRY, 1, 0).reason) == 500


def test_retry_later_says_when_once() -> None:
    with pytest.raises(InvalidSetting, match="not both"):
        RetryLater(1, at=1_800_000_000)
    with pytest.raises(InvalidSetting, match="delay"):
        RetryLater("soon")
