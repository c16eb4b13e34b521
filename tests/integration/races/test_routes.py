"""Route changes that meet each other, appends and acks, in the order that goes wrong (I1, I4, I10, I11).

On PostgreSQL and MariaDB; the first of two transactions is stopped between its last statement and its COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from postroom.errors import GateClosed, PartitionSealed, RouteConflict
from postroom.model.delivery.delivery import OrderedAsk
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.model.topology.route import Change, merge, split
from postroom.store import SqlStore
from postroom.store.contract import Append, Group, Topic
from postroom.testing.store_contract.harness import (
    LEASE,
    acks,
    append,
    batch,
    partitions,
    read_all,
    refused,
    spans,
    stored,
    values,
)
from postroom.testing.store_contract.routes import carried_out, control
from tests.integration.races.interleaving import SECONDS, kill, lock_waits, soon, stopped_at_commit, until
from tests.ready import Ground, both, ready
from tests.servers.server import Server

ANN, BOB = 11, 22
NUMBERED = batch(2, producer=7)

pytestmark = pytest.mark.undisturbed("mariadb")  # it counts waiting transactions


class Scene:
    """A topic of two partitions, an ordered group, and two processes that know nothing of each other."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.store, self.other = ground.store(), ground.store()
        self.topic: Topic = self.store.catalog.create_topic("orders", TopicSettings(), 2)
        self.place = partitions(self.topic)[0]
        settings = GroupSettings(mode="ordered", lease_ms=60_000)
        self.group: Group = self.store.catalog.create_group("orders", "line", settings)

    def begin(self, through: SqlStore) -> Change:
        return through.routes.begin(split(self.topic.route, 0))

    def change(self) -> Change:
        """Begun and sealed; it can be activated now."""
        change = self.begin(self.store)
        self.store.routes.make(change)
        self.store.log.seal(self.place, control())
        return change

    def poll(self, through: SqlStore, place: int, token: int) -> list[tuple[int, int]]:
        end = through.log.bounds([place])[place].end
        return spans(through.progress.poll_ordered(self.group, place, OrderedAsk(f"m{token}", token, 9, end)))

    def ack(self, through: SqlStore, place: int, token: int, *wanted: tuple[int, int]) -> None:
        assert through.progress.settle(self.group, place, token, acks(*wanted)).lost == ()

    @property
    def version(self) -> int:
        return self.other.catalog.topic("orders").route.version


@pytest.fixture
def scene(ground: Ground) -> Scene:
    return Scene(ground)


# ---- compare and set --------------------------------------------------------------------------------------


def test_of_two_that_begin_at_once_one_goes_on(scene: Scene) -> None:
    with stopped_at_commit(scene.store) as stop:
        first = soon(scene.begin, scene.store)
        stop.wait()
        second = soon(scene.begin, scene.other)
        until(lock_waits(scene.ground))
        stop.go_on.set()
        change = first.result(SECONDS)
        assert isinstance(second.exception(SECONDS), RouteConflict)
    assert scene.other.routes.changes() == [change]


def test_a_begin_that_is_undone_leaves_the_way_to_the_next(scene: Scene) -> None:
    """Its process died before the commit."""
    with stopped_at_commit(scene.store) as stop:
        first = soon(scene.begin, scene.store)
        stop.wait()
        second = soon(scene.begin, scene.other)
        until(lock_waits(scene.ground))
        kill(scene.ground, in_transaction=True)
        change = second.result(SECONDS)
        stop.go_on.set()
        first.exception(SECONDS)  # or it was run again, and met the other
    assert scene.other.routes.changes() == [change]
    scene.other.routes.make(change)
    scene.other.log.seal(scene.place, control())
    assert scene.other.routes.activate(change).route.version == 2


def test_of_two_that_activate_at_once_one_does(scene: Scene) -> None:
    change = scene.change()
    with stopped_at_commit(scene.store) as stop:
        first = soon(scene.store.routes.activate, change)
        stop.wait()
        assert scene.version == 1  # nobody sees half of it
        second = soon(scene.other.routes.activate, change)
        until(lock_waits(scene.ground))
        stop.go_on.set()
        assert first.result(SECONDS).route.version == 2
        assert isinstance(second.exception(SECONDS), RouteConflict)
    assert scene.version == 2


def test_a_turn_back_that_waits_for_an_activation_is_refused(scene: Scene) -> None:
    change = scene.change()
    with stopped_at_commit(scene.store) as stop:
        first = soon(scene.store.routes.activate, change)
        stop.wait()
        second = soon(scene.other.routes.turn_back, change, [scene.place])
        until(lock_waits(scene.ground))
        stop.go_on.set()
        first.result(SECONDS)
        assert isinstance(second.exception(SECONDS), RouteConflict)
    assert scene.other.catalog.dropped() == []
    append(scene.other, change.opens[0].partition_id, batch())


