"""Administration over HTTP: topics and their routes, groups, and the queue as a whole.

Decides nothing: each call is the SDK's of the same name. Of a group it shows how far it is behind, its dead
letters and what stopped; of the queue its shards, rate limits, and the brokers that serve it.
"""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query

from ..client.consumer.delayed import page
from ..client.consumer.reading import Position
from ..client.consumer.schedules import ScheduleInfo
from ..client.failed import longest_first
from ..client.message import DeadLetter, Delayed, Stopped
from ..endpoint.values import GroupInfo, Lag, PrincipalInfo, RateInfo, ResetPlan, ShardInfo, TopicInfo
from ..model.audit import AuditEntry
from ..model.policy.slow_lane import LaneInfo, SlowLane
from ..store.contract import ServedBroker
from .failures import BadRequest
from .models import (
    ANSWER_BYTES,
    AlterGroup,
    AlterTopic,
    Chosen,
    ChosenStopped,
    Convert,
    CreateGroup,
    CreateTopic,
    DelayedPage,
    DelayedShown,
    Letter,
    Merge,
    Move,
    Reset,
    RouteShown,
    SetRate,
    Split,
    StoppedShown,
    json_bytes,
    route_shown,
    text_or_base64,
    texts,
)
from .service import Who

__all__ = ["groups_router", "queue_router", "topics_router"]


topics_router = APIRouter(prefix="/topics", tags=["topics"])


@topics_router.get("")
async def topics(who: Who, internal: bool = False) -> list[TopicInfo]:
    """Topics that you have a permission on; `internal`: groups' own topics too."""
    return await who.mq.topics(internal=internal)


@topics_router.post("", status_code=201)
async def create_topic(who: Who, wish: CreateTopic) -> TopicInfo:
    """`exist_ok`: one that is there is fine, if it has what is given here."""
    return await who.mq.create_topic(**wish.model_dump(exclude_unset=True))


@topics_router.get("/{topic}")
async def topic(who: Who, topic: str) -> TopicInfo:
    return await who.mq.topic(topic)


@topics_router.patch("/{topic}")
async def alter_topic(who: Who, topic: str, wish: AlterTopic) -> TopicInfo:
    """Change what is given. 0 means no limit."""
    return await who.mq.alter_topic(topic, **wish.model_dump())


@topics_router.delete("/{topic}", status_code=204)
async def delete_topic(who: Who, topic: str) -> None:
    """The topic, its messages, its groups and their dead letters."""
    await who.mq.delete_topic(topic)


@topics_router.post("/{topic}/purge")
async def purge(who: Who, topic: str) -> dict[str, int]:
    """Drop all messages, for every group, delayed ones too."""
    return {"purged": await who.mq.purge(topic)}


@topics_router.get("/{topic}/delayed")
async def delayed(
    who: Who,
    topic: str,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=100)] = None,
) -> DelayedPage:
    """Messages that are not due yet, the soonest first: no more than fit into an answer of a few MB."""
    room = ANSWER_BYTES

    def fits(one: Delayed) -> bool:
        nonlocal room
        room -= json_bytes(one.value, one.key, one.headers)
        return room >= 0

    found, following = await page(who.mq, topic, limit, after, fits)
    return DelayedPage(list(map(_delayed, found)), following)


def _delayed(one: Delayed) -> DelayedShown:
    value, value_b64 = text_or_base64(one.value)
    key = None if one.key is None else one.key.decode(errors="replace")
    return DelayedShown(
        one.id, key, value, value_b64, texts(one.headers), one.timestamp, one.due_ms, one.size
    )


@topics_router.delete("/{topic}/delayed/{id:path}")
async def cancel(who: Who, topic: str, id: str) -> dict[str, bool]:
    """Take back a delayed message, if it still waits."""
    return {"cancelled": await who.mq.cancel(topic, id)}


# ---- routes ----


@topics_router.get("/{topic}/route", tags=["routes"])
async def route(who: Who, topic: str) -> RouteShown:
    change = await who.mq.route_change(topic)
    return route_shown(await who.mq.route(topic), None if change is None else change.kind)


@topics_router.get("/{topic}/route/history", tags=["routes"])
async def route_history(who: Who, topic: str) -> list[RouteShown]:
    """Every version, the oldest first."""
    return list(map(route_shown, await who.mq.route_history(topic)))


@topics_router.post("/{topic}/route/split", tags=["routes"])
async def split(who: Who, topic: str, wish: Split) -> RouteShown:
    """Two partitions in the place of one, live and in order."""
    return route_shown(await who.mq.split(topic, wish.partition, at=wish.at))


@topics_router.post("/{topic}/route/merge", tags=["routes"])
async def merge(who: Who, topic: str, wish: Merge) -> RouteShown:
    """One partition in the place of two neighbours, live and in order."""
    return route_shown(await who.mq.merge(topic, wish.one, wish.other))


@topics_router.post("/{topic}/route/move", tags=["routes"])
async def move(who: Who, topic: str, wish: Move) -> RouteShown:
    """The same slots on another shard, live and in order."""
    return route_shown(await who.mq.move(topic, wish.partition, shard=wish.shard))


