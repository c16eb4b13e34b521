"""PostgreSQL with an old snapshot open: nothing deleted can be removed, and a poll costs what it cost (I19).

A forgotten transaction, a backup, a slow report: as long as it runs, every past version of every row stays in
the tables and their indexes. What is measured is the processor time of the server's side, not the clock on
the wall, which tells more about the other tests that run beside this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import SqlStore
from postroom.store.contract import Group
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import acks, append, ask, batch, partitions, spans
from tests.ready import opened

CYCLES, WINDOW = 3000, 300
TICK_MS = 10  # of the kernel's accounts

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the kernel's accounts")


class Consuming:
    def __init__(self, store: SqlStore) -> None:
        self._store, self._tokens = store, itertools.count(1)
        (self._place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        for _ in range(CYCLES // 500):
            append(store, self._place, batch(1000))
        self._end = store.log.bounds([self._place])[self._place].end
        self._group: Group = store.catalog.create_group("orders", "billing", GroupSettings())

    def cycles(self, count: int) -> None:
        """Poll one message and ack it."""
        progress, group, place = self._store.progress, self._group, self._place
        for token in itertools.islice(self._tokens, count):
            granted = progress.poll(group, place, ask(token, self._end, messages=1))
            assert progress.settle(group, place, token, acks(*spans(granted))).lost == ()

    def cost_ms(self) -> float:
        """Of a cycle, for the server; the least of three, since others use the machine too."""
        return min(self._spent() for _ in range(4))

    def _spent(self) -> float:
        before = self._used_ms()
        self.cycles(WINDOW)
        return (self._used_ms() - before) / WINDOW

    def _used_ms(self) -> int:
        with self._store.session.read(Area.PROGRESS) as tx:
            (backend,) = tx.one("SELECT pg_backend_pid()") or (0,)
        fields = Path(f"/proc/{backend}/stat").read_text().rpartition(")")[2].split()
        return TICK_MS * (int(fields[11]) + int(fields[12]))


@contextmanager
def old_snapshot(url: str) -> Iterator[None]:
    with closing(psycopg.connect(url)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM postroom_progress")
        yield


@pytest.mark.slow("measures what hundreds of polls cost")
def test_the_cost_of_a_poll_and_an_ack_stays(
    postgres_ready: str, record_property: Callable[[str, Any], None]
) -> None:
    with closing(opened(postgres_ready)) as store:
        consuming = Consuming(store)
        consuming.cycles(WINDOW)
        before = consuming.cost_ms()
        with old_snapshot(postgres_ready):
            consuming.cycles(CYCLES)
            after = consuming.cost_ms()
            for _ in range(4):  # a machine with too much to do may have been in the way of all of them
                if before / after < 0.4:
                    after = min(after, consuming.cost_ms())
    figures = (
        f"{before:.2f} ms before, {after:.2f} ms after {CYCLES} cycles: {before / after:.2f} of the rate"
    )
    record_property("old snapshot", figures)
    print(figures)
    assert before / after >= 0.4  # 0.9 on a quiet machine; it was 0.15 before reads had bounds (I19)
