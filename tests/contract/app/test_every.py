"""Recurring schedules: one run per tick, however many workers, and missed ticks as declared."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import postroom
from postroom import App, Connection, InvalidName, InvalidSetting, StoreBusy, UnknownGroup, UsageError
from postroom.client.app.recurring import Ticker, prepare
from postroom.clock import ManualClock
from postroom.testing.fixture import run_until_idle
from tests.contract.stores import Open, everywhere, only_file

MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)
LONG = 30


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(round(MIDNIGHT.timestamp() * 1000))


def hours(*numbers: int) -> list[datetime]:
    return [MIDNIGHT + timedelta(hours=n) for n in numbers]


def hourly(mq: Connection, missed: str = "skip", when: str = "0 * * * *") -> tuple[App, list[datetime]]:
    """An app, and the ticks that it has run."""
    app, ran = App(mq), []

    @app.every(when, missed=missed, name="hourly")  # type: ignore[arg-type]
    async def run(tick: datetime) -> None:
        ran.append(tick)

    return app, ran


async def stored(mq: Connection, topic: str = "every.hourly") -> list[str]:
    return [message.id async for message in mq.read(topic)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Look until something that nobody signals is so."""
    async with asyncio.timeout(LONG):
        for _ in itertools.count():
            if await condition():
                return
            await asyncio.sleep(0.01)


async def has_run(mq: Connection, ran: list[datetime], ticks: list[datetime]) -> bool:
    """Run, and settled: who moves the clock before that ends the lease."""
    return ran[len(ran) - len(ticks) :] == ticks and await left(mq) == 0


async def left(mq: Connection) -> int:
    return (await mq.lag("every.hourly", "every")).total.messages


# ---- one run per tick ----


async def both_ran(mq: Connection, apps: list[tuple[App, list[datetime]]], count: int) -> bool:
    return sum(len(ran) for _, ran in apps) >= count and await left(mq) == 0


@everywhere
async def test_two_workers_run_each_tick_once(opened: Open, clock: ManualClock) -> None:
    async with opened() as one, opened() as other:
        apps = [hourly(one), hourly(other)]
        async with apps[0][0], apps[1][0]:
            await until_marked(one)
            for hour in range(1, 4):
                clock.advance(3600)
                await until(lambda: both_ran(one, apps, hour))  # noqa: B023 — awaited here
        assert sorted(apps[0][1] + apps[1][1]) == hours(1, 2, 3)
        assert len(await stored(one)) == 3


@only_file
@pytest.mark.parametrize("missed", ["skip", "once", "all"])
async def test_many_who_start_at_once_after_a_long_time(
    opened: Open, clock: ManualClock, missed: str
) -> None:
    """All read the same topic and send the same ids, in whatever order."""
    async with opened() as mq:
        app, _ = hourly(mq, missed)
        await run_until_idle(app)
        clock.advance(5 * 3600 + 1800)
        tickers = [Ticker(mq, app.schedules[0]) for _ in range(5)]
        assert set(await asyncio.gather(*(ticker.step() for ticker in tickers))) == {
            clock.now_ms() + 1_800_000
        }
        expected = {"skip": [], "once": hours(5), "all": hours(1, 2, 3, 4, 5)}[missed]
        assert await stored(mq) == [f"hourly@{tick.isoformat()}" for tick in expected]


@only_file
async def test_a_worker_that_slept_for_longer_than_ids_are_remembered(
    opened: Open, clock: ManualClock
) -> None:
    """It looks into the topic before it sends what others ran long ago."""
    async with opened() as mq:
        app, ran = hourly(mq, "all")
        await run_until_idle(app)
        sleeper = Ticker(mq, app.schedules[0])
        await sleeper.step()
        for _ in range(72):
            clock.advance(3600)
            await run_until_idle(app)
        assert ran == hours(*range(1, 73))
        await sleeper.step()
        await run_until_idle(app)
        assert len(ran) == 72


# ---- missed ticks ----


@only_file
@pytest.mark.parametrize(
    ("missed", "late", "expected"),
    [
        ("skip", 3600, []),
        ("skip", 30, hours(3)),  # a restart over a tick is no miss
        ("once", 1800, hours(3)),
        ("all", 1800, hours(1, 2, 3)),
    ],
)
async def test_ticks_that_came_while_nobody_ran(
    opened: Open, clock: ManualClock, missed: str, late: int, expected: list[datetime]
) -> None:
    async with opened() as mq:
        app, ran = hourly(mq, missed)
        async with app:
            await until_marked(mq)
        clock.advance(3 * 3600 + (late if late < 3600 else 1800))
        async with app:
            await until(lambda: has_run(mq, ran, expected))
            clock.advance(
                3600 - clock.now_ms() // 1000 % 3600
            )  # the next one, on time, shows that no more come
            await until(lambda: has_run(mq, ran, hours(4)))
        assert sorted(ran) == [*expected, *hours(4)]


