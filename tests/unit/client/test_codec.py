"""Messages into records and back: what is taken, what is refused, what is shown."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom import InvalidMessage, InvalidSetting, Message, MessageTooLarge, Receipt, Received
from postroom.client.codec import Expiry, Packed, _pack_any, pack, pack_all, unpack
from postroom.client.consumer.opened import Browsed
from postroom.config import DEFAULTS
from postroom.model.messages.batch import BatchBuilder, records

NOW = 1_700_000_000_000
DAY_MS = DEFAULTS.timestamp_ahead_ms
PLACE = Browsed("orders", 3, 7)


def through(packed: Packed, now_ms: int = 0) -> list[Received]:
    builder = BatchBuilder()
    assert builder.extend(NOW, packed.entries) == len(packed.entries)
    return unpack(records(builder.build()), PLACE, Expiry(now_ms))


def test_a_plain_message() -> None:
    (got,) = through(pack(Message(b"hello"), NOW))
    assert (got.value, got.key, dict(got.headers), got.source, got.expires) == (
        b"hello",
        None,
        {},
        None,
        None,
    )
    assert (got.topic, got.partition, got.offset, got.timestamp) == ("orders", 3, 0, NOW)
    assert got.id == "7-0"
    assert "7-0" in repr(got)


def test_a_full_message() -> None:
    message = Message(
        bytearray(b"v"), "Zürich", {"a": "ä", "b": b"\xff"}, "o-42", "web", timedelta(seconds=5)
    )
    (got,) = through(pack(message, NOW))
    assert (got.value, got.key, got.id, got.source) == (b"v", "Zürich".encode(), "o-42", "web")
    assert got.headers == {"a": "ä".encode(), "b": b"\xff"}
    assert got.expires == datetime.fromtimestamp(NOW / 1000 + 5, UTC)


@given(
    st.lists(
        st.builds(
            Message,
            st.binary(max_size=50) | st.binary(max_size=9).map(memoryview),
            st.none() | st.text(max_size=9) | st.binary(max_size=9),
            st.none()
            | st.dictionaries(st.text("abc", min_size=1, max_size=4), st.text() | st.binary(), max_size=4),
            st.none() | st.text("xyz", min_size=1),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_what_goes_in_comes_out(messages: list[Message]) -> None:
    packed = pack_all(messages, NOW)
    got = through(packed)
    assert [m.value for m in got] == [bytes(m.value) for m in messages]
    for place, (sent, back) in enumerate(zip(messages, got, strict=True)):
        key = sent.key.encode() if isinstance(sent.key, str) else sent.key
        assert back.key == key
        assert back.id == (sent.id or f"7-{place}")
        assert set(back.headers) == set(sent.headers or {})
    assert packed.keyed == any(m.key is not None for m in messages)
    assert (packed.ids is None) == all(m.id is None for m in messages)


LONG = "l" * (DEFAULTS.max_key_bytes + 1)


@given(
    st.lists(
        st.builds(
            Message,
            st.binary(max_size=20) | st.just("text"),
            st.none() | st.text(max_size=5) | st.binary(max_size=5) | st.sampled_from([LONG, 42, "\ud800"]),
            st.none()
            | st.sampled_from([{}, {"a": "b", "ü": b"c"}, {"postroom-a": "b"}, {1: "b"}, {"a": 1}, [], [1]]),
            st.none() | st.text("xyz", max_size=3) | st.sampled_from([LONG, 42, "\ud800", "ü"]),
            st.none() | st.just("web"),
            timestamp=st.none() | st.just(NOW),
        )
        | st.builds(Message, st.binary(max_size=20), st.none() | st.text(max_size=5) | st.binary(max_size=5))
        | st.builds(
            Message,
            st.binary(max_size=20),
            st.text(max_size=5),
            st.none() | st.just({"a": "ä", "ü": b"c"}),
            st.none() | st.text("xyz", min_size=1),
        ),
        max_size=4,
    )
)
def test_the_short_way_packs_as_the_long_one_does(messages: list[Message]) -> None:
    assert tried(pack_all, messages) == tried(_pack_any, messages)


@pytest.mark.parametrize("over", [False, True])
def test_a_message_may_be_as_large_as_the_limit(over: bool) -> None:
    """Its key and its id count, on either way."""
    messages = [Message(bytes(DEFAULTS.max_message_bytes - 15 + over), key="key", id="1")]
    assert tried(pack_all, messages) == tried(_pack_any, messages)
    assert isinstance(tried(pack_all, messages), Packed) is not over


def tried(way: Callable[..., Packed], messages: list[Message]) -> Packed | tuple[type[Exception], str]:
    try:
        return way(messages, NOW, 0, None)
    except (InvalidMessage, MessageTooLarge) as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Message("\ud800"), "type str cannot be sent .*UTF-8"),
        (Message({"a": object()}), "type dict cannot be sent .*objects of type object"),
        (Message(None), "None is no body: send b''"),
        (Message(Message(b"")), "this is a Message, not a value"),
        (Message(b"", key=42), "key must be str or bytes"),  # type: ignore[arg-type]
        (Message(b"", key="\ud800"), "UTF-8"),
        (Message(b"", headers=[("a", "b")]), "headers must be a dict"),  # type: ignore[arg-type]
        (Message(b"", headers={"a": 1}), "header 'a'"),  # type: ignore[dict-item]
        (Message(b"", headers={1: "a"}), "header names must be str"),  # type: ignore[dict-item]
        (Message(b"", headers={"": "a"}), "not empty"),
        (Message(b"", headers={"postroom-id": "a"}), "reserved"),
        (Message(b"", id=42), "id must be str"),  # type: ignore[arg-type]
        (Message(b"", id=""), "id must be str"),
        (Message(b"", source=b"web"), "source must be str"),  # type: ignore[arg-type]
        (Message(b"", timestamp=-1), "timestamp"),
        (Message(b"", timestamp=1.5), "timestamp"),  # type: ignore[arg-type]
        (Message(b"", timestamp=NOW * 1000), "1700000000000000.*24 hours ahead.*are these microseconds"),
        (Message(b"", timestamp=NOW * 1_000_000), "are these nanoseconds"),
        (Message(b"", timestamp=NOW + DAY_MS + 1), r"1700086400000, 2023-11-15T22:13:20Z.*the clock"),
    ],
)
def test_wrong_messages_are_refused(message: Message, says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        pack(message, NOW)
    with pytest.raises(InvalidMessage, match=rf"messages\[1\]: .*{says}"):
        pack_all([Message(b"fine"), message], NOW)


def test_a_timestamp_may_be_old_or_a_day_ahead() -> None:
    for stamp in (0, NOW, NOW + DAY_MS):
        assert pack(Message(b"", timestamp=stamp), NOW).timestamps == [stamp]


def test_a_list_may_have_values_among_its_messages() -> None:
    packed = pack_all([Message(b"a", id="1"), b"raw", {"n": 1}, "text"], NOW)
    assert [value for _, value, _ in packed.entries] == [b"a", b"raw", b'{"n":1}', b"text"]
    assert packed.ids == ["1", None, None, None]


def test_a_wrong_expiry_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="expires"):
        pack(Message(b"", expires="soon"), NOW)
    with pytest.raises(InvalidSetting, match="time zone"):
        pack(Message(b"", expires=datetime(2030, 1, 1)), NOW)


def test_limits() -> None:
    most = DEFAULTS.max_message_bytes
    assert pack_all([Message(bytes(most))], NOW).size == most
    for too_large in (
        Message(bytes(most + 1)),
        Message(bytes(most), key="k"),
        Message(bytes(most), headers={"h": ""}),
        Message(b"", key="k" * (DEFAULTS.max_key_bytes + 1)),
        Message(b"", headers={str(n): "" for n in range(DEFAULTS.max_headers + 1)}),
    ):
        with pytest.raises(MessageTooLarge):
            pack_all([Message(b"fine"), too_large], NOW)
        with pytest.raises(MessageTooLarge):
            pack(too_large, NOW)
    assert pack(Message(b"", headers={str(n): "" for n in range(DEFAULTS.max_headers)}), NOW)


def test_a_received_message_can_be_sent_on_and_keeps_its_id() -> None:
    received = through(pack_all([Message(b"a", key="k", headers={"h": "v"}), Message(b"b", id="mine")], NOW))
    again = through(pack_all(received, NOW))
    assert [(m.value, m.key, m.id, dict(m.headers)) for m in again] == [
        (b"a", b"k", "7-0", {"h": b"v"}),
        (b"b", None, "mine", {}),
    ]


def test_expired_messages_are_left_out_when_asked() -> None:
    packed = pack_all([Message(b"a", expires=5), Message(b"b"), Message(b"c", expires=10)], NOW)
    assert [m.value for m in through(packed, NOW + 5_000)] == [b"b", b"c"]
    assert [m.value for m in through(packed, NOW + 4_999)] == [b"a", b"b", b"c"]
    assert [m.value for m in through(packed)] == [b"a", b"b", b"c"]


def moved(**own: Any) -> Received:
    headers = [("postroom-" + name.replace("_", "-"), str(value).encode()) for name, value in own.items()]
    builder = BatchBuilder()
    builder.append(NOW, b"k", b"v", [*headers, ("mine", b"1")])
    (got,) = unpack(records(builder.build()), PLACE)
    return got


def test_a_moved_message_shows_where_it_was_first_stored() -> None:
    got = moved(
        id="2-9", topic="carts", partition=1, offset=9, timestamp=5, reason="bad", attempts=3, dead_at=8
    )
    assert (got.topic, got.partition, got.offset, got.timestamp, got.id) == ("carts", 1, 9, 5, "2-9")
    assert got.headers == {"mine": b"1"}
    assert got._position == 0  # where settling finds it


def test_damaged_headers_of_ours_do_no_harm() -> None:
    got = moved(topic="carts", partition="x", offset="", expires="never")
    assert (got.topic, got.partition, got.offset, got.expires) == ("carts", -1, 0, None)


def test_receipts_derive_their_id() -> None:
    assert Receipt("orders", 0, 5, _partition_id=3).id == "3-5"
    assert Receipt("orders", 0, 5, _id="mine", _partition_id=3).id == "mine"
