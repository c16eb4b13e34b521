"""What is about the queue as a whole: shards, rate limits, and the brokers that serve it."""

from __future__ import annotations

from fastapi import APIRouter

from ...endpoint.values import RateInfo, ShardInfo
from ...store.contract import ServedBroker
from ..models import SetRate
from ..service import Who

__all__ = ["router"]

router = APIRouter()


@router.get("/shards", tags=["shards"])
async def shards(who: Who) -> list[ShardInfo]:
    return await who.mq.shards()


@router.post("/shards/{name}/drain", tags=["shards"])
async def drain_shard(who: Who, name: str) -> ShardInfo:
    """Move every partition off it; it may be left out once its state is "empty"."""
    return await who.mq.drain_shard(name)


@router.post("/shards/{name}/open", tags=["shards"])
async def open_shard(who: Who, name: str) -> ShardInfo:
    """Let a shard that was drained take new partitions again."""
    return await who.mq.open_shard(name)


@router.get("/rates", tags=["rates"])
async def rates(who: Who) -> list[RateInfo]:
    """All limits, and for how long whoever comes now waits for each."""
    return await who.mq.rates()


@router.put("/rates", tags=["rates"])
async def set_rate(who: Who, wish: SetRate) -> list[RateInfo]:
    """Limit a topic, a group of it, or a producer; without any amount there is no limit any more.

    Answers with what limits there are of the same subject.
    """
    await who.mq.limit_rate(**wish.model_dump())
    subject = (wish.topic or "", wish.group or "", wish.producer or "")
    found = await who.service.broker.rates()
    return [one for one in found if (one.topic, one.group, one.producer) == subject]


@router.get("/brokers", tags=["brokers"])
async def brokers(who: Who) -> list[ServedBroker]:
    """Those that serve this queue now; every client is told of them."""
    broker = who.service.broker
    return await broker.in_thread(broker.store.brokers.live)
