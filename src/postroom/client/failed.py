"""What a connection can do about messages that failed for good: dead letters, and what stopped its key.

Turns ids and keys into places, and the endpoint's answers into what users read. Must never change more than
was named: an id or a key that matches nothing is an error, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from ..endpoint.endpoint import Endpoint
from ..endpoint.values import DeadLetters, StoppedMessage
from ..errors import CatalogError, InvalidSetting
from ..model.delivery.reason import split_reason
from ..model.messages.batch import records
from ..model.topology.names import HEADER_PREFIX
from .codec import Expiry, unpack
from .consumer.opened import Browsed, readable
from .message import DeadLetter, Received, Stopped
from .owner_check import Guard

__all__ = ["FailedMessages", "letters_in", "longest_first"]

T = TypeVar("T")

_EVERY_LETTER = 2**31 - 1
_DEAD = {name: f"{HEADER_PREFIX}{name}" for name in ("reason", "attempts", "dead-at")}


class FailedMessages:
    """The part of a connection that is about dead letters and what stopped."""

    _endpoint: Endpoint
    _guard: Guard

    if TYPE_CHECKING:

        async def _explained(self, topic: str, call: Awaitable[T]) -> T: ...

    # ---- dead letters ----

    async def dead_letters(self, topic: str, group: str, *, limit: int = 1000) -> list[DeadLetter]:
        """Messages the group gave up on, oldest first; without those whose `expires` has passed."""
        _check_limit(limit)
        found: list[DeadLetter] = []
        async with aclosing(self._letters(topic, group, limit)) as letters:
            async for letter in letters:
                found.append(letter)
                if len(found) == limit:
                    break
        return found

    async def _letters(self, topic: str, group: str, limit: int) -> AsyncGenerator[DeadLetter, None]:
        """All of them, page by page; one batch is open at a time. `limit`: how many are wanted, about."""
        after: tuple[int, int] | None = None
        while True:
            self._guard.check()
            page = await self._explained(topic, self._endpoint.dead_letters(topic, group, limit, after))
            ends = [(part.partition_id, part.open[-1][1]) for part in page if part.open]
            last = ends[-1] if ends else after
            if last == after:  # none came, or all of them again: a broker that does not know about pages
                return
            after, now_ms = last, self._endpoint.now_ms()
            for part in page:
                for letter in letters_in(part, now_ms):
                    yield letter

    async def redrive(self, topic: str, group: str, *, ids: Iterable[str] | None = None) -> int:
        """Hand dead letters back to that group alone; returns how many."""
        self._guard.check()
        spots = None if ids is None else await self._spots(topic, group, ids)
        return await self._explained(topic, self._endpoint.redrive(topic, group, spots))

    async def discard_dead_letters(self, topic: str, group: str, *, ids: Iterable[str] | None = None) -> int:
        """Throw dead letters away; returns how many."""
        self._guard.check()
        spots = None if ids is None else await self._spots(topic, group, ids)
        return await self._explained(topic, self._endpoint.discard(topic, group, spots))

    async def _spots(self, topic: str, group: str, ids: Iterable[str]) -> list[tuple[int, int]]:
        if isinstance(ids, str | bytes):
            raise InvalidSetting(f"ids is a list of message ids, such as [{ids!r}]")
        wanted = set(ids)
        spots: list[tuple[int, int]] = []
        unknown = set(wanted)
        async for letter in self._letters(topic, group, _EVERY_LETTER):
            if letter.id in wanted:
                spots.append((letter._partition_id, letter._position))
                unknown.discard(letter.id)
        if unknown:
            named = ", ".join(repr(id) for id in sorted(map(str, unknown))[:5])
            raise CatalogError(
                f"group {group!r} of topic {topic!r} has no dead letter with the id {named}: "
                "dead_letters() lists those it has; nothing was changed",
                ids=sorted(map(str, unknown)),
            )
        return sorted(spots)

    # ---- what stopped ----

    async def stopped(self, topic: str, group: str, *, limit: int = 1000) -> list[Stopped]:
        """Messages that hold their key in a group with exhausted="stop"; the one that waits longest first.

        Each has its reason, since when its key waits and how many messages wait behind it. Mend what failed,
        then `restart_stopped`; or let the key go on without it: `skip_stopped`, `drop_stopped`.
        """
        _check_limit(limit)
        found = [one async for one in self._stopped(topic, group, limit, behind=True)]
        return sorted(found, key=longest_first)

    async def restart_stopped(
        self,
        topic: str,
        group: str,
        *,
        ids: Iterable[str] | None = None,
        keys: Iterable[str | bytes] | None = None,
    ) -> int:
        """Handle stopped messages again, with all their attempts; what waits behind them follows in order.

        By id, by key, or all of the group. Returns how many.
        """
        spots = await self._stopped_spots(topic, group, ids, keys)
        return await self._explained(topic, self._endpoint.restart_stopped(topic, group, spots))

    async def skip_stopped(
        self,
        topic: str,
        group: str,
        *,
        ids: Iterable[str] | None = None,
        keys: Iterable[str | bytes] | None = None,
    ) -> int:
        """Move stopped messages to the dead letters, with their reason; their keys go on without them.

        By id, by key, or all of the group. Returns how many. `redrive` brings them back, out of order.
        """
        spots = await self._stopped_spots(topic, group, ids, keys)
        return await self._explained(topic, self._endpoint.skip_stopped(topic, group, spots))

    async def drop_stopped(
        self,
        topic: str,
        group: str,
        *,
        ids: Iterable[str] | None = None,
        keys: Iterable[str | bytes] | None = None,
    ) -> int:
        """Settle stopped messages unhandled: this group never sees them again, and their keys go on.

        By id, by key, or all of the group. Returns how many.
        """
        spots = await self._stopped_spots(topic, group, ids, keys)
        return await self._explained(topic, self._endpoint.drop_stopped(topic, group, spots))

    async def _stopped(
        self, topic: str, group: str, limit: int, *, behind: bool
    ) -> AsyncGenerator[Stopped, None]:
        """Up to `limit` of them, page by page."""
        count, after = 0, None
        while count < limit:
            self._guard.check()
            asked = self._endpoint.stopped(topic, group, limit - count, after, behind)
            page = await self._explained(topic, asked)
            if not page:
                return
            count += len(page)
            after = (page[-1].partition_id, page[-1].offset)
            for one in page:
                yield _stopped_message(one, group)

    async def _stopped_spots(
        self,
        topic: str,
        group: str,
        ids: Iterable[str] | None,
        keys: Iterable[str | bytes] | None,
    ) -> list[tuple[int, int]] | None:
        """Where the stopped messages of these ids or keys are; CatalogError if one of these has none."""
        self._guard.check()
        if ids is not None and keys is not None:
            raise InvalidSetting("give ids= or keys=, not both")
        if ids is None and keys is None:
            return None
        for name, given in (("ids", ids), ("keys", keys)):
            if isinstance(given, str | bytes):
                raise InvalidSetting(f"{name} is a list, such as [{given!r}]")
        what, wanted = ("id", {str(one) for one in ids}) if ids is not None else ("key", _as_keys(keys or ()))
        spots: list[tuple[int, int]] = []
        unknown = set(wanted)
        async for one in self._stopped(topic, group, _EVERY_LETTER, behind=False):
            if (named := getattr(one, what)) in wanted:
                spots.append((one._partition_id, one._position))
                unknown.discard(named)
        if unknown:
            names = sorted(one.decode(errors="replace") if isinstance(one, bytes) else one for one in unknown)
            raise CatalogError(
                f"group {group!r} of topic {topic!r} has no stopped message with the {what} "
                f"{', '.join(map(repr, names[:5]))}: stopped() lists those it has; nothing was changed",
                **{f"{what}s": names},
            )
        return sorted(spots)


def letters_in(part: DeadLetters, now_ms: int) -> Iterator[DeadLetter]:
    """Yields the letters of a part of an answer, without those that have expired."""
    browsed, expiry = Browsed(part.topic, part.partition, part.partition_id), Expiry(now_ms)
    for batch in part.batches:
        opened = readable(batch, browsed)
        kept = [r for r in opened if any(first <= r.offset <= last for first, last in part.open)]
        own = {record.offset: dict(record.headers) for record in kept}
        for message in unpack(kept, browsed, expiry):
            yield _letter(message, own[message._position])


def _letter(message: Received, headers: dict[str, bytes | None]) -> DeadLetter:
    def text(name: str) -> str:
        return (headers.get(_DEAD[name]) or b"").decode(errors="replace")

    def number(name: str) -> int:
        found = text(name)  # somebody else may have written it
        return int(found) if found.isdecimal() and len(found) < 20 else 0

    reason, traceback = split_reason(text("reason"))
    return DeadLetter(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        id=message.id,
        key=message.key,
        value=message.value,
        headers=message.headers,
        timestamp=message.timestamp,
        reason=reason,
        attempts=number("attempts"),
        dead_at=number("dead-at"),
        traceback=traceback,
        _partition_id=message._delivery.partition_id,
        _position=message._position,
    )


def _stopped_message(part: StoppedMessage, group: str) -> Stopped:
    browsed = Browsed(part.topic, part.partition, part.partition_id)
    (message,) = unpack(records(part.batch.data), browsed)  # expired or not: it holds its key
    reason, traceback = split_reason(part.reason)
    return Stopped(
        topic=message.topic,
        group=group,
        partition=message.partition,
        offset=message.offset,
        id=message.id,
        key=message.key,
        value=message.value,
        headers=message.headers,
        timestamp=message.timestamp,
        reason=reason,
        traceback=traceback,
        attempts=part.attempts + message._before,
        since=part.since,
        behind=part.behind,
        more_behind=part.more_behind,
        _partition_id=part.partition_id,
        _position=part.offset,
    )


def longest_first(one: Stopped) -> tuple[int, int, int]:
    return (one.since, one._partition_id, one._position)


def _as_keys(keys: Iterable[str | bytes]) -> set[str | bytes]:
    found: set[str | bytes] = set()
    for key in keys:
        if not isinstance(key, str | bytes):
            raise InvalidSetting(f"keys are str or bytes, not {key!r}; one without a key is named by its id")
        found.add(key.encode() if isinstance(key, str) else key)
    return found


def _check_limit(limit: object) -> None:
    if type(limit) is not int or limit < 1:
        raise InvalidSetting(f"limit={limit!r}: a whole number from 1 up")
