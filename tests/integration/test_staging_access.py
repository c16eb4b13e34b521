"""Who may stage and publish at a live port: permissions are about topics, and a query has no owner (R48)."""

from __future__ import annotations

import pytest

import postroom
from postroom import Message
from postroom.broker.gatekeeper import new_token
from postroom.errors import PermissionDenied, StagingConflict, UnknownPartition
from postroom.model.access import ALL, Principal, hash_of, parse_permissions
from postroom.model.batch import BatchBuilder
from postroom.model.staging import Wish

from .wire_raw import broker_of, served

SHOP, BOSS = new_token(), new_token()


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
                    await ask.decide_staged(topics, "job", 0, Wish())
                with pytest.raises(PermissionDenied):
                    await ask.publish_staged(topics, "job", 0)
                with pytest.raises(PermissionDenied):
                    await ask.drop_staged(topics, "job", 0, None)
                with pytest.raises(PermissionDenied):
                    await ask.staged_marks(topics, "job")
            with pytest.raises(StagingConflict, match="more topics"):
                await ask.decide_staged(("orders",), "job", 0, Wish((("both", 2),), 2))
            with pytest.raises(PermissionDenied):
                await shop.staging("mine").segment().add("secrets", [Message(b"1")])
            builder = BatchBuilder()
            builder.append(1, None, b"1", [])
            with pytest.raises(UnknownPartition):
                await ask.stage("orders", "mine", 0, "a", 0, (secret,), builder.build())
            await boss._endpoint.decide_staged(("orders", "secrets"), "job", 0, Wish((("both", 2),), 2))
            with pytest.raises(PermissionDenied, match="'secrets' too"):
                await ask.publish_staged(("orders",), "job", 0)
            assert (await boss.staging("job").commit([staged])).messages == 2
