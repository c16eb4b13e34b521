"""Messages of the protocol that are no operation of a queue, and how headers are written and read.

A connection begins with `Hello`, and its requests may be cancelled; which brokers there are may be asked by
anybody who is let in, so that is no operation of `endpoint.operations`. Headers are MessagePack. Batches are
never in one: it has their sizes, and they follow in the body (`replies`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from ..endpoint.operations import Operation, operation_of
from ..endpoint.requests import Request
from ..errors import InvalidName, InvalidSetting, MessageTooLarge, PostroomError, ProtocolError
from ..model.policy.bounds import ClientName, Long, Whole

__all__ = [
    "ASK", "BROKERS", "CANCEL", "HELLO", "LIST_BROKERS", "MAX_VERSION", "MIN_VERSION", "BrokerInfo",
    "BrokerList", "Brokers", "Cancel", "Failure", "Hello", "Welcome", "decode", "encode_header", "operation",
]  # fmt: skip

MIN_VERSION = MAX_VERSION = 1

# kinds of frames that are of no operation of a queue
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


LIST_BROKERS = Operation(BROKERS, "brokers", Brokers, BrokerList, "none", lambda request, who: ())
"""As if it were an operation, for the client; a broker answers it without asking the queue."""


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """The header of an answer that says why not."""

    code: str
    message: str
    retriable: bool = False
    details: dict[str, Any] = {}


_encoder = msgspec.msgpack.Encoder()

encode_header = _encoder.encode


def operation(kind: int) -> Operation:
    """The operation that frames of this kind ask for; ProtocolError if it is not in the table."""
    found = operation_of(kind)
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
