"""Messages into records and back.

Decides what a message may be made of (names and sizes within limits; what a value is sent as is decided in
`model.messages.body`) and which record headers are Postroom's own. Must never let a wrong message through: a
whole list is checked before any of it is stored.
Both directions have a path for plain messages (no headers, no id) that costs a fraction of a microsecond.
"""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from ..config import DEFAULTS
from ..errors import InvalidMessage, InvalidSetting, MessageTooLarge
from ..model.messages.batch import Headers, Record
from ..model.messages.body import encode
from ..model.messages.requests import REPLY_TO, REQUEST, asked
from ..model.messages.timestamps import check_sent
from ..model.moves.schedule import SLOT_HEADER
from ..model.topology.names import HEADER_PREFIX
from ..units import Duration, Moment, duration_ms, moment_ms
from .message import NO_HEADERS, Delivered, Message, Received

__all__ = [
    "Entry",
    "Expiry",
    "Packed",
    "as_datetime",
    "as_key",
    "due_at",
    "listed",
    "new_id",
    "pack",
    "pack_all",
    "unpack",
]


def due_at(delay: Duration | None, at: Moment | None, now_ms: int, reached_ms: int | None = None) -> int:
    """Return when a delayed message is due, in milliseconds (R35); 0: now.

    Decided once per call, by the shard's clock that the caller passes in, so that messages sent together are
    due together. What is due now, or was due before, is no delayed message: it is stored at once. That must
    be certain: where `now_ms` may be ahead of that clock, `reached_ms` is what it has passed.
    """
    if delay is not None and at is not None:
        raise InvalidSetting("a message takes delay= or at=, not both")
    if delay is not None:
        due = now_ms + duration_ms(delay, name="delay")
    elif at is not None:
        due = moment_ms(at, name="at")
    else:
        return 0
    return due if due > (now_ms if reached_ms is None else reached_ms) else 0


def as_datetime(due: int) -> datetime | None:
    return datetime.fromtimestamp(due / 1000, UTC) if due else None


def new_id() -> str:
    """For a delayed message that was given none, to cancel it by: 15 letters and digits, 86 random bits."""
    return b64encode(secrets.token_bytes(11), altchars=b"xy").decode()[:15]


class Expiry:
    """What one reader has seen of messages that expire: nobody is shown one whose moment has passed (R39).

    Decided by the shard's clock, when a message is received and once more when it is handed out, since it may
    wait here in between. What is dropped is counted, and whoever drops it must settle it: it is done with,
    and no failure. A duration counts from when the message was sent; of a delayed one, from when it is due.
    """

    __slots__ = ("dropped", "now_ms", "some")

    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms  # what is unpacked is compared with this
        self.some = False  # a message that expires has come: before that, nothing need be looked at
        self.dropped = 0  # messages that nobody was shown

    def sift(self, messages: list[Received], now_ms: int) -> tuple[list[Received], Sequence[Received]]:
        """Those to be shown, and those whose moment has passed."""
        passed = now_ms / 1000
        gone = [m for m in messages if m.expires is not None and m.expires.timestamp() <= passed]
        if not gone:
            return messages, gone
        self.dropped += len(gone)
        dropped = set(map(id, gone))
        return [m for m in messages if id(m) not in dropped], gone


Entry: TypeAlias = tuple[bytes | None, bytes, Headers]
"""Key, value and headers, as the batch builder takes them."""

_ID, _SOURCE, _EXPIRES = f"{HEADER_PREFIX}id", f"{HEADER_PREFIX}source", f"{HEADER_PREFIX}expires"
_TOPIC, _PARTITION = f"{HEADER_PREFIX}topic", f"{HEADER_PREFIX}partition"
_OFFSET, _TIMESTAMP = f"{HEADER_PREFIX}offset", f"{HEADER_PREFIX}timestamp"
_ATTEMPTS, _FAILURES = f"{HEADER_PREFIX}attempts", f"{HEADER_PREFIX}failures"  # both: of a far retry
_NONE: Headers = []
_ID_SIZE = len(_ID)


