"""What is sent to the API and what comes back, where the broker's own types do not say it already.

Durations are seconds or text such as "10m", sizes are bytes or text such as "1GB", as in the SDK. What is not
known is refused: a mistyped name must not be ignored. Bytes are in JSON as text where they are text, else as
base64. Handles are what polled messages are settled by.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from ..config import DEFAULTS
from ..endpoint.values import Verdict
from ..model.delivery.delivery import Span
from ..model.messages.slot import Keys
from ..model.policy.bounds import Offset, PartitionId, Token, TopicName
from ..model.policy.settings import Exhausted, Keep, Mode, Storage
from ..model.topology.route import Range, Route
from .failures import BadRequest

__all__ = [
    "ANSWER_BYTES",
    "AlterGroup",
    "AlterTopic",
    "Chosen",
    "ChosenStopped",
    "CreateGroup",
    "CreateTopic",
    "DelayedPage",
    "DelayedShown",
    "Handle",
    "Handled",
    "Letter",
    "Merge",
    "Move",
    "OutMessage",
    "Piece",
    "Poll",
    "Polled",
    "Reset",
    "RouteShown",
    "Send",
    "SendMessage",
    "Sent",
    "SentReceipt",
    "SetRate",
    "SettleBody",
    "Settled",
    "Split",
    "StoppedShown",
    "from_base64",
    "json_bytes",
    "merged",
    "route_shown",
    "spans_of",
    "text_or_base64",
    "texts",
]


Short = Annotated[str, StringConstraints(max_length=100)]  # a duration, a size, a moment
Topic = Annotated[str, StringConstraints(max_length=250)]
Group = Annotated[str, StringConstraints(max_length=60)]
Shard = Annotated[str, StringConstraints(max_length=120)]
Id = Annotated[str, StringConstraints(max_length=4096)]
Key = Annotated[str, StringConstraints(max_length=DEFAULTS.max_key_bytes)]
HandleText = Annotated[str, StringConstraints(max_length=1000)]
Duration = Annotated[float | Short, Field(examples=["10m", 30])]
Size = Annotated[int | Short, Field(examples=["1GB"])]
Count = Annotated[int, Field(ge=0, le=2**53)]  # what every database and every reader of JSON can keep
Start = Short | Annotated[dict[Count, Count], Field(max_length=10_000)]
Member = Annotated[str, StringConstraints(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f]+$")]
ANSWER_BYTES = 4 << 20
"""What an answer with messages may have as JSON; one message is in it however large it is (I17)."""

_CONTROLS, _QUOTED, _HIGH = bytes(range(32)), b'"\\', bytes(range(128, 256))
_FRAME_BYTES = 400  # names, numbers and marks of a message


class _In(BaseModel):
    model_config = ConfigDict(extra="forbid")


# ---- topics ----


class AlterTopic(_In):
    retention: Duration | None = None
    retention_bytes: Size | None = None
    keep: Keep | None = None
    drop_settled: bool | None = None
    dedup_window: Duration | None = None
    max_backlog: Count | None = None
    max_backlog_bytes: Size | None = None


class CreateTopic(_In):
    name: Topic
    partitions: Count = DEFAULTS.partitions
    storage: Storage = "durable"
    kafka_partitions: Count | None = None
    keys: Keys = "postroom"
    retention: Duration | None = "7d"
    retention_bytes: Size | None = None
    keep: Keep = "needed"
    drop_settled: bool = False
    dedup_window: Duration | None = None
    max_backlog: Count | None = None
    max_backlog_bytes: Size | None = None
    exist_ok: bool = False


# ---- groups ----


class SlowLaneIn(_In):
    failures: float | None = 0.5
    at_least: Count = 20
    handling: Duration | None = None
    window: Duration = "1m"
    clean: Duration = "5m"
    share: float = 0.1
    header: Shard = "source"


class AlterGroup(_In):
    lease: Duration | None = None
    max_attempts: Count | None = None
    exhausted: Exhausted | None = None
    max_hold: Duration | None = None
    expires: Duration | None = None
    slow_lane: SlowLaneIn | bool | None = Field(None, description="true: the defaults; false: none")


class CreateGroup(AlterGroup):
    group: Group
    mode: Mode | None = None
    order: Literal["key", "partition"] | None = None
    start: Start | None = Field(
        None, description="earliest, latest, a moment (ISO 8601 with a zone), or offsets by partition"
    )
    exist_ok: bool = Field(False, description="one that is there is fine, if it has what is given here")


class Reset(_In):
    to: Start = Field(
        description="earliest, latest, a moment (ISO 8601 with a zone), or offsets by partition"
    )
    force: bool = Field(False, description="also while members are at work")
    dry_run: bool = Field(False, description="change nothing, and say what would be done")


class Convert(_In):
    mode: Literal["shared", "ordered", "kafka"]
    force: bool = Field(False, description="give up dead letters and retries that wait")
    dry_run: bool = Field(False, description="change nothing, and say what would be done")


# ---- routes ----


class Split(_In):
    partition: Count
    at: Count | None = Field(None, description="the first slot of the second half; the middle if left out")


class Merge(_In):
    one: Count
    other: Count


class Move(_In):
    partition: Count
    shard: Shard | None = Field(None, description="the emptiest one if left out")


@dataclass(frozen=True, slots=True)
class Piece:
    partition: int
    first_slot: int
    last_slot: int
    shard: str


@dataclass(frozen=True, slots=True)
class RouteShown:
    topic: str
    version: int
    ranges: list[Piece]
    sealed: list[Piece]  # to be read to their end
    change: str | None = None  # the kind of the change that is under way


def route_shown(route: Route, change: str | None = None) -> RouteShown:
    def piece(one: Range) -> Piece:
        return Piece(one.partition, one.first_slot, one.last_slot, one.shard or "first")

    ranges, sealed = list(map(piece, route.ranges)), list(map(piece, route.sealed))
    return RouteShown(route.topic, route.version, ranges, sealed, change)


# ---- rates ----


class SetRate(_In):
    topic: Topic | None = None
    group: Group | None = None
    producer: Topic | None = None
    messages_per_s: float | None = None
    bytes_per_s: Size | None = None


# ---- dead letters ----


class Chosen(_In):
    ids: list[Id] | None = Field(None, max_length=10_000)
    all: bool = Field(False, description="every one, in place of `ids`")


class ChosenStopped(_In):
    ids: list[Id] | None = Field(None, max_length=10_000)
    keys: list[Key] | None = Field(None, max_length=10_000, description="in place of `ids`")
    all: bool = Field(False, description="every one, in place of `ids` and `keys`")


@dataclass(frozen=True, slots=True)
class StoppedShown:
    id: str
    topic: str
    group: str
    partition: int
    offset: int
    key: str | None
    value: str | None  # None: it is no text; then `value_b64` has it
    value_b64: str | None
    headers: dict[str, str]
    timestamp: int
    reason: str
    attempts: int
    since: int
    behind: int | None
    more_behind: bool


@dataclass(frozen=True, slots=True)
class Letter:
    id: str
    topic: str
    partition: int
    offset: int
    key: str | None
    value: str | None  # None: it is no text; then `value_b64` has it
    value_b64: str | None
    headers: dict[str, str]
    timestamp: int
    reason: str
    attempts: int
    dead_at: int


@dataclass(frozen=True, slots=True)
class DelayedShown:
    id: str
    key: str | None
    value: str | None  # None: it is no text; then `value_b64` has it
    value_b64: str | None
    headers: dict[str, str]
    timestamp: int
    due_ms: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DelayedPage:
    messages: list[DelayedShown]
    next: str | None  # ask with `after` for what follows; None: nothing does


# ---- sending ----


class _Json(_In):
    content: Any = Field(alias="json")


class SendMessage(_In):
    value: str | _Json | None = Field(None, description='text, or {"json": …}')
    value_b64: str | None = None
    key: str | None = None
    headers: dict[str, str] | None = None
    id: str | None = None
    source: str | None = None
    delay: Duration | None = None
    at: str | None = Field(None, description="ISO 8601 with a zone")
    expires: Duration | None = None


class Send(_In):
    messages: list[SendMessage] = Field(min_length=1, max_length=DEFAULTS.max_batch_messages)


@dataclass(frozen=True, slots=True)
class SentReceipt:
    partition: int
    offset: int  # -1: delayed
    id: str
    duplicate: bool
    due: str | None  # when a delayed message is delivered


@dataclass(frozen=True, slots=True)
class Sent:
    receipts: list[SentReceipt]


# ---- polling ----


class Poll(_In):
    max_messages: int = Field(100, ge=1, le=1000)
    wait_s: float = Field(0, ge=0, le=DEFAULTS.poll_wait_ms / 1000)
    member: Member | None = Field(None, description="who takes them; one for each worker")
    base64: bool = Field(False, description="all values as base64, whether text or not")


@dataclass(frozen=True, slots=True)
class OutMessage:
    handle: str  # what it is settled with
    topic: str
    partition: int
    offset: int
    id: str
    key: str | None
    key_b64: str | None
    value: str | None  # None: it is no text; then `value_b64` has it
    value_b64: str | None
    headers: dict[str, str]
    timestamp: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Polled:
    messages: list[OutMessage]
    lease_s: float  # from now on they are this group's member's, for so long


class Handled(_In):
    handle: HandleText
    delay_s: Duration = 0
    reason: Annotated[str, StringConstraints(max_length=20_000)] = ""


class SettleBody(_In):
    acks: list[HandleText] = Field(default_factory=list, max_length=10_000)
    retries: list[Handled] = Field(default_factory=list, max_length=10_000)
    releases: list[Handled] = Field(default_factory=list, max_length=10_000)
    dead: list[Handled] = Field(default_factory=list, max_length=10_000)
    extends: list[HandleText] = Field(default_factory=list, max_length=10_000)
    member: Member | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    settled: int
    extended: int


# ---- bytes in JSON ----


def text_or_base64(value: bytes, *, always_base64: bool = False) -> tuple[str | None, str | None]:
    """One of the two.

    >>> text_or_base64(b"paid"), text_or_base64(b"\\xff")
    (('paid', None), (None, '/w=='))
    """
    if not always_base64:
        try:
            return value.decode(), None
        except UnicodeDecodeError:
            pass
    return None, base64.b64encode(value).decode()


def json_bytes(
    value: bytes, key: bytes | None, headers: Mapping[str, bytes], *, always_base64: bool = False
) -> int:
    """Returns about how much a message takes in JSON: control characters take six times their size.

    >>> json_bytes(b"\\0" * 1000, None, {}) - json_bytes(b"", None, {})
    6000
    """
    size = _FRAME_BYTES + (len(value) * 4 // 3 if always_base64 else _escaped(value))
    if key is not None:
        size += _escaped(key) + len(key)
    for name, content in headers.items():
        size += len(name.encode()) + _escaped(content) + 2 * _count(content, _HIGH) + 8
    return size


def _escaped(text: bytes) -> int:
    return len(text) + 5 * _count(text, _CONTROLS) + _count(text, _QUOTED)


def _count(text: bytes, which: bytes) -> int:
    return len(text) - len(text.translate(None, which))


def from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{where} is not base64") from None


def texts(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Header values as text; what is none is shown as far as it is."""
    return {name: value.decode(errors="replace") for name, value in headers.items()}


