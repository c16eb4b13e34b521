"""Ranges, places and names that a client makes up: nobody lists, keeps or believes them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

import postroom
from postroom.broker.broker import Broker
from postroom.config import DEFAULTS
from postroom.endpoint.operations import OPERATIONS
from postroom.endpoint.requests import Answer, Ask
from postroom.endpoint.values import Beat, Held, PollRequest, Settle, Verdict
from postroom.errors import InvalidSetting, UsageError
from postroom.model.access import ANONYMOUS
from postroom.model.policy.settings import GroupSettings, GroupWish
from postroom.wire.server.listening import Listening
from postroom.wire.server.server import WireServer
from postroom.wire.server.session import Session
from tests.integration.wire.wire_raw import REPLY, Raw, broker_of, served

KIND = {name: one.kind for name, one in OPERATIONS.items()}
END = 2**62


@pytest.fixture
async def queue() -> AsyncIterator[tuple[postroom.Connection, WireServer]]:
    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        await mq.create_topic("others", partitions=1)
        await mq.create_group("orders", "g")
        await mq.create_group("orders", "o", mode="ordered")
        yield mq, server


def verdict(kind: str, first: int, last: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "first": first, "last": last, **more}


def part(topic: str, place: int, *verdicts: dict[str, Any], token: int = 99) -> dict[str, Any]:
    return {"topic": topic, "partition_id": place, "token": token, "verdicts": list(verdicts)}


async def place_of(mq: postroom.Connection, topic: str) -> int:
    return (await broker_of(mq).route(topic)).ranges[0].partition_id


async def make_retry_topic(mq: postroom.Connection) -> int:
    """By a retry that is far away."""
    await mq.send("orders", b"1")
    async with mq.consumer("orders", group="g") as consumer:
        (message,) = await consumer.poll(wait=10)
        await message.retry(delay="1h")
    return await place_of(mq, "orders.g.retry")


@pytest.mark.parametrize("kind", ["ack", "retry", "release", "dead", "lane"])
async def test_a_range_that_its_token_does_not_hold_is_not_listed(
    queue: tuple[postroom.Connection, WireServer], kind: str
) -> None:
    """It took the broker's memory, 27 MB a second, and its threads; for a retry on the retry topic."""
    mq, server = queue
    place = await make_retry_topic(mq)
    async with Raw.open(server.port) as raw:
        settle = part("orders.g.retry", place, verdict(kind, 0, END))
        begun = time.process_time()
        came = await raw.ask(KIND["settle"], ["orders", "g", [settle]])
        assert time.process_time() - begun < 2
        assert came.flags == REPLY
        assert [spans for _, spans in came.header["lost"]] == [[[0, END]]]


async def test_what_is_held_of_a_wide_retry_is_retried(
    queue: tuple[postroom.Connection, WireServer],
) -> None:
    mq, server = queue
    for number in range(3):
        await mq.send("orders", b"%d" % number)
    place = await place_of(mq, "orders")
    poll = PollRequest("orders", "g", "m", 7, 2, 1 << 20, 0, True)
    await broker_of(mq).poll(poll)
    async with Raw.open(server.port) as raw:
        settle = part("orders", place, verdict("retry", 0, END), token=7)
        came = await raw.ask(KIND["settle"], ["orders", "g", [settle]])
    assert [spans for _, spans in came.header["lost"]] == [[[2, END]]]
    again = await broker_of(mq).poll(replace(poll, token=8, messages=10))
    attempts = sorted((lease.first, lease.attempt) for g in again.grants for lease in g.leases)
    assert [attempt for _, attempt in attempts] == [2, 1]


async def test_a_line_claims_no_more_than_its_holder_can_have_received(
    queue: tuple[postroom.Connection, WireServer],
) -> None:
    mq, server = queue
    await mq.send("orders", b"1", key="k")
    place, broker = await place_of(mq, "orders"), broker_of(mq)
    await broker.subscribe("orders", "o", GroupWish(), "m", "c")
    await broker.poll(PollRequest("orders", "o", "m", 7, 10, 1 << 20, 5000, True))
    line = {"id": 0, "key": b"k", "first": 0, "last": END, "messages": 2**63 - 1}
    async with Raw.open(server.port) as raw:
        settle = part("orders", place, verdict("park", 0, END, line=line), token=7)
        assert (await raw.ask(KIND["settle"], ["orders", "o", [settle]])).flags == REPLY
    group = broker.store.catalog.group("orders", "o")
    (kept,) = broker.store.progress.lines(group, place)
    assert (kept.first, kept.last, kept.messages) == (0, 0, 1)


async def test_two_verdicts_on_one_message_are_refused(
    queue: tuple[postroom.Connection, WireServer],
) -> None:
    mq, server = queue
    place = await place_of(mq, "orders")
    async with Raw.open(server.port) as raw:
        for parts in (
            [part("orders", place, verdict("ack", 0, 5), verdict("retry", 5, 9))],
            [part("orders", place, verdict("ack", 0, 5)), part("orders", place, verdict("ack", 5, 9))],
        ):
            came = await raw.ask(KIND["settle"], ["orders", "g", parts])
            assert came.code == "usage"
            assert "settle each message once" in came.header[1]
        others = [part("orders", place, verdict("ack", 0, 5), token=token) for token in (1, 2)]
        assert (await raw.ask(KIND["settle"], ["orders", "g", others])).flags == REPLY


