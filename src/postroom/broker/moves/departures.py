"""Moving messages from a log to a group's own topic: to the dead letters, and back by redrive (R20); retries
that are far away, through the schedule, to its retry topic (I17); what is set aside, to its slow lane (R42).

The two are not one transaction. The delivery was stamped, durably, with the identity of the append
(I12); the mover appends under that identity and then settles the delivery. Whoever finds a stamped
delivery whose mover went away does the same again: the append recognises a repeat by its sequence. A target
that was sealed meanwhile, without the message, is replaced by its successor: the delivery is stamped again.

A batch that cannot be read becomes one dead letter, wherever its messages were to go: see `unreadable`.

What is set aside together has one identity, one append and one settling: whoever resumes finds all of it, or
nothing. If its target was sealed, each delivery is stamped anew and goes by itself.
"""

from __future__ import annotations

import logging
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

from ...endpoint.values import Verdict
from ...errors import CorruptBatch, PartitionSealed, PostroomError, UnknownFate
from ...model.delivery.delivery import MOVED_TOGETHER, Delivery, Kind, Settlement, Stamp
from ...model.delivery.settlement import uncovered, within
from ...model.messages.batch import BatchBuilder, Record, stored_records
from ...model.policy.settings import Mode, Start
from ...model.topology.names import owner, retry_topic, slow_topic
from ...store.contract import Append, Appended, Group, Store, StoredBatch, Topic, Visit
from ..topology.catalog_cache import CatalogCache
from . import unreadable
from .unreadable import Letter

__all__ = ["FarRetries", "Mover", "SettingAside", "attempts_used", "leads_to_lane", "make_retry_topic"]


_log = logging.getLogger("postroom.broker")

Headers = list[tuple[str, bytes | None]]
Fate = Literal["dead", "lane", "back"]

_ORIGIN = ("postroom-topic", "postroom-partition", "postroom-offset", "postroom-timestamp", "postroom-id")
_DEATH = ("postroom-reason", "postroom-attempts", "postroom-dead-at")
_USED = ("postroom-attempts", "postroom-failures")  # of a far retry: used up before it came there
_WHOLE = 2**31 - 1  # internal appends are exempt from limits on size (I17)


