"""`Brokers`: who is served now, and who uses the store, by its clock (R2, R6)."""

from __future__ import annotations

from ...store.contract import Process, Store
from .harness import MovableClock, StoreHarness

__all__ = ["BrokerContract"]


class BrokerContract(StoreHarness):
    def test_brokers_that_entered_are_known_to_all(self, store: Store, other: Store) -> None:
        store.brokers.enter("b", "host-b:7070", "east", 20, 5000)
        other.brokers.enter("a", "host-a:7070", "", 10, 5000)
        for each in (store, other):
            assert [(b.id, b.address, b.zone) for b in each.brokers.live()] == [
                ("a", "host-a:7070", ""),
                ("b", "host-b:7070", "east"),
            ]

    def test_a_broker_that_is_silent_is_not_live(self, store: Store, clock: MovableClock) -> None:
        store.brokers.enter("a", "host-a:7070", "", 10, 5000)
        clock.ms += 4999
        assert len(store.brokers.live()) == 1
        clock.ms += 1
        assert store.brokers.live() == []

    def test_a_broker_enters_again_and_again(self, store: Store, clock: MovableClock) -> None:
        for zone in ("east", "west"):
            store.brokers.enter("a", "host-a:7070", zone, 10, 5000)
            clock.ms += 4000
        assert [b.zone for b in store.brokers.live()] == ["west"]

    def test_all_serve_the_same_queue(self, store: Store, other: Store) -> None:
        assert store.brokers.queue() == other.brokers.queue() != ""

    def test_a_broker_that_left_is_not_live(self, store: Store) -> None:
        store.brokers.enter("a", "host-a:7070", "", 10, 5000)
        store.brokers.leave("a")
        store.brokers.leave("a")
        assert store.brokers.live() == []

    # ---- processes, and the shards that they can reach (R6) ----

    def test_processes_are_known_to_all_with_their_shards(self, store: Store, other: Store) -> None:
        store.brokers.announce(Process("2", "shop-2", frozenset({"b", "c"})), 5000)
        other.brokers.announce(Process("1", "shop-1", frozenset()), 5000)
        for each in (store, other):
            found = each.brokers.announced()
            assert [(one.name, sorted(one.shards)) for one in found] == [
                ("shop-1", []),
                ("shop-2", ["b", "c"]),
            ]
            assert [one.knows("b") for one in found] == [False, True]
            assert all(one.knows("") for one in found)

    def test_a_process_says_it_again_with_other_shards(self, store: Store, clock: MovableClock) -> None:
        for shards in (frozenset[str](), frozenset({"b"})):
            store.brokers.announce(Process("1", "shop-1", shards), 5000)
            clock.ms += 4000
        assert [one.shards for one in store.brokers.announced()] == [frozenset({"b"})]

    def test_a_process_that_is_silent_or_gone_is_not_listed(self, store: Store, clock: MovableClock) -> None:
        store.brokers.announce(Process("1", "shop-1", frozenset()), 5000)
        store.brokers.announce(Process("2", "shop-2", frozenset()), 9000)
        clock.ms += 5000
        assert [one.name for one in store.brokers.announced()] == ["shop-2"]
        store.brokers.withdraw("2")
        store.brokers.withdraw("2")
        assert store.brokers.announced() == []
