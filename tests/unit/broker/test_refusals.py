"""Log lines about refusals: some of each kind in a minute, the rest as a number."""

from __future__ import annotations

import logging

import pytest

from postroom.broker.access import SHOWN, Refusals

log = logging.getLogger("postroom.test")


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def refusals(now: list[float]) -> Refusals:
    return Refusals(lambda: now[0])


def test_a_flood_is_some_lines_and_a_number(
    refusals: Refusals, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1234 + SHOWN):
        refusals.say("greeting", log, "refused %d", number)
        now[0] += 0.01
    assert [record.getMessage() for record in caplog.records] == [f"refused {n}" for n in range(SHOWN)]
    caplog.clear()
    now[0] += 60
    refusals.tick()
    assert [record.getMessage() for record in caplog.records] == [
        "… and 1,234 more refused greetings in the last minute"
    ]
    caplog.clear()
    refusals.tick()
    assert caplog.records == []


def test_each_minute_and_each_kind_has_its_lines(
    refusals: Refusals, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("greeting", "http"):
        for _ in range(SHOWN + 1):
            refusals.say(kind, log, "refused")
    assert len(caplog.records) == 2 * SHOWN
    now[0] += 60
    refusals.say("greeting", log, "the next minute")
    said = [record.getMessage() for record in caplog.records[2 * SHOWN :]]
    assert said == [
        "… and 1 more refused greetings in the last minute",
        "… and 1 more refused requests over HTTP in the last minute",
        "the next minute",
    ]


def test_few_are_shown_as_they_are_and_nothing_is_added(
    refusals: Refusals, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(SHOWN):
        refusals.say("http", log, "refused")
    now[0] += 61
    refusals.tick()
    assert len(caplog.records) == SHOWN
