"""Messages: what the header of each kind of frame holds, in one table.

Most operations are a verb of `Endpoint`: the fields of the request are its arguments, in their order, and
the answer is what it returns. A request is an array, so that fields can be added at its end: who does not
know them leaves them out, and they have a default. Values in it are maps, whose unknown keys are ignored.
Batches are never in a header: it has their sizes, and they follow in the body (`batches`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from ..endpoint.values import (
    Beat,
    Decided,
    GroupInfo,
    Held,
    Lag,
    PollRequest,
    Published,
    RateInfo,
    ResetPlan,
    Settle,
    SettleReply,
    ShardInfo,
    TopicInfo,
    UnparkRequest,
)
from ..errors import InvalidName, InvalidSetting, MessageTooLarge, PostroomError, ProtocolError
from ..model.delivery.delivery import Span
from ..model.messages.batch import TopicBounds
from ..model.messages.requests import ReplyTopic
from ..model.policy.bounds import (
    MOST_PARTS,
    ClientName,
    Count,
    GroupName,
    Ids,
    Long,
    MemberName,
    MessageId,
    Millis,
    Moment,
    Number,
    Offset,
    PartitionId,
    PartitionIds,
    Position,
    Positions,
    ShardName,
    Size,
    SpotList,
    Token,
    TopicName,
    Whole,
)
from ..model.policy.rate import Rate
from ..model.policy.settings import GroupWish, Start, TopicSettings
from ..model.policy.slow_lane import LaneInfo, LaneView
from ..model.topology.route import Change
from ..store.contract import Appended
from . import requests as lanes
from . import requests as staging
from . import values as batches
from . import values as routes
from .requests import Request

__all__ = [
    "ASK",
    "BROKERS",
    "CANCEL",
    "HELLO",
    "MAX_VERSION",
    "MIN_VERSION",
    "OPERATIONS",
    "Answer",
    "Ask",
    "BrokerInfo",
    "Brokers",
    "Cancel",
    "Failure",
    "Hello",
    "Operation",
    "Request",
    "Welcome",
    "decode",
    "encode_header",
    "operation",
]

MIN_VERSION = MAX_VERSION = 1

# of headers that have lists; others have room for a few names and numbers
_LONG = 128 * 1024
_LONGER = 256 * 1024
_LONGEST = 512 * 1024

# kinds that are no verb of `Endpoint`
HELLO = 1
CANCEL = 2
BROKERS = 3
ASK = 4


# ---- the connection ----


class Hello(Request):
    """The first frame of a client."""

    most_bytes: ClassVar[int] = 64 * 1024  # as many as a frame of a stranger

    min_version: Whole
    max_version: Whole
    client: ClientName  # its name, for people
    token: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    software: ClientName = ""

    def __repr__(self) -> str:
        return f"Hello(client={self.client!r}, software={self.software!r})"  # never the token


class BrokerInfo(msgspec.Struct, array_like=True, frozen=True):
    id: str
    address: str  # host:port
    zone: str = ""


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """The answer to `Hello`."""

    version: int
    broker: str  # its id
    principal: str
    now_ms: int  # by the store's clock
    max_frame_bytes: int
    brokers: tuple[BrokerInfo, ...] = ()
    software: str = ""
    queue: str = ""  # which queue it serves: all brokers of a queue say the same


class Cancel(Request):
    """Nobody waits for the answer to that request any more. It is answered all the same."""

    id: Long


class Brokers(Request):
    """Which brokers there are, and what time it is; also sent by a client that has nothing else to say."""


class BrokerList(msgspec.Struct, array_like=True, frozen=True):
    brokers: tuple[BrokerInfo, ...]
    now_ms: int


class Ask(Request):
    """From a broker to a client: the leases on these end soon; are they at work, or done (R19)?"""

    topic: str
    group: str
    member: str
    held: tuple[Held, ...]
    lease_ms: int  # what is at work is held for so long again


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """To `Ask`. What is in neither is not known to the client: it is delivered again when its lease ends."""

    most_bytes: ClassVar[int] = 512 * 1024

    working: Annotated[tuple[Held, ...], msgspec.Meta(max_length=MOST_PARTS)] = ()
    done: Annotated[tuple[Held, ...], msgspec.Meta(max_length=MOST_PARTS)] = ()


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """The header of an answer that says why not."""

    code: str
    message: str
    retriable: bool = False
    details: dict[str, Any] = {}


# ---- verbs ----


class CreateTopic(Request):
    name: TopicName
    settings: TopicSettings
    partitions: Number
    exist_ok: bool


class Nothing(Request):
    """No arguments."""


class Named(Request):
    name: TopicName


class OfTopic(Request):
    topic: TopicName


class AlterTopic(Request):
    name: TopicName
    settings: TopicSettings


class Split(Request):
    topic: TopicName
    partition: Number
    at: Number | None = None


class Merge(Request):
    topic: TopicName
    one: Number
    other: Number


class MoveTo(Request):
    topic: TopicName
    partition: Number
    shard: ShardName | None = None


class Append(Request):
    """The batch is the body."""

    most_bytes: ClassVar[int] = _LONGER

    topic: TopicName
    partition_id: PartitionId
    due_at: Moment = 0
    ids: Ids = b""
    producer: ClientName = ""  # whose rate it counts towards (R40), if the broker does not know it better


class BoundsOf(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    at: Positions = ()


class CancelDelayed(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    id: MessageId


class Fetch(Request):
    topic: TopicName
    partition_id: PartitionId
    offset: Offset
    max_messages: Count
    max_bytes: Size
    wait_ms: Millis


class Resolve(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    start: Start


class OfGroup(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    name: GroupName
    wish: GroupWish


class Pause(Request):
    topic: TopicName
    name: GroupName
    paused: bool


class DeleteGroup(Request):
    topic: TopicName
    name: GroupName
    force: bool


class Reset(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    name: GroupName
    start: Start
    force: bool
    dry_run: bool = False


class LagOf(Request):
    topic: TopicName
    group: GroupName


class Subscribe(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    group: GroupName
    wish: GroupWish
    member: MemberName
    client: ClientName
    named: bool = True


class Unsubscribe(Request):
    topic: TopicName
    group: GroupName
    member: MemberName


class Poll(Request):
    most_bytes: ClassVar[int] = _LONG

    request: PollRequest


class SettleParts(Request):
    most_bytes: ClassVar[int] = _LONGEST

    topic: TopicName
    group: GroupName
    parts: Annotated[tuple[Settle, ...], msgspec.Meta(max_length=MOST_PARTS)]


class Unpark(Request):
    most_bytes: ClassVar[int] = _LONG  # a key has 32 KB at most

    request: UnparkRequest


class HandOver(Request):
    most_bytes: ClassVar[int] = _LONG

    topic: TopicName
    group: GroupName
    token: Token
    partition_ids: PartitionIds


class Beats(Request):
    most_bytes: ClassVar[int] = _LONGEST

    beats: Annotated[tuple[Beat, ...], msgspec.Meta(max_length=MOST_PARTS)]


class Letters(Request):
    topic: TopicName
    group: GroupName
    limit: Count
    after: tuple[PartitionId, Position] | None = None


class Spots(Request):
    most_bytes: ClassVar[int] = _LONGER

    topic: TopicName
    group: GroupName
    spots: SpotList | None = None


class StoppedOf(Request):
    topic: TopicName
    group: GroupName
    limit: Count
    after: tuple[PartitionId, Position] | None = None
    behind: bool = True


class SetRate(Request):
    rate: Rate


class Requester(Request):
    """Whose reply topic it is; the broker adds the principal's name."""

    client: ClientName


