"""What a store on two shards does where both are concerned (I9, I10, I11, I12, R6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from postroom.address import parse
from postroom.broker.deliver.ordered import OrderedDeliveries
from postroom.broker.deliver.readable import TailCache
from postroom.broker.deliver.shared import Deliveries
from postroom.broker.duties import DropLogs
from postroom.broker.moves.schedule import ScheduleMover
from postroom.broker.topology.catalog_cache import CatalogCache
from postroom.config import DEFAULTS
from postroom.endpoint.values import PollRequest
from postroom.errors import GateClosed, PostroomError, StoreUnavailable
from postroom.model.delivery.delivery import OrderedAsk
from postroom.model.messages.batch import build_control
from postroom.model.messages.slot import slot_of
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.model.topology.route import Range, move, split
from postroom.store import open_store
from postroom.store.contract import Append, Group, Topic
from postroom.store.sharded.store import ShardedCatalog, ShardedStore
from postroom.testing.store_contract import MovableClock
from postroom.testing.store_contract.harness import acks, append, batch, read_all, values
from postroom.testing.store_contract.schedule import delayed_batch

ORDERED = GroupSettings(mode="ordered", lease_ms=30_000)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def opened(tmp_path: Path, clock: MovableClock) -> Iterator[Callable[[], ShardedStore]]:
    stores: list[ShardedStore] = []

    def make() -> ShardedStore:
        first, second = (parse(f"sqlite:///{tmp_path}/{name}.db") for name in ("first", "second"))
        store = open_store(first, clock, shards={"b": second})
        assert isinstance(store, ShardedStore)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[[], ShardedStore]) -> ShardedStore:
    return opened()


@pytest.fixture
def topic(store: ShardedStore) -> Topic:
    """One partition here, one there."""
    found = store.catalog.create_topic("orders", TopicSettings(), 2)
    assert [piece.shard for piece in found.route.ranges] == ["", "b"]
    return found


@contextmanager
def away(store: ShardedStore, name: str) -> Iterator[None]:
    """That shard answers nobody."""
    shard = store._shards[name]
    gone = StoreUnavailable("the test wants it so")
    with mock.patch.object(shard, "_look", side_effect=gone):
        shard._lost(gone)
        yield
    shard._away = None


def moved(store: ShardedStore, topic: Topic, piece: Range, shard: str) -> tuple[Topic, int]:
    """The topic with that partition moved to a shard, and its successor there."""
    change = store.routes.begin(move(topic.route, piece.partition, shard))
    store.routes.make(change)
    store.log.seal(piece.partition_id, build_control(1))
    return store.routes.activate(change), change.opens[0].partition_id


def ask(token: int, end: int, expects: int | None = None) -> OrderedAsk:
    return OrderedAsk("ann", token, 100, end, expects=expects)


# --- the gate (I10) ----------------------------------------------------------------------------------


def test_a_successor_on_another_shard_opens_when_its_predecessor_is_drained(
    store: ShardedStore, topic: Topic
) -> None:
    here = topic.route.ranges[0]
    append(store, here.partition_id, batch(3))
    group = store.catalog.create_group("orders", "line", ORDERED)
    topic, there = moved(store, topic, here, "b")
    append(store, there, batch(1))
    with pytest.raises(GateClosed):
        store.progress.poll_ordered(group, there, ask(1, 1))
    store.progress.poll_ordered(group, here.partition_id, ask(1, 4))
    store.progress.settle(group, here.partition_id, 1, acks((0, 2)))
    with pytest.raises(GateClosed):
        store.progress.poll_ordered(group, there, ask(1, 1))
    store.progress.settle(group, here.partition_id, 1, acks((3, 3)))
    with away(store, ""), pytest.raises(PostroomError):  # the predecessor's shard cannot say so
        store.progress.poll_ordered(group, there, ask(1, 1))
    assert store.progress.poll_ordered(group, there, ask(1, 1)).deliveries
    with away(store, ""):  # once it is open it stays open
        assert store.progress.poll_ordered(group, there, ask(1, 1, expects=1)).holder is None


# --- starts (I9) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [True, False], ids=["create", "reset"])
def test_a_start_holds_for_one_version_of_the_route(
    store: ShardedStore, topic: Topic, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition moves after its end was read: the start is looked for again, and nothing is skipped."""
    there = topic.route.ranges[1]
    append(store, there.partition_id, batch(5))
    if not made:
        store.catalog.create_group("orders", "late", GroupSettings())
    look, successors = ShardedCatalog._elsewhere, list[int]()

    def overtaken(self: ShardedCatalog, *args: Any, **kwargs: Any) -> Any:
        found = look(self, *args, **kwargs)
        if not successors:
            changed, one = moved(store, topic, there, "")
            changed, two = moved(store, changed, changed.route.of_partition(2), "b")
            successors.extend((one, two))
            append(store, two, batch(2))
        return found

    monkeypatch.setattr(ShardedCatalog, "_elsewhere", overtaken)
    if made:
        group = store.catalog.create_group("orders", "late", GroupSettings(start=Start("latest")))
    else:
        group = store.catalog.reset_group("orders", "late", Start("latest"))
    starts = {
        place: store.catalog.start_of(group.id, place)[1] for place in (there.partition_id, *successors)
    }
    assert starts == {there.partition_id: 6, successors[0]: 1, successors[1]: 2}


