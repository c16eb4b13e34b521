"""`KafkaGroups`: coordinators of Kafka's consumer groups, their generations, and committed offsets (I28)."""

from __future__ import annotations

import pytest

from ...model.kafka_group import Generation, GroupError, StoredMember, Who
from ...store.contract import Store
from ...store.contract.kafka import KafkaGroup, KafkaOffset, ShareGroup
from .harness import MovableClock, StoreHarness, in_threads

__all__ = ["KafkaGroupContract"]

A, B = "a" * 36, "b" * 36
LEASE_MS = 7_000
SESSION_MS = 45_000
AT_3 = KafkaOffset(7, 0, 3, 2, "as far as here")


def member(id: str, instance: str | None = None) -> StoredMember:
    return StoredMember(id, instance, "shop", "/::1", SESSION_MS, 60_000, (("range", b"\0\xff"),), b"all")


def generation(number: int, *ids: str) -> Generation:
    return Generation(number, "consumer", "range", ids[0] if ids else "", tuple(map(member, ids)))


class KafkaGroupContract(StoreHarness):
    def test_a_kafka_group_is_coordinated_by_one_broker_until_its_lease_ends(
        self, store: Store, other: Store, clock: MovableClock
    ) -> None:
        groups = store.kafka_groups
        assert groups.take("billing", A, LEASE_MS) is None, "nobody made it"
        mine = KafkaGroup("billing", Generation(), A, clock.ms + LEASE_MS)
        assert groups.take("billing", A, LEASE_MS, make=True) == mine
        assert other.kafka_groups.take("billing", B, LEASE_MS, make=True) == mine
        assert other.kafka_groups.renew(B, LEASE_MS) == set()
        clock.ms += LEASE_MS - 1
        assert groups.renew(A, LEASE_MS) == {"billing"}
        clock.ms += LEASE_MS
        found = other.kafka_groups.take("billing", B, LEASE_MS)
        assert found is not None and found.holder == B
        assert groups.renew(A, LEASE_MS) == set()

    def test_of_two_brokers_that_take_a_kafka_group_at_once_one_has_it(
        self, store: Store, other: Store
    ) -> None:
        calls = [
            lambda through=through, holder=holder: through.kafka_groups.take(
                "billing", holder, LEASE_MS, make=True
            )
            for through, holder in zip([store, other] * 2, "abcd", strict=True)
        ]
        found = in_threads(*calls)
        assert len({one.holder for one in found if one is not None}) == 1

    def test_a_generation_outlives_its_coordinator(self, store: Store, other: Store) -> None:
        store.kafka_groups.take("billing", A, LEASE_MS, make=True)
        assert store.kafka_groups.write("billing", A, generation(1, "ann", "bob"))
        store.kafka_groups.release(A)
        found = other.kafka_groups.take("billing", B, LEASE_MS)
        assert found is not None and found.generation == generation(1, "ann", "bob")
        assert not store.kafka_groups.write("billing", A, generation(2, "ann")), "it is another's"
        assert other.kafka_groups.group("billing") == found

    def test_offsets_are_committed_with_metadata_and_epoch(self, store: Store, other: Store) -> None:
        store.kafka_groups.take("billing", A, LEASE_MS, make=True)
        store.kafka_groups.write("billing", A, generation(1, "ann"))
        who = Who("ann", 1)
        assert store.kafka_groups.commit("billing", A, who, [AT_3, KafkaOffset(8, 1, 5)]) == GroupError.NONE
        again = KafkaOffset(7, 0, 4)
        assert store.kafka_groups.commit("billing", A, who, [AT_3, again]) == GroupError.NONE
        found = other.kafka_groups.offsets("billing")
        assert [(o.topic_id, o.partition, o.offset, o.leader_epoch, o.metadata) for o in found] == [
            (7, 0, 4, -1, ""),
            (8, 1, 5, -1, ""),
        ]
        store.kafka_groups.commit("billing", A, who, [AT_3])
        found = other.kafka_groups.offsets("billing")
        assert (found[0].offset, found[0].leader_epoch, found[0].metadata) == (3, 2, "as far as here")
        assert other.kafka_groups.positions() == {7: {"billing": {0: 3}}, 8: {"billing": {1: 5}}}
        assert other.kafka_groups.positions([8, 9]) == {8: {"billing": {1: 5}}}
        assert other.kafka_groups.topics() == {"billing": {7, 8}}

    @pytest.mark.parametrize(
        ("holder", "who", "error"),
        [
            (B, Who("ann", 2), GroupError.NOT_COORDINATOR),
            (A, Who("ann", 1), GroupError.ILLEGAL_GENERATION),
            (A, Who("bob", 2), GroupError.UNKNOWN_MEMBER),
            (A, Who("", -1), GroupError.UNKNOWN_MEMBER),
            (A, Who("ann", 2, "one"), GroupError.UNKNOWN_MEMBER),
        ],
    )
    def test_only_a_member_of_the_written_generation_commits_through_its_coordinator(
        self, store: Store, holder: str, who: Who, error: GroupError
    ) -> None:
        store.kafka_groups.take("billing", A, LEASE_MS, make=True)
        store.kafka_groups.write("billing", A, generation(2, "ann"))
        assert store.kafka_groups.commit("billing", holder, who, [AT_3]) == error
        assert store.kafka_groups.offsets("billing") == []

    def test_anybody_commits_while_a_kafka_group_is_empty(self, store: Store) -> None:
        store.kafka_groups.take("billing", A, LEASE_MS, make=True)
        assert store.kafka_groups.commit("billing", A, Who(), [AT_3]) == GroupError.NONE
        assert store.kafka_groups.commit("billing", A, Who("ann", 0), [AT_3]) == GroupError.UNKNOWN_MEMBER

    @pytest.mark.parametrize(
        "names", [("a", "a ", "A", "á", "a\0"), ("x" * 249, "x" * 248), ("\U0001f4ee'\"%\n", "my.group/1")]
    )
    def test_names_of_kafka_groups_are_any_text(self, store: Store, names: tuple[str, ...]) -> None:
        for at, name in enumerate(names):
            store.kafka_groups.take(name, A, LEASE_MS, make=True)
            store.kafka_groups.commit(name, A, Who(), [KafkaOffset(7, 0, at, metadata=name)])
        assert [one.name for one in store.kafka_groups.groups()] == sorted(names)
        found = {name: store.kafka_groups.offsets(name)[0] for name in names}
        assert {name: (o.offset, o.metadata) for name, o in found.items()} == {
            name: (at, name) for at, name in enumerate(names)
        }
        assert store.kafka_groups.renew(A, LEASE_MS) == set(names)

    def test_a_kafka_group_that_never_came_to_be_is_forgotten_with_its_lease(self, store: Store) -> None:
        for name in ("new", "used", "kept"):
            store.kafka_groups.take(name, A, LEASE_MS, make=True)
        store.kafka_groups.commit("used", A, Who(), [AT_3])
        store.kafka_groups.release(A, ["new", "used"])
        assert [(one.name, one.holder) for one in store.kafka_groups.groups()] == [("kept", A), ("used", "")]

    def test_offsets_are_set_by_hand_unless_members_are_at_work(
        self, store: Store, clock: MovableClock
    ) -> None:
        groups = store.kafka_groups
        assert groups.put("billing", [AT_3]), "it is made"
        groups.take("billing", A, LEASE_MS)
        groups.write("billing", A, generation(4, "ann"))
        assert not groups.put("billing", [KafkaOffset(7, 0, 9)])
        assert groups.positions() == {7: {"billing": {0: 3}}}
        assert groups.put("billing", [KafkaOffset(7, 0, 9)], force=True)
        assert groups.positions() == {7: {"billing": {0: 9}}}
        assert groups.commit("billing", A, Who("ann", 4), [AT_3]) == GroupError.NOT_COORDINATOR
        found = groups.take("billing", A, LEASE_MS)
        assert found is not None and found.generation == Generation(5, "consumer")
        groups.write("billing", A, generation(6, "ann"))
        clock.ms += LEASE_MS + SESSION_MS
        assert groups.put("billing", [AT_3]), "whoever was at work is long silent"

    def test_a_kafka_group_is_forgotten_with_its_last_offset(self, store: Store) -> None:
        groups = store.kafka_groups
        groups.take("billing", A, LEASE_MS, make=True)
        groups.commit("billing", A, Who(), [AT_3, KafkaOffset(7, 1, 1), KafkaOffset(8, 0, 1)])
        assert groups.drop("billing", 7, [1])
        assert groups.positions() == {7: {"billing": {0: 3}}, 8: {"billing": {0: 1}}}
        groups.write("billing", A, generation(1, "ann"))
        assert not groups.drop("billing"), "it is in use"
        assert groups.drop("billing", 7, force=True)
        assert groups.positions() == {8: {"billing": {0: 1}}}
        assert groups.drop("billing", 8) and groups.group("billing") is None
        assert groups.drop("nobody"), "nothing is left to do"

    def test_kafka_groups_expire_when_nobody_has_coordinated_them_for_long(
        self, store: Store, clock: MovableClock
    ) -> None:
        groups = store.kafka_groups
        for name in ("old", "used"):
            groups.take(name, A if name == "used" else B, LEASE_MS, make=True)
            groups.write(name, A if name == "used" else B, generation(1, "ann"))
        groups.commit("old", B, Who("ann", 1), [AT_3])
        groups.commit("used", A, Who("ann", 1), [AT_3, KafkaOffset(8, 0, 1)])
        assert groups.expire(100_000, [7, 8]) == []
        clock.ms += 100_000 + LEASE_MS + 1
        groups.renew(A, LEASE_MS)
        assert groups.expire(100_000, [7]) == ["old"]
        assert groups.positions() == {7: {"used": {0: 3}}}, "topic 8 is no more"

    def test_share_groups_are_kept_by_any_name_and_no_more_than_there_may_be(
        self, store: Store, other: Store
    ) -> None:
        groups = store.kafka_groups
        assert groups.share_group("eu.billing") is None and groups.share_groups() == []
        for name in ("eu.billing", "EU.billing", "é" * 200):
            assert groups.put_share_group(ShareGroup(name, {}), 3)
        assert not groups.put_share_group(ShareGroup("one too many", {}), 3)
        changed = ShareGroup("eu.billing", {"share.auto.offset.reset": "earliest"})
        assert groups.put_share_group(changed, 3), "it is there already"
        assert other.kafka_groups.share_group("eu.billing") == changed
        names = [one.name for one in other.kafka_groups.share_groups()]
        assert names == ["EU.billing", "eu.billing", "é" * 200]
        groups.drop_share_group("eu.billing")
        groups.drop_share_group("eu.billing")
        assert other.kafka_groups.share_group("eu.billing") is None
