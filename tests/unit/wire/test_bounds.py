"""What a request may hold is bounded by its type, and a header by its kind: nothing larger is looked at."""

from __future__ import annotations

import time
from typing import Any

import pytest

from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS
from postroom.endpoint.values import Settle, Verdict
from postroom.errors import InvalidName, InvalidSetting, MessageTooLarge, ProtocolError, shortened
from postroom.wire import messages as m
from tests.request_types import walked

KINDS = {
    **{one.name: one.request for one in (m.LIST_BROKERS, *OPERATIONS.values())},
    "Hello": m.Hello,
    "Cancel": m.Cancel,
    "Answer": r.Answer,
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@every_kind
def test_every_value_of_a_request_has_a_bound(kind: Any) -> None:
    for path, shape in walked(kind):
        if shape.kind is int:
            assert shape.least is not None, f"{path}: no least"
            assert shape.most is not None, f"{path}: no most"
            assert -(2**63) <= shape.least < shape.most < 2**63, path
        elif shape.kind not in (bool, float):
            assert shape.longest is not None, f"{path}: {shape.kind} of any length"


@every_kind
def test_a_header_has_a_limit_by_its_kind(kind: Any) -> None:
    assert kind.most_bytes <= 1024 * 1024
    with pytest.raises(MessageTooLarge, match="ask for less at once"):
        m.decode(b"\x90" + b"\xc0" * kind.most_bytes, kind)


def test_most_headers_are_small() -> None:
    large = {one.name for one in OPERATIONS.values() if one.request.most_bytes > 8 * 1024}
    assert large == {
        "append", "cancel", "resolve", "bounds", "subscribe", "poll", "settle", "hand_over", "beat",
        "settle_and_poll", "report_sources", "unpark", "create_group", "alter_group", "reset", "redrive",
        "discard", "restart_stopped", "skip_stopped", "drop_stopped", "stage", "staged_marks",
        "decide_staged", "publish_staged", "drop_staged",
    }  # fmt: skip


LONG = "x" * 300
POLL: dict[str, Any] = {
    "topic": "t", "group": "g", "member": "m", "token": 1, "messages": 1, "bytes": 1, "wait_ms": 0,
    "empty_handed": True,
}  # fmt: skip
BEYOND: dict[str, tuple[type[r.Request], Any, str]] = {
    "a topic's name": (r.OfTopic, [LONG], "topic is out of bounds: at most 250 characters"),
    "a group's name": (r.Pause, ["t", LONG, True], "name is out of bounds: at most 60 characters"),
    "the name of a Kafka client's group": (r.LagOf, ["t", LONG], "group is out .* at most 249 characters"),
    "a member's name": (r.Poll, [{**POLL, "member": LONG}], r"request.member is out .* 120 characters"),
    "nobody's token": (r.Poll, [{**POLL, "token": 0}], "request.token is out of bounds: at least 1"),
    "a number below": (r.Fetch, ["t", 1, -1, 1, 1, 0], "offset is out of bounds: at least 0"),
    "a number above": (r.Fetch, ["t", 1, 2**63 - 1, 1, 1, 0], "offset is out of bounds: at most"),
    "a number that no database keeps": (r.Append, ["t", 2**63], "partition_id is out of bounds: at most"),
    "a list": (r.HandOver, ["t", "g", 1, [1] * 4097], "partition_ids is out .* at most 4096 entries"),
    "verdicts": (
        r.SettleParts,
        ["t", "g", [{"topic": "t", "partition_id": 1, "token": 1, "verdicts": [0] * 10_001}]],
        "verdicts is out of bounds: at most 10000 entries",
    ),
}


@pytest.mark.parametrize(("kind", "header", "told"), BEYOND.values(), ids=BEYOND)
def test_what_is_beyond_a_bound_is_refused_and_not_repeated(
    kind: type[r.Request], header: Any, told: str
) -> None:
    with pytest.raises((InvalidName, InvalidSetting), match=told) as caught:
        m.decode(m.encode_header(header), kind)
    assert len(str(caught.value)) < 200


def test_a_value_of_another_kind_is_no_long_story() -> None:
    verdict = {"kind": "k" * 5000, "first": 1, "last": 2}
    settle = {"topic": "t", "partition_id": 1, "token": 1, "verdicts": [verdict]}
    with pytest.raises(ProtocolError) as caught:
        m.decode(m.encode_header(["t", "g", [settle]]), r.SettleParts)
    assert len(str(caught.value)) < 300


def test_what_a_newer_client_adds_is_skipped_and_not_built() -> None:
    """A number that nobody can keep in a field that nobody knows harms nobody."""
    newer = m.encode_header(["orders", 1, 0, b"", "", [{"a": (2**64 - 1,)}] * 1000])
    assert m.decode(newer, r.Append) == r.Append("orders", 1)


def test_a_header_is_read_once_whatever_its_bytes_look_like() -> None:
    """It was read a second time, into Python's own objects, where two bytes looked like a large number."""
    plain, odd = (_settling(token) for token in (0x3FFF_FFFF_FFFF_0FC7, 0x3FFF_FFFF_FFFF_CFC7))
    assert len(plain) == len(odd)
    assert _cpu(odd, r.SettleParts) < 3 * _cpu(plain, r.SettleParts)


def _settling(token: int) -> bytes:
    parts = tuple(Settle("t", 1, token, (Verdict("ack", n, n),)) for n in range(500))
    return m.encode_header(r.SettleParts("t", "g", parts))


def _cpu(header: bytes, kind: Any) -> float:
    def once() -> float:
        begun = time.thread_time()
        m.decode(header, kind)
        return time.thread_time() - begun

    return min(once() for _ in range(20))


def test_what_was_sent_is_repeated_in_short() -> None:
    assert shortened("orders") == "'orders'"
    assert len(shortened("x" * 10**6)) < 70
    assert len(shortened(b"x" * 10**6)) < 70
    assert len(shortened(["x" * 10**6])) < 70
