"""`Catalog`, topics: made, found, altered, deleted; ids are never used again (R5, I11)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ...config import SLOTS
from ...errors import InvalidSetting, StoreError, TopicExists, UnknownGroup, UnknownTopic
from ...model.settings import GroupSettings, Start, TopicSettings
from ...store.contract import Store, Topic
from .harness import MovableClock, StoreHarness, append, ask, batch, partitions, read_all, spans

__all__ = ["TopicContract"]

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
