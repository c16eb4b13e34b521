"""Delayed messages while processes are killed -9, above all the one that moves them when they are due (R35).

Every confirmed one is delivered, never before it is due; none is stored twice, whatever step of the move its
mover was in (I12); and none is later than the lease of a dead mover, and a little.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import closing
from pathlib import Path

import pytest

import postroom
from postroom.address import parse as parse_url
from postroom.config import DEFAULTS
from postroom.model.messages.batch import records
from postroom.model.moves.schedule import DUTY
from postroom.store import SqlStore, open_store
from postroom.store.sql.session import Area

from .crew import Crew
from .stage import SECONDS, finish, hire, judge, make_topic, until
from .values import parse

_GROUPS = {"billing": False}
_SLACK_MS = 4_000  # the next one looks once a second, and the machine is busy
_ALL = 10**9


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 180)
async def test_delayed_messages_while_their_mover_is_killed(store_url: str, tmp_path: Path) -> None:
    with Crew(store_url, tmp_path) as crew, closing(_store(store_url)) as store:
        async with postroom.connect(store_url) as mq:  # not during the trouble: it would move them, too
            await make_topic(mq, "orders", groups=_GROUPS)
        await hire(crew, "orders", delays=(0.1, 2), groups=_GROUPS)
        end, movers = time.monotonic() + SECONDS, 0
        while not movers or time.monotonic() < end:
            await _kill_the_mover(store, crew)
            movers += 1
            await asyncio.sleep(random.uniform(0, 1))
            crew.kill(random.choice([pid for pid in crew.at_work if pid != _mover(store)]))
        async with postroom.connect(store_url) as mq:
            await finish(mq, crew, "orders")
            await judge(mq, crew, "orders", groups=_GROUPS)
        late = _lateness_ms(store)
        print(f"{movers} movers killed; late at most {late[-1]} ms, half of them {late[len(late) // 2]} ms")
        assert late[0] >= 0, "a message came before it was due"
        assert late[-1] <= DEFAULTS.schedule_lease_ms + _SLACK_MS


def _store(url: str) -> SqlStore:
    """Without a broker, which would do duties."""
    store = open_store(parse_url(url))
    assert isinstance(store, SqlStore)
    return store


async def _kill_the_mover(store: SqlStore, crew: Crew) -> None:
    """Returns when another one has caught up."""
    await until(lambda: _mover(store) in crew.at_work, "somebody moves what is due")
    mover = _mover(store)
    crew.kill(mover)
    await until(lambda: _mover(store) not in (mover, 0), "another one moves what is due")
    await until(lambda: not _overdue(store), "the other one catches up")


def _mover(store: SqlStore) -> int:
    """The process that has the lease; its holder is named by machine, process and broker."""
    with store.session.read(Area.LOG) as tx:
        row = tx.one("SELECT holder FROM postroom_duties WHERE name = ?", DUTY)
    return int(row[0].split(":")[1]) if row else 0


def _overdue(store: SqlStore) -> bool:
    due = store.schedule.next_due()
    return due is not None and due < store.now_ms() - 500


def _lateness_ms(store: SqlStore) -> list[int]:
    """By how much each message came to its log after it was due, least first."""
    places = [piece.partition_id for piece in store.catalog.topic("orders").route.ranges]
    batches = [b for p in places for b in store.log.read(p, 0, max_messages=_ALL, max_bytes=_ALL)]
    return sorted(
        batch.appended_at - parse(record.value.decode()).due_ms
        for batch in batches
        for record in records(batch.data)
    )
