"""A Kafka partition is a chain of partitions, whose offsets are dense (I28)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postroom.model.messages import sequence
from postroom.model.topology import route as routes
from postroom.model.topology.chain import Chain, Link, chains_of, numbered_chains, origins_after
from postroom.model.topology.route import Range, Route, even_ranges


def new_route(partitions: int) -> Route:
    ranges = [Range(a, b, at, at + 1) for at, (a, b) in enumerate(even_ranges(partitions))]
    return Route("t", 1, tuple(ranges))


@given(
    partitions=st.integers(1, 4), moves=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=8)
)
def test_offsets_stay_dense_over_any_number_of_moves(partitions: int, moves: list[tuple[int, int]]) -> None:
    """Each move seals a partition with that many messages: the successor goes on with the next offset."""
    route, origins, ends = new_route(partitions), dict[int, int](), dict[int, int]()
    next_id = partitions + 1
    for which, messages in moves:
        old = route.ranges[which % partitions]
        draft = routes.renew(route, [old.partition_id])
        assert draft is not None
        change = draft.numbered(1, 1, [(next_id, next_id)])
        ends[old.partition_id] = messages + 1  # and the seal
        origins |= origins_after(change, origins, ends)
        route, next_id = route.after(change), next_id + 1
    for chain in chains_of(route, origins):
        for link, following in zip(chain.links, chain.links[1:], strict=False):
            assert following.origin == link.origin + ends[link.partition_id] - 1
            assert chain.links[chain.at(following.origin)] == following
            assert chain.links[chain.at(following.origin - 1)] == link
        assert chain.newest.partition_id == route.ranges[chain.index].partition_id
        assert chain.links[0].origin == 0


def test_what_retention_dropped_leaves_the_chain_and_nothing_else_changes() -> None:
    route = new_route(1)
    draft = routes.renew(route, [1])
    assert draft is not None
    change = draft.numbered(1, 1, [(1, 2)])
    origins = origins_after(change, {}, {1: 11})
    later = route.after(change).without(1)
    assert chains_of(later, origins) == (Chain(0, (Link(2, 10, 1),)),)


def test_partitions_of_other_topics_keep_their_numbers_and_gaps_stay_as_empty_ones() -> None:
    route = new_route(2)
    draft = routes.renew(route, [1])
    assert draft is not None
    later = route.after(draft.numbered(1, 1, [(2, 9)])).without(1)
    assert [chain.links for chain in numbered_chains(later)] == [(), (Link(2, 0, 1),), (Link(9, 0, 2),)]


def test_a_successor_answers_a_repeat_with_the_offset_that_it_had_before_the_move() -> None:
    state = sequence.remember(None, 0, 0, 10, 0, 8)
    state = sequence.remember(state, 0, 10, 5, 10, 8)
    inherited = sequence.shifted(state, -15)  # 15 messages were stored when it was sealed
    repeat = sequence.check(inherited, 0, 10, 5)
    assert repeat is not None and 15 + repeat == 10
    assert sequence.check(inherited, 0, 15, 3) is None, "the next one is stored"
