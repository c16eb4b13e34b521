"""What a connection can do about topics, routes and groups.

Turns friendly arguments into settings, and the endpoint's answers into what users read. Must never make a
topic by itself: a mistyped name is answered with the names that are close, and the call that would make it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from dataclasses import replace
from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from ..address import FIRST_SHARD
from ..config import DEFAULTS
from ..endpoint.endpoint import Endpoint
from ..endpoint.values import GroupInfo, Lag, PrincipalInfo, RateInfo, ResetPlan, ShardInfo, TopicInfo
from ..errors import GroupExists, InvalidSetting, UnknownTopic
from ..model.audit import AuditEntry
from ..model.messages.slot import Keys
from ..model.policy.rate import Rate, group_rate, producer_rate, topic_rate
from ..model.policy.settings import Exhausted, GroupSettings, GroupWish, Keep, Mode, Storage, TopicSettings
from ..model.policy.slow_lane import LaneInfo, SlowLane, as_policy
from ..model.topology.names import check_group, check_topic
from ..model.topology.route import Change, Range, Route
from ..units import Duration, duration_ms, size_bytes
from .consumer.delayed import DelayedMessages
from .consumer.reading import Position, as_start
from .consumer.schedules import Schedules
from .failed import FailedMessages
from .owner_check import Guard

__all__ = ["Admin", "RateLimits", "group_wish"]


class RateLimits:
    """The part of a connection that sets rate limits, takes them away and lists them (R40).

    Turns friendly arguments into a `Rate`. Must never guess what a limit is about: a topic, a group of one,
    or a producer, and exactly one of them.
    """

    _endpoint: Endpoint
    _queue: str
    _guard: Guard

    if TYPE_CHECKING:

        async def _explained(self, topic: str, call: Awaitable[Any]) -> Any: ...

    async def limit_rate(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        producer: str | None = None,
        messages_per_s: float | None = None,
        bytes_per_s: int | str | None = None,
    ) -> None:
        """Limit what a topic takes, a group of it is handed, or a producer sends, in a second.

        `limit_rate(topic="orders", messages_per_s=1000, bytes_per_s="10MB")`; a `producer` is the `client_id`
        of a connection, or on a served broker its principal. All who send or receive share it, in all
        processes. Senders are slowed, never refused, until their own time-out. The call says all there is to
        the limit: what is left out, None or 0 is not limited, and without both there is no limit any more. It
        is in force everywhere within a second.
        """
        self._guard.check()
        rate = _rate(topic, group, producer, messages_per_s, bytes_per_s)
        await self._explained(topic or "", self._endpoint.set_rate(rate))

    async def rates(self) -> list[RateInfo]:
        """All limits, and the wait that each imposes now."""
        self._guard.check()
        return await self._endpoint.rates()


def _rate(
    topic: str | None,
    group: str | None,
    producer: str | None,
    messages_per_s: float | None,
    bytes_per_s: int | str | None,
) -> Rate:
    if (topic is None) == (producer is None) or (group is not None and topic is None):
        raise InvalidSetting(
            'a limit is on a topic (topic="orders"), on a group of it (topic="orders", group="billing"), '
            'or on a producer (producer="shop")'
        )
    for name, value in (("topic", topic), ("group", group), ("producer", producer)):
        if value is not None and not isinstance(value, str):
            raise InvalidSetting(f"{name}={value!r}: its name, as text")
    messages: float = 0 if messages_per_s is None else messages_per_s
    size = 0 if bytes_per_s is None else size_bytes(bytes_per_s, name="bytes_per_s")
    if producer is not None:
        return producer_rate(producer, messages, size).check()
    assert topic is not None, "one of them was given"
    return (
        group_rate(topic, group, messages, size) if group is not None else topic_rate(topic, messages, size)
    ).check()


def _for_kafka(partitions: int | None, kafka_partitions: int | None) -> int | None:
    """Return how many partitions a topic gets: those that Kafka clients are to see, if it is for them."""
    if not kafka_partitions:
        return partitions
    if partitions not in (None, kafka_partitions):
        raise InvalidSetting(
            f"partitions={partitions!r} and kafka_partitions={kafka_partitions!r}: a topic for Kafka clients "
            "has as many partitions as they see; leave partitions= out"
        )
    return kafka_partitions


T = TypeVar("T")

_MOST_ENTRIES = 1000  # of the audit log, in one answer


class _NotGiven(str):
    """A default that can be told from what a caller has written."""


_DEFAULT = _NotGiven("7d")


class Admin(FailedMessages, DelayedMessages, RateLimits, Schedules):
    """The part of a connection that keeps no state of its own."""

    _endpoint: Endpoint
    _queue: str
    _guard: Guard

    # ---- topics ----

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        storage: Storage | None = None,
        retention: Duration | None = _DEFAULT,
        retention_bytes: int | str | None = None,
        keep: Keep | None = None,
        drop_settled: bool | None = None,
        dedup_window: Duration | None = None,
        max_backlog: int | None = None,
        max_backlog_bytes: int | str | None = None,
        kafka_partitions: int | None = None,
        keys: Keys | None = None,
        exist_ok: bool = False,
    ) -> TopicInfo:
        """Make a topic. `retention=None` keeps messages however old.

        `exist_ok` takes one that is there, if it has what is given here; else TopicConflict says what
        differs. Partitions that were split or merged since do not count: those it was made with do.
        `storage="volatile"` is fast and lost with a crash of the machine. Once the slowest group is
        `max_backlog` messages (or `max_backlog_bytes`) behind, sends raise BacklogFull until it catches up.
        With `dedup_window="10m"` a message whose id was sent within that time, or that some group has not
        settled yet, is not stored again: its receipt says `duplicate`. Equal ids need equal keys, or none.
        `kafka_partitions=8` makes a topic that Kafka clients may send to: it has 8 partitions for ever, which
        can be moved, and neither split nor merged. `keys=` says by whose rule a key has its partition there,
        so that native producers and Kafka clients agree: "java", "librdkafka", or "postroom", which no Kafka
        client knows.
        """
        self._guard.check()
        partitions = _for_kafka(partitions, kafka_partitions)
        given = _topic_wish(
            None if isinstance(retention, _NotGiven) else (retention or 0),
            retention_bytes, keep, drop_settled, dedup_window, max_backlog, max_backlog_bytes,
        )  # fmt: skip
        given |= {} if storage is None else {"storage": storage}
        given |= {} if kafka_partitions is None else {"kafka_partitions": kafka_partitions}
        given |= {} if keys is None else {"keys": keys}
        count = DEFAULTS.partitions if partitions is None else partitions
        info = await self._endpoint.create_topic(check_topic(name), TopicSettings(**given), count, exist_ok)
        if exist_ok:
            differ = await self._differ(info, partitions)
            info.settings.check(given, topic=name, partitions=differ)
        return info

    async def _differ(self, info: TopicInfo, partitions: int | None) -> tuple[int, int] | None:
        """How many partitions it has and how many were asked for, unless it was made with as many."""
        if partitions in (None, info.partitions):
            return None
        first = (await self._endpoint.route_history(info.name))[0]
        return None if len(first.ranges) == partitions else (info.partitions, partitions)

    async def topics(self, *, internal: bool = False) -> list[TopicInfo]:
        """All topics; with `internal` also those that belong to groups (dead letters, retries)."""
        self._guard.check()
        return [info for info in await self._endpoint.topics() if internal or not info.internal]

    async def topic(self, name: str) -> TopicInfo:
        self._guard.check()
        return await self._explained(name, self._endpoint.topic(name))

    async def alter_topic(
        self,
        name: str,
        *,
        retention: Duration | None = None,
        retention_bytes: int | str | None = None,
        keep: Keep | None = None,
        drop_settled: bool | None = None,
        dedup_window: Duration | None = None,
        max_backlog: int | None = None,
        max_backlog_bytes: int | str | None = None,
    ) -> TopicInfo:
        """Change what is given; None leaves it. 0 means no limit, and for `dedup_window` that ids are not
        looked at. Producers see a new window within about two seconds."""
        before = await self.topic(name)
        changes = _topic_wish(
            retention, retention_bytes, keep, drop_settled, dedup_window, max_backlog, max_backlog_bytes
        )
        return await self._endpoint.alter_topic(name, replace(before.settings, **changes))

    async def delete_topic(self, name: str) -> None:
        self._guard.check()
        await self._explained(name, self._endpoint.delete_topic(check_topic(name)))

    async def purge(self, name: str) -> int:
        """Drop all messages of a topic, for every group, delayed ones too; returns how many there were."""
        self._guard.check()
        return await self._explained(name, self._endpoint.purge(name))

    async def split(self, topic: str, partition: int, *, at: int | None = None) -> Route:
        """Two partitions in the place of one, live and in order; the second begins with slot `at`.

        By default in the middle. RouteConflict if another change of the topic is under way.
        """
        self._guard.check()
        return _named(await self._explained(topic, self._endpoint.split(topic, partition, at)))

    async def merge(self, topic: str, one: int, other: int) -> Route:
        """One partition in the place of two neighbours, live and in order."""
        self._guard.check()
        return _named(await self._explained(topic, self._endpoint.merge(topic, one, other)))

    async def move(self, topic: str, partition: int, *, shard: str | None = None) -> Route:
        """The same range of slots on another shard, live and in order; None: the emptiest one."""
        self._guard.check()
        return _named(await self._explained(topic, self._endpoint.move(topic, partition, shard)))

    async def route(self, topic: str) -> Route:
        """Which partition takes which slots, and on which shard it is; `away`: those that do not answer."""
        self._guard.check()
        return _named(await self._explained(topic, self._endpoint.route(topic)))

    async def route_history(self, topic: str) -> list[Route]:
        """Every version of the route, the oldest first: ranges only, and partitions of them may be gone."""
        self._guard.check()
        return [_named(one) for one in await self._explained(topic, self._endpoint.route_history(topic))]

    async def route_change(self, topic: str) -> Change | None:
        """The change of the route that is under way; None: there is none."""
        self._guard.check()
        change = await self._explained(topic, self._endpoint.route_change(topic))
        if change is None:
            return None
        return replace(change, seals=_ranges(change.seals), opens=_ranges(change.opens))

    async def offsets(self, topic: str, *, at: Position = "latest") -> dict[int, int]:
        """By partition, the offset at the end, at "earliest" or at a time; sealed partitions are included."""
        self._guard.check()
        start = as_start(at, name="at")
        start.check_past(self._endpoint.now_ms(), name="at")
        found = await self._explained(topic, self._endpoint.resolve(topic, start))
        numbers = {r.partition_id: r.partition for r in (await self.route(topic)).partitions}
        return {numbers[one]: offset for one, offset in found.items() if one in numbers}

    # ---- shards ----

    async def shards(self) -> list[ShardInfo]:
        """The databases of the queue (`connect(url, shards=)`), and what each of them holds."""
        self._guard.check()
        return await self._endpoint.shards()

    async def drain_shard(self, name: str) -> ShardInfo:
        """Take a shard out: it gets no new partitions, and every one that is there is moved to others, live.

        Returns when they are moved. `shards()` says when the shard is empty: when groups have read what was
        stored there, and delayed messages were due. Then it may be left out of `shards=`. Its database has
        to be up for all of this. `open_shard` lets it take partitions again.
        """
        self._guard.check()
        return await self._endpoint.drain_shard(name)

    async def open_shard(self, name: str) -> ShardInfo:
        """Let a shard that was drained take new partitions again."""
        self._guard.check()
        return await self._endpoint.open_shard(name)

    # ---- who changed what ----

    async def audit_log(
        self,
        *,
        topic: str | None = None,
        who: str | None = None,
        since: datetime | None = None,
        limit: int = 100,
        before: int | None = None,
        after: int | None = None,
    ) -> list[AuditEntry]:
        """Administrative actions, the newest first: who did what, when, from where, and what it changed.

        Only those on a topic, by a principal or user, or since a moment, if that is given. An answer has at
        most 1,000: `before=entries[-1].id` goes on. `after=` shows what came since an entry. A bounded number
        is kept, and for a bounded time. On a served broker it takes `manage:*`.
        """
        self._guard.check()
        if not isinstance(limit, int) or limit < 1:
            raise InvalidSetting(f"limit={limit!r}: a number of entries, from 1 to 1,000")
        since_ms = 0 if since is None else max(0, as_start(since).time_ms)
        return await self._endpoint.audit_log(
            min(limit, _MOST_ENTRIES), topic or "", who or "", since_ms, before or 0, after or 0
        )

    async def principals(self) -> list[PrincipalInfo]:
        """Who may use the served brokers of this queue, and for what. On a served broker: `manage:*`."""
        self._guard.check()
        return await self._endpoint.principals()

    # ---- groups ----

    async def create_group(
        self,
        topic: str,
        group: str,
        *,
        mode: Mode | None = None,
        order: str | None = None,
        start: Position | None = None,
        lease: Duration | None = None,
        max_attempts: int | None = None,
        exhausted: Exhausted | None = None,
        max_hold: Duration | None = None,
        expires: Duration | None = None,
        slow_lane: SlowLane | bool | None = None,
        exist_ok: bool = False,
    ) -> GroupInfo:
        """Make a group before its first consumer does, for instance to fix where it starts.

        `exist_ok` takes one that is there, if it has what is given here; else GroupConflict says what
        differs.
        A group that nobody used for `expires` is forgotten, unless dead letters wait in it; 0: never. With
        `slow_lane`, sources that fail or take long are read apart, in a share of the handlers' time.
        """
        self._guard.check()
        wish = group_wish(mode, order, start, lease, max_attempts, exhausted, max_hold, expires, slow_lane)
        try:
            return await self._explained(topic, self._endpoint.create_group(topic, check_group(group), wish))
        except GroupExists:
            if not exist_ok:
                raise
        found = [info for info in await self._endpoint.groups(topic) if info.name == group]
        if not found:  # it was forgotten since
            return await self._explained(topic, self._endpoint.create_group(topic, group, wish))
        wish.check(found[0].settings, topic=topic, group=group)
        return found[0]

    async def groups(self, topic: str) -> list[GroupInfo]:
        self._guard.check()
        return await self._explained(topic, self._endpoint.groups(topic))

    async def alter_group(
        self,
        topic: str,
        group: str,
        *,
        lease: Duration | None = None,
        max_attempts: int | None = None,
        exhausted: Exhausted | None = None,
        max_hold: Duration | None = None,
        expires: Duration | None = None,
        slow_lane: SlowLane | bool | None = None,
    ) -> GroupInfo:
        """Change what is given; None leaves it. Where a group stands is changed by `reset`.

        What is done to a broadcast group is done to the groups of all its members. `slow_lane=False`: none.
        """
        self._guard.check()
        wish = group_wish(None, None, None, lease, max_attempts, exhausted, max_hold, expires, slow_lane)
        return await self._explained(topic, self._endpoint.alter_group(topic, group, wish))

    async def pause(self, topic: str, group: str) -> GroupInfo:
        """Hand out nothing more to the group until `resume`."""
        self._guard.check()
        return await self._explained(topic, self._endpoint.pause(topic, group, True))

    async def resume(self, topic: str, group: str) -> GroupInfo:
        self._guard.check()
        return await self._explained(topic, self._endpoint.pause(topic, group, False))

    async def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Forget a group and its progress; one with live members only if forced."""
        self._guard.check()
        await self._explained(topic, self._endpoint.delete_group(topic, group, force))

    async def lag(self, topic: str, group: str) -> Lag:
        self._guard.check()
        return await self._explained(topic, self._endpoint.lag(topic, group))

    async def lanes(self, topic: str, group: str) -> LaneInfo:
        """The group's slow sources, since when and why, and how many messages wait in its lane."""
        self._guard.check()
        return await self._explained(topic, self._endpoint.lanes(topic, group))

    async def reset(
        self, topic: str, group: str, *, to: Position, force: bool = False, dry_run: bool = False
    ) -> ResetPlan:
        """Move a group to "earliest", "latest", a time or {partition: offset}; a live one only if forced.

        Offsets move the partitions that they name: in the others the group stays where it is, with what is
        in flight or waits for a retry. The answer has a line for each partition, before and after, with how
        many messages come again or are skipped; with `dry_run` nothing is done, and it says what would be.
        """
        self._guard.check()
        start = as_start(to, name="to")
        return await self._explained(topic, self._endpoint.reset(topic, group, start, force, dry_run))

    async def convert_group(
        self, topic: str, group: str, mode: Mode, *, force: bool = False, dry_run: bool = False
    ) -> ResetPlan:
        """Make a native group one of Kafka clients (`mode="kafka"`), or one of theirs "shared" or "ordered".

        It goes on where it was, and nothing is passed over. What a shared group has settled above its lowest
        unsettled message comes again for Kafka clients, as the answer says (`again`). Nobody may be using it;
        dead letters and retries have to be gone, or are lost with `force`.
        """
        self._guard.check()
        return await self._explained(topic, self._endpoint.convert_group(topic, group, mode, force, dry_run))

    # ---- help ----

    async def _explained(self, topic: str, call: Awaitable[T]) -> T:
        """The call's answer; where it does not know the topic, say what was probably meant."""
        try:
            return await call
        except UnknownTopic as error:
            if "close" in error.details:  # the broker has looked, among the names that may be seen
                if error.details.get("topic") != topic:
                    raise
                close = list(error.details["close"])
            else:
                names = [info.name for info in await self._endpoint.topics() if not info.internal]
                if topic in names:
                    raise
                close = get_close_matches(str(topic), names, n=3, cutoff=0.6)
            meant = (
                f"did you mean {' or '.join(map(repr, close))}? Otherwise"
                if close
                else "topics are not made by"
            )
            hint = "make it first:" if close else "themselves, make it first:"
            raise UnknownTopic(
                f"there is no topic {topic!r}: {meant} {hint} await mq.create_topic({topic!r})",
                topic=topic,
                close=close,
                queue=self._queue,
            ) from error


