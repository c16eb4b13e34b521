"""`Access`: principals, and the hashes of their secrets (R48)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ...errors import InvalidSetting, PrincipalExists, UnknownGroup, UnknownPrincipal, UnknownTopic
from ...model.access import ALL, Permission, Principal
from ...model.audit import Asker, AuditEntry
from ...model.delivery.delivery import Kind, Settlement, Stamp
from ...model.policy.rate import Rate, group_rate, producer_rate, topic_rate
from ...model.policy.settings import GroupSettings, TopicSettings
from ...model.policy.slow_lane import MOST_SOURCES, LanePolicy, LaneState, Seen
from ...store.contract import Group, Process, Store, Topic
from .harness import MovableClock, StoreHarness, acks, append, ask, batch, in_threads, partitions, spans

__all__ = ["AccessContract", "AuditContract", "BrokerContract", "LaneContract", "RateContract"]


SEND, CONSUME = Permission("send", "orders"), Permission("consume", "orders.*")
A, B = "a" * 64, "b" * 64


class AccessContract(StoreHarness):
    def test_a_principal_is_known_to_all(self, store: Store, other: Store, clock: MovableClock) -> None:
        made = store.access.add(Principal("shop", (SEND, CONSUME)), A)
        assert made == Principal("shop", (SEND, CONSUME), clock.ms)
        for each in (store, other):
            assert each.access.by_name("shop") == each.access.by_secret(A) == made
            assert each.access.principals() == [made]
        assert other.access.by_secret(A).secret_hash == A  # type: ignore[union-attr]

    def test_names_and_secrets_that_nobody_has(self, store: Store) -> None:
        store.access.add(Principal("shop", ()), A)
        assert store.access.by_secret(B) is None
        assert store.access.by_secret(A[:-1]) is None
        assert store.access.by_name("Shop") is None
        assert not store.access.remove("Shop")

    def test_a_principal_without_a_secret_is_found_by_name_only(self, store: Store) -> None:
        store.access.add(Principal("shop", ALL), "")
        assert store.access.by_secret("") is None
        assert store.access.by_name("shop") is not None

    def test_of_two_who_make_a_principal_one_does(self, store: Store, other: Store) -> None:
        def made(through: Store, secret_hash: str) -> bool:
            try:
                through.access.add(Principal("admin", ALL), secret_hash)
            except PrincipalExists:
                return False
            return True

        calls = [
            lambda through=through, digit=digit: made(through, digit * 64)
            for through, digit in zip([store, other] * 2, "1234", strict=True)
        ]
        answers = in_threads(*calls)
        assert sum(answers) == 1
        assert store.access.by_secret("1234"[answers.index(True)] * 64) is not None

    def test_put_changes_permissions_and_leaves_the_secret(self, store: Store, clock: MovableClock) -> None:
        made = store.access.add(Principal("shop", (SEND,)), A)
        clock.ms += 1000
        store.access.put(Principal("shop", (CONSUME,)), None)
        assert store.access.by_secret(A) == Principal("shop", (CONSUME,), made.created_at)

    def test_put_changes_the_secret(self, store: Store, other: Store) -> None:
        store.access.put(Principal("shop", (SEND,)), A)
        other.access.put(Principal("shop", (SEND,)), B)
        assert store.access.by_secret(A) is None
        assert store.access.by_secret(B) is not None

    def test_nothing_is_made_without_a_secret_that_stays(self, store: Store) -> None:
        with pytest.raises(UnknownPrincipal):
            store.access.put(Principal("shop", (SEND,)), None)
        with pytest.raises(UnknownPrincipal):
            store.access.permit("shop", (SEND,), ())
        assert store.access.principals() == []

    def test_permissions_come_and_go_one_by_one(self, store: Store) -> None:
        store.access.add(Principal("shop", (SEND,)), A)
        assert store.access.permit("shop", (CONSUME, SEND), ()).permissions == (SEND, CONSUME)
        assert store.access.permit("shop", (), (SEND, Permission("manage", "*"))).permissions == (CONSUME,)
        assert store.access.by_secret(A) == store.access.by_name("shop")
        assert store.access.permit("shop", (), (CONSUME,)).permissions == ()
        assert store.access.by_name("shop").permissions == ()  # type: ignore[union-attr]

    def test_grants_at_once_are_all_kept(self, store: Store, other: Store) -> None:
        store.access.add(Principal("shop", ()), A)
        wanted = [Permission("send", f"topic{number}") for number in range(4)]
        calls = [
            lambda through=through, one=one: through.access.permit("shop", (one,), ())
            for through, one in zip([store, other] * 2, wanted, strict=True)
        ]
        in_threads(*calls)
        assert set(store.access.by_name("shop").permissions) == set(wanted)  # type: ignore[union-attr]

    def test_a_principal_that_was_removed_is_gone(self, store: Store, other: Store) -> None:
        store.access.add(Principal("shop", ALL), A)
        store.access.add(Principal("audit", ALL), B)
        assert other.access.remove("shop")
        assert not other.access.remove("shop")
        assert store.access.by_secret(A) is None and store.access.by_name("shop") is None
        assert [principal.name for principal in store.access.principals()] == ["audit"]

    def test_the_queue_has_one_key_for_all(self, store: Store, other: Store) -> None:
        """I23: every broker of a queue tells producers of principals apart alike."""
        found: list[bytes] = []
        in_threads(*(lambda one=one: found.append(one.access.key()) for one in (store, other)))
        assert len({*found, store.access.key(), other.access.key()}) == 1
        assert len(found[0]) == 32 and len(set(found[0])) > 8

    def test_principals_are_listed_by_name(self, store: Store) -> None:
        for name in ("shop", "audit", "Zoo", "billing"):
            store.access.add(Principal(name, ()), name)
        assert [p.name for p in store.access.principals()] == ["Zoo", "audit", "billing", "shop"]


# ---- `Rates`: limits on what a topic, a group or a producer takes in a second, shared by all (R40, I17) ----

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


# ---- `Lanes`: which sources of a group are slow, known to all; and moves to the lane (R42, I12) ----

POLICY = LanePolicy(failures=0.5, handling_ms=5_000, at_least=10, window_ms=60_000, clean_ms=120_000)
STAMP = Stamp(77, 4711)


class LaneContract(StoreHarness):
    @pytest.fixture
    def watched(self, store: Store, topic: Topic) -> Group:
        return store.catalog.create_group("orders", "shipping", GroupSettings(slow_lane=POLICY))

    # ---- counting ----

    def test_the_policy_is_kept_with_the_group(self, other: Store, watched: Group) -> None:
        assert other.catalog.group("orders", "shipping").settings.slow_lane == POLICY

    def test_counts_of_all_come_together(
        self, store: Store, other: Store, watched: Group, clock: MovableClock
    ) -> None:
        assert store.lanes.count(watched, [(clock.ms, Seen("a", 5, 5))]) == LaneState((), frozenset({"a"}))
        clock.ms += 20_000
        found = other.lanes.count(watched, [(clock.ms, Seen("a", 5, 0)), (clock.ms, Seen("b", 9, 9))])
        assert [(one.source, one.since, one.failed_at) for one in found.slow] == [("a", clock.ms, clock.ms)]
        assert "5 of 10" in found.slow[0].reason
        assert store.lanes.state(watched) == found
        assert found.watched == {"a", "b"}

    def test_what_is_older_than_the_window_does_not_count(
        self, store: Store, watched: Group, clock: MovableClock
    ) -> None:
        store.lanes.count(watched, [(clock.ms, Seen("a", 9, 9))])
        clock.ms += 80_000
        found = store.lanes.count(
            watched, [(clock.ms, Seen("a", 1, 1)), (clock.ms - 80_000, Seen("a", 9, 9))]
        )
        assert found == LaneState((), frozenset({"a"}))
        clock.ms += 80_000
        assert store.lanes.state(watched) == LaneState()

    def test_a_source_that_takes_long_is_slow(
        self, store: Store, watched: Group, clock: MovableClock
    ) -> None:
        seen = Seen("a", 10, 0, 50_001)
        assert store.lanes.count(watched, [(clock.ms, replace(seen, spent_ms=50_000))]).slow == ()
        clock.ms += 200_000
        assert [one.source for one in store.lanes.count(watched, [(clock.ms, seen)]).slow] == ["a"]

    def test_a_source_returns_after_a_clean_period(
        self, store: Store, other: Store, watched: Group, clock: MovableClock
    ) -> None:
        began = clock.ms
        store.lanes.count(watched, [(clock.ms, Seen("a", 10, 10))])
        clock.ms += 100_000
        (one,) = store.lanes.count(watched, [(clock.ms, Seen("a", 2, 1))]).slow
        assert (one.since, one.failed_at, one.handled_at) == (began, clock.ms, 0)
        clock.ms += 119_999
        (one,) = other.lanes.count(watched, [(clock.ms, Seen("a", 3, 0))]).slow
        assert one.handled_at == clock.ms
        clock.ms += 1
        assert store.lanes.count(watched, []) == LaneState()
        clock.ms += 1
        assert store.lanes.count(watched, [(clock.ms, Seen("a", 9, 9))]).slow == ()  # it begins anew

    def test_groups_are_counted_apart_and_forgotten_with_their_progress(
        self, store: Store, watched: Group, clock: MovableClock
    ) -> None:
        again = store.catalog.create_group("orders", "again", GroupSettings(slow_lane=POLICY))
        for group in (watched, again):
            assert len(store.lanes.count(group, [(clock.ms, Seen("a", 10, 10))]).slow) == 1
        store.progress.forget(watched.id)
        assert store.lanes.state(watched) == LaneState()
        assert len(store.lanes.state(again).slow) == 1

    def test_without_a_policy_nobody_is_slow(self, store: Store, watched: Group, clock: MovableClock) -> None:
        store.lanes.count(watched, [(clock.ms, Seen("a", 10, 10))])
        off = store.catalog.alter_group("orders", "shipping", GroupSettings(), False)
        assert store.lanes.count(off, [(clock.ms, Seen("b", 10, 10))]).slow == ()

    def test_many_count_at_once(
        self, store: Store, other: Store, watched: Group, clock: MovableClock
    ) -> None:
        now = clock.ms
        calls = [lambda to=to: to.lanes.count(watched, [(now, Seen("a", 1, 1))]) for to in (store, other) * 5]
        in_threads(*calls)
        assert [one.source for one in store.lanes.state(watched).slow] == ["a"]

    def test_the_number_of_sources_is_bounded(
        self, store: Store, watched: Group, clock: MovableClock
    ) -> None:
        found = store.lanes.count(
            watched, [(clock.ms, Seen(f"s{n}", 10, 10)) for n in range(MOST_SOURCES + 5)]
        )
        assert (len(found.slow), len(found.watched)) == (MOST_SOURCES, MOST_SOURCES)

    def test_a_source_may_have_any_name(self, store: Store, watched: Group, clock: MovableClock) -> None:
        names = ["A", "a", "a ", "ä", "漢字", "'; --", "🙂", "x" * 100]
        found = store.lanes.count(watched, [(clock.ms, Seen(name, 10, 10)) for name in names])
        assert {one.source for one in found.slow} == set(names)

    # ---- moves ----

    def test_messages_that_are_set_aside_have_one_identity(
        self, store: Store, other: Store, topic: Topic, group: Group
    ) -> None:
        (place,) = partitions(topic)[:1]
        append(store, place, batch(4))
        store.progress.poll(group, place, ask(1, 4))
        lane = [Settlement(Kind.LANE, at, at, stamp=STAMP) for at in (0, 2)]
        done = store.progress.settle(group, place, 1, [*lane, *acks((1, 1))])
        assert spans(done.leaving) == [(0, 0), (2, 2)]
        (token,) = {delivery.token for delivery in done.leaving}
        found = other.progress.leaving(group, place, token)
        assert found == list(done.leaving)
        assert {(d.stamp and d.stamp.producer_id, d.stamp and d.stamp.partition_id) for d in found} == {
            (token, 4711)
        }
        assert [d.spent for d in found] == [0, 0]  # not an attempt
        assert store.progress.settle(group, place, token, acks((0, 0), (2, 2))).lost == ()
        assert other.progress.leaving(group, place, token) == []


# ---- `Audit`: who changed what ----

ANN, BOB = Asker("ann", "wire", "10.0.0.1:5000"), Asker("bob", "cli", "desk")


def _noted(store: Store, by: Asker = ANN, topic: str = "orders", *, most: int = 1000) -> int:
    return store.audit.begin(by, "alter_topic", topic, "", {}, {"partitions": 4}, most)


class AuditContract(StoreHarness):
    def test_an_entry_is_begun_and_completed(self, store: Store, other: Store, clock: MovableClock) -> None:
        id = store.audit.begin(ANN, "pause", "orders", "billing", {"paused": True}, {"paused": False}, 1000)
        begun = AuditEntry(
            id, clock.ms, "ann", "wire", "10.0.0.1:5000", "pause", "orders", "billing", "begun",
            {"paused": True}, {"paused": False}, None,
        )  # fmt: skip
        assert other.audit.entries(limit=10) == [begun]
        other.audit.end(id, "done", {"paused": False}, {"paused": True})
        ended = replace(begun, outcome="done", after={"paused": True})
        assert store.audit.entries(limit=10) == [ended]

    def test_an_entry_is_taken_back_and_its_id_is_not_used_again(self, store: Store) -> None:
        id = _noted(store)
        store.audit.drop(id)
        assert store.audit.entries(limit=10) == []
        store.audit.end(id, "done", None, None)  # of what has gone nothing is said
        assert _noted(store) > id

    def test_entries_are_found_by_topic_by_whom_and_by_time(self, store: Store, clock: MovableClock) -> None:
        first = _noted(store)
        clock.ms += 1000
        second = _noted(store, BOB, "payments")
        third = _noted(store, BOB)

        def found(**wanted: Any) -> list[int]:
            return [entry.id for entry in store.audit.entries(limit=10, **wanted)]

        assert found() == [third, second, first]
        assert found(topic="orders") == [third, first]
        assert found(who="bob") == [third, second]
        assert found(who="bob", topic="orders") == [third]
        assert found(since=clock.ms) == [third, second]
        assert found(before=third) == [second, first]
        assert found(after=first) == [third, second]
        assert [entry.id for entry in store.audit.entries(limit=1)] == [third]

    def test_old_entries_are_forgotten(self, store: Store, clock: MovableClock) -> None:
        _noted(store)
        clock.ms += 1000
        kept = _noted(store)
        assert store.audit.trim(clock.ms, 1000) == 1
        assert [entry.id for entry in store.audit.entries(limit=10)] == [kept]

    def test_the_oldest_make_room(self, store: Store) -> None:
        ids = [_noted(store, by) for by in (ANN, BOB) * 4]
        assert store.audit.trim(0, 6) == 2
        assert [entry.id for entry in store.audit.entries(limit=10)] == ids[:1:-1]

    def test_whoever_does_very_much_does_not_push_out_what_others_did(self, store: Store) -> None:
        kept = _noted(store, BOB)
        for _ in range(120):
            _noted(store, ANN, most=20)
        found = store.audit.entries(limit=1000)
        assert found[-1].id == kept
        assert 20 <= len(found) < 20 + 50 + 1  # it is looked at now and then

    def test_names_that_nobody_has_checked_are_stored_harmlessly(self, store: Store) -> None:
        nasty = "x\0<script>\ud800ä" + "y" * 1000
        store.audit.begin(Asker(nasty, "wire", nasty), "split", nasty, nasty, {nasty: nasty}, None, 1000)
        (found,) = store.audit.entries(limit=1)
        assert found.who == found.topic == found.group
        assert found.topic.startswith("x\\x00<script>") and len(found.topic) <= 250
        assert found.topic.isprintable() and found.topic.isascii()

    def test_a_state_of_any_size_is_cut(self, store: Store) -> None:
        large = {f"partition {at}": "x" * 1000 for at in range(1024)}
        id = _noted(store)
        store.audit.end(id, "done", large, None)
        (found,) = store.audit.entries(limit=1)
        assert found.before is not None and found.before["more"] == 1024 - (len(found.before) - 1)
        assert len(str(found.before)) < 16_000

    def test_a_principals_change_has_its_entry_in_the_same_transaction(self, store: Store) -> None:
        store.access.add(Principal("shop", (SEND,)), A, by=BOB)
        store.access.permit("shop", (CONSUME,), (SEND,), by=BOB)
        store.access.permit("shop", (CONSUME,), (), by=BOB)  # it has that
        store.access.put(Principal("shop", (CONSUME,)), B, by=BOB)
        store.access.remove("shop", by=BOB)
        store.access.remove("shop", by=BOB)  # it is not there
        with pytest.raises(UnknownPrincipal):
            store.access.permit("shop", (SEND,), (), by=BOB)
        send, consume = {"permissions": str(SEND)}, {"permissions": str(CONSUME)}
        found = [(one.action, one.before, one.after) for one in store.audit.entries(limit=10)]
        assert found == [
            ("remove_principal", consume, None),
            ("rotate_token", consume, consume),
            ("change_permissions", send, consume),
            ("add_principal", None, send),
        ]
        assert not any(secret in repr(store.audit.entries(limit=10)) for secret in (A, B))


# ---- `Brokers`: who is served now, and who uses the store, by its clock (R2, R6) ----


class BrokerContract(StoreHarness):
    def test_brokers_that_entered_are_known_to_all(self, store: Store, other: Store) -> None:
        store.brokers.enter("b", "host-b:7070", "east", 20, 5000)
        other.brokers.enter("a", "host-a:7070", "", 10, 5000)
        for each in (store, other):
            assert [(b.id, b.address, b.zone) for b in each.brokers.live()] == [
                ("a", "host-a:7070", ""),
                ("b", "host-b:7070", "east"),
            ]

    def test_nodes_have_small_numbers_of_their_own(
        self, store: Store, other: Store, clock: MovableClock
    ) -> None:
        """Kafka clients know brokers by these; one that entered again keeps its number."""
        assert store.brokers.enter_node("a", "host-a:9092", 5000) == 1
        assert other.brokers.enter_node("b", "host-b:9092", 5000) == 2
        assert store.brokers.enter_node("a", "host-a:9093", 5000) == 1
        assert [(n.node_id, n.broker_id, n.address) for n in other.brokers.nodes()] == [
            (1, "a", "host-a:9093"),
            (2, "b", "host-b:9092"),
        ]
        store.brokers.leave_node("a")
        assert [node.broker_id for node in store.brokers.nodes()] == ["b"]
        assert store.brokers.enter_node("c", "host-c:9092", 5000) == 1
        clock.ms += 5000
        assert store.brokers.nodes() == []

    def test_nodes_that_enter_at_once_have_different_numbers(self, store: Store, other: Store) -> None:
        found = in_threads(
            lambda: store.brokers.enter_node("a", "host-a:9092", 5000),
            lambda: other.brokers.enter_node("b", "host-b:9092", 5000),
        )
        assert sorted(found) == [1, 2]

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
