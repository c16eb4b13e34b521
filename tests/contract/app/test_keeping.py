"""Handlers that cannot go on: they wait, are seen and tried again; broadcast members that were forgotten."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest

import postroom
from postroom import App, Connection, GroupConflict, HandlerHealth, Message, UsageError
from postroom.broker.duties import ExpireGroups
from postroom.clock import ManualClock
from postroom.model.topology.names import is_unnamed
from tests.contract.brokers import run_duty
from tests.contract.stores import Open, everywhere, real_time

LONG = 30


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("prices", partitions=2)
    return connection


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG):
        for _ in itertools.count():
            if condition():
                return
            await asyncio.sleep(0.01)


async def names(mq: Connection, topic: str = "prices") -> list[str]:
    return [info.name for info in await mq.groups(topic)]


def only(app: App) -> HandlerHealth:
    (found,) = app.health().handlers
    return found


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "postroom.app")


class Cache:
    """A broadcast handler that remembers in which order it was told what."""

    def __init__(self, mq: Connection, **settings: Any) -> None:
        self.app, self.seen = App(mq), list[str]()
        settings = {"mode": "broadcast", "on_missed": self.missed, **settings}

        @self.app.subscribe("prices", group="cache", concurrency=1, **settings)
        async def refresh(body: bytes) -> None:
            self.seen.append(body.decode())

    async def missed(self) -> None:
        self.seen.append("missed")

    async def sees(self, *seen: str) -> None:
        await until(lambda: self.seen[-len(seen) :] == list(seen))


# ---- a topic that is not there yet ----


async def test_a_handler_waits_for_its_topic_while_the_others_run(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = App(mq), list[str]()

    @app.subscribe("prices", group="billing")
    async def good(body: bytes) -> None:
        seen.append(f"good {body.decode()}")

    @app.subscribe("shipments", group="billing")
    async def early(body: bytes) -> None:
        seen.append(f"early {body.decode()}")

    async with app:
        await mq.send("prices", b"1")
        await until(lambda: seen == ["good 1"])
        health = app.health()
        assert not health.ok and [one.state for one in health.handlers] == ["running", "waiting"]
        assert health.handlers[1].error == (
            "topic 'shipments' does not exist yet; waiting for it — create it with `postroom topic create "
            "shipments`, or start the worker with --create"
        )
        assert (health.handlers[1].topic, health.handlers[1].group) == ("shipments", "billing")
        await mq.create_topic("shipments")
        await mq.send("shipments", b"2")
        await until(lambda: seen == ["good 1", "early 2"])
        assert app.health().ok
    assert "shipments/billing (early): topic 'shipments' does not exist yet" in caplog.text
    assert caplog.text.count("does not exist yet") == 1  # once, however often it looked
    assert "shipments/billing (early) runs now" in caplog.messages


async def test_a_mistyped_topic_is_waited_for_and_the_log_says_what_was_meant(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(mq)

    @app.subscribe("price", group="billing")
    async def mistyped(body: bytes) -> None: ...

    async with app:
        await until(lambda: only(app).error and "did you mean 'prices'?" in str(only(app).error))
    assert "topic 'price' does not exist yet" in caplog.text
    assert " (did you mean 'prices'?); waiting for it" in caplog.text
    assert [topic.name for topic in await mq.topics()] == ["prices"]


async def test_a_topic_that_is_deleted_and_made_again(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = App(mq), list[bytes]()

    @app.subscribe("prices", group="billing")
    async def handle(body: bytes) -> None:
        seen.append(body)

    async with app:
        await mq.send("prices", b"1")
        await until(lambda: seen == [b"1"])
        await mq.delete_topic("prices")
        await until(lambda: only(app).state == "waiting")
        await until(lambda: "topic 'prices' was deleted" in caplog.text)
        if isinstance(clock := mq._heartbeat._clock, ManualClock):
            clock.advance(1)
        await mq.create_topic("prices")
        await mq.send("prices", b"2")
        await until(lambda: seen == [b"1", b"2"])
        assert app.health().ok
    assert not app.health().ok  # it does not run any more


async def test_an_app_can_be_stopped_while_a_handler_waits(mq: Connection) -> None:
    app = App(mq)

    @app.subscribe("nowhere", group="billing")
    async def handle(body: bytes) -> None: ...

    async with app:
        await until(lambda: only(app).state == "waiting")
    assert not app.running


# ---- what waiting cannot mend ----


async def test_a_group_that_was_deleted_is_not_made_again_by_its_handler(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """It would start at the beginning, and every order would be billed twice."""
    app, seen = App(mq), list[bytes]()

    @app.subscribe("prices", group="billing")
    async def bill(body: bytes) -> None:
        seen.append(body)

    async with app:
        await mq.send("prices", b"1")
        await until(lambda: seen == [b"1"])
        await mq.delete_group("prices", "billing", force=True)
        await until(lambda: only(app).state == "failed")
        assert "group 'billing' of topic 'prices' was deleted under its handler" in str(only(app).error)
        assert "cannot go on and is tried again: group 'billing'" in caplog.text
        assert await names(mq) == [] and not app.health().ok
        await mq.create_group("prices", "billing", start="latest")
        await until(lambda: app.health().ok)
        await mq.send("prices", b"2")
        await until(lambda: seen == [b"1", b"2"])


async def test_a_conflict_while_the_app_runs_is_shown_and_tried_again(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = App(mq), list[bytes]()

    @app.subscribe("prices", group="billing", mode="shared")
    async def bill(body: bytes) -> None:
        seen.append(body)

    async with app:
        await until(lambda: only(app).state == "running")
        since = only(app).since
        await mq.delete_group("prices", "billing", force=True)
        await until(lambda: only(app).state == "failed")
        await mq.create_group("prices", "billing", mode="ordered")
        await until(lambda: "mode cannot be changed" in str(only(app).error))
        assert only(app).state == "failed" and only(app).since > since
        await mq.delete_group("prices", "billing")
        await mq.create_group("prices", "billing")
        await mq.send("prices", b"1")
        await until(lambda: seen == [b"1"] and app.health().ok)
    assert "prices/billing (bill) runs again" in caplog.messages
    assert app.health().as_dict() == {"ok": False, "running": False, "handlers": []}


# ---- members that were forgotten ----


@everywhere
@pytest.mark.parametrize("member", ["shop-1", None])
async def test_a_member_whose_group_was_deleted_joins_again_and_is_told(
    mq: Connection, caplog: pytest.LogCaptureFixture, member: str | None
) -> None:
    cache = Cache(mq, member=member, start="latest")
    async with cache.app:
        await until(lambda: cache.app.health().ok)
        await mq.send("prices", b"1")
        await cache.sees("1")
        assert cache.seen == (["1"] if member is None else ["missed", "1"])  # who has a name is new here
        cache.seen.clear()
        (own,) = (name for name in await names(mq) if "@" in name)
        await mq.delete_group("prices", own, force=True)
        await cache.sees("missed")
        await until(lambda: cache.app.health().ok)
        await mq.send("prices", b"2")
        await cache.sees("missed", "2")
        assert cache.seen == ["missed", "2"]  # told once
    who = "its member" if member is None else "member 'shop-1'"
    assert f"{who} was forgotten and has joined again; it may have missed messages" in caplog.text


@real_time
@pytest.mark.parametrize("named", [True, False])
async def test_a_member_with_full_hands_notices_that_it_was_forgotten(mq: Connection, named: bool) -> None:
    """It asks for nothing while its window is full: only its acks meet the group that is gone."""
    app, seen, go_on = App(mq), list[str](), asyncio.Event()
    member = "shop-1" if named else None

    @app.subscribe(
        "prices", group="cache", mode="broadcast", member=member, window=4, concurrency=1,
        on_missed=lambda: seen.append("missed"), start="latest",
    )  # fmt: skip
    async def slow(body: bytes) -> None:
        seen.append(body.decode())
        if body == b"old":
            await go_on.wait()

    async with app:
        await until(lambda: app.health().ok)
        await mq.send_many("prices", [Message(b"old")] * 40)
        await until(lambda: "old" in seen)
        (own,) = (name for name in await names(mq) if "@" in name)
        await mq.delete_group("prices", own, force=True)
        seen.clear()
        go_on.set()
        await until(lambda: "missed" in seen)
        await until(lambda: app.health().ok)
        await mq.send("prices", b"new")
        await until(lambda: seen[-1] == "new")
        assert seen.index("missed") < 4 + 2  # not after all that was in hand
        assert seen[seen.index("missed") :] == ["missed", "new"]


async def test_a_handler_without_a_hook_joins_again_too(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(mq, on_missed=None)
    async with cache.app:
        await until(lambda: cache.app.health().ok)
        await mq.delete_group("prices", "cache", force=True)  # with all its members
        await until(lambda: "it may have missed messages" in caplog.text and cache.app.health().ok)
        await mq.send("prices", b"1")
        await cache.sees("1")


@real_time
async def test_an_unnamed_member_that_is_opened_anew_is_told(mq: Connection) -> None:
    """Whatever ended it: who has no name begins at the end, and what came in between is gone."""
    cache, endpoint = Cache(mq), mq._endpoint
    real_poll, failed = endpoint.poll, asyncio.Event()

    async def poll(request: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise postroom.StoreError("who knows")
        return await real_poll(request)

    async with cache.app:
        await until(lambda: cache.app.health().ok)
        endpoint.poll = poll  # type: ignore[method-assign]
        await mq.send("prices", b"1")  # the poll under way ends with it
        await cache.sees("missed")


@real_time
async def test_a_named_member_that_is_opened_anew_goes_on_and_is_not_told(mq: Connection) -> None:
    cache, endpoint = Cache(mq, member="shop-1"), mq._endpoint
    real_poll, failed = endpoint.poll, asyncio.Event()

    async def poll(request: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise postroom.StoreError("who knows")
        return await real_poll(request)

    async with cache.app:
        await mq.send("prices", b"0")
        await cache.sees("missed", "0")  # it is new
        async with asyncio.timeout(LONG):
            for _ in itertools.count():
                if not (await mq.lag("prices", "cache@shop-1")).total.messages:
                    break
                await asyncio.sleep(0.01)
        endpoint.poll = poll  # type: ignore[method-assign]
        await mq.send("prices", b"1")
        await asyncio.wait_for(failed.wait(), LONG)
        await mq.send("prices", b"2")
        await until(lambda: set(cache.seen) >= {"1", "2"})
        assert cache.seen.count("missed") == 1


async def test_a_named_member_that_was_forgotten_while_it_was_away_is_told_at_its_start(
    mq: Connection, clock: ManualClock
) -> None:
    """Its process was down for longer than the group expires; what it kept on disk is out of date."""
    settings = {"member": "shop-1", "start": "latest", "expires": "1h"}
    first = Cache(mq, **settings)
    async with first.app:
        await first.sees("missed")  # new: nothing can be known of what came before
        await mq.send("prices", b"1")
        await first.sees("missed", "1")
    again = Cache(mq, **settings)
    await mq.send("prices", b"2")
    async with again.app:
        await again.sees("2")
        assert again.seen == ["2"]  # it went on where it stopped
    clock.advance(2 * 3600)
    await run_duty(mq, ExpireGroups)
    await mq.send("prices", b"3")
    assert await names(mq) == ["cache"]
    late = Cache(mq, **settings)
    async with late.app:
        await late.sees("missed")
        await until(lambda: late.app.health().ok)
        await mq.send("prices", b"4")
        await late.sees("missed", "4")


async def test_a_lost_answer_to_a_join_does_not_hide_that_the_member_is_new(mq: Connection) -> None:
    """The join made the group, its answer was lost, and the next join finds the group there."""
    cache, endpoint = Cache(mq, member="shop-1", start="latest"), mq._endpoint
    real, lost = endpoint.subscribe, 0

    async def subscribe(*args: Any, **options: Any) -> Any:
        nonlocal lost
        answer = await real(*args, **options)
        if not lost:
            lost += 1
            return await real(*args, **options)  # as the remote endpoint repeats it
        return answer

    endpoint.subscribe = subscribe  # type: ignore[method-assign]
    async with cache.app:
        await cache.sees("missed")
    assert lost == 1


@everywhere
async def test_a_member_that_died_before_its_hook_had_returned_is_told_when_it_comes_again(
    mq: Connection,
) -> None:
    async def dies() -> None:
        raise OSError("the machine went down")

    first = Cache(mq, member="shop-1", start="latest", on_missed=dies)
    async with first.app:
        await until(lambda: only(first.app).state == "failed")
    for told in (["missed", "1"], ["2"]):
        again = Cache(mq, member="shop-1", start="latest")
        async with again.app:
            await until(lambda app=again.app: app.health().ok)  # type: ignore[misc]
            await mq.send("prices", told[-1].encode())
            await again.sees(*told)
            assert again.seen == told


async def test_messages_wait_until_the_hook_has_returned_and_a_failing_hook_is_called_again(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, calls = asyncio.Event(), 0

    async def reload() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("the database of products is away")
        await go_on.wait()
        cache.seen.append("reloaded")

    cache = Cache(mq, member="shop-1", on_missed=reload)
    await mq.send("prices", b"1")
    async with cache.app:
        await until(lambda: calls == 1 and only(cache.app).state == "failed")
        assert only(cache.app).error == "OSError: the database of products is away"
        await until(lambda: calls == 2)
        assert cache.seen == []
        go_on.set()
        await cache.sees("reloaded", "1")
    assert cache.seen == ["reloaded", "1"]
    assert "prices/cache@shop-1 (Cache.__init__.<locals>.refresh)" not in caplog.text
    assert "prices/cache@shop-1 (refresh) cannot go on and is tried again: OSError" in caplog.text


async def test_a_hook_that_hangs_does_not_hold_up_the_stop(mq: Connection) -> None:
    begun = asyncio.Event()

    async def hangs() -> None:
        begun.set()
        await asyncio.Event().wait()

    cache = Cache(mq, member="shop-1", on_missed=hangs)
    async with cache.app:
        await asyncio.wait_for(begun.wait(), LONG)
    assert not cache.app.running


@pytest.mark.parametrize("kind", ["method of a dict", "lambda that returns a coroutine"])
async def test_a_hook_may_be_any_callable(mq: Connection, kind: str) -> None:
    known = {"tea": 9}

    async def clear() -> None:
        known.clear()

    cache = Cache(mq, member="shop-1", on_missed=known.clear if "dict" in kind else lambda: clear())
    await mq.send("prices", b"1")
    async with cache.app:
        await cache.sees("1")
    assert known == {}


async def test_a_plain_consumer_that_was_forgotten_gets_an_error_that_says_so(mq: Connection) -> None:
    async with mq.consumer("prices", "cache", mode="broadcast", member="shop-1") as consumer:
        assert consumer.begins_anew
        await mq.delete_group("prices", "cache@shop-1", force=True)
        with pytest.raises(
            postroom.UnknownGroup, match=r"member 'shop-1' was forgotten.*Make a new consumer"
        ):
            await asyncio.wait_for(anext(consumer), LONG)
    with pytest.raises(postroom.UnknownGroup, match=r"was forgotten; it is made when a consumer of its name"):
        await mq.lag("prices", "cache@shop-1")
    await mq.send("prices", b"1")
    async with mq.consumer("prices", "cache", member="shop-1") as consumer:
        assert consumer.begins_anew
        await consumer.ack(await consumer.poll(wait=LONG))
    async with mq.consumer("prices", "cache", member="shop-1") as consumer:
        assert not consumer.begins_anew


async def test_a_member_that_is_idle_for_too_long_while_it_cannot_speak(
    mq: Connection, opened: Open, clock: ManualClock
) -> None:
    """A process that is paused neither polls nor beats; when it goes on, it has been forgotten."""
    cache, endpoint, paused = Cache(mq), mq._endpoint, asyncio.Event()
    real_poll, real_beat = endpoint.poll, endpoint.beat

    async def poll(request: Any) -> Any:
        if paused.is_set():
            raise postroom.StoreBusy("paused")
        return await real_poll(request)

    def beat(beats: Any) -> Any:
        if paused.is_set():
            raise postroom.StoreBusy("paused")
        return real_beat(beats)

    endpoint.poll, endpoint.beat = poll, beat  # type: ignore[method-assign]
    async with cache.app, opened() as other:
        await until(lambda: cache.app.health().ok)
        await mq.send("prices", b"1")
        await cache.sees("1")
        paused.set()
        await asyncio.to_thread(mq._heartbeat.beat_once)
        clock.advance(11.5 * 60)
        await run_duty(other, ExpireGroups)
        assert not [name for name in await names(other) if is_unnamed(name)]
        await other.send("prices", b"2")  # missed
        cache.seen.clear()
        paused.clear()
        await cache.sees("missed")
        await until(lambda: cache.app.health().ok)
        await other.send("prices", b"3")
        await cache.sees("missed", "3")
        assert cache.seen == ["missed", "3"]


# ---- settings of a group that is there ----


@everywhere
async def test_what_the_decorator_names_is_applied_to_the_group(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await mq.create_group("prices", "billing", lease=20, max_attempts=16, expires="1d")
    app = App(mq)

    @app.subscribe("prices", group="billing", max_attempts=5, lease="1m", slow_lane=True)
    async def bill(body: bytes) -> None: ...

    async with app:
        settings = next(g for g in await mq.groups("prices") if g.name == "billing").settings
        assert (settings.max_attempts, settings.lease_ms, settings.slow_lane.on) == (5, 60_000, True)
        assert settings.expires_ms == 86_400_000  # not named: it stays
    (line,) = [line for line in caplog.messages if "as its handler asks" in line]
    assert line.startswith(
        "group billing of prices: lease '20s' → '1m', max_attempts 16 → 5, slow_lane False"
    )
    caplog.clear()
    async with app:
        pass
    assert "as its handler asks" not in caplog.text  # it has them already


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"mode": "ordered"}, "has mode='shared', but mode='ordered' was asked for; mode cannot be changed"),
        (
            {"start": "latest"},
            "has start='earliest', but start='latest' was asked for; leave the setting out, or reset",
        ),
        ({"mode": "ordered", "max_attempts": 2}, "has mode='shared', max_attempts=16, but mode='ordered'"),
    ],
)
async def test_mode_order_and_start_conflict(mq: Connection, named: dict[str, Any], said: str) -> None:
    await mq.create_group("prices", "billing")
    app = App(mq)

    @app.subscribe("prices", group="billing", **named)
    async def bill(body: bytes) -> None: ...

    with pytest.raises(GroupConflict) as raised:
        await app.start()
    assert said in str(raised.value)
    assert ("take another group, or delete the group" in str(raised.value)) == ("mode" in named)
    (info,) = await mq.groups("prices")
    assert info.settings.max_attempts == 16  # nothing was changed


async def test_a_plain_consumer_conflicts_and_is_told_the_call(mq: Connection) -> None:
    await mq.create_group("prices", "billing", lease=90)
    with pytest.raises(GroupConflict) as raised:
        async with mq.consumer("prices", "billing", lease="1h", max_attempts=3):
            pass
    assert str(raised.value) == (
        "group 'billing' of topic 'prices' has lease='90s', max_attempts=16, but lease='1h', max_attempts=3 "
        "was asked for; leave the setting out, or change the group with alter_group: "
        "await mq.alter_group('prices', 'billing', lease='1h', max_attempts=3)"
    )


async def test_a_handler_that_may_not_change_the_group_goes_on_with_what_it_has(
    mq: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mq.create_group("prices", "billing", max_attempts=16)
    app, seen = App(mq), list[bytes]()

    async def denied(*args: Any, **options: Any) -> Any:
        raise postroom.PermissionDenied("'clerk' may not manage topic 'prices'")

    monkeypatch.setattr(mq._endpoint, "alter_group", denied)

    @app.subscribe("prices", group="billing", max_attempts=5, mode="shared")
    async def bill(body: bytes) -> None:
        seen.append(body)

    async with app:
        await mq.send("prices", b"1")
        await until(lambda: seen == [b"1"])
    assert (
        "group billing of prices keeps max_attempts 16, not 5 as its handler asks: 'clerk' may not manage "
        "topic 'prices'; change it with `postroom group alter`"
    ) in caplog.text


async def test_two_apps_that_ask_for_different_settings_both_run(mq: Connection) -> None:
    """A rolling deployment: who started last has its way, and nobody ends."""
    apps = []
    for attempts in (3, 4, 5):
        app = App(mq)
        app.subscribe("prices", group="billing", max_attempts=attempts)(_handle)
        apps.append(app)
    await asyncio.gather(*(app.start() for app in apps))
    try:
        await until(lambda: all(app.health().ok for app in apps))
        (info,) = await mq.groups("prices")
        assert info.settings.max_attempts in (3, 4, 5)
    finally:
        await asyncio.gather(*(app.stop() for app in apps))


async def _handle(body: bytes) -> None: ...


# ---- at registration ----


def test_two_handlers_of_one_group_are_refused() -> None:
    app = App("memory://")
    app.subscribe("prices", group="billing")(_handle)

    async def other(body: bytes) -> None: ...

    said = (
        r"other and _handle both handle topic 'prices' for group 'billing': each message would go to one of "
        r"them at random\. Give each a name, .* or give one of them a group of its own"
    )
    with pytest.raises(UsageError, match=said):
        app.subscribe("prices", group="billing", mode="ordered")(other)
    with pytest.raises(UsageError, match=said):
        app.reply("prices", group="billing")(other)
    app.subscribe("prices", group="audit")(other)
    app.subscribe("orders", group="billing")(other)
    assert len(app.subscriptions) == 3


def test_members_of_a_broadcast_group_are_told_apart_by_their_names() -> None:
    app = App("memory://")
    for member in ("one", "two", None, None):  # who has no name gets every message anyway
        app.subscribe("prices", group="cache", mode="broadcast", member=member)(_handle)
    with pytest.raises(UsageError, match="Give one of them another member=, or a group of its own"):
        app.subscribe("prices", group="cache", mode="broadcast", member="two")(_handle)
    with pytest.raises(UsageError, match="a group of its own"):
        app.subscribe("prices", group="cache")(_handle)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"member": "shop-1"}, "member='shop-1' names a member of a broadcast group: add mode='broadcast'"),
        ({"member": "shop-1", "mode": "ordered"}, "add mode='broadcast', or leave it out"),
        ({"member": "", "mode": "broadcast"}, "1 to 120 printable characters"),
        ({"member": 7, "mode": "broadcast"}, "1 to 120 printable characters"),
        ({"on_missed": print}, "on_missed= is for members of a broadcast group"),
        ({"on_missed": "clear", "mode": "broadcast"}, "a function, such as on_missed=cache.clear"),
        ({"on_missed": lambda missed: None, "mode": "broadcast"}, "is called without arguments"),
        ({"max_handling": 0}, "max_handling=0"),
        ({"max_handling": "soon"}, "max_handling"),
        ({"window_bytes": 0}, "window_bytes=0"),
        ({"window_bytes": "much"}, "window_bytes"),
        ({"expires": "never"}, "expires"),
        ({"mode": "broadcast", "group": "c" * 41}, "at most 40"),
    ],
)
def test_wrong_settings_are_refused_at_registration(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        App("memory://").subscribe("prices", **{"group": "cache", **settings})(_handle)


async def test_a_handler_has_the_settings_of_a_consumer(mq: Connection) -> None:
    app = App(mq)
    app.subscribe(
        "prices", group="cache", mode="broadcast", member="shop-1", expires="2d", window_bytes="1MB",
        max_handling="3h",
    )(_handle)  # fmt: skip
    app.reply("prices", group="quotes", expires="1h", window_bytes=4096, max_handling="2h")(_handle)
    async with app:
        one, two = (worker.consumer._settings for worker in app._workers)
        assert (one.member, one.named, one.window.bytes, one.max_handling_ms) == (
            "shop-1", True, 1_048_576, 10_800_000,
        )  # fmt: skip
        assert (two.window.bytes, two.max_handling_ms) == (4096, 7_200_000)
        settings = {info.name: info.settings for info in await mq.groups("prices")}
        assert settings["cache@shop-1"].expires_ms == 2 * 86_400_000
        assert settings["quotes"].expires_ms == 3_600_000


@pytest.mark.parametrize(("max_handling", "taken_away"), [("1m", True), ("1h", False)])
async def test_a_handler_keeps_its_message_for_as_long_as_it_may_handle_it(
    mq: Connection, clock: ManualClock, max_handling: str, taken_away: bool
) -> None:
    app, begun, go_on = App(mq), asyncio.Event(), asyncio.Event()

    @app.subscribe(  # it takes nothing more while it is at work, or it might have the message again itself
        "prices", group="video", max_handling=max_handling, lease=30, concurrency=1, window_bytes=1
    )
    async def transcode(body: bytes) -> None:
        begun.set()
        await go_on.wait()

    await mq.send("prices", b"1")
    async with app:
        await asyncio.wait_for(begun.wait(), LONG)
        for _ in range(15):
            clock.advance(10)
            await asyncio.to_thread(mq._heartbeat.beat_once)
        async with mq.consumer("prices", "video") as other:
            found = await other.poll(wait=LONG if taken_away else "300ms")
            assert bool(found) is taken_away
        go_on.set()
