"""The processes of a web server: each has one connection without asyncio, and handlers may run in another
one.

Decides when a connection is opened: when it is first asked for, in the process that asks. Pre-fork servers
load the program and then fork; a connection of the parent is of no use in the child, so the child opens its
own. Must never close what belongs to another process.

A web server whose handlers run in `postroom worker` beside it cannot ask them, but the queue knows who is
there: a handler runs if its group has a live member. A worker that died is seen once its lease has passed.
Must never raise because the queue is away: that is an answer, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from .. import sync
from ..client.app.app import App
from ..client.app.subscription import Subscription
from ..client.app.supervisor import AppHealth, HandlerHealth, State
from ..errors import PostroomError, UnknownTopic
from ..model.topology.names import member_group
from ..sync import Connection

__all__ = ["PerProcess"]


class PerProcess:
    """`get()` is the connection of this process; threads share it, and their sends share batches."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, self.options = url, dict(options or {})
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Without closing: after a fork it is the parent's, and so may be the lock."""
        self._lock = threading.Lock()
        self._connection: sync.Connection | None = None

    def get(self) -> sync.Connection:
        with self._lock:
            if self._connection is None or self._connection._portal.closed:
                self._connection = sync.connect(self.url, **self.options)
            return self._connection

    def close(self) -> None:
        """A process may end without: what was sent is stored. Asked for once more, it is opened anew."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def seen(connection: Callable[[], Connection], app: App) -> AppHealth:
    """How the handlers of the app are doing, wherever they run; `running`: the queue could be asked."""
    now = datetime.now(UTC)
    try:
        return AppHealth(True, tuple(_each(connection(), app, now)))
    except PostroomError as error:
        away = [
            _health(one, "waiting", now, f"the queue cannot be asked: {error}") for one in app.subscriptions
        ]
        return AppHealth(False, tuple(away))


def _each(mq: Connection, app: App, now: datetime) -> Iterator[HandlerHealth]:
    for one in app.subscriptions:
        name = one.group if one.member is None else member_group(one.group, one.member, named=True)
        try:
            groups = {info.name: info for info in mq.groups(one.topic)}
        except UnknownTopic:
            missing = f"topic {one.topic!r} does not exist yet: `postroom topic create {one.topic}`"
            yield _health(one, "waiting", now, missing)
            continue
        info = groups.get(name)
        if info is not None and info.members:
            joined = min(member.joined_at for member in info.members)
            yield _health(one, "running", datetime.fromtimestamp(joined / 1000, UTC), None)
        else:
            idle = timedelta(milliseconds=0 if info is None else info.idle_ms or 0)
            nobody = "no worker handles it: start one with `postroom worker`, or look into its log"
            yield _health(one, "failed", now - idle, nobody)


def _health(one: Subscription, state: State, since: datetime, error: str | None) -> HandlerHealth:
    return HandlerHealth(one.name, one.topic, one.group, state, since, error)
