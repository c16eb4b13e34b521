"""Whether anybody traces, and if so: spans around sending and handling, and the trace in message headers.

Decides one thing: OpenTelemetry is used once the program itself has imported it, since a program that has not
cannot have set it up. Until then a call here costs one look into `sys.modules`, and nothing is imported: the
import alone takes 50 ms. What is recorded then is decided in `spans`, the only module that knows
OpenTelemetry. Must never import it first, and must never fail a send or a handler.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..model.topology.route import Range

if TYPE_CHECKING:
    from .app.subscription import Subscription
    from .codec import Packed
    from .message import Received
    from .producer.parcel import Parcel

__all__ = ["by_app", "handling", "of_batch", "posting", "sending", "unfit"]

_spans: ModuleType | None = None
_usable = True


def _tracing() -> ModuleType | None:
    """The module that makes spans, or None: nobody traces."""
    if _spans is not None or sys.modules.get("opentelemetry.trace") is None:
        return _spans
    return _load()


def _load() -> ModuleType | None:
    global _spans, _usable
    if _usable:
        try:
            from . import spans
        except ImportError:  # too old, or blocked: the program has its reasons
            _usable = False
        else:
            _spans = spans
    return _spans


# ---- sending ----


def sending(topic: str, packed: Packed) -> Any:
    """A span of one call, whose context the messages take along; None: there is nothing to record."""
    if _spans is None and "opentelemetry.trace" not in sys.modules:
        return None
    spans = _tracing()
    return None if spans is None else spans.sending(topic, packed)


def posting(packed: Packed) -> None:
    """Posted messages take the caller's own context along: their span is that of their batch."""
    spans = _tracing()
    if spans is not None:
        spans.posting(packed)


def of_batch(topic: str, where: Range, parcels: Sequence[Parcel]) -> Any:
    """A span of a batch with posted messages in it; None: it has none."""
    if _spans is None and "opentelemetry.trace" not in sys.modules:
        return None
    spans = _tracing()
    return None if spans is None else spans.of_batch(topic, where, parcels)


# ---- handling ----


def by_app(subscription: Subscription, unit: Sequence[Received]) -> Any:
    """A block in which an app's handler runs on these messages; None: there is nothing to do."""
    spans = _tracing()
    if spans is None:
        return None
    many = subscription.batch is not None
    return spans.handling(unit, subscription.topic, subscription.group, many=many, around=False)


def unfit(subscription: Subscription, message: Received, error: Exception) -> None:
    """A message that no handler gets, since its body does not fit."""
    block = by_app(subscription, [message])
    if block is not None:
        with block:
            block.failed(error)


def handling(messages: Received | Sequence[Received]) -> AbstractContextManager[Any]:
    """A span around the handling of a message, or of a list, for those who use a consumer by hand:

        with postroom.tracing.handling(message) as span: ...

    It is current within the block, so that what is sent there belongs to it; what is raised there is
    recorded. `span` is OpenTelemetry's, or None if nobody traces. Handlers of an `App` have it already.
    """
    spans = _tracing()
    many = isinstance(messages, Sequence)
    unit = list(messages) if isinstance(messages, Sequence) else [messages]
    if spans is None or not unit:
        return nullcontext()
    first = getattr(unit[0], "_target", unit[0])  # a message of postroom.sync stands for one of ours
    group = getattr(getattr(getattr(first._delivery, "settler", None), "who", None), "group", "")
    block = spans.handling(unit, first.topic, group.partition("@")[0], many=many, around=True)
    return nullcontext() if block is None else block
