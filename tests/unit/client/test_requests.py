"""What of requests travels in headers, who may do what with reply topics, and how replies are encoded."""

from __future__ import annotations

import asyncio
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom import Message, Received
from postroom.client.app.handler import encoded
from postroom.client.owner_check import Guard
from postroom.client.requests import OwnReplyTopic
from postroom.endpoint.endpoint import Endpoint
from postroom.endpoint.values import Fetched
from postroom.errors import (
    InvalidName,
    PermissionDenied,
    PostroomError,
    RequestFailed,
    StoreUnavailable,
    UnknownPartition,
    UsageError,
)
from postroom.model.access import Principal, allows, parse_permissions, visible
from postroom.model.messages.batch import BatchBuilder, with_base_offset
from postroom.model.messages.requests import FAILURE, REQUEST, Asked, Failure, ReplyTopic, asked, request_of
from postroom.model.topology.names import is_internal, is_reply, owner, owns_reply, reply_topic
from postroom.store.contract import StoredBatch

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


# ---- reading replies ----


def stored(first: int, *ids: str) -> StoredBatch:
    builder = BatchBuilder()
    for id in ids:
        builder.append(1, None, id.encode(), [(REQUEST, id.encode())])
    data = with_base_offset(builder.build(), first)
    return StoredBatch(first, len(ids), 0, data)


class Scripted:
    """An endpoint that answers `fetch` and `open_replies` as told, and then waits for ever."""

    def __init__(self, fetches: list[Fetched | Exception], topics: list[ReplyTopic]) -> None:
        self.fetches, self.topics = fetches, topics
        self.asked: list[tuple[int, int, bool]] = []  # partition, offset, and whether it would wait
        self.done = asyncio.Event()

    async def open_replies(self, client: str) -> ReplyTopic:
        return self.topics.pop(0) if len(self.topics) > 1 else self.topics[0]

    async def close_replies(self, client: str) -> None: ...

    async def fetch(self, topic: str, partition_id: int, offset: int, *, wait_ms: int, **_: Any) -> Fetched:
        self.asked.append((partition_id, offset, wait_ms > 0))
        if not self.fetches:
            self.done.set()
            await asyncio.Event().wait()
        found = self.fetches.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


async def read(endpoint: Scripted) -> tuple[list[str], list[str]]:
    """The replies that were taken, and what was told about lost ones."""
    taken: list[str] = []
    lost: list[str] = []

    def tell(error: Callable[[], PostroomError]) -> None:
        lost.append(str(error()))
        endpoint.done.set()

    take = cast("Callable[[str, Received, bool], None]", lambda id, *_: taken.append(id))
    topic = OwnReplyTopic(cast(Endpoint, endpoint), Guard(), "web", take=take, lost=tell)
    await topic.opened()
    async with asyncio.timeout(20):
        await endpoint.done.wait()
    await topic.close()
    return taken, lost


ONE, TWO = ReplyTopic(MINE, 1), ReplyTopic(MINE, 2)


async def test_a_store_that_is_away_loses_no_reply() -> None:
    away = StoreUnavailable("away")
    endpoint = Scripted([Fetched((stored(0, "a", "b"),), 0, 2), away, away, Fetched((), 0, 2)], [ONE])
    assert await read(endpoint) == (["a", "b"], [])
    waits = [True, True, False, False, True]  # after a fault it is asked at once how far the topic is
    assert endpoint.asked == [(1, 0, True), *((1, 2, wait) for wait in waits[1:])]


async def test_a_topic_that_a_crash_set_back_is_read_from_its_start() -> None:
    again = Fetched((stored(1, "c"),), 1, 2)
    endpoint = Scripted([Fetched((stored(0, "a", "b"),), 0, 2), Fetched((), 1, 1), again], [ONE])
    assert await read(endpoint) == (["a", "b", "c"], [])
    assert [offset for _, offset, _ in endpoint.asked] == [0, 2, 1, 2]


async def test_a_batch_that_was_taken_in_part_is_taken_once() -> None:
    both = Fetched((stored(0, "a", "b"),), 0, 2)
    more = Fetched((stored(0, "a", "b"), stored(2, "c")), 0, 3)
    assert await read(Scripted([both, more], [ONE])) == (["a", "b", "c"], [])


async def test_a_topic_that_was_moved_is_read_to_its_end_first() -> None:
    sealed = Fetched((), 0, 1, sealed=True)
    moved = [Fetched((stored(0, "a"),), 0, 1, sealed=True), sealed, sealed, Fetched((stored(0, "b"),), 0, 1)]
    endpoint = Scripted(moved, [ONE, ONE, TWO])
    assert await read(endpoint) == (["a", "b"], [])
    assert [(place, offset) for place, offset, _ in endpoint.asked] == [
        (1, 0),
        (1, 1),
        (1, 1),
        (2, 0),
        (2, 1),
    ]


async def test_a_topic_that_is_gone_is_told_and_read_anew() -> None:
    endpoint = Scripted([UnknownPartition("gone"), Fetched((stored(0, "a"),), 0, 1)], [ONE, TWO])
    _, lost = await read(endpoint)
    assert len(lost) == 1
    assert "not known whether the request was handled" in lost[0]


async def test_what_can_never_be_read_is_told() -> None:
    _, lost = await read(Scripted([PermissionDenied("no")], [ONE]))
    assert lost == ["replies cannot be read: no"]