# ---- the table ----

Packed = tuple[Any, Sequence[bytes]]
"""What goes into the header, and what follows it."""


def _plain(reply: Any) -> Packed:
    return reply, ()


@dataclass(frozen=True, slots=True)
class Operation:
    """A kind of request."""

    kind: int
    name: str  # the verb of `Endpoint`
    request: type[Request]
    reply: Any  # the type of the answer's header
    repeatable: bool = True  # if its answer was lost it may be asked again: nothing is done twice
    body: str = ""  # the argument that is the body
    pack: Callable[[Any], Packed] = _plain
    unpack: Callable[[Any, bytes], Any] | None = None


def _once(kind: int, name: str, request: type[Request], reply: Any) -> Operation:
    return Operation(kind, name, request, reply, repeatable=False)


def _routed(kind: int, name: str, request: type[Request], *, repeatable: bool) -> Operation:
    return Operation(
        kind, name, request, routes.RouteHead, repeatable, pack=routes.pack_route, unpack=routes.route
    )


_TABLE = (
    Operation(BROKERS, "brokers", Brokers, BrokerList),
    # log
    Operation(10, "append", Append, Appended, body="batch"),
    Operation(11, "fetch", Fetch, batches.FetchedHead, pack=batches.pack_fetched, unpack=batches.fetched),
    Operation(12, "resolve", Resolve, dict[int, int]),
    _once(13, "cancel", CancelDelayed, bool),  # repeated it would say that nothing was waiting
    Operation(14, "bounds", BoundsOf, TopicBounds),
    # deliveries
    Operation(20, "subscribe", Subscribe, GroupInfo),
    Operation(21, "unsubscribe", Unsubscribe, None),
    Operation(22, "poll", Poll, batches.PollHead, pack=batches.pack_poll, unpack=batches.polled),
    Operation(23, "settle", SettleParts, SettleReply),
    Operation(24, "hand_over", HandOver, None),
    Operation(25, "beat", Beats, list[tuple[Held, tuple[Span, ...]]]),
    Operation(26, "report_sources", lanes.Report, LaneView | None),
    Operation(27, "unpark", Unpark, batches.PollHead, pack=batches.pack_poll, unpack=batches.polled),
    # topics
    _once(30, "create_topic", CreateTopic, TopicInfo),
    Operation(31, "topics", Nothing, list[TopicInfo]),
    Operation(32, "topic", Named, TopicInfo),
    Operation(33, "alter_topic", AlterTopic, TopicInfo),
    _once(34, "delete_topic", Named, None),
    _once(35, "purge", Named, int),
    # routes and shards
    _routed(40, "route", OfTopic, repeatable=True),
    Operation(
        41, "route_history", OfTopic, list[routes.RouteHead], pack=routes.pack_routes, unpack=routes.routes
    ),
    Operation(42, "route_change", OfTopic, Change | None),
    _routed(43, "split", Split, repeatable=False),
    _routed(44, "merge", Merge, repeatable=False),
    _routed(45, "move", MoveTo, repeatable=False),
    Operation(46, "shards", Nothing, list[ShardInfo]),
    Operation(47, "drain_shard", Named, ShardInfo),
    Operation(48, "open_shard", Named, ShardInfo),
    # groups
    _once(50, "create_group", OfGroup, GroupInfo),
    Operation(51, "groups", OfTopic, list[GroupInfo]),
    Operation(52, "alter_group", OfGroup, GroupInfo),
    Operation(53, "pause", Pause, GroupInfo),
    _once(54, "delete_group", DeleteGroup, None),
    _once(55, "reset", Reset, ResetPlan),
    Operation(56, "lag", LagOf, Lag),
    Operation(57, "lanes", LagOf, LaneInfo),
    # dead letters
    Operation(
        60, "dead_letters", Letters, list[batches.LettersHead],
        pack=batches.pack_letters, unpack=batches.letters,
    ),
    _once(61, "redrive", Spots, int),
    _once(62, "discard", Spots, int),
    # what stopped
    Operation(
        63, "stopped", StoppedOf, list[batches.StoppedHead],
        pack=batches.pack_stopped, unpack=batches.stopped,
    ),
    _once(64, "restart_stopped", Spots, int),
    _once(65, "skip_stopped", Spots, int),
    _once(66, "drop_stopped", Spots, int),
    # rates
    Operation(70, "set_rate", SetRate, None),
    Operation(71, "rates", Nothing, list[RateInfo]),
    # staging
    Operation(80, "stage", staging.Stage, None, body="data"),
    Operation(81, "staged_marks", staging.Marks, dict[str, int]),
    Operation(82, "decide_staged", staging.Decide, Decided),
    Operation(83, "publish_staged", staging.Publish, Published),
    Operation(84, "drop_staged", staging.Drop, int),
    # replies
    Operation(90, "open_replies", Requester, ReplyTopic),
    Operation(91, "close_replies", Requester, None),
)  # fmt: skip

