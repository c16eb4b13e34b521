"""Every operation there and back; and that neither side depends on what the other does not know yet."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom import errors
from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS, Operation
from postroom.endpoint.values import DeadLetters, Fetched, Grant, PollReply, PollRequest, UnparkRequest
from postroom.errors import PostroomError, ProtocolError
from postroom.model.policy.slow_lane import LanePolicy
from postroom.model.topology.route import Range, Route, even_ranges
from postroom.store.contract import StoredBatch
from postroom.wire import messages as m
from postroom.wire.frames import REPLY, Frame
from postroom.wire.messages import failure_of, raised
from postroom.wire.replies import packed, unpacked
from tests.request_types import shape_of

every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)

EXAMPLES = 6  # for each of forty operations

numbers = st.integers(-(2**63), 2**63 - 1)
names = st.text(max_size=20)
st.register_type_strategy(int, numbers)
st.register_type_strategy(float, st.floats(allow_nan=False))


@st.composite
def route_values(draw: st.DrawFn) -> Route:
    slots = enumerate(even_ranges(draw(st.integers(1, 5))))
    ranges = tuple(Range(a, z, i, i + 10, draw(names)) for i, (a, z) in slots)
    sealed = (Range(0, 1023, 9, 9),) if draw(st.booleans()) else ()
    before = {one.partition_id: (9,) for one in ranges} if sealed else {}
    return Route(draw(names), draw(st.integers(0, 99)), ranges, draw(st.booleans()), sealed, before)


st.register_type_strategy(Route, route_values())
policies = st.builds(LanePolicy, failures=st.floats(0, 1), at_least=st.integers(1, 99), header=st.just("t"))
st.register_type_strategy(LanePolicy, policies)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Within the bounds of the types. Settings check themselves when they are made, so those are drawn from
    what they allow."""
    shape = shape_of(hint)
    kind = shape.kind
    if kind is int and shape.least is not None:
        return st.integers(shape.least, shape.most)
    if kind is str and shape.longest is not None:
        return st.text(max_size=min(20, shape.longest))
    if kind is bytes and shape.longest is not None:
        return st.binary(max_size=min(40, shape.longest))
    if typing.get_origin(kind) is dict:
        return st.dictionaries(*map(values_of, typing.get_args(kind)), max_size=3)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, typing.get_args(kind)))
    if typing.get_origin(kind) in (tuple, list):
        arguments = typing.get_args(kind)
        if typing.get_origin(kind) is list or arguments[-1] is Ellipsis:
            many = st.lists(values_of(arguments[0]), max_size=3)
            return many if typing.get_origin(kind) is list else many.map(tuple)
        return st.tuples(*map(values_of, arguments))
    if dataclasses.is_dataclass(kind) and kind is not Route:
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = {f.name: values_of(hints[f.name]) for f in dataclasses.fields(kind)}
        return st.builds(_made, st.just(kind), st.fixed_dictionaries(fields)).filter(
            lambda one: one is not None
        )
    return st.from_type(kind)


def _made(kind: Any, fields: dict[str, Any]) -> Any:
    try:
        return kind(**fields)
    except PostroomError:
        return kind()  # a setting that is not allowed: the defaults


def requests_of(kind: type[r.Request]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, *(values_of(hints[name]) for name in kind.__struct_fields__))


def there_and_back(operation: Operation, reply: Any) -> Any:
    header, body = packed(operation, reply)
    return came(operation, header, b"".join(body))


def came(operation: Operation, header: Any, body: bytes) -> Any:
    return unpacked(operation, Frame(operation.kind, REPLY, 1, m.encode_header(header), body))


# ---- there and back ----


def test_an_unknown_kind_is_the_askers_fault() -> None:
    with pytest.raises(ProtocolError, match="no request of kind 250"):
        m.operation(250)


@every_operation
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_requests_arrive_as_they_were_asked(operation: Operation, data: st.DataObject) -> None:
    request = data.draw(requests_of(operation.request))
    assert m.decode(m.encode_header(request), operation.request) == request


@every_operation
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_answers_arrive_as_they_were_given(operation: Operation, data: st.DataObject) -> None:
    reply = data.draw(st.none() if operation.reply is None else values_of(operation.reply))
    assert there_and_back(operation, reply) == reply


def test_a_route_travels_without_what_it_computes_for_itself() -> None:
    route = Route("a", 1, (Range(0, 1023, 0, 1),))
    header, _ = packed(OPERATIONS["route"], route)
    assert not [key for key in msgspec.msgpack.decode(m.encode_header(header)) if key.startswith("_")]


def test_a_route_that_covers_not_all_slots_is_refused() -> None:
    with pytest.raises(ProtocolError, match="covers every slot"):
        came(OPERATIONS["route"], {"topic": "a", "version": 1, "ranges": []}, b"")


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("fetch", Fetched((StoredBatch(0, 1, 5, b"ab"),), 0, 1)),
        ("poll", PollReply((Grant("t", 0, 1, (), (StoredBatch(0, 1, 5, b"ab"),)),), 1)),
        ("dead_letters", [DeadLetters("t", 0, 1, (), (StoredBatch(0, 1, 5, b"ab"),))]),
    ],
)
def test_a_body_shorter_than_its_header_says_is_refused(name: str, reply: Any) -> None:
    operation = OPERATIONS[name]
    header, body = packed(operation, reply)
    assert b"".join(body) == b"ab"
    with pytest.raises(ProtocolError, match="fewer bytes"):
        came(operation, header, b"a")


