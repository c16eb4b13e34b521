"""Polls, acks and groups that meet in the order that goes wrong, on PostgreSQL and MariaDB (I5–I7, I9)."""

from __future__ import annotations

import threading

import pytest

from postroom.errors import GenerationChanged
from postroom.model.delivery.delivery import OrderedAsk
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.store import SqlStore
from postroom.store.contract import Group
from postroom.testing.store_contract.harness import (
    LEASE,
    MovableClock,
    acks,
    append,
    ask,
    batch,
    in_threads,
    partitions,
    spans,
)
from tests.integration.races.interleaving import kill, lock_waits, soon, stopped_at_commit, until
from tests.ready import Ground

ANN, BOB, CAT = 11, 22, 33

pytestmark = pytest.mark.undisturbed("mariadb")  # it counts waiting transactions


class Scene:
    """A partition with ten messages, a group, and two processes that know nothing of each other."""

    def __init__(self, ground: Ground, mode: str) -> None:
        self.ground, self.clock = ground, MovableClock()
        self.store, self.other = ground.store(clock=self.clock), ground.store(clock=self.clock)
        self.topic = self.store.catalog.create_topic("orders", TopicSettings(), 1)
        (self.place,) = partitions(self.topic)
        append(self.store, self.place, batch(10))
        settings = GroupSettings(mode=mode, lease_ms=LEASE, max_attempts=3)  # type: ignore[arg-type]
        self.group: Group = self.store.catalog.create_group("orders", "billing", settings)
        self.store.progress.rewind(self.group, [self.place])  # its row is there from now on

    def poll(self, through: SqlStore, token: int, messages: int = 100) -> list[tuple[int, int]]:
        return spans(through.progress.poll(self.group, self.place, ask(token, 10, messages=messages)))

    def hold(self, through: SqlStore, token: int) -> bool:
        """Ordered groups: whether this one holds the partition now."""
        found = through.progress.poll_ordered(self.group, self.place, OrderedAsk(f"m{token}", token, 4, 10))
        return bool(found.deliveries)

    def lost(self, through: SqlStore, token: int, *wanted: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        return through.progress.settle(self.group, self.place, token, acks(*wanted)).lost

    @property
    def committed(self) -> int | None:
        return self.store.progress.committed(self.group.id, self.place)


@pytest.fixture
def shared(ground: Ground) -> Scene:
    return Scene(ground, "shared")


@pytest.fixture
def line(ground: Ground) -> Scene:
    return Scene(ground, "ordered")


# ---- shared groups ----------------------------------------------------------------------------------------


def test_two_polls_at_once_are_handed_different_messages(shared: Scene) -> None:
    with stopped_at_commit(shared.store) as stop:
        first = soon(shared.poll, shared.store, ANN, 4)
        stop.wait()
        second = soon(shared.poll, shared.other, BOB, 4)
        until(lock_waits(shared.ground))
        stop.go_on.set()
        assert (first.result(30), second.result(30)) == ([(0, 3)], [(4, 7)])


def test_a_poll_repeated_while_the_first_is_under_way_is_handed_the_same(shared: Scene) -> None:
    """I6: its asker lost patience and asks again, through another process perhaps."""
    with stopped_at_commit(shared.store) as stop:
        first = soon(shared.poll, shared.store, ANN, 4)
        stop.wait()
        repeat = soon(shared.poll, shared.other, ANN, 4)
        until(lock_waits(shared.ground))
        stop.go_on.set()
        assert first.result(30) == repeat.result(30) == [(0, 3)]
    assert shared.poll(shared.store, BOB) == [(4, 9)]


def test_an_ack_that_waits_for_a_redelivery_is_too_late(shared: Scene) -> None:
    """I7: the token decides, and it has changed by the time the ack may look."""
    assert shared.poll(shared.store, ANN, 1) == [(0, 0)]
    shared.clock.ms += LEASE + 1
    with stopped_at_commit(shared.store, times=1) as stop:
        taken = soon(shared.poll, shared.store, BOB, 1)
        stop.wait()
        late = soon(shared.lost, shared.other, ANN, (0, 0))
        until(lock_waits(shared.ground))
        stop.go_on.set()
        assert taken.result(30) == [(0, 0)]
        assert late.result(30) == ((0, 0),)
    assert shared.committed == 0
    assert shared.lost(shared.other, BOB, (0, 0)) == ()
    assert shared.lost(shared.store, BOB, (0, 0)) == ()  # once more is harmless
    assert shared.committed == 1


def test_a_redelivery_that_waits_for_an_ack_finds_nothing(shared: Scene) -> None:
    assert shared.poll(shared.store, ANN, 1) == [(0, 0)]
    shared.clock.ms += LEASE + 1
    with stopped_at_commit(shared.store) as stop:
        ack = soon(shared.lost, shared.store, ANN, (0, 0))
        stop.wait()
        poll = soon(shared.poll, shared.other, BOB, 1)
        until(lock_waits(shared.ground))
        stop.go_on.set()
        assert (ack.result(30), poll.result(30)) == ((), [(1, 1)])
    assert shared.committed == 1


def test_a_poll_that_is_undone_leaves_nothing_behind(shared: Scene) -> None:
    """Its process died, or its connection did: the cursor has not moved."""
    with stopped_at_commit(shared.store) as stop:
        first = soon(shared.poll, shared.store, ANN, 4)
        stop.wait()
        assert kill(shared.ground, in_transaction=True) == 1
        second = soon(shared.poll, shared.other, BOB, 4)
        assert second.result(30) == [(0, 3)]
        stop.go_on.set()
        assert first.exception(30) is not None
    assert shared.poll(shared.store, ANN, 4) == [(4, 7)]  # asked again, it is handed what is left


def test_a_reset_is_not_undone_by_a_poll_that_waited_for_it(shared: Scene) -> None:
    shared.poll(shared.store, ANN, 4)
    group = shared.store.catalog.reset_group("orders", "billing", Start("offsets", offsets=((0, 7),)))
    with stopped_at_commit(shared.store) as stop:
        rewinding = soon(shared.store.progress.rewind, group, [shared.place])
        stop.wait()
        poll = soon(shared.poll, shared.other, BOB)
        until(lock_waits(shared.ground))
        stop.go_on.set()
        rewinding.result(30)
        assert isinstance(poll.exception(30), GenerationChanged)
    assert shared.committed == 7


# ---- ordered groups (I5) ----------------------------------------------------------------------------------


def test_of_two_who_ask_for_a_free_partition_one_holds_it(line: Scene) -> None:
    with stopped_at_commit(line.store) as stop:
        first = soon(line.hold, line.store, ANN)
        stop.wait()
        second = soon(line.hold, line.other, BOB)
        until(lock_waits(line.ground))
        stop.go_on.set()
        assert (first.result(30), second.result(30)) == (True, False)


def test_of_two_who_take_over_one_does(line: Scene) -> None:
    assert line.hold(line.store, ANN)
    line.clock.ms += LEASE + 1
    with stopped_at_commit(line.store) as stop:
        first = soon(line.hold, line.store, BOB)
        stop.wait()
        second = soon(line.hold, line.other, CAT)
        until(lock_waits(line.ground))
        stop.go_on.set()
        assert (first.result(30), second.result(30)) == (True, False)


def test_a_heartbeat_that_waits_for_a_takeover_is_told_that_it_lost(line: Scene) -> None:
    assert line.hold(line.store, ANN)
    line.clock.ms += LEASE + 1
    with stopped_at_commit(line.store) as stop:
        taken = soon(line.hold, line.store, BOB)
        stop.wait()
        beat = soon(line.other.progress.extend, line.group, line.place, ANN, [(0, 3)])
        until(lock_waits(line.ground))
        stop.go_on.set()
        assert taken.result(30)
        assert beat.result(30) == ((0, 3),)
    assert line.lost(line.store, ANN, (0, 3)) == ((0, 1), (2, 3))  # in halves: they are suspects now (I14)


def test_a_takeover_that_waits_for_a_heartbeat_is_refused(line: Scene) -> None:
    """The holder lives after all: it was only slow."""
    assert line.hold(line.store, ANN)
    line.clock.ms += LEASE + 1
    with stopped_at_commit(line.store) as stop:
        beat = soon(line.store.progress.extend, line.group, line.place, ANN, [(0, 3)])
        stop.wait()
        taking = soon(line.hold, line.other, BOB)
        until(lock_waits(line.ground))
        stop.go_on.set()
        assert beat.result(30) == ()
        assert taking.result(30) is False
    assert line.lost(line.store, ANN, (0, 3)) == ()


# ---- where a group starts (I9) ----------------------------------------------------------------------------


def test_latest_is_before_what_was_under_way_when_the_group_was_made(shared: Scene) -> None:
    """The batch has its offset and is not committed: a start beyond it would skip it for ever."""
    with stopped_at_commit(shared.store) as stop:
        appending = soon(append, shared.store, shared.place, batch(3))
        stop.wait()
        group = shared.other.catalog.create_group("orders", "late", GroupSettings(start=Start("latest")))
        stop.go_on.set()
        assert appending.result(30)[0].base_offset == 10
    assert shared.other.catalog.start_of(group.id, shared.place)[1] == 10
    assert spans(shared.other.progress.poll(group, shared.place, ask(1, 13))) == [(10, 12)]


def test_latest_skips_nothing_that_came_after_it(shared: Scene) -> None:
    """Groups made while producers write: what is sent after a group was made is not below its start."""
    ended = threading.Event()
    told: list[tuple[int, int]] = []  # by group: how far its start is behind the last, and before the next

    def write(through: SqlStore) -> None:
        while not ended.is_set():
            append(through, shared.place, batch(2))

    def make() -> None:
        for number in range(12):
            before = append(shared.store, shared.place, batch(1))[0].base_offset
            settings = GroupSettings(start=Start("latest"))
            group = shared.other.catalog.create_group("orders", f"late-{number}", settings)
            after = append(shared.store, shared.place, batch(1))[0].base_offset
            start = shared.other.catalog.start_of(group.id, shared.place)[1]
            told.append((start - before, after - start))
        ended.set()

    in_threads(make, lambda: write(shared.store), lambda: write(shared.other))
    assert all(behind > 0 and ahead >= 0 for behind, ahead in told), told
