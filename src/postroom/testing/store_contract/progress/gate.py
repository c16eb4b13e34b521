"""`Progress.drain`, `fence`, and the gate: when an ordered group begins in a successor (I9, I10, R27)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ....errors import GateClosed, GenerationChanged
from ....model.delivery.delivery import OrderedAsk
from ....model.policy.settings import GroupSettings, Start, TopicSettings
from ....model.topology.route import merge, renew, split
from ....store.contract import Group, Store, Topic
from ..harness import LEASE, MovableClock, acks, append, ask, batch, in_threads, partitions, spans
from ..routes import carried_out, control, finished
from .ordered import ANN, BOB, DEAD, OrderedHarness, retry, want

__all__ = ["GateContract"]


def drained(store: Store, group: Group, place: int, token: int = ANN) -> bool:
    """Read to the end and settled; what `drain` says then."""
    end = store.log.bounds([place])[place].end
    found = store.progress.poll_ordered(group, place, OrderedAsk(f"m{token}", token, 1000, end))
    store.progress.settle(group, place, token, acks(*spans(found)))
    return store.progress.drain(group, place)


def chain(store: Store, topic: Topic, first: int) -> tuple[int, int]:
    """Renews the partition twice: the one in the middle is empty, the others have two messages each."""
    append(store, first, batch(2))
    found = [first]
    for _ in range(2):
        draft = renew(store.catalog.topic(topic.name).route, found[-1:])
        assert draft is not None
        found.append(carried_out(store, draft).opens[0].partition_id)
    append(store, found[-1], batch(2))
    return found[1], found[2]


def starts(store: Store, group: Group, places: list[int]) -> list[int]:
    return [store.catalog.start_of(group.id, place)[1] for place in places]


class GateContract(OrderedHarness):
    @pytest.fixture
    def halves(self, store: Store, topic: Topic, place: int) -> list[int]:
        """The successors of `place`, which has three messages; each of them has two."""
        append(store, place, batch(3))
        change = carried_out(store, split(topic.route, 0))
        found = [piece.partition_id for piece in change.opens]
        for partition_id in found:
            append(store, partition_id, batch(2))
        return found

    # ---- drain ----

    def test_what_was_never_polled_is_not_drained(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        assert not store.progress.drain(line, place)

    def test_what_is_open_is_not_drained(self, store: Store, line: Group, place: int) -> None:
        append(store, place, batch(3))
        assert not drained(store, line, place)
        assert not store.progress.peek(line, [place])[place].drained

    def test_all_of_it_must_be_settled_with_the_control_batch(
        self, store: Store, other: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        store.progress.poll_ordered(line, place, want(ANN, 4))
        assert not store.progress.drain(line, place)
        store.progress.settle(line, place, ANN, acks((0, 1), (3, 3)))
        assert not store.progress.drain(line, place)
        store.progress.settle(line, place, ANN, acks((2, 2)))
        assert not store.progress.peek(line, [place])[place].drained  # nobody has looked yet
        assert self.flushed(store, lambda: store.progress.drain(line, place))
        assert other.progress.peek(line, [place])[place].drained
        assert other.progress.drain(line, place)

    def test_the_control_batch_is_one_to_be_settled(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        store.progress.poll_ordered(line, place, want(ANN, 4))
        store.progress.settle(line, place, ANN, acks((0, 2)))
        assert not store.progress.drain(line, place)

    def test_what_is_drained_is_announced(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        store.progress.poll_ordered(line, place, want(ANN, 4))
        store.progress.settle(line, place, ANN, acks((0, 3)))
        assert self.durably_announced(store, lambda: store.progress.drain(line, place))

    @pytest.mark.parametrize("how", ["waits", "stopped", "leaving"])
    def test_what_is_left_of_it_keeps_it(
        self, store: Store, topic: Topic, place: int, halves: list[int], clock: MovableClock, how: str
    ) -> None:
        """A retry that waits, a message that stopped its key, or one that a mover has still to move."""
        settings = GroupSettings(
            mode="ordered", lease_ms=LEASE, max_attempts=1 if how != "waits" else 9, max_hold_ms=10 * LEASE,
            exhausted="stop" if how == "stopped" else "dead",
        )  # fmt: skip
        group = store.catalog.create_group(topic.name, how, settings)
        store.progress.poll_ordered(group, place, want(ANN, 4))
        answer = store.progress.settle(group, place, ANN, retry(1, 1, clock.ms + LEASE, stamp=DEAD))
        store.progress.settle(group, place, ANN, acks((0, 0), (2, 3)))
        assert not store.progress.drain(group, place)
        with pytest.raises(GateClosed):
            store.progress.poll_ordered(group, halves[0], want(ANN, 2))
        if how == "stopped":
            assert store.progress.restart_stopped(group, place) == 1
        token = ANN
        if how == "leaving":
            (moved,) = answer.leaving
            token = moved.token
        else:
            assert not answer.leaving
            clock.ms += 2 * LEASE
            store.progress.hand_over(group, place, ANN)
            store.progress.poll_ordered(group, place, want(ANN, 4))
        assert not store.progress.drain(group, place)
        assert store.progress.settle(group, place, token, acks((1, 1))).lost == ()
        assert store.progress.drain(group, place)

    def test_what_a_dead_holder_had_keeps_it(
        self, store: Store, line: Group, place: int, halves: list[int], clock: MovableClock
    ) -> None:
        store.progress.poll_ordered(line, place, want(ANN, 4))
        clock.ms += 10 * LEASE
        assert not store.progress.drain(line, place)
        assert not drained(store, line, place, BOB)  # suspects come one by one
        with pytest.raises(GateClosed):
            store.progress.poll_ordered(line, halves[0], want(BOB, 2))

    def test_what_retention_took_is_drained(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        """All of it, never polled; and what was in somebody's hands."""
        store.progress.poll_ordered(line, place, want(ANN, 2))
        store.log.trim(place, 3)
        assert not store.progress.drain(line, place)
        store.log.trim(place, 4)
        assert store.progress.drain(line, place)
        fresh = store.catalog.create_group(line.topic, "fresh", line.settings)
        assert store.progress.drain(fresh, place)
        store.progress.poll_ordered(fresh, halves[0], want(ANN, 2))

    def test_what_is_removed_is_drained(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        store.log.trim(place, 4)
        while store.log.sweep(place, rows=10):
            pass
        store.routes.remove(place)
        assert store.progress.drain(line, place)
        assert spans(store.progress.poll_ordered(line, halves[0], want(ANN, 2))) == [(0, 1)]
        assert store.progress.drain(line, 10**9)

    def test_a_group_of_an_earlier_generation_drains_nothing(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        assert drained(store, line, place)
        again = store.catalog.reset_group(line.topic, line.name, Start("earliest"))
        store.progress.rewind(again, [place])
        with pytest.raises(GenerationChanged):
            store.progress.drain(line, place)
        assert not store.progress.drain(again, place)
        assert drained(store, again, place, BOB)

    # ---- the gate ----

    @pytest.mark.parametrize("verb", ["poll", "settle", "extend", "hand over", "rewind", "restart"])
    def test_no_verb_begins_behind_a_closed_gate(
        self, store: Store, line: Group, halves: list[int], verb: str
    ) -> None:
        progress, place = store.progress, halves[0]
        calls: dict[str, Callable[[], object]] = {
            "poll": lambda: progress.poll_ordered(line, place, want(ANN, 2)),
            "settle": lambda: progress.settle(line, place, ANN, acks((0, 0))),
            "extend": lambda: progress.extend(line, place, ANN, [(0, 0)]),
            "hand over": lambda: progress.hand_over(line, place, ANN),
            "rewind": lambda: progress.rewind(line, [place]),
            "restart": lambda: progress.restart_stopped(line, place),
        }
        with pytest.raises(GateClosed):
            calls[verb]()
        assert not progress.drain(line, place)
        assert progress.peek(line, halves) == {}
        assert progress.committed(line.id, place) is None

    def test_a_successor_opens_when_its_predecessor_is_drained(
        self, store: Store, other: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        assert drained(store, line, place)
        for partition_id in halves:
            opening = lambda partition_id=partition_id: other.progress.poll_ordered(  # noqa: E731
                line, partition_id, want(BOB, 2)
            )
            assert self.flushed(other, opening)
        assert set(store.progress.peek(line, halves)) == set(halves)
        store.progress.settle(line, halves[0], BOB, acks((0, 1)))
        assert store.progress.committed(line.id, halves[0]) == 2

    def test_settling_the_last_is_enough(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        """Nobody has to call `drain`: whoever begins in the successor does it."""
        store.progress.poll_ordered(line, place, want(ANN, 4))
        store.progress.settle(line, place, ANN, acks((0, 3)))
        assert spans(store.progress.poll_ordered(line, halves[1], want(ANN, 2))) == [(0, 1)]
        assert store.progress.peek(line, [place])[place].drained

    @pytest.mark.parametrize("mode", ["shared", "broadcast"])
    def test_other_groups_read_successors_at_once(
        self, store: Store, topic: Topic, place: int, halves: list[int], mode: str
    ) -> None:
        settings = GroupSettings(mode=mode, lease_ms=LEASE)  # type: ignore[arg-type]
        group = store.catalog.create_group(topic.name, "loose", settings)
        assert spans(store.progress.poll(group, halves[0], ask(1, 2))) == [(0, 1)]
        assert spans(store.progress.poll(group, place, ask(2, 4))) == [(0, 3)]
        assert not store.progress.drain(group, place)
        store.progress.settle(group, place, 2, acks((0, 3)))
        assert store.progress.drain(group, place)

    def test_groups_do_not_open_for_each_other(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        second = store.catalog.create_group(line.topic, "second", line.settings)
        assert drained(store, line, place)
        store.progress.poll_ordered(line, halves[0], want(ANN, 2))
        with pytest.raises(GateClosed):
            store.progress.poll_ordered(second, halves[0], want(ANN, 2))

    @pytest.mark.parametrize("turned", [False, True])
    def test_a_merge_needs_both(self, store: Store, settings: GroupSettings, turned: bool) -> None:
        topic = store.catalog.create_topic("pair", TopicSettings(), 2)
        group = store.catalog.create_group(topic.name, "line", settings)
        first, second = partitions(topic)
        change = carried_out(store, merge(topic.route, 0, 1))
        (both,) = (piece.partition_id for piece in change.opens)
        append(store, both, batch(2))
        for place in (second, first) if turned else (first, second):
            with pytest.raises(GateClosed):
                store.progress.poll_ordered(group, both, want(ANN, 2))
            assert drained(store, group, place)
        assert spans(store.progress.poll_ordered(group, both, want(ANN, 2))) == [(0, 1)]

    def test_a_chain_of_three(self, store: Store, line: Group, topic: Topic, place: int) -> None:
        """The one in the middle is empty: it is still not passed over before the first is drained."""
        middle, last = chain(store, topic, place)
        for closed in (last, middle):
            with pytest.raises(GateClosed):
                store.progress.poll_ordered(line, closed, want(ANN, 2))
        assert not store.progress.drain(line, middle)
        assert drained(store, line, place)
        with pytest.raises(GateClosed):
            store.progress.poll_ordered(line, last, want(ANN, 2))
        assert drained(store, line, middle)
        assert spans(store.progress.poll_ordered(line, last, want(ANN, 2))) == [(0, 1)]

    def test_one_in_the_middle_is_removed_before_the_first(
        self, store: Store, line: Group, topic: Topic, place: int
    ) -> None:
        """A group that is reset reads the first again, and only then what followed the one in between."""
        middle, last = chain(store, topic, place)
        assert drained(store, line, place) and drained(store, line, middle)
        store.log.trim(middle, 1)
        while store.log.sweep(middle, rows=10):
            pass
        store.routes.remove(middle)
        assert store.catalog.topic(topic.name).route.predecessors == {last: (place,)}
        reset = store.catalog.reset_group(line.topic, line.name, Start("earliest"))
        store.progress.fence(reset, [last])
        store.progress.rewind(reset, [place])
        with pytest.raises(GateClosed):
            store.progress.poll_ordered(reset, last, want(ANN, 2))
        assert drained(store, reset, place)
        assert spans(store.progress.poll_ordered(reset, last, want(ANN, 2))) == [(0, 1)]

    def test_a_gate_that_is_open_stays_open(
        self, store: Store, line: Group, topic: Topic, place: int, halves: list[int]
    ) -> None:
        """It is written once: what becomes of its predecessors does not matter any more."""
        assert drained(store, line, place)
        store.progress.poll_ordered(line, halves[0], want(ANN, 2, messages=1))
        store.log.trim(place, 4)
        store.routes.remove(place)
        assert spans(store.progress.poll_ordered(line, halves[0], want(ANN, 2, 1))) == [(1, 1)]

    def test_two_who_pass_the_gate_at_once(
        self, store: Store, other: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        store.progress.poll_ordered(line, place, want(ANN, 4))
        store.progress.settle(line, place, ANN, acks((0, 3)))
        found = in_threads(
            lambda: store.progress.poll_ordered(line, halves[0], want(ANN, 2)),
            lambda: other.progress.poll_ordered(line, halves[0], want(BOB, 2)),
        )
        assert sorted(spans(one) for one in found) == [[], [(0, 1)]]

    def test_volatile_topics_have_the_gate_too(self, store: Store, settings: GroupSettings) -> None:
        topic = store.catalog.create_topic("ticks", TopicSettings(storage="volatile"), 1)
        group = store.catalog.create_group(topic.name, "line", settings)
        (place,) = partitions(topic)
        append(store, place, batch(2))
        successor = carried_out(store, split(topic.route, 0)).opens[0].partition_id
        (stored,) = append(store, successor, batch(2))
        end = stored.base_offset + 2
        with pytest.raises(GateClosed):
            store.progress.poll_ordered(group, successor, want(ANN, end))
        assert drained(store, group, place)
        store.progress.poll_ordered(group, successor, want(ANN, end))

    # ---- reset (I10) ----

    def _reset(self, store: Store, line: Group, place: int, halves: list[int], to: str) -> Group:
        again = store.catalog.reset_group(line.topic, line.name, Start(to))  # type: ignore[arg-type]
        store.progress.fence(again, halves)
        store.progress.rewind(again, [place])
        return again

    def test_a_reset_closes_successors_again(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        assert drained(store, line, place)
        store.progress.poll_ordered(line, halves[0], want(ANN, 2, messages=1))
        again = self._reset(store, line, place, halves, "earliest")
        with pytest.raises(GateClosed):
            store.progress.poll_ordered(again, halves[0], want(BOB, 2))
        for verb in (
            lambda: store.progress.poll_ordered(line, halves[0], want(ANN, 2, 1)),
            lambda: store.progress.settle(line, halves[0], ANN, acks((0, 0))),
            lambda: store.progress.extend(line, halves[0], ANN, [(0, 0)]),
            lambda: store.progress.poll_ordered(line, place, want(ANN, 4)),
        ):
            with pytest.raises(GenerationChanged):
                verb()
        assert drained(store, again, place, BOB)
        assert spans(store.progress.poll_ordered(again, halves[0], want(BOB, 2))) == [(0, 1)]

    def test_a_fence_that_comes_late_leaves_what_is_of_the_new_generation(
        self, store: Store, other: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        """Somebody polls between the steps of a reset: it holds the partition, and goes on holding it."""
        assert drained(store, line, place)
        store.progress.poll_ordered(line, halves[0], want(ANN, 2, messages=1))
        store.progress.poll_ordered(line, halves[1], want(ANN, 2, messages=1))
        ends = store.catalog.topic(line.topic).route.partitions
        named = tuple((piece.partition, 4 * (piece.partition_id == place)) for piece in ends)
        again = store.catalog.reset_group(line.topic, line.name, Start("offsets", offsets=named))
        assert spans(other.progress.poll_ordered(again, halves[0], want(BOB, 2))) == [(0, 1)]
        store.progress.fence(again, halves)
        assert not spans(store.progress.poll_ordered(again, halves[0], want(ANN, 2)))
        assert other.progress.settle(again, halves[0], BOB, acks((0, 1))).lost == ()
        assert store.progress.committed(line.id, halves[0]) == 2
        assert halves[1] not in store.progress.peek(again, halves)
        with pytest.raises(GenerationChanged):
            store.progress.extend(line, halves[1], ANN, [(0, 0)])

    def test_a_reset_of_a_predecessor_keeps_where_its_successors_are(
        self, store: Store, other: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        """They wait until it is read once more; then what was unsettled comes, and nothing else again."""
        assert drained(store, line, place)
        for half in halves:
            store.progress.poll_ordered(line, half, want(ANN, 2, messages=2))
        store.progress.settle(line, halves[0], ANN, acks((0, 0)))
        again = store.catalog.reset_group(line.topic, line.name, Start("offsets", offsets=((0, 2),)))
        assert spans(other.progress.poll_ordered(again, place, want(BOB, 4))) == [(2, 3)]  # fences by itself
        for verb in (
            lambda: store.progress.poll_ordered(line, halves[0], want(ANN, 2, 2)),
            lambda: store.progress.settle(line, halves[1], ANN, acks((0, 1))),
            lambda: store.progress.extend(line, halves[0], ANN, [(1, 1)]),
        ):
            with pytest.raises(GenerationChanged):
                verb()
        with pytest.raises(GateClosed):
            store.progress.settle(again, halves[0], ANN, acks((1, 1)))
        assert [b.committed for b in store.progress.backlog(again, halves)] == [1, 0]
        assert [store.progress.committed(line.id, half) for half in halves] == [1, 0]
        store.progress.fence(again, halves)  # once more: nothing to do
        other.progress.settle(again, place, BOB, acks((2, 3)))
        assert spans(store.progress.poll_ordered(again, halves[0], want(BOB, 2))) == [(1, 1)]
        granted = store.progress.poll_ordered(again, halves[1], want(BOB, 2))
        assert spans(granted) == [(0, 1)]
        assert [d.attempt for d in granted.deliveries] == [1]  # the reset was no attempt of theirs

    # ---- starts (I9) ----

    def test_where_a_group_begins_that_was_made_before_the_change(
        self, store: Store, topic: Topic, place: int, settings: GroupSettings, clock: MovableClock
    ) -> None:
        """It reads all of what was sent after it, wherever that went."""
        append(store, place, batch(3))
        clock.ms += 1000
        wishes = {
            "latest": Start("latest"),
            "time": Start("time", time_ms=clock.ms),
            "offsets": Start("offsets", offsets=((0, 3),)),
        }
        groups = [
            store.catalog.create_group(topic.name, name, _with(settings, start))
            for name, start in wishes.items()
        ]
        append(store, place, batch(2))
        change = store.routes.begin(split(topic.route, 0))
        store.routes.make(change)
        between = store.catalog.create_group(topic.name, "between", _with(settings, Start("latest")))
        finished(store, change)
        halves = [piece.partition_id for piece in change.opens]
        append(store, halves[0], batch(2))
        for group in groups:
            assert starts(store, group, [place, *halves]) == [3, 0, 0]
            assert spans(store.progress.poll_ordered(group, place, want(ANN, 6))) == [(3, 5)]
        assert starts(store, between, [place, *halves]) == [5, 0, 0]

    def test_where_a_group_begins_that_was_made_after_the_change(
        self,
        store: Store,
        topic: Topic,
        place: int,
        halves: list[int],
        settings: GroupSettings,
        clock: MovableClock,
    ) -> None:
        clock.ms += 1000
        append(store, halves[1], batch(1))

        def begins(name: str, start: Start) -> list[int]:
            group = store.catalog.create_group(topic.name, name, _with(settings, start))
            return starts(store, group, [place, *halves])

        assert begins("earliest", Start("earliest")) == [0, 0, 0]
        assert begins("latest", Start("latest")) == [4, 2, 3]
        assert begins("time", Start("time", time_ms=clock.ms)) == [4, 2, 2]
        assert begins("offsets", Start("offsets", offsets=((0, 2), (2, 1)))) == [2, 0, 1]
        latest = store.catalog.group(topic.name, "latest")
        append(store, halves[0], batch(1))
        assert spans(store.progress.poll_ordered(latest, halves[0], want(ANN, 3))) == [(2, 2)]

    def test_a_group_that_starts_at_the_beginning_walks_the_lineage(
        self, store: Store, line: Group, place: int, halves: list[int]
    ) -> None:
        """R27."""
        fresh = store.catalog.create_group(line.topic, "fresh", line.settings)
        with pytest.raises(GateClosed):
            store.progress.poll_ordered(fresh, halves[0], want(ANN, 2))
        assert drained(store, fresh, place)
        assert spans(store.progress.poll_ordered(fresh, halves[0], want(ANN, 2))) == [(0, 1)]

    def test_a_sealed_partition_without_successor_holds_nobody(
        self, store: Store, line: Group, topic: Topic, place: int
    ) -> None:
        """Its change was turned back meanwhile: it is drained, and later renewed (I11)."""
        append(store, place, batch(1))
        store.log.seal(place, control())
        assert drained(store, line, place)
        draft = renew(store.catalog.topic(topic.name).route, [place])
        assert draft is not None
        successor = carried_out(store, draft).opens[0].partition_id
        append(store, successor, batch(1))
        assert spans(store.progress.poll_ordered(line, successor, want(ANN, 1))) == [(0, 0)]


def _with(settings: GroupSettings, start: Start) -> GroupSettings:
    return GroupSettings(
        mode=settings.mode, lease_ms=settings.lease_ms, max_attempts=settings.max_attempts, start=start
    )
