"""Who may stage and publish at a live port: permissions are about topics, queries have owners (R48, I23)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import postroom
from postroom import Message
from postroom.broker.access import new_token
from postroom.client.producer.staging import Staged
from postroom.errors import PermissionDenied, StagingConflict, UnknownPartition
from postroom.model.access import ALL, Principal, hash_of, parse_permissions
from postroom.model.messages.batch import BatchBuilder
from postroom.model.moves.staging import Wish
from postroom.wire.server.server import WireServer
from tests.integration.wire.wire_raw import broker_of, served

SHOP, BOSS, EVIL = new_token(), new_token(), new_token()


async def test_every_topic_of_a_batch_has_to_be_permitted() -> None:
    async with served(dev=False) as (mq, server):
        store = broker_of(mq).store
        store.access.add(Principal("shop", parse_permissions(["send:orders"])), hash_of(SHOP))
        store.access.add(Principal("boss", ALL), hash_of(BOSS))
        for topic in ("orders", "secrets"):
            await mq.create_topic(topic, partitions=1)
        secret = (await mq.route("secrets")).ranges[0].partition_id
        async with (
            postroom.connect(server.url, token=BOSS) as boss,
            postroom.connect(server.url, token=SHOP) as shop,
        ):
            segment = boss.staging("job").segment("both")
            for topic in ("orders", "secrets"):
                await segment.add(topic, [Message(b"1")])
            staged = await segment.close()
            ask = shop._endpoint
            for topics in (("secrets",), ("orders", "secrets"), ()):
                with pytest.raises(PermissionDenied):
                    await ask.decide_staged(topics, "mine", 0, Wish())
                with pytest.raises(PermissionDenied):
                    await ask.publish_staged(topics, "mine", 0)
                with pytest.raises(PermissionDenied):
                    await ask.drop_staged(topics, "mine", 0, None)
                with pytest.raises(PermissionDenied):
                    await ask.staged_marks(topics, "mine")
            with pytest.raises(PermissionDenied):
                await shop.staging("mine").segment().add("secrets", [Message(b"1")])
            builder = BatchBuilder()
            builder.append(1, None, b"1", [])
            with pytest.raises(UnknownPartition):
                await ask.stage("orders", "mine", 0, "a", 0, (secret,), builder.build())
            ask = boss._endpoint
            with pytest.raises(StagingConflict, match="more topics"):
                await ask.decide_staged(("orders",), "job", 0, Wish((("both", 2),), 2))
            await ask.decide_staged(("orders", "secrets"), "job", 0, Wish((("both", 2),), 2))
            with pytest.raises(PermissionDenied, match="'secrets' too"):
                await ask.publish_staged(("orders",), "job", 0)
            assert (await boss.staging("job").commit([staged])).messages == 2


# ---- whose query it is (I23) ----

Place = tuple[postroom.Connection, WireServer, postroom.Connection, postroom.Connection]
"""The queue, its server, a job of `shop` and a principal that may send to another topic."""


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with served(dev=False) as (mq, server):
        access = broker_of(mq).store.access
        access.add(Principal("shop", parse_permissions(["send:orders", "send:clicks"])), hash_of(SHOP))
        access.add(Principal("evil", parse_permissions(["send:mine", "send:orders"])), hash_of(EVIL))
        for topic in ("orders", "clicks", "mine"):
            await mq.create_topic(topic, partitions=1)
        async with (
            postroom.connect(server.url, token=SHOP) as shop,
            postroom.connect(server.url, token=EVIL) as evil,
        ):
            yield mq, server, shop, evil


async def job(mq: postroom.Connection, query: str, batch: int, count: int, topic: str = "orders") -> Staged:
    segment = mq.staging(query, batch).segment()
    await segment.add(topic, [Message(b"%d" % n, key="k") for n in range(count)])
    return await segment.close()


async def there(mq: postroom.Connection, topic: str = "orders") -> list[bytes]:
    return [message.value async for message in mq.read(topic)]


def attempts(evil: postroom.Connection, topic: str) -> list[Callable[[], Awaitable[object]]]:
    ask, topics = evil._endpoint, (topic,)
    return [
        lambda: ask.drop_staged(topics, "hourly", 0, None),
        lambda: ask.decide_staged(topics, "hourly", 0, Wish()),
        lambda: ask.decide_staged(topics, "hourly", 0, Wish((), 5)),
        lambda: ask.decide_staged(topics, "hourly", 1, Wish((), 1, {"0": (1, 2**62)})),
        lambda: ask.publish_staged(topics, "hourly", 0),
        lambda: ask.staged_marks(topics, "hourly"),
        lambda: job(evil, "hourly", 0, 1, topic),
        lambda: job(evil, "hourly", 7, 1, topic),
    ]


@pytest.mark.parametrize("topic", ["mine", "orders"])
async def test_a_query_belongs_to_whoever_staged_it_first(place: Place, topic: str) -> None:
    """Also where the other may send to the very same topic; before the decision and after it."""
    mq, _, shop, evil = place
    staged = await job(shop, "hourly", 0, 5)
    for attempt in attempts(evil, topic):
        with pytest.raises(PermissionDenied, match="belongs to another") as raised:
            await attempt()
        assert "shop" not in str(raised.value), "it does not say whose"
    assert (await shop.staging("hourly").commit([staged])).messages == 5
    for attempt in attempts(evil, topic):
        with pytest.raises(PermissionDenied, match="belongs to another"):
            await attempt()
    assert await there(mq) == [b"%d" % n for n in range(5)]
    again = await shop.staging("hourly").commit([await job(shop, "hourly", 0, 5)])
    assert again.messages == 5 and len(await there(mq)) == 5
    assert await there(mq, "mine") == []


async def test_whoever_decides_first_has_the_query_too(place: Place) -> None:
    _, _, shop, evil = place
    await evil._endpoint.decide_staged(("mine",), "hourly", 0, Wish())
    with pytest.raises(PermissionDenied, match="choose another name"):
        await job(shop, "hourly", 0, 5)  # it is told, and loses nothing
    assert (await shop.staging("shop.hourly").commit([await job(shop, "shop.hourly", 0, 5)])).messages == 5


async def test_rows_cannot_be_decided_away(place: Place) -> None:
    """Not even by their own job: what was seen is staged, or was decided before."""
    _, _, shop, _ = place
    ask = shop._endpoint
    await job(shop, "hourly", 0, 5)
    for wish in (Wish((), 5), Wish((), 5, {"0": (0, 4)}), Wish((), 1, {"0": (2**62, 1)})):
        with pytest.raises(StagingConflict):
            await ask.decide_staged(("orders",), "hourly", 0, wish)
    assert await ask.staged_marks(("orders",), "hourly") == {}


async def test_embedded_jobs_may_do_all_and_others_nothing_to_theirs(place: Place) -> None:
    """Whoever has the database is not kept from anything; what it began is not for principals."""
    mq, _, shop, evil = place
    staged = await job(shop, "hourly", 0, 5)
    assert (await mq.staging("hourly").commit([staged])).messages == 5
    assert (await shop.staging("hourly").commit([staged])).messages == 5, "it is still its owner's"
    mine = await job(mq, "nightly", 0, 3)
    for principal in (shop, evil):
        with pytest.raises(PermissionDenied):
            await principal._endpoint.drop_staged(("orders",), "nightly", 0, None)
    assert (await mq.staging("nightly").commit([mine])).messages == 3


async def test_rows_of_topics_that_are_not_named_are_not_dropped(place: Place) -> None:
    mq, _, shop, _ = place
    segment = shop.staging("hourly").segment("both")
    await segment.add("orders", [Message(b"1")])
    await segment.add("clicks", [Message(b"2"), Message(b"3")])
    staged = await segment.close()
    assert await shop._endpoint.drop_staged(("orders",), "hourly", 0, ("both",)) == 1
    with pytest.raises(StagingConflict, match="has 2 messages, and should have 3"):
        await shop.staging("hourly").commit([staged])
    assert await shop.staging("hourly").abort([staged]) == 2
    assert await there(mq) == await there(mq, "clicks") == []


async def test_who_comes_without_a_token_is_as_somebody_inside() -> None:
    """To a broker that was started with `--dev`: a job may be run embedded today, and served tomorrow."""
    async with served() as (mq, server), postroom.connect(server.url) as local:
        await mq.create_topic("orders", partitions=1)
        first = await local.staging("job").commit([await job(mq, "job", 0, 2)])
        again = await mq.staging("job").commit([await job(local, "job", 0, 2)])
        assert again == first and len(await there(mq)) == 2
