"""`Log.append` with ids and `due_at`: an id that waits is a repeat like any other (R32, I13)."""

from __future__ import annotations

from ...model.dedup import digests
from ...store.contract import Store, Topic
from .harness import MovableClock, StoreHarness, stored
from .ids import named, repeats, send, texts
from .schedule import all_due, gone, lead

__all__ = ["DelayedIdContract"]


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
