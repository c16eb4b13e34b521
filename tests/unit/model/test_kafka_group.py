"""A classic group of Kafka clients: joins, syncs, silence, static members, and who may commit (I28)."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from postroom.model.kafka_group import (
    Assigned,
    ClassicGroup,
    Generation,
    GroupError,
    Joined,
    Joining,
    Phase,
    Rules,
    Who,
)

SESSION_MS, REBALANCE_MS, FIRST_MS = 10_000, 60_000, 300
RANGE = (("range", b"a"), ("roundrobin", b"b"))


class Office:
    """A coordinator, and its clients: each call is one request; `said` has the answers by ticket."""

    def __init__(self, written: Generation | None = None, rules: Rules | None = None) -> None:
        self.now = 0
        self.group = ClassicGroup(written or Generation(), 0, rules or Rules(FIRST_MS))
        self.said: dict[int, Any] = {}
        self.writes: list[Generation] = []
        self._tickets = count(1)

    def _settle(self) -> None:
        if self.group.is_unwritten:
            self.group.is_unwritten = False
            self.writes.append(self.group.generation)
        self.said.update(self.group.replies)
        self.group.replies.clear()

    def join(self, member: str, new_id: str = "", **more: Any) -> int:
        ticket = next(self._tickets)
        asked = Joining(member, None, "shop", "/::1", SESSION_MS, REBALANCE_MS, "consumer", RANGE)
        self.group.join(ticket, replace(asked, **more), new_id, self.now)
        self._settle()
        return ticket

    def sync(self, member: str, assignments: dict[str, bytes] | None = None, **more: Any) -> int:
        ticket = next(self._tickets)
        who = replace(Who(member, self.group.number), **more)
        self.group.sync(ticket, who, assignments or {}, self.now)
        self._settle()
        return ticket

    def leave(self, member: str, instance: str | None = None) -> GroupError:
        error = self.group.leave(Who(member, instance=instance), self.now)
        self._settle()
        return error

    def wait(self, ms: int) -> None:
        """All that is due until then happens in its time."""
        until = self.now + ms
        while (due := self.group.due()) is not None and due <= until:
            self.now = max(due, self.now)
            self.group.tick(self.now)
            self._settle()
        self.now = until

    def enter(self, *ids: str, **more: Any) -> None:
        """They join a group that is empty, and each gets its own name assigned."""
        tickets = [self.join("", id, needs_id=False, **more) for id in ids]
        self.wait(FIRST_MS)
        assert [self.said[ticket].error for ticket in tickets] == [GroupError.NONE] * len(ids)
        for id in reversed(ids):  # the leader is the last
            self.sync(id, {id: id.encode() for id in ids} if id == self.group.leader else None)
        assert self.group.phase is Phase.STABLE


def test_the_first_generation_waits_a_moment_for_more_members_and_has_a_leader_who_assigns() -> None:
    office = Office()
    ann, bob = (office.join("", id, needs_id=False) for id in ("ann", "bob"))
    assert office.said == {}
    office.wait(FIRST_MS)
    assert office.said[ann] == Joined(
        GroupError.NONE, "ann", 1, "consumer", "range", "ann", (("ann", None, b"a"), ("bob", None, b"a"))
    )
    assert office.said[bob] == Joined(GroupError.NONE, "bob", 1, "consumer", "range", "ann")
    early = office.sync("bob")
    assert early not in office.said and office.writes == []
    late = office.sync("ann", {"ann": b"1", "bob": b"2"})
    assert office.said[late].assignment == b"1" and office.said[early].assignment == b"2"
    assert office.writes == [office.group.generation], "it is written before anybody is told"
    assert [one.assignment for one in office.writes[0].members] == [b"1", b"2"]


def test_a_member_without_an_id_is_given_one_and_comes_again_with_it() -> None:
    office = Office()
    first = office.join("", "ann")
    assert office.said[first] == Joined(GroupError.MEMBER_ID_REQUIRED, "ann")
    second = office.join("ann")
    office.wait(FIRST_MS)
    assert office.said[second].member == "ann"


def test_an_id_that_was_given_out_and_not_used_holds_nobody_up_for_longer_than_its_session() -> None:
    office = Office()
    office.join("", "ghost")
    ticket = office.join("", "ann", needs_id=False)
    office.wait(SESSION_MS - 1)
    assert ticket not in office.said
    office.wait(1)
    assert office.said[ticket].generation == 1


def test_whoever_comes_begins_a_new_generation_for_which_all_have_to_join_again() -> None:
    office = Office()
    office.enter("ann", "bob")
    new = office.join("", "eve", needs_id=False)
    assert office.group.beat(Who("ann", 1), office.now) == GroupError.REBALANCING
    ann, bob = office.join("ann"), office.join("bob")
    assert {office.said[ticket].generation for ticket in (new, ann, bob)} == {2}
    assert office.group.beat(Who("ann", 1), office.now) == GroupError.ILLEGAL_GENERATION


def test_whoever_does_not_join_again_in_time_is_left_behind() -> None:
    office = Office()
    office.enter("ann", "bob", session_ms=2 * REBALANCE_MS)
    ticket = office.join("", "eve", needs_id=False)
    office.join("ann")
    office.wait(REBALANCE_MS)
    assert office.said[ticket].generation == 2
    assert office.group.beat(Who("bob", 1), office.now) == GroupError.UNKNOWN_MEMBER


def test_a_silent_member_is_removed_and_the_others_share_what_it_had() -> None:
    office = Office()
    office.enter("ann", "bob")
    office.wait(SESSION_MS - 1)
    assert office.group.beat(Who("ann", 1), office.now) == GroupError.NONE
    office.wait(1)
    assert office.group.phase is Phase.PREPARING
    assert office.said[office.join("ann")].members == (("ann", None, b"a"),)


def test_a_group_whose_last_member_goes_is_empty_and_that_is_written() -> None:
    office = Office()
    office.enter("ann")
    assert office.leave("ann") == GroupError.NONE
    assert office.group.phase is Phase.EMPTY and office.group.is_idle
    assert office.writes[-1] == Generation(2, "consumer")
    assert office.leave("ann") == GroupError.UNKNOWN_MEMBER


def test_a_follower_that_asks_again_without_a_change_is_answered_at_once() -> None:
    office = Office()
    office.enter("ann", "bob")
    assert office.said[office.join("bob")].generation == 1
    assert office.said[office.sync("bob")] == Assigned(GroupError.NONE, "consumer", "range", b"bob")
    changed = office.join("bob", protocols=(("range", b"other"),))
    assert changed not in office.said and office.group.phase is Phase.PREPARING


def test_the_leader_that_joins_again_begins_a_new_generation() -> None:
    office = Office()
    office.enter("ann", "bob")
    office.join("ann")
    assert office.group.phase is Phase.PREPARING


def test_who_syncs_while_others_join_is_told_to_join() -> None:
    office = Office()
    office.enter("ann", "bob")
    office.join("", "eve", needs_id=False)
    assert office.said[office.sync("ann")].error == GroupError.REBALANCING


def test_a_sync_that_waits_ends_when_a_new_generation_begins() -> None:
    office = Office()
    tickets = [office.join("", id, needs_id=False) for id in ("ann", "bob")]
    office.wait(FIRST_MS)
    waits = office.sync("bob")
    office.join("", "eve", needs_id=False)
    assert office.said[waits].error == GroupError.REBALANCING and len(tickets) == 2


def test_a_leader_that_never_assigns_is_replaced() -> None:
    office = Office()
    for id in ("ann", "bob"):
        office.join("", id, needs_id=False, session_ms=10 * REBALANCE_MS)
    office.wait(FIRST_MS)
    waits = office.sync("bob")
    office.wait(REBALANCE_MS)
    assert office.said[waits].error == GroupError.REBALANCING
    assert office.said[office.join("bob")].leader == "bob"


@pytest.mark.parametrize("skips", [True, False])
def test_a_static_member_is_back_under_its_name_without_a_new_generation(skips: bool) -> None:
    office = Office()
    office.enter("ann-1", instance="ann")
    back = office.said[office.join("", "ann-2", instance="ann", skips=skips)]
    assert (back.error, back.generation, back.member) == (GroupError.NONE, 1, "ann-2")
    assert back.skip_assignment is skips
    assert back.leader == ("ann-2" if skips else "ann-1"), "an old client must not assign"
    assert office.said[office.sync("ann-2", instance="ann")].assignment == b"ann-1"
    assert [one.id for one in office.writes[-1].members] == ["ann-2"]
    assert office.group.beat(Who("ann-1", 1, "ann"), office.now) == GroupError.FENCED_INSTANCE
    assert office.said[office.join("ann-1", instance="ann")].error == GroupError.FENCED_INSTANCE


def test_a_static_member_may_be_away_until_its_session_ends() -> None:
    office = Office()
    office.enter("ann", "bob", instance=None)
    static = office.join("", "eve-1", needs_id=False, instance="eve", session_ms=5 * REBALANCE_MS)
    office.join("ann"), office.join("bob")
    assert office.said[static].generation == 2
    office.sync("ann", {"eve-1": b"hers"})
    office.join("ann")
    office.wait(REBALANCE_MS)
    assert [one.instance for one in office.group.generation.members] == [None, "eve"], "bob was silent"


def test_a_static_member_leaves_by_its_name_alone() -> None:
    office = Office()
    office.enter("ann-1", instance="ann")
    assert office.leave("", "bob") == GroupError.UNKNOWN_MEMBER
    assert office.leave("other", "ann") == GroupError.FENCED_INSTANCE
    assert office.leave("", "ann") == GroupError.NONE
    assert office.group.phase is Phase.EMPTY


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol_type": "connect"},
        {"protocols": (("sticky", b""),)},
        {"protocols": ()},
        {"protocol_type": ""},
    ],
)
def test_whoever_cannot_agree_with_the_others_is_refused(wrong: dict[str, Any]) -> None:
    office = Office()
    office.enter("ann")
    assert office.said[office.join("", "eve", **wrong)].error == GroupError.INCONSISTENT_PROTOCOL
    assert office.group.phase is Phase.STABLE


def test_members_agree_on_what_most_of_them_prefer() -> None:
    office = Office()
    for id, names in (("ann", "xy"), ("bob", "yxz"), ("eve", "zyx")):
        protocols = tuple((name, b"") for name in names)
        ticket = office.join("", id, needs_id=False, protocols=protocols)
    office.wait(FIRST_MS)
    assert office.said[ticket].protocol == "y"


def test_a_group_takes_no_more_members_or_bytes_than_its_rules_say() -> None:
    office = Office(rules=Rules(FIRST_MS, most_members=2, most_bytes=2000))
    assert office.said[office.join("", "big", protocols=(("range", bytes(2000)),))].error == (
        GroupError.GROUP_FULL
    )
    office.enter("ann", "bob")
    assert office.said[office.join("", "eve")].error == GroupError.GROUP_FULL
    office.join("ann")
    office.join("bob")
    assert office.said[office.sync("ann", {"ann": bytes(9000)})].error == GroupError.INVALID_REQUEST


def test_a_new_coordinator_goes_on_with_the_members_of_the_row() -> None:
    before = Office()
    before.enter("ann", "bob")
    after = Office(before.writes[-1])
    assert after.group.phase is Phase.STABLE
    assert after.group.beat(Who("bob", 1), 0) == GroupError.NONE
    assert after.group.check_commit(Who("ann", 1), 0) == GroupError.NONE
    assert after.said[after.sync("bob")].assignment == b"bob"
    after.wait(SESSION_MS)
    assert after.group.phase is Phase.EMPTY, "those who do not come are forgotten"


def test_a_coordinator_that_gives_up_answers_all_who_wait() -> None:
    office = Office()
    office.enter("ann", "bob")
    waits = office.join("", "eve", needs_id=False)
    office.group.give_up()
    assert dict(office.group.replies)[waits].error == GroupError.NOT_COORDINATOR


def test_a_client_that_hangs_up_while_it_waits_is_a_member_until_its_session_ends() -> None:
    office = Office()
    office.enter("ann")
    ticket = office.join("", "eve", needs_id=False)
    office.group.gone(ticket, office.now)
    office.wait(SESSION_MS - 1)
    assert {one.id for one in office.group.generation.members} == {"ann", "eve"}
    office.group.beat(Who("ann", 1), office.now)
    office.wait(1)
    assert {one.id for one in office.group.generation.members} == {"ann"}


@pytest.mark.parametrize(
    ("who", "error"),
    [
        (Who("ann", 1), GroupError.NONE),
        (Who("ann", 0), GroupError.ILLEGAL_GENERATION),
        (Who("ann", 2), GroupError.ILLEGAL_GENERATION),
        (Who("eve", 1), GroupError.UNKNOWN_MEMBER),
        (Who(), GroupError.UNKNOWN_MEMBER),
        (Who("ann", 1, "name"), GroupError.UNKNOWN_MEMBER),
    ],
)
def test_members_of_the_generation_commit_and_nobody_else(who: Who, error: GroupError) -> None:
    office = Office()
    office.enter("ann", "bob")
    assert office.group.check_commit(who, office.now) == error
    assert office.writes[-1].check_commit(who) == error


def test_members_commit_while_others_join_and_not_while_they_have_no_assignment() -> None:
    office = Office()
    office.enter("ann", "bob")
    office.join("", "eve", needs_id=False)
    assert office.group.check_commit(Who("ann", 1), office.now) == GroupError.NONE
    office.join("ann"), office.join("bob")
    assert office.group.check_commit(Who("ann", 2), office.now) == GroupError.REBALANCING