# --- placing -----------------------------------------------------------------------------------------


def test_a_shard_that_is_drained_meanwhile_gets_no_partition(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = ShardedCatalog.make_log, list[str]()

    def drained(self: ShardedCatalog, piece: Range, topic_id: int, volatile: bool) -> None:
        make(self, piece, topic_id, volatile)
        made.append(piece.shard)
        store.set_shard("b", "draining")

    monkeypatch.setattr(ShardedCatalog, "make_log", drained)
    topic = store.catalog.create_topic("orders", TopicSettings(), 2)
    assert "b" in made
    assert {piece.shard for piece in topic.route.ranges} == {""}


def test_what_was_reserved_and_never_made_is_dropped(
    store: ShardedStore, topic: Topic, clock: MovableClock
) -> None:
    change = store.routes.begin(move(topic.route, 0, "b"))
    assert store.routes.turn_back(change, []) is None
    DropLogs(store, DEFAULTS).run_once()
    assert store.catalog.dropped() == []
    again = store.routes.begin(move(topic.route, 0, "b"))
    store.routes.make(again)
    assert store.routes.turn_back(again, []) is None
    with away(store, "b"):
        assert store.catalog.dropped() == []  # it waits for its shard
    assert store.catalog.dropped() == [again.opens[0].partition_id]
    DropLogs(store, DEFAULTS).run_once()
    assert store.catalog.dropped() == []
    assert again.opens[0].partition_id > change.opens[0].partition_id


def test_a_repeat_is_known_on_a_sealed_partition_of_another_shard(store: ShardedStore, topic: Topic) -> None:
    there = topic.route.ranges[1]
    sent = batch(2, producer=7)
    append(store, there.partition_id, sent)
    moved(store, topic, there, "")
    [again] = append(store, there.partition_id, sent)
    assert (again.base_offset, again.duplicate) == (0, True)


def test_a_volatile_partition_stays_sealed_when_its_log_is_lost(
    opened: Callable[[], ShardedStore], tmp_path: Path
) -> None:
    store = opened()
    topic = store.catalog.create_topic("fast", TopicSettings(storage="volatile"), 2)
    there = topic.route.ranges[1]
    append(store, there.partition_id, batch(3))
    group = store.catalog.create_group("fast", "line", ORDERED)
    topic, here = moved(store, topic, there, "")
    append(store, here, batch(1))
    store.close()
    for file in tmp_path.glob("second.db*volatile*"):
        file.unlink()
    again = opened()
    assert again.progress.drain(group, there.partition_id)
    assert again.progress.poll_ordered(group, here, ask(1, 1)).holder is None


# --- away --------------------------------------------------------------------------------------------


def test_an_error_belongs_to_the_shard_that_raised_it(store: ShardedStore, topic: Topic) -> None:
    """A verb on one shard that needs the other: only the other is away."""
    there = topic.route.ranges[1].partition_id
    append(store, there, batch(1))
    group = store.catalog.create_group("orders", "billing", GroupSettings())
    with away(store, ""):
        with pytest.raises(StoreUnavailable, match="shard 'first' is away") as raised:
            store.progress.rewind(group, [there])
        assert raised.value.details["shard"] == ""
        assert store.present([piece.partition_id for piece in topic.route.ranges]) == [there]
        append(store, there, batch(1))
    store.progress.rewind(group, [there])


def test_of_an_append_to_two_shards_the_one_that_answers_stores_its_part(
    store: ShardedStore, topic: Topic
) -> None:
    here, there = (piece.partition_id for piece in topic.route.ranges)
    with away(store, "b"):
        stored, refused = store.log.append([Append(here, batch(1)), Append(there, batch(1))])
        assert not isinstance(stored, PostroomError) and isinstance(refused, StoreUnavailable)
        with pytest.raises(StoreUnavailable):
            store.log.append([Append(there, batch(1))])
    assert [len(read_all(store, place)) for place in (here, there)] == [1, 0]


def test_holders_neither_lose_nor_hand_over_what_is_away(store: ShardedStore, topic: Topic) -> None:
    for piece in topic.route.ranges:
        append(store, piece.partition_id, batch(2))
    store.catalog.create_group("orders", "line", ORDERED)
    catalog = CatalogCache(store.catalog, lasting=True)
    deliveries = Deliveries(store, catalog, TailCache(0))
    ordered = OrderedDeliveries(store, catalog, deliveries)
    request = PollRequest("orders", "line", "ann", 7, 100, 10_000, 0, True)
    first = ordered.poll(request)
    held = tuple((grant.partition_id, grant.position) for grant in first.grants)
    assert len(held) == 2
    again = replace(request, positions=held, empty_handed=False, started_ms=first.started_ms)
    for name in ("b", ""):
        with away(store, name):
            found = ordered.poll(again)
            assert (found.lost, found.revoked, found.grants) == ((), (), [])
    kept = ordered.poll(again)
    assert (kept.lost, kept.revoked) == ((), ())


def test_the_catalog_lasts_while_the_first_shard_is_away(store: ShardedStore, topic: Topic) -> None:
    catalog = CatalogCache(store.catalog, lasting=True)
    assert catalog.topic("orders").id == topic.id
    catalog.forget()
    with away(store, ""):
        assert catalog.topic("orders").route == topic.route
        with pytest.raises(StoreUnavailable):
            catalog.topic("other")
        with pytest.raises(StoreUnavailable):
            CatalogCache(store.catalog).topic("orders")


# --- delayed messages (I12) --------------------------------------------------------------------------


def test_a_move_to_a_shard_that_is_away_holds_up_nobody_and_is_finished_once(
    store: ShardedStore, topic: Topic, clock: MovableClock
) -> None:
    """The partition they were sent to has moved: some go to a shard that is away, the others are on time."""
    here = topic.route.ranges[0]
    change = store.routes.begin(split(topic.route, here.partition))
    store.routes.make(change)
    store.log.seal(here.partition_id, build_control(1))
    topic = store.routes.activate(change)
    left, right = change.opens
    key = next(b"%d" % number for number in range(1000) if slot_of(b"%d" % number) <= left.last_slot)
    for name in ("early", "late"):
        store.log.append([Append(left.partition_id, delayed_batch(name, key=key), clock.ms + 1000)])
        store.log.append([Append(right.partition_id, delayed_batch(f"+{name}", key=b"b"), clock.ms + 1000)])
    topic, target = moved(store, topic, left, "b")
    mover = ScheduleMover(store.parts()[""], DEFAULTS, "ann", lambda stored: None)
    clock.ms += 1000
    with away(store, "b"):
        for _ in range(4):
            try:
                mover.tick()
            except StoreUnavailable:
                pass  # found out just now
        assert values(read_all(store, right.partition_id)) == [b"+early", b"+late"]
        store.log.append([Append(right.partition_id, delayed_batch("+more", key=b"b"), clock.ms + 10)])
        clock.ms += 20
        mover.tick()
        assert values(read_all(store, right.partition_id))[-1] == b"+more"
    clock.ms += 1000
    mover.tick()
    assert values(read_all(store, target)) == [b"early", b"late"]
    assert values(read_all(store, right.partition_id)) == [b"+early", b"+late", b"+more"]
    first = store.parts()[""].schedule
    assert (first.moves(), sum(first.delayed().values())) == ([], 0)


def test_the_group_of_a_deleted_topic_leaves_no_progress_behind(store: ShardedStore, topic: Topic) -> None:
    group: Group = store.catalog.create_group("orders", "billing", GroupSettings())
    for piece in topic.route.ranges:
        append(store, piece.partition_id, batch(1))
        store.progress.rewind(group, [piece.partition_id])
    store.progress.forget(group.id)
    assert store.progress.peek(group, [piece.partition_id for piece in topic.route.ranges]) == {}
