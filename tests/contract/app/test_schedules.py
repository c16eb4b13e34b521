"""Schedules as the queue knows them: rule, next and last runs, and who runs them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from postroom import App, Connection
from postroom.client.app.recurring import Ticker
from postroom.client.consumer.schedules import cadence_of
from postroom.clock import ManualClock
from postroom.testing.fixture import run_until_idle
from tests.contract.stores import Open, everywhere

MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(round(MIDNIGHT.timestamp() * 1000))


def an_app(mq: Connection, when: str = "0 2 * * *", fails: bool = False) -> App:
    app = App(mq)

    @app.every(when, timezone="Europe/Berlin", max_attempts=1, name="nightly")
    async def run(tick: datetime) -> None:
        if fails:
            raise ValueError("no paper")

    @app.every("10m", name="refresh")
    async def refresh() -> None: ...

    return app


def ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


@everywhere
async def test_a_schedule_is_listed_with_its_rule_and_its_next_runs(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        assert await mq.schedules() == []
        app = an_app(mq)
        await run_until_idle(app)
        nightly, refresh = await mq.schedules()
        assert (nightly.name, nightly.topic) == ("nightly", "every.nightly")
        assert (nightly.rule, nightly.timezone) == ("0 2 * * *", "Europe/Berlin")
        first = MIDNIGHT + timedelta(hours=1)
        assert [*nightly.next_ms] == [ms(first + timedelta(days=n)) for n in range(3)]
        assert nightly.next == first and nightly.last is None
        assert (refresh.rule, refresh.timezone, refresh.last_ms) == ("every 10m", "", None)
        clock.advance(3 * 3600)
        await run_until_idle(app)
        nightly, refresh = await mq.schedules()
        assert nightly.last == first and refresh.last == MIDNIGHT + timedelta(hours=3)
        assert not nightly.missed and (nightly.pending, nightly.dead) == (0, 0)


async def test_it_says_who_runs_a_schedule_and_that_nobody_does(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        app = an_app(mq)
        async with app:
            await Ticker(mq, app.schedules[0]).step()
            found = (await mq.schedules())[0]
            members = (await mq.groups("every.nightly"))[0].members
            assert members and found.workers == tuple(sorted({one.client for one in members}))
        assert (await mq.schedules())[0].workers == ()
        clock.advance(2 * 3600)
        assert (await mq.schedules())[0].missed


async def test_a_run_that_failed_for_good_is_counted(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        app = an_app(mq, fails=True)
        await run_until_idle(app)
        clock.advance(2 * 3600)
        await run_until_idle(app)
        assert (await mq.schedules())[0].dead == 1


async def test_the_newest_rule_counts_and_what_is_sent_by_hand_is_a_run(
    opened: Open, clock: ManualClock
) -> None:
    async with opened() as mq:
        await run_until_idle(an_app(mq))
        clock.advance(60)
        await run_until_idle(an_app(mq, "30 4 * * *"))
        clock.advance(60)
        await mq.send("every.nightly", b"")
        nightly = (await mq.schedules())[0]
        assert nightly.rule == "30 4 * * *" and nightly.last_ms == clock.now_ms() and not nightly.missed


async def test_nonsense_in_a_topic_of_runs_is_shown_and_breaks_nothing(opened: Open) -> None:
    async with opened() as mq:
        await mq.create_topic("every.odd", partitions=2)
        assert (await mq.schedules())[0].rule == ""
        for text in (
            "x" * 9_000,
            "every 1ms",
            "every -5ms",
            "0 0 30 2 * UTC",
            "* * * * * Mars/Base",
            "",
            "\xff",
        ):
            await mq.send("every.odd", b"\xff\xfe", headers={"cadence": text})
            (odd,) = await mq.schedules()
            assert odd.next_ms == () and len(odd.rule) <= 200 and odd.workers == ()
        await mq.send("every.odd", b"9999-12-31T23:59:59+00:00", headers={"cadence": "* * * * * UTC"})
        assert len((await mq.schedules())[0].next_ms) == 3


def test_a_cadence_is_told_by_its_text() -> None:
    hourly, often = cadence_of("0 * * * * UTC"), cadence_of("every 90000ms")
    assert hourly is not None and (hourly.text, hourly.rule) == ("0 * * * * UTC", "0 * * * *")
    assert often is not None and (often.text, often.rule) == ("every 90000ms", "every 1m 30s")
    assert cadence_of("*/10 * * * * * UTC") is not None
