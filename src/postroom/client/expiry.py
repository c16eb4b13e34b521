"""Messages that expire (R39): nobody is shown one whose moment has passed.

Decides it by the shard's clock, when a message is received and once more when it is handed out, since it may
wait here in between. What is dropped is counted, and whoever drops it must settle it: it is done with, and no
failure. A duration counts from when the message was sent; of a delayed one, from when it is due.
"""

from __future__ import annotations

from collections.abc import Sequence

from .message import Received

__all__ = ["Expiry"]


class Expiry:
    """What one reader has seen of it."""

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
