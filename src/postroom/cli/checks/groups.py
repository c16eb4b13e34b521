"""Checks of topics and groups: who uses them, and which of them hold messages for nobody (R44).

Built on the public API, through a connection of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...units import format_duration
from ..show import messages
from .finding import Finding

if TYPE_CHECKING:
    from postroom import Connection, GroupInfo, Lag, TopicInfo

__all__ = ["check_groups"]

_LONG_IDLE_MS = 24 * 3_600_000


async def check_groups(mq: Connection) -> list[Finding]:
    members, groups, found = 0, 0, list[Finding]()
    for topic in await mq.topics():
        for group in await mq.groups(topic.name):
            groups += 1
            members += len(group.members)
            found += _found(topic, group, await mq.lag(topic.name, group.name))
    return [Finding("members", "ok", f"{members} live in {groups} groups"), *found]


def _found(topic: TopicInfo, group: GroupInfo, lag: Lag) -> list[Finding]:
    found, waiting = [], lag.total.messages
    idle = "" if group.idle_ms is None else f" for {format_duration(group.idle_ms)}"
    if group.settings.mode == "broadcast" and "@" not in group.name:
        return []  # its members are groups of their own
    delete = f"`postroom group delete {topic.name} {group.name}`"
    if waiting and not group.members:
        kept = " and keeps them from being dropped" if topic.settings.keep == "needed" else ""
        said = (
            f"group {group.name} of topic {topic.name} has no members{idle}, holds {messages(waiting)}{kept}"
        )
        found.append(Finding("idle group", "warn", said, f"start its consumer, or {delete}"))
    elif group.idle_ms is not None and group.idle_ms > _LONG_IDLE_MS:
        said = f"group {group.name} of topic {topic.name} was not used{idle}"
        advice = f"{delete}, or let it go by itself: `postroom group alter … --expires 7d`"
        found.append(Finding("unused group", "warn", said, advice))
    if lag.total.stopped:
        oldest = format_duration(lag.total.stopped_age_ms)
        said = (
            f"group {group.name} of topic {topic.name} has {messages(lag.total.stopped)} stopped, the oldest "
            f"key waits for {oldest}"
        )
        place = f"{topic.name} {group.name}"
        advice = (
            f"`postroom stopped list {place}` shows why; mend it, then `postroom stopped restart {place} "
            "--all`, or let the keys go on with `skip` or `drop`"
        )
        found.append(Finding("stopped", "warn", said, advice))
    return found