def test_an_activation_that_waits_for_a_turn_back_is_refused(scene: Scene) -> None:
    change = scene.change()
    with stopped_at_commit(scene.store) as stop:
        first = soon(scene.store.routes.turn_back, change, [scene.place])
        stop.wait()
        second = soon(scene.other.routes.activate, change)
        until(lock_waits(scene.ground))
        stop.go_on.set()
        instead = first.result(SECONDS)
        assert isinstance(second.exception(SECONDS), RouteConflict)
    assert scene.version == 1
    assert instead is not None
    scene.other.routes.make(instead)
    assert scene.other.routes.activate(instead).route.ranges[0] == instead.opens[0]


def test_a_topic_is_deleted_while_its_route_is_activated(scene: Scene) -> None:
    change = scene.change()
    with stopped_at_commit(scene.store) as stop:
        first = soon(scene.store.routes.activate, change)
        stop.wait()
        second = soon(scene.other.catalog.delete_topic, "orders")
        until(lock_waits(scene.ground))
        stop.go_on.set()
        first.result(SECONDS)
        gone = second.result(SECONDS)
    assert {piece.partition_id for piece in (*change.seals, *change.opens)} <= set(gone)
    assert set(gone) == set(scene.other.catalog.dropped())


def test_a_group_that_starts_at_the_latest_while_a_route_is_activated(scene: Scene) -> None:
    """I9: what is sent to a successor as soon as it is there comes after the group's start."""
    append(scene.store, scene.place, batch(3))
    change = scene.change()
    settings = GroupSettings(mode="ordered", lease_ms=LEASE, start=Start("latest"))
    with stopped_at_commit(scene.store) as stop:
        first = soon(scene.store.routes.activate, change)
        stop.wait()
        second = soon(scene.other.catalog.create_group, "orders", "late", settings)
        until(lock_waits(scene.ground))
        stop.go_on.set()
        first.result(SECONDS)
        late = second.result(SECONDS)
    successor = change.opens[0].partition_id
    append(scene.store, successor, batch(2))
    assert scene.other.catalog.start_of(late.id, scene.place)[1] == 4
    found = scene.other.progress.poll_ordered(late, successor, OrderedAsk("ann", ANN, 9, 2))
    assert spans(found) == [(0, 1)]


# ---- seals and appends ------------------------------------------------------------------------------------


def test_a_seal_waits_for_an_append_and_comes_behind_it(scene: Scene) -> None:
    with stopped_at_commit(scene.store) as stop:
        appending = soon(append, scene.store, scene.place, NUMBERED)
        stop.wait()
        sealing = soon(scene.other.log.seal, scene.place, control())
        until(lock_waits(scene.ground))
        stop.go_on.set()
        assert appending.result(SECONDS)[0].base_offset == 0
        assert sealing.result(SECONDS) == 3
    assert len(read_all(scene.store, scene.place)) == 2


def test_an_append_that_waits_for_a_seal_is_refused_and_a_repeat_is_answered(scene: Scene) -> None:
    append(scene.store, scene.place, NUMBERED)
    both_of_them = [Append(scene.place, NUMBERED), Append(scene.place, batch(1, producer=7, sequence=2))]
    with stopped_at_commit(scene.store) as stop:
        sealing = soon(scene.store.log.seal, scene.place, control())
        stop.wait()
        appending = soon(scene.other.log.append, both_of_them)
        until(lock_waits(scene.ground))
        stop.go_on.set()
        assert sealing.result(SECONDS) == 3
        repeat, late = appending.result(SECONDS)
    assert (stored(repeat).base_offset, stored(repeat).duplicate) == (0, True)
    refused(late, PartitionSealed)
    assert scene.store.log.bounds([scene.place])[scene.place].end == 3


def test_a_seal_that_is_undone_refuses_nobody(scene: Scene) -> None:
    with stopped_at_commit(scene.store) as stop:
        sealing = soon(scene.store.log.seal, scene.place, control())
        stop.wait()
        appending = soon(append, scene.other, scene.place, NUMBERED)
        until(lock_waits(scene.ground))
        kill(scene.ground, in_transaction=True)
        assert appending.result(SECONDS)[0].base_offset == 0
        stop.go_on.set()
        again = sealing.exception(SECONDS) is None  # the store may have run it again by itself
    assert scene.other.log.bounds([scene.place])[scene.place].sealed is again
    assert len(values(read_all(scene.other, scene.place))[:2]) == 2