@dataclass(slots=True)
class Packed:
    """Messages that were checked, ready for a batch."""

    entries: list[Entry]
    size: int
    ids: list[str | None] | None = None  # None: not one was given
    timestamps: list[int | None] | None = None  # None: all are stamped when they are sent
    keyed: bool = False  # at least one has a key
    dues: list[int] | None = None  # when each is due, 0: now; None: all now
    origin: Any = None  # the trace that posted them belong to


def pack(message: Message, now_ms: int, due: int = 0, slot: int | None = None) -> Packed:
    """One message. `due` is when it is due if it does not say so itself (0: now), `slot` the one named."""
    if message.delay is not None or message.at is not None:
        due = due_at(message.delay, message.at, now_ms)
    id = new_id() if due and message.id is None else message.id
    entry, size = _entry(message, now_ms, id, due, slot)
    stamp = message.timestamp
    return Packed(
        [entry],
        size,
        ids=None if id is None else [id],
        timestamps=None if stamp is None else [_checked_timestamp(stamp, now_ms)],
        keyed=entry[0] is not None,
        dues=[due] if due else None,
    )


def listed(messages: Iterable[Any]) -> list[Any]:
    """Return what `send_many` was given, as a list; one value that can be iterated is refused."""
    if type(messages) is list:
        return messages
    single = isinstance(messages, str | bytes | bytearray | memoryview | Mapping | Message)
    if single or hasattr(messages, "_fields") or hasattr(type(messages), "__pydantic_validator__"):
        raise InvalidMessage(
            f"send_many takes a list of messages or values, and this is one {type(messages).__name__}: "
            "use send for it, or write [it]"
        )
    try:
        return list(messages)
    except TypeError:
        if hasattr(messages, "__iter__"):
            raise
        raise InvalidMessage(
            f"send_many takes a list of messages or values, not {type(messages).__name__}: use send for one"
        ) from None


def pack_all(
    messages: Sequence[Any],
    now_ms: int,
    due: int = 0,
    slot: int | None = None,
    reached_ms: int | None = None,
) -> Packed:
    """A list of messages, or of values that become the messages' bodies: all or none."""
    try:
        plain = None if due else _pack_plain(messages)
    except (UnicodeEncodeError, InvalidMessage, MessageTooLarge):
        plain = None
    return _pack_any(messages, now_ms, due, slot, reached_ms) if plain is None else plain


def _pack_plain(messages: Sequence[Any]) -> Packed | None:
    """Messages that are a value with a key, headers and an id, or without, packed in one pass.

    None, or an error: one of them has more, or something wrong. `_pack_any` knows what to do then.
    """
    entries: list[Entry] = []
    ids: list[str | None] = []  # up to the last that was given
    add, total, keyed = entries.append, 0, False
    limit, longest = DEFAULTS.max_message_bytes, DEFAULTS.max_key_bytes
    for m in messages:
        if type(m) is not Message:
            if isinstance(m, Message):
                return None
            m = Message(m)
        if (
            m.source is not None
            or m.expires is not None
            or m.timestamp is not None
            or m.delay is not None
            or m.at is not None
        ):
            return None
        value, key, headers = m.value, m.key, _NONE
        if type(value) is not bytes:
            value = _as_value(value)
        if key is None:
            size = len(value)
        else:
            if type(key) is not bytes:
                if type(key) is not str:
                    return None
                key = key.encode()
            size = len(value) + len(key)
            keyed = True
        if m.headers:
            headers = _user_headers(m.headers)
            size += sum([len(name) + len(content or b"") for name, content in headers])
        if m.id is not None:
            if type(m.id) is not str or not 0 < len(m.id) <= longest:
                return None
            text = m.id.encode()
            size += _ID_SIZE + len(text)
            headers = [*headers, (_ID, text)]
            ids += [None] * (len(entries) - len(ids))
            ids.append(m.id)
        if size > longest and (size > limit or len(key or b"") > longest):
            return None
        total += size
        add((key, value, headers))
    if ids:
        ids += [None] * (len(entries) - len(ids))
    return Packed(entries, total, ids=ids or None, keyed=keyed)


