"""The broker behind a connection, for tests that look into it: its own, or the one that serves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from postroom import Connection
from postroom.broker.broker import Broker

__all__ = ["broker_of", "run_duty", "serving"]

_hosts: list[Broker] = []  # those that serve connections of this test, the latest last


@asynccontextmanager
async def serving(host: Connection) -> AsyncIterator[str]:
    """The address under which this connection serves others, in this event loop."""
    _hosts.append(broker_of(host))
    try:
        async with await host.serve("127.0.0.1", 0) as server:
            yield server.url
    finally:
        _hosts.pop()


def broker_of(mq: Connection) -> Broker:
    return mq._endpoint if isinstance(mq._endpoint, Broker) else _hosts[-1]


async def run_duty(mq: Connection, kind: type) -> None:
    """Once, now."""
    duties = broker_of(mq).duties
    (duty,) = (duty for duty in duties._duties if isinstance(duty, kind))
    assert await asyncio.to_thread(duties.run_once, duty)
