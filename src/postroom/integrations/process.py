"""The processes of a web server: each has one connection without asyncio (`PerProcess`), and handlers may run
in another process.

A web server whose handlers run in `postroom worker` beside it cannot ask them, but the queue knows who is
there: a handler runs if its group has a live member. A worker that died is seen once its lease has passed.
Must never raise because the queue is away: that is an answer, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from ..client.app.app import App
from ..client.app.subscription import Subscription
from ..client.app.supervisor import AppHealth, HandlerHealth, State
from ..errors import PostroomError, UnknownTopic
from ..model.topology.names import member_group
from ..sync import Connection
from ..sync.process import PerProcess

__all__ = ["PerProcess"]


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
