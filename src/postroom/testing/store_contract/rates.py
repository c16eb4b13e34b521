"""`Rates`: limits on what a topic, a group or a producer takes in a second, shared by all (R40, I17)."""

from __future__ import annotations

import pytest

from ...errors import InvalidSetting, UnknownGroup, UnknownTopic
from ...model.flow import Rate, group_rate, producer_rate, topic_rate
from ...model.settings import GroupSettings, TopicSettings
from ...store.contract import Group, Store, Topic
from .harness import MovableClock, StoreHarness, in_threads

__all__ = ["RateContract"]

SHOP = producer_rate("shop", 10, 1000)
BURST = 1000  # ms, of topics and producers


class RateContract(StoreHarness):
    # ---- limits ----

    def test_limits_are_known_to_all_by_name(self, store: Store, other: Store, group: Group) -> None:
        rates = [topic_rate("orders", 0.5), SHOP, group_rate("orders", "billing", 100, 10)]
        for rate in rates:
            store.rates.set(rate)
        assert other.rates.all() == sorted(rates, key=lambda rate: rate.name)

    def test_a_change_bumps_the_version_of_the_catalog(self, store: Store) -> None:
        before = store.catalog.version()
        store.rates.set(SHOP)
        assert store.catalog.version() > before

    def test_a_limit_is_changed_and_removed(self, store: Store) -> None:
        store.rates.set(SHOP)
        store.rates.set(Rate(SHOP.name, 0, 7))
        assert store.rates.all() == [Rate(SHOP.name, 0, 7)]
        for _ in range(2):
            store.rates.set(Rate(SHOP.name))
            assert store.rates.all() == []

    def test_a_limit_on_what_is_not_there_is_refused(self, store: Store, group: Group) -> None:
        for rate, error in (
            (topic_rate("other", 1), UnknownTopic),
            (group_rate("other", "billing", 1), UnknownTopic),
            (group_rate("orders", "billig", 1), UnknownGroup),
            (Rate("queue:orders", 1), InvalidSetting),
            (topic_rate("orders", -1), InvalidSetting),
        ):
            before = store.catalog.version()
            with pytest.raises(error):
                store.rates.set(rate)
            assert (store.rates.all(), store.catalog.version()) == ([], before)

    def test_limits_go_with_their_topic(self, store: Store, group: Group) -> None:
        store.catalog.create_topic("orders2", TopicSettings(), 1)
        store.catalog.create_group("orders2", "billing", GroupSettings())
        kept = [group_rate("orders2", "billing", 1), SHOP, topic_rate("orders2", 1)]
        for rate in (*kept, topic_rate("orders", 1), group_rate("orders", "billing", 1)):
            store.rates.set(rate)
        store.catalog.delete_topic("orders")
        assert store.rates.all() == kept

    def test_a_limit_goes_with_its_group(self, store: Store, group: Group) -> None:
        for rate in (topic_rate("orders", 1), group_rate("orders", "billing", 1)):
            store.rates.set(rate)
        store.catalog.delete_group("orders", "billing")
        assert store.rates.all() == [topic_rate("orders", 1)]

    # ---- spending ----

    def test_a_burst_may_be_used_at_once_and_then_the_rate(self, store: Store, clock: MovableClock) -> None:
        now = clock.ms
        assert [store.rates.spend(SHOP, 1, 0) - now for _ in range(14)] == [0] * 11 + [100, 200, 300]

    def test_idleness_saves_up_a_burst_at_most(self, store: Store, clock: MovableClock) -> None:
        store.rates.spend(SHOP, 30, 0)
        clock.ms += 3_600_000
        assert store.rates.spend(SHOP, 10, 0) == clock.ms
        assert store.rates.spend(SHOP, 1, 0) == clock.ms
        assert store.rates.spend(SHOP, 1, 0) == clock.ms + 100

    def test_what_is_larger_than_the_burst_passes_and_others_wait(
        self, store: Store, other: Store, clock: MovableClock
    ) -> None:
        assert store.rates.spend(SHOP, 100, 0) == clock.ms
        assert other.rates.spend(SHOP, 1, 0) == clock.ms + 10_000 - BURST

    def test_bytes_are_limited_too_and_the_later_counts(self, store: Store, clock: MovableClock) -> None:
        store.rates.spend(SHOP, 1, 3000)
        assert store.rates.spend(SHOP, 1, 0) == clock.ms + 2000
        store.rates.spend(SHOP, 100, 0)
        assert store.rates.spend(SHOP, 1, 0) > clock.ms + 10_000

    def test_what_has_no_limit_never_waits(self, store: Store, clock: MovableClock) -> None:
        rate = Rate(SHOP.name, 0, 1000)
        assert {store.rates.spend(rate, 10_000, 0) for _ in range(3)} == {clock.ms}

    def test_what_is_owed_is_counted_first(self, store: Store, clock: MovableClock) -> None:
        assert store.rates.spend(SHOP, 1, 0, owed_messages=30) == clock.ms + 3000 - BURST
        assert store.rates.spend(SHOP, 1, 0) == clock.ms + 3100 - BURST

    def test_what_was_not_used_is_given_back(self, store: Store, other: Store, clock: MovableClock) -> None:
        store.rates.spend(SHOP, 100, 100_000)
        other.rates.give_back(SHOP, 90, 99_000)
        assert store.rates.spend(SHOP, 1, 0) == clock.ms
        store.rates.give_back(SHOP, -100, 0)  # used and not taken
        assert store.rates.spend(SHOP, 1, 0) == clock.ms + 10_100

    def test_debts_are_shown_and_forgiven_by_a_change(self, store: Store, clock: MovableClock) -> None:
        store.rates.set(SHOP)
        assert store.rates.debts() == {}
        store.rates.spend(SHOP, 50, 0)
        assert store.rates.debts() == {SHOP.name: 4000}
        clock.ms += 1500
        assert store.rates.debts() == {SHOP.name: 2500}
        store.rates.set(Rate(SHOP.name, 20))
        assert store.rates.debts() == {}

    def test_members_of_a_broadcast_group_are_shown_together(self, store: Store, topic: Topic) -> None:
        store.catalog.create_group("orders", "cache", GroupSettings())
        store.rates.set(group_rate("orders", "cache", 10))
        store.rates.spend(group_rate("orders", "cache@ann", 10), 11, 0)
        store.rates.spend(group_rate("orders", "cache@bob", 10), 21, 0)
        assert store.rates.debts() == {"group:orders/cache": 2000}

    def test_limits_are_apart(self, store: Store, clock: MovableClock) -> None:
        store.rates.spend(SHOP, 100, 0)
        assert store.rates.spend(producer_rate("Shop", 10), 1, 0) == clock.ms
        assert store.rates.spend(topic_rate("shop", 10), 1, 0) == clock.ms

    def test_what_many_spend_at_once_is_all_counted(
        self, store: Store, other: Store, clock: MovableClock
    ) -> None:
        def some(which: Store) -> list[int]:
            return [which.rates.spend(SHOP, 1, 0) for _ in range(10)]

        moments = in_threads(*(lambda which=which: some(which) for which in (store, other) * 2))
        found = sorted(moment - clock.ms for each in moments for moment in each)
        assert found == [0] * 11 + [100 * n for n in range(1, 30)]

    def test_a_commit_that_fails_spends_nothing(self, store: Store, clock: MovableClock) -> None:
        store.rates.spend(SHOP, 1, 0)
        with self.failing_commits(store), pytest.raises(Exception, match="the commit fails"):
            store.rates.spend(SHOP, 1000, 0)
        assert store.rates.spend(SHOP, 1, 0) == clock.ms
