"""Slow lanes: which sources are slow, when they return, how fast the lane is read (R42)."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import GroupConflict, InvalidSetting
from postroom.model.policy import slow_lane as lanes
from postroom.model.policy.settings import GroupSettings, GroupWish
from postroom.model.policy.slow_lane import (
    MOST_SOURCES,
    NO_LANE,
    Changes,
    LanePolicy,
    Pace,
    Seen,
    SlowLane,
    SlowSource,
    as_policy,
    decide,
    room,
    source_name,
    spent,
)

POLICY = LanePolicy(failures=0.5, handling_ms=1000, at_least=4, window_ms=60_000, clean_ms=120_000)
NOW = 1_700_000_000_000
SLOW = SlowSource("a", NOW, "4 of 4 messages failed", NOW)


# ---- the policy ----


def test_what_a_user_asks_for() -> None:
    assert as_policy(None) is None
    assert as_policy(False) is NO_LANE and not NO_LANE.on
    assert as_policy(True) == LanePolicy(failures=0.5)
    asked = SlowLane(failures=None, handling="5s", window=30, clean="10m", share=0.25, header="tenant")
    assert as_policy(asked) == LanePolicy(0, 5000, 20, 30_000, 600_000, 0.25, "tenant")


@pytest.mark.parametrize(
    "wrong",
    [
        {"failures": 1.5}, {"failures": -0.1}, {"failures": True}, {"failures": "half"}, {"share": 0},
        {"share": 2}, {"at_least": 0}, {"at_least": 1.5}, {"window": "1ms"}, {"clean": 0}, {"header": ""},
        {"header": 7}, {"failures": None}, {"handling": "soon"}, {"window": "2d"},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        SlowLane(**wrong)  # type: ignore[arg-type]


def test_what_is_no_lane_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="SlowLane"):
        as_policy("yes")  # type: ignore[arg-type]


def test_groups_that_hand_out_in_order_have_none() -> None:
    for mode in ("ordered", "broadcast"):
        with pytest.raises(InvalidSetting, match="shared"):
            GroupSettings(mode=mode, slow_lane=POLICY)  # type: ignore[arg-type]


def test_a_consumer_that_asks_for_another_lane_is_told() -> None:
    settings = GroupSettings(slow_lane=POLICY)
    GroupWish().check(settings, topic="t", group="g")
    GroupWish(slow_lane=POLICY).check(settings, topic="t", group="g")
    with pytest.raises(GroupConflict, match="slow_lane"):
        GroupWish(slow_lane=NO_LANE).check(settings, topic="t", group="g")
    assert GroupWish(slow_lane=NO_LANE).over(settings) == GroupSettings()


# ---- which are slow ----


@pytest.mark.parametrize(
    ("seen", "slow"),
    [
        (Seen("a", 4, 2), True),
        (Seen("a", 4, 1), False),
        (Seen("a", 3, 3), False),  # too few
        (Seen("a", 4, 0, 4001), True),
        (Seen("a", 4, 0, 4000), False),
        (Seen("a", 100, 49, 100_000), False),
        (Seen("a", 100, 50), True),
    ],
)
def test_failures_and_handling_time_decide(seen: Seen, slow: bool) -> None:
    found = decide(POLICY, NOW, {}, {"a": seen}, {"a": seen})
    assert [one.source for one in found.put] == (["a"] if slow else [])


def test_what_is_not_asked_for_is_not_looked_at() -> None:
    failing, long = Seen("a", 9, 9), Seen("b", 9, 0, 900_000)
    counted = {"a": failing, "b": long}
    only_time = decide(replace(POLICY, failures=0), NOW, {}, counted, counted)
    only_failures = decide(replace(POLICY, handling_ms=0), NOW, {}, counted, counted)
    assert ([o.source for o in only_time.put], [o.source for o in only_failures.put]) == (["b"], ["a"])


def test_a_source_that_fails_on_stays_and_does_not_begin_anew() -> None:
    later = NOW + 500_000
    found = decide(POLICY, later, {"a": SLOW}, {"a": Seen("a", 99, 99)}, {"a": Seen("a", 9, 1)})
    assert found == Changes(put=(replace(SLOW, failed_at=later),))


def test_it_returns_when_it_was_clean_for_long_enough_and_something_was_handled() -> None:
    good, none = {"a": Seen("a", 1)}, dict[str, Seen]()
    early, due = NOW + POLICY.clean_ms - 1, NOW + POLICY.clean_ms
    assert decide(POLICY, early, {"a": SLOW}, good, good) == Changes(put=(replace(SLOW, handled_at=early),))
    assert decide(POLICY, due, {"a": SLOW}, none, none) == Changes()  # nothing was handled
    assert decide(POLICY, due, {"a": SLOW}, good, good) == Changes(drop=("a",))
    assert decide(POLICY, due, {"a": replace(SLOW, handled_at=early)}, none, none) == Changes(drop=("a",))
    relapsed = replace(SLOW, handled_at=early, failed_at=early)
    assert decide(POLICY, due + 10**6, {"a": relapsed}, none, none) == Changes()


def test_a_source_that_is_never_heard_of_again_is_forgotten() -> None:
    assert decide(POLICY, NOW + 2 * 86_400_000, {"a": SLOW}, {}, {}) == Changes(drop=("a",))


def test_without_a_policy_all_return() -> None:
    assert decide(NO_LANE, NOW, {"a": SLOW}, {"b": Seen("b", 9, 9)}, {}) == Changes(drop=("a",))


def test_not_more_are_slow_than_may_be() -> None:
    counted = {f"s{n}": Seen(f"s{n}", 9, 9) for n in range(MOST_SOURCES)}
    found = decide(POLICY, NOW, {"a": SLOW}, counted, counted)
    assert len(found.put) == MOST_SOURCES - 1


@given(st.lists(st.tuples(st.integers(0, 30_000), st.booleans()), max_size=80))
def test_as_one_who_remembers_every_message_would_decide(steps: list[tuple[int, bool]]) -> None:
    """Against a plain list of moments: slow no later than the exact window says, and never without cause."""
    policy, now = LanePolicy(failures=0.5, at_least=5, window_ms=60_000), NOW
    exact: deque[tuple[int, bool]] = deque()
    buckets: dict[int, Seen] = {}
    for step, failed in steps:
        now += step
        exact.append((now, failed))
        at, one = lanes.bucket_of(policy, now), Seen("a", 1, int(failed))
        buckets[at] = one if at not in buckets else buckets[at] + one
        since = lanes.window_start(policy, now)
        counted = lanes.total(seen for begins, seen in buckets.items() if begins >= since)
        kept = [bad for moment, bad in exact if moment >= since]
        assert (counted["a"].handled, counted["a"].failed) == (len(kept), sum(kept))
        assert now - policy.window_ms >= since >= now - policy.window_ms * 7 // 6  # what the window is
        slow = bool(decide(policy, now, {}, counted, {}).put)
        assert slow == (len(kept) >= 5 and 2 * sum(kept) >= len(kept))


# ---- names ----


@given(st.one_of(st.text(max_size=300), st.binary(max_size=300)))
def test_any_name_can_be_kept(value: str | bytes) -> None:
    name = source_name(value)
    assert len(name) <= 100 and name.isprintable() and name == source_name(value)


def test_long_names_stay_apart() -> None:
    assert source_name(b"x" * 200 + b"1") != source_name(b"x" * 200 + b"2")
    assert source_name("a\0") != source_name("a?") == "a?"
    assert source_name(b"web") == source_name("web") == "web"


# ---- how fast the lane is read ----


@pytest.mark.parametrize(("share", "handlers", "slots"), [(0.1, 1, 1), (0.1, 8, 1), (0.25, 8, 2), (1, 8, 8)])
def test_handlers_that_the_lane_may_have_at_once(share: float, handlers: int, slots: int) -> None:
    pace = Pace(share, handlers)
    assert room(pace, 0, 0) == slots
    assert room(pace, 0, slots) == 0 == room(pace, 0, slots + 5)


@given(
    st.sampled_from([0.05, 0.1, 0.5, 1.0]),
    st.integers(1, 40),
    st.lists(st.integers(0, 20_000), min_size=1, max_size=40),
)
def test_the_lane_takes_its_share_of_the_time_and_is_never_stuck(
    share: float, handlers: int, times: list[int]
) -> None:
    """One after the other, each as soon as it may: within what passed, a share, a saving, and one message."""
    pace, now, used = Pace(share, handlers), 0.0, 0.0
    for ms in times:
        now = max(now, pace.free_at)
        assert room(pace, now, 0) >= 1
        now += ms
        used += ms
        pace = spent(pace, now, 1, ms)
        assert used <= share * handlers * (now + 1_000) + max(times) + 1e-6


def test_quick_messages_are_taken_several_at_once_and_long_ones_one_by_one() -> None:
    quick = spent(Pace(0.1, 8), 1e6, 10, 10)
    assert room(quick, 1e6, 0) == 8
    long = spent(quick, 1e6, 1, 60_000)
    assert room(long, 1e6, 0) == 0
    assert room(long, long.free_at, 0) == 1
