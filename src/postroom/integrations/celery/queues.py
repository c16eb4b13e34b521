"""Queues: the topics and groups that stand for queues and their bindings, made when they are declared.

Decides what a topic is made with. A queue is durable, keeps what its group has not settled however old, and
drops what it has: it is a queue, and no history. Replies and events are volatile, and their groups are
forgotten when nobody reads them. A topic that is there already is taken as it is: whoever wants more
partitions, or history, makes it first. Must never delete a queue that somebody reads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kombu.transport.virtual.exchange import TopicExchange

from ...client.connection import Connection
from ...config import DEFAULTS
from ...errors import GroupExists, TopicExists, UnknownGroup, UnknownTopic
from . import naming

__all__ = ["Binding", "Options", "Queue", "Source", "bind", "declare", "delete", "length", "sweep"]

log = logging.getLogger("postroom.celery")

_KEPT = "1d"  # what nobody read of replies and events
_IDLE = "10m"  # a queue for replies or events that nobody has read for so long is forgotten


@dataclass(frozen=True, slots=True)
class Options:
    """What `broker_transport_options` says about queues."""

    lease: Any = None
    partitions: int = 1
    max_attempts: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        known = {name: given[name] for name in ("lease", "partitions", "max_attempts") if name in given}
        return cls(**known)

    @property
    def of_group(self) -> dict[str, Any]:
        wished = {"lease": self.lease, "max_attempts": self.max_attempts}
        return {name: value for name, value in wished.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Binding:
    exchange: str
    kind: str  # of the exchange: "direct", "topic" or "fanout"
    key: str

    @property
    def topic(self) -> str:
        if self.kind == "direct":
            return naming.key_topic(self.exchange, self.key)
        return naming.exchange_topic(self.exchange)


@dataclass(frozen=True, slots=True)
class Source:
    """A topic that a queue is read from, and which of its messages are the queue's."""

    topic: str
    group: str
    temporary: bool
    takes: Callable[[str], bool] = field(default=lambda key: True, compare=False)


@dataclass(slots=True)
class Queue:
    name: str
    temporary: bool = False
    idle: Any = _IDLE  # temporary: forgotten after so long
    bindings: set[Binding] = field(default_factory=set)
    own: bool = True  # it has a topic of its own

    @property
    def topic(self) -> str:
        return naming.queue_topic(self.name, temporary=self.temporary)

    def sources(self) -> list[Source]:
        found = [Source(self.topic, naming.QUEUE_GROUP, self.temporary)] if self.own else []
        group = naming.queue_group(self.name)
        for topic in sorted({binding.topic for binding in self.bindings} - {self.topic}):
            patterns = [b.key for b in self.bindings if b.topic == topic and b.kind == "topic"]
            found.append(Source(topic, group, self.temporary, _taking(patterns)))
        return found


def _taking(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return what tells whether one of these patterns of a topic exchange fits a routing key."""
    made = [re.compile(_pattern(pattern)) for pattern in patterns]
    return (lambda key: any(one.match(key) for one in made)) if made else (lambda key: True)


def _pattern(key: str) -> str:
    return TopicExchange(None).key_to_pattern(key)  # type: ignore[no-any-return]


def idle_of(arguments: Mapping[str, Any] | None) -> Any:
    """Return after how long a queue is forgotten: AMQP's `x-expires`, in milliseconds."""
    given = (arguments or {}).get("x-expires")
    return _IDLE if given is None else max(DEFAULTS.tuning.client.reply_idle_s, float(given) / 1000)


async def declare(mq: Connection, queue: Queue, options: Options) -> None:
    if queue.topic != queue.name and not queue.temporary:
        log.info("queue %r is the topic %r: its name is not allowed for a topic", queue.name, queue.topic)
    if queue.temporary:
        await _topic(mq, queue.topic, partitions=1, storage="volatile", retention=_KEPT, keep="limits")
        await _group(mq, queue.topic, naming.QUEUE_GROUP, expires=queue.idle)
        return
    await _topic(mq, queue.topic, partitions=options.partitions, retention=None, drop_settled=True)
    await _group(mq, queue.topic, naming.QUEUE_GROUP, **options.of_group)


async def bind(mq: Connection, queue: Queue, binding: Binding, options: Options) -> None:
    """Give the queue its group in the exchange's topic: it gets what is sent there from now on."""
    if queue.temporary:
        await _topic(mq, binding.topic, partitions=1, storage="volatile", retention=_KEPT, keep="limits")
        how: dict[str, Any] = {"expires": queue.idle}
    else:
        await _topic(mq, binding.topic, partitions=options.partitions)
        how = options.of_group
    if not (queue.own and binding.topic == queue.topic):
        await _group(mq, binding.topic, naming.queue_group(queue.name), start="latest", **how)


async def _topic(mq: Connection, name: str, **settings: Any) -> None:
    try:
        await mq.create_topic(name, **settings)
    except TopicExists:
        pass  # taken as it is


async def _group(mq: Connection, topic: str, name: str, **settings: Any) -> None:
    try:
        await mq.create_group(topic, name, **settings)
    except GroupExists:
        pass


async def length(mq: Connection, queue: Queue) -> int:
    """Messages of the queue that nobody has settled; UnknownTopic if there is no such queue."""
    found = 0
    for source in queue.sources():
        try:
            found += (await mq.lag(source.topic, source.group)).total.messages
        except UnknownGroup:
            continue
    return found


async def delete(mq: Connection, queue: Queue) -> None:
    for source in queue.sources():
        try:
            if source.topic == queue.topic:
                await mq.delete_topic(source.topic)
            else:
                await mq.delete_group(source.topic, source.group, force=True)
        except (UnknownTopic, UnknownGroup):
            continue  # somebody else was faster
    for binding in queue.bindings:
        if queue.temporary and binding.kind == "direct":
            await _delete_unread(mq, binding.topic)


async def _delete_unread(mq: Connection, topic: str) -> None:
    try:
        if not await mq.groups(topic):
            await mq.delete_topic(topic)
    except UnknownTopic:
        pass


async def sweep(mq: Connection, now_ms: int, old_ms: int) -> None:
    """Delete topics for replies whose owner did not come to it: nobody reads them any more."""
    for topic in await mq.topics():
        made_for_replies = topic.name.startswith((naming.TEMPORARY, naming.exchange_topic("reply.")))
        made_for_replies = made_for_replies and topic.settings.volatile
        if made_for_replies and not topic.groups and now_ms - topic.created_at > old_ms:
            await _delete_unread(mq, topic.name)
