"""Ids through the store against a naive model (R32): two processes, restarts, failures, delays and groups."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from postroom.config import Limits
from postroom.errors import StoreError
from postroom.model.messages.batch import records
from postroom.model.messages.ids import digests
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import open_sqlite
from postroom.store.contract import Appended, Store
from postroom.testing.store_contract.harness import (
    MovableClock,
    StoreHarness,
    acks,
    ask,
    read_all,
    stored,
    values,
)
from postroom.testing.store_contract.log.ids import Ids, named
from postroom.testing.store_contract.schedule import all_due, gone, lead
from tests.model.examples import examples

WINDOW, LIMIT = 1_000, 50
IDS = [None, *(f"id-{number}" for number in range(12))]

some_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=5)
either = st.integers(0, 1)


class Naive:
    """Everything that was ever stored, and the rule in its plainest form."""

    def __init__(self) -> None:
        self.log: list[tuple[str | None, int]] = []  # id, time
        self.waiting: set[str] = set()
        self.settled = 0  # by the slower group

    def send(self, ids: Ids, now: int, *, delayed: bool) -> tuple[tuple[int, int], ...]:
        repeats = []
        mine: set[str] = set()
        for place, id in enumerate(ids):
            earlier = None if id is None else self._earlier(id, now, mine)
            if earlier is not None:
                repeats.append((place, earlier))
            elif delayed:
                mine |= {id} - {None}  # type: ignore[arg-type]
            else:
                self.log.append((id, now))
        self.waiting |= mine
        return tuple(repeats)

    def _earlier(self, id: str, now: int, mine: set[str]) -> int | None:
        for offset in range(len(self.log) - 1, max(-1, len(self.log) - 1 - LIMIT), -1):
            its, time = self.log[offset]
            if its == id and (now - time < WINDOW or offset >= self.settled):
                return offset
            if its == id:
                break
        return -1 if id in self.waiting or id in mine else None


class DedupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="postroom-dedup-"))
        self.clock, self.naive, self.producers = MovableClock(), Naive(), 0
        self.stores: list[Store] = [self._open(), self._open()]
        topic = self.stores[0].catalog.create_topic("orders", TopicSettings(), 1)
        self.topic_id, self.place = topic.id, topic.route.ranges[0].partition_id
        self.groups = [self.stores[0].catalog.create_group("orders", n, GroupSettings()) for n in ("a", "b")]
        self.done = [0, 0]  # what each group has settled

    def _open(self) -> Store:
        return open_sqlite(self.folder / "q.db", self.clock, Limits(dedup_ids=LIMIT))

    # ---- sending ----

    @rule(which=either, batches=st.lists(some_ids, min_size=1, max_size=3), again=st.booleans())
    def send(self, which: int, batches: list[list[str | None]], again: bool) -> None:
        appends = []
        for ids in batches:
            self.producers += 1
            appends.append(named(self.place, ids, producer=self.producers, window_ms=WINDOW))
        first = [stored(result) for result in self.stores[which].log.append(appends)]
        for ids, result in zip(batches, first, strict=True):
            self._check(ids, result)
        if again:  # the answer was lost; another process is asked
            second = [stored(result) for result in self.stores[1 - which].log.append(appends)]
            assert [(d.base_offset, d.repeats) for d in second] == [(d.base_offset, d.repeats) for d in first]

    def _check(self, ids: Ids, result: Appended) -> None:
        end = len(self.naive.log)
        assert result.repeats == self.naive.send(ids, self.clock.ms, delayed=False)
        assert result.base_offset == (end if len(self.naive.log) > end else -1)

    @rule(which=either, ids=some_ids)
    def fail(self, which: int, ids: list[str | None]) -> None:
        """I2: nothing is remembered."""
        with StoreHarness().failing_commits(self.stores[which]):
            try:
                self.stores[which].log.append([named(self.place, ids, window_ms=WINDOW)])
            except StoreError:
                return
        raise AssertionError("the commit should have failed")

    @rule(which=either)
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self._open()

    # ---- time and groups ----

    @rule(ms=st.sampled_from([1, WINDOW // 2, WINDOW - 1, WINDOW, 20 * WINDOW]))
    def wait(self, ms: int) -> None:
        self.clock.ms += ms

    @rule(which=either, group=either, messages=st.integers(1, 10))
    def settle(self, which: int, group: int, messages: int) -> None:
        progress, end = self.stores[which].progress, len(self.naive.log)
        token = 1 + self.done[group] * 2 + group
        granted = progress.poll(self.groups[group], self.place, ask(token, end, messages=messages))
        for d in granted.deliveries:
            progress.settle(self.groups[group], self.place, token, acks((d.first, d.last)))
            self.done[group] = d.last + 1
        self.naive.settled = min(self.done)

    # ---- delayed messages ----

    @rule(which=either, ids=some_ids, delay=st.integers(1, 3 * WINDOW))
    def schedule(self, which: int, ids: list[str | None], delay: int) -> None:
        due_at = self.clock.ms + delay
        result = stored(
            self.stores[which].log.append([named(self.place, ids, due_at=due_at, window_ms=WINDOW)])[0]
        )
        assert result.base_offset == -1
        assert result.repeats == self.naive.send(ids, self.clock.ms, delayed=True)

    @precondition(lambda self: self.naive.waiting)
    @rule(which=either, data=st.data())
    def cancel(self, which: int, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.naive.waiting)))
        assert self.stores[which].schedule.cancel(self.topic_id, digests([id]))
        self.naive.waiting.remove(id)

    @rule(which=either)
    def move(self, which: int) -> None:
        """What is due goes into the log; ids are not looked at again."""
        store, rows = self.stores[which], all_due(self.stores[which])
        if not rows:
            return
        lead(store, lease_ms=1)
        for row in rows:
            texts = [(record.value or b"").decode() for record in records(row.batch)]
            ids = [None if text == "-" else text for text in texts]
            stored(store.log.append([named(self.place, ids, window_ms=0)])[0])
            self.naive.log += [(id, self.clock.ms) for id in ids]
            self.naive.waiting -= {id for id in ids if id is not None}
        store.schedule.finish("ann", gone(rows))
        self.clock.ms += 1  # the lease is over

    @invariant()
    def the_log_is_what_it_should_be(self) -> None:
        found = [value.decode() for value in values(read_all(self.stores[0], self.place))]
        assert found == [id or "-" for id, _ in self.naive.log]

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder)


TestDedup = DedupMachine.TestCase
TestDedup.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
