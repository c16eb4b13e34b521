"""Spans, in OpenTelemetry's words. Imported by `tracing`, and only once the program has OpenTelemetry.

Decides which spans there are and what they are called, by the semantic conventions for messaging:

    send, send_many     "send <topic>", PRODUCER, one a call; the messages carry its context
    posts               "send <topic>", CLIENT, one a batch; the messages carry the context of who posted
                        them, which is its parent if they all share it, else each is a link
    a message handled   "handle <topic>", CONSUMER, a child of the context that the message carries
    a list handled      the same, with a link to each context that its messages carry

Contexts travel in headers, written and read by the propagator that the program has set (W3C's `traceparent`,
`tracestate` and `baggage` by default). Must never change a header of the user's, never do per message what
can be done per call, and never let a failure of tracing out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from ..model.messages.batch import Headers
from ..model.topology.route import Range
from .app.handler import RetryLater

if TYPE_CHECKING:
    from .codec import Packed
    from .message import Receipt, Received
    from .producer.parcel import Parcel

__all__ = ["handling", "of_batch", "posting", "sending"]

log = logging.getLogger("postroom.tracing")

T = TypeVar("T")

_tracer = trace.get_tracer("postroom")
_MOST_LINKS = 128  # what the SDK keeps by default
_PARENT, _STATE = "traceparent", "tracestate"

_NAME, _PARTITION_ID = "messaging.destination.name", "messaging.destination.partition.id"
_MESSAGE_ID, _COUNT = "messaging.message.id", "messaging.batch.message_count"
_GROUP, _OFFSET = "messaging.consumer.group.name", "messaging.postroom.offset"
_ATTEMPT, _ERROR = "messaging.postroom.attempt", "error.type"

_SEND = {
    "messaging.system": "postroom",
    "messaging.operation.name": "send",
    "messaging.operation.type": "send",
}
_HANDLE = {
    "messaging.system": "postroom",
    "messaging.operation.name": "handle",
    "messaging.operation.type": "process",
}


def _harmless(function: Callable[..., T]) -> Callable[..., T | None]:
    """A propagator, sampler or exporter of the user's that fails must not fail a message."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            log.warning("tracing failed; the message goes on without", exc_info=True)
            return None

    return call


def _provided() -> bool:
    """Whether the program has set up a tracer provider; without one no span is ever recorded."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


# ---- contexts in headers ----

_last: tuple[Any, Any, Headers] = (None, None, [])


def _headers_of(context: Context) -> Headers:
    """What a context is in headers. Kept for the last one: posts of one caller share it."""
    global _last
    known, writer, headers = _last
    propagator = propagate.get_global_textmap()
    if known is not context or writer is not propagator:
        headers = _written(propagator, context) or []
        _last = (context, propagator, headers)
    return headers


@_harmless
def _written(propagator: Any, context: Context) -> Headers:
    carrier: dict[str, str] = {}
    propagator.inject(carrier, context=context)
    return [(name, value.encode(errors="replace")) for name, value in carrier.items()]


def _stamp(packed: Packed, headers: Headers) -> None:
    if not headers:
        return
    packed.entries = [
        (key, value, _joined(own, headers) if own else headers) for key, value, own in packed.entries
    ]
    packed.size += len(packed.entries) * sum(len(name) + len(value or b"") for name, value in headers)


def _joined(own: Headers, ours: Headers) -> Headers:
    """The user's win. A trace's state is of no use beside another's parent."""
    given = {name for name, _ in own}
    if _PARENT in given:
        given.add(_STATE)
    return [*own, *(header for header in ours if header[0] not in given)]


class _Getter:
    """Reads headers for a propagator."""

    def get(self, carrier: Mapping[str, bytes], key: str) -> list[str] | None:
        value = carrier.get(key)
        return None if value is None else [value.decode(errors="replace")]

    def keys(self, carrier: Mapping[str, bytes]) -> list[str]:
        return list(carrier)


_getter: Any = _Getter()
_last_read: tuple[Any, Any, Context] = (None, None, Context())


def _carried(message: Received) -> Context:
    """The context that a message carries; an empty one if it has none. Kept for the last headers: messages
    of one call share them."""
    global _last_read
    if not message.headers:
        return Context()
    known, reader, context = _last_read
    propagator = propagate.get_global_textmap()
    if known != message.headers or reader is not propagator:
        context = _read(message.headers) or Context()
        _last_read = (message.headers, propagator, context)
    return context


@_harmless
def _read(headers: Mapping[str, bytes]) -> Context:
    return propagate.extract(headers, context=Context(), getter=_getter)


