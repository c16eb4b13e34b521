"""An ack that joins the user's transaction: what the broker in this process knows of it (R33).

Decides whether it can: the store is open in this process, and its progress is one that joins. Must never
touch the user's connection itself: what it returns is run by whoever has the connection, in the right thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..errors import UsageError
from ..store.joining import Guest, Joins
from .embedded import Broker
from .endpoint import Endpoint

__all__ = ["joining"]


async def joining(
    endpoint: Endpoint, topic: str, group: str, partition_id: int, token: int, offset: int
) -> Callable[[Guest], bool]:
    """What acks the message on a connection of the user's; it returns False if the lease is lost."""
    if not isinstance(endpoint, Broker):
        raise UsageError(
            "ack(connection=) needs the queue's database to be opened by this process (postgresql:// or "
            "mysql://): a broker cannot join your transaction; use postroom.guards.once instead"
        )
    progress = endpoint.store.progress
    if not isinstance(progress, Joins):
        raise UsageError("this store's acks cannot join a transaction; use postroom.guards.once instead")
    known = await endpoint.in_thread(endpoint._catalog.group, topic, group)
    return partial(progress.ack_within, group=known, partition_id=partition_id, token=token, offset=offset)