class Mover:
    def __init__(
        self,
        store: Store,
        read: Callable[[int, int, int], list[StoredBatch]],
        append: Callable[[Sequence[Append]], Awaitable[list[Appended | BaseException]]],
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self._store = store
        self._read = read  # (partition id, first, last) → the batches that hold these offsets
        self._append = append  # in this order; returns what became of each
        self._in_thread = in_thread
        self.died: Callable[[str, str, int], None] = lambda topic, group, messages: None  # is told
        self.to_lane: Callable[[Group, int], bool] = lambda group, partition_id: False  # blocking
        self.letter_box: Callable[[Group], int] | None = None  # where its dead letters go; blocking
        self.met_unreadable: Callable[[str], None] = lambda topic: None  # is told

    async def move(
        self, group: Group, partition: int, partition_id: int, leaving: Sequence[Delivery], *, dead: bool
    ) -> int:
        """Finish stamped deliveries. One that fails stays stamped and is taken up again later."""
        origin, moved = (group, partition, partition_id), 0
        fate: Fate = "dead" if dead else "back"
        lanes: set[int] | None = None
        with self._waiting(origin, leaving):
            lanes = await self._in_thread(self._lanes, group, leaving)
        if lanes is None:
            return 0
        aside: dict[int, Delivery] = {}  # by their identity: what goes together
        alone: dict[Fate, list[Delivery]] = {fate: [], "lane": []}
        for delivery in leaving:
            assert delivery.stamp is not None, "only stamped deliveries are moved"
            lane = delivery.stamp.partition_id in lanes
            if lane and delivery.token == delivery.stamp.producer_id:
                aside.setdefault(delivery.token, delivery)
            else:
                alone["lane" if lane else fate].append(delivery)
        for token, delivery in aside.items():
            with self._waiting(origin, [delivery]):
                moved += await self._set_aside(group, partition, partition_id, token)
        for way, deliveries in alone.items():
            for some in _portions(deliveries):
                with self._waiting(origin, some):
                    moved += await self._move(origin, some, way)
        return moved

    def _lanes(self, group: Group, leaving: Sequence[Delivery]) -> set[int]:
        """Those of the partitions that they leave for that are the group's slow lane. Blocking."""
        targets = {delivery.stamp.partition_id for delivery in leaving if delivery.stamp is not None}
        return {target for target in targets if self.to_lane(group, target)}

    @contextmanager
    def _waiting(self, origin: tuple[Group, int, int], leaving: Sequence[Delivery]) -> Iterator[None]:
        """What cannot be moved now is left to whoever finds it later."""
        try:
            yield
        except PostroomError as error:
            where, first = (origin[0].topic, origin[1]), leaving[0].first
            _log.warning("moving %s/%s from offset %d on waits: %s", *where, first, error)

    async def _move(self, origin: tuple[Group, int, int], leaving: Sequence[Delivery], fate: Fate) -> int:
        """Each in an append of its own, under its own identity, in their order; all in one transaction as a
        rule, and settled in one."""
        group, _, partition_id = origin
        built: list[tuple[BatchBuilder, list[Letter]]]
        built = await self._in_thread(self._built_each, origin, leaving, fate)
        stored: list[tuple[Delivery, int]] = []
        ready: list[tuple[Delivery, BatchBuilder]] = []
        for delivery, (builder, letters) in zip(leaving, built, strict=True):
            with self._waiting(origin, [delivery]):
                for letter in letters:
                    await self._keep(origin, delivery, letter)
                if builder.count:
                    ready.append((delivery, builder))
                else:
                    stored.append((delivery, 0))
        outcomes = await self._append([_append_of(delivery, builder) for delivery, builder in ready])
        for (delivery, builder), outcome in zip(ready, outcomes, strict=True):
            with self._waiting(origin, [delivery]):
                if (done := await self._appended(origin, delivery, builder, outcome)) is not None:
                    stored.append((done, builder.count))
        acks = [(one.token, [Settlement(Kind.ACK, one.first, one.last)]) for one, _ in stored]
        if acks:
            await self._in_thread(self._store.progress.visit, group, [Visit(partition_id, acks)])
        for delivery, messages in stored:
            if fate == "dead" and not (delivery.stamp and delivery.stamp.due_at):
                self.died(group.topic, group.name, messages)
        return sum(messages for _, messages in stored)

    async def _appended(
        self,
        origin: tuple[Group, int, int],
        delivery: Delivery,
        builder: BatchBuilder,
        outcome: Appended | BaseException,
    ) -> Delivery | None:
        """The delivery as it was stored in the end, maybe stamped again; None: somebody else moves it."""
        while isinstance(outcome, PartitionSealed):
            again = await self._in_thread(self._restamp, origin[0], origin[2], delivery)
            if again is None:
                return None
            delivery = again
            (outcome,) = await self._append([_append_of(delivery, builder)])
        if isinstance(outcome, BaseException) and not isinstance(outcome, UnknownFate):
            raise outcome  # the former is known: it was stored, with messages that retention took here since
        return delivery

    async def _set_aside(self, group: Group, partition: int, partition_id: int, token: int) -> int:
        """All that has this identity, in one append."""
        found = await self._in_thread(self._store.progress.leaving, group, partition_id, token)
        together = [d for d in found if d.stamp is not None and d.stamp.producer_id == token]
        if not together:
            return 0  # somebody else was faster
        origin = (group, partition, partition_id)
        builder = await self._readable(origin, together, "lane")
        if builder.count:
            (outcome,) = await self._append([_append_of(together[0], builder)])
            if isinstance(outcome, PartitionSealed):
                again = [await self._in_thread(self._restamp, group, partition_id, one) for one in together]
                return await self._move(origin, [one for one in again if one is not None], "lane")
            await self._appended(origin, together[0], builder, outcome)
        acks = [Settlement(Kind.ACK, one.first, one.last) for one in together]
        await self._in_thread(self._store.progress.settle, group, partition_id, token, acks)
        return builder.count

    async def _readable(
        self, origin: tuple[Group, int, int], leaving: Sequence[Delivery], fate: Fate
    ) -> BatchBuilder:
        """Their messages, as they are stored where they go; what cannot be read is a dead letter by then."""
        builder: BatchBuilder
        letters: list[Letter]
        builder, letters = await self._in_thread(self._built, origin, leaving, fate)
        for letter in letters:
            await self._keep(origin, leaving[0], letter)
        return builder

    def _built_each(
        self, origin: tuple[Group, int, int], leaving: Sequence[Delivery], fate: Fate
    ) -> list[tuple[BatchBuilder, list[Letter]]]:
        source = _Source(self._read, origin[2])
        return [self._built(origin, [one], fate, source) for one in leaving]

    def _built(
        self,
        origin: tuple[Group, int, int],
        leaving: Sequence[Delivery],
        fate: Fate,
        source: _Source | None = None,
    ) -> tuple[BatchBuilder, list[Letter]]:
        group, partition, partition_id = origin
        where = (group.topic, partition, partition_id)
        source = source or _Source(self._read, partition_id)
        now, builder, letters = self._store.now_ms(), BatchBuilder(max_bytes=_WHOLE), list[Letter]()
        for delivery in leaving:
            for batch in source.batches(delivery):
                try:
                    found = source.records(batch, delivery)
                except CorruptBatch as error:
                    letters.append(unreadable.letter_of(batch, error, where, delivery.spent, now))
                    continue
                for record in found:
                    if fate == "back" and unreadable.is_letter(record):
                        letters.append(unreadable.again(record))
                        continue
                    headers = _origin(record, group.topic, partition, partition_id)
                    headers += _told(record, delivery, now, fate)
                    builder.append(record.timestamp, record.key, record.value, headers)
        return builder, letters

    async def _keep(self, origin: tuple[Group, int, int], delivery: Delivery, letter: Letter) -> None:
        group, _, partition_id = origin
        assert delivery.stamp is not None, "only stamped deliveries are moved"
        box = delivery.stamp.partition_id
        if self.letter_box is not None:
            box = await self._in_thread(self.letter_box, group)
        identity = letter.identity(group, partition_id)
        (appended,) = await self._append([Append(box, letter.build(identity))])
        if isinstance(appended, UnknownFate):
            return  # this identity is known: it was stored
        if isinstance(appended, BaseException):
            raise appended
        if letter.said and not appended.duplicate:
            _log.error(
                "%s cannot be read: the batch is now a dead letter of group %r, and the group goes on; check "
                "the disk and the backups, and run `postroom doctor --deep`",
                letter.said,
                group.name,
            )
            self.died(group.topic, group.name, 1)
            self.met_unreadable(group.topic)

    def _restamp(self, group: Group, partition_id: int, delivery: Delivery) -> Delivery | None:
        assert delivery.stamp is not None, "only stamped deliveries are moved"
        target = delivery.stamp.partition_id
        for topic in self._store.catalog.topics():
            if any(piece.partition_id == target for piece in topic.route.sealed):
                stamp = Stamp(secrets.randbits(62), topic.route.ranges[0].partition_id, delivery.stamp.due_at)
                return self._store.progress.restamp(group, partition_id, delivery, stamp)
        raise PartitionSealed("its target is sealed and has no successor yet")


class _Source:
    """Where messages leave from. Neighbours that leave one by one share a batch: it is read and opened once.

    Blocking; for one portion, since the batch is as old as when it was read.
    """

    def __init__(self, read: Callable[[int, int, int], list[StoredBatch]], partition_id: int) -> None:
        self._read, self._partition_id = read, partition_id
        self._last: StoredBatch | None = None
        self._opened: tuple[StoredBatch, list[Record]] | None = None

    def batches(self, delivery: Delivery) -> list[StoredBatch]:
        last = self._last
        if last is not None and last.base_offset <= delivery.first and delivery.last <= last.last_offset:
            return [last]
        found = self._read(self._partition_id, delivery.first, delivery.last)
        self._last = found[-1] if found else None
        return found

    def records(self, batch: StoredBatch, delivery: Delivery) -> list[Record]:
        """What of the batch the delivery has. CorruptBatch: it cannot be read."""
        if self._opened is None or self._opened[0] is not batch:
            self._opened = batch, list(stored_records(batch))
        records = self._opened[1]
        low = bisect_left(records, delivery.first, key=lambda record: record.offset)
        return records[low : bisect_right(records, delivery.last, key=lambda record: record.offset)]


def _append_of(delivery: Delivery, builder: BatchBuilder) -> Append:
    assert delivery.stamp is not None, "only stamped deliveries are moved"
    stamp = delivery.stamp
    return Append(stamp.partition_id, builder.build(stamp.producer_id, 0, 0), due_at=stamp.due_at)


def _portions(leaving: Sequence[Delivery]) -> Iterator[list[Delivery]]:
    """Those that are in memory at the same time: messages may be large."""
    some: list[Delivery] = []
    for delivery in leaving:
        if some and sum(one.size for one in some) + delivery.size > MOVED_TOGETHER:
            yield some
            some = []
        some.append(delivery)
    if some:
        yield some


def _origin(record: Record, topic: str, partition: int, partition_id: int) -> Headers:
    """The message's headers and where it came from at first; a second move keeps the first origin."""
    kept = [(name, value) for name, value in record.headers if name not in (*_DEATH, *_USED)]
    have = {name for name, _ in kept}
    values = (topic, partition, record.offset, record.timestamp, f"{partition_id}-{record.offset}")
    if _ORIGIN[0] in have:
        return kept
    return kept + [(n, str(v).encode()) for n, v in zip(_ORIGIN, values, strict=True) if n not in have]


def _told(record: Record, delivery: Delivery, now: int, fate: Fate) -> Headers:
    """What happened to it so far; one that goes back begins anew."""
    if delivery.stamp is not None and delivery.stamp.due_at:
        return _used(record, delivery)
    if fate == "lane" and (delivery.spent or any(attempts_used(record))):
        return _used(record, delivery)
    return _death(record, delivery, now) if fate == "dead" else []


def _death(record: Record, delivery: Delivery, now: int) -> Headers:
    values = (delivery.reason, attempts_used(record)[0] + delivery.spent, now)
    return [(name, str(value).encode()) for name, value in zip(_DEATH, values, strict=True)]


def _used(record: Record, delivery: Delivery) -> Headers:
    attempts, failures = attempts_used(record)
    values = (attempts + delivery.spent, failures + delivery.failures)
    return [(name, str(value).encode()) for name, value in zip(_USED, values, strict=True)]


def attempts_used(record: Record) -> tuple[int, int]:
    """Attempts, and failures among them that count, before a message came here by a far retry."""
    own = {name: value for name, value in record.headers if name in _USED and _is_number(value)}
    if _USED[1] not in own:
        return 0, 0
    return int(own.get(_USED[0]) or 0), int(own[_USED[1]] or 0)


def _is_number(value: bytes | None) -> bool:
    """Of a size that int takes, too: whoever sends may write what it likes there."""
    return value is not None and len(value) <= 9 and value.isdigit()


class FarRetries:
    """Retries that are far away leave through the schedule for the group's retry topic (I17).

    A retry in some minutes waits as a delivery of its partition. One further away than `far_retry_ms` would
    hold the group's committed offset, and with it the log, for as long: so it is stamped, and the mover
    schedules it on the topic `<topic>.<group>.retry`, which that group alone reads; one of its slow lane
    comes back there. Ordered groups keep failing messages in place.

    The attempts it has used go with it in headers. The deliveries of the retry topic do not know them, and
    the store does not open batches: so when it fails again there, its headers are read here, and what was
    used before counts towards `max_attempts`. Only retries are counted over all of its life; what its
    consumers do to it by going away (I14) counts anew on the retry topic. Of a retry only what its token
    holds is read: whoever settles names a range, and it may be any. `read` returns the batches that hold the
    offsets of a partition. Blocking.
    """

    def __init__(
        self, catalog: CatalogCache, read: Callable[[int, int, int], list[StoredBatch]], far_ms: int
    ) -> None:
        self._catalog = catalog
        self._read = read
        self._far_ms = far_ms

    def of(
        self,
        retry: Settlement,
        group: Group,
        partition_id: int,
        held: Callable[[], Sequence[Delivery]],
        now: int,
    ) -> list[Settlement]:
        """What a retry in that group comes to: itself, with what it has used before, here or later.

        `held`: what its token holds, lowest offset first.
        """
        if group.settings.mode == "ordered":
            return [retry]
        found = self._with_used(retry, partition_id, held()) if _is_own_topic(group) else [retry]
        if retry.visible_at - now <= self._far_ms:
            return found
        target = self._target(group).route.ranges[0].partition_id
        return [
            replace(one, later=Stamp(secrets.randbits(62), target, due_at=one.visible_at)) for one in found
        ]

    def _target(self, group: Group) -> Topic:
        if _is_own_topic(group):
            return self._catalog.topic(group.topic)
        sources = self._catalog.sources(group.topic, group.name)
        return sources[1][0] if len(sources) > 1 else make_retry_topic(self._catalog, group)

    def _with_used(self, retry: Settlement, partition_id: int, held: Sequence[Delivery]) -> list[Settlement]:
        """A settlement for each message that is held: they may have come with different numbers.

        What is not held stays in ranges, and is told to be lost.
        """
        mine = within((retry.first, retry.last), held)
        found = [replace(retry, first=a, last=z) for a, z in uncovered((retry.first, retry.last), mine)]
        for delivery in mine:
            first, last = max(delivery.first, retry.first), min(delivery.last, retry.last)
            used: dict[int, int] = {}
            for batch in self._read(partition_id, first, last):
                with suppress(CorruptBatch):  # then it is not known; whoever moves it says so
                    used |= {record.offset: attempts_used(record)[1] for record in stored_records(batch)}
            found += (
                replace(retry, first=offset, last=offset, used=used.get(offset, 0))
                for offset in range(first, last + 1)
            )
        return found


def make_retry_topic(catalog: CatalogCache, group: Group) -> Topic:
    """The group's retry topic and the group that reads it, with the settings of the group itself."""
    mode: Mode = "ordered" if group.settings.mode == "ordered" else "shared"
    fresh = replace(group.settings, mode=mode, start=Start(), expires_ms=0)
    return catalog.make_internal(retry_topic(group.topic, group.name), group.name, fresh)


def _is_own_topic(group: Group) -> bool:
    return group.topic.endswith((f".{group.name}.retry", f".{group.name}.slow"))


class SettingAside:
    """Messages of slow sources are set aside: moved to the group's lane before they are tried (R42).

    Decides where they go, and which of them go together: many small ranges of one settling have one stamp,
    and so one append and one settling in the end, however many they are (I12). A message that cannot be set
    aside, since the policy is gone or it is in the lane already, is released: somebody tries it. For one part
    that is settled; blocking.
    """

    def __init__(self, catalog: CatalogCache, group: Group) -> None:
        self._catalog, self._group = catalog, group
        self._stamp: Stamp | None = None
        self._messages = 0

    def settlement(self, verdict: Verdict) -> Settlement:
        messages = verdict.last - verdict.first + 1
        if self._stamp is None or self._messages + messages > MOVED_TOGETHER:
            target = self._target()
            if target is None:
                return Settlement(Kind.RELEASE, verdict.first, verdict.last)
            self._stamp = Stamp(secrets.randbits(62), target.route.ranges[0].partition_id)
            self._messages = 0
        self._messages += messages
        return Settlement(Kind.LANE, verdict.first, verdict.last, stamp=self._stamp)

    def _target(self) -> Topic | None:
        topic, name = _base(self._group)
        group = self._catalog.group(topic, name)
        if not group.settings.slow_lane.on or self._group.topic == slow_topic(topic, name):
            return None
        lane = self._catalog.lane(topic, name)
        return make_lane(self._catalog, group) if lane is None else lane[0]


def make_lane(catalog: CatalogCache, group: Group) -> Topic:
    """The group's lane and the group that reads it, with the settings of the group itself."""
    fresh = replace(group.settings, start=Start(), expires_ms=0)
    return catalog.make_internal(slow_topic(group.topic, group.name), group.name, fresh)


def leads_to_lane(catalog: CatalogCache, group: Group, partition_id: int) -> bool:
    """Whether what is stamped for that partition goes to the group's lane. Blocking."""
    lane = catalog.lane(*_base(group))
    return lane is not None and any(p.partition_id == partition_id for p in lane[0].route.partitions)


def _base(group: Group) -> tuple[str, str]:
    """The topic and the group that this is about: it may be one of the group's own topics."""
    return owner(group.topic) or (group.topic, group.name)
