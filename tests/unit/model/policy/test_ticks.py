"""Ticks of recurring schedules: against a naive search, where clocks change, and what is to be run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from postroom import InvalidSetting
from postroom.model.policy.recurrence import Cadence, Due, cron, due, interval

BERLIN = ZoneInfo("Europe/Berlin")
HOUR, DAY = 3_600_000, 86_400_000


def ms(text: str, zone: ZoneInfo | None = None) -> int:
    moment = datetime.fromisoformat(text)
    return round(moment.replace(tzinfo=moment.tzinfo or zone or UTC).timestamp() * 1000)


def shown(ticks: list[int], zone: ZoneInfo = BERLIN) -> list[str]:
    return [datetime.fromtimestamp(tick / 1000, zone).isoformat(timespec="minutes") for tick in ticks]


def berlin(expression: str) -> Cadence:
    return cron(expression, BERLIN, "Europe/Berlin")


# ---- which ticks there are ----


def test_a_time_of_day_that_is_skipped_comes_right_after_the_gap() -> None:
    """On 29 March 2026 the clocks of Berlin go from 2:00 to 3:00."""
    ticks = list(islice(berlin("30 2 * * *").ticks(ms("2026-03-28T00:00", BERLIN)), 3))
    assert shown(ticks) == ["2026-03-28T02:30+01:00", "2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]


def test_a_time_of_day_that_comes_twice_comes_the_first_time() -> None:
    """On 25 October 2026 the clocks of Berlin go from 3:00 back to 2:00."""
    cadence = berlin("30 2 * * *")
    ticks = list(islice(cadence.ticks(ms("2026-10-24T12:00", BERLIN)), 2))
    assert shown(ticks) == ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]
    # asked from within the hour that comes again: it has been, and does not come again
    within = ms("2026-10-25T02:10+01:00")
    assert cadence.next(within) == ticks[1]
    assert cadence.newest(ticks[0] - 1, within, 5) == ticks[:1]
    assert cadence.newest(ticks[0], within, 5) == []


def test_every_hour_follows_real_time() -> None:
    ticks = list(islice(berlin("0 * * * *").ticks(ms("2026-10-25T01:00", BERLIN)), 4))
    assert shown(ticks) == [
        "2026-10-25T02:00+02:00",
        "2026-10-25T02:00+01:00",
        "2026-10-25T03:00+01:00",
        "2026-10-25T04:00+01:00",
    ]
    spring = list(islice(berlin("*/30 * * * *").ticks(ms("2026-03-29T01:00", BERLIN)), 3))
    assert shown(spring) == ["2026-03-29T01:30+01:00", "2026-03-29T03:00+02:00", "2026-03-29T03:30+02:00"]


def test_a_day_that_a_country_left_out() -> None:
    """Samoa had no 30 December 2011: what was due then is due when that day would have been over."""
    apia = ZoneInfo("Pacific/Apia")
    ticks = list(islice(cron("0 9 * * *", apia, "x").ticks(ms("2011-12-29T00:00", apia)), 3))
    assert shown(ticks, apia) == [
        "2011-12-29T09:00-10:00",
        "2011-12-31T00:00+14:00",
        "2011-12-31T09:00+14:00",
    ]


def naive(expression: str, zone: ZoneInfo, start: int, end: int) -> list[int]:
    """Every minute of real time whose hands match; for "minute hour * * *" and lists and steps of these."""
    minutes, hours = (_values(field, top) for field, top in zip(expression.split(), (60, 24), strict=False))
    fixed = not any(field.startswith("*") for field in expression.split()[:2])
    found, seen = [], set()
    for tick in range(start + 60_000, end + 1, 60_000):
        hands = datetime.fromtimestamp(tick / 1000, zone)
        before = datetime.fromtimestamp(tick / 1000 - 60, zone)
        left_out = fixed and any(
            (moment.hour in hours and moment.minute in minutes)
            for moment in _gap(before.replace(tzinfo=None), hands.replace(tzinfo=None))
        )
        again = fixed and hands.fold and hands.replace(tzinfo=None) in seen
        if ((hands.hour in hours and hands.minute in minutes) and not again) or left_out:
            found.append(tick)
        seen.add(hands.replace(tzinfo=None))
    return found


def _values(field: str, top: int) -> set[int]:
    if field.startswith("*"):
        return set(range(0, top, int(field[2:] or 1)))
    return {int(part) for part in field.split(",")}


def _gap(before: datetime, after: datetime) -> list[datetime]:
    minutes = round((after - before) / timedelta(minutes=1)) - 1
    return [before + timedelta(minutes=n + 1) for n in range(max(0, minutes))]


lists = st.lists(st.integers(0, 23), min_size=1, max_size=3).map(lambda some: ",".join(map(str, some)))
fields = st.one_of(lists, st.sampled_from(["*", "*/5", "*/7"]))
CHANGES = [
    ("Europe/Berlin", "2026-03-29T01:00+00:00"),
    ("Europe/Berlin", "2026-10-25T01:00+00:00"),
    ("America/New_York", "2026-11-01T06:00+00:00"),
    ("Australia/Lord_Howe", "2026-04-04T15:00+00:00"),
    ("Australia/Lord_Howe", "2026-10-03T15:30+00:00"),
    ("Asia/Kolkata", "2026-03-29T01:00+00:00"),
]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CHANGES), fields, fields, st.integers(-300, 300), st.integers(1, 600))
def test_ticks_are_those_of_a_naive_search(
    change: tuple[str, str], minute: str, hour: str, before: int, length: int
) -> None:
    """Around changes of clocks, also asked from within them."""
    zone = ZoneInfo(change[0])
    start = ms(change[1]) + before * 60_000
    end = start + length * 60_000
    expression = f"{minute} {hour} * * *"
    if (
        "Lord_Howe" in change[0]
    ):  # moved by half an hour: cronsim is off by one tick there, that night, for `*`
        assume("*" not in minute + hour)
    cadence = cron(expression, zone, change[0])
    # the naive search has to know what came before: it begins a day earlier
    expected = [tick for tick in naive(expression, zone, start - DAY, end) if tick > start]
    assert cadence.newest(start, end, 10_000) == expected
    assert cadence.newest(start, end, 2) == expected[-2:]
    if expected:
        assert cadence.next(start) == expected[0]


def test_durations_tick_at_the_same_moments_for_everybody() -> None:
    cadence = interval(600_000)
    assert cadence.next(ms("2026-01-01T00:00")) == ms("2026-01-01T00:10")
    assert cadence.next(ms("2026-01-01T00:09:59.999")) == ms("2026-01-01T00:10")
    assert cadence.newest(0, ms("2026-01-01T00:25"), 2) == [ms("2026-01-01T00:10"), ms("2026-01-01T00:20")]


def test_seconds_and_years() -> None:
    zone = ZoneInfo("UTC")
    assert cron("*/10 * * * * *", zone, "UTC").next(ms("2026-01-01T00:00:05")) == ms("2026-01-01T00:00:10")
    leap = cron("0 0 29 2 *", zone, "UTC")
    assert leap.next(ms("2026-01-01T00:00")) == ms("2028-02-29T00:00")
    assert leap.newest(0, ms("2027-01-01T00:00"), 2) == [ms("2020-02-29T00:00"), ms("2024-02-29T00:00")]


@pytest.mark.parametrize("wrong", ["", "* * * *", "61 * * * *", "0 0 31 2 *", "so often", "* * * * * * *"])
def test_what_is_no_cron_expression(wrong: str) -> None:
    with pytest.raises(InvalidSetting, match=r"cron expression|never comes"):
        cron(wrong, BERLIN, "Europe/Berlin")


def test_too_often() -> None:
    with pytest.raises(InvalidSetting, match="at least a second"):
        interval(999)


# ---- what is to be run ----

NIGHTLY = cron("0 2 * * *", ZoneInfo("UTC"), "UTC")
T1, T2, T3 = (ms(f"2026-01-0{day}T02:00") for day in (1, 2, 3))


def ask(last: int, now: int, missed: str, most: int = 1000) -> Due:
    return due(NIGHTLY, last, now, missed, late_ms=60_000, most=most)  # type: ignore[arg-type]


@pytest.mark.parametrize("missed", ["skip", "once", "all"])
@pytest.mark.parametrize("late", [0, 1, 60_000])
def test_a_tick_that_just_came_is_run(missed: str, late: int) -> None:
    assert ask(T1, T2 - 1, missed) == Due((), T1, False)
    assert ask(T1, T2 + late, missed) == Due((T2,), T2, False)
    assert ask(T2, T2 + late, missed) == Due((), T2, False)


@pytest.mark.parametrize(
    ("missed", "now", "expected"),
    [
        ("skip", T3 + HOUR, Due((), T3, True, skipped=T3)),
        ("skip", T3 + 60_001, Due((), T3, True, skipped=T3)),
        ("skip", T3 + 1, Due((T3,), T3, False)),  # the ones before were missed
        ("once", T3 + HOUR, Due((T3,), T3, True)),
        ("once", T3 + 1, Due((T3,), T3, False)),
        ("all", T3 + HOUR, Due((T2, T3), T3, True)),
        ("all", T2 + 60_001, Due((T2,), T2, True)),
    ],
)
def test_ticks_that_nobody_ran(missed: str, now: int, expected: Due) -> None:
    assert ask(T1, now, missed) == expected


def test_of_all_that_were_missed_the_newest_are_run() -> None:
    assert ask(0, T3 + HOUR, "all", most=2).run == (T2, T3)


def test_an_unknown_word() -> None:
    with pytest.raises(InvalidSetting, match="'skip', 'once' or 'all'"):
        ask(T1, T2, "never")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 2 * DAY), max_size=20), st.sampled_from(["skip", "once", "all"]))
def test_however_often_it_is_asked_no_tick_is_run_twice_and_no_order_is_lost(
    steps: list[int], missed: str
) -> None:
    now = last = T1
    ran: list[int] = []
    for step in steps:
        now += step
        found = ask(last, now, missed)
        ran += found.run
        last = found.last
    expected = NIGHTLY.newest(T1, now, 1000)
    assert ran == sorted(set(ran)) and set(ran) <= set(expected)
    if missed == "all":
        assert ran == expected
    if missed == "once" and expected:
        assert ran[-1] == expected[-1]
