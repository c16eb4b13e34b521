"""Routes: every draft, every bad wish with its sentence, and long lines of changes (R24-R26, I10, I11)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.config import SLOTS
from postroom.errors import InvalidSetting, UnknownPartition
from postroom.model.messages.slot import slot_of
from postroom.model.topology.route import Change, Draft, Range, Route, even_ranges, merge, move, renew, split

LAST = SLOTS - 1


def route_of(partitions: int, version: int = 1) -> Route:
    """Partition n has the id 100 + n."""
    slots = enumerate(even_ranges(partitions))
    return Route("orders", version, tuple(Range(a, b, number, 100 + number) for number, (a, b) in slots))


def carried_out(route: Route, draft: Draft, numbers: count[int]) -> tuple[Change, Route]:
    names = [(number, 100 + number) for _, number in zip(draft.opens, numbers, strict=False)]
    change = draft.numbered(7, 1, names)
    return change, route.after(change)


def spans(pieces: tuple[Range, ...]) -> list[tuple[int, int]]:
    return [(piece.first_slot, piece.last_slot) for piece in pieces]


def refuses(wish: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(sentence)):
        wish()


# ---- a new topic ------------------------------------------------------------------------------------------


@given(st.integers(1, SLOTS))
def test_even_ranges_cover_all_slots_and_differ_by_one_at_most(partitions: int) -> None:
    ranges = even_ranges(partitions)
    assert [slot for a, b in ranges for slot in range(a, b + 1)] == list(range(SLOTS))
    sizes = {b - a + 1 for a, b in ranges}
    assert len(ranges) == partitions and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("partitions", [0, -1, SLOTS + 1, True, None, "4", 4.0])
def test_a_number_of_partitions_that_cannot_be(partitions: Any) -> None:
    refuses(
        lambda: even_ranges(partitions), f"partitions={partitions!r}: choose a whole number from 1 to {SLOTS}"
    )


# ---- what a route is --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        ([], "every slot"),
        ([(0, 500), (502, LAST)], "exactly once"),
        ([(0, 500), (500, LAST)], "exactly once"),
        ([(1, LAST)], "exactly once"),
        ([(0, LAST - 1)], "every slot"),
        ([(0, LAST + 1)], "every slot"),
        ([(501, LAST), (0, 500)], "exactly once"),
        ([(0, 500), (501, 500), (501, LAST)], "exactly once"),
    ],
)
def test_a_route_that_does_not_cover_each_slot_once_cannot_be_made(
    ranges: list[tuple[int, int]], why: str
) -> None:
    with pytest.raises(AssertionError, match=why):
        Route("orders", 1, tuple(Range(a, b, n, n) for n, (a, b) in enumerate(ranges)))


def test_a_partition_has_one_range() -> None:
    with pytest.raises(AssertionError, match="one range"):
        Route("orders", 1, (Range(0, 10, 0, 5), Range(11, LAST, 1, 5)))


@given(st.integers(1, 40), st.binary(max_size=8))
def test_the_partition_of_a_slot(partitions: int, key: bytes) -> None:
    route, slot = route_of(partitions), slot_of(key)
    found = route.of_slot(slot)
    assert found.first_slot <= slot <= found.last_slot
    assert [route.of_slot(piece.first_slot) for piece in route.ranges] == list(route.ranges)
    assert [route.of_slot(piece.last_slot) for piece in route.ranges] == list(route.ranges)


def test_a_partition_that_is_not_in_the_route() -> None:
    with pytest.raises(UnknownPartition, match="topic 'orders' has no partition 3; it has 0, 1, 2"):
        route_of(3).of_partition(3)


def test_what_is_sealed_can_be_read_and_not_changed() -> None:
    route = route_of(2)
    _, after = carried_out(route, split(route, 1), count(2))
    assert after.readable(1) == route.ranges[1]
    assert [after.readable(piece.partition) for piece in after.ranges] == list(after.ranges)
    with pytest.raises(
        UnknownPartition, match=r"partition 1 \(slots 512 to 1023\) .* is sealed.* has 0, 2, 3"
    ):
        after.of_partition(1)
    with pytest.raises(UnknownPartition, match="has no partition 9; it has 1, 0, 2, 3"):
        after.readable(9)


@pytest.mark.parametrize(
    ("one", "other", "whether"),
    [
        ((0, 4), (5, 9), False),
        ((0, 5), (5, 9), True),
        ((0, 9), (3, 4), True),
        ((3, 4), (0, 9), True),
        ((7, 7), (7, 7), True),
        ((8, 9), (0, 7), False),
    ],
)
def test_ranges_overlap_if_they_share_a_slot(
    one: tuple[int, int], other: tuple[int, int], whether: bool
) -> None:
    assert Range(*one, 0, 0).overlaps(Range(*other, 1, 1)) is whether


# ---- split ------------------------------------------------------------------------------------------------


def test_a_split_is_in_the_middle_unless_it_is_said_where() -> None:
    route = route_of(2)
    assert spans(split(route, 1).opens) == [(512, 767), (768, LAST)]
    assert spans(split(route, 1, 513).opens) == [(512, 512), (513, LAST)]
    assert spans(split(route, 1, LAST).opens) == [(512, LAST - 1), (LAST, LAST)]


def test_a_split_stays_on_its_shard() -> None:
    route = Route("orders", 4, (Range(0, 99, 0, 1), Range(100, LAST, 1, 2, "b")))
    draft = split(route, 1)
    assert [piece.shard for piece in draft.opens] == ["b", "b"]
    assert (draft.kind, draft.version, draft.seals) == ("split", 4, (route.ranges[1],))
    assert {(piece.partition, piece.partition_id) for piece in draft.opens} == {(-1, -1)}


@pytest.mark.parametrize("at", [0, 511, 512, 1024, -1, 10**20, True, False, "600", 600.0, b"600"])
def test_a_split_at_a_slot_that_it_cannot_begin_with(at: Any) -> None:
    refuses(
        lambda: split(route_of(2), 1, at),
        f"at={at!r}: the second part begins with slot `at`, so for partition 1 (slots 512 to 1023) of topic "
        "'orders' choose 513 to 1023",
    )


def test_bool_is_no_slot_even_where_its_number_would_do() -> None:
    refuses(lambda: split(route_of(1), 0, True), "at=True")
    assert spans(split(route_of(1), 0, 1).opens) == [(0, 0), (1, LAST)]


@pytest.mark.parametrize("at", [None, 5, "x"])
def test_one_slot_cannot_be_split(at: Any) -> None:
    refuses(
        lambda: split(route_of(SLOTS), 5, at),
        "partition 5 (slots 5 to 5) of topic 'orders' has one slot only and cannot be split: "
        "all its keys share it",
    )


@pytest.mark.parametrize("number", [9, -1, None, "0"])
def test_what_is_changed_is_in_the_route(number: Any) -> None:
    route = route_of(2)
    wishes: list[Callable[[], object]] = [
        lambda: split(route, number),
        lambda: merge(route, number, 0),
        lambda: merge(route, 0, number),
        lambda: move(route, number, "b"),
    ]
    for wish in wishes:
        with pytest.raises(UnknownPartition, match="it has 0, 1"):
            wish()


# ---- merge, move, renew -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 1)])
def test_a_merge_is_where_the_first_of_both_was(one: int, other: int) -> None:
    ranges = (Range(0, 9, 0, 1), Range(10, 19, 1, 2, "b"), Range(20, 29, 2, 3, "c"), Range(30, LAST, 3, 4))
    draft = merge(Route("orders", 2, ranges), one, other)
    assert draft.seals == ranges[1:3]
    assert draft.opens == (Range(10, 29, -1, -1, "b"),)
    assert (draft.kind, draft.version) == ("merge", 2)


@pytest.mark.parametrize(("one", "other", "near"), [(0, 2, "1"), (2, 0, "1"), (1, 3, "0 and 2"), (3, 0, "1")])
def test_strangers_are_not_merged(one: int, other: int, near: str) -> None:
    first = min(one, other)
    with pytest.raises(InvalidSetting, match="are not neighbours: only those can be merged") as caught:
        merge(route_of(4), one, other)
    assert str(caught.value).endswith(f"the neighbours of partition {first} are {near}")


def test_a_partition_is_not_merged_with_itself() -> None:
    refuses(
        lambda: merge(route_of(3), 1, 1),
        "partition 1 cannot be merged with itself; name one of its neighbours",
    )


def test_a_move_keeps_the_range() -> None:
    route = route_of(2)
    draft = move(route, 1, "b")
    assert (draft.kind, draft.seals, draft.opens) == (
        "move", (route.ranges[1],), (Range(512, LAST, -1, -1, "b"),),
    )  # fmt: skip
    refuses(
        lambda: move(route, 1, ""), "partition 1 of topic 'orders' is on that shard already; name another"
    )
    back = Route("orders", 2, (Range(0, LAST, 0, 1, "b"),))
    assert move(back, 0, "").opens == (Range(0, LAST, -1, -1, ""),)
    refuses(lambda: move(back, 0, "b"), "on that shard already")


def test_a_renewal_is_of_those_that_are_in_the_route() -> None:
    route = route_of(4)
    draft = renew(route, [103, 101, 555])
    assert draft is not None
    assert draft.seals == (route.ranges[1], route.ranges[3])
    assert spans(draft.opens) == spans(draft.seals)
    assert renew(route, []) is None
    assert renew(route, [555]) is None


def test_a_renewed_partition_follows_only_its_own() -> None:
    draft = renew(route_of(4), [100, 101])
    assert draft is not None
    change, _ = carried_out(route_of(4), draft, count(4))
    assert change.predecessors == {104: (100,), 105: (101,)}


# ---- drafts and changes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seals", "opens"),
    [
        ([], [(0, 9)]),
        ([(0, 9)], []),
        ([(0, 9)], [(0, 8)]),
        ([(0, 9)], [(0, 10)]),
        ([(0, 9)], [(0, 5), (5, 9)]),
        ([(0, 9)], [(0, 4), (6, 9)]),
        ([(0, 9), (20, 29)], [(0, 29)]),
        ([(0, 9)], [(9, 0)]),
    ],
)
def test_what_opens_covers_what_is_sealed(seals: list[tuple[int, int]], opens: list[tuple[int, int]]) -> None:
    with pytest.raises(AssertionError):
        Draft(
            "split", "orders", 1,
            tuple(Range(*slots, 0, 1) for slots in seals), tuple(Range(*slots, -1, -1) for slots in opens),
        )  # fmt: skip


def test_a_change_knows_who_follows_whom_and_what_it_touches() -> None:
    route = Route("orders", 3, (Range(0, 99, 0, 1, "a"), Range(100, 199, 1, 2, "b"), Range(200, LAST, 2, 3)))
    merged, _ = carried_out(route, merge(route, 0, 1), count(3))
    assert merged.predecessors == {103: (1, 2)}
    assert merged.successors(1) == merged.successors(2) == merged.opens
    assert merged.successors(3) == ()
    assert merged.shards == ("a", "b")
    halves, _ = carried_out(route, split(route, 2), count(3))
    assert halves.predecessors == {103: (3,), 104: (3,)}
    assert halves.successors(3) == halves.opens
    assert halves.shards == ("",)


def test_each_partition_that_opens_gets_a_name() -> None:
    draft = split(route_of(1), 0)
    with pytest.raises(ValueError, match="shorter"):
        draft.numbered(7, 1, [(1, 101)])
    change = draft.numbered(7, 1, [(5, 51), (6, 61)])
    assert [(piece.partition, piece.partition_id) for piece in change.opens] == [(5, 51), (6, 61)]
    assert (change.id, change.topic_id, change.kind, change.topic, change.version) == (
        7, 1, "split", "orders", 1,
    )  # fmt: skip


def test_a_change_is_of_the_version_it_was_drafted_on() -> None:
    route = route_of(2)
    change, after = carried_out(route, split(route, 0), count(2))
    with pytest.raises(AssertionError, match="of the version"):
        after.after(change)
    with pytest.raises(AssertionError, match="only what is open"):
        after.after(replace(change, version=2))


# ---- long lines of changes --------------------------------------------------------------------------------

WISH = st.tuples(
    st.sampled_from(["split", "split", "merge", "move", "renew", "remove"]),
    st.integers(0, 50),
    st.integers(0, 50),
)


class History:
    """Routes, one after the other, beside what is plainly so: which partition had which slot, and when."""

    def __init__(self, partitions: int) -> None:
        self.route = route_of(partitions)
        self.numbers = count(partitions)
        self.owners = [[self.route.of_slot(slot).partition_id for slot in range(SLOTS)]]
        self.gone: set[int] = set()
        self.used = {piece.partition_id for piece in self.route.ranges}

    def step(self, wish: tuple[str, int, int]) -> None:
        kind, a, b = wish
        if kind == "remove":
            if self.route.sealed:
                self.remove(self.route.sealed[a % len(self.route.sealed)])
        elif (draft := self._draft(kind, a, b)) is not None:
            self.change(draft)

    def _draft(self, kind: str, a: int, b: int) -> Draft | None:
        route = self.route
        at = a % len(route.ranges)
        piece = route.ranges[at]
        if kind == "split":
            slot = piece.first_slot + 1 + b % max(1, piece.slots - 1)
            return split(route, piece.partition, slot) if piece.slots > 1 else None
        if kind == "merge":
            following = route.ranges[(at + 1) % len(route.ranges)]
            if following.first_slot != piece.last_slot + 1:
                return None
            return merge(route, following.partition, piece.partition)
        if kind == "move":
            return move(route, piece.partition, "b" if piece.shard == "" else "")
        other = route.ranges[b % len(route.ranges)]
        return renew(route, {piece.partition_id, other.partition_id})

    def change(self, draft: Draft) -> None:
        before = self.route
        change, self.route = carried_out(before, draft, self.numbers)
        assert self.route.version == before.version + 1
        opened = {piece.partition_id for piece in change.opens}
        assert not opened & self.used, "an id is used again"
        self.used |= opened
        old, now = self.owners[-1], [self.route.of_slot(slot).partition_id for slot in range(SLOTS)]
        for new in change.opens:
            slots = range(new.first_slot, new.last_slot + 1)
            assert {now[slot] for slot in slots} == {new.partition_id}
            assert set(self.route.predecessors[new.partition_id]) == {old[slot] for slot in slots}
        touched = {slot for piece in change.opens for slot in range(piece.first_slot, piece.last_slot + 1)}
        assert all(old[slot] == now[slot] for slot in range(SLOTS) if slot not in touched)
        assert self.route.sealed == (*before.sealed, *change.seals)
        self.owners.append(now)

    def remove(self, piece: Range) -> None:
        before = self.route
        self.route = before.without(piece.partition_id)
        self.gone.add(piece.partition_id)
        assert (self.route.version, self.route.ranges) == (before.version, before.ranges)
        assert [p for p in before.sealed if p != piece] == list(self.route.sealed)

    def check(self) -> None:
        """Predecessors, told from who had each slot before: those that are there still, or their own."""
        direct: dict[int, set[int]] = {}
        for old, new in pairwise(self.owners):
            for slot in range(SLOTS):
                if old[slot] != new[slot]:
                    direct.setdefault(new[slot], set()).add(old[slot])

        def before(one: int) -> set[int]:
            found = direct.get(one, set())
            return (found - self.gone).union(*(before(old) for old in found & self.gone))

        told = {one: olds for one in self.used - self.gone if (olds := before(one))}
        assert {one: set(olds) for one, olds in self.route.predecessors.items()} == told
        assert all(len(set(olds)) == len(olds) for olds in self.route.predecessors.values())
        there = {piece.partition_id for piece in self.route.partitions}
        assert len(there) == len(self.route.partitions)
        assert there == self.used - self.gone
        assert self.route.partitions[-len(self.route.ranges) :] == self.route.ranges


@given(st.integers(1, 5), st.lists(WISH, max_size=16))
def test_any_line_of_changes(partitions: int, wishes: list[tuple[str, int, int]]) -> None:
    history = History(partitions)
    for wish in wishes:
        history.step(wish)
        history.check()
    assert history.route.version == len(history.owners)


def test_a_route_without_what_is_gone_keeps_the_rest() -> None:
    """0 → 2, 3; 1 and 3 → 4 (after a merge). Without 1 the partition 4 still follows 3."""
    history = History(2)
    history.change(split(history.route, 0))
    history.change(merge(history.route, 3, 1))
    assert history.route.predecessors == {102: (100,), 103: (100,), 104: (103, 101)}
    history.remove(history.route.sealed[2])
    assert history.route.predecessors == {102: (100,), 103: (100,), 104: (103,)}
    assert [piece.partition for piece in history.route.sealed] == [0, 3]
    assert history.route.without(103).predecessors == {102: (100,), 104: (100,)}
    assert history.route.without(100).predecessors == {104: (103,)}
    assert history.route.without(999) == history.route
