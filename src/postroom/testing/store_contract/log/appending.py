"""`Log.append`: dense offsets, each batch at most once, and a refusal that harms nobody else (R1, I2, I3)."""

from __future__ import annotations

import random

import pytest

from ....config import DEFAULTS
from ....errors import (
    CorruptBatch,
    PartitionSealed,
    PostroomError,
    ProducerFenced,
    SequenceGap,
    StoreError,
    StoreUnavailable,
    UnknownFate,
    UnknownPartition,
    UnknownProducer,
)
from ....model.messages.batch import SEAL, build_control, control_kind, verify
from ....model.policy.settings import TopicSettings
from ....model.topology.route import split
from ....store.contract import Append, Appended, Bounds, Store, Topic
from ..harness import (
    MovableClock,
    StoreHarness,
    append,
    batch,
    in_threads,
    partitions,
    read_all,
    refused,
    stored,
    values,
)
from ..routes import carried_out, control

__all__ = ["AppendContract", "LoneAppendContract", "SealContract"]


NOWHERE = 987_654_321


class AppendContract(StoreHarness):
    # ---- offsets ----

    def test_offsets_are_dense_and_in_the_order_of_the_call(self, store: Store, place: int) -> None:
        sizes = [3, 1, 5, 2, 1]
        batches = [batch(size, value=b"%d" % number) for number, size in enumerate(sizes)]
        first = append(store, place, *batches[:3])
        then = append(store, place, *batches[3:])
        assert [done.base_offset for done in first + then] == [0, 3, 4, 9, 11]
        assert store.log.bounds([place]) == {place: Bounds(0, 12)}
        kept = read_all(store, place)
        assert [piece.records for piece in kept] == sizes
        assert values(kept) == [b"%d-%d" % (n, i) for n, size in enumerate(sizes) for i in range(size)]

    def test_a_batch_comes_back_as_it_was_but_for_its_offset(self, store: Store, place: int) -> None:
        sent = batch(4, producer=7, value=bytes(range(256)) * 300)
        append(store, place, batch(9), sent)
        kept = read_all(store, place)[1]
        header = verify(kept.data)
        assert kept.data[8:] == sent[8:]
        assert (header.base_offset, header.last_offset, kept.last_offset) == (9, 12, 12)

    def test_several_partitions_in_one_call(self, store: Store) -> None:
        one, two, three = partitions(store.catalog.create_topic("wide", TopicSettings(), 3))
        order = [(three, 2), (one, 1), (three, 1), (two, 4), (one, 3)]
        results = store.log.append([Append(place, batch(size)) for place, size in order])
        assert [stored(result).base_offset for result in results] == [0, 0, 2, 0, 1]
        assert {p: b.end for p, b in store.log.bounds([one, two, three]).items()} == {
            one: 4,
            two: 4,
            three: 3,
        }
        for place in (one, two, three):
            read_all(store, place)

    def test_an_empty_call_does_nothing(self, store: Store, place: int) -> None:
        assert store.log.append([]) == []
        assert store.log.bounds([place])[place].end == 0

    def test_batches_without_a_sequence_are_never_repeats(self, store: Store, place: int) -> None:
        one_way = batch(2)
        done = append(store, place, one_way, one_way) + append(store, place, one_way)
        assert [(d.base_offset, d.duplicate) for d in done] == [(0, False), (2, False), (4, False)]

    # ---- time ----

    def test_appended_at_is_the_stores_clock(self, store: Store, place: int, clock: MovableClock) -> None:
        done = append(store, place, batch())[0]
        assert done.appended_at == clock.ms == store.now_ms()
        assert read_all(store, place)[0].appended_at == clock.ms

    def test_appended_at_never_goes_back(self, store: Store, place: int, clock: MovableClock) -> None:
        """I16: not even if the clock does."""
        clock.ms += 10_000
        newest = clock.ms
        append(store, place, batch())
        clock.ms -= 9_000
        behind = append(store, place, batch(), batch())
        clock.ms += 9_001
        ahead = append(store, place, batch())
        assert [done.appended_at for done in behind + ahead] == [newest, newest, newest + 1]
        assert [piece.appended_at for piece in read_all(store, place)] == [newest, newest, newest, newest + 1]

    # ---- repeats (I3) ----

    def test_a_repeat_returns_its_first_offset_and_stores_nothing(self, store: Store, place: int) -> None:
        sent = batch(3, producer=7)
        assert append(store, place, batch(2), sent)[1].base_offset == 2
        again = append(store, place, sent, batch(1), sent)
        assert [(done.base_offset, done.duplicate) for done in again] == [(2, True), (5, False), (2, True)]
        assert store.log.bounds([place])[place].end == 6

    def test_two_whose_batches_name_one_id_have_a_sequence_each(self, store: Store, place: int) -> None:
        """I23: what counts is whose append it is, in one transaction and in many; batches stay as is."""
        sent = [batch(2, producer=7, sequence=at) for at in (0, 2)]
        calls = [(None, 0), (8, 0), (9, 0), (8, 0), (None, 2), (9, 2), (8, 2)]
        appends = [Append(place, sent[at // 2], producer_id=who) for who, at in calls]
        done = [stored(one) for one in store.log.append(appends)]
        assert [(d.base_offset, d.duplicate) for d in done] == [
            (0, False), (2, False), (4, False), (2, True), (6, False), (8, False), (10, False)
        ]  # fmt: skip
        again = [stored(one) for one in store.log.append(appends)]
        assert [(d.base_offset, d.duplicate) for d in again] == [(d.base_offset, True) for d in done]
        newer = Append(place, batch(1, producer=7, epoch=9), producer_id=8)
        assert not stored(store.log.append([newer])[0]).duplicate
        assert isinstance(store.log.append([appends[1]])[0], ProducerFenced)
        assert stored(store.log.append([appends[0]])[0]).duplicate
        assert {verify(piece.data).producer_id for piece in read_all(store, place)} == {7}

    def test_a_repeat_within_one_call_is_stored_once(self, store: Store, place: int) -> None:
        sent = batch(3, producer=7)
        done = append(store, place, sent, sent, batch(1, producer=7, sequence=3), sent)
        assert [(d.base_offset, d.duplicate) for d in done] == [(0, False), (0, True), (3, False), (0, True)]
        assert len(read_all(store, place)) == 2

    def test_as_many_repeats_are_known_as_may_be_in_flight(self, store: Store, place: int) -> None:
        sent = [batch(2, producer=7, sequence=2 * number) for number in range(DEFAULTS.in_flight_batches)]
        append(store, place, *sent)
        again = append(store, place, *sent)
        assert [(done.base_offset, done.duplicate) for done in again] == [
            (0, True),
            (2, True),
            (4, True),
            (6, True),
        ]

    def test_a_repeat_is_answered_on_a_sealed_partition(self, store: Store, place: int) -> None:
        sent, new = batch(3, producer=7), batch(1, producer=7, sequence=3)
        append(store, place, batch(), sent)
        self.seal(store, place)
        for _ in range(2):  # a refused batch is not remembered as if it were stored
            again, refusal, one_way = store.log.append([Append(place, b) for b in (sent, new, batch())])
            assert (stored(again).base_offset, stored(again).duplicate) == (1, True)
            refused(refusal, PartitionSealed)
            refused(one_way, PartitionSealed)
        assert store.log.bounds([place]) == {place: Bounds(0, 5, sealed=True)}
        assert len(read_all(store, place)) == 3  # the last one says that it is sealed

    def test_sequences_belong_to_a_producer_and_a_partition(self, store: Store) -> None:
        one, two = partitions(store.catalog.create_topic("wide", TopicSettings(), 2))
        calls = [(one, 7, 0), (one, 8, 0), (two, 7, 0), (one, 7, 1), (two, 8, 0), (two, 7, 1)]
        results = store.log.append([Append(p, batch(1, producer=who, sequence=n)) for p, who, n in calls])
        assert [stored(result).base_offset for result in results] == [0, 1, 0, 2, 1, 2]
        assert not any(stored(result).duplicate for result in results)

    def test_repeats_are_known_to_every_process(self, store: Store, place: int, other: Store) -> None:
        sent, following = batch(3, producer=7), batch(1, producer=7, sequence=3)
        append(store, place, sent)
        assert append(other, place, sent)[0].duplicate
        assert append(other, place, following)[0].base_offset == 3
        again = append(store, place, following, sent)
        assert [(done.base_offset, done.duplicate) for done in again] == [(3, True), (0, True)]

    # ---- refusals ----

    def test_a_gap_is_refused_until_what_is_missing_came(self, store: Store, place: int) -> None:
        first, second, third = (batch(2, producer=7, sequence=2 * number) for number in range(3))
        append(store, place, first)
        for _ in range(2):
            assert refused(store.log.append([Append(place, third)])[0], SequenceGap).retriable
        assert store.log.bounds([place])[place].end == 2
        assert [done.base_offset for done in append(store, place, second, third)] == [2, 4]

    def test_an_unknown_producer_starts_at_0(self, store: Store, place: int) -> None:
        refused(store.log.append([Append(place, batch(producer=7, sequence=5))])[0], UnknownProducer)
        assert store.log.bounds([place])[place].end == 0
        append(store, place, batch(producer=7))

    def test_a_newer_epoch_fences_the_older(self, store: Store, place: int) -> None:
        append(store, place, batch(2, producer=7, epoch=3))
        late_start = batch(producer=7, epoch=4, sequence=2)
        refused(store.log.append([Append(place, late_start)])[0], UnknownProducer)
        append(store, place, batch(2, producer=7, epoch=4))
        for sequence in (0, 2):
            old = batch(2, producer=7, epoch=3, sequence=sequence)
            refused(store.log.append([Append(place, old)])[0], ProducerFenced)
        assert store.log.bounds([place])[place].end == 4

    def test_what_is_no_longer_remembered_has_an_unknown_fate(self, store: Store, place: int) -> None:
        """Never success: it may have been stored, or not."""
        sent = [batch(2, producer=7, sequence=2 * n) for n in range(DEFAULTS.remembered_batches + 1)]
        append(store, place, *sent)
        end = store.log.bounds([place])[place].end
        refused(store.log.append([Append(place, sent[0])])[0], UnknownFate)
        assert append(store, place, sent[1])[0].base_offset == 2
        other_cut = batch(3, producer=7, sequence=2)  # overlaps batches that are remembered
        refused(store.log.append([Append(place, other_cut)])[0], UnknownFate)
        assert store.log.bounds([place])[place].end == end

    def test_a_refused_batch_does_not_stop_its_neighbours(
        self, store: Store, topic: Topic, place: int
    ) -> None:
        results = store.log.append(
            [
                Append(place, batch(2, producer=7)),
                Append(place, batch(2, producer=7, sequence=9)),
                Append(place, batch()[:-1]),
                Append(NOWHERE, batch()),
                Append(place, batch(2, producer=8, sequence=1)),
                Append(place, batch(2, producer=7, sequence=2)),
                Append(place, batch(1)),
            ]
        )
        kinds = [SequenceGap, CorruptBatch, UnknownPartition, UnknownProducer]
        for result, kind in zip(results[1:5], kinds, strict=True):
            refused(result, kind)
        assert [stored(results[n]).base_offset for n in (0, 5, 6)] == [0, 2, 4]
        assert [piece.base_offset for piece in read_all(store, place)] == [0, 2, 4]

    @pytest.mark.parametrize("length", [0, 1, 60, 61, 62, 100])
    def test_a_cut_batch_is_refused(self, store: Store, place: int, length: int) -> None:
        refused(store.log.append([Append(place, batch(20)[:length])])[0], CorruptBatch)
        assert store.log.bounds([place])[place].end == 0

    def test_a_batch_with_a_broken_header_is_refused(self, store: Store, place: int) -> None:
        whole = batch(3)
        longer, older, fewer = whole + b"x", bytearray(whole), bytearray(whole)
        older[16] = 1  # format version
        fewer[60] = 2  # records
        for broken in (longer, bytes(older), bytes(fewer)):
            refused(store.log.append([Append(place, broken)])[0], CorruptBatch)
        assert store.log.bounds([place])[place].end == 0

    def test_the_partition_of_a_deleted_topic_is_unknown(
        self, store: Store, topic: Topic, place: int
    ) -> None:
        append(store, place, batch(producer=7))
        store.catalog.delete_topic(topic.name)
        for sent in (batch(), batch(producer=7)):
            gone = refused(store.log.append([Append(place, sent)])[0], UnknownPartition)
            assert gone.details == {"partition_id": place}

    # ---- all or nothing ----

    def test_a_transaction_that_fails_stores_nothing(self, store: Store) -> None:
        """I2: neither batches nor sequences, so that sending again is no repeat."""
        one, two = partitions(store.catalog.create_topic("wide", TopicSettings(), 2))
        append(store, one, batch(2, producer=7))
        calls = [Append(one, batch(2, producer=7, sequence=2)), Append(two, batch(producer=7))]
        with self.failing_commits(store), pytest.raises(StoreError):
            store.log.append(calls)
        assert {p: b.end for p, b in store.log.bounds([one, two]).items()} == {one: 2, two: 0}
        assert [len(read_all(store, place)) for place in (one, two)] == [1, 0]
        again = [stored(result) for result in store.log.append(calls)]
        assert [(done.base_offset, done.duplicate) for done in again] == [(2, False), (0, False)]

    # ---- any history ----

    @pytest.mark.parametrize("seed", range(4))
    def test_any_history_of_producers_ends_in_each_batch_once(
        self, store: Store, place: int, seed: int
    ) -> None:
        """Producers that lose answers, send too early, and begin again, against a list of what was stored."""
        draw = random.Random(seed)
        log = _NaiveLog()
        for _ in range(25):
            calls = [_anything(draw, log) for _ in range(draw.randint(1, 8))]
            results = store.log.append([Append(place, batch(n, producer=who, epoch=e, sequence=s))
                                        for who, e, s, n in calls])  # fmt: skip
            for call, result in zip(calls, results, strict=True):
                log.expect(call, result)
        assert [(p.base_offset, p.records) for p in read_all(store, place)] == log.rows


_Call = tuple[int, int, int, int]  # producer, epoch, sequence, messages


class _NaiveLog:
    """A log that keeps everything, with the rules of I3 in their plainest form."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.sent: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # of an epoch: sequence, n, offset
        self.epochs: dict[int, int] = {}

    @property
    def end(self) -> int:
        return sum(n for _, n in self.rows)

    def next_of(self, who: int, epoch: int) -> int:
        return sum(n for _, n, _ in self.sent.get((who, epoch), []))

    def expect(self, call: _Call, result: Appended | PostroomError) -> None:
        who, epoch, sequence, messages = call
        current = self.epochs.get(who, -1)
        known = self.sent.get((who, epoch), [])
        repeats = [offset for s, n, offset in known[-DEFAULTS.remembered_batches :] if (s, n) == call[2:]]
        if epoch < current:
            refused(result, ProducerFenced)
        elif repeats:
            assert (stored(result).base_offset, stored(result).duplicate) == (repeats[0], True)
        elif sequence == self.next_of(who, epoch):
            assert (stored(result).base_offset, stored(result).duplicate) == (self.end, False)
            self.sent.setdefault((who, epoch), []).append((sequence, messages, self.end))
            self.rows.append((self.end, messages))
            self.epochs[who] = epoch
        elif epoch > current:
            refused(result, UnknownProducer)
        else:
            refused(result, SequenceGap if sequence > self.next_of(who, epoch) else UnknownFate)


def _anything(draw: random.Random, log: _NaiveLog) -> _Call:
    """Mostly the next batch or a repeat; at times too early, a forgotten one, or another epoch.

    What is drawn for one call does not see its neighbours in it, so repeats and gaps happen by themselves.
    """
    who = draw.randint(1, 3)
    epoch = max(0, log.epochs.get(who, 0) + draw.choice([0] * 18 + [-1, 1]))
    known = log.sent.get((who, epoch), [])
    if known and draw.random() < 0.4:
        sequence, messages, _ = draw.choice(known[-10:])
        return who, epoch, sequence, messages
    return who, epoch, log.next_of(who, epoch) + draw.choice([0] * 8 + [1, 3]), draw.randint(1, 4)


# ---- `Log.seal`: a control batch is the last of a partition; what comes after it is refused (R26, I3) ----


class LoneAppendContract(StoreHarness):
    """One batch a call, again and again: a store may go a shorter way by what it knows of the last one (I1).

    Whatever others do in between, the answers are those of the long way.
    """

    @pytest.fixture
    def partition(self, topic: Topic) -> int:
        return topic.route.ranges[0].partition_id

    def send(
        self, store: Store, partition: int, *numbers: int, producer: int = 7, epoch: int = 0
    ) -> list[int]:
        """Append batches of one message, each with its sequence; return their offsets."""
        batches = [batch(producer=producer, epoch=epoch, sequence=n, value=b"%d" % n) for n in numbers]
        return [append(store, partition, sent)[0].base_offset for sent in batches]

    def test_offsets_are_dense_whoever_appends_in_between(
        self, store: Store, other: Store, partition: int
    ) -> None:
        mine = theirs = 0
        expected: list[bytes] = []
        for ours, others in ((5, 1), (1, 1), (4, 3), (3, 0), (2, 5)):
            self.send(store, partition, *range(mine, mine + ours))
            self.send(other, partition, *range(theirs, theirs + others), producer=8)
            expected += [b"%d-0" % n for n in range(mine, mine + ours)]
            expected += [b"%d-0" % n for n in range(theirs, theirs + others)]
            mine, theirs = mine + ours, theirs + others
        kept = read_all(store, partition)
        assert [piece.base_offset for piece in kept] == list(range(len(expected)))
        assert values(kept) == expected
        assert store.log.bounds([partition]) == {partition: Bounds(0, len(expected))}

    def test_one_producer_that_moves_between_stores_is_known_to_both(
        self, store: Store, other: Store, partition: int
    ) -> None:
        """I3: what one of them remembers of the producer is old by then."""
        assert self.send(store, partition, 0, 1, 2, 3) == [0, 1, 2, 3]
        assert self.send(other, partition, 4, 5, 6, 7) == [4, 5, 6, 7]
        repeat = append(store, partition, batch(producer=7, sequence=7, value=b"7"))[0]
        assert (repeat.base_offset, repeat.duplicate) == (7, True)
        refused(store.log.append([Append(partition, batch(producer=7, sequence=9))])[0], SequenceGap)
        assert self.send(store, partition, 8, 9, 10) == [8, 9, 10]
        repeat = append(other, partition, batch(producer=7, sequence=10, value=b"10"))[0]
        assert (repeat.base_offset, repeat.duplicate) == (10, True)
        assert len(read_all(store, partition)) == 11

    def test_a_repeat_is_answered_with_its_offset(self, store: Store, partition: int) -> None:
        assert self.send(store, partition, 0, 1, 2, 3) == [0, 1, 2, 3]
        for sequence in (3, 2, 3):
            again = append(store, partition, batch(producer=7, sequence=sequence, value=b"%d" % sequence))[0]
            assert (again.base_offset, again.duplicate) == (sequence, True)
        assert self.send(store, partition, 4, 5) == [4, 5]

    def test_what_is_not_stored_at_once_is_stored_by_append(
        self, store: Store, other: Store, partition: int
    ) -> None:
        """Whatever `append_at_once` leaves, and whoever comes in between, each batch is stored once."""
        expected: list[bytes] = []
        for number in range(8):
            both = [Append(partition, batch(producer=who, sequence=number)) for who in (7, 8)]
            for sent in [both] if number % 2 else [both[:1], both[1:]]:
                results = store.log.append_at_once(sent) or store.log.append(sent)
                ends = range(len(expected), len(expected) + len(sent))
                assert [stored(one).base_offset for one in results] == [*ends]
                expected += [one.batch for one in sent]
            if number in (3, 5):
                expected.append(batch(producer=9, sequence=number // 4))
                append(other, partition, expected[-1])
        assert [piece.data[8:] for piece in read_all(store, partition)] == [one[8:] for one in expected]
        assert store.log.append_at_once([Append(partition, batch(producer=7, sequence=9))]) is None  # a gap

    def test_what_another_sealed_takes_no_more(self, store: Store, other: Store, partition: int) -> None:
        self.send(store, partition, 0, 1, 2, 3)
        end = other.log.seal(partition, control())
        refused(store.log.append([Append(partition, batch(producer=7, sequence=4))])[0], PartitionSealed)
        assert store.log.bounds([partition])[partition].end == end

    def test_whom_another_fenced_stays_out(self, store: Store, other: Store, partition: int) -> None:
        self.send(store, partition, 0, 1, 2, 3)
        self.send(other, partition, 0, epoch=1)
        refused(store.log.append([Append(partition, batch(producer=7, sequence=4))])[0], ProducerFenced)
        assert self.send(other, partition, 1, 2, 3, epoch=1) == [5, 6, 7]

    def test_a_producer_that_another_forgot_begins_anew(
        self, store: Store, other: Store, partition: int, clock: MovableClock
    ) -> None:
        self.send(store, partition, 0, 1, 2, 3)
        assert other.log.forget_producers(clock.ms + 1) == 1
        refused(store.log.append([Append(partition, batch(producer=7, sequence=4))])[0], UnknownProducer)
        assert store.log.bounds([partition])[partition].end == 4
        assert self.send(store, partition, 0, epoch=1) == [4]

    def test_a_delayed_batch_moves_the_sequence_and_not_the_log(
        self, store: Store, other: Store, partition: int, clock: MovableClock
    ) -> None:
        self.send(store, partition, 0, 1, 2, 3)
        for through, sequence in ((store, 4), (other, 5)):
            later = Append(partition, batch(producer=7, sequence=sequence), clock.ms + 60_000)
            assert stored(through.log.append([later])[0]).base_offset < 0
        assert append(store, partition, batch(producer=7, sequence=5))[0].duplicate
        assert self.send(store, partition, 6, 7) == [4, 5]

    def test_times_do_not_go_back_with_the_clock(
        self, store: Store, partition: int, clock: MovableClock
    ) -> None:
        times = []
        for number, step in enumerate((0, 5, 5, 5, -60_000, 5, 5)):
            clock.ms += step
            times.append(append(store, partition, batch(producer=7, sequence=number))[0].appended_at)
        assert times == sorted(times)
        assert [piece.appended_at for piece in read_all(store, partition)] == times

    def test_two_who_send_one_by_one_at_the_same_time_are_told_the_truth(
        self, store: Store, other: Store, partition: int
    ) -> None:
        def write(through: Store, producer: int) -> list[tuple[int, int]]:
            return [(n, self.send(through, partition, n, producer=producer)[0]) for n in range(60)]

        told = in_threads(lambda: write(store, 1), lambda: write(other, 2))
        kept = read_all(store, partition)
        assert [piece.base_offset for piece in kept] == list(range(120))
        where = {piece.base_offset: (verify(piece.data).producer_id, values([piece])[0]) for piece in kept}
        for producer, answers in enumerate(told, start=1):
            for number, offset in answers:
                assert where[offset] == (producer, b"%d-0" % number)


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