def group_wish(
    mode: Mode | None,
    order: str | None,
    start: Position | None,
    lease: Duration | None,
    max_attempts: int | None,
    exhausted: Exhausted | None,
    max_hold: Duration | None = None,
    expires: Duration | None = None,
    slow_lane: SlowLane | bool | None = None,
) -> GroupWish:
    wish = GroupWish(
        mode=mode,
        order=order,
        start=None if start is None else as_start(start),
        lease_ms=None if lease is None else duration_ms(lease, name="lease"),
        max_attempts=max_attempts,
        exhausted=exhausted,
        max_hold_ms=None if max_hold is None else duration_ms(max_hold, name="max_hold"),
        expires_ms=None if expires is None else duration_ms(expires, name="expires"),
        slow_lane=as_policy(slow_lane),
    )
    wish.over(GroupSettings())  # refuses what no group can have
    return wish


def _topic_wish(
    retention: Duration | None,
    retention_bytes: int | str | None,
    keep: Keep | None,
    drop_settled: bool | None,
    dedup_window: Duration | None,
    max_backlog: int | None,
    max_backlog_bytes: int | str | None,
) -> dict[str, Any]:
    """The settings that are given: not None."""
    asked: dict[str, Any] = {
        "retention_ms": None if retention is None else duration_ms(retention, name="retention"),
        "retention_bytes": None
        if retention_bytes is None
        else size_bytes(retention_bytes, name="retention_bytes"),
        "keep": keep,
        "drop_settled": None if drop_settled is None else _flag(drop_settled, "drop_settled"),
        "dedup_ms": None if dedup_window is None else duration_ms(dedup_window, name="dedup_window"),
        "max_backlog": None if max_backlog is None else _messages(max_backlog, "max_backlog"),
        "max_backlog_bytes": None
        if max_backlog_bytes is None
        else size_bytes(max_backlog_bytes, name="max_backlog_bytes"),
    }
    return {setting: value for setting, value in asked.items() if value is not None}


def _flag(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidSetting(f"{name}={value!r}: choose True or False")


def _messages(value: object, name: str) -> int:
    if type(value) is int and value >= 0:
        return value
    raise InvalidSetting(f"{name}={value!r}: a whole number of messages from 1 up; 0 means no limit")


def _named(route: Route) -> Route:
    """With the names of shards that people use: within the store the first one has none."""
    return replace(route, ranges=_ranges(route.ranges), sealed=_ranges(route.sealed))


def _ranges(pieces: Iterable[Range]) -> tuple[Range, ...]:
    return tuple(piece if piece.shard else replace(piece, shard=FIRST_SHARD) for piece in pieces)
