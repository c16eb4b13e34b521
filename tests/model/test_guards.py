"""What guards decide, against the naive answer (R33)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import InvalidSetting
from postroom.model.policy.guards import Fit, Machine, digest_of, fit, is_newer, take_turn

versions = st.lists(st.integers(-2, 12), max_size=60)


@given(came=versions, room=st.integers(0, 12), first=st.integers(-1, 2))
def test_each_version_is_handled_once_and_in_order(came: list[int], room: int, first: int) -> None:
    following, waiting, handled = first, set[int](), list[int]()
    for version in came:
        turn = take_turn(following, version, waiting, room)
        if turn.full:  # nothing changes: it comes again
            assert version > following
            assert version not in waiting
            assert len(waiting) == room
            assert turn.following == following
            continue
        handled += [version] * turn.handled + list(turn.released)
        waiting = (waiting | ({version} if turn.waits else set())) - set(turn.released)
        following = turn.following
        assert handled == list(range(first, following))
        assert all(early > following for early in waiting)
        assert len(waiting) <= room
    fitted = first
    while room >= 12 and fitted in came:  # with room for all nothing is left behind
        fitted += 1
    assert room < 12 or following == fitted


def test_a_turn_in_the_words_of_its_docstring() -> None:
    turn = take_turn(3, 3, {4, 5, 7}, 10)
    assert (turn.handled, turn.released, turn.following, turn.waits) == (True, (4, 5), 6, False)


@given(came=versions)
def test_the_newest_is_never_followed_by_an_older_one(came: list[int]) -> None:
    stored: int | None = None
    handled = []
    for version in came:
        if is_newer(stored, version):
            stored = version
            handled.append(version)
    assert handled == sorted(set(handled))
    assert stored == max(came, default=None)


@given(st.lists(st.text() | st.binary()), st.lists(st.text() | st.binary()))
def test_different_parts_have_different_digests(one: list[str | bytes], other: list[str | bytes]) -> None:
    assert (digest_of(*one) == digest_of(*other)) == (one == other)
    assert len(digest_of(*one)) == 32


def test_a_machine_by_states_or_by_events() -> None:
    by_states = Machine({"created": None, "paid": "created", "cancelled": ["created", "paid"]})
    by_events = Machine(
        {(None, "create"): "created", ("created", "pay"): "paid", ("paid", "undo"): "created"}
    )
    assert by_states.after(None, "created") == "created"
    assert by_states.after("paid", "cancelled") == "cancelled"
    assert by_states.after("cancelled", "paid") is None
    assert by_states.after(None, "shipped") is None
    assert by_events.after("paid", "undo") == "created"
    assert by_events.events == {"create", "pay", "undo"}


@pytest.mark.parametrize(
    "rules",
    [
        {}, [], None, {"paid": 3}, {"": "created"}, {3: "created"}, {"paid": {3}}, {("a",): "b"},
        {("a", "b"): None}, {("a", 3): "b"}, {("a", "b"): "c", "d": "e"}, {"x" * 201: "created"},
    ],
)  # fmt: skip
def test_other_machines_are_refused(rules: object) -> None:
    with pytest.raises(InvalidSetting, match="a state machine is"):
        Machine(rules)  # type: ignore[arg-type]


ORDER = Machine(
    {
        "created": None, "paid": "created", "cancelled": {"created", "paid"}, "shipped": "paid",
        "delivered": "shipped",
    }
)  # fmt: skip
LAMP = Machine({"on": {None, "off"}, "off": "on"})


def test_what_does_not_fit_is_handed_back_a_few_times() -> None:
    found = [fit(ORDER, None, "paid", attempt, 2) for attempt in (1, 2, 3)]
    assert found == [Fit.LATER, Fit.LATER, Fit.GIVEN_UP]
    assert fit(ORDER, "created", "paid", 99, 2) is Fit.FITS
    assert fit(ORDER, None, "paid", 1, 0) is Fit.GIVEN_UP


@pytest.mark.parametrize(
    ("machine", "state", "event", "expected"),
    [
        (ORDER, "paid", "paid", Fit.REPEATED),
        (ORDER, "delivered", "created", Fit.REPEATED),
        (ORDER, "delivered", "paid", Fit.REPEATED),
        (ORDER, "cancelled", "cancelled", Fit.REPEATED),
        (ORDER, "cancelled", "created", Fit.REPEATED),
        (ORDER, "cancelled", "paid", Fit.NEVER),  # it may have been paid, or not: somebody has to look
        (ORDER, "cancelled", "shipped", Fit.NEVER),
        (ORDER, "shipped", "cancelled", Fit.NEVER),
        (ORDER, None, "delivered", Fit.LATER),
        (ORDER, None, "flown", Fit.NEVER),
        (ORDER, "on hold", "flown", Fit.NEVER),
        (ORDER, "on hold", "paid", Fit.LATER),  # who set a state that no rule has may set another
        (LAMP, "on", "on", Fit.LATER),  # the third of on, off, on may come before the second
        (LAMP, None, "off", Fit.LATER),
        (Machine({"paid": "created", "shipped": "paid"}), None, "shipped", Fit.LATER),  # not made yet
        (Machine({"paid": "created", "shipped": "paid"}), "shipped", "paid", Fit.REPEATED),
        (Machine({"paid": "created", "shipped": "paid"}), "created", "paid", Fit.FITS),
        (Machine({("new", "pay"): "paid", ("new", "give"): "paid"}), "paid", "pay", Fit.NEVER),
    ],
)  # fmt: skip
def test_an_event_that_does_not_fit_is_early_repeated_or_impossible(
    machine: Machine, state: str | None, event: str, expected: Fit
) -> None:
    assert fit(machine, state, event, 1, 5) is expected


@given(
    st.dictionaries(
        st.tuples(st.none() | st.sampled_from("abcd"), st.sampled_from("xyz")), st.sampled_from("abcd"),
        min_size=1,
    ),
    st.lists(st.sampled_from("xyz"), max_size=6),
    st.lists(st.sampled_from("xyz"), max_size=6),
)  # fmt: skip
def test_a_repeat_has_happened_and_what_never_fits_does_not(
    moves: dict[tuple[str | None, str], str], before: list[str], later: list[str]
) -> None:
    machine, state, happened = Machine(moves), None, set[str]()
    for event in before:
        if (after := machine.after(state, event)) is not None:
            state = after
            happened.add(event)
    verdicts = {event: fit(machine, state, event, 1, 5) for event in machine.events}
    for event in later:
        assert verdicts.get(event) not in (Fit.REPEATED, Fit.NEVER) or machine.after(state, event) is None
        state = machine.after(state, event) or state
    assert {event for event, verdict in verdicts.items() if verdict is Fit.REPEATED} <= happened
