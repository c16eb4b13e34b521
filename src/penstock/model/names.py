"""Which names are allowed, and how the names of a group's own topics are made.

Topics: 1–120 characters of letters, digits, `.`, `_` and `-`. Groups: the same without dots, 1–60
characters. Names that start with `_`, or end like a group's own topics, are reserved for Penstock.
"""

from __future__ import annotations

import re

from ..errors import InvalidName

__all__ = [
    "HEADER_PREFIX",
    "REDRIVE_GROUP",
    "check_group",
    "check_topic",
    "dead_topic",
    "is_internal",
    "owner",
    "retry_topic",
]

HEADER_PREFIX = "penstock-"
"""Header names that start so are Penstock's own."""

REDRIVE_GROUP = "_redrive"
"""The group on a dead-letter topic whose progress says what was redriven or thrown away."""

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,120}")
_GROUP = re.compile(r"[A-Za-z0-9_-]{1,60}")
_OWN = (".dead", ".retry", ".slow")


def check_topic(name: str) -> str:
    if not isinstance(name, str) or not _TOPIC.fullmatch(name):
        raise InvalidName(
            f"{name!r} is not a topic name: use 1 to 120 letters, digits, '.', '_' or '-', such as 'orders'"
        )
    if is_internal(name):
        raise InvalidName(
            f"the topic name {name!r} is reserved: names that start with '_' or end in "
            f"{', '.join(_OWN)} belong to Penstock; choose another"
        )
    return name


def check_group(name: str) -> str:
    if not isinstance(name, str) or not _GROUP.fullmatch(name):
        raise InvalidName(
            f"{name!r} is not a group name: use 1 to 60 letters, digits, '_' or '-', such as 'billing'"
        )
    if name.startswith("_"):
        raise InvalidName(f"the group name {name!r} is reserved: it starts with '_'; choose another")
    return name


def is_internal(topic: str) -> bool:
    return topic.startswith("_") or topic.endswith(_OWN)


def dead_topic(topic: str, group: str) -> str:
    return f"{topic}.{group}.dead"


def retry_topic(topic: str, group: str) -> str:
    return f"{topic}.{group}.retry"


def owner(internal: str) -> tuple[str, str] | None:
    """The topic and group that an internal topic belongs to: `orders.billing.dead` → orders, billing."""
    parts = internal.rsplit(".", 2)
    return (parts[0], parts[1]) if len(parts) == 3 and f".{parts[2]}" in _OWN else None
