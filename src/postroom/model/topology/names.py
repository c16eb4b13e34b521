"""Which names are allowed, and how the names of a group's own topics are made.

Topics: 1–120 characters of letters, digits, `.`, `_` and `-`. Groups: the same without dots, 1–60
characters. Names that start with `_`, or end like a group's own topics, are reserved for Postroom.

In a broadcast group each member is a group of its own (R11): `cache@ann`, or `cache@_5f0c…` for one that has
no name. Users cannot make such names: `@` is in none that they may choose.

Replies go to a topic of the requester's own, `_reply.<client>.<owner>` (R38). The client's part has a random
end, so that only those who got a request of it know the name; the owner's is a digest of the principal's
name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

from ...errors import InvalidName, InvalidSetting, UnknownTopic, shortened

__all__ = [
    "HEADER_PREFIX",
    "REDRIVE_GROUP",
    "REPLIES",
    "REPLY_GROUP",
    "TASK_HEADER",
    "base_of",
    "base_topic",
    "check_broadcast",
    "check_client",
    "check_group",
    "check_member",
    "check_task",
    "check_topic",
    "dead_topic",
    "is_internal",
    "is_lane",
    "is_reply",
    "is_unnamed",
    "member_group",
    "owner",
    "owns_reply",
    "reply_ends",
    "reply_topic",
    "retry_topic",
    "share_group",
    "slow_topic",
    "unknown_topic",
]

HEADER_PREFIX = "postroom-"
"""Header names that start so are Postroom's own."""

TASK_HEADER = "x-postroom-task"
"""The header that says which task of a group a message is for, as "group/task". Any program may write it."""

REDRIVE_GROUP = "_redrive"
"""The group on a dead-letter topic whose progress says what was redriven or thrown away."""

REPLY_GROUP = "_requester"
"""The group on a reply topic that says when its requester was last heard of. It has no members."""

REPLIES = "_reply."
"""How the names of reply topics begin."""

_CLIENT = re.compile(r"[A-Za-z0-9_-]{1,80}")  # of a reply topic
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,120}")
_GROUP = re.compile(r"[A-Za-z0-9_-]{1,60}")
_LANE = ".slow"
_OWN = (".dead", ".retry", _LANE)
_MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_MEMBER_CHARS = 120
_CLIENT_CHARS = 250
_LONGEST = 60  # of a group's name, a member's own included
_LONGEST_BROADCAST = 40  # leaves room for the member's name


def check_topic(name: str) -> str:
    if not isinstance(name, str) or not _TOPIC.fullmatch(name):
        raise InvalidName(
            f"{shortened(name)} is not a topic name: use 1 to 120 letters, digits, '.', '_' or '-', such as "
            "'orders'"
        )
    if is_internal(name):
        raise InvalidName(
            f"the topic name {name!r} is reserved: names that start with '_' or end in "
            f"{', '.join(_OWN)} belong to Postroom; choose another"
        )
    return name


def check_group(name: str) -> str:
    if not isinstance(name, str) or not _GROUP.fullmatch(name):
        raise InvalidName(
            f"{shortened(name)} is not a group name: use 1 to 60 letters, digits, '_' or '-', such as "
            "'billing'"
        )
    if name.startswith("_"):
        raise InvalidName(f"the group name {name!r} is reserved: it starts with '_'; choose another")
    return name


def check_task(name: str) -> str:
    if not isinstance(name, str) or not _GROUP.fullmatch(name):
        raise InvalidName(
            f"{shortened(name)} is not a task's name: use 1 to 60 letters, digits, '_' or '-', such as "
            "name='send-mail'"
        )
    return name


def check_broadcast(name: str) -> str:
    if len(name) > _LONGEST_BROADCAST:
        raise InvalidName(
            f"{shortened(name)} has {len(name)} characters; a broadcast group has at most "
            f"{_LONGEST_BROADCAST}, since the names of its members are put behind it; choose a shorter one"
        )
    return name


def check_member(member: object) -> str:
    """Printable: people read it in listings, and not every database can keep the rest."""
    if isinstance(member, str) and 0 < len(member) <= _MEMBER_CHARS and member.isprintable():
        return member
    raise InvalidSetting(
        f"member={shortened(member)}: a name of 1 to {_MEMBER_CHARS} printable characters, such as "
        "'billing-1'"
    )


def check_client(client: object) -> str:
    """Check the name of a client, which follows the rules for a member's."""
    if isinstance(client, str) and len(client) <= _CLIENT_CHARS and client.isprintable():
        return client
    raise InvalidSetting(
        f"client={shortened(client)}: a name of at most {_CLIENT_CHARS} printable characters, such as "
        "'shop-1'"
    )


