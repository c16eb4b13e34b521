"""`Log.seal`: a control batch is the last one of a partition; what comes after it is refused (R26, I3)."""

from __future__ import annotations

import pytest

from ...errors import PartitionSealed, StoreUnavailable, UnknownPartition
from ...model.batch import SEAL, build_control, control_kind
from ...model.route import split
from ...model.settings import TopicSettings
from ...store.contract import Append, Appended, Store, Topic
from .harness import (
    MovableClock,
    StoreHarness,
    append,
    batch,
    in_threads,
    partitions,
    read_all,
    refused,
    values,
)
from .routes import carried_out, control

__all__ = ["SealContract"]


class SealContract(StoreHarness):
    def test_a_control_batch_is_the_last_of_a_sealed_partition(self, store: Store, place: int) -> None:
        append(store, place, batch(3))
        assert store.log.seal(place, control()) == 4
        bounds = store.log.bounds([place])[place]
        assert (bounds.start, bounds.end, bounds.sealed) == (0, 4, True)
        found = read_all(store, place)
        assert [control_kind(piece.data) for piece in found] == [None, SEAL]
        assert values(found)[:3] == values(read_all(store, place)[:1])

    def test_an_empty_partition_is_sealed_too(self, store: Store, place: int) -> None:
        assert store.log.seal(place, control()) == 1

    def test_a_sealed_partition_takes_no_more(self, store: Store, place: int, clock: MovableClock) -> None:
        append(store, place, batch(producer=5))
        end = store.log.seal(place, control())
        answers = store.log.append(
            [
                Append(place, batch()),
                Append(place, batch(producer=5, sequence=1)),
                Append(place, batch(producer=6)),
                Append(place, batch(), clock.ms + 60_000),
            ]
        )
        for answer in answers:
            refused(answer, PartitionSealed)
        assert store.log.bounds([place])[place].end == end
        assert sum(store.schedule.delayed().values()) == 0

    def test_repeats_are_answered_by_a_sealed_partition(self, store: Store, other: Store, place: int) -> None:
        """I3: its producer never heard that it was stored."""
        append(store, place, batch(2, producer=5), batch(3, producer=5, sequence=2))
        store.log.seal(place, control())
        for through in (store, other):
            first, second = append(through, place, batch(2, producer=5), batch(3, producer=5, sequence=2))
            assert (first.base_offset, first.duplicate) == (0, True)
            assert (second.base_offset, second.duplicate) == (2, True)

    def test_a_partition_is_sealed_once(self, store: Store, other: Store, place: int) -> None:
        append(store, place, batch(2))
        assert [through.log.seal(place, control()) for through in (store, store, other)] == [3, 3, 3]
        assert store.log.seal(place, build_control(9, b"another")) == 3
        assert len(read_all(other, place)) == 2

    def test_seals_at_once(self, store: Store, other: Store, place: int) -> None:
        ends = in_threads(
            *(lambda through=through: through.log.seal(place, control()) for through in (store, other) * 2)
        )
        assert ends == [1] * 4
        assert len(read_all(store, place)) == 1

    def test_appends_while_it_is_sealed_are_before_the_end_or_refused(
        self, store: Store, other: Store, place: int
    ) -> None:
        def write(through: Store, producer: int) -> int:
            for number in range(200):
                (answer,) = through.log.append([Append(place, batch(producer=producer, sequence=number))])
                if not isinstance(answer, Appended):
                    refused(answer, PartitionSealed)
                    return number
            return 200

        def seal() -> int:
            while store.log.bounds([place])[place].end < 10:
                pass
            return other.log.seal(place, control())

        first, second, end = in_threads(lambda: write(store, 1), lambda: write(other, 2), seal)
        found = read_all(store, place)
        assert end == first + second + 1 == len(found)
        assert [control_kind(piece.data) for piece in found] == [None] * (end - 1) + [SEAL]

    def test_a_seal_whose_commit_fails_has_changed_nothing(self, store: Store, place: int) -> None:
        append(store, place, batch())
        with self.failing_commits(store), pytest.raises(StoreUnavailable, match="wants it so"):
            store.log.seal(place, control())
        assert not store.log.bounds([place])[place].sealed
        assert append(store, place, batch())[0].base_offset == 1

    def test_what_is_gone_is_not_sealed(self, store: Store, topic: Topic, place: int) -> None:
        store.catalog.delete_topic(topic.name)
        with pytest.raises(UnknownPartition):
            store.log.seal(place, control())
        with pytest.raises(UnknownPartition):
            store.log.seal(10**9, control())

    def test_volatile_topics_change_their_route_as_well(self, store: Store, other: Store) -> None:
        topic = store.catalog.create_topic("ticks", TopicSettings(storage="volatile"), 1)
        (place,) = partitions(topic)
        (before,) = append(store, place, batch(2, producer=5))
        change = carried_out(store, split(topic.route, 0))
        assert store.log.bounds([place])[place].sealed
        refused(other.log.append([Append(place, batch())])[0], PartitionSealed)
        (repeat,) = append(other, place, batch(2, producer=5))
        assert (repeat.base_offset, repeat.duplicate) == (before.base_offset, True)
        for piece in change.opens:
            append(other, piece.partition_id, batch(2))
            assert len(values(read_all(store, piece.partition_id))) == 2
