"""`exist_ok`: one that is there is taken if it has what is asked for, and never silently if not."""

from __future__ import annotations

import pytest

import postroom
from postroom import Connection, GroupConflict, TopicConflict
from tests.contract.stores import only_file

pytestmark = only_file


async def test_what_is_not_asked_for_does_not_conflict(mq: Connection) -> None:
    made = await mq.create_topic("orders", partitions=3, retention="1d", dedup_window="10m")
    assert await mq.create_topic("orders", exist_ok=True) == made
    assert await mq.create_topic("orders", partitions=3, retention="24h", exist_ok=True) == made


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"partitions": 4}, r"with partitions 3 \(asked for: 4\): leave that out; split and merge change"),
        ({"retention": "7d"}, r"with retention 1d \(asked for: 7d\)"),
        ({"retention": None}, r"with retention 1d \(asked for: unlimited\)"),
        ({"dedup_window": "10m"}, r"with dedup_window off \(asked for: 10m\)"),
        ({"storage": "volatile"}, r"with storage 'durable' \(asked for: 'volatile'\)"),
        (
            {"keep": "limits", "max_backlog": 5},
            r"keep 'needed' \(asked for: 'limits'\), max_backlog 0 \(asked",
        ),
        ({"drop_settled": True}, "alter_topic changes the rest"),
    ],
)
async def test_a_topic_with_other_settings(mq: Connection, asked: dict[str, object], sentence: str) -> None:
    before = await mq.create_topic("orders", partitions=3, retention="1d")
    with pytest.raises(TopicConflict, match=sentence):
        await mq.create_topic("orders", exist_ok=True, **asked)  # type: ignore[arg-type]
    assert await mq.topic("orders") == before


async def test_a_topic_that_was_split_is_the_one_it_was_made_as(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2)
    await mq.split("orders", 0)
    assert (await mq.create_topic("orders", partitions=2, exist_ok=True)).partitions == 3
    assert (await mq.create_topic("orders", partitions=3, exist_ok=True)).partitions == 3  # as it is now
    with pytest.raises(TopicConflict, match=r"with partitions 3 \(asked for: 4\)"):
        await mq.create_topic("orders", partitions=4, exist_ok=True)


async def test_groups(mq: Connection) -> None:
    await mq.create_topic("orders")
    made = await mq.create_group("orders", "billing", lease=7, exist_ok=True)
    with pytest.raises(postroom.GroupExists, match="pass exist_ok=True if that is fine"):
        await mq.create_group("orders", "billing")
    assert (await mq.create_group("orders", "billing", exist_ok=True)).settings == made.settings
    assert (await mq.create_group("orders", "billing", lease="7s", exist_ok=True)).name == "billing"
    cases = {
        "lease='7s', but lease='8s' was asked for; .* change the group with alter_group": {"lease": 8},
        "start='earliest', but start='latest' .* reset the group": {"start": "latest"},
        "mode='shared', but mode='ordered' .* take another group": {"mode": "ordered"},
    }
    for sentence, asked in cases.items():
        with pytest.raises(GroupConflict, match=sentence):
            await mq.create_group("orders", "billing", exist_ok=True, **asked)  # type: ignore[arg-type]
