"""A message as a row of the outbox, and back.

Decides nothing about messages that `codec` does not: what is wrong with one is said when it is written, in
the caller's transaction, since nobody is there any more when it is sent. Its moments (delay, expiry,
timestamp) count from then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model import forwarding
from ...model.forwarding import Stamp, pack_headers
from ...model.names import check_topic
from ...units import Duration, Moment
from ..codec import Packed, pack_all
from ..delay import due_at
from ..message import Message
from ..producing.producer import check_slot
from ..tracing import posting

__all__ = ["COLUMNS", "Row", "row_of", "rows_of"]

COLUMNS = "topic, message_key, message_value, headers, message_id, due_at, slot, sent_at, size"

Row = tuple[str, bytes | None, bytes, bytes, bytes | None, int, int | None, int, int]
"""The values of `COLUMNS`. Due at 0: at once."""


def rows_of(
    topic: str,
    messages: Sequence[Message],
    now_ms: int,
    *,
    slot: int | None = None,
    delay: Duration | None = None,
    at: Moment | None = None,
) -> list[Row]:
    """All of them, or an error that says what is wrong with one."""
    topic, slot = check_topic(topic), check_slot(slot)
    packed: Packed = pack_all(messages, now_ms, due_at(delay, at, now_ms), slot)
    posting(packed)
    nothing = [None] * len(packed.entries)
    ids, stamps, dues = packed.ids or nothing, packed.timestamps or nothing, packed.dues or nothing
    found: list[Row] = []
    for (key, value, headers), id, due, stamp in zip(packed.entries, ids, dues, stamps, strict=True):
        named, size = pack_headers(headers), len(key or b"") + len(value)
        text = None if id is None else id.encode()
        found.append((topic, key, value, named, text, due or 0, slot, stamp or now_ms, size + len(named)))
    return found


def row_of(stored: tuple[Any, ...], stamp: Stamp | None = None) -> forwarding.Row:
    """What the forwarder takes, from an id and its `COLUMNS`; some drivers have memoryviews for bytes."""
    at, topic, key, value, headers, id, due, slot, sent_at, _ = stored
    message_id = None if id is None else bytes(id).decode()
    key = None if key is None else bytes(key)
    return forwarding.Row(at, topic, key, bytes(value), bytes(headers), message_id, sent_at, due, slot, stamp)
