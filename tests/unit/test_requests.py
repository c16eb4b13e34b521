"""What of requests travels in headers, who may do what with reply topics, and how replies are encoded."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Message
from penstock.client.app.encode import encoded
from penstock.errors import InvalidName, RequestFailed, UsageError
from penstock.model.access import Principal, allows, parse_permissions, visible
from penstock.model.names import is_internal, is_reply, owner, owns_reply, reply_topic
from penstock.model.requests import FAILURE, REQUEST, Asked, Failure, ReplyTopic, asked, request_of

MINE = reply_topic("web-1", "shop")


def who(name: str, *texts: str) -> Principal:
    return Principal(name, parse_permissions(texts))


# ---- headers ----


def test_where_a_reply_goes_travels_in_a_header() -> None:
    to = ReplyTopic(MINE, 17)
    found = asked("5f0c", to.encode())
    assert found == Asked("5f0c", MINE, 17)
    assert found.to == to


@pytest.mark.parametrize(
    ("id", "reply_to"),
    [
        ("", f"{MINE}/1"),
        (None, f"{MINE}/1"),
        ("x" * 65, f"{MINE}/1"),
        ("1", None),
        ("1", ""),
        ("1", MINE),
        ("1", f"{MINE}/"),
        ("1", f"{MINE}/-1"),
        ("1", f"{MINE}/1x"),
        ("1", f"{MINE}/²"),
        ("1", f"{MINE}/{2**63}"),
        ("1", "orders/1"),  # a reply must not end up in an ordinary topic
        ("1", "orders.billing.dead/1"),
    ],
)
def test_what_cannot_be_read_is_no_request(id: Any, reply_to: Any) -> None:
    assert asked(id, reply_to) is None


@given(st.text(max_size=80), st.text(max_size=80))
def test_headers_of_others_never_raise(request: str, reply_to: str) -> None:
    found = asked(request, reply_to)
    assert found is None or is_reply(found.reply_to)


def test_a_reply_names_its_request() -> None:
    assert request_of([]) is None
    assert request_of([("h", b"1"), (REQUEST, b"5f")]) == ("5f", False)
    assert request_of([(FAILURE, b"1"), (REQUEST, b"\xff")]) == ("�", True)


@given(st.binary())
def test_a_failure_is_read_whatever_it_is(value: bytes) -> None:
    assert isinstance(Failure.decode(value), Failure)


def test_a_failure_there_and_back() -> None:
    failure = Failure("sold_out", "no pears", "Traceback …")
    assert Failure.decode(failure.encode()) == failure
    assert (RequestFailed("x", kind="sold_out").kind, RequestFailed("x").kind) == ("sold_out", "failed")


# ---- names and permissions ----


def test_reply_topics_belong_to_a_requester_and_an_owner() -> None:
    assert is_reply(MINE) and is_internal(MINE) and owner(MINE) is None
    assert MINE == reply_topic("web-1", "shop") != reply_topic("web-1", "spy") != reply_topic("web-2", "spy")
    assert owns_reply(MINE, "shop") and not owns_reply(MINE, "spy")
    assert not owns_reply(MINE.removeprefix("_"), "shop")
    assert len(reply_topic("x" * 80, "y" * 500)) <= 120


@pytest.mark.parametrize("client", ["", "a.b", "a/b", "x" * 81, "ü", "a b", None, 7])
def test_a_requesters_name_has_no_dots(client: Any) -> None:
    """They would make the end of it look like another owner."""
    with pytest.raises(InvalidName):
        reply_topic(client, "shop")


def test_who_may_do_what_with_a_reply_topic() -> None:
    shop, clerk = who("shop", "send:quote"), who("clerk", "consume:quote")
    spy, boss = who("spy", "send:a", "manage:b"), who("boss", "consume:*")
    may = {
        (one.name, need) for one in (shop, clerk, spy, boss) for need in ("send", "consume", "any", "manage")
        if allows(one, need, MINE)  # type: ignore[arg-type]
    }  # fmt: skip
    assert may == {
        *{("shop", "consume"), ("shop", "any")},
        *{("clerk", "send"), ("clerk", "any")},
        *{("boss", "send"), ("boss", "consume"), ("boss", "any")},
    }
    assert not allows(who("shop", "manage:quote"), "consume", MINE)  # it can ask for nothing
    seen = [one.name for one in (shop, clerk, spy, boss) if visible(one, [MINE])]
    assert seen == ["shop", "boss"]


# ---- bodies ----


@dataclass
class Plain:
    a: int


class Packed(msgspec.Struct):
    a: int


class Model(pydantic.BaseModel):
    a: int


@pytest.mark.parametrize("value", [Plain(1), Packed(1), Model(a=1), {"a": 1}])
def test_what_is_no_text_is_json(value: Any) -> None:
    assert encoded(value) == (b'{"a":1}', None)


def test_bytes_text_nothing_and_headers() -> None:
    assert encoded(bytearray(b"x")) == encoded(memoryview(b"x")) == encoded("x") == (b"x", None)
    assert encoded(None) == (b"", None)
    assert encoded(Message(b"x", headers={"h": "1"})) == (b"x", {"h": "1"})
    assert encoded(namedtuple("P", "a")(1)) == (b"[1]", None)


@pytest.mark.parametrize("value", [object(), {1j: 2}, {"a": object()}, lambda: 0])
def test_what_cannot_be_encoded_is_told(value: Any) -> None:
    with pytest.raises(UsageError, match=f"returned {type(value).__name__}.*return bytes"):
        encoded(value)
