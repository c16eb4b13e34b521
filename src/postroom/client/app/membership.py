"""Joining a group for a handler: with the settings its decorator names, and knowing what it may have missed.

Decides three things that differ from a plain consumer. Settings that the decorator names and a group can
change are applied to the group that is there; mode, order and start are not, and conflict. A member of a
broadcast group that begins anew, though its handler may remember older messages, is told so (`anew`). And an
ordinary group that was deleted under its handler is not made again, which would handle the whole topic once
more, unless it was set to expire: somebody has to make it, or to start the app again.

Must never leave a consumer half open, and never say that nothing was missed where that is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...broker.endpoint import GroupInfo
from ...errors import GroupConflict, PermissionDenied, UnknownGroup
from ...model.names import base_of
from ...model.settings import FIXED
from ..connection import Connection
from ..consuming.consumer import Consumer
from .subscription import Subscription, window_for

__all__ = ["Joined", "join"]

log = logging.getLogger("postroom.app")

_TRIES = 3  # to have the settings as the decorator names them; others may change them at the same time


@dataclass(frozen=True, slots=True)
class Joined:
    consumer: Consumer
    group: GroupInfo  # in mode "broadcast" the member's own
    anew: bool  # a member of a broadcast group that did not go on where its handler stopped


async def join(connection: Connection, subscription: Subscription, before: GroupInfo | None) -> Joined:
    """Enter the group; `before` is what this handler joined last, while the app has run."""
    if before is not None and base_of(before.name) is None:
        await _refuse_deleted(connection, subscription, before)
    settings = dict(subscription.consumer)
    for tries_left in reversed(range(_TRIES)):
        try:
            consumer = await _entered(connection, subscription, settings)
            break
        except GroupConflict as conflict:
            settings = await _applied(connection, subscription, settings, conflict, keep=not tries_left)
    else:
        consumer = await _entered(connection, subscription, settings)
    group = consumer._joined
    assert group is not None
    # Who has no name begins at the end; that is nothing new to a handler that has not begun yet.
    anew = group.fresh if subscription.member is not None else before is not None
    return Joined(consumer, group, anew and base_of(group.name) is not None)


async def _refuse_deleted(connection: Connection, subscription: Subscription, before: GroupInfo) -> None:
    """Raise UnknownGroup if somebody deleted the group under its handler."""
    topic, group = subscription.topic, subscription.group
    if before.settings.expires_ms or await _is_there(connection, topic, group):
        return
    if (await connection.topic(topic)).created_at <= before.created_at:  # else the topic is another one
        raise UnknownGroup(
            f"group {group!r} of topic {topic!r} was deleted under its handler: make it with "
            f"create_group({topic!r}, {group!r}) to say where it starts, or start the app again",
            topic=topic,
            group=group,
        )


async def _is_there(connection: Connection, topic: str, group: str) -> bool:
    try:
        await connection.lag(topic, group)
    except UnknownGroup:
        return False
    return True


async def _entered(
    connection: Connection, subscription: Subscription, settings: Mapping[str, Any]
) -> Consumer:
    consumer = connection.consumer(
        subscription.topic,
        subscription.group,
        ack="on_delivery" if subscription.ack == "on_delivery" else "manual",
        window=window_for(subscription, None),
        **settings,
    )
    try:
        return await consumer.__aenter__()
    except BaseException:
        connection._consumers.remove(consumer)
        raise


# ---- settings ----


async def _applied(
    connection: Connection,
    subscription: Subscription,
    settings: Mapping[str, Any],
    conflict: GroupConflict,
    *,
    keep: bool,
) -> dict[str, Any]:
    """Change the group as the decorator asks; returns the settings to ask for next. Raises what conflicts.

    `keep`: somebody else changes it back again and again; then the group's settings are good enough.
    """
    topic, group = subscription.topic, subscription.group
    differs: Mapping[str, tuple[str, str]] = conflict.details.get("differs", {})
    if not differs or any(name in FIXED for name in differs):
        raise conflict
    others = {name: value for name, value in settings.items() if name not in differs}
    why = "others change it at the same time"
    if not keep:
        try:
            await connection.alter_group(topic, group, **{name: settings[name] for name in differs})
        except PermissionDenied as denied:
            why = str(denied)
        else:
            changes = ", ".join(f"{name} {was} → {now}" for name, (was, now) in differs.items())
            log.info("group %s of %s: %s, as its handler asks", group, topic, changes)
            return dict(settings)
    kept = ", ".join(f"{name} {was}, not {now}" for name, (was, now) in differs.items())
    log.warning(
        "group %s of %s keeps %s as its handler asks: %s; change it with `postroom group alter`, or leave "
        "the setting out of the decorator",
        group,
        topic,
        kept,
        why,
    )
    return others
