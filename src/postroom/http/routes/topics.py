"""Topics and their routes over HTTP: the SDK's calls of the same names."""

from __future__ import annotations

from fastapi import APIRouter

from ...endpoint.values import TopicInfo
from ..models import AlterTopic, CreateTopic, Merge, Move, RouteShown, Split, route_shown
from ..service import Who

__all__ = ["router"]

router = APIRouter(prefix="/topics", tags=["topics"])


@router.get("")
async def topics(who: Who, internal: bool = False) -> list[TopicInfo]:
    """Topics that you have a permission on; `internal`: groups' own topics too."""
    return await who.mq.topics(internal=internal)


@router.post("", status_code=201)
async def create_topic(who: Who, wish: CreateTopic) -> TopicInfo:
    """`exist_ok`: one that is there is fine, if it has what is given here."""
    return await who.mq.create_topic(**wish.model_dump(exclude_unset=True))


@router.get("/{topic}")
async def topic(who: Who, topic: str) -> TopicInfo:
    return await who.mq.topic(topic)


@router.patch("/{topic}")
async def alter_topic(who: Who, topic: str, wish: AlterTopic) -> TopicInfo:
    """Change what is given. 0 means no limit."""
    return await who.mq.alter_topic(topic, **wish.model_dump())


@router.delete("/{topic}", status_code=204)
async def delete_topic(who: Who, topic: str) -> None:
    """The topic, its messages, its groups and their dead letters."""
    await who.mq.delete_topic(topic)


@router.post("/{topic}/purge")
async def purge(who: Who, topic: str) -> dict[str, int]:
    """Drop all messages, for every group, delayed ones too."""
    return {"purged": await who.mq.purge(topic)}


@router.delete("/{topic}/delayed/{id:path}")
async def cancel(who: Who, topic: str, id: str) -> dict[str, bool]:
    """Take back a delayed message, if it still waits."""
    return {"cancelled": await who.mq.cancel(topic, id)}


# ---- routes ----


@router.get("/{topic}/route", tags=["routes"])
async def route(who: Who, topic: str) -> RouteShown:
    change = await who.mq.route_change(topic)
    return route_shown(await who.mq.route(topic), None if change is None else change.kind)


@router.get("/{topic}/route/history", tags=["routes"])
async def route_history(who: Who, topic: str) -> list[RouteShown]:
    """Every version, the oldest first."""
    return list(map(route_shown, await who.mq.route_history(topic)))


@router.post("/{topic}/route/split", tags=["routes"])
async def split(who: Who, topic: str, wish: Split) -> RouteShown:
    """Two partitions in the place of one, live and in order."""
    return route_shown(await who.mq.split(topic, wish.partition, at=wish.at))


@router.post("/{topic}/route/merge", tags=["routes"])
async def merge(who: Who, topic: str, wish: Merge) -> RouteShown:
    """One partition in the place of two neighbours, live and in order."""
    return route_shown(await who.mq.merge(topic, wish.one, wish.other))


@router.post("/{topic}/route/move", tags=["routes"])
async def move(who: Who, topic: str, wish: Move) -> RouteShown:
    """The same slots on another shard, live and in order."""
    return route_shown(await who.mq.move(topic, wish.partition, shard=wish.shard))
