"""The primary is killed -9 under load and its standby takes over (R1, R6, R34, I8).

With synchronous replication nothing that was confirmed is lost, again and again: each time the next standby
is made from the new primary. Without it, whoever has seen what is lost says so, and stores nothing on top.
Clients know one address, which leads to whoever is the primary, as that of a load balancer does.
`POSTROOM_FAILOVERS` is how often: once in `make test-all`, 20 times in `make failover`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

import postroom
from postroom.errors import StoreCorrupt, StoreUnavailable
from postroom.model.delivery.delivery import OrderedAsk
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import SqlStore
from postroom.testing.check import Event
from postroom.testing.store_contract.harness import append, batch, partitions
from tests.chaos.crew import Crew
from tests.chaos.stage import finish, hire, judge, make_topic
from tests.chaos.stage import until as until_async
from tests.integration.races.interleaving import until
from tests.ready import opened

from .pairs import MariaPair, Pair, PostgresPair

FAILOVERS = int(os.environ.get("POSTROOM_FAILOVERS", "1"))

pytestmark = [
    pytest.mark.slow("starts and kills servers that replicate, under many processes"),
    pytest.mark.timeout(FAILOVERS * 60 + 240),
]


@pytest.fixture(params=[PostgresPair, MariaPair], ids=["postgres", "mariadb"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield request.param(stack)


async def test_nothing_that_was_confirmed_is_lost_with_synchronous_replication(
    pair: Pair, tmp_path: Path
) -> None:
    await asyncio.to_thread(pair.confirm)
    async with postroom.connect(pair.url, migrate=True) as mq:
        await make_topic(mq, "orders", lease=3)
        with Crew(pair.url, tmp_path) as crew:
            await hire(crew, "orders", pause_s=0.1)
            for number in range(FAILOVERS):
                begin = time.time_ns()
                await asyncio.to_thread(pair.fail_over)
                crew.outages.append(Event(begin, "outage", until=time.time_ns(), crash=True))
                up = time.monotonic()
                await _at_work(crew)
                print(f"failover {number + 1}: at work again {time.monotonic() - up:.2f} s after it was up")
                if number + 1 < FAILOVERS:
                    await asyncio.to_thread(pair.join)
                    await asyncio.to_thread(pair.confirm)
                    await _at_work(crew)
            await finish(mq, crew, "orders", seconds=60 + 10 * FAILOVERS)  # it sends more than it handles
            await judge(mq, crew, "orders")


async def _at_work(crew: Crew) -> None:
    sent, settled = crew.count("confirmed"), crew.count("settled")
    await until_async(
        lambda: crew.count("confirmed") > sent + 10 and crew.count("settled") > settled + 20, "work goes on"
    )


async def test_what_an_asynchronous_standby_lacks_is_noticed_and_nothing_is_stored_over_it(
    pair: Pair,
) -> None:
    """Each time some of what was confirmed is lost. Everybody who has seen it says up to where, until
    somebody accepts it by connecting anew."""
    kept: list[bytes] = []
    for number in range(FAILOVERS):
        if number:
            await asyncio.to_thread(pair.join)
        async with postroom.connect(pair.url, migrate=True) as mq:
            await mq.create_topic("orders", partitions=1, exist_ok=True)
            await mq.create_group("orders", "billing", start="latest", exist_ok=True)
            await asyncio.to_thread(pair.confirm)  # the standby has all of this
            kept.append(b"kept %d" % number)
            await mq.send("orders", kept[-1], key="k")
            await asyncio.to_thread(pair.part)
            for _ in range(number % 5 + 1):
                lost = await mq.send("orders", b"lost", key="k")
            async with mq.consumer("orders", group="billing") as consumer:
                await asyncio.to_thread(pair.fail_over)
                with pytest.raises(StoreCorrupt, match="confirmed messages are missing") as told:
                    await _answered(lambda: mq.send("orders", b"next", key="k"))
                assert f"offsets up to {lost.offset} were given" in str(told.value)
                with pytest.raises(StoreCorrupt, match=f"offsets up to {lost.offset} were given"):
                    await _answered(lambda: consumer.poll(wait=10))
        async with postroom.connect(pair.url) as mq:  # somebody has accepted the loss
            assert [message.value async for message in mq.read("orders")] == kept
            kept.append(b"next %d" % number)
            await mq.send("orders", kept[-1], key="k")
        print(f"failover {number + 1}: {number % 5 + 1} lost, and said so")


def test_no_takeover_for_one_lease_after_a_failover() -> None:
    """I8: the holder has renewed its lease, and the standby, started long ago, has not heard of it."""
    with ExitStack() as stack:
        pair = PostgresPair(stack)
        opened(pair.url, make_tables=True).close()
        store, other = (stack.enter_context(closing(opened(pair.url))) for _ in range(2))
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        append(store, place, batch(4))
        settings = GroupSettings(mode="ordered", lease_ms=_LEASE_MS)
        group = store.catalog.create_group("orders", "line", settings)

        def holds(token: int, through: SqlStore) -> bool:
            wish = OrderedAsk(f"m{token}", token, 4, 4)
            with suppress(StoreUnavailable):  # until the address leads to the standby
                through.progress.started_ms()  # as brokers do for each poll
                return bool(through.progress.poll_ordered(group, place, wish).deliveries)
            return False

        def until_ms() -> int:
            return store.progress.peek(group, [place])[place].holder.until

        assert holds(1, store) and not holds(2, other)
        pair.confirm()  # the standby has all of this
        known = until_ms()
        pair.link.deaf()
        until(lambda: store.now_ms() > known - _LEASE_MS // 2)
        store.progress.poll_ordered(group, place, OrderedAsk("m1", 1, 4, 4))
        renewed = until_ms()
        pair.fail_over()
        until(lambda: holds(2, other))
        taken = other.now_ms()
        assert known < renewed <= taken, f"taken {renewed - taken} ms before the lease ended"


_LEASE_MS = 6_000  # longer than a failover takes, so that it has not ended by then


async def _answered(ask: Callable[[], Awaitable[object]]) -> None:
    """Ask until the new primary has answered."""
    while True:
        try:
            await ask()
        except StoreUnavailable:
            await asyncio.sleep(0.1)
