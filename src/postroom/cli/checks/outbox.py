"""Checks of outboxes: what waits in them, for how long, and why (R30, R43).

One in the queue's own database is found by itself, if it has the usual name; others are named with their
address. Must change nothing, and must never make a file that is not there.
"""

from __future__ import annotations

from ...address import Address
from ...client.outbox.connecting import opening_of
from ...client.outbox.outbox import Outbox
from ...client.outbox.status import OutboxStatus
from ...client.outbox.table import NAME
from ...errors import SchemaMismatch, StoreUnavailable
from ...units import format_duration
from ..show import messages
from .finding import Finding

__all__ = ["check_outbox"]

_LONG_MS = 60_000


def check_outbox(address: Address, table: str = NAME, *, named: bool = True) -> list[Finding]:
    """`named`: somebody has asked for it, so it has to be there."""
    try:
        status = _look(address, Outbox(table))
    except SchemaMismatch as error:
        if not named and error.details.get("missing"):
            return []
        return [Finding("outbox", "fail", str(error))]
    except Exception as error:
        return [Finding("outbox", "fail", f"could not be checked: {error}")] if named else []
    return _found(status)


def _look(address: Address, outbox: Outbox) -> OutboxStatus:
    if address.path is not None and not address.path.exists():
        raise StoreUnavailable(f"there is no file {address.path}")
    connection = opening_of(address)()
    try:
        status: OutboxStatus = outbox.status(connection)
        return status
    finally:
        connection.close()


def _found(status: OutboxStatus) -> list[Finding]:
    found = []
    waiting = f"{messages(status.messages)} in {status.table}"
    for one in status.stuck:
        said = (
            f"{status.table}: nothing can be sent to topic {one.topic} for {format_duration(one.since_ms)}: "
        )
        advice = "mend that: it is tried again by itself; nothing is dropped, and other topics go on"
        found.append(Finding("outbox stuck", "warn", said + one.reason, advice))
    if status.messages and not status.relay:
        advice = "start one: `async with outbox.relay(mq, connect)`, or app.outbox(outbox, connect)"
        found.append(Finding("outbox relay", "warn", f"{waiting}, and no relay sends them", advice))
    elif status.oldest_age_ms > _LONG_MS and not status.stuck:
        said = f"{waiting}, the oldest for {format_duration(status.oldest_age_ms)}"
        advice = "look at the log of the process that relays: the queue may be away, or slow"
        found.append(Finding("outbox old", "warn", said, advice))
    return found or [Finding("outbox", "ok", f"{waiting}")]
