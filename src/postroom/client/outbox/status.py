"""How an outbox is: what waits, for how long, and why (R43).

Read from the tables alone, so that anybody who has a connection can ask, whichever process relays.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .. import databases
from .table import Table, now_ms

__all__ = ["OutboxStatus", "Waiting", "look", "parse_stuck"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A topic that takes none of its messages now."""

    topic: str
    reason: str
    stuck: bool  # it will not pass by itself
    since_ms: int  # for so long


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    table: str
    messages: int  # that were committed and not sent yet
    oldest_age_ms: int  # of the one that waits for longest; 0: none does
    relay: bool  # one leads now
    waiting: tuple[Waiting, ...] = ()  # topics that are held up

    @property
    def stuck(self) -> tuple[Waiting, ...]:
        return tuple(one for one in self.waiting if one.stuck)


def look(table: Table, connection: Any) -> OutboxStatus:
    theirs = databases.of(connection)
    with table.explaining():
        relay = theirs.rows(f"SELECT version, until_ms, stuck FROM {table.relay} WHERE id = 1")
        if not relay:
            raise table.missing()
        version, until, stuck = relay[0]
        table.check_version(version)
        messages = theirs.rows(f"SELECT COUNT(*) FROM {table.name}")[0][0]
        oldest = theirs.rows(f"SELECT sent_at FROM {table.name} ORDER BY id LIMIT 1")
    now = now_ms(theirs)
    age = max(0, now - oldest[0][0]) if oldest else 0
    return OutboxStatus(table.name, messages, age, until > now, parse_stuck(stuck, now))


def parse_stuck(stored: Any, now: int) -> tuple[Waiting, ...]:
    """What the relay wrote down, by topic."""
    known = {} if stored is None else json.loads(bytes(stored))
    return tuple(
        Waiting(topic, one["reason"], one["stuck"], max(0, now - one["since"]))
        for topic, one in sorted(known.items())
    )
