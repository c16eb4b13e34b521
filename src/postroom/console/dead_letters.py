"""Dead letters for the console: page by page, counted by error, and redriven or discarded, however many.

A million of them are never read for one answer. What counts them ends after a moment and says how many it
read and where to go on; what redrives or discards all of them does so a piece at a time, so that the page can
show how far it is and stop. Letters that died after the page began are left alone: what fails again at once
is not redriven for ever. Reading and acting are operations of the table, asked in the principal's name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from ..client.failed import letters_in
from ..client.message import DeadLetter
from ..config import DEFAULTS
from ..endpoint.values import DeadLetters
from ..errors import CatalogError
from ..http.models import Count
from ..http.service import Caller, Who
from ..model.delivery.reason import PLAIN_CHARS, plain_reason
from ..model.topology.names import REDRIVE_GROUP, dead_topic
from .browsing import shown

__all__ = ["dead_letters_router"]

_LETTERS = 200  # of a page
_PIECE = 1000  # letters that are read, redriven or discarded at a time
_ERRORS = 200  # that are told apart in one answer; the others are counted together
_REASON_CHARS = 8000
_SPOT = r"^[0-9]{1,18}:[0-9]{1,18}$"

Spot = tuple[int, int]
"""A letter: its partition's id, and its offset."""

dead_letters_router = APIRouter(
    prefix="/console/data/topics/{topic}/groups/{group}/dead-letters", include_in_schema=False
)

After = Annotated[str | None, Query(max_length=60, pattern=_SPOT)]
Error = Annotated[str | None, Query(max_length=PLAIN_CHARS)]


# ---- reading ----


@dead_letters_router.get("")
async def dead_letters(
    who: Who,
    topic: str,
    group: str,
    after: After = None,
    error: Error = None,
    limit: Annotated[int, Query(ge=1, le=_LETTERS)] = _LETTERS,
) -> dict[str, Any]:
    """A page of dead letters, the oldest first, and where the next begins; `error`: those of one error."""
    found, behind, ends_at = list[dict[str, Any]](), _spot(after), _soon()
    while True:
        letters, end = await _piece(who, topic, group, behind, limit if error is None else _PIECE)
        for letter in letters:
            if error in (None, plain_reason(letter.reason)):
                found.append(_letter(letter))
            if len(found) == limit:
                end = (letter._partition_id, letter._position)
                break
        behind = end
        if error is None or end is None or len(found) == limit or time.monotonic() > ends_at:
            break
    following = await _if_more(who, topic, group, behind)
    return {"letters": found, "next": following, "now_ms": who.broker.now_ms()}


@dead_letters_router.get("/errors")
async def errors(who: Who, topic: str, group: str, after: After = None) -> dict[str, Any]:
    """How many letters have which error, of those that can be read in a moment; `next`: where to count on."""
    counts: dict[str | None, list[int]] = {}
    counted, behind, ends_at = 0, _spot(after), _soon()
    while True:
        letters, behind = await _piece(who, topic, group, behind, _PIECE)
        counted += len(letters)
        await asyncio.to_thread(_count, counts, letters)
        if behind is None or time.monotonic() > ends_at:
            break
    listed = [{"error": one, "letters": many, "last": last} for one, (many, last) in counts.items()]
    following, total = await _if_more(who, topic, group, behind), await _total(who, topic, group)
    return {"errors": listed, "counted": counted, "next": following, "total": total}


def _soon() -> float:
    return time.monotonic() + DEFAULTS.tuning.console.count_s


async def _piece(
    who: Caller, topic: str, group: str, behind: Spot | None, limit: int
) -> tuple[list[DeadLetter], Spot | None]:
    """Letters behind that one, and the last that was read; None: there are no more."""
    parts = await who.broker.dead_letters(topic, group, limit, behind)
    ends = [(part.partition_id, part.open[-1][1]) for part in parts if part.open]
    if not ends:
        return [], None
    return await asyncio.to_thread(_opened, parts, who.broker.now_ms()), ends[-1]


