"""`message.ack(connection=…)`: the ack is committed with the user's own work, or rolled back with it (R33).

After it the message is still in flight, and its lease is kept: only the end of the user's transaction
says whether it is settled. The next verdict asks the store, which knows: an ack, once more, is harmless after
the commit; a retry or release after a rollback finds the message as it was, and after the commit finds
nothing to hand back. An app gives that verdict when the handler ends. Without one the next heartbeat finds
the message gone, and takes it for acked.

A lease that was lost is LeaseLost, so that the user's transaction is rolled back: that is what makes it once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from ...broker.served import embedded
from ...endpoint.endpoint import Endpoint
from ...errors import LeaseLost, UsageError
from ...store.sql.progress.user_transaction import Guest, Joins
from .. import databases
from ..forward.transactions import is_awaited
from ..message import Received
from .in_flight import LOST, OPEN, delivery_of

__all__ = ["ack_within", "joining", "prepared"]


async def joining(
    endpoint: Endpoint, topic: str, group: str, partition_id: int, token: int, offset: int
) -> Callable[[Guest], bool]:
    """Return what acks the message on a connection of the user's; that returns False if it is lost (R33).

    UsageError unless the store is open in this process, and its progress can ack there. Must never touch the
    connection itself: what is returned is run by whoever has it, in the right thread.
    """
    broker = embedded(endpoint)
    if broker is None:
        raise UsageError(
            "ack(connection=) needs the queue's database to be opened by this process (postgresql:// or "
            "mysql://): a broker cannot join your transaction; use postroom.guards.once instead"
        )
    progress = broker.store.progress
    if not isinstance(progress, Joins):
        raise UsageError("this store's acks cannot join a transaction; use postroom.guards.once instead")
    known = await broker.in_thread(broker._catalog.group, topic, group)
    return partial(progress.ack_within, group=known, partition_id=partition_id, token=token, offset=offset)


_GONE = (
    "the lease on this message ended before it was acked: somebody else may handle it again; roll this "
    "transaction back"
)


async def ack_within(message: Received, connection: Any) -> None:
    """In a thread of its own, where the connection is not async: it may wait for a lock."""
    ack = await prepared(message)
    if is_awaited(connection):
        await connection.run_sync(ack)
    else:
        await asyncio.to_thread(ack, connection)


async def prepared(message: Received) -> Callable[[Any], None]:
    """What acks the message on a connection that is given to it, in any thread."""
    delivery = delivery_of(message)
    settler, index = delivery.settler, message._position - delivery.first
    settler.check()
    if delivery.state[index] >= LOST:
        raise LeaseLost(_GONE, offsets=[message._position])
    if delivery.state[index] != OPEN:
        raise UsageError("the message is settled already: its ack cannot join a transaction any more")
    ack = await joining(
        settler.endpoint, delivery.topic, settler.who.group, delivery.partition_id, delivery.token,
        message._position,
    )  # fmt: skip

    def run(connection: Any) -> None:
        theirs = databases.of(connection)
        if not theirs.in_transaction:
            raise UsageError(
                "this connection commits each statement by itself, so the ack could not be rolled back with "
                "your work: begin a transaction first"
            )
        if not ack(theirs):
            raise LeaseLost(_GONE, offsets=[message._position])
        delivery.joined.add(index)

    return run
