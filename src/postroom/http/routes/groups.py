"""Groups, how far they are behind, their dead letters and what stopped, over HTTP: the SDK's own calls."""

from __future__ import annotations

from contextlib import aclosing
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query

from ...client.consumer.reading import Position
from ...client.failed import longest_first
from ...client.message import DeadLetter, Stopped
from ...endpoint.values import GroupInfo, Lag, ResetPlan
from ...model.policy.slow_lane import LaneInfo, SlowLane
from ..encoding import ANSWER_BYTES, json_bytes, text_or_base64, texts
from ..failures import BadRequest
from ..models import AlterGroup, Chosen, ChosenStopped, CreateGroup, Letter, Reset, StoppedShown
from ..service import Who

__all__ = ["router"]

router = APIRouter(prefix="/topics/{topic}/groups", tags=["groups"])


@router.get("")
async def groups(who: Who, topic: str) -> list[GroupInfo]:
    return await who.mq.groups(topic)


@router.post("", status_code=201)
async def create_group(who: Who, topic: str, wish: CreateGroup) -> GroupInfo:
    """Made before its first member comes, for instance to fix where it starts."""
    named = wish.model_dump(exclude={"start", "slow_lane"})
    start = None if wish.start is None else _position(wish.start)
    return await who.mq.create_group(topic, **named, start=start, slow_lane=_lane(wish))


@router.patch("/{group}")
async def alter_group(who: Who, topic: str, group: str, wish: AlterGroup) -> GroupInfo:
    """Change what is given."""
    named = wish.model_dump(exclude={"slow_lane"})
    return await who.mq.alter_group(topic, group, **named, slow_lane=_lane(wish))


@router.delete("/{group}", status_code=204)
async def delete_group(who: Who, topic: str, group: str, force: bool = False) -> None:
    """Forget a group and its progress; one with live members only if forced."""
    await who.mq.delete_group(topic, group, force=force)


@router.post("/{group}/pause")
async def pause(who: Who, topic: str, group: str) -> GroupInfo:
    """Hand out nothing more until it is resumed."""
    return await who.mq.pause(topic, group)


@router.post("/{group}/resume")
async def resume(who: Who, topic: str, group: str) -> GroupInfo:
    return await who.mq.resume(topic, group)


@router.post("/{group}/reset")
async def reset(who: Who, topic: str, group: str, wish: Reset) -> ResetPlan:
    """Move the group to another place. Offsets move the partitions that they name, and no others."""
    to = _position(wish.to)
    return await who.mq.reset(topic, group, to=to, force=wish.force, dry_run=wish.dry_run)


@router.get("/{group}/lag")
async def lag(who: Who, topic: str, group: str) -> Lag:
    return await who.mq.lag(topic, group)


@router.get("/{group}/lanes")
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


@router.get("/{group}/dead-letters", tags=["dead letters"])
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


@router.post("/{group}/dead-letters/redrive", tags=["dead letters"])
async def redrive(who: Who, topic: str, group: str, wish: Chosen) -> dict[str, int]:
    """Hand dead letters back to that group alone."""
    return {"redriven": await who.mq.redrive(topic, group, ids=_chosen(wish))}


@router.post("/{group}/dead-letters/discard", tags=["dead letters"])
async def discard(who: Who, topic: str, group: str, wish: Chosen) -> dict[str, int]:
    """Throw dead letters away."""
    return {"discarded": await who.mq.discard_dead_letters(topic, group, ids=_chosen(wish))}


def _chosen(wish: Chosen) -> list[str] | None:
    if wish.all == (wish.ids is not None):
        raise BadRequest('say which dead letters: {"ids": [...]}, or {"all": true}')
    return wish.ids


# ---- what stopped ----


@router.get("/{group}/stopped", tags=["stopped"])
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


@router.post("/{group}/stopped/restart", tags=["stopped"])
async def restart_stopped(who: Who, topic: str, group: str, wish: ChosenStopped) -> dict[str, int]:
    """Handle them again, with all their attempts."""
    _check_choice(wish)
    return {"restarted": await who.mq.restart_stopped(topic, group, ids=wish.ids, keys=wish.keys)}


@router.post("/{group}/stopped/skip", tags=["stopped"])
async def skip_stopped(who: Who, topic: str, group: str, wish: ChosenStopped) -> dict[str, int]:
    """Move them to the dead letters; their keys go on."""
    _check_choice(wish)
    return {"skipped": await who.mq.skip_stopped(topic, group, ids=wish.ids, keys=wish.keys)}


@router.post("/{group}/stopped/drop", tags=["stopped"])
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
