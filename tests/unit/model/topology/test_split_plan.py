"""Split plans: the fewest splits, what a route has been through, and the file (R47)."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.config import SLOTS
from postroom.errors import InvalidSetting, RouteConflict
from postroom.model.split_plan_file import plan_from_text, plan_to_text
from postroom.model.topology import route as routes
from postroom.model.topology.route import Range, Route, even_ranges
from postroom.model.topology.split_plan import Piece, SplitPlan, Step, done_steps, make_plan


def route_of(partitions: int = 2, *, shards: tuple[str, ...] = ("",)) -> Route:
    ranges = [
        Range(first, last, n, n + 10, shards[n % len(shards)])
        for n, (first, last) in enumerate(even_ranges(partitions))
    ]
    return Route("orders", 1, tuple(ranges))


def loads_of(**at: int) -> list[int]:
    """`s12=5`: slot 12 has a load of 5."""
    found = [0] * SLOTS
    for name, load in at.items():
        found[int(name[1:])] = load
    return found


def carried_out(route: Route, steps: tuple[Step, ...], *, first: int = 100) -> list[Route]:
    """Every version that the steps make, the first one included."""
    found = [route]
    for n, step in enumerate(steps):
        old = found[-1].of_slot(step.first_slot)
        if step.do == "split":
            draft = routes.split(found[-1], old.partition, step.at)
        else:
            draft = routes.merge(found[-1], old.partition, found[-1].of_slot(step.at).partition)
        ids = range(first + 2 * n, first + 2 * n + len(draft.opens))
        found.append(found[-1].after(draft.numbered(n, 1, [(id, id) for id in ids])))
    return found


# --- making one --------------------------------------------------------------------------------------


def test_nothing_to_do() -> None:
    assert make_plan(route_of(4), [1] * SLOTS).steps == ()
    unknown = make_plan(route_of(4), [0] * SLOTS, merge_cold=True)
    assert (unknown.steps, unknown.even) == ((), True)


def test_the_heavy_half_is_split_where_its_load_is() -> None:
    plan = make_plan(route_of(2), loads_of(s3=10, s5=10, s7=10, s9=10, s600=10))
    assert plan.steps == (Step("split", 0, 511, 7),)
    assert plan.after == (Piece(0, 6, 20), Piece(7, 511, 20), Piece(512, 1023, 10))
    assert plan.even and plan.too_hot == ()


def test_several_splits_of_one_partition_follow_each_other() -> None:
    plan = make_plan(route_of(1), [1] * SLOTS, factor=1.1, max_partitions=4)
    assert plan.steps == ()  # one partition is even with itself
    heavy = [8] * 512 + [1] * 512
    plan = make_plan(route_of(2), heavy, factor=1.2)
    assert plan.even and len(plan.steps) == len(plan.after) - 2
    assert [s.first_slot for s in plan.steps[1:]] == [s.at for s in plan.steps[:-1]]
    last = carried_out(route_of(2), plan.steps)[-1]
    assert [(r.first_slot, r.last_slot) for r in last.ranges] == [
        (p.first_slot, p.last_slot) for p in plan.after
    ]


def test_a_slot_that_is_too_hot_is_put_apart_and_named() -> None:
    plan = make_plan(route_of(4), [1] * 100 + [3000] + [1] * 923)
    assert plan.too_hot == (100,) and not plan.even
    assert plan.steps == (Step("split", 0, 255, 100), Step("split", 100, 255, 101))
    alone = make_plan(route_of(1), loads_of(s5=100))
    assert (alone.steps, alone.too_hot) == ((), ())  # one partition has all, and that is its share


def test_not_more_partitions_than_wanted() -> None:
    heavy = [8] * 512 + [1] * 512
    plan = make_plan(route_of(2), heavy, factor=1.01, max_partitions=3)
    assert len(plan.after) == 3 and not plan.even
    assert make_plan(route_of(4), heavy, max_partitions=1).steps == ()


def test_cold_neighbours_are_merged_on_one_shard() -> None:
    loads = [10] * 512 + [0] * 512
    loads[600] = 3
    plan = make_plan(route_of(8), loads, merge_cold=True, factor=2.1)
    assert plan.after[-1] == Piece(512, 1023, 3)
    assert {step.do for step in plan.steps} == {"merge"} and len(plan.steps) == 3
    assert [len(r.ranges) for r in carried_out(route_of(8), plan.steps)] == [8, 7, 6, 5]
    apart = make_plan(route_of(8, shards=("", "b")), loads, merge_cold=True, factor=2.1)
    assert apart.steps == ()


@given(
    st.lists(st.integers(0, 1000), min_size=8, max_size=8),
    st.integers(1, 4),
    st.floats(1.05, 3),
)
def test_no_plan_has_fewer_splits(few: list[int], partitions: int, factor: float) -> None:
    """Against all ways to cut. The load is in eight slots, two in each quarter."""
    loads = [0] * SLOTS
    for n, load in enumerate(few):
        loads[n * 128] = load
    route = route_of(partitions)
    plan = make_plan(route, loads, factor=factor, max_partitions=16)
    total, fixed = sum(few), [r.first_slot for r in route.ranges]
    free = [n * 128 for n in range(1, 8) if n * 128 not in fixed]
    best = None
    for extra in range(len(free) + 1):
        for chosen in combinations(free, extra):
            edges = [*sorted({*fixed, *chosen}), SLOTS]
            heavy = max(sum(loads[a:b]) for a, b in pairwise(edges))
            if best is None and heavy * (len(edges) - 1) <= factor * total:
                best = extra
    if best is None:  # then at least the heaviest slot is not beside another one
        assert not plan.even
        assert max(p.load for p in plan.after) == max(few)
    else:
        assert plan.even and len(plan.steps) == best
    assert sum(p.load for p in plan.after) == total
    assert max(p.load for p in plan.after) <= max(p.load for p in plan.before)
    assert len(carried_out(route, plan.steps)[-1].ranges) == len(plan.after)


@pytest.mark.parametrize(
    "settings", [{"factor": 1}, {"factor": 1e9}, {"max_partitions": 0}, {"max_partitions": 2000}]
)
def test_settings_out_of_range(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidSetting, match="choose"):
        make_plan(route_of(), [1] * SLOTS, **settings)  # type: ignore[arg-type]


# --- how far it is -----------------------------------------------------------------------------------

HEAVY = make_plan(route_of(2), [8] * 512 + [1] * 512, factor=1.2)


def test_steps_that_are_done_are_counted() -> None:
    history = carried_out(route_of(2), HEAVY.steps)
    assert [done_steps(HEAVY, history[: n + 1]) for n in range(len(history))] == list(range(len(history)))


def test_a_change_that_was_turned_back_does_not_count() -> None:
    history = carried_out(route_of(2), HEAVY.steps[:1])
    draft = routes.renew(history[-1], [history[-1].ranges[0].partition_id])
    assert draft is not None
    history.append(history[-1].after(draft.numbered(9, 1, [(900, 900)])))
    assert done_steps(HEAVY, history) == 1


def test_another_change_is_refused() -> None:
    history = carried_out(route_of(2), HEAVY.steps[:1])
    draft = routes.split(history[-1], 1)
    history.append(history[-1].after(draft.numbered(9, 1, [(900, 900), (901, 901)])))
    with pytest.raises(RouteConflict, match="version 3 was not made by it, and the route is at 3 now"):
        done_steps(HEAVY, history)
    moved = routes.move(route_of(2), 0, "b")
    with pytest.raises(RouteConflict, match="version 2 was not made by it"):
        done_steps(HEAVY, [route_of(2), route_of(2).after(moved.numbered(9, 1, [(900, 900)]))])


def test_another_version_or_topic_is_refused() -> None:
    with pytest.raises(
        RouteConflict, match="for version 7 of the route of topic 'orders', and that is at version 1"
    ):
        done_steps(replace(HEAVY, version=7), [route_of(2)])
    other = replace(
        route_of(2), ranges=tuple(replace(r, partition_id=r.partition_id + 1) for r in route_of(2).ranges)
    )
    with pytest.raises(RouteConflict, match="another topic 'orders'"):
        done_steps(HEAVY, [other])


# --- the file ----------------------------------------------------------------------------------------


def test_the_file_has_all_of_it() -> None:
    text = plan_to_text(HEAVY)
    assert plan_from_text(text) == HEAVY
    assert json.loads(text)["postroom_split_plan"] == 1
    at = text.index('"steps"')
    assert text[at:].splitlines()[1] == '    {"do": "split", "first_slot": 0, "last_slot": 511, "at": 171},'


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"postroom_split_plan": 2}, "form 2"),
        ({"version": "1"}, "damaged"),
        ({"colour": "red"}, "not known here: colour"),
        ({"steps": [{"do": "split", "first_slot": 0, "last_slot": 511, "at": 512}]}, "a step has slots"),
        ({"steps": [{"do": "split", "first_slot": 0, "last_slot": 400, "at": 3}]}, "does not fit"),
        ({"steps": [{"do": "burn", "first_slot": 0, "last_slot": 511, "at": 3}]}, "damaged"),
        ({"steps": [{"do": "merge", "first_slot": 0, "last_slot": 511, "at": 3}]}, "does not fit"),
        ({"ranges": []}, "cover each slot once"),
    ],
)
def test_a_file_that_is_no_plan(change: dict[str, object], text: str) -> None:
    fields = {**json.loads(plan_to_text(HEAVY)), **change}
    with pytest.raises(InvalidSetting, match=text):
        plan_from_text(json.dumps(fields))


def test_other_files() -> None:
    for text in ("", "[]", '{"a": 1}', "\x00"):
        with pytest.raises(InvalidSetting, match="no split plan"):
            plan_from_text(text)
    assert isinstance(plan_from_text(plan_to_text(HEAVY).encode()), SplitPlan)