def test_of_two_seals_at_once_one_is_written(scene: Scene) -> None:
    with stopped_at_commit(scene.store) as stop:
        first = soon(scene.store.log.seal, scene.place, control())
        stop.wait()
        second = soon(scene.other.log.seal, scene.place, control())
        until(lock_waits(scene.ground))
        stop.go_on.set()
        assert (first.result(SECONDS), second.result(SECONDS)) == (1, 1)
    assert len(read_all(scene.store, scene.place)) == 1


# ---- the gate (I10) ---------------------------------------------------------------------------------------


def _received(scene: Scene) -> int:
    """All of the sealed partition is in somebody's hands; returns a successor with two messages."""
    append(scene.store, scene.place, batch(3))
    change = scene.change()
    scene.store.routes.activate(change)
    successor = change.opens[0].partition_id
    append(scene.store, successor, batch(2))
    assert scene.poll(scene.store, scene.place, ANN) == [(0, 3)]
    return successor


def test_whoever_comes_to_the_gate_waits_for_the_last_ack(scene: Scene) -> None:
    successor = _received(scene)
    with stopped_at_commit(scene.store) as stop:
        ack = soon(scene.ack, scene.store, scene.place, ANN, (0, 3))
        stop.wait()
        poll = soon(scene.poll, scene.other, successor, BOB)
        until(lock_waits(scene.ground))
        stop.go_on.set()
        ack.result(SECONDS)
        assert poll.result(SECONDS) == [(0, 1)]


def test_an_ack_that_is_undone_opens_nothing(scene: Scene) -> None:
    successor = _received(scene)
    with stopped_at_commit(scene.store) as stop:
        ack = soon(scene.ack, scene.store, scene.place, ANN, (0, 3))
        stop.wait()
        poll = soon(scene.poll, scene.other, successor, BOB)
        until(lock_waits(scene.ground))
        kill(scene.ground, in_transaction=True)
        assert isinstance(poll.exception(SECONDS), GateClosed)
        stop.go_on.set()
        ack.exception(SECONDS)
    assert scene.other.progress.peek(scene.group, [successor]) == {}


def test_a_drain_that_is_undone_opens_nothing_and_is_done_again(scene: Scene) -> None:
    successor = _received(scene)
    scene.ack(scene.store, scene.place, ANN, (0, 3))
    with stopped_at_commit(scene.store) as stop:
        draining = soon(scene.store.progress.drain, scene.group, scene.place)
        stop.wait()
        poll = soon(scene.poll, scene.other, successor, BOB)
        until(lock_waits(scene.ground))
        kill(scene.ground, in_transaction=True)
        assert poll.result(SECONDS) == [(0, 1)]  # it has drained by itself
        stop.go_on.set()
        draining.exception(SECONDS)
    assert scene.other.progress.peek(scene.group, [scene.place])[scene.place].drained


def test_of_two_who_pass_the_gate_of_a_merge_one_holds(ground: Ground) -> None:
    scene = Scene(ground)
    change = carried_out(scene.store, merge(scene.topic.route, 0, 1))
    (successor,) = (piece.partition_id for piece in change.opens)
    append(scene.store, successor, batch(2))
    for place in partitions(scene.topic):
        assert scene.poll(scene.store, place, ANN) == [(0, 0)]
        scene.ack(scene.store, place, ANN, (0, 0))
    assert all(scene.store.progress.drain(scene.group, place) for place in partitions(scene.topic))
    with stopped_at_commit(scene.store) as stop:
        first = soon(scene.poll, scene.store, successor, ANN)
        stop.wait()
        second = soon(scene.poll, scene.other, successor, BOB)
        until(lock_waits(scene.ground))
        stop.go_on.set()
        # stopped on the way to the gate: whoever comes through first
        assert sorted([first.result(SECONDS), second.result(SECONDS)]) == [[], [(0, 1)]]


@pytest.fixture
def own(kind: str, request: pytest.FixtureRequest) -> Iterator[Ground]:
    server: Server = request.getfixturevalue(f"own_{kind}")
    with ready(server) as ground:
        yield ground


@pytest.mark.slow("works for seconds")
@both
def test_what_was_drained_is_drained_after_a_crash(own: Ground) -> None:
    """Acks need not be flushed, and PostgreSQL would not flush them by itself here; the drain is."""
    if own.kind == "postgres":
        connection = own.connect(admin=True)
        connection.autocommit = True
        connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        own.server.restart()
    scene = Scene(own)
    successor = _received(scene)
    scene.ack(scene.store, scene.place, ANN, (0, 3))
    assert scene.store.progress.drain(scene.group, scene.place)
    own.server.kill()
    own.server.start()
    after = own.store()
    assert after.progress.peek(scene.group, [scene.place])[scene.place].drained
    assert after.progress.committed(scene.group.id, scene.place) == 4
    assert scene.poll(after, successor, BOB) == [(0, 1)]