def member_group(group: str, member: str, *, named: bool) -> str:
    """The group of one member of a broadcast group; the same name gives the same group, for ever.

    A name that does not fit (too long, or with other characters) is shortened and made unlike others by a
    digest: `cache@ann`, `cache@host-7-example-org-1f3a90c2d4e5`, `cache@_5f0c37aa21b9`.
    """
    digest = blake2b(member.encode(errors="replace"), digest_size=6).hexdigest()
    if not named:
        return f"{group}@_{digest}"
    room = _LONGEST - len(group) - 1
    if len(member) <= room and _MEMBER.fullmatch(member):
        return f"{group}@{member}"
    readable = re.sub(r"[^A-Za-z0-9-]+", "-", member).strip("-")
    return f"{group}@{readable[: room - len(digest) - 1] or 'x'}-{digest}"


def share_group(name: str) -> str:
    """The group that a share group of Kafka clients is, whose name is any text: the same name, if it can be.

    One that is no name here is shortened and made unlike others by a digest.

    >>> share_group("billing"), share_group("eu.billing")
    ('billing', 'eu-billing-f82f05c78df0')
    """
    if _GROUP.fullmatch(name) and not name.startswith("_"):
        return name
    digest = blake2b(name.encode(errors="replace"), digest_size=6).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")
    return f"{readable[: _LONGEST - len(digest) - 1] or 'x'}-{digest}"


def base_of(group: str) -> str | None:
    """The broadcast group that a member's group belongs to; None for any other group."""
    base, at, _ = group.partition("@")
    return base if at else None


def is_unnamed(group: str) -> bool:
    """Tell whether this is the group of a broadcast group's member that has no name."""
    return "@_" in group


def is_internal(topic: str) -> bool:
    return topic.startswith("_") or topic.endswith(_OWN)


def dead_topic(topic: str, group: str) -> str:
    return f"{topic}.{group}.dead"


def retry_topic(topic: str, group: str) -> str:
    return f"{topic}.{group}.retry"


def slow_topic(topic: str, group: str) -> str:
    return f"{topic}.{group}.slow"


def is_lane(topic: str) -> bool:
    """Tell whether the topic is the slow lane of a group."""
    return topic.endswith(_LANE)


def owner(internal: str) -> tuple[str, str] | None:
    """The topic and group that an internal topic belongs to: `orders.billing.dead` → orders, billing."""
    parts = internal.rsplit(".", 2)
    return (parts[0], parts[1]) if len(parts) == 3 and f".{parts[2]}" in _OWN else None


def base_topic(topic: str) -> str:
    """The topic that a group's own topic belongs to, by however many steps; any other is its own.

    Goes over the name once, however long it is: strangers may ask about any.

    >>> base_topic("orders.billing.dead.audit.retry")
    'orders'
    """
    end = len(topic)
    while topic.endswith(_OWN, 0, end):
        group = topic.rfind(".", 0, topic.rfind(".", 0, end))
        if group < 0:
            break
        end = group
    return topic[:end]


def unknown_topic(name: str, close: Sequence[str] = ()) -> UnknownTopic:
    """The error for a topic that is not there; `close`: names that may have been meant, the nearest first."""
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown = shortened(name, 120)
    return UnknownTopic(
        f"there is no topic {shown}; {hint}create it with create_topic({shown}) or "
        f"`postroom topic create {name[:120]}`",
        topic=name[:250],
        close=list(close),
    )


def reply_topic(client: str, owner: str) -> str:
    """The topic that replies to a requester go to; `owner`: its principal's name, "" if there are none."""
    if not isinstance(client, str) or not _CLIENT.fullmatch(client):
        raise InvalidName(
            f"{shortened(client)} is not a requester's name: use 1 to 80 letters, digits, '_' or '-'"
        )
    return f"{REPLIES}{client}.{_owner_tag(owner)}"


def is_reply(topic: str) -> bool:
    return topic.startswith(REPLIES)


def reply_ends(owner: str) -> tuple[str, str]:
    """Return how the names of that principal's reply topics begin and end."""
    return REPLIES, f".{_owner_tag(owner)}"


def owns_reply(topic: str, owner: str) -> bool:
    """Tell whether that principal reads this reply topic."""
    return is_reply(topic) and topic.rpartition(".")[2] == _owner_tag(owner)


def _owner_tag(owner: str) -> str:
    return blake2b(owner.encode(errors="replace"), digest_size=6).hexdigest()