async def until_marked(mq: Connection) -> None:
    """Wait until a new schedule has left its mark: nobody is shown it, but it takes an offset."""

    async def marked() -> bool:
        with suppress(UnknownGroup):  # it is being made
            return (await mq.lag("every.hourly", "every")).partitions[0].end > 0
        return False

    await until(marked)


@only_file
async def test_a_new_schedule_has_missed_nothing_and_an_old_one_what_came_since(
    opened: Open, clock: ManualClock
) -> None:
    """A worker that died before the first tick left a mark: the tick was missed, not unheard of."""
    async with opened() as mq:
        app, ran = hourly(mq, "all")
        await prepare(mq, app.schedules)
        await Ticker(mq, app.schedules[0]).step()
        assert await stored(mq) == []  # the mark is shown to nobody
        clock.advance(2 * 3600)
        await run_until_idle(app)
        assert ran == hours(1, 2)


@only_file
async def test_a_changed_expression_counts_from_its_start(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        old, ran_old = hourly(mq, "all")
        await run_until_idle(old)
        clock.advance(3600)
        await run_until_idle(old)
        clock.advance(10 * 3600)
        new, ran_new = hourly(mq, "all", when="30 * * * *")
        await run_until_idle(new)
        assert ran_new == []  # not the half hours since the last run
        clock.advance(3600)
        await run_until_idle(new)
        assert ran_new == [MIDNIGHT + timedelta(hours=11, minutes=30)]
        # and back again, to an expression whose last run was long ago
        back, ran_back = hourly(mq, "all")
        await run_until_idle(back)
        clock.advance(3600)
        await run_until_idle(back)
        assert (ran_old, ran_back) == (hours(1), hours(13))


@only_file
async def test_both_run_while_a_change_is_rolled_out(opened: Open, clock: ManualClock) -> None:
    """Nobody stops anybody, and a tick that both have runs once."""
    async with opened() as mq:
        old, ran_old = hourly(mq)
        new, ran_new = hourly(mq, when="0,30 * * * *")
        tickers = [Ticker(mq, app.schedules[0]) for app in (old, new)]
        await prepare(mq, old.schedules)
        for _ in range(3):
            for ticker in tickers:
                await ticker.step()
            clock.advance(1800)
        await run_until_idle(old)
        assert ran_old == [MIDNIGHT + timedelta(minutes=30), *hours(1)] and ran_new == []


# ---- a run is a message ----


@only_file
async def test_a_run_that_fails_is_retried_and_ends_as_a_dead_letter(
    opened: Open, clock: ManualClock
) -> None:
    async with opened() as mq:
        app, attempts = App(mq), []

        @app.every("1h", max_attempts=2)
        def report(tick: datetime, message: Any) -> None:
            attempts.append((tick, message.attempt))
            raise ValueError("no paper")

        await run_until_idle(app)
        for step in (3600, 1, 10):
            clock.advance(step)
            await run_until_idle(app)
        assert attempts == [(hours(1)[0], 1), (hours(1)[0], 2)]
        (letter,) = await mq.dead_letters("every.report", "every")
        assert letter.reason == "ValueError: no paper" and letter.id == "report@2026-01-01T01:00:00+00:00"


@only_file
async def test_a_run_by_hand_and_functions_that_take_nothing(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        app, ran = App(mq), []

        @app.every("0 2 * * *", timezone="Asia/Tokyo")
        async def nothing() -> None:
            ran.append("nothing")

        @app.every("0 2 * * *", timezone="Asia/Tokyo", name="with-tick")
        async def asks(when: datetime) -> None:
            ran.append(str(when.tzinfo))

        await run_until_idle(app)
        await mq.send("every.nothing", b"")
        await mq.send("every.with-tick", b"now, please")
        await run_until_idle(app)
        assert sorted(ran) == ["Asia/Tokyo", "nothing"]
        assert app.schedules[0].next(MIDNIGHT).isoformat() == "2026-01-02T02:00:00+09:00"
        assert [s.topic for s in app.schedules] == ["every.nothing", "every.with-tick"]
        clock.advance(86_400)
        assert (await run_until_idle(app)).handled == 2


# ---- failures ----


@only_file
async def test_a_store_that_is_away_over_a_tick(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        app, ran = hourly(mq)
        endpoint: Any = mq._endpoint
        append, refused = endpoint.append, asyncio.Event()

        async def away(*args: Any, **options: Any) -> Any:
            refused.set()
            raise StoreBusy("away")

        async with app:
            await until_marked(mq)
            endpoint.append, endpoint.append_soon = away, lambda *args: False
            clock.advance(3600)
            await asyncio.wait_for(refused.wait(), LONG)
            endpoint.append = append
            await until(lambda: has_run(mq, ran, hours(1)))


@only_file
async def test_stopping_does_not_wait_for_a_store_that_is_away(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        app, _ = hourly(mq)
        endpoint: Any = mq._endpoint
        append, asked, back = endpoint.append, asyncio.Event(), asyncio.Event()

        async def hangs(*args: Any, **options: Any) -> Any:
            asked.set()
            await back.wait()
            return await append(*args, **options)

        await app.start()
        await until_marked(mq)
        endpoint.append, endpoint.append_soon = hangs, lambda *args: False
        clock.advance(3600)
        await asyncio.wait_for(asked.wait(), LONG)
        stopping = asyncio.create_task(app.stop())
        done, _pending = await asyncio.wait((stopping,), timeout=LONG / 2)  # a send gives up after 30 seconds
        back.set()
        assert done
        assert not app.running


@only_file
async def test_a_tick_of_a_clock_that_was_wrong_decides_nothing(opened: Open, clock: ManualClock) -> None:
    async with opened() as mq:
        app, ran = hourly(mq)
        await run_until_idle(app)
        cadence = app.schedules[0].cadence.text
        await mq.send("every.hourly", b"2031-01-01T00:00:00+00:00", headers={"cadence": cadence})
        ran.clear()
        clock.advance(3600)
        await run_until_idle(app)
        assert hours(1)[0] in ran


@only_file
async def test_a_topic_that_is_deleted_is_made_again_and_ticks_go_on(
    opened: Open, clock: ManualClock
) -> None:
    async with opened() as mq:
        app, ran = hourly(mq)
        async with app:
            await until_marked(mq)
            await mq.delete_topic("every.hourly")
            clock.advance(1800)  # half past: the ticker looks, and finds nothing
            clock.advance(3600)

            async def made_again() -> bool:
                return app.health().ok and "every.hourly" in {topic.name for topic in await mq.topics()}

            await until(made_again)
            await until_marked(mq)

            async def has_run() -> bool:
                clock.advance(1800)
                await asyncio.sleep(0.05)
                return bool(ran)

            await until(has_run)
            assert {one.name for one in app.health().handlers} == {
                "every.hourly/every (run)", "every.hourly (ticks)",
            }  # fmt: skip


@only_file
async def test_a_topic_that_remembers_no_ids_is_refused(opened: Open) -> None:
    async with opened() as mq:
        app, _ = hourly(mq)
        await mq.create_topic("every.hourly")
        with pytest.raises(UsageError, match="dedup_window"):
            await app.start()
        await mq.alter_topic("every.hourly", dedup_window="1d")
        async with app:
            assert app.running


def test_mistakes_are_told_when_it_is_registered() -> None:
    app = App("memory://")

    async def run() -> None: ...
    async def body(order: dict) -> None: ...  # type: ignore[type-arg]

    for wrong, options, said in [
        ("* * * *", {}, "cron expression"),
        ("often", {}, "duration"),
        ("100ms", {}, "at least a second"),
        ("10m", {"timezone": "UTC"}, "no time zone"),
        ("0 2 * * *", {"timezone": "Europe/Nowhere"}, "such as 'Europe/Berlin'"),
        ("0 2 * * *", {"missed": "never"}, "'skip', 'once' or 'all'"),
        (run, {}, "call it"),
        ("10m", {"topic": "orders"}, "takes no topic"),
        ("10m", {"patience": 1}, "takes no patience"),
        ("10m", {"timeout": 0}, "timeout=0"),
    ]:
        with pytest.raises((InvalidSetting, UsageError), match=said):
            app.every(wrong, **options)(run)  # type: ignore[arg-type]
    with pytest.raises(InvalidName, match="nightly-report"):
        app.every("10m", name="a.b")(run)
    with pytest.raises(UsageError, match="the tick, a datetime"):
        app.every("10m")(body)
    app.every("10m")(run)
    with pytest.raises(UsageError, match="two schedules 'run'"):
        app.every("20m")(run)
    assert [s.name for s in app.schedules] == ["run"] and len(app.subscriptions) == 1


# ---- a clock that was set ----


async def test_a_clock_that_was_set_on_has_missed_nothing() -> None:
    """Of a schedule that runs what it missed: an hour on the clock is not an hour that passed (I26)."""
    async with postroom.connect("memory://") as mq:
        app, sent = App(mq), list[str]()

        @app.every("1s", missed="all")
        async def often() -> None: ...

        endpoint: Any = mq._endpoint
        await prepare(mq, app.schedules)
        ticker = Ticker(mq, app.schedules[0])
        await ticker.step()
        honest = endpoint.store.now_ms
        endpoint.store.now_ms = lambda: honest() + 3_600_000
        for _ in range(3):
            await ticker.step()
        sent += [m.id or "" async for m in mq.read("every.often")]
        assert len(sent) < 60