def _pack_any(
    messages: Iterable[object], now_ms: int, due: int, slot: int | None, reached_ms: int | None = None
) -> Packed:
    packed = Packed([], 0)
    ids: list[str | None] = []
    stamps: list[int | None] = []
    dues: list[int] = []
    for at, given in enumerate(messages):
        message = given if isinstance(given, Message) else Message(given)
        try:
            own = message.delay is not None or message.at is not None
            dues.append(due_at(message.delay, message.at, now_ms, reached_ms) if own else due)
            ids.append(new_id() if dues[-1] and message.id is None else message.id)
            entry, size = _entry(message, now_ms, ids[-1], dues[-1], slot)
            stamp = message.timestamp
            stamps.append(None if stamp is None else _checked_timestamp(stamp, now_ms))
        except (InvalidMessage, InvalidSetting, MessageTooLarge) as error:
            raise type(error)(f"messages[{at}]: {error}", index=at, **error.details) from None
        packed.entries.append(entry)
        packed.size += size
        packed.keyed = packed.keyed or entry[0] is not None
    packed.ids = ids if any(i is not None for i in ids) else None
    packed.timestamps = stamps if any(s is not None for s in stamps) else None
    packed.dues = dues if any(dues) else None
    return packed


def _entry(message: Message, now_ms: int, id: str | None, due: int, slot: int | None) -> tuple[Entry, int]:
    value = message.value if type(message.value) is bytes else _as_value(message.value)
    key = None if message.key is None else as_key(message.key)
    headers = _NONE if not message.headers else _user_headers(message.headers)
    if id is not None or message.source is not None or message.expires is not None:
        headers = [*headers, *_own_headers(message, id, due or now_ms)]
    if due and slot is not None:
        headers = [*headers, (SLOT_HEADER, b"%d" % slot)]
    size = len(value) + (len(key) if key else 0)
    if headers:
        size += sum(len(name) + len(content or b"") for name, content in headers)
    if size > DEFAULTS.max_message_bytes:
        raise MessageTooLarge(
            f"the message has {size:,} bytes, the limit is {DEFAULTS.max_message_bytes:,}: "
            "split it, or store it elsewhere and send where it is",
            size=size,
            limit=DEFAULTS.max_message_bytes,
        )
    return (key, value, headers), size


def _as_value(value: object) -> bytes:
    if isinstance(value, Message):  # a Struct, and would be sent as such
        raise InvalidMessage(
            f"this is a {type(value).__name__}, not a value: send_many takes messages; send takes "
            "message.value, key=message.key and so on"
        )
    return encode(value)


def as_key(key: object) -> bytes:
    found = _text_or_bytes(key, "key")
    if len(found) > DEFAULTS.max_key_bytes:
        raise MessageTooLarge(
            f"the key has {len(found):,} bytes, the limit is {DEFAULTS.max_key_bytes:,}: "
            "use a hash of it, or a shorter name",
            size=len(found),
            limit=DEFAULTS.max_key_bytes,
        )
    return found


def _text_or_bytes(value: object, what: str) -> bytes:
    if isinstance(value, str):
        return _encoded(value, what)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidMessage(
        f"{what} must be str or bytes, not {type(value).__name__}: write str({value!r}) or encode it"
    )


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"{what} has a character that UTF-8 does not have: {text!r}") from None


def _user_headers(headers: object) -> Headers:
    if type(headers) is not dict and not isinstance(headers, Mapping):  # the latter is slow to find out
        raise InvalidMessage(
            f"headers must be a dict such as {{'source': 'web'}}, not {type(headers).__name__}"
        )
    if len(headers) > DEFAULTS.max_headers:
        raise MessageTooLarge(
            f"the message has {len(headers)} headers, the limit is {DEFAULTS.max_headers}: use the value",
            size=len(headers),
            limit=DEFAULTS.max_headers,
        )
    return [
        (_header_name(name), value if type(value) is bytes else _text_or_bytes(value, f"header {name!r}"))
        for name, value in headers.items()
    ]