# ---- groups ----


groups_router = APIRouter(prefix="/topics/{topic}/groups", tags=["groups"])


@groups_router.get("")
async def groups(who: Who, topic: str) -> list[GroupInfo]:
    return await who.mq.groups(topic)


@groups_router.post("", status_code=201)
async def create_group(who: Who, topic: str, wish: CreateGroup) -> GroupInfo:
    """Made before its first member comes, for instance to fix where it starts."""
    named = wish.model_dump(exclude={"start", "slow_lane"})
    start = None if wish.start is None else _position(wish.start)
    return await who.mq.create_group(topic, **named, start=start, slow_lane=_lane(wish))


@groups_router.patch("/{group}")
async def alter_group(who: Who, topic: str, group: str, wish: AlterGroup) -> GroupInfo:
    """Change what is given."""
    named = wish.model_dump(exclude={"slow_lane"})
    return await who.mq.alter_group(topic, group, **named, slow_lane=_lane(wish))


@groups_router.delete("/{group}", status_code=204)
async def delete_group(who: Who, topic: str, group: str, force: bool = False) -> None:
    """Forget a group and its progress; one with live members only if forced."""
    await who.mq.delete_group(topic, group, force=force)


@groups_router.post("/{group}/pause")
async def pause(who: Who, topic: str, group: str) -> GroupInfo:
    """Hand out nothing more until it is resumed."""
    return await who.mq.pause(topic, group)


@groups_router.post("/{group}/resume")
async def resume(who: Who, topic: str, group: str) -> GroupInfo:
    return await who.mq.resume(topic, group)


@groups_router.post("/{group}/reset")
async def reset(who: Who, topic: str, group: str, wish: Reset) -> ResetPlan:
    """Move the group to another place. Offsets move the partitions that they name, and no others."""
    to = _position(wish.to)
    return await who.mq.reset(topic, group, to=to, force=wish.force, dry_run=wish.dry_run)


@groups_router.post("/{group}/convert")
async def convert(who: Who, topic: str, group: str, wish: Convert) -> ResetPlan:
    """Make a native group one of Kafka clients, or one of theirs native; it goes on where it was."""
    return await who.mq.convert_group(topic, group, wish.mode, force=wish.force, dry_run=wish.dry_run)


@groups_router.get("/{group}/lag")
async def lag(who: Who, topic: str, group: str) -> Lag:
    return await who.mq.lag(topic, group)


@groups_router.get("/{group}/lanes")
async def lanes(who: Who, topic: str, group: str) -> LaneInfo:
    """Sources that are slow, and how many messages wait in the group's lane."""
    return await who.mq.lanes(topic, group)


def _lane(wish: AlterGroup) -> SlowLane | bool | None:
    given = wish.slow_lane
    return given if given is None or isinstance(given, bool) else SlowLane(**given.model_dump())


def _position(value: str | dict[int, int]) -> Position:
    if not isinstance(value, str) or value in ("earliest", "latest"):
        return value
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise BadRequest(
            f"{value!r} is no place to start: earliest, latest, a moment such as 2026-01-31T12:00:00Z, or "
            'offsets by partition such as {"0": 120}'
        ) from None


# ---- dead letters ----


