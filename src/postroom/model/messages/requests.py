"""Requests and replies (R38): what of them travels in headers, and how a failure is told.

    postroom-request    the request's id, random; its reply has the same
    postroom-reply-to   where the reply goes: the requester's topic, and the partition's id in it
    postroom-failure    of a reply: the handler failed, and the value says how (`Failure`, as JSON)

The deadline is the message's own `expires`, by the store's clock: hosts need not agree on the time. Must
never trust what it decodes: headers come from other programs, and what cannot be read counts as not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ..topology.names import HEADER_PREFIX, is_reply

__all__ = ["FAILURE", "REPLY_TO", "REQUEST", "Asked", "Failure", "ReplyTopic", "asked", "request_of"]

REQUEST, REPLY_TO = f"{HEADER_PREFIX}request", f"{HEADER_PREFIX}reply-to"
FAILURE = f"{HEADER_PREFIX}failure"

_MOST_CHARACTERS = 64  # of a request's id


@dataclass(frozen=True, slots=True)
class ReplyTopic:
    """Replies to a requester go to this topic."""

    name: str
    partition_id: int

    def encode(self) -> str:
        return f"{self.name}/{self.partition_id}"


class Asked(NamedTuple):
    """A message is a request if it has these. Plain values: such messages need no garbage collection."""

    id: str
    reply_to: str
    partition_id: int

    @property
    def to(self) -> ReplyTopic:
        return ReplyTopic(self.reply_to, self.partition_id)


def asked(request: str | None, reply_to: str | None) -> Asked | None:
    """
    >>> asked("5f0c", "_reply.shop-1.9b2e/17")
    Asked(id='5f0c', reply_to='_reply.shop-1.9b2e', partition_id=17)
    """
    name, slash, number = (reply_to or "").rpartition("/")
    if not request or len(request) > _MOST_CHARACTERS or not slash or not is_reply(name):
        return None
    sound = number.isascii() and number.isdigit() and len(number) < 19  # else no database can keep it
    return Asked(request, name, int(number)) if sound else None


def request_of(headers: Iterable[tuple[str, bytes | None]]) -> tuple[str, bool] | None:
    """The id of the request that a reply is to, and whether it tells of a failure."""
    found, failed = None, False
    for name, value in headers:
        if name == REQUEST:
            found = (value or b"").decode(errors="replace")
        failed = failed or name == FAILURE
    return None if found is None else (found, failed)


class Failure(msgspec.Struct, frozen=True):
    """Why a request failed, as its requester is told."""

    kind: str  # for machines: what the handler named, an error's code, or the name of its class
    message: str
    traceback: str = ""  # only if the handler was registered so

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(value: bytes) -> Failure:
        try:
            return _failure(value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Failure("unknown", "the handler failed, and how cannot be read")


_failure = msgspec.json.Decoder(Failure).decode