def _header_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidMessage(f"header names must be str, and not empty; not {name!r}")
    if name.startswith(HEADER_PREFIX):
        raise InvalidMessage(
            f"the header name {name!r} is reserved: names must not start with {HEADER_PREFIX!r}"
        )
    if not name.isascii():
        _encoded(name, "a header name")
    return name


def _own_headers(message: Message, id: str | None, visible_ms: int) -> Headers:
    own: Headers = []
    for name, what, text in ((_ID, "id", id), (_SOURCE, "source", message.source)):
        if text is None:
            continue
        if not isinstance(text, str) or not 0 < len(text) <= DEFAULTS.max_key_bytes:
            hint = "" if isinstance(text, str) else f": write {what}=str(…)"
            raise InvalidMessage(
                f"{what} must be str of 1 to {DEFAULTS.max_key_bytes} characters; not {text!r}{hint}"
            )
        own.append((name, _encoded(text, what)))
    if message.expires is not None:
        own.append((_EXPIRES, b"%d" % _expiry_ms(message.expires, visible_ms)))
    return own


def _expiry_ms(expires: Duration | datetime, visible_ms: int) -> int:
    """A duration counts from when the message can be seen: of a delayed one, when it is due."""
    if isinstance(expires, datetime):
        return moment_ms(expires, name="expires")
    return visible_ms + duration_ms(expires, name="expires")


def _checked_timestamp(timestamp: object, now_ms: int) -> int:
    if not isinstance(timestamp, int) or isinstance(timestamp, bool):
        raise InvalidMessage(f"timestamp must be milliseconds since 1970 as int; not {timestamp!r}")
    check_sent(timestamp, timestamp, now_ms)
    return timestamp


# ---- back -------------------------------------------------------------------------------------------


def unpack(records: Iterable[Record], delivery: Delivered, expiry: Expiry | None = None) -> list[Received]:
    """Received messages of one delivery, without those whose moment has passed if `expiry` is given.

    Constructor arguments go by position: it is the hot path.
    """
    bare, make, expired = NO_HEADERS, Received, set[int]()
    found = [
        make(r.value or b"", r.key, bare, "", None, None, r.timestamp, r.offset, None, delivery, r.offset)
        if not r.headers
        else _with_headers(r, delivery, expiry, expired)
        for r in records
    ]
    if not expired or expiry is None:
        return found
    expiry.dropped += len(expired)
    return [message for message in found if message._position not in expired]


def _with_headers(record: Record, delivery: Delivered, expiry: Expiry | None, expired: set[int]) -> Received:
    own: dict[str, str] = {}
    shown: dict[str, bytes] = {}
    for name, value in record.headers:
        if name.startswith(HEADER_PREFIX):
            own[name] = (value or b"").decode(errors="replace")
        else:
            shown[name] = value or b""
    offset, timestamp, origin = record.offset, record.timestamp, None
    if _TOPIC in own:
        origin = (own[_TOPIC], _number(own, _PARTITION, -1))
        offset, timestamp = _number(own, _OFFSET, offset), _number(own, _TIMESTAMP, timestamp)
    before = _number(own, _ATTEMPTS, 0) if _FAILURES in own else 0
    expires = None
    if _EXPIRES in own:
        expires = _moment(own[_EXPIRES])
        if expiry is not None:
            expiry.some = True
            if _number(own, _EXPIRES, expiry.now_ms + 1) <= expiry.now_ms:
                expired.add(record.offset)
    return Received(
        record.value or b"", record.key, shown or NO_HEADERS, "", own.get(_SOURCE), expires, timestamp,
        offset, own.get(_ID), delivery, record.offset, origin, before,
        asked(own[REQUEST], own.get(REPLY_TO)) if REQUEST in own else None,
    )  # fmt: skip


def _number(own: Mapping[str, str], name: str, otherwise: int) -> int:
    try:
        return int(own[name])
    except (KeyError, ValueError):  # written by somebody else: show what we know
        return otherwise


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(text) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None