@groups_router.get("/{group}/dead-letters", tags=["dead letters"])
async def dead_letters(
    who: Who, topic: str, group: str, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[Letter]:
    """Messages that the group gave up on, the oldest first: no more than fit into an answer of a few MB."""
    found, room = list[Letter](), ANSWER_BYTES
    async with aclosing(who.mq._letters(topic, group, limit)) as letters:
        async for letter in letters:
            room -= json_bytes(letter.value, letter.key, letter.headers) + len(letter.reason)
            if found and room < 0:
                break
            found.append(_letter(letter))
            if len(found) == limit:
                break
    return found


@groups_router.post("/{group}/dead-letters/redrive", tags=["dead letters"])
async def redrive(who: Who, topic: str, group: str, wish: Chosen) -> dict[str, int]:
    """Hand dead letters back to that group alone."""
    return {"redriven": await who.mq.redrive(topic, group, ids=_chosen(wish))}


@groups_router.post("/{group}/dead-letters/discard", tags=["dead letters"])
async def discard(who: Who, topic: str, group: str, wish: Chosen) -> dict[str, int]:
    """Throw dead letters away."""
    return {"discarded": await who.mq.discard_dead_letters(topic, group, ids=_chosen(wish))}


def _chosen(wish: Chosen) -> list[str] | None:
    if wish.all == (wish.ids is not None):
        raise BadRequest('say which dead letters: {"ids": [...]}, or {"all": true}')
    return wish.ids


# ---- what stopped ----


@groups_router.get("/{group}/stopped", tags=["stopped"])
async def stopped(
    who: Who, topic: str, group: str, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[StoppedShown]:
    """Messages that hold their key in a group with exhausted="stop"; the one that waits longest first.

    No more than fit into an answer of a few MB.
    """
    found, room = list[Stopped](), ANSWER_BYTES
    async with aclosing(who.mq._stopped(topic, group, limit, behind=True)) as stopped_ones:
        async for one in stopped_ones:
            room -= json_bytes(one.value, one.key, one.headers) + len(one.reason)
            if found and room < 0:
                break
            found.append(one)
    return list(map(_stopped, sorted(found, key=longest_first)))


@groups_router.post("/{group}/stopped/restart", tags=["stopped"])
async def restart_stopped(who: Who, topic: str, group: str, wish: ChosenStopped) -> dict[str, int]:
    """Handle them again, with all their attempts."""
    _check_choice(wish)
    return {"restarted": await who.mq.restart_stopped(topic, group, ids=wish.ids, keys=wish.keys)}


@groups_router.post("/{group}/stopped/skip", tags=["stopped"])
async def skip_stopped(who: Who, topic: str, group: str, wish: ChosenStopped) -> dict[str, int]:
    """Move them to the dead letters; their keys go on."""
    _check_choice(wish)
    return {"skipped": await who.mq.skip_stopped(topic, group, ids=wish.ids, keys=wish.keys)}


@groups_router.post("/{group}/stopped/drop", tags=["stopped"])
async def drop_stopped(who: Who, topic: str, group: str, wish: ChosenStopped) -> dict[str, int]:
    """Drop them unhandled; their keys go on."""
    _check_choice(wish)
    return {"dropped": await who.mq.drop_stopped(topic, group, ids=wish.ids, keys=wish.keys)}


def _check_choice(wish: ChosenStopped) -> None:
    if (wish.ids is not None) + (wish.keys is not None) + wish.all != 1:
        raise BadRequest('say which: {"ids": [...]}, {"keys": [...]}, or {"all": true}')


def _stopped(one: Stopped) -> StoppedShown:
    value, value_b64 = text_or_base64(one.value)
    key = None if one.key is None else one.key.decode(errors="replace")
    return StoppedShown(
        one.id, one.topic, one.group, one.partition, one.offset, key, value, value_b64, texts(one.headers),
        one.timestamp, one.reason, one.attempts, one.since, one.behind, one.more_behind,
    )  # fmt: skip


def _letter(letter: DeadLetter) -> Letter:
    value, value_b64 = text_or_base64(letter.value)
    key = None if letter.key is None else letter.key.decode(errors="replace")
    return Letter(
        letter.id, letter.topic, letter.partition, letter.offset, key, value, value_b64,
        texts(letter.headers), letter.timestamp, letter.reason, letter.attempts, letter.dead_at,
    )  # fmt: skip


# ---- the queue as a whole ----


queue_router = APIRouter()


@queue_router.get("/shards", tags=["shards"])
async def shards(who: Who) -> list[ShardInfo]:
    return await who.mq.shards()


@queue_router.post("/shards/{name}/drain", tags=["shards"])
async def drain_shard(who: Who, name: str) -> ShardInfo:
    """Move every partition off it; it may be left out once its state is "empty"."""
    return await who.mq.drain_shard(name)


@queue_router.post("/shards/{name}/open", tags=["shards"])
async def open_shard(who: Who, name: str) -> ShardInfo:
    """Let a shard that was drained take new partitions again."""
    return await who.mq.open_shard(name)


@queue_router.get("/rates", tags=["rates"])
async def rates(who: Who) -> list[RateInfo]:
    """All limits, and the wait that each imposes now."""
    return await who.mq.rates()


@queue_router.put("/rates", tags=["rates"])
async def set_rate(who: Who, wish: SetRate) -> list[RateInfo]:
    """Limit a topic, a group of it, or a producer; without any amount there is no limit any more.

    Answers with what limits there are of the same subject.
    """
    await who.mq.limit_rate(**wish.model_dump())
    subject = (wish.topic or "", wish.group or "", wish.producer or "")
    found = await who.service.broker.rates()
    return [one for one in found if (one.topic, one.group, one.producer) == subject]


@queue_router.get("/schedules", tags=["schedules"])
async def schedules(who: Who) -> list[ScheduleInfo]:
    """Recurring schedules: their rule, next and last runs, and who runs them."""
    return await who.mq.schedules()


@queue_router.get("/audit-log", tags=["audit log"])
async def audit_log(
    who: Who,
    topic: Annotated[str | None, Query(max_length=250)] = None,
    by: Annotated[str | None, Query(max_length=250)] = None,
    since: datetime | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> list[AuditEntry]:
    """Administrative actions, the newest first: who did what, when, from where, and what it changed.

    `by`: the principal or user; `before`: entries with a lower id, to go on behind the last one.
    """
    if since is not None and since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    return await who.mq.audit_log(topic=topic, who=by, since=since, limit=limit, before=before)


@queue_router.get("/principals", tags=["access"])
async def principals(who: Who) -> list[PrincipalInfo]:
    """Who may use the brokers of this queue, and for what; `postroom access` changes it."""
    return await who.mq.principals()


@queue_router.get("/brokers", tags=["brokers"])
async def brokers(who: Who) -> list[ServedBroker]:
    """Those that serve this queue now; every client is told of them."""
    broker = who.service.broker
    return await broker.in_thread(broker.store.brokers.live)