OPERATIONS = {operation.name: operation for operation in _TABLE}
_BY_KIND = {operation.kind: operation for operation in _TABLE}

_encoder = msgspec.msgpack.Encoder()

encode_header = _encoder.encode


def operation(kind: int) -> Operation:
    found = _BY_KIND.get(kind)
    if found is None:
        raise ProtocolError(f"there is no request of kind {kind} in version {MAX_VERSION} of the protocol")
    return found


def decode(header: bytes, kind: Any) -> Any:
    """A header as a value of that type; ProtocolError if it is none.

    Of a request that can be read: MessageTooLarge, InvalidName or InvalidSetting if something in it is longer
    or larger than its type allows. Its connection lives.
    """
    reader = _readers.get(kind) or _reader(kind)
    if len(header) > reader.most_bytes:
        raise MessageTooLarge(
            f"the header of this request has {len(header):,} bytes, and {reader.most_bytes:,} is the most "
            "that is taken: ask for less at once, in several requests",
            max_bytes=reader.most_bytes,
        )
    try:
        return reader.decode(header)
    except msgspec.ValidationError as error:
        raise _out_of_bounds(error, kind) or _unreadable(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error) from error


class _Reader(NamedTuple):
    decode: Callable[[bytes], Any]
    most_bytes: int


_readers: dict[Any, _Reader] = {}
_ANY_SIZE = 2**31  # of an answer: whoever reads it has asked for it
_BOUND = re.compile(r"Expected `(\w+)` (?:of length )?([<>])= (\S+)(?: - at `(?:key in )?\$\[(\d+)\](\S*)`)?")
_COUNTED = {"str": "characters", "bytes": "bytes", "array": "entries", "object": "entries"}


def _reader(kind: Any) -> _Reader:
    most_bytes = getattr(kind, "most_bytes", _ANY_SIZE)
    found = _readers[kind] = _Reader(msgspec.msgpack.Decoder(kind).decode, most_bytes)
    return found


def _unreadable(error: Exception) -> ProtocolError:
    return ProtocolError(f"the header of a frame cannot be read: {str(error)[:200]}")


def _out_of_bounds(error: msgspec.ValidationError, kind: Any) -> PostroomError | None:
    """What to say of a request that can be read, but for one value that is too long or too large."""
    found = _BOUND.match(str(error))
    if found is None or not (isinstance(kind, type) and issubclass(kind, Request)):
        return None
    what, sign, bound, index, rest = found.groups()
    field = f"{kind.__struct_fields__[int(index)]}{rest}" if index else "a value"
    limit = f"{'at most' if sign == '<' else 'at least'} {bound} {_COUNTED.get(what, '')}".rstrip()
    return (InvalidName if what == "str" else InvalidSetting)(f"{field} is out of bounds: {limit}")
