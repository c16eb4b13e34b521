"""What clients can make a broker remember of share groups is bounded: sessions, members, names (I22)."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

import postroom
from postroom import Connection
from postroom.config import DEFAULTS
from postroom.kafka.apis import Code
from postroom.kafka.server import KafkaServer
from postroom.kafka.session import Session
from postroom.kafka.share import groups, members, sessions
from postroom.kafka.share.sessions import ShareError, ShareSessions, Who
from postroom.model.share_session import Acquired
from postroom.model.topology.names import share_group
from tests.kafka.integration.share.client import ACCEPT, ShareConsumer, every
from tests.kafka.integration.share.test_bad_share import logged_in
from tests.kafka.integration.test_access import allow
from tests.kafka.integration.test_bad_input import connected

TOPIC = UUID(int=7)


def who(member: str, principal: str = "shop") -> Who:
    return principal, "billing", member


# ---- sessions ----


def test_the_sessions_of_a_broker_name_so_many_partitions_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_MOST_PARTITIONS", 20)  # so many for one that is alone
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
    monkeypatch.setattr(sessions, "_MOST_IN_FLIGHT", 200)
    now = 0
    known = ShareSessions(lambda: now, idle_ms=100)
    for member in "ab":
        assert known.has_room(who(member))
        hold(known, who(member), 50)
    assert not known.has_room(who("c"))
    now = 1_001  # the leases end, and those who had them say nothing
    assert known.has_room(who("c"))


def hold(known: ShareSessions, one: Who, count: int) -> None:
    session = known.begin(one, 0, opens=True)
    session.acquire((TOPIC, 0), Acquired(0, count - 1, "orders", 1, 0, 9, 1, until=1_000))
    known.count(one)


# ---- principals ----


def test_a_principal_that_opens_all_the_sessions_it_can_keeps_no_other_out() -> None:
    now = 0
    known = ShareSessions(lambda: now, idle_ms=100, most=20)
    for number in range(10):
        known.begin(who(str(number), "hostile"), 0, opens=True)
    with pytest.raises(ShareError) as refused:
        known.begin(who("more", "hostile"), 0, opens=True)
    assert refused.value.code == Code.SHARE_SESSION_LIMIT_REACHED
    for member in "abcde":
        known.begin(who(member), 0, opens=True)
    now = 101  # all are silent: whoever opens more takes the place of its own
    known.begin(who("more", "hostile"), 0, opens=True)
    for member in "abcde":
        known.begin(who(member), 1, opens=True)


def test_a_principal_whose_sessions_name_all_they_can_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_MOST_PARTITIONS", 100)
    known = ShareSessions(lambda: 0, idle_ms=100)

    def name(one: Who, count: int) -> None:
        known.begin(one, 0, opens=True).partitions |= {(TOPIC, index): None for index in range(count)}
        known.check_partitions(one)

    for number in range(5):
        name(who(str(number), "hostile"), 10)
    with pytest.raises(ShareError):
        name(who("more", "hostile"), 1)
    name(who("a"), 20)
    known.begin(who("0", "hostile"), 1, opens=True)
    known.check_partitions(who("0", "hostile"))  # what it had it keeps


def test_a_principal_that_has_all_it_can_in_flight_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_MOST_IN_FLIGHT", 100)
    known = ShareSessions(lambda: 0, idle_ms=100)
    taken = 0
    while known.has_room(who(str(taken), "hostile")) and taken < 100:
        hold(known, who(str(taken), "hostile"), 10)
        taken += 10
    assert taken == 50 and known.has_room(who("a"))


def test_a_principal_with_all_the_members_it_can_have_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "_MOST_MEMBERS", 20)
    monkeypatch.setattr(members, "_MOST_SUBSCRIBED", 20)
    known = members.ShareMembers(lambda: 0, DEFAULTS.tuning.wire)

    def enter(id: str, principal: str, topics: int) -> None:
        member = members._Member(id, principal, "", "")
        known.enter("billing", member)
        known.subscribe(member, tuple(str(number) for number in range(topics)))

    for number in range(10):
        enter(str(number), "hostile", 0)
    with pytest.raises(ShareError):
        enter("more", "hostile", 0)
    with pytest.raises(ShareError):
        enter("0", "hostile", 11)
    enter("0", "hostile", 10)
    enter("a", "shop", 5)
    for number in range(10):
        known.leave("billing", str(number))
    assert len(known._members) == len(known._subscribed) == 1, "nobody is remembered who has nothing"


async def test_a_principal_that_makes_all_the_groups_it_can_keeps_no_other_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_MOST", 8)
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        tokens = [allow(mq, "consume:orders", name=name) for name in ("hostile", "shop")]
        async with (
            await mq.serve(port=0, token="unused", kafka=0) as served,
            connected(str(served.kafka)) as hostile,
            connected(str(served.kafka)) as shop,
        ):
            await logged_in(hostile, tokens[0])
            await logged_in(shop, tokens[1])
            beats = [await ShareConsumer(hostile, group=f"g{number}").beat("orders") for number in range(12)]
            assert [int(one.error_code) for one in beats] == [0] * 4 + [Code.GROUP_MAX_SIZE_REACHED] * 8
            await ShareConsumer(shop, group="billing").join("orders")
            await ShareConsumer(shop, group="g0").join("orders")  # which is there


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
    monkeypatch.setattr(members, "_MOST_SUBSCRIBED", 6)  # 3 for one that is alone
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
    monkeypatch.setattr(members, "_MOST_SUBSCRIBED", 4)
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
    monkeypatch.setattr(groups, "_MOST", 4)  # "billing" is one of them
    for name in ("eu.1", "eu.2", "eu.3"):
        one = ShareConsumer(consumer.wire, group=name)
        await one.join("orders")
        await one.beat(epoch=-1)
        await queue.delete_group("orders", share_group(name), force=True)
    for name in ("eu.4", "eu.5"):
        await ShareConsumer(consumer.wire, group=name).join("orders")
    assert int((await ShareConsumer(consumer.wire, group="eu.6").beat("orders")).error_code) == 81


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
