"""`Catalog`, groups: settings, and a start that is turned into offsets once (I9, R12, R13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ...errors import GenerationChanged, GroupExists, InvalidSetting, StoreError, UnknownGroup
from ...model.delivery import Kind, Settlement
from ...model.settings import GroupSettings, Start, TopicSettings
from ...store.contract import Group, Origin, Store, Topic
from .harness import LEASE, MovableClock, StoreHarness, acks, append, ask, batch, partitions, spans

__all__ = ["GroupContract"]

EVERYTHING = GroupSettings(
    order="partition", start=Start("offsets", offsets=((0, 5), (1, 2**40))), lease_ms=123_456, max_attempts=7
)


class GroupContract(StoreHarness):
    # ---- settings ----

    @pytest.mark.parametrize(
        "settings",
        [
            GroupSettings(),
            EVERYTHING,
            GroupSettings(start=Start("latest")),
            GroupSettings(start=Start("time", time_ms=1_699_999_999_999)),
        ],
    )
    def test_settings_come_back_as_they_were(
        self, store: Store, clock: MovableClock, settings: GroupSettings
    ) -> None:
        topic = store.catalog.create_topic("orders", TopicSettings(), 2)
        group = store.catalog.create_group("orders", "billing", settings)
        assert group.settings == settings
        assert (group.topic_id, group.topic, group.name) == (topic.id, "orders", "billing")
        assert (group.generation, group.paused, group.created_at) == (1, False, clock.ms)
        assert store.catalog.group("orders", "billing") == group
        assert (group.terms.lease_ms, group.terms.max_attempts) == (settings.lease_ms, settings.max_attempts)

    def test_a_group_is_made_once_in_a_topic(self, store: Store, topic: Topic, group: Group) -> None:
        with pytest.raises(GroupExists):
            store.catalog.create_group("orders", "billing", EVERYTHING)
        store.catalog.create_topic("other", TopicSettings(), 1)
        elsewhere = store.catalog.create_group("other", "billing", GroupSettings())
        first = store.catalog.create_group("orders", "audit", GroupSettings())
        assert store.catalog.groups("orders") == [first, group]
        assert store.catalog.groups("other") == [elsewhere]

    def test_an_unknown_group_is_named_with_the_one_that_was_meant(self, store: Store, group: Group) -> None:
        calls: list[Callable[[str], object]] = [
            lambda name: store.catalog.group("orders", name),
            lambda name: store.catalog.delete_group("orders", name),
            lambda name: store.catalog.alter_group("orders", name, GroupSettings(), False),
            lambda name: store.catalog.reset_group("orders", name, Start()),
        ]
        for call in calls:
            with pytest.raises(UnknownGroup, match="did you mean 'billing'") as close:
                call("biling")
            assert close.value.details == {"topic": "orders", "group": "biling"}
            with pytest.raises(UnknownGroup) as far:
                call("zzz")
            assert "did you mean" not in str(far.value)

    def test_a_group_is_altered_and_paused(self, store: Store, group: Group) -> None:
        settings = replace(EVERYTHING, start=group.settings.start)
        paused = store.catalog.alter_group("orders", "billing", settings, True)
        assert (
            paused
            == store.catalog.group("orders", "billing")
            == replace(group, settings=settings, paused=True)
        )
        resumed = store.catalog.alter_group("orders", "billing", settings, False)
        assert resumed == replace(paused, paused=False)

    def test_an_altered_group_stays_where_it_is(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(5))
        store.progress.poll(group, place, ask(1, 5, messages=2))
        altered = store.catalog.alter_group(
            "orders", "billing", replace(group.settings, start=Start("latest")), False
        )
        assert altered.generation == group.generation
        assert spans(store.progress.poll(altered, place, ask(2, 5))) == [(2, 4)]

    # ---- delete ----

    def test_a_deleted_group_is_gone(self, store: Store, place: int, group: Group) -> None:
        assert store.catalog.delete_group("orders", "billing") == group
        assert store.catalog.groups("orders") == []
        with pytest.raises(UnknownGroup):
            store.catalog.group("orders", "billing")
        with pytest.raises(UnknownGroup):
            store.catalog.start_of(group.id, place)
        with pytest.raises(UnknownGroup):
            store.progress.poll(group, place, ask(1, 5))

    def test_a_group_of_the_same_name_begins_anew(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(5))
        store.progress.poll(group, place, ask(1, 5))
        store.catalog.delete_group("orders", "billing")
        again = store.catalog.create_group("orders", "billing", group.settings)
        assert again.id != group.id
        assert spans(store.progress.poll(again, place, ask(2, 5))) == [(0, 4)]

    def test_a_group_that_could_not_be_made_is_not_there(self, store: Store, topic: Topic) -> None:
        with self.failing_commits(store), pytest.raises(StoreError):
            store.catalog.create_group("orders", "billing", GroupSettings())
        with pytest.raises(InvalidSetting, match="no partition 3"):
            store.catalog.create_group(
                "orders", "billing", GroupSettings(start=Start("offsets", offsets=((0, 0), (3, 1))))
            )
        assert store.catalog.groups("orders") == []

    # ---- start (I9) ----

    def test_a_start_is_turned_into_offsets(self, store: Store, clock: MovableClock) -> None:
        """Two partitions: batches of 5 at times 0, 10, 20 … (one has 4 of them, the other 2)."""
        begin = clock.ms
        one, two = partitions(store.catalog.create_topic("orders", TopicSettings(), 2))
        for number in range(4):
            append(store, one, batch(5))
            if number < 2:
                append(store, two, batch(5))
            clock.ms += 10
        cases = {
            Start(): (0, 0),
            Start("latest"): (20, 10),
            Start("time", time_ms=begin): (0, 0),
            Start("time", time_ms=begin + 1): (5, 5),
            Start("time", time_ms=begin + 10): (5, 5),
            Start("time", time_ms=begin + 25): (15, 10),
            Start("time", time_ms=begin + 10**9): (20, 10),
            Start("offsets", offsets=((0, 7), (1, 10))): (7, 10),
            Start("offsets", offsets=((1, 3),)): (0, 3),
            Start("offsets", offsets=((0, 10**9), (1, -5))): (20, 0),
        }
        for number, (start, (first, second)) in enumerate(cases.items()):
            group = store.catalog.create_group("orders", f"g{number}", GroupSettings(start=start))
            assert store.catalog.start_of(group.id, one) == (1, first)
            assert store.catalog.start_of(group.id, two) == (1, second)

    def test_a_start_is_not_below_what_is_kept(self, store: Store, place: int, clock: MovableClock) -> None:
        """I19: the start of the log counts, swept or not."""
        begin = clock.ms
        append(store, place, *(batch(5) for _ in range(4)))
        store.log.trim(place, 12)
        starts = [Start(), Start("time", time_ms=begin - 5), Start("offsets", offsets=((0, 3),))]
        for number, start in enumerate(starts):
            group = store.catalog.create_group("orders", f"before{number}", GroupSettings(start=start))
            assert store.catalog.start_of(group.id, place) == (1, 12)
        store.log.sweep(place, rows=10)
        for number, start in enumerate(starts):
            group = store.catalog.create_group("orders", f"after{number}", GroupSettings(start=start))
            assert store.catalog.start_of(group.id, place) == (1, 12)
            again = store.catalog.reset_group("orders", group.name, start)
            assert store.catalog.start_of(group.id, place) == (again.generation, 12)

    def test_latest_is_when_the_group_was_made(self, store: Store, topic: Topic, place: int) -> None:
        """I9: what arrives between `create_group` and the first poll is delivered."""
        append(store, place, batch(3))
        latest = GroupSettings(start=Start("latest"))
        group = store.catalog.create_group("orders", "billing", latest)
        append(store, place, batch(4))
        assert spans(store.progress.poll(group, place, ask(1, 7))) == [(3, 6)]
        empty = partitions(store.catalog.create_topic("empty", TopicSettings(), 1))[0]
        early = store.catalog.create_group("empty", "billing", latest)
        append(store, empty, batch(2))
        assert spans(store.progress.poll(early, empty, ask(2, 2))) == [(0, 1)]

    def test_a_time_is_looked_up_when_the_group_is_made(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        append(store, place, batch(3))
        tomorrow = Start("time", time_ms=clock.ms + 86_400_000)
        group = store.catalog.create_group("orders", "billing", GroupSettings(start=tomorrow))
        append(store, place, batch(4))
        assert spans(store.progress.poll(group, place, ask(1, 7))) == [(3, 6)]

    def test_a_start_survives_what_happens_to_the_log(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(5), batch(5))
        late = store.catalog.create_group("orders", "late", GroupSettings(start=Start("latest")))
        store.log.trim(place, 5)
        store.log.sweep(place, rows=10)
        append(store, place, batch(2))
        assert store.catalog.start_of(group.id, place) == (1, 0)
        assert store.catalog.start_of(late.id, place) == (1, 10)

    # ---- reset ----

    def test_a_reset_is_a_new_generation(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(9))
        store.progress.poll(group, place, ask(1, 9))
        reset = store.catalog.reset_group("orders", "billing", Start("offsets", offsets=((0, 4),)))
        assert reset == store.catalog.group("orders", "billing") == replace(group, generation=3)
        assert store.catalog.start_of(group.id, place) == (3, 4)
        assert spans(store.progress.poll(reset, place, ask(2, 9))) == [(4, 8)]
        assert store.catalog.reset_group("orders", "billing", Start()).generation == 4

    def test_a_reset_to_offsets_moves_what_they_name(self, store: Store) -> None:
        """R12: elsewhere what is in flight, waits for a retry or was settled stays so."""
        one, two = partitions(store.catalog.create_topic("pair", TopicSettings(), 2))
        group = store.catalog.create_group("pair", "billing", GroupSettings(lease_ms=LEASE))
        for place in (one, two):
            append(store, place, batch(9))
            store.progress.poll(group, place, ask(1, 9, messages=6))
            store.progress.settle(group, place, 1, acks((0, 1), (3, 4)))
        store.progress.settle(group, two, 1, [Settlement(Kind.RETRY, 5, 5)])
        reset = store.catalog.reset_group("pair", "billing", Start("offsets", offsets=((0, 1),)))
        assert store.catalog.origin_of(group.id, one) == Origin(3, 1, 3)
        assert store.catalog.origin_of(group.id, two) == Origin(3, 0, 1)
        assert [b.committed for b in store.progress.backlog(reset, [one, two])] == [1, 2]
        assert [store.progress.committed(group.id, place) for place in (one, two)] == [None, 2]
        assert store.usage.committed([reset], [one, two]) == {group.id: {one: 1, two: 2}}
        assert store.progress.settle(reset, two, 1, acks((2, 2))).lost == ()
        assert store.progress.settle(reset, one, 1, acks((2, 2))).lost == ((2, 2),)
        for place in (one, two):
            with pytest.raises(GenerationChanged):
                store.progress.poll(group, place, ask(2, 9))
        assert spans(store.progress.poll(reset, one, ask(2, 9))) == [(1, 8)]
        granted = store.progress.poll(reset, two, ask(3, 9))
        assert spans(granted) == [(5, 5), (6, 8)]
        assert [d.attempt for d in granted.deliveries] == [2, 1]

    def test_a_partition_that_was_never_polled_keeps_its_start(self, store: Store) -> None:
        one, two = partitions(store.catalog.create_topic("pair", TopicSettings(), 2))
        append(store, one, batch(4))
        append(store, two, batch(4))
        group = store.catalog.create_group("pair", "late", GroupSettings(start=Start("latest")))
        append(store, two, batch(2))
        reset = store.catalog.reset_group("pair", "late", Start("offsets", offsets=((0, 1),)))
        store.progress.rewind(reset, [one, two])
        assert spans(store.progress.poll(reset, two, ask(1, 6))) == [(4, 5)]
        assert spans(store.progress.poll(reset, one, ask(2, 4))) == [(1, 3)]
        assert store.catalog.origin_of(group.id, two).since == 1

    def test_a_reset_to_latest_passes_over_all_there_is(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(9))
        store.progress.poll(group, place, ask(1, 9, messages=3))
        reset = store.catalog.reset_group("orders", "billing", Start("latest"))
        append(store, place, batch(2))
        assert spans(store.progress.poll(reset, place, ask(2, 11))) == [(9, 10)]

    def test_a_reset_that_fails_changes_nothing(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(9))
        with self.failing_commits(store), pytest.raises(StoreError):
            store.catalog.reset_group("orders", "billing", Start("latest"))
        with pytest.raises(InvalidSetting):
            store.catalog.reset_group("orders", "billing", Start("offsets", offsets=((8, 0),)))
        assert store.catalog.group("orders", "billing") == group
        assert store.catalog.start_of(group.id, place) == (1, 0)

    def test_a_lease_is_the_groups_own(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(1))
        patient = store.catalog.create_group("orders", "patient", GroupSettings(lease_ms=10 * LEASE))
        for one in (group, patient):
            granted = store.progress.poll(one, place, ask(1, 1))
            assert granted.deliveries[0].visible_at == clock.ms + one.settings.lease_ms