# ---- handles ----

_VERSION = 1
_LONGEST = 400


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A polled message is settled with it, so that the broker need not remember who polled what.

    It travels as base64 of its fields; the first byte is a version, and clients must not look into it. It is
    not signed: the token is 63 random bits that nobody else was told (I7), and whoever settles needs
    permission on the topic anyway.
    """

    topic: TopicName  # where it is stored: the topic, or the group's retry topic
    partition_id: PartitionId
    token: Token
    offset: Offset

    def encode(self) -> str:
        packed = bytes((_VERSION,)) + msgspec.msgpack.encode(self)
        return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()

    @staticmethod
    def decode(text: str) -> Handle:
        try:
            if len(text) > _LONGEST:
                raise ValueError("too long")
            packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            if packed[:1] != bytes((_VERSION,)):
                raise ValueError("another version")
            found = _handle(packed[1:])
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            raise BadRequest(
                f"{text[:80]!r} is no handle: pass on those of a poll's messages as they came"
            ) from None
        return found

    @property
    def place(self) -> tuple[str, int, int]:
        return (self.topic, self.partition_id, self.token)


_handle = msgspec.msgpack.Decoder(Handle).decode


def merged(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Neighbours that are settled alike become one range."""
    out: list[Verdict] = []
    for one in sorted(verdicts, key=lambda v: v.first):
        last = out[-1] if out else None
        if last is not None and one.first == last.last + 1 and _how(one) == _how(last):
            out[-1] = Verdict(one.kind, last.first, one.last, one.delay_ms, one.at_ms, one.reason)
        else:
            out.append(one)
    return tuple(out)


def _how(verdict: Verdict) -> tuple[object, ...]:
    return (verdict.kind, verdict.delay_ms, verdict.at_ms, verdict.reason)


def spans_of(offsets: Iterable[int]) -> tuple[Span, ...]:
    return tuple((v.first, v.last) for v in merged(Verdict("ack", one, one) for one in sorted(offsets)))
