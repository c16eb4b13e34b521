"""Who may do what: principals and their permissions on topics (R48).

A permission is an action on a pattern of topic names, written `send:orders`, `consume:orders.*`, `manage:*`.
`*` stands for any characters, none and dots included; nothing else is special. No action implies another.

- A group's own topics (`orders.billing.dead`, `….retry`, `….slow`) belong to their topic: a permission on
  `orders` holds for them, and patterns are compared with `orders` alone. To send to one by hand is to manage.
- Topics whose name begins with `_` are Postroom's: they match `*` and patterns that begin with `_`.
- Whoever may send to some topic has reply topics of its own, and reads only those; whoever may consume some
  topic may send replies (R38). A reply topic's name is known only to who got a request that names it: lists
  do not show it to others.
- What is about no topic in particular (shards) needs the action on `*`.

Decides nothing about who somebody is. Must never see a secret: `hash_of` is as far as one comes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, TypeAlias, get_args

from ..errors import InvalidName, InvalidSetting, shortened
from .topology.names import REPLIES, base_topic, is_internal, is_reply, owner, owns_reply

__all__ = [
    "ALL",
    "ANONYMOUS",
    "KEY_BYTES",
    "Action",
    "Need",
    "Permission",
    "Principal",
    "allows",
    "base_topic",
    "beginnings",
    "check_principal",
    "hash_of",
    "is_name",
    "is_token",
    "kafka_producer",
    "needed",
    "parse_permission",
    "parse_permissions",
    "producer_of",
    "visible",
]


Action = Literal["send", "consume", "manage"]
Need: TypeAlias = Action | Literal["any", "none"]
"""What a call asks for: an action, any permission at all on the topic, or nothing."""

ACTIONS: tuple[Action, ...] = get_args(Action)
_EXAMPLE = "write an action and a pattern of topic names, such as send:orders, consume:orders.* or manage:*"
_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,120}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,119}")
_TOKEN = re.compile(r"pst_[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class Permission:
    action: Action
    pattern: str  # of topic names: "orders", "orders.*", "*"

    def __str__(self) -> str:
        return f"{self.action}:{self.pattern}"


@dataclass(frozen=True, slots=True)
class Principal:
    name: str
    permissions: tuple[Permission, ...]
    created_at: int = 0
    secret_hash: str = field(default="", repr=False, compare=False)
    # of the secret it has, as hex; "": none, it comes with a certificate

    def __hash__(self) -> int:
        return hash(self.name)  # every request looks for what its principal may do


ALL: tuple[Permission, ...] = tuple(Permission(action, "*") for action in ACTIONS)
ANONYMOUS = Principal("anonymous", ALL)
"""Whoever comes from this machine to a broker that was started with `--dev`."""


# ---- what is allowed ----


_known: dict[tuple[Principal, Need, str | None], bool] = {}  # every request asks
_MOST_KNOWN = 4096
_SOUND = re.compile(r"[A-Za-z0-9._@-]{1,250}")  # what a topic may be called, a group's own included


def allows(principal: Principal, need: Need, topic: str | None) -> bool:
    """Tell whether the principal may do it to the topic; None is all of the queue.

    Remembered for names that a topic may have, and for no other: whatever else is asked is not kept.
    """
    key = (principal, need, topic)
    found = _known.get(key)
    if found is None:
        found = _allows(principal, need, topic)
        if topic is None or _SOUND.fullmatch(topic):
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = found
    return found


def _allows(principal: Principal, need: Need, topic: str | None) -> bool:
    if need == "none":
        return True
    if topic is None:
        return any(p.pattern == "*" and need in (p.action, "any") for p in principal.permissions)
    if is_reply(topic) and _about_replies(principal, need, topic):
        return True
    wanted, base = needed(need, topic)
    return any(wanted in (p.action, "any") and _matches(p.pattern, base) for p in principal.permissions)


def _about_replies(principal: Principal, need: Need, topic: str) -> bool:
    actions = {p.action for p in principal.permissions}
    if need in ("send", "any") and "consume" in actions:
        return True
    return need in ("consume", "any") and "send" in actions and owns_reply(topic, principal.name)


def needed(need: Need, topic: str) -> tuple[Need, str]:
    """The action and the topic that a permission has to name: `orders.billing.dead` is a part of `orders`."""
    base = base_topic(topic)
    return ("manage" if need == "send" and base != topic else need), base


def visible(principal: Principal, topics: Iterable[str]) -> list[str]:
    """Return the topics that a list shows: those that the principal has any permission on."""
    return [topic for topic in topics if allows(principal, "consume" if is_reply(topic) else "any", topic)]


def beginnings(principal: Principal) -> list[str] | None:
    """Return how names of topics begin that the principal may be shown; None is in any way.

    Those that `visible` leaves of them are what it is shown; no other topic is.
    """
    found = {permission.pattern.partition("*")[0] for permission in principal.permissions}
    if any(permission.action == "send" for permission in principal.permissions):
        found.add(REPLIES)  # its own
    return None if "" in found else sorted(found)


def _matches(pattern: str, topic: str) -> bool:
    if topic.startswith("_") and not (pattern == "*" or pattern.startswith("_")):
        return False
    first, *rest = pattern.split("*")
    if not rest:
        return topic == pattern
    if not (topic.startswith(first) and topic.endswith(rest[-1])):
        return False
    at, end = len(first), len(topic) - len(rest[-1])
    for piece in rest[:-1]:  # the leftmost place is as good as any: no way back, whatever the pattern
        at = topic.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return at <= end


# ---- how they are written ----


def parse_permission(text: str) -> Permission:
    """
    >>> parse_permission("send:orders.*")
    Permission(action='send', pattern='orders.*')
    """
    action, colon, pattern = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not colon:
        raise InvalidSetting(f"{text!r} is not a permission: {_EXAMPLE}")
    if action not in ACTIONS:
        raise InvalidSetting(f"{text!r}: there is no action {action!r}; choose one of {', '.join(ACTIONS)}")
    if not _PATTERN.fullmatch(pattern):
        raise InvalidSetting(
            f"{text!r}: {pattern!r} is not a pattern of topic names: use letters, digits, '.', '_', '-' and "
            f"'*' for any of them, such as {action}:orders.*"
        )
    if is_internal(pattern) and not pattern.startswith("_"):
        found = owner(pattern)
        base = found[0] if found else "orders"
        raise InvalidSetting(
            f"{text!r}: a group's own topics belong to their topic, and a permission on that holds for them; "
            f"write {action}:{base}"
        )
    return Permission(action, pattern)


def parse_permissions(texts: Iterable[str]) -> tuple[Permission, ...]:
    """Each once, in the order in which they came."""
    return tuple(dict.fromkeys(parse_permission(text) for text in texts))


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name != ANONYMOUS.name


def check_principal(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidName(
            f"{shortened(name)} is not a principal's name: use 1 to 120 letters, digits, '.', '_', '@' or "
            "'-', a letter or digit first, such as 'shop'"
        )
    if name == ANONYMOUS.name:
        raise InvalidName(f"the principal's name {name!r} is reserved: choose another")
    return name


# ---- secrets ----


def is_token(text: str) -> bool:
    """Tell whether a text looks like a token at all."""
    return _TOKEN.fullmatch(text) is not None


def hash_of(token: str) -> str:
    """Return what is stored of a token.

    A fast hash is right here: a token is 256 random bits, so that nobody can go through the candidates,
    however fast each try is. Slow hashes are for passwords, which people choose.
    """
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


# ---- a producer id means something within its principal only (I3, I23) ----
# Ids, epochs and sequences stand in every batch that a consumer is handed: they are no secret. If the id
# alone said whose sequence a batch counts in, any consumer that may also send could take a producer's
# next place, and the producer's own message would be answered as a repeat, and not stored.
#
# So what a store remembers sequences by is a keyed hash of the principal's name and the id that its
# client chose. Two principals never share one, whatever ids they name, and none of them has that of an
# embedded producer, or of Postroom's own movers, whose ids are random numbers and count as they are. The
# key is random, kept in the store, the same for all brokers of a queue, and shown to nobody: else whoever
# has seen very many ids could look for one of its own that meets any of them, for an id has but 63 bits.
# The batch itself is not changed: consumers, and a producer that looks for its messages, see the id that
# was sent.
#
# Why not an owner beside each sequence: that would let whoever comes first keep the owner from a
# partition that it has not sent to yet.
#
# Must never depend on a token or on a broker: a principal whose token was rotated, or whose client has
# gone to another broker, goes on with its sequences. Whoever may come without a token (`--dev`) is as
# somebody inside.

KEY_BYTES = 32


def kafka_producer(producer_id: int) -> int:
    """The id under which a Kafka client's producer is remembered: below 0, where no other is.

    Its sequences go on when a partition is moved, those of others begin anew (I28).
    """
    return -1 - producer_id


def producer_of(key: bytes, principal: str, producer_id: int) -> int:
    """The id under which a principal's producer is remembered: 63 bits, as any other."""
    told = producer_id.to_bytes(8, "big", signed=True) + principal.encode(errors="replace")
    return int.from_bytes(blake2b(told, key=key, digest_size=8).digest(), "big") >> 1