def test_a_batch_of_negative_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="fewer bytes"):
        came(OPERATIONS["fetch"], [[[0, 1, 5, -1]], 0, 1], b"abc")


# ---- newer and older peers ----


@every_operation
def test_fields_that_are_not_known_yet_are_ignored(operation: Operation) -> None:
    request = _simplest(operation.request)
    plain = msgspec.msgpack.decode(m.encode_header(request))
    newer = m.encode_header([*plain, "something new", {"and": [1]}])
    assert m.decode(newer, operation.request) == request


def _simplest(kind: type[r.Request]) -> Any:
    hints = typing.get_type_hints(kind)
    simple = {str: "a", int: 1, bool: True, bytes: b"", float: 1.0}
    values = []
    for name in kind.__struct_fields__:
        hint = hints[name]
        if hint in simple:
            values.append(simple[hint])
        elif typing.get_origin(hint) is tuple:
            values.append(())
        elif typing.get_origin(hint) is typing.Literal:
            values.append(typing.get_args(hint)[0])
        elif typing.get_origin(hint) is not None:
            values.append(None)
        elif hint is PollRequest:
            values.append(PollRequest("t", "g", "m", 1, 1, 1, 0, True))
        elif hint is UnparkRequest:
            values.append(UnparkRequest("t", "g", "m", 1, 1, 1, b"k", 1, 2, 1, 1))
        elif "name" in (f.name for f in dataclasses.fields(hint)):
            values.append(hint("topic:t"))
        else:
            values.append(hint())
    return kind(*values)


def test_keys_of_values_that_are_not_known_yet_are_ignored() -> None:
    request = PollRequest("t", "g", "m", 1, 2, 3, 4, True)
    newer = {**dataclasses.asdict(request), "fancy": {"a": 1}}
    assert m.decode(m.encode_header([newer]), r.Poll) == r.Poll(request)


def test_fields_that_an_older_client_leaves_out_have_defaults() -> None:
    assert m.decode(m.encode_header(["t", 1]), r.Append) == r.Append("t", 1)
    assert m.decode(m.encode_header([1, 1, "c"]), m.Hello) == m.Hello(1, 1, "c")
    assert came(OPERATIONS["poll"], [[], 5], b"").lost == ()
    older = {"topic": "t", "group": "g", "member": "m", "token": 1, "messages": 2, "bytes": 3, "wait_ms": 4,
             "empty_handed": True}  # fmt: skip
    assert m.decode(m.encode_header([older]), r.Poll).request.repeated is False


BAD = {
    "nothing": b"",
    "cut": m.encode_header(r.Append("orders", 1))[:-3],
    "something behind it": m.encode_header(r.Append("orders", 1)) + b"\0",
    "of other types": m.encode_header([1, "a"]),
    "too short": m.encode_header(["orders"]),
    "no UTF-8": b"\x92\xa2\xff\xfe\x01",
    "deep": b"\x96\xa1a\x01\x00\xc4\x00\xa0" + b"\x91" * 100_000,
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a text of 4 GB": b"\x92\xdb\xff\xff\xff\xff",
}


@pytest.mark.parametrize("header", BAD.values(), ids=BAD)
def test_a_header_that_cannot_be_read_is_the_peers_fault(header: bytes) -> None:
    with pytest.raises(ProtocolError, match="the header of a frame cannot be read"):
        m.decode(header, r.Append)


def test_a_token_is_never_shown() -> None:
    assert "pst_secret" not in repr(m.Hello(1, 1, "shop", "pst_secret"))


# ---- errors ----

CLASSES = [
    found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, PostroomError)
]


def arrived(error: BaseException) -> PostroomError:
    return raised(m.decode(m.encode_header(failure_of(error)), m.Failure))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.code)
def test_an_error_arrives_as_itself(kind: type[PostroomError]) -> None:
    found = arrived(kind("what to do", topic="orders", offsets=[1, 2], successors={"3": None}))
    assert type(found) is kind
    assert str(found) == "what to do"
    assert found.details == {"topic": "orders", "offsets": [1, 2], "successors": {"3": None}}


def test_every_code_is_one_class() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("retriable", [True, False])
def test_an_error_of_a_newer_broker_is_as_retriable_as_it_was(retriable: bool) -> None:
    found = raised(m.Failure("moon_phase", "wait for the moon", retriable, {"nights": 3}))
    assert isinstance(found, PostroomError)
    assert found.retriable is retriable
    assert found.details == {"code": "moon_phase", "nights": 3}
    assert str(found) == "wait for the moon"


def test_details_of_any_name_arrive() -> None:
    found = raised(m.Failure("unknown_topic", "no", False, {"message": 1, "self": 2}))
    assert found.details == {"message": 1, "self": 2}


def test_details_that_cannot_travel_stay_behind() -> None:
    found = arrived(errors.UnknownTopic("no", topic="a", thing=object(), huge=2**70, deep=[{"x": object()}]))
    assert found.details == {"topic": "a"}


def test_a_fault_of_the_broker_is_told_without_its_insides(caplog: pytest.LogCaptureFixture) -> None:
    found = arrived(ZeroDivisionError("secret insides"))
    assert "ZeroDivisionError" in str(found)
    assert "secret" not in str(found)
    assert found.retriable is False
    assert "a request failed in an unexpected way" in caplog.text
