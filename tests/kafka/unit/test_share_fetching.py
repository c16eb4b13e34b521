"""A fetch of a share consumer that is cut short forgets nothing that it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from postroom.broker.deliver.handed import PartialPoll
from postroom.config import DEFAULTS
from postroom.endpoint.values import Grant, Lease, PollReply, Settle, SettleReply
from postroom.kafka.share.fetching import ShareDeliveries
from postroom.kafka.share.settling import Settling


class FakeBroker:
    """Hands out five messages when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.handed_out = asyncio.Event()
        self.settled: list[Settle] = []

    async def poll(self, request: PartialPoll) -> PollReply:
        await self.go.wait()
        self.handed_out.set()
        return PollReply((Grant("orders", 0, 7, (Lease(0, 4, 1, alone=False),), ()),), 30_000)

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        self.settled += parts
        return SettleReply()


async def test_what_was_handed_out_as_the_connection_was_lost_is_given_back() -> None:
    broker = cast(Any, FakeBroker())
    settling = Settling(broker, DEFAULTS.tuning.wire)
    nobody = cast(Any, None)
    deliveries = ShareDeliveries(broker, nobody, nobody, settling, nobody, nobody)
    poll = PartialPoll("orders", "billing", "a", 9, 500, 1_000_000, 1_000, empty_handed=True)
    fetching = asyncio.ensure_future(deliveries._first([(nobody, poll)]))
    await asyncio.sleep(0)
    broker.go.set()
    await broker.handed_out.wait()
    fetching.cancel()  # the poll has ended, and nobody has looked at its reply
    await asyncio.wait([fetching])
    assert fetching.cancelled()
    async with asyncio.timeout(5):
        await asyncio.gather(*deliveries._returning)
    [part] = broker.settled
    assert (part.topic, part.partition_id, part.token) == ("orders", 7, 9)
    assert [(one.kind, one.first, one.last) for one in part.verdicts] == [("release", 0, 4)]
