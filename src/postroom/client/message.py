"""What users hold in their hands: messages, received messages, receipts, dead letters and what stopped.

These are made by the hundred thousand a second, so they are msgspec structs without garbage collection (they
never refer back to what refers to them), and what can be derived is derived when asked: an id that the
sender did not give is the stored place, "<partition id>-<offset>", and costs nothing until somebody reads it.

A message that Postroom moved (dead letters, retries) shows where it was first stored; settling it uses where
it is stored now. Must never hold settling state: that belongs to the consumer (`client.consumer.in_flight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, overload

import msgspec

from ..errors import DecodeError, InvalidSetting
from ..model.messages import body
from ..model.messages.requests import Asked
from ..units import Duration, Moment, duration_ms, moment_ms

__all__ = [
    "NO_HEADERS",
    "DeadLetter",
    "Delayed",
    "Delivered",
    "Kind",
    "Message",
    "Readable",
    "Receipt",
    "Received",
    "Stopped",
    "Value",
    "id_at",
]

Value: TypeAlias = Any
"""A body: bytes as they are, or what `model.messages.body` makes bytes of."""

T = TypeVar("T")
Kind = Literal["ack", "retry", "release", "dead", "lane"]

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})
"""Shared by all received messages that have none."""


class Readable:
    """What is stored of a message, in other forms than bytes; each is made when it is asked for."""

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def value(self) -> bytes: ...
        @property
        def headers(self) -> Mapping[str, bytes]: ...

    @property
    def text(self) -> str:
        """The value as UTF-8 text; DecodeError if it is none."""
        return body.text(self.value)

    def json(self) -> Any:
        """Return what the JSON in the value says; DecodeError if it is none."""
        return body.from_json(self.value)

    @overload
    def decode(self, into: type[T]) -> T: ...
    @overload
    def decode(self, into: Any) -> Any: ...
    def decode(self, into: Any) -> Any:
        """Return the value as a dataclass, a pydantic model, `list[Order]` …: by the rules of handlers."""
        return body.decode(self.value, into)

    @overload
    def header(self, name: str) -> str | None: ...
    @overload
    def header(self, name: str, default: str) -> str: ...
    def header(self, name: str, default: str | None = None) -> str | None:
        """Return a header's value as text; `default` if there is no such header."""
        found = self.headers.get(name)
        if found is None:
            return default
        try:
            return found.decode()
        except UnicodeDecodeError:
            raise DecodeError(
                f"header {name!r} is not UTF-8 text: read its bytes with message.headers[{name!r}]"
            ) from None


class _Dated:
    """When a message was sent: `timestamp`, by clearer names."""

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def timestamp(self) -> int: ...

    @property
    def timestamp_ms(self) -> int:
        """When it was sent, in milliseconds since 1970."""
        return self.timestamp

    @property
    def sent_at(self) -> datetime:
        """When it was sent."""
        return datetime.fromtimestamp(self.timestamp / 1000, UTC)


def id_at(partition_id: int, offset: int) -> str:
    """The id of a message that was given none."""
    return f"{partition_id}-{offset}"


class _Content(msgspec.Struct, frozen=True, gc=False):
    value: Value
    key: str | bytes | None = None
    headers: Mapping[str, str | bytes] | None = None
    id: str | None = None
    source: str | None = None  # where it comes from
    expires: Duration | datetime | None = None  # after so long, or at that moment, nobody is to see it
    timestamp: int | None = None  # milliseconds since 1970; None: when it is sent


class Message(_Content, frozen=True, gc=False, kw_only=True):
    """A message to send. The key decides the partition; equal keys keep their order.

    With `delay` or `at` it is delivered later: not before then, and equal keys in the order in which they are
    due. `expires`, if it is a duration, then counts from that moment.
    """

    delay: Duration | None = None  # of a message to be sent: after so long
    at: Moment | None = None  # of a message to be sent: at that moment