def _links(messages: Sequence[Received]) -> list[Link]:
    """One for each context that the messages carry: those of one call carry the same, and are read once."""
    fields = sorted(propagate.get_global_textmap().fields)
    found: dict[tuple[bytes | None, ...], Received] = {}
    for message in messages:
        if message.headers:
            found.setdefault(tuple(map(message.headers.get, fields)), message)
        if len(found) >= _MOST_LINKS:
            break
    spans = [trace.get_current_span(_carried(message)).get_span_context() for message in found.values()]
    return [Link(span) for span in spans if span.is_valid]


# ---- sending ----


class _Ending:
    """A span that ends with its block; what is raised there is recorded."""

    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        self._span = span

    def __enter__(self) -> Any:
        return self._span

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.failed(error)
        self._end()

    def over(self, error: BaseException | None) -> None:
        self.__exit__(None, error, None)

    @_harmless
    def failed(self, error: BaseException) -> None:
        self._span.set_attribute(_ERROR, type(error).__name__)
        if isinstance(error, RetryLater):
            return  # the handler wished so
        if isinstance(error, Exception):
            self._span.record_exception(error)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))

    @_harmless
    def _end(self) -> None:
        self._span.end()


class Sending(_Ending):
    __slots__ = ()

    @_harmless
    def stored(self, receipt: Receipt) -> None:
        if receipt.partition >= 0 and self._span.is_recording():
            found = {_MESSAGE_ID: receipt.id, _PARTITION_ID: str(receipt.partition)}
            self._span.set_attributes(found if receipt.offset < 0 else {**found, _OFFSET: receipt.offset})


@_harmless
def sending(topic: str, packed: Packed) -> Sending | None:
    if not _provided():
        _stamp(packed, _headers_of(contexts.get_current()))
        return None
    count = len(packed.entries)
    attributes = {**_SEND, _NAME: topic, **({_COUNT: count} if count > 1 else {})}
    span = _tracer.start_span(f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes)
    _stamp(packed, _headers_of(trace.set_span_in_context(span)))
    return Sending(span)


@_harmless
def posting(packed: Packed) -> None:
    packed.origin = contexts.get_current()
    _stamp(packed, _headers_of(packed.origin))


@_harmless
def of_batch(topic: str, where: Range, parcels: Sequence[Parcel]) -> _Ending | None:
    origins = {id(parcel.origin): parcel.origin for parcel in parcels if parcel.origin is not None}
    if not origins or not _provided():
        return None
    senders = {}
    for context in origins.values():
        sender = trace.get_current_span(context).get_span_context()
        senders[sender.trace_id, sender.span_id] = (context, sender)
    one = len(senders) == 1
    count = sum(len(parcel.entries) for parcel in parcels)
    span = _tracer.start_span(
        f"send {topic}",
        context=next(iter(senders.values()))[0] if one else Context(),
        kind=SpanKind.CLIENT,
        links=[] if one else [Link(s) for _, s in senders.values() if s.is_valid][:_MOST_LINKS],
        attributes={**_SEND, _NAME: topic, _PARTITION_ID: str(where.partition), _COUNT: count},
    )
    return _Ending(span)


# ---- handling ----


class Handling(_Ending):
    """The span is the current one within the block."""

    __slots__ = ("_context", "_token")

    def __init__(self, span: Any, context: Context) -> None:
        super().__init__(span)
        self._context = trace.set_span_in_context(span, context)
        self._token: Any = None

    def __enter__(self) -> Any:
        self._token = contexts.attach(self._context)
        return self._span

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        contexts.detach(self._token)
        super().__exit__(kind, error, trace)


@_harmless
def handling(
    unit: Sequence[Received], topic: str, group: str, *, many: bool, around: bool
) -> Handling | None:
    """`around`: it is a part of what its caller is doing; an app's lanes do nothing else."""
    if not _provided() and not any(message.headers for message in unit):
        return None
    outer = contexts.get_current() if around else Context()
    attributes: dict[str, Any] = {**_HANDLE, _NAME: topic, **({_GROUP: group} if group else {})}
    if many:
        parent, links = outer, _links(unit)
        attributes[_COUNT] = len(unit)
    else:
        parent, links = _parent_of(unit[0], outer)
        attributes.update(_attributes(unit[0]))
    span = _tracer.start_span(
        f"handle {topic}", context=parent, kind=SpanKind.CONSUMER, attributes=attributes, links=links
    )
    return Handling(span, parent)


def _parent_of(message: Received, outer: Context) -> tuple[Context, list[Link]]:
    """The message's context, with a link to what is going on around it; or only that."""
    carried = _carried(message)
    around = trace.get_current_span(outer).get_span_context()
    if not trace.get_current_span(carried).get_span_context().is_valid:
        return (outer if around.is_valid else carried), []
    return carried, [Link(around)] if around.is_valid else []


def _attributes(message: Received) -> dict[str, Any]:
    return {
        _MESSAGE_ID: message.id,
        _PARTITION_ID: str(message.partition),
        _OFFSET: message.offset,
        _ATTEMPT: message.attempt,
    }
