"""The same client for programs without asyncio: the same names, without `await`.

    with postroom.sync.connect("sqlite:///orders.db") as mq:
        mq.send("orders", b"…", key="42")
        with mq.consumer("orders", group="billing") as consumer:
            for message in consumer:
                message.ack()

Decides nothing about messages: every call runs the asynchronous one in the connection's own event loop, in a
thread of its own, and waits for it. The classes are made from the asynchronous ones, so they cannot differ
(`facade`). They may be used from several threads.
"""

from __future__ import annotations

from .facade import (
    Connection,
    Consumer,
    Producer,
    Received,
    Relay,
    Segment,
    Served,
    Spool,
    SpooledProducer,
    Staging,
    connect,
)
from .portal import PostFuture

__all__ = [
    "Connection",
    "Consumer",
    "PostFuture",
    "Producer",
    "Received",
    "Relay",
    "Segment",
    "Served",
    "Spool",
    "SpooledProducer",
    "Staging",
    "connect",
]
