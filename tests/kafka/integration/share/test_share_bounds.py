"""What clients can make a broker remember of share groups is bounded: sessions, members, names (I22)."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

import postroom
from postroom import Connection
from postroom.kafka.apis import Code
from postroom.kafka.server import KafkaServer
from postroom.kafka.session import Session
from postroom.kafka.share import groups, members, sessions
from postroom.kafka.share.sessions import ShareError, ShareSessions, Who
from postroom.model.share_session import Acquired
from tests.kafka.integration.share.client import ACCEPT, ShareConsumer, every
from tests.kafka.integration.share.test_bad_share import logged_in
from tests.kafka.integration.test_access import allow
from tests.kafka.integration.test_bad_input import connected

TOPIC = UUID(int=7)


def who(member: str) -> Who:
    return "", "billing", member


# ---- sessions ----


def test_the_sessions_of_a_broker_name_so_many_partitions_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_MOST_PARTITIONS", 10)
    known = ShareSessions(lambda: 0, idle_ms=100)

    def name(member: str, count: int, epoch: int = 0) -> None:
        session = known.begin(who(member), epoch, opens=True)
        session.partitions |= {(TOPIC, index): None for index in range(count)}
        known.check_partitions(who(member))

    name("a", 6)
    name("b", 4)
    name("a", 6, epoch=1)
    with pytest.raises(ShareError) as refused:
        name("c", 1)
    assert refused.value.code == Code.SHARE_SESSION_LIMIT_REACHED
    name("b", 0)  # it opens its session anew, and names none
    name("c", 4)
    known.begin(who("a"), -1, opens=True)
    name("d", 6)


def test_consumers_have_so_much_in_flight_together_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MOST_IN_FLIGHT", 100)
    now = 0
    known = ShareSessions(lambda: now, idle_ms=100)
    for member in "ab":
        assert known.has_room
        session = known.begin(who(member), 0, opens=True)
        session.acquire((TOPIC, 0), Acquired(0, 49, "orders", 1, 0, 9, 1, until=1_000))
        known.count(who(member))
    assert not known.has_room
    now = 1_001  # the leases end, and that is seen when a consumer comes
    known.begin(who("a"), 1, opens=True)
    assert known.has_room


@pytest.mark.parametrize("epoch", [0, 1])
async def test_a_client_whose_session_finds_no_room_is_told(
    consumer: ShareConsumer, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    await consumer.poll(partitions=[])
    monkeypatch.setattr(sessions, "_MOST_PARTITIONS", 1)
    found = await consumer.fetch(partitions=consumer.assigned, epoch=epoch)
    assert int(found.error_code) == Code.SHARE_SESSION_LIMIT_REACHED


async def test_a_broker_with_too_much_in_flight_hands_out_nothing_until_something_is_settled(
    queue: Connection, consumer: ShareConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.send("orders", b"paid")
    got = await consumer.poll_until(lambda got: bool(got))
    monkeypatch.setattr(sessions, "_MOST_IN_FLIGHT", 1)
    await queue.send("orders", b"late")
    assert not await consumer.poll()
    await consumer.acknowledge(every(ACCEPT, got))
    [late] = await consumer.poll_until(lambda got: bool(got))
    assert late.value == b"late"


# ---- members ----


async def test_members_subscribe_to_so_many_topics_together_and_no_more(
    consumer: ShareConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_MOST_SUBSCRIBED", 3)
    assert int((await consumer.beat("orders", "later")).error_code) == 0
    other = ShareConsumer(consumer.wire)
    assert int((await other.beat("orders", "later")).error_code) == Code.GROUP_MAX_SIZE_REACHED
    assert int((await other.beat("orders")).error_code) == 0
    assert int((await consumer.beat("orders", "later", "never")).error_code) == Code.GROUP_MAX_SIZE_REACHED
    assert int((await consumer.beat("orders")).error_code) == 0, "fewer is never refused"
    assert int((await consumer.beat(epoch=-1)).error_code) == 0
    assert int((await other.beat("orders", "later", "never")).error_code) == 0, "who leaves makes room"


async def test_of_whoever_may_not_come_in_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_MOST_MEMBERS", 1)
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        await mq.create_topic("secret", kafka_partitions=1)
        token = allow(mq, "consume:orders")
        async with (
            await mq.serve(port=0, token="unused", kafka=0) as served,
            connected(str(served.kafka)) as wire,
        ):
            await logged_in(wire, token)
            for number in range(3):
                stranger = ShareConsumer(wire, member=f"stranger-{number}")
                found = await stranger.beat("secret")
                assert int(found.error_code) == Code.TOPIC_AUTHORIZATION_FAILED
            await ShareConsumer(wire).join("orders")
            found = await ShareConsumer(wire).beat("orders")
            assert int(found.error_code) == Code.GROUP_MAX_SIZE_REACHED


async def test_of_names_that_no_topic_can_have_nothing_is_kept(
    queue: Connection, consumer: ShareConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as topics that are not there, as with Kafka: whoever subscribes to another goes on."""
    monkeypatch.setattr(members, "_MOST_SUBSCRIBED", 2)
    other = ShareConsumer(consumer.wire)
    assert int((await other.beat("^orders", "x" * 30_000, "_internal")).error_code) == 0
    assert other.assigned == []
    await queue.send("orders", b"paid")
    assert int((await other.beat("orders", "^orders")).error_code) == 0
    assert [one.value for one in await other.poll_until(lambda got: bool(got))] == [b"paid"]


# ---- groups ----


async def test_kafka_clients_make_so_many_share_groups_and_no_more(
    queue: Connection, consumer: ShareConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_MOST", 2)
    await ShareConsumer(consumer.wire, group="second").join("orders")
    third = ShareConsumer(consumer.wire, group="third")
    found = await third.beat("orders")
    assert int(found.error_code) == Code.GROUP_MAX_SIZE_REACHED and "share groups" in found.error_message
    assert int((await consumer.beat("orders")).error_code) == 0, "who is in stays in"
    await queue.delete_group("orders", "second", force=True)
    await third.join("orders")


async def test_names_of_groups_that_are_gone_make_room_for_others(
    queue: Connection, consumer: ShareConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_MOST", 3)
    for name in ("eu.1", "eu.2"):
        one = ShareConsumer(consumer.wire, group=name)
        await one.join("orders")
        await one.beat(epoch=-1)
    for group in await queue.groups("orders"):
        if group.name != "billing":
            await queue.delete_group("orders", group.name, force=True)
    for name in ("eu.3", "eu.4"):
        await ShareConsumer(consumer.wire, group=name).join("orders")
    assert int((await ShareConsumer(consumer.wire, group="eu.5").beat("orders")).error_code) == 81


async def test_connections_share_the_list_of_groups(
    consumer: ShareConsumer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Session] = []
    make = KafkaServer.session

    def session(self: KafkaServer, loopback: bool, certificate_name: str | None) -> Session:
        made.append(make(self, loopback, certificate_name))
        return made[-1]

    monkeypatch.setattr(KafkaServer, "session", session)
    async with connected(address) as one, connected(address) as other:
        for wire in (one, other):
            await ShareConsumer(wire).join("orders")
    assert len({id(each._share_groups._shared) for each in made}) == 1 < len(made)
