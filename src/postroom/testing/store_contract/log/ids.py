"""`Log.append` with ids: a message that was sent before is not stored again (R32, I2, I13)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ....errors import CorruptBatch, PartitionSealed, StoreError, UnknownPartition
from ....model.messages.batch import BatchBuilder, records, verify
from ....model.messages.ids import digests
from ....model.policy.settings import GroupSettings, TopicSettings
from ....store.contract import Append, Appended, Group, Store, Topic
from ..harness import (
    MovableClock,
    StoreHarness,
    acks,
    ask,
    in_threads,
    partitions,
    read_all,
    refused,
    spans,
    stored,
    values,
)
from ..schedule import all_due, gone, lead

__all__ = ["WINDOW", "DelayedIdContract", "IdContract", "Ids", "named", "repeats", "send", "texts"]


WINDOW = 10_000
Ids = Sequence[str | None]


def named(
    partition_id: int,
    ids: Ids,
    *,
    producer: int = -1,
    sequence: int = 0,
    due_at: int = 0,
    window_ms: int = WINDOW,
) -> Append:
    """A batch with a message for each id, which is its value too."""
    builder = BatchBuilder()
    for id in ids:
        builder.append(1_000, b"key", (id or "-").encode(), [])
    data = builder.build() if producer < 0 else builder.build(producer, 0, sequence)
    return Append(partition_id, data, due_at, digests(ids), window_ms)


def send(store: Store, partition_id: int, *ids: str | None, window_ms: int = WINDOW) -> Appended:
    return stored(store.log.append([named(partition_id, ids, window_ms=window_ms)])[0])


def repeats(done: Appended) -> dict[int, int]:
    return dict(done.repeats)


def texts(store: Store, partition_id: int) -> str:
    return " ".join(value.decode() for value in values(read_all(store, partition_id)))


def settle_all(store: Store, group: Group, partition_id: int, token: int = 1) -> None:
    end = store.log.bounds([partition_id])[partition_id].end
    granted = store.progress.poll(group, partition_id, ask(token, end))
    store.progress.settle(group, partition_id, token, acks(*spans(granted)))


class IdContract(StoreHarness):
    # ---- repeats ----

    def test_a_message_that_was_sent_before_is_left_out(self, store: Store, place: int) -> None:
        assert send(store, place, "a", "b", "c") == Appended(0, store.now_ms())
        again = send(store, place, "d", "b", "e", "a")
        assert (again.base_offset, again.duplicate, repeats(again)) == (3, False, {1: 1, 3: 0})
        assert texts(store, place) == "a b c d e"
        assert store.log.bounds([place])[place].end == 5

    def test_repeats_within_a_batch_and_within_a_call(self, store: Store, place: int) -> None:
        calls = [named(place, ids) for ids in ("aba", "xbay", "z", "zy")]
        first, second, third, fourth = map(stored, store.log.append(calls))
        assert (first.base_offset, repeats(first)) == (0, {2: 0})
        assert (second.base_offset, repeats(second)) == (2, {1: 1, 2: 0})
        assert (third.base_offset, repeats(third)) == (4, {})
        assert (fourth.base_offset, repeats(fourth)) == (-1, {0: 4, 1: 3})
        assert texts(store, place) == "a b x y z"

    def test_messages_without_an_id_are_never_repeats(self, store: Store, place: int) -> None:
        for base in (0, 3):
            done = send(store, place, None, None, None)
            assert (done.base_offset, done.repeats) == (base, ())
        done = send(store, place, None, "a", None, "a", None)
        assert (done.base_offset, repeats(done)) == (6, {3: 7})
        done = send(store, place, "a", None, "b")
        assert (done.base_offset, repeats(done)) == (10, {0: 7})
        assert texts(store, place) == "- - - - - - - a - - - b"

    def test_a_batch_of_nothing_but_repeats_stores_nothing(self, store: Store, place: int) -> None:
        send(store, place, "a", "b")
        again = send(store, place, "b", "a")
        assert (again.base_offset, again.duplicate, repeats(again)) == (-1, False, {0: 1, 1: 0})
        assert store.log.bounds([place])[place].end == 2

    def test_ids_of_every_length_are_told_apart(self, store: Store, place: int) -> None:
        ids = ["", "a", "a\0", "a" * 14, "a" * 15, "a" * 16, "a" * 300, "ä" * 7, "ä" * 8, "\0"]
        assert send(store, place, *ids).repeats == ()
        assert repeats(send(store, place, *ids)) == {place: place for place in range(1, 10)}  # "" is no id

    def test_what_is_left_of_a_batch_is_as_it_was(self, store: Store, place: int) -> None:
        builder = BatchBuilder("lz4")
        for number in range(50):
            builder.append(1_000 + number, b"key%d" % number, b"value%d" % number, [("h", b"%d" % number)])
        sent = Append(place, builder.build(7, 0, 0), ids=digests("abcde" * 10), dedup_ms=WINDOW)
        stored(store.log.append([sent])[0])
        (kept,) = read_all(store, place)
        header = verify(kept.data)
        assert (header.compression, header.producer_id, header.first_ts, header.last_ts) == (
            "lz4",
            7,
            1_000,
            1_004,
        )
        assert [(r.timestamp, r.key, r.value, list(r.headers)) for r in records(kept.data)] == [
            (1_000 + n, b"key%d" % n, b"value%d" % n, [("h", b"%d" % n)]) for n in range(5)
        ]

    def test_partitions_have_ids_of_their_own(self, store: Store) -> None:
        one, two = partitions(store.catalog.create_topic("wide", TopicSettings(), 2))
        assert send(store, one, "a").base_offset == send(store, two, "a").base_offset == 0
        results = store.log.append([named(two, "ba"), named(one, "ba")])
        assert [(stored(r).base_offset, repeats(stored(r))) for r in results] == [(1, {1: 0})] * 2

    def test_ids_of_volatile_topics_count_too(self, store: Store) -> None:
        (place,) = partitions(store.catalog.create_topic("v", TopicSettings(storage="volatile"), 1))
        first = send(store, place, "a", "b").base_offset
        assert repeats(send(store, place, "b", "c")) == {0: first + 1}
        assert texts(store, place) == "a b c"

    def test_wrong_ids_are_refused(self, store: Store, place: int) -> None:
        right = named(place, "ab")
        for ids in (right.ids + b"x", right.ids[:-1], right.ids[:16], right.ids * 2):
            wrong = Append(place, right.batch, ids=ids, dedup_ms=WINDOW)
            first, refusal, last = store.log.append([named(place, "x"), wrong, named(place, "y")])
            refused(refusal, CorruptBatch)
            stored(first), stored(last)
        assert texts(store, place) == "x y"

    # ---- producers' sequences ----

    def test_sequences_count_what_was_sent(self, store: Store, place: int) -> None:
        """I3: and offsets what is stored."""
        send(store, place, "a", "b")
        calls = [("axb", 0), ("ab", 3), ("yz", 5)]
        done = [stored(store.log.append([named(place, i, producer=7, sequence=s)])[0]) for i, s in calls]
        assert [d.base_offset for d in done] == [2, -1, 3]
        assert texts(store, place) == "a b x y z"

    @pytest.mark.parametrize("ids", ["axb", "ab", "xyz", "xxy", "axax"])
    def test_a_batch_that_is_sent_again_is_answered_alike(
        self, store: Store, place: int, other: Store, ids: str
    ) -> None:
        """Its answer was lost: the producer learns the same, from whomever it asks."""
        send(store, place, "a", "b")
        sent = named(place, ids, producer=7)
        first, within = map(stored, store.log.append([sent, sent]))
        send(store, place, "c", "x", "d")
        later = stored(store.log.append([sent])[0])
        elsewhere = stored(other.log.append([sent])[0])
        for again in (within, later, elsewhere):
            assert again.duplicate
            assert (again.base_offset, again.repeats) == (first.base_offset, first.repeats)

    def test_it_is_answered_alike_on_a_sealed_partition(self, store: Store, place: int) -> None:
        send(store, place, "a")
        sent = named(place, "xay", producer=7)
        first = stored(store.log.append([sent])[0])
        self.seal(store, place)
        again, refusal = store.log.append([sent, named(place, "a")])
        assert (stored(again).base_offset, stored(again).repeats) == (1, first.repeats) == (1, ((1, 0),))
        refused(refusal, PartitionSealed)

    # ---- how long ----

    def test_an_id_is_remembered_for_the_window(self, store: Store, place: int, clock: MovableClock) -> None:
        send(store, place, "a")
        clock.ms += WINDOW - 1
        assert repeats(send(store, place, "a")) == {0: 0}
        clock.ms += 1
        assert send(store, place, "a").base_offset == 1
        assert repeats(send(store, place, "a")) == {0: 1}
        clock.ms += WINDOW - 1
        assert repeats(send(store, place, "a")) == {0: 1}

    def test_and_until_every_group_has_settled_the_message(
        self, store: Store, topic: Topic, place: int, group: Group, clock: MovableClock
    ) -> None:
        slow = store.catalog.create_group(topic.name, "slow", GroupSettings())
        send(store, place, "a", "b")
        settle_all(store, group, place)
        clock.ms += 100 * WINDOW
        assert repeats(send(store, place, "a")) == {0: 0}
        first = store.progress.poll(slow, place, ask(1, 2, messages=1))
        assert repeats(send(store, place, "a")) == {0: 0}
        store.progress.settle(slow, place, 1, acks(*spans(first)))
        done = send(store, place, "a", "b")
        assert (done.base_offset, repeats(done)) == (2, {1: 1})

    def test_a_group_that_came_later_counts_too(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        send(store, place, "a", "b")
        clock.ms += WINDOW
        send(store, place, "c")  # what is remembered by this process, and what another one finds
        store.catalog.create_group(topic.name, "late", GroupSettings())
        clock.ms += 100 * WINDOW
        assert repeats(send(other, place, "a")) == {0: 0}
        assert repeats(send(store, place, "b")) == {0: 1}

    def test_what_is_unsettled_may_begin_within_a_batch(
        self, store: Store, place: int, group: Group, other: Store, clock: MovableClock
    ) -> None:
        send(store, place, "a", "b", "c")
        first = store.progress.poll(group, place, ask(1, 3, messages=1))
        store.progress.settle(group, place, 1, acks(*spans(first)))
        clock.ms += 100 * WINDOW
        done = send(other, place, "a", "b", "c")
        assert (done.base_offset, repeats(done)) == (3, {1: 1, 2: 2})

    def test_a_deleted_group_does_not_count(
        self, store: Store, topic: Topic, place: int, group: Group, clock: MovableClock
    ) -> None:
        send(store, place, "a")
        clock.ms += WINDOW
        assert repeats(send(store, place, "a")) == {0: 0}
        store.catalog.delete_group(topic.name, group.name)
        assert send(store, place, "a").base_offset == 1

    def test_a_broadcast_group_itself_settles_nothing(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        store.catalog.create_group(topic.name, "all", GroupSettings(mode="broadcast"))
        send(store, place, "a")
        clock.ms += WINDOW
        assert send(store, place, "a").base_offset == 1

    def test_the_window_may_become_longer_or_shorter(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        send(store, place, "a", window_ms=1_000)
        clock.ms += 60_000
        send(store, place, "b", window_ms=1_000)  # by now "a" may have been forgotten
        assert repeats(send(store, place, "a", window_ms=90_000)) == {0: 0}
        assert send(store, place, "a", window_ms=60_000).base_offset == 2

    def test_what_came_before_the_window_was_set_is_not_known(self, store: Store, place: int) -> None:
        stored(store.log.append([Append(place, named(place, "ab").batch)])[0])
        assert send(store, place, "a", "b").base_offset == 2

    # ---- memory follows commit (I2) ----

    def test_after_a_failed_commit_it_is_no_repeat(self, store: Store, place: int) -> None:
        sent = [named(place, "ab", producer=7), named(place, "cb")]
        for _ in range(2):
            with self.failing_commits(store), pytest.raises(StoreError):
                store.log.append(sent)
        first, second = map(stored, store.log.append(sent))
        assert (first.base_offset, first.duplicate, first.repeats) == (0, False, ())
        assert (second.base_offset, repeats(second)) == (2, {1: 1})
        assert texts(store, place) == "a b c"

    def test_after_a_commit_that_succeeded_and_seemed_to_fail_it_is_a_repeat(
        self, store: Store, place: int, other: Store
    ) -> None:
        """This process learns of it as it learns of those of others: from what is stored."""
        send(store, place, "x")
        with self.failing_commits(store, lambda: None), pytest.raises(StoreError):
            send(store, place, "a")
        send(other, place, "a")  # as if the commit had come through
        assert repeats(send(store, place, "a")) == {0: 1}

    def test_a_refused_batch_leaves_no_ids(self, store: Store, place: int) -> None:
        gap = named(place, "ab", producer=7, sequence=5)
        broken = Append(place, named(place, "cx").batch[:-1], ids=digests("cx"), dedup_ms=WINDOW)
        nowhere = named(987_654_321, "d")
        results = store.log.append([gap, broken, nowhere, named(place, "abcd")])
        refused(results[2], UnknownPartition)
        assert stored(results[3]).repeats == ()
        assert texts(store, place) == "a b c d"

    # ---- several processes ----

    def test_ids_are_known_to_every_process(self, store: Store, place: int, other: Store) -> None:
        """Interleaved: each has to learn what the other one has stored since."""
        for number in range(20):
            one, two = (store, other) if number % 2 else (other, store)
            assert send(one, place, f"{number}", f"x{number}").repeats == ()
            again = send(two, place, f"x{number}", f"y{number}", f"{number}")
            assert repeats(again) == {0: 3 * number + 1, 2: 3 * number}
        everything = [f"{kind}{number}" for number in range(20) for kind in ("", "x", "y")]
        assert texts(store, place) == " ".join(everything)
        assert len(send(other, place, *everything).repeats) == 60

    def test_ids_are_known_after_a_restart(
        self, store: Store, place: int, tmp_path: object, clock: MovableClock
    ) -> None:
        for number in range(30):
            send(store, place, *(f"{number}-{at}" for at in range(20)))
            clock.ms += 100
        reopened = self.reopen(tmp_path, clock)  # type: ignore[arg-type]
        try:
            for number in (0, 17, 29):
                assert repeats(send(reopened, place, f"{number}-3")) == {0: number * 20 + 3}
        finally:
            reopened.close()

    def test_many_who_send_the_same_at_once(self, store: Store, place: int, other: Store) -> None:
        """Whoever is first stores it; the others learn where."""
        rounds, size = 12, 20

        def write(through: Store, seed: int) -> list[tuple[list[str], Appended]]:
            draw = random.Random(seed)
            done = []
            for number in range(rounds):
                ids = [f"{number}-{at}" for at in range(size)]
                draw.shuffle(ids)
                done.append((ids, send(through, place, *ids)))
            return done

        writers = [(store, 1), (other, 2), (store, 3), (other, 4)]
        answers = in_threads(*(lambda t=t, s=s: write(t, s) for t, s in writers))
        found = texts(store, place).split()
        assert len(found) == len(set(found)) == rounds * size
        for ids, done in (answer for mine in answers for answer in mine):
            known, own = repeats(done), done.base_offset
            for at, id in enumerate(ids):
                assert found[known.get(at, own)] == id
                own += at not in known

    # ---- retention ----

    def test_ids_outlive_messages_that_may_not_be_swept_yet(
        self, store: Store, place: int, other: Store, clock: MovableClock
    ) -> None:
        send(store, place, "a")
        clock.ms += 500
        send(store, place, "b")
        store.log.trim(place, 2)
        assert store.log.sweep(place, rows=10, appended_before=clock.ms) == 1
        assert store.log.sweep(place, rows=10, appended_before=clock.ms) == 0
        assert repeats(send(other, place, "b")) == {0: 1}
        assert store.log.sweep(place, rows=10, appended_before=clock.ms + 1) == 1

    # ---- anything ----

    @pytest.mark.parametrize("seed", range(4))
    def test_whatever_is_sent(self, store: Store, place: int, other: Store, seed: int) -> None:
        """Against a dictionary: batches of every kind, through either store, some of them twice."""
        draw, known, log = random.Random(seed), dict[str, int](), list[str]()
        for step in range(40):
            calls = [_any_ids(draw, step) for _ in range(draw.randint(1, 4))]
            through = draw.choice((store, other))
            appends = [named(place, ids, producer=step * 10 + n) for n, ids in enumerate(calls)]
            results = [stored(result) for result in through.log.append(appends)]
            for ids, done in zip(calls, results, strict=True):
                assert done.repeats == _expect(ids, known, log)
            again = draw.choice((store, other)).log.append(appends)
            assert [(stored(a).base_offset, stored(a).repeats) for a in again] == [
                (r.base_offset, r.repeats) for r in results
            ]
        assert texts(store, place).split() == log


def _any_ids(draw: random.Random, step: int) -> list[str | None]:
    """Some of few ids, so that repeats abound, and now and then one that is new, or none."""
    size = draw.choice((1, 2, 5, 30))
    few = [f"id-{draw.randint(0, 60)}" for _ in range(size)]
    return [draw.choice((id, id, f"{step}-{draw.random()}-of-a-long-kind", None)) for id in few]


def _expect(ids: Ids, known: dict[str, int], log: list[str]) -> tuple[tuple[int, int], ...]:
    found = []
    for at, id in enumerate(ids):
        if id is not None and id in known:
            found.append((at, known[id]))
            continue
        if id is not None:
            known[id] = len(log)
        log.append(id or "-")
    return tuple(found)


# ---- `Log.append` with ids and `due_at`: an id that waits is a repeat like any other (R32, I13) ----


class DelayedIdContract(StoreHarness):
    def test_an_id_that_waits_is_a_repeat(self, store: Store, place: int, clock: MovableClock) -> None:
        later = clock.ms + 60_000
        first = stored(store.log.append([named(place, "ab", due_at=later)])[0])
        assert (first.base_offset, first.repeats) == (-1, ())
        assert repeats(send(store, place, "a", "x")) == {0: -1}
        again = stored(store.log.append([named(place, "byxb", due_at=later)])[0])
        assert (again.base_offset, repeats(again)) == (-1, {0: -1, 2: 0, 3: -1})
        everything = stored(store.log.append([named(place, "ax", due_at=later)])[0])
        assert (everything.base_offset, repeats(everything)) == (-1, {0: -1, 1: 0})
        clock.ms = later
        assert [row.ids for row in all_due(store)] == [digests("ab"), digests("y")]
        assert texts(store, place) == "x"

    def test_it_is_known_within_a_call_and_to_every_process(
        self, store: Store, place: int, other: Store, clock: MovableClock
    ) -> None:
        later = clock.ms + 60_000
        send(other, place, "o")
        calls = [named(place, "a", due_at=later), named(place, "ab"), named(place, "ba", due_at=later)]
        assert [stored(r).repeats for r in store.log.append(calls)] == [(), ((0, -1),), ((0, 1), (1, -1))]
        assert repeats(send(other, place, "a", "b", "c")) == {0: -1, 1: 1}

    def test_an_id_that_was_cancelled_may_be_sent_again(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        later = clock.ms + 60_000
        stored(store.log.append([named(place, "abc", due_at=later)])[0])
        stored(store.log.append([named(place, "d", due_at=later)])[0])
        assert len(send(other, place, "a", "b", "c", "d").repeats) == 4
        assert other.schedule.cancel(topic.id, digests("b")) and other.schedule.cancel(topic.id, digests("d"))
        assert repeats(send(store, place, "a", "b", "c", "d")) == {0: -1, 2: -1}
        assert texts(store, place) == "b d"

    def test_what_is_due_is_not_looked_at_again_but_remembered(
        self, store: Store, place: int, other: Store, clock: MovableClock
    ) -> None:
        """It would drop itself. From then on it is known where it is."""
        send(store, place, "x"), send(other, place, "y")
        stored(store.log.append([named(place, "ab", due_at=clock.ms + 500)])[0])
        clock.ms += 500
        lead(store)
        rows = all_due(store)
        due = named(place, "ab", producer=9, window_ms=0)
        moved, same_call = map(stored, store.log.append([due, named(place, "ba")]))
        assert (moved.base_offset, moved.repeats) == (2, ())
        assert repeats(same_call) == {0: 3, 1: 2}
        store.schedule.finish("ann", gone(rows))
        for through in (store, other):
            assert repeats(send(through, place, "b", "a")) == {0: 3, 1: 2}
        assert texts(store, place) == "x y a b"

    def test_ids_that_are_not_looked_at_are_known_from_then_on(
        self, store: Store, place: int, other: Store
    ) -> None:
        """In the same call, and where others stored something meanwhile."""
        unseen = named(place, "ab", window_ms=0)
        assert [stored(r).repeats for r in store.log.append([unseen, named(place, "bca")])] == [
            (),
            ((0, 1), (2, 0)),
        ]
        send(other, place, "x")
        stored(store.log.append([named(place, "de", window_ms=0)])[0])
        assert repeats(send(store, place, "x", "d", "e")) == {0: 3, 1: 4, 2: 5}
