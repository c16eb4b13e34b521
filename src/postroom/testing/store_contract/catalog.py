"""`Catalog`, topics: made, found, altered, deleted; ids are never used again (R5, I11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ...config import SLOTS
from ...errors import (
    GenerationChanged,
    GroupExists,
    InvalidSetting,
    StoreError,
    TopicExists,
    UnknownGroup,
    UnknownTopic,
)
from ...model.delivery.delivery import Kind, Settlement
from ...model.policy.settings import GroupSettings, Start, TopicSettings
from ...store.contract import Group, Origin, Store, Topic
from .harness import LEASE, MovableClock, StoreHarness, acks, append, ask, batch, partitions, read_all, spans

__all__ = ["GroupContract", "TopicContract"]


SETTINGS = TopicSettings(retention_ms=5_000, retention_bytes=9_000, keep="limits", drop_settled=True)


class TopicContract(StoreHarness):
    # ---- create ----

    def test_a_new_topic_has_its_partitions_and_a_first_route(
        self, store: Store, clock: MovableClock
    ) -> None:
        topic = store.catalog.create_topic("orders", SETTINGS, 3)
        assert (topic.name, topic.settings, topic.created_at) == ("orders", SETTINGS, clock.ms)
        assert (topic.route.topic, topic.route.version) == ("orders", 1)
        assert [piece.partition for piece in topic.route.ranges] == [0, 1, 2]
        assert len(set(partitions(topic))) == 3
        assert (topic.route.ranges[0].first_slot, topic.route.ranges[-1].last_slot) == (0, SLOTS - 1)
        assert store.catalog.topic("orders") == topic
        for place in partitions(topic):
            assert append(store, place, batch())[0].base_offset == 0

    def test_a_topic_may_have_as_many_partitions_as_slots(self, store: Store) -> None:
        assert len(store.catalog.create_topic("wide", TopicSettings(), 40).route.ranges) == 40
        for wrong in (0, -1, SLOTS + 1):
            with pytest.raises(InvalidSetting):
                store.catalog.create_topic("wrong", TopicSettings(), wrong)
        assert [topic.name for topic in store.catalog.topics()] == ["wide"]

    def test_a_name_is_given_once(self, store: Store, topic: Topic) -> None:
        with pytest.raises(TopicExists) as caught:
            store.catalog.create_topic("orders", SETTINGS, 5)
        assert caught.value.details == {"topic": "orders"}
        assert store.catalog.topics() == [topic]

    def test_topics_are_listed_by_name(self, store: Store) -> None:
        made = {name: store.catalog.create_topic(name, SETTINGS, 2) for name in ("pears", "apples", "figs")}
        assert store.catalog.topics() == [made["apples"], made["figs"], made["pears"]]

    def test_topics_are_counted_by_how_their_names_begin_and_end(self, store: Store) -> None:
        for name in ("_reply.a.one", "_reply.b_b.one", "_reply.a.two", "xreply.a.one", "_reply.one"):
            store.catalog.create_topic(name, SETTINGS, 1)
        counted = [
            ("_reply.", ".one"),
            ("_reply.", ".two"),
            ("_reply.", ".six"),
            ("", ""),
            ("%", ""),
            ("!", ""),
        ]
        assert [store.catalog.count_topics(*ends) for ends in counted] == [2, 1, 0, 5, 0, 0]

    def test_a_topic_that_could_not_be_made_is_not_there(self, store: Store) -> None:
        with self.failing_commits(store), pytest.raises(StoreError):
            store.catalog.create_topic("orders", SETTINGS, 2)
        assert store.catalog.topics() == []
        assert len(partitions(store.catalog.create_topic("orders", SETTINGS, 2))) == 2

    # ---- find ----

    def test_some_topics_are_found_by_name(self, store: Store) -> None:
        made = {name: store.catalog.create_topic(name, SETTINGS, 2) for name in ("pears", "apples", "figs")}
        assert store.catalog.topics(["pears", "apples", "nothing"]) == [made["apples"], made["pears"]]
        assert store.catalog.topics([]) == []
        many = [f"not-there-{number}" for number in range(1500)]
        assert store.catalog.topics([*many, "figs"]) == [made["figs"]]

    def test_names_are_found_by_how_they_begin(self, store: Store) -> None:
        """At least those: whoever asks leaves out the others."""
        for name in ("orders", "orders.eu", "ordersX", "bills"):
            store.catalog.create_topic(name, SETTINGS, 1)
        assert sorted(store.catalog.names()) == ["bills", "orders", "orders.eu", "ordersX"]
        assert {"orders", "orders.eu", "ordersX"} <= {*store.catalog.names(["orders"])}
        assert "bills" not in store.catalog.names(["orders"])
        assert {"orders.eu", "bills"} <= {*store.catalog.names(["orders.", "b"])}
        assert store.catalog.names([]) == [] == store.catalog.names(["zzz"])
        beginnings = [f"nothing-{number}" for number in range(100)] + ["bil"]
        assert "bills" in store.catalog.names(beginnings)

    def test_an_unknown_topic_is_named_with_the_one_that_was_meant(self, store: Store, topic: Topic) -> None:
        calls: list[Callable[[str], object]] = [
            store.catalog.topic,
            store.catalog.delete_topic,
            store.catalog.groups,
            lambda name: store.catalog.alter_topic(name, SETTINGS),
            lambda name: store.catalog.create_group(name, "billing", GroupSettings()),
            lambda name: store.catalog.group(name, "billing"),
            lambda name: store.catalog.alter_group(name, "billing", GroupSettings(), False),
            lambda name: store.catalog.delete_group(name, "billing"),
            lambda name: store.catalog.reset_group(name, "billing", Start()),
        ]
        for call in calls:
            with pytest.raises(UnknownTopic, match="did you mean 'orders'") as close:
                call("odrers")
            assert close.value.details == {"topic": "odrers", "close": ["orders"]}
            with pytest.raises(UnknownTopic) as far:
                call("zzz")
            assert "did you mean" not in str(far.value)

    # ---- alter ----

    def test_settings_are_altered_and_the_rest_stays(self, store: Store, topic: Topic, place: int) -> None:
        append(store, place, batch(3))
        altered = store.catalog.alter_topic("orders", SETTINGS)
        assert altered == store.catalog.topic("orders")
        assert (altered.id, altered.route, altered.settings) == (topic.id, topic.route, SETTINGS)
        assert len(read_all(store, place)) == 1

    # ---- delete ----

    def test_a_deleted_topic_leaves_logs_to_be_dropped(self, store: Store) -> None:
        topic = store.catalog.create_topic("orders", TopicSettings(), 3)
        kept = store.catalog.create_topic("other", TopicSettings(), 1)
        places = partitions(topic)
        assert store.catalog.dropped() == []
        assert sorted(store.catalog.delete_topic("orders")) == sorted(places)
        assert store.catalog.topics() == [kept]
        assert sorted(store.catalog.dropped()) == sorted(places)
        store.catalog.drop_log(places[1])
        assert sorted(store.catalog.dropped()) == sorted([places[0], places[2]])
        store.catalog.drop_log(places[1])  # again, after a crash
        append(store, partitions(kept)[0], batch())

    def test_a_deleted_topic_takes_its_groups_along(self, store: Store, topic: Topic) -> None:
        group = store.catalog.create_group("orders", "billing", GroupSettings())
        other = store.catalog.create_topic("other", TopicSettings(), 1)
        stays = store.catalog.create_group("other", "billing", GroupSettings())
        store.catalog.delete_topic("orders")
        with pytest.raises(UnknownGroup):
            store.catalog.start_of(group.id, partitions(topic)[0])
        assert store.catalog.groups("other") == [stays]
        assert store.catalog.start_of(stays.id, partitions(other)[0]) == (1, 0)

    def test_a_topic_of_the_same_name_is_another_one(self, store: Store, topic: Topic, place: int) -> None:
        old = store.catalog.create_group("orders", "billing", GroupSettings())
        append(store, place, batch(5, producer=7))
        store.progress.poll(old, place, ask(1, 5))
        store.catalog.delete_topic("orders")
        again = store.catalog.create_topic("orders", TopicSettings(), 1)
        new = store.catalog.create_group("orders", "billing", GroupSettings())
        (there,) = partitions(again)
        assert (again.id, there, new.id) != (topic.id, place, old.id)
        assert append(store, there, batch(2, producer=7))[0].duplicate is False
        assert spans(store.progress.poll(new, there, ask(2, 2))) == [(0, 1)]
        store.catalog.drop_log(place)
        assert len(read_all(store, there)) == 1

    def test_ids_are_never_used_again(self, store: Store) -> None:
        """I11: not even those of what was made last, after it is gone without a trace."""
        topics, places, groups = set[int](), set[int](), set[int]()
        for turn in range(1, 5):
            topic = store.catalog.create_topic("orders", TopicSettings(), 2)
            topics.add(topic.id)
            places.update(partitions(topic))
            groups.add(store.catalog.create_group("orders", "billing", GroupSettings()).id)
            store.catalog.delete_group("orders", "billing")
            groups.add(store.catalog.create_group("orders", "billing", GroupSettings()).id)
            for place in store.catalog.delete_topic("orders"):
                store.catalog.drop_log(place)
            assert (len(topics), len(places), len(groups)) == (turn, 2 * turn, 2 * turn)

    # ---- version ----

    def test_every_change_moves_the_version_and_nothing_else_does(
        self, store: Store, other: Store, clock: MovableClock
    ) -> None:
        catalog = store.catalog
        changes: list[Callable[[], object]] = [
            lambda: catalog.create_topic("orders", TopicSettings(), 1),
            lambda: catalog.alter_topic("orders", SETTINGS),
            lambda: catalog.create_group("orders", "billing", GroupSettings()),
            lambda: catalog.alter_group("orders", "billing", GroupSettings(), True),
            lambda: catalog.reset_group("orders", "billing", Start("latest")),
            lambda: catalog.delete_group("orders", "billing"),
            lambda: catalog.delete_topic("orders"),
        ]
        versions = [catalog.version()]
        for change in changes:
            change()
            versions.append(catalog.version())
            assert other.catalog.version() == store.log.news().catalog_version == versions[-1]
        assert versions == sorted(set(versions))
        place = partitions(catalog.create_topic("more", TopicSettings(), 1))[0]
        group = catalog.create_group("more", "billing", GroupSettings())
        last = catalog.version()
        append(store, place, batch(3))
        store.progress.poll(group, place, ask(1, 3))
        store.duties.acquire("sweep", "me", 1000)
        store.log.trim(place, 1)
        with pytest.raises(TopicExists):
            catalog.create_topic("more", TopicSettings(), 1)
        assert catalog.version() == last


# ---- `Catalog`, groups: settings, and a start that is turned into offsets once (I9, R12, R13) ----

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
