"""Who holds which partition of an ordered group: fair, with few moves, and settled soon (R14, R23)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.model.delivery.ordered import Plan, plan

ROUNDS = 4  # everybody looks so often, and then it is balanced


@dataclass
class World:
    """Partitions, who holds them, and who is a member; steps as the store would allow them."""

    partitions: list[int]
    members: list[str]
    holders: dict[int, str] = field(default_factory=dict)
    moves: int = 0

    def view(self) -> dict[int, str]:
        return dict(self.holders)

    def step(self, me: str, view: dict[int, str] | None = None) -> bool:
        """One member acts, on what it sees now or on what it saw earlier; True if it did something."""
        decided = plan(self.partitions, self.view() if view is None else view, self.members, me)
        for partition in decided.give_up:
            if self.holders.get(partition) == me:
                del self.holders[partition]
        taken = 0
        for partition in decided.claim:
            if taken < decided.room and partition not in self.holders:
                self.holders[partition] = me
                taken += 1
                self.moves += 1
        return bool(decided.give_up or taken)

    def sizes(self) -> dict[str, int]:
        return {name: list(self.holders.values()).count(name) for name in self.members}

    @property
    def balanced(self) -> bool:
        share, rest = divmod(len(self.partitions), len(self.members))
        sizes = sorted(self.sizes().values(), reverse=True)
        return sizes == [share + 1] * rest + [share] * (len(sizes) - rest)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    partitions = draw(st.lists(st.integers(1, 60), unique=True, max_size=20))
    members = [f"m{i}" for i in range(draw(st.integers(1, 8)))]
    holders = (
        draw(st.dictionaries(st.sampled_from(partitions), st.sampled_from(members))) if partitions else {}
    )
    return World(partitions, members, holders)


def settle(world: World, orders: list[list[str]]) -> int:
    """Let everybody act in each given order; returns the rounds until nobody did anything."""
    for number, order in enumerate(orders):
        if not sum(world.step(name) for name in order):
            return number
    return len(orders)


@given(st.data(), worlds())
def test_from_any_state_it_is_balanced_soon_and_stays_so(data: st.DataObject, world: World) -> None:
    orders = [data.draw(st.permutations(world.members)) for _ in range(ROUNDS)]
    settle(world, orders)
    assert world.balanced, world.holders
    before = world.view()
    assert not sum(world.step(name) for name in world.members)
    assert world.view() == before


@given(st.data(), worlds())
def test_no_more_is_moved_than_must_be(data: st.DataObject, world: World) -> None:
    share, rest = divmod(len(world.partitions), len(world.members))
    sizes = sorted(world.sizes().values(), reverse=True)
    shares = [share + (rank < rest) for rank in range(len(sizes))]
    surplus = sum(max(0, size - most) for size, most in zip(sizes, shares, strict=True))
    free = len(world.partitions) - len(world.holders)
    settle(world, [data.draw(st.permutations(world.members)) for _ in range(ROUNDS)])
    assert world.moves <= surplus + free


@given(st.data(), worlds())
def test_old_views_do_no_lasting_harm(data: st.DataObject, world: World) -> None:
    """Each acts on what it saw some steps ago, as brokers with a cache do."""
    views = [world.view()]
    for _ in range(data.draw(st.integers(0, 20))):
        name = data.draw(st.sampled_from(world.members))
        world.step(name, views[-data.draw(st.integers(1, min(4, len(views)))) :][0])
        views.append(world.view())
    settle(world, [data.draw(st.permutations(world.members)) for _ in range(ROUNDS)])
    assert world.balanced


@given(st.data(), worlds(), st.booleans())
def test_members_come_and_go(data: st.DataObject, world: World, comes: bool) -> None:
    settle(world, [world.members] * ROUNDS)
    before = world.view()
    if comes or len(world.members) == 1:
        world.members.append("new")
        moved_at_most = len(world.partitions) // len(world.members)
    else:
        gone = world.members.pop(data.draw(st.integers(0, len(world.members) - 1)))
        world.holders = {p: name for p, name in world.holders.items() if name != gone}
        moved_at_most = len(before) - len(world.holders)
    world.moves = 0
    rounds = settle(world, [data.draw(st.permutations(world.members)) for _ in range(ROUNDS)])
    assert world.balanced and rounds < ROUNDS
    assert world.moves <= moved_at_most  # the others keep what they have


# ---- single cases ----


def test_the_example_of_the_module() -> None:
    everything = dict.fromkeys(range(1, 6), "a")
    assert plan(range(1, 6), everything, "abc", "a") == Plan(give_up=(3, 4, 5))
    left = dict.fromkeys((1, 2), "a")
    assert plan(range(1, 6), left, "abc", "b").room == 2
    assert plan(range(1, 6), left, "abc", "c").room == 1


def test_more_members_than_partitions_leaves_some_standing_by() -> None:
    world = World([1, 2], ["a", "b", "c", "d"])
    settle(world, [world.members] * ROUNDS)
    assert sorted(world.sizes().values()) == [0, 0, 1, 1]
    standing_by = next(name for name, size in world.sizes().items() if not size)
    assert plan(world.partitions, world.holders, world.members, standing_by) == Plan()


def test_those_who_claim_at_once_begin_at_different_partitions() -> None:
    first = [plan(range(8), {}, "abcd", name).claim[0] for name in "abcd"]
    assert len(set(first)) == 4


def test_what_a_stranger_holds_is_not_claimed_and_not_given_up() -> None:
    decided = plan([1, 2, 3, 4], {1: "gone", 2: "a"}, ["a", "b"], "a")
    assert set(decided.claim) == {3, 4} and decided.room == 1 and decided.give_up == ()


@pytest.mark.parametrize("members", [[], ["b"]])
def test_one_counts_oneself_even_if_the_others_do_not_know_yet(members: list[str]) -> None:
    assert plan([1, 2], {}, members, "a").room == 2 - len(members)


def test_no_partitions() -> None:
    assert plan([], {}, ["a"], "a") == Plan()