class Delivered(Protocol):
    """What a received message was delivered in; it knows how to settle."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def partition_id(self) -> int: ...
    @property
    def attempt(self) -> int: ...

    async def settle(
        self, position: int, kind: Kind, *, delay_ms: int = 0, at_ms: int | None = None, reason: str = ""
    ) -> None: ...

    async def extend(self, position: int) -> None: ...


class Received(Message, Readable, _Dated, frozen=True, eq=False, gc=False):
    """A message as a consumer or a reader gets it. Keys and header values are bytes.

    `text`, `json()` and `decode(Order)` read the value, `header(name)` a header as text.
    """

    if TYPE_CHECKING:  # narrower than in Message; declaring them anew would move the fields
        value: bytes
        key: bytes | None = None
        headers: Mapping[str, bytes] = NO_HEADERS
        id: str = ""
        expires: datetime | None = None
        timestamp: int = 0
    else:

        @property
        def id(self) -> str:
            if self._id is not None:
                return self._id
            return id_at(self._delivery.partition_id, self._position)

    offset: int = -1
    _id: str | None = None
    _delivery: Delivered = None  # type: ignore[assignment]
    _position: int = -1  # the offset where it is stored now
    _origin: tuple[str, int] | None = None  # topic and partition it was first stored in, if it was moved
    _before: int = 0  # attempts used up before a far retry
    _asked: Asked | None = None  # it is a request

    @property
    def topic(self) -> str:
        return self._delivery.topic if self._origin is None else self._origin[0]

    @property
    def partition(self) -> int:
        return self._delivery.partition if self._origin is None else self._origin[1]

    @property
    def attempt(self) -> int:
        """1 at the first delivery; a release does not count."""
        return self._delivery.attempt + self._before

    async def ack(self, *, connection: Any = None) -> None:
        """Done with. Returns when it is stored; once more is harmless.

        With `connection`, of a database that the queue's store is in too, the ack is committed or rolled back
        with the transaction that is open there. Make it the last thing before the commit; LeaseLost: roll
        back.
        """
        if connection is None:
            await self._delivery.settle(self._position, "ack")
            return
        from .consumer.user_transaction import ack_within  # it knows consumers, which know messages

        await ack_within(self, connection)

    async def retry(
        self, delay: Duration | None = None, *, at: Moment | None = None, reason: str = ""
    ) -> None:
        """It failed: to be delivered again after `delay`, or at a moment. Counts as an attempt."""
        if delay is not None and at is not None:
            raise InvalidSetting("retry takes delay= or at=, not both")
        at_ms = None if at is None else moment_ms(at, name="at")
        delay_ms = 0 if delay is None else duration_ms(delay, name="delay")
        await self._delivery.settle(
            self._position, "retry", delay_ms=delay_ms, at_ms=at_ms, reason=str(reason)
        )

    async def release(self, delay: Duration = 0) -> None:
        """Not taken: hand it back without counting an attempt."""
        await self._delivery.settle(self._position, "release", delay_ms=duration_ms(delay, name="delay"))

    async def dead(self, reason: str) -> None:
        """Hopeless: to the group's dead letters, with the reason."""
        await self._delivery.settle(self._position, "dead", reason=str(reason))

    async def reply(self, value: Value, *, headers: Mapping[str, str | bytes] | None = None) -> bool:
        """Answer a request; returns when it is stored. False: the requester is gone. Ack it then."""
        from .requests import answer

        return await answer(self, value, headers)

    async def extend(self) -> None:
        """Still at work: renew its lease, and count its handling time from now."""
        await self._delivery.extend(self._position)

    def __repr__(self) -> str:
        return (
            f"Received(topic={self.topic!r}, partition={self.partition}, offset={self.offset}, "
            f"id={self.id!r}, key={self.key!r}, value={_short(self.value)}, attempt={self.attempt})"
        )


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Where a message is stored. `duplicate`: it was there already, from an earlier try or by its id.

    A delayed message has no offset before it is due: `offset` is -1, `partition` where it would go now.
    It keeps its id; `mq.cancel(topic, receipt.id)` takes it back as long as it waits.

    `spooled`: it is safe in a spool's file, and is forwarded from there; partition and offset are -1.
    """

    topic: str
    partition: int
    offset: int  # -1: delayed; or sent one-way, or spooled: nobody knows
    duplicate: bool = False
    due: datetime | None = None  # when a delayed message is delivered; None: at once
    _id: str | None = None
    _partition_id: int = -1
    spooled: bool = False

    @property
    def id(self) -> str:
        if self._id is not None or self.offset < 0:  # sent one-way: where it went is not known
            return self._id or ""
        return id_at(self._partition_id, self.offset)

    def __repr__(self) -> str:
        return (
            f"Receipt(topic={self.topic!r}, id={self.id!r}, partition={self.partition}, "
            f"offset={self.offset}, due={self.due!r}, duplicate={self.duplicate}"
            f"{', spooled=True' if self.spooled else ''})"
        )


class DeadLetter(msgspec.Struct, Readable, _Dated, frozen=True, gc=False, kw_only=True):
    """A message that a group gave up on. Topic, partition, offset, timestamp: where it was first stored.

    `reason` is one line, `traceback` where the handler failed, if it raised.
    """

    topic: str
    partition: int
    offset: int
    id: str
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]
    timestamp: int
    reason: str
    attempts: int
    dead_at: int  # milliseconds since 1970
    traceback: str = ""
    _partition_id: int = -1  # where it is in the dead-letter topic
    _position: int = -1

    @property
    def dead_at_ms(self) -> int:
        """When the group gave up on it, in milliseconds since 1970."""
        return self.dead_at


class Delayed(msgspec.Struct, Readable, _Dated, frozen=True, gc=False, kw_only=True):
    """A message that was sent and is not due yet. `timestamp`: when it was sent.

    `mq.cancel(topic, message.id)` takes it back; `mq.delayed(topic, after=message)` lists what follows it.
    """

    topic: str
    id: str
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]
    timestamp: int
    due_ms: int  # milliseconds since 1970
    cursor: str  # where it is in the list

    @property
    def due(self) -> datetime:
        """When it is delivered."""
        return datetime.fromtimestamp(self.due_ms / 1000, UTC)

    @property
    def size(self) -> int:
        """The bytes of its value."""
        return len(self.value)


class Stopped(msgspec.Struct, Readable, _Dated, frozen=True, gc=False, kw_only=True):
    """A message that holds its key in a group with exhausted="stop", until somebody decides about it.

    Topic, partition, offset, timestamp: where it was first stored.
    """

    topic: str
    group: str
    partition: int
    offset: int
    id: str
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]
    timestamp: int
    reason: str
    attempts: int
    since: int  # milliseconds since 1970: when it first failed, so its key waits since then
    behind: int | None = None  # how many messages wait behind it; None: not known
    more_behind: bool = False  # at least so many: it was not counted to the end
    traceback: str = ""  # of its last failure, if its handler raised
    _partition_id: int = -1  # where it is now: the topic itself, or the group's retry topic
    _position: int = -1

    @property
    def since_ms(self) -> int:
        """When it first failed, in milliseconds since 1970."""
        return self.since


def _short(value: Any) -> str:
    text = bytes(value)
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}… ({len(text)} bytes)"