@pytest.mark.parametrize("where", ["nowhere", "elsewhere"])
async def test_nobody_makes_progress_where_there_is_no_partition(
    queue: tuple[postroom.Connection, WireServer], where: str
) -> None:
    """One request made 5,000 rows, which every later poll of the group had to read."""
    mq, server = queue
    place = 10**6 if where == "nowhere" else await place_of(mq, "others")
    held = {"topic": "orders", "partition_id": place, "token": 99, "spans": [[0, 5]]}
    beat = {"topic": "orders", "group": "g", "member": "m", "client": "c", "held": [held]}
    async with Raw.open(server.port) as raw:
        settle = [part("orders", place, verdict("ack", 0, 5))]
        for _ in range(2):
            came = await raw.ask(KIND["settle"], ["orders", "g", settle])
            assert came.code == "unknown_partition"
        assert (await raw.ask(KIND["beat"], [[beat]])).code == "unknown_partition"
        assert (await raw.ask(KIND["hand_over"], ["orders", "o", 99, [place]])).flags == REPLY
        poll = {"topic": "orders", "group": "o", "member": "m", "token": 9, "messages": 1, "bytes": 1,
                "wait_ms": 0, "empty_handed": True, "positions": [[place, 3]]}  # fmt: skip
        assert (await raw.ask(KIND["poll"], [poll])).flags == REPLY
    store = broker_of(mq).store
    for name in ("g", "o"):
        assert store.progress.peek(store.catalog.group("orders", name), [place]) == {}


# ---- tokens, leases and names ----


@pytest.mark.parametrize("group", ["g", "o"])
async def test_nobodys_token_takes_nothing(queue: tuple[postroom.Connection, WireServer], group: str) -> None:
    """Messages were handed out under it, and the partition stayed free for others."""
    mq, _ = queue
    await mq.send("orders", b"1")
    for token in (0, -1):
        with pytest.raises(UsageError, match="from 1 up"):
            await broker_of(mq).poll(PollRequest("orders", group, "m", token, 10, 1 << 20, 0, True))


async def test_a_lease_is_no_longer_than_a_day(queue: tuple[postroom.Connection, WireServer]) -> None:
    mq, server = queue
    with pytest.raises(InvalidSetting, match="lease: at most a day"):
        await mq.create_group("orders", "slow", lease="25h")
    async with Raw.open(server.port) as raw:
        wish = {"lease_ms": 2**62}
        came = await raw.ask(KIND["subscribe"], ["orders", "slow", wish, "m", "c"])
        assert came.code == "invalid_setting"
    assert "slow" not in [group.name for group in await mq.groups("orders")]


async def test_a_group_that_was_stored_with_a_silly_lease_is_joined(
    queue: tuple[postroom.Connection, WireServer],
) -> None:
    mq, server = queue
    broker_of(mq).store.catalog.create_group("orders", "old", GroupSettings(lease_ms=2**62))
    await mq.send("orders", b"1")
    async with postroom.connect(server.url) as client:
        assert [g.settings.lease_ms for g in await client.groups("orders") if g.name == "old"] == [
            DEFAULTS.longest_lease_ms
        ]
        async with client.consumer("orders", group="old") as consumer:
            (message,) = await consumer.poll(wait=10)
            await message.ack()


@pytest.mark.parametrize("wrong", ["m" * 121, "a\nb", "a\0b", ""])
async def test_a_members_name_is_short_and_printable(
    queue: tuple[postroom.Connection, WireServer], wrong: str
) -> None:
    mq, server = queue
    with pytest.raises(InvalidSetting, match="120 printable characters"):
        await broker_of(mq).subscribe("orders", "g", GroupWish(), wrong, "c")
    poll = {"topic": "orders", "group": "g", "member": wrong, "token": 9, "messages": 1, "bytes": 1,
            "wait_ms": 0, "empty_handed": True}  # fmt: skip
    beat = {"topic": "orders", "group": "g", "member": wrong, "client": "c", "held": []}
    async with Raw.open(server.port) as raw:
        for kind, header in (
            ("subscribe", ["orders", "g", {}, wrong, "c"]),
            ("poll", [poll]),
            ("beat", [[beat]]),
        ):
            assert (await raw.ask(KIND[kind], header)).code in ("invalid_setting", "invalid_name"), kind
    assert [group.members for group in await mq.groups("orders")] == [(), ()]


async def test_a_clients_name_is_short(queue: tuple[postroom.Connection, WireServer]) -> None:
    with pytest.raises(InvalidSetting, match="250 printable characters"):
        await broker_of(queue[0]).subscribe("orders", "g", GroupWish(), "m", "c" * 251)


# ---- answers to what a broker asks ----


class _Deaf(Broker):
    """Takes whatever it is told."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []
        self.parts: list[Settle] = []

    @property
    def in_thread(self) -> Any:
        async def run(function: Any, *args: Any) -> Any:
            return function(*args)

        return run

    def beat(self, beats: Any) -> Any:
        self.beats += beats

    async def settle(self, topic: str, group: str, parts: Any) -> Any:
        self.parts += parts


async def test_an_answer_of_any_size_is_read_in_one_pass() -> None:
    """8,000 entries blocked the loop for 9 seconds."""
    broker = _Deaf()
    session = Session(broker, None, ANONYMOUS, "c", None, Listening())  # type: ignore[arg-type]
    ask = Ask("t", "g", "m", tuple(Held("t", n, 1, ((0, 9),)) for n in range(500)), 1000)
    many = tuple(Held("t", n % 1000, 1, ((n, n),)) for n in range(8000))
    begun = time.thread_time()
    await session.answered(ask, Answer(many, many))
    assert time.thread_time() - begun < 0.5
    (beat,) = broker.beats
    assert len(beat.held) == len(broker.parts) == 500
    assert beat.held[0] == Held("t", 0, 1, tuple((n, n) for n in range(0, 8000, 1000)))
    assert broker.parts[0].verdicts == tuple(Verdict("ack", n, n) for n in range(0, 8000, 1000))
