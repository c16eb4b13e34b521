"""Staging: what a job writes becomes visible when the job is done, once, however often it is run again (I20).

    staging = mq.staging("nightly-2026-05-01")          # the same name when the job is run again
    segment = staging.segment()                          # one for each task, or attempt of a task
    await segment.add("orders", [postroom.Message(b"…", key="42")])
    await staging.commit([await segment.close()])        # decided, and published

A segment is for one task. What `close` returns may travel to whoever commits. Messages of one segment and key
keep their order; those of a batch come after those of the batches before it. Publishing is atomic for each
partition's append, not over all of them: readers may see a part of a batch a little earlier than the rest.

Decides which partition a message is staged for; the publisher looks again. Must never leave out a message
that the broker has not decided before.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from ...backoff import STEADY
from ...config import DEFAULTS
from ...endpoint.endpoint import Endpoint
from ...endpoint.values import Published
from ...errors import InvalidMessage, MessageTooLarge, PostroomError, UsageError
from ...model.messages.batch import BatchBuilder, Headers
from ...model.moves.staging import Span, Wish, check_name, joined, of_messages
from ...model.topology.route import Route
from ...units import Duration, duration_ms
from ..codec import Entry, pack_all
from ..message import Message
from ..owner_check import Guard

__all__ = ["Segment", "Staged", "Staging", "check_longest"]

T = TypeVar("T")

_CALL_BYTES = 4 * 1024 * 1024  # of batches that are staged together
_CALL_BATCHES = 256
_NO_HEADERS: Headers = []


@dataclass(frozen=True, slots=True)
class Staged:
    """What one segment holds: for whoever commits."""

    segment: str
    messages: int
    rows: int  # that the task saw, also those that it left out
    topics: tuple[str, ...] = ()
    source: Mapping[str, Span] = field(default_factory=dict)
    marks: Mapping[str, int] = field(default_factory=dict)
    content: bytes = b""  # of these rows, as `model.content` has it; empty: not known


class Staging:
    """One batch of a query. Made by `Connection.staging`."""

    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        route: Callable[[str], Awaitable[Route]],
        query: str,
        batch: int,
        timeout_ms: int,
        client: str = "",
        compare: bool = True,
    ) -> None:
        self.query, self.batch = query, batch
        self._compare = compare
        self._client = client  # whose limits it counts against (R40)
        self._endpoint = endpoint
        self._guard = guard
        self._route = route
        self._timeout_s = timeout_ms / 1000

    def segment(self, name: str | None = None) -> Segment:
        """A new one. Its name is never used again: not by another attempt of the same task either."""
        self._guard.check()
        name = check_name(secrets.token_hex(8) if name is None else name, "name")
        return Segment(self, self._endpoint, self._route, name)

    async def marks(self, topics: Sequence[str]) -> dict[str, int]:
        """By source partition, up to which offset the query was decided. `topics`: some that it writes to."""
        self._guard.check()
        return await self._trying(lambda: self._endpoint.staged_marks(tuple(topics), self.query))

    async def commit(self, staged: Iterable[Staged]) -> Published:
        """Decide that the batch consists of these segments, and publish it.

        If it was decided before, that counts, and these segments are dropped: so a job may be run again after
        whatever happened. StagingConflict if it comes with other rows than before, and no source offsets:
        with more or fewer of them, or with other content, unless that is not compared.
        """
        self._guard.check()
        found = list(staged)
        topics = tuple(sorted({topic for one in found for topic in one.topics}))
        if not topics:
            return Published(True, 0)
        wish = _wish(found)
        decided = await self._trying(
            lambda: self._endpoint.decide_staged(topics, self.query, self.batch, wish)
        )
        if set(decided.segments) != set(wish.segments):
            await self._drop(topics, [name for name, _ in wish.segments])
        published = Published(False, 0)
        while not published.done:
            published = await self._trying(
                lambda: self._endpoint.publish_staged(topics, self.query, self.batch)
            )
        return published

    async def abort(self, staged: Iterable[Staged]) -> int:
        """Drop these segments, as far as they were not decided; how many messages."""
        self._guard.check()
        found = list(staged)
        topics = tuple(sorted({topic for one in found for topic in one.topics}))
        return await self._drop(topics, [one.segment for one in found if one.messages])

    async def _drop(self, topics: tuple[str, ...], segments: list[str]) -> int:
        if not segments:
            return 0
        return await self._trying(
            lambda: self._endpoint.drop_staged(topics, self.query, self.batch, tuple(segments))
        )

    async def _trying(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeated while it may succeed, for as long as the time-out says; nothing is done twice by that."""
        until, tries = time.monotonic() + self._timeout_s, 0
        while True:
            try:
                return await call()
            except PostroomError as error:
                tries += 1
                pause_s = STEADY.after(tries)
                if not error.retriable or time.monotonic() + pause_s > until:
                    raise
            await asyncio.sleep(pause_s)


