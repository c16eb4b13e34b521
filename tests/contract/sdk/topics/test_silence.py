"""Nothing is ignored in silence: what has no effect is refused, or said."""

from __future__ import annotations

import logging
from pathlib import Path
from uuid import uuid4

import pytest

import postroom
from postroom import Connection, InvalidSetting, Message
from postroom.address import parse
from tests.contract.stores import only_file

pytestmark = only_file


def said(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


# ---- ids ----


async def test_an_id_that_the_topic_does_not_look_at(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """S2: once for a topic. A delayed message's id is what cancels it, and no reason for a word."""
    name = f"ids-{uuid4().hex[:8]}"  # what was said of another topic does not count
    await mq.create_topic(name, partitions=1)
    await mq.send(name, b"x", id="a", delay="1h")
    await mq.send(name, b"x")
    assert not said(caplog, "look at ids")
    await mq.send(name, b"x", id="a")
    await mq.send_many(name, [Message(b"x", id="a")])
    async with mq.producer(name) as producer:
        await producer.post(b"x", id="b")
    (line,) = said(caplog, "look at ids")
    assert f"topic {name} does not look at ids: what is sent twice under one id is stored twice" in line
    assert f"alter_topic({name!r}, dedup_window='10m')" in line


async def test_an_id_that_the_topic_looks_at(mq: Connection, caplog: pytest.LogCaptureFixture) -> None:
    name = f"ids-{uuid4().hex[:8]}"
    await mq.create_topic(name, dedup_window="10m")
    await mq.send(name, b"x", id="a")
    assert (await mq.send(name, b"x", id="a")).duplicate
    assert not said(caplog, "look at ids")


# ---- new groups ----


async def test_a_group_that_a_consumer_makes_says_where_it_starts(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "postroom")
    await mq.create_topic("orders", partitions=1)
    await mq.send("orders", b"x")
    async with mq.consumer("orders", "billing"):
        pass
    lines = said(caplog, "group billing of orders is new; it starts at the earliest message")
    assert lines and len(lines) == len(said(caplog, "is new"))
    async with mq.consumer("orders", "billing"):
        pass
    assert len(said(caplog, "is new")) == len(lines)
    async with mq.consumer("orders", "cache", mode="broadcast", start="latest", member="ann"):
        pass
    assert said(caplog, "group cache of orders is new, in mode broadcast; it starts with the next message")
    await mq.create_group("orders", "late", start={0: 1})
    assert said(caplog, "group late of orders is new; it starts at the offsets 0=1")


async def test_a_start_that_is_not_there_is_moved_with_a_word(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.send("orders", b"x")
    await mq.create_group("orders", "billing", start={0: 7})
    assert said(caplog, "group billing of orders starts at offset 1 of partition 0, and not at 7")


# ---- settings without a use ----


@pytest.mark.parametrize("mode", [None, "shared", "broadcast"])
async def test_order_is_for_ordered_groups(mq: Connection, mode: str | None) -> None:
    await mq.create_topic("orders")
    settings = {"mode": mode} if mode else {}
    sentence = f"is for groups in mode 'ordered', and this one is in mode '{mode or 'shared'}'"
    for given in ({"order": "partition"}, {"max_hold": "1h"}):
        with pytest.raises(InvalidSetting, match=f"{next(iter(given))}= {sentence}"):
            await mq.create_group("orders", "billing", **settings, **given)  # type: ignore[arg-type]
        with pytest.raises(InvalidSetting, match=sentence):
            async with mq.consumer("orders", "billing", **settings, **given):  # type: ignore[arg-type]
                pass
    assert await mq.groups("orders") == []
    await mq.create_group("orders", "billing", **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=sentence):
        await mq.alter_group("orders", "billing", max_hold="1h")


async def test_order_of_a_group_that_is_ordered_needs_no_mode(mq: Connection) -> None:
    await mq.create_topic("orders")
    await mq.create_group("orders", "billing", mode="ordered", order="partition")
    async with mq.consumer("orders", "billing", order="partition"):
        pass
    await mq.alter_group("orders", "billing", max_hold="2h")


async def test_reading_what_is_not_there(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2)
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"start": {9: 0}}, postroom.UnknownPartition, "has no partition 9; it has 0, 1"),
        ({"start": {0: 5}}, InvalidSetting, "ends at offset 0, and 5 is beyond it: choose 0"),
        (
            {"partition": 0, "start": {1: 0}},
            InvalidSetting,
            "partition=0 reads that one alone, and start= names",
        ),
        ({"partition": 0, "end": {1: 0}}, InvalidSetting, "partition=0 reads that one alone, and end= names"),
    ]
    for given, kind, sentence in cases:
        with pytest.raises(kind, match=sentence):
            [message async for message in mq.read("orders", **given)]  # type: ignore[arg-type]


# ---- the worker's address ----


async def test_an_app_runs_on_the_queue_that_is_chosen_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = f"sqlite:///{tmp_path}/own.db", f"sqlite:///{tmp_path}/other.db"
    app = postroom.App(own, client_id="shop")
    app.use(own)
    assert not said(caplog, "the app runs on")
    app.use(other)
    assert said(caplog, f"the app runs on {other}, as asked for, and not on its own queue, {own}")
    async with app:
        assert app.connection.client_id == "shop"
        with pytest.raises(postroom.UsageError, match="runs already"):
            app.use(own)
    path = parse(other).path
    assert path is not None and path.exists() and not (tmp_path / "own.db").exists()


async def test_an_app_with_a_connection_has_no_other_queue(mq: Connection) -> None:
    with pytest.raises(postroom.UsageError, match="made with a connection, and runs on that one"):
        postroom.App(mq).use("memory://")