async def _if_more(who: Caller, topic: str, group: str, behind: Spot | None) -> str | None:
    """Where to go on; None: there is nothing behind that."""
    if behind is None or (await _piece(who, topic, group, behind, 1))[1] is None:
        return None
    return _text(behind)


def _opened(parts: Sequence[DeadLetters], now_ms: int) -> list[DeadLetter]:
    return [letter for part in parts for letter in letters_in(part, now_ms)]


def _count(counts: dict[str | None, list[int]], letters: Iterable[DeadLetter]) -> None:
    for letter in letters:
        error: str | None = plain_reason(letter.reason)
        if error not in counts and len(counts) >= _ERRORS:
            error = None
        one = counts.setdefault(error, [0, 0])
        one[0], one[1] = one[0] + 1, max(one[1], letter.dead_at)


async def _total(who: Caller, topic: str, group: str) -> int | None:
    """All that are there; None: not known, as of a broadcast group, whose members have their own."""
    try:
        found = await who.service.broker.lag(dead_topic(topic, group), REDRIVE_GROUP)
    except CatalogError:
        return None
    return found.total.messages


def _spot(text: str | None) -> Spot | None:
    if text is None:
        return None
    partition_id, _, offset = text.partition(":")
    return int(partition_id), int(offset)


def _text(spot: Spot | None) -> str | None:
    return None if spot is None else f"{spot[0]}:{spot[1]}"


def _letter(letter: DeadLetter) -> dict[str, Any]:
    return {
        **shown(letter),
        "reason": letter.reason[:_REASON_CHARS],
        "error": plain_reason(letter.reason),
        "traceback": letter.traceback[:_REASON_CHARS],
        "attempts": letter.attempts,
        "dead_at": letter.dead_at,
    }


# ---- acting ----


class Spots(BaseModel):
    """Dead letters: a partition's id and an offset each."""

    model_config = ConfigDict(extra="forbid")
    spots: list[tuple[Count, Count]] = Field(min_length=1, max_length=_PIECE)


class Piece(BaseModel):
    """The next letters behind `after` that died until a moment: all of them, or those of one error."""

    model_config = ConfigDict(extra="forbid")
    after: str | None = Field(default=None, max_length=60, pattern=_SPOT)
    error: str | None = Field(default=None, max_length=PLAIN_CHARS)
    until_ms: Count


@dead_letters_router.post("/redrive")
async def redrive(who: Who, topic: str, group: str, wish: Spots) -> dict[str, int]:
    """Hand these back to the group; those that are gone meanwhile are left out."""
    return {"done": await who.broker.redrive(topic, group, sorted(set(wish.spots)))}


@dead_letters_router.post("/discard")
async def discard(who: Who, topic: str, group: str, wish: Spots) -> dict[str, int]:
    """Throw these away."""
    return {"done": await who.broker.discard(topic, group, sorted(set(wish.spots)))}


@dead_letters_router.post("/redrive-next")
async def redrive_next(who: Who, topic: str, group: str, wish: Piece) -> dict[str, Any]:
    """Hand a piece of them back to the group; `next`: where to go on, None at the end."""
    spots, following = await _next(who, topic, group, wish)
    return {"done": await who.broker.redrive(topic, group, spots) if spots else 0, "next": following}


@dead_letters_router.post("/discard-next")
async def discard_next(who: Who, topic: str, group: str, wish: Piece) -> dict[str, Any]:
    """Throw a piece of them away."""
    spots, following = await _next(who, topic, group, wish)
    return {"done": await who.broker.discard(topic, group, spots) if spots else 0, "next": following}


async def _next(who: Caller, topic: str, group: str, wish: Piece) -> tuple[list[Spot], str | None]:
    letters, end = await _piece(who, topic, group, _spot(wish.after), _PIECE)
    mine = {
        (letter._partition_id, letter._position)
        for letter in letters
        if letter.dead_at <= wish.until_ms and wish.error in (None, plain_reason(letter.reason))
    }
    return sorted(mine), _text(end)
