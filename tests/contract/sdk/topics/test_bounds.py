"""`bounds` through every endpoint: what is kept, the marks, and where removed partitions ended."""

from __future__ import annotations

import pytest

from postroom import Connection, Message, UnknownTopic
from postroom.model.messages.batch import Kept
from tests.contract.brokers import broker_of
from tests.contract.stores import everywhere

pytestmark = everywhere


async def test_bounds_have_marks_where_they_are_asked_for(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2)
    one, other = (piece.partition_id for piece in (await mq.route("orders")).ranges)
    await mq.send_many("orders", [Message(b"%d" % n, key=f"k{n}") for n in range(40)])
    plain = await mq._endpoint.bounds("orders")
    ends = {one_id: kept.end for one_id, kept in plain.partitions.items()}
    assert set(ends) == {one, other} and sum(ends.values()) == 40
    assert all(kept == Kept(0, kept.end) for kept in plain.partitions.values())
    asked = await mq._endpoint.bounds("orders", ((one, ends[one]), (other, 10_000)))
    assert asked.incarnation == plain.incarnation != ""
    assert asked.partitions[one].mark and not asked.partitions[other].mark
    again = await mq._endpoint.bounds("orders", ((one, ends[one]),))
    assert again.partitions[one] == asked.partitions[one]
    with pytest.raises(UnknownTopic):
        await mq._endpoint.bounds("order")


async def test_removed_partitions_are_told_of_their_own_topic_only(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.create_topic("others", partitions=1)
    await mq.send_many("orders", [Message(b"x")] * 3)
    old = (await mq.route("orders")).ranges[0]
    await mq.split("orders", old.partition)
    store = broker_of(mq).store
    store.log.trim(old.partition_id, 4)
    while store.log.sweep(old.partition_id, rows=10):
        pass
    store.routes.remove(old.partition_id)
    await mq.create_topic("news")  # brokers look into the catalog again
    found = await mq._endpoint.bounds("orders", ((old.partition_id, 1),))
    assert found.partitions[old.partition_id] == Kept(4, 4, removed=True)
    assert old.partition_id not in (await mq._endpoint.bounds("orders")).partitions
    theirs = await mq._endpoint.bounds("others", ((old.partition_id, 1),))
    assert old.partition_id not in theirs.partitions
