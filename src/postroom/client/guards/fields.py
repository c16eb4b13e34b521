"""What a guard reads from a message: whose it is, which one it is, and what it is about.

Decides the scope (the topic and group it was delivered to, unless named), the id, the entity (its key, unless
named) and the version. Must never guess: what cannot be read is a DecodeError, which an app takes to the dead
letters with its reason, since it will never fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from ...errors import DecodeError, InvalidSetting, UsageError
from ..consumer.in_flight import LeasedDelivery
from ..message import Received

__all__ = [
    "Entity",
    "Id",
    "Text",
    "Version",
    "bare",
    "entity_of",
    "id_of",
    "scope_of",
    "text_of",
    "version_of",
]

Id: TypeAlias = str | Callable[[Any], str] | None
Entity: TypeAlias = str | bytes | Callable[[Any], str | bytes] | None
Version: TypeAlias = str | int | Callable[[Any], int]
Text: TypeAlias = str | Callable[[Any], str]

_LIMIT = 2**63
_PLACE = re.compile(r"[0-9]+-([0-9]+)")  # the id of a message that was given none


def bare(message: Any) -> Received:
    """The message itself: functions without await have it in another form (postroom.sync)."""
    found = getattr(message, "_target", message)
    if not isinstance(found, Received):
        raise UsageError(
            f"a guard takes a received message, not {type(message).__name__}: `message` of a handler"
        )
    return found


def scope_of(message: Received, scope: str | None) -> str:
    if scope is not None:
        if not isinstance(scope, str) or not scope:
            raise InvalidSetting(f"scope={scope!r}: a name, such as 'billing'")
        return scope
    delivery = message._delivery
    if not isinstance(delivery, LeasedDelivery):
        raise UsageError("this message was read, not delivered to a group: name a scope= for the guard")
    return f"{message.topic}/{delivery.settler.who.group}"


def id_of(message: Received, id: Id) -> tuple[str, ...]:
    """The id that the sender gave; else the one by place, which a message keeps when Postroom moves it.

    With its timestamp then: a queue that is made anew counts its places from the beginning again.
    """
    if callable(id):
        id = id(message)
    if id is None:
        id, place = message.id, _PLACE.fullmatch(message.id)
        if place is not None and int(place[1]) == message.offset:
            return (message.topic, id, str(message.timestamp))
    if not isinstance(id, str) or not id:
        raise DecodeError(f"the id of a message is text that is not empty; id= gave {id!r}")
    return (message.topic, id)


def entity_of(message: Received, entity: Entity) -> bytes:
    found = entity(message) if callable(entity) else message.key if entity is None else entity
    if isinstance(found, str):
        found = found.encode()
    if not isinstance(found, bytes) or not found:
        raise DecodeError(
            f"the message has no key, or entity= gave {found!r}: send it with key=, or name what it is about "
            "with entity="
        )
    return found


def version_of(message: Received, version: Version) -> int:
    """A whole number: of the header of that name, or what the function returns."""
    if isinstance(version, str):
        raw = message.headers.get(version)
        if raw is None:
            raise DecodeError(
                f"the message has no header {version!r}: send it, or name another with version="
            )
        found: Any = _number(raw)
    else:
        found = version(message) if callable(version) else version
    if type(found) is not int or not -_LIMIT <= found < _LIMIT:
        raise DecodeError(f"a version is a whole number of 64 bits; version={version!r} gave {found!r}")
    return found


def text_of(message: Received, what: Text, name: str) -> str:
    """The header of that name, or what the function returns."""
    if callable(what):
        found: Any = what(message)
    elif what in message.headers:
        found = message.headers[what].decode(errors="replace")
    else:
        raise DecodeError(f"the message has no header {what!r}: send it, or name another with {name}=")
    if not isinstance(found, str):
        raise DecodeError(f"{name}= gave {found!r}: it is to be text")
    return found


def _number(raw: bytes) -> int | bytes:
    try:
        return int(raw)
    except ValueError:
        return raw
