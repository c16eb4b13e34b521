"""Reply topics (R38): made for a requester, kept while it is heard of, and forgotten with it.

A requester opens its topic when it first asks, opens it again now and then to say that it lives, and closes
it in the end. One that was killed is not heard of any more, and a duty deletes what it left. When it was
heard of is the activity of a group without members on the topic, so that all brokers and processes on the
store go by the same. Must never delete the topic of a requester that lives: one that is about to go is
retired first, and whoever opens a retired one gets a new topic under the same name, of which it can tell by
the partition's id.

A principal has a limited number of them, and makes a limited number a minute through one broker: each is a
table. Those who come at the same moment are not counted exactly. Whoever has the database itself is not
counted (I23).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ...config import Limits
from ...errors import GroupExists, LimitReached, StoreBusy, TopicExists, UnknownGroup, UnknownTopic
from ...model.messages.requests import ReplyTopic
from ...model.policy.settings import GroupSettings, TopicSettings
from ...model.topology.names import REPLY_GROUP, is_reply, reply_ends, reply_topic
from ...store.contract import Group, Store, Topic
from .catalog_cache import Listing

__all__ = ["ForgetReplies", "Replies"]

_log = logging.getLogger("postroom.broker")

_MINUTE_S = 60.0
_TRIES = 5  # a topic that is forgotten again and again while its requester opens it


class Replies:
    """Blocking; any thread may call it. `drop_topic` deletes a topic and whatever is remembered of it."""

    def __init__(
        self, store: Store, limits: Limits, drop_topic: Callable[[str], None], changed: Callable[[], None]
    ) -> None:
        self._store, self._limits = store, limits
        self._drop_topic, self._changed = drop_topic, changed
        self._made: dict[str, deque[float]] = {}  # by principal, when it made its last ones
        self._counting = threading.Lock()

    def open(self, client: str, owner: str) -> ReplyTopic:
        """LimitReached if it is not there, and the principal may not make another."""
        name = reply_topic(client, owner)
        for _ in range(_TRIES):
            try:
                group = self._found_or_made(name, owner)
                if self._store.usage.touch(group.id):
                    (piece,) = self._store.catalog.topic(name).route.ranges
                    return ReplyTopic(name, piece.partition_id)
            except (UnknownTopic, UnknownGroup):
                continue  # it was deleted meanwhile
            self.drop(name)
        raise StoreBusy(f"reply topic {name!r} was forgotten while it was opened; open it again")

    def close(self, client: str, owner: str) -> None:
        self.drop(reply_topic(client, owner))

    def drop(self, name: str) -> None:
        try:
            self._drop_topic(name)
        except UnknownTopic:
            pass  # somebody else was faster

    def _found_or_made(self, name: str, owner: str) -> Group:
        try:
            return self._store.catalog.group(name, REPLY_GROUP)
        except (UnknownTopic, UnknownGroup):
            pass
        if owner:
            self._count(owner)
        settings = TopicSettings("volatile", retention_ms=self._limits.reply_kept_ms, keep="limits")
        try:
            self._store.catalog.create_topic(name, settings, 1)
        except TopicExists:
            pass  # whoever made it was cut off before it made the group
        try:
            self._store.catalog.create_group(name, REPLY_GROUP, GroupSettings())
        except GroupExists:
            pass
        self._changed()
        return self._store.catalog.group(name, REPLY_GROUP)

    def _count(self, owner: str) -> None:
        """The principal is about to make one more."""
        most = self._limits.reply_topics
        if self._store.catalog.count_topics(*reply_ends(owner)) >= most:
            raise LimitReached(
                f"principal {owner!r} has {most} reply topics, which is the limit (reply_topics): ask "
                "through fewer connections, or again once some are closed; those of programs that were "
                "killed are deleted after some minutes",
                principal=owner,
            )
        now = time.monotonic()
        with self._counting:
            recent = self._made.setdefault(owner, deque(maxlen=2 * most))
            if len(recent) == recent.maxlen and now - recent[0] < _MINUTE_S:
                raise LimitReached(
                    f"principal {owner!r} has made {2 * most} reply topics within a minute: keep connections "
                    "open and ask again through them; try again in a minute",
                    principal=owner,
                )
            recent.append(now)
            for other in [name for name, times in self._made.items() if now - times[-1] > _MINUTE_S]:
                del self._made[other]


class ForgetReplies:
    """Delete the reply topics of requesters that nobody has heard of for long."""

    name: str = "forget-replies"
    every_s: float = 30

    def __init__(
        self, store: Store, limits: Limits, drop: Callable[[str], None], listing: Listing | None = None
    ) -> None:
        self._store, self._limits, self._drop = store, limits, drop
        self._listing = listing or Listing(store.catalog)

    def run_once(self) -> None:
        listed = self._listing.look()
        topics = [topic for topic in listed.topics if is_reply(topic.name)]
        seen = self._store.usage.seen() if topics else {}
        for topic in topics:
            named = [one for one in listed.groups.get(topic.id, ()) if one.name == REPLY_GROUP]
            if self._is_left(topic, named[0] if named else None, seen):
                _log.info("reply topic %r is deleted: its requester is gone", topic.name)
                self._drop(topic.name)

    def _is_left(self, topic: Topic, group: Group | None, seen: dict[int, int]) -> bool:
        idle_ms, now = self._limits.reply_idle_ms, self._store.now_ms()
        if group is None:  # whoever made it was cut off, or is about to make it
            return now - topic.created_at >= idle_ms
        if now - seen.get(group.id, 0) < idle_ms:
            return False
        return self._store.usage.retire(group.id, idle_ms)
