"""Messages of the protocol that are no operation of a queue, and how headers are written and read.

A connection begins with `Hello`, and its requests may be cancelled; which brokers there are may be asked by
anybody who is let in, so that is no operation of `endpoint.operations`. Any request may be answered with a
`Failure`. Headers are MessagePack. Batches are never in one: it has their sizes, and they follow in the body
(`replies`).
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from .. import errors
from ..endpoint.operations import Operation, operation_of
from ..endpoint.requests import Request
from ..errors import InvalidName, InvalidSetting, MessageTooLarge, PostroomError, ProtocolError
from ..model.policy.bounds import ClientName, Long, Whole

__all__ = [
    "ASK", "BROKERS", "CANCEL", "HELLO", "LIST_BROKERS", "MAX_VERSION", "MIN_VERSION", "BrokerInfo",
    "BrokerList", "Brokers", "Cancel", "Failure", "Hello", "Welcome", "decode", "encode_header",
    "failure_of", "operation", "raised",
]  # fmt: skip

_log = logging.getLogger("postroom.wire")

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
    offers: tuple[str, ...] = ()  # operations that it knows, and some brokers of this version do not


class Cancel(Request):
    """Says that nobody waits for the answer to that request any more. It is answered all the same."""

    id: Long


class Brokers(Request):
    """Asks which brokers there are, and what time it is; also by a client with nothing else to say."""


class BrokerList(msgspec.Struct, array_like=True, frozen=True):
    brokers: tuple[BrokerInfo, ...]
    now_ms: int


LIST_BROKERS = Operation(BROKERS, "brokers", Brokers, BrokerList, "none", lambda request, who: ())
"""As if it were an operation, for the client; a broker answers it without asking the queue."""


# ---- errors ----
# A code for machines, a sentence for people, and what a program may want to read. An error of our tree
# arrives as the same class; one that the other side does not know as the nearest thing it does, a
# `PostroomError` with its code in the details, and as retriable as it was. What is not of our tree is a fault
# of the broker: it is logged there, and the client is told no more than that. Where a sentence is for whoever
# runs the broker, its `_served` goes instead: a client is never told to do what it cannot.

_CLASSES: dict[str, type[PostroomError]] = {
    found.code: found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, PostroomError)
}
_PLAIN = (str, int, float, bool, bytes, type(None))


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """The header of an answer that says why not."""

    code: str
    message: str
    retriable: bool = False
    details: dict[str, Any] = {}


class _Foreign(PostroomError):
    """An error of a newer broker that may be tried again."""

    retriable = True


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, PostroomError):
        details = {
            name: value
            for name, value in error.details.items()
            if not name.startswith("_") and _travels(value)
        }
        return Failure(error.code, error.details.get("_served") or str(error), error.retriable, details)
    _log.error("a request failed in an unexpected way", exc_info=error)
    return Failure("broker", f"the broker failed ({type(error).__name__}): look into its log")


def raised(failure: Failure) -> PostroomError:
    """Returns the error to raise for a failure."""
    kind = _CLASSES.get(failure.code)
    found = (kind or (_Foreign if failure.retriable else PostroomError))(failure.message)
    found.details.update(failure.details)  # whatever their names are
    if kind is None:
        found.details.setdefault("code", failure.code)
    return found


def _travels(value: Any) -> bool:
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, list | tuple):
        return all(map(_travels, value))
    if isinstance(value, dict):
        return all(isinstance(k, str | int) and _travels(v) for k, v in value.items())
    return isinstance(value, _PLAIN)


# ---- headers ----

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
# msgspec keeps what it knows of a class on the class from the moment it begins to find out, without a lock: a
# thread that decodes the class meanwhile reads what is not there yet, and the process ends (SIGSEGV, 0.22).
_making = threading.Lock()
_ANY_SIZE = 2**31  # of an answer: whoever reads it has asked for it
_BOUND = re.compile(r"Expected `(\w+)` (?:of length )?([<>])= (\S+)(?: - at `(?:key in )?\$\[(\d+)\](\S*)`)?")
_COUNTED = {"str": "characters", "bytes": "bytes", "array": "entries", "object": "entries"}


def _reader(kind: Any) -> _Reader:
    most_bytes = getattr(kind, "most_bytes", _ANY_SIZE)
    with _making:
        found = _readers[kind] = _Reader(msgspec.msgpack.Decoder(kind).decode, most_bytes)
    return found


def _unreadable(error: Exception) -> ProtocolError:
    return ProtocolError(f"the header of a frame cannot be read: {str(error)[:200]}")


def _out_of_bounds(error: msgspec.ValidationError, kind: Any) -> PostroomError | None:
    """Returns the error for a request that can be read, but for one value that is too long or too large."""
    found = _BOUND.match(str(error))
    if found is None or not (isinstance(kind, type) and issubclass(kind, Request)):
        return None
    what, sign, bound, index, rest = found.groups()
    field = f"{kind.__struct_fields__[int(index)]}{rest}" if index else "a value"
    limit = f"{'at most' if sign == '<' else 'at least'} {bound} {_COUNTED.get(what, '')}".rstrip()
    return (InvalidName if what == "str" else InvalidSetting)(f"{field} is out of bounds: {limit}")