class Segment:
    """What one task stages. For one task at a time."""

    def __init__(
        self, staging: Staging, endpoint: Endpoint, route: Callable[[str], Awaitable[Route]], name: str
    ) -> None:
        self.name = name
        self._staging = staging
        self._endpoint = endpoint
        self._route = route
        self._packing: dict[str, _Packing] = {}
        self._number = 0
        self._sending: asyncio.Task[None] | None = None
        self._staged = Staged(name, 0, 0)
        self._closed = False

    async def add(self, topic: str, messages: Iterable[Message]) -> None:
        """Stage messages: their keys, values, headers and ids. None of them is delayed."""
        packed = pack_all(list(messages), self._endpoint.now_ms())
        if packed.dues is not None:
            raise UsageError("staged messages are not delayed: send those with mq.send")
        await self._add(topic, packed.entries)
        content = of_messages(topic, packed.entries) if self._staging._compare else b""
        self.saw(len(packed.entries), [topic], content=content)

    async def add_columns(
        self,
        topic: str,
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Headers] | None = None,
    ) -> None:
        """The same for columns of equal length, for speed. What it saw is told by `saw`."""
        _check_sizes(values, keys)
        none = _NO_HEADERS
        entries = list(
            zip(keys or [None] * len(values), values, headers or [none] * len(values), strict=True)
        )
        await self._add(topic, entries)

    def saw(
        self,
        rows: int,
        topics: Iterable[str],
        source: Mapping[str, Span] | None = None,
        marks: Mapping[str, int] | None = None,
        content: bytes = b"",
    ) -> None:
        """Rows of the job that this task has seen, also those it left out, and where they come from.

        `marks`: rows at or below them were left out. `content`: what the rows hold, if that is compared.
        """
        old = self._staged
        self._staged = replace(
            old,
            rows=old.rows + rows,
            topics=tuple(dict.fromkeys((*old.topics, *topics))),
            source=_spanned(old.source, source or {}),
            marks=_lowest(old.marks, marks or {}),
            content=_content((old.rows, old.content), (rows, content)),
        )

    async def close(self) -> Staged:
        """Everything is staged when this returns."""
        for topic, packing in self._packing.items():
            packing.end()
            await self._send(topic, packing, everything=True)
        await self._sent()
        self._closed = True
        return self._staged

    async def abort(self) -> int:
        """Drop what was staged so far: the task has failed. How many messages."""
        self._closed = True
        if self._sending is not None:
            await asyncio.wait((self._sending,))
        return await self._staging._drop(tuple(self._packing), [self.name])

    async def _add_packed(self, topic: str, batches: Iterable[tuple[int, bytes]], messages: int) -> None:
        """Stage batches that somebody else has packed; they have so many messages."""
        packing = await self._packing_of(topic)
        for place, batch in batches:
            packing.ready.append((place, batch))
            packing.size += len(batch)
        self._staged = replace(self._staged, messages=self._staged.messages + messages)
        await self._send(topic, packing)

    async def _add(self, topic: str, entries: list[Entry]) -> None:
        packing = await self._packing_of(topic)
        packing.add(entries, self._endpoint.now_ms())
        self._staged = replace(self._staged, messages=self._staged.messages + len(entries))
        await self._send(topic, packing)

    async def _packing_of(self, topic: str) -> _Packing:
        if self._closed:
            raise UsageError("this segment is closed: begin another")
        packing = self._packing.get(topic)
        if packing is None:
            route = await self._staging._trying(lambda: self._route(topic))
            packing = self._packing[topic] = _Packing(route)
        return packing

    async def _send(self, topic: str, packing: _Packing, *, everything: bool = False) -> None:
        """One call at a time; the next batches are built meanwhile."""
        while packing.size >= _CALL_BYTES or (everything and packing.ready):
            some = packing.take()
            await self._sent()
            self._sending = asyncio.create_task(self._stage(topic, some, self._number))
            self._number += len(some)

    async def _sent(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            await sending

    async def _stage(self, topic: str, some: list[tuple[int, bytes]], number: int) -> None:
        data, places = b"".join(batch for _, batch in some), tuple(place for place, _ in some)
        staging = self._staging
        await staging._trying(
            lambda: self._endpoint.stage(
                topic, staging.query, staging.batch, self.name, number, places, data, staging._client
            )
        )


class _Packing:
    """Messages of one topic on their way into batches."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self._places = [piece.partition_id for piece in route.ranges]
        of_id = {place: at for at, place in enumerate(self._places)}
        self._of_slot = [of_id[piece.partition_id] for piece in route.ranges for _ in range(piece.slots)]
        self._builders: list[BatchBuilder | None] = [None] * len(self._places)
        self._turn = secrets.randbelow(len(self._places))  # where messages without a key go now
        self.ready: list[tuple[int, bytes]] = []
        self.size = 0

    def add(self, entries: Sequence[Entry], now_ms: int) -> None:
        routed: list[list[Entry]] = [[] for _ in self._places]
        adding, of_slot = [some.append for some in routed], self._of_slot
        slot_of = self.route.slot_of
        unkeyed: list[Entry] = []
        for entry in entries:
            key = entry[0]
            if key is None:
                unkeyed.append(entry)
            else:
                adding[of_slot[slot_of(key)]](entry)
        for at, some in enumerate(routed):
            if some:
                self._fill(at, some, now_ms)
        for first in range(0, len(unkeyed), DEFAULTS.batch_messages):
            self._turn = (self._turn + 1) % len(self._places)
            self._fill(self._turn, unkeyed[first : first + DEFAULTS.batch_messages], now_ms)

    def _fill(self, at: int, entries: list[Entry], now_ms: int) -> None:
        done = 0
        while done < len(entries):
            builder = self._builders[at]
            if builder is None:
                builder = self._builders[at] = BatchBuilder("lz4", DEFAULTS.batch_bytes)
            room = DEFAULTS.batch_messages - builder.count
            taken = builder.extend(now_ms, islice(entries, done, done + room))
            done += taken
            if taken < room and done == len(entries):
                return
            self._build(at, builder)

    def _build(self, at: int, builder: BatchBuilder) -> None:
        batch = builder.build()
        self.ready.append((self._places[at], batch))
        self.size += len(batch)
        self._builders[at] = None

    def end(self) -> None:
        for at, builder in enumerate(self._builders):
            if builder is not None and builder.count:
                self._build(at, builder)

    def take(self) -> list[tuple[int, bytes]]:
        """What is staged in one call."""
        taken, size = 0, 0
        while taken < min(len(self.ready), _CALL_BATCHES) and size < _CALL_BYTES:
            size += len(self.ready[taken][1])
            taken += 1
        some, self.ready = self.ready[:taken], self.ready[taken:]
        self.size -= size
        return some


def _check_sizes(values: Sequence[bytes], keys: Sequence[bytes | None] | None) -> None:
    longest = max(map(len, values), default=0)
    longest_key = 0 if keys is None else max((len(key) for key in keys if key is not None), default=0)
    check_longest(longest_key, longest)
    if keys is not None and len(keys) != len(values):
        raise InvalidMessage(f"there are {len(values)} values and {len(keys)} keys")


def check_longest(longest_key: int, longest: int) -> None:
    """MessageTooLarge, for the longest key and the longest value of some rows, which need not be of one."""
    if longest + longest_key > DEFAULTS.max_message_bytes:
        raise MessageTooLarge(
            f"a message has {longest + longest_key:,} bytes, the limit is {DEFAULTS.max_message_bytes:,}: "
            "split it, or store it elsewhere and send where it is"
        )
    if longest_key > DEFAULTS.max_key_bytes:
        raise MessageTooLarge(
            f"a key has {longest_key:,} bytes, the limit is {DEFAULTS.max_key_bytes:,}: use a hash of it"
        )


# ---- what tasks saw, put together ----


def _wish(found: Sequence[Staged]) -> Wish:
    source: dict[str, Span] = {}
    marks: dict[str, int] = {}
    for one in found:
        source, marks = _spanned(source, one.source), _lowest(marks, one.marks)
    segments = tuple((one.segment, one.messages) for one in found if one.messages)
    content = _content(*((one.rows, one.content) for one in found))
    return Wish(segments, sum(one.rows for one in found), source, marks, content)


def _content(*parts: tuple[int, bytes]) -> bytes:
    """Of rows and what they hold; those that have none do not count."""
    return joined(content for rows, content in parts if rows)


def _spanned(one: Mapping[str, Span], other: Mapping[str, Span]) -> dict[str, Span]:
    spans = dict(one)
    for partition, (first, last) in other.items():
        before = spans.get(partition, (first, last))
        spans[partition] = (min(first, before[0]), max(last, before[1]))
    return spans


def _lowest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The marks that all have left out by."""
    return {**one, **{name: min(mark, one.get(name, mark)) for name, mark in other.items()}}


def make(
    endpoint: Endpoint,
    guard: Guard,
    route: Callable[[str], Awaitable[Route]],
    query: str,
    batch: int,
    timeout: Duration,
    client: str = "",
    compare: bool = True,
) -> Staging:
    """For `Connection.staging`."""
    if not isinstance(batch, int) or isinstance(batch, bool) or not 0 <= batch < 2**62:
        raise UsageError(f"batch={batch!r}: batches of a query are whole numbers, counted from 0")
    timeout_ms = duration_ms(timeout, name="timeout")
    return Staging(endpoint, guard, route, check_name(query, "query"), batch, timeout_ms, client, compare)
