"""An app's life: start, stop, failures of the store, running as a program."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import (
    App,
    Backoff,
    Connection,
    Message,
    StoreError,
    StoreUnavailable,
    UnknownPartition,
    UsageError,
)
from postroom.client.app.program import load_app
from postroom.client.app.subscription import window_for
from tests.contract.stores import everywhere


@pytest.fixture
def clock() -> None:
    """Real time."""


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=2)
    return connection


async def left(mq: Connection) -> int:
    return (await mq.lag("orders", "billing")).total.messages


async def attempts_left(mq: Connection, count: int) -> list[int]:
    """The attempts of messages that wait, by taking them."""
    found: list[postroom.Received] = []
    async with mq.consumer("orders", group="billing") as consumer:
        while len(found) < count:
            batch = await consumer.poll(wait=10)
            assert batch, "messages are missing"
            found += batch
        return sorted(message.attempt for message in found)


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until something that nobody signals is so."""
    async with asyncio.timeout(10):
        for _ in itertools.count():
            if condition():
                return
            await asyncio.sleep(0)


# ---- start ----


async def test_a_conflict_stops_the_start_and_nothing_runs(mq: Connection) -> None:
    app, ran = App(mq), []

    @app.subscribe("orders", group="billing")
    async def good(body: bytes) -> None:
        ran.append(body)

    @app.subscribe("orders", group="audit", mode="ordered")
    async def other_mode(body: bytes) -> None: ...

    await mq.create_group("orders", "audit", mode="shared")
    await mq.send("orders", b"1")
    with pytest.raises(postroom.GroupConflict, match="mode cannot be changed: leave the setting out"):
        await app.start()
    assert not app.running and ran == []
    assert [g.members for g in await mq.groups("orders")] == [(), ()]
    assert await attempts_left(mq, 1) == [1]


async def test_an_app_connects_and_disconnects_by_itself(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/own.db"
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders")
        await mq.create_topic("bills")
    app, done = App(url, client_id="worker-1"), asyncio.Event()

    @app.subscribe("orders", group="billing")
    async def bill(body: bytes) -> None:
        await app.send("bills", body + b"!", key="k")
        await app.send_many("bills", [Message(b"more")])
        done.set()

    with pytest.raises(UsageError, match="not running"):
        app.connection  # noqa: B018
    async with app:
        assert app.running and app.connection.client_id == "worker-1"
        with pytest.raises(UsageError, match="runs already"):
            await app.start()
        with pytest.raises(UsageError, match="before it starts"):
            app.subscribe("bills", group="x")(bill)
        await app.send("orders", b"1")
        await asyncio.wait_for(done.wait(), 10)
        connection = app.connection
    assert connection.closed and not app.running
    await app.stop()
    async with postroom.connect(url) as mq:
        assert [message.value async for message in mq.read("bills")] in ([b"1!", b"more"], [b"more", b"1!"])
    async with app:  # and once more
        assert app.running


async def test_options_are_for_addresses(mq: Connection) -> None:
    with pytest.raises(UsageError, match="client_id"):
        App(mq, client_id="x")


async def test_the_lifespan_of_a_web_app(mq: Connection) -> None:
    app, done = App(mq), asyncio.Event()

    @app.subscribe("orders", group="billing")
    async def bill(body: bytes) -> None:
        done.set()

    async with app.lifespan(object()) as state:
        assert state == {"postroom": mq, "postroom_app": app}
        await mq.send("orders", b"1")
        await asyncio.wait_for(done.wait(), 10)
    assert not app.running and not mq.closed


# ---- stop ----


@everywhere
async def test_stopping_lets_handlers_end_and_hands_back_the_rest(mq: Connection) -> None:
    app, begun, go_on = App(mq), asyncio.Event(), asyncio.Event()
    ended: list[bytes] = []

    @app.subscribe("orders", group="billing", concurrency=1, window=10)
    async def slow(body: bytes) -> None:
        begun.set()
        await go_on.wait()
        ended.append(body)

    await mq.send_many("orders", [Message(b"x")] * 6)
    await app.start()
    await asyncio.wait_for(begun.wait(), 10)
    stopping = asyncio.create_task(app.stop())
    # The others are handed back while the handler still runs: somebody else gets them now.
    assert await attempts_left(mq, 5) == [1] * 5
    assert not stopping.done()
    go_on.set()
    await asyncio.wait_for(stopping, 10)
    assert len(ended) == 1
    assert await left(mq) == 5


async def test_what_is_still_running_after_the_grace_is_cancelled_and_handed_back(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    app, begun = App(mq, grace=0.01), asyncio.Event()
    cancelled: list[bool] = []

    @app.subscribe("orders", group="billing")
    async def hangs(body: bytes) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    async with app:
        await mq.send("orders", b"1")
        await asyncio.wait_for(begun.wait(), 10)
    assert cancelled == [True]
    assert "still running" in caplog.text
    assert await attempts_left(mq, 1) == [1]  # a release is not an attempt


async def test_a_second_stop_without_grace_does_not_wait(mq: Connection) -> None:
    app, begun = App(mq, grace="1h"), asyncio.Event()

    @app.subscribe("orders", group="billing")
    async def hangs(body: bytes) -> None:
        begun.set()
        await asyncio.Event().wait()

    await app.start()
    await mq.send("orders", b"1")
    await asyncio.wait_for(begun.wait(), 10)
    first = asyncio.create_task(app.stop())
    await until(lambda: app._workers[0]._stopping)
    await asyncio.wait_for(app.stop(0), 10)
    await asyncio.wait_for(first, 10)
    assert await attempts_left(mq, 1) == [1]


async def test_a_thread_that_hangs_does_not_hold_up_the_stop(mq: Connection) -> None:
    app, begun, go_on = App(mq, grace=0.01), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @app.subscribe("orders", group="billing")
    def hangs(body: bytes) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(60)

    async with app:
        await mq.send("orders", b"1")
        await asyncio.wait_for(begun.wait(), 10)
    try:
        assert await attempts_left(mq, 1) == [1]
    finally:
        go_on.set()


@everywhere
async def test_verdicts_are_stored_before_the_app_has_stopped(mq: Connection) -> None:
    app, handled, all_done = App(mq), 0, asyncio.Event()

    @app.subscribe("orders", group="billing")
    async def count(body: bytes) -> None:
        nonlocal handled
        handled += 1
        if handled == 3000:
            all_done.set()

    await mq.send_many("orders", [Message(b"x")] * 3000)
    async with app:
        await asyncio.wait_for(all_done.wait(), 30)
    assert await left(mq) == 0


async def test_a_fast_handler_holds_much_and_a_slow_one_little(mq: Connection) -> None:
    """R18, R41: a member does not keep from others what it cannot handle soon."""
    fast, slow, done, begun = App(mq), App(mq), asyncio.Event(), asyncio.Event()
    seen = 0

    @fast.subscribe("orders", group="fast")
    async def count(body: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen == 3000:
            done.set()

    @slow.subscribe("orders", group="slow", concurrency=2)
    async def hangs(body: bytes) -> None:
        begun.set()
        await asyncio.Event().wait()

    await mq.send_many("orders", [Message(b"x")] * 3000)
    async with fast:
        await asyncio.wait_for(done.wait(), 30)
        assert fast._workers[0].consumer._fetcher._window.messages == 1000
    await slow.start()
    try:
        await asyncio.wait_for(begun.wait(), 10)
        assert slow._workers[0].consumer.in_hand <= 4
    finally:
        await slow.stop(0)


async def test_what_is_settled_on_delivery_is_taken_only_when_it_can_begin(mq: Connection) -> None:
    """R16: at most once means that a crash loses what was taken; so no more is taken than is begun."""
    app, begun = App(mq), asyncio.Barrier(3)

    @app.subscribe("orders", group="billing", ack="on_delivery", concurrency=2)
    async def hangs(body: bytes) -> None:
        await begun.wait()
        await asyncio.Event().wait()

    await mq.send_many("orders", [Message(b"x")] * 50)
    await app.start()
    try:
        await asyncio.wait_for(begun.wait(), 10)
        assert await left(mq) == 48
    finally:
        await app.stop(0)
    assert await left(mq) == 48


def test_the_window_follows_what_a_message_costs() -> None:
    app = App("memory://")

    async def handle(body: bytes) -> None: ...
    async def lists(bodies: list[bytes]) -> None: ...

    app.subscribe("orders", group="a", concurrency=4)(handle)
    app.subscribe("orders", group="b", concurrency=4, window=77)(handle)
    app.subscribe("orders", group="c", concurrency=2, batch=700)(lists)
    free, fixed, batches = app.subscriptions
    assert [window_for(free, seconds) for seconds in (None, 10, 0.1, 0.01, 1e-6, 0)] == [
        8, 8, 20, 200, 1000, 1000,
    ]  # fmt: skip
    assert window_for(fixed, None) == window_for(fixed, 1e-6) == 77
    assert window_for(batches, None) == window_for(batches, 1e-6) == 2800


# ---- failures of the store ----


@pytest.mark.parametrize("error", [StoreError("who knows"), UnknownPartition("it has moved")], ids=repr)
async def test_a_store_that_fails_for_a_while_is_asked_again(
    mq: Connection, error: postroom.PostroomError, caplog: pytest.LogCaptureFixture
) -> None:
    """Both kinds: what the consumer repeats by itself, and what ends it, so that a new one is opened."""
    app, recovered, polls = App(mq), asyncio.Event(), 0
    endpoint: Any = mq._endpoint
    real_poll = endpoint.poll

    async def poll(request: Any) -> Any:
        nonlocal polls
        polls += 1
        if polls in (1, 3):
            raise postroom.StoreBusy("for a moment") if polls == 1 else error
        if polls > 3:
            recovered.set()
        return await real_poll(request)

    endpoint.poll = poll
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    @app.subscribe("orders", group="billing")
    async def handle(body: bytes) -> None:
        seen.put_nowait(body)

    async with app:
        for body in (b"1", b"2", b"3"):
            await mq.send("orders", body)
            while await asyncio.wait_for(seen.get(), 20) != body:
                pass
            if body == b"2":
                await asyncio.wait_for(recovered.wait(), 20)
        assert app.running
    assert f"starts again after an error: {error!r}" in caplog.text
    assert await left(mq) == 0


async def test_a_verdict_that_was_not_stored_is_given_again(
    mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    app, stored, settles, attempts = App(mq), asyncio.Event(), 0, 0
    endpoint: Any = mq._endpoint
    real_settle = endpoint.settle

    async def settle(*args: Any) -> Any:
        nonlocal settles
        settles += 1
        if settles == 1:
            raise StoreError("not stored")
        lost = await real_settle(*args)
        stored.set()
        return lost

    endpoint.settle = settle

    @app.subscribe("orders", group="billing")
    async def handle(body: bytes) -> None:
        nonlocal attempts
        attempts += 1

    async with app:
        await mq.send("orders", b"1")
        await asyncio.wait_for(stored.wait(), 20)
        assert await left(mq) == 0
    assert attempts == 1
    assert "ack was not stored, trying again" in caplog.text


async def test_a_connection_that_was_closed_ends_the_app_with_its_error(mq: Connection) -> None:
    async with postroom.connect("memory://closed-under-an-app") as own:
        await own.create_topic("orders")
        app = App(own)

        @app.subscribe("orders", group="billing")
        async def handle(body: bytes) -> None: ...

        await app.start()
    with pytest.raises(postroom.ClosedError):
        await asyncio.wait_for(app.wait(), 20)
    assert [one.state for one in app.health().handlers] == ["failed"]
    await app.stop()
    assert not app.running


async def test_a_handler_that_crashes_never_stops_the_app(mq: Connection) -> None:
    app, done, seen = App(mq), asyncio.Event(), 0

    @app.subscribe("orders", group="billing", retry=Backoff(0, 1, 0), concurrency=2)
    async def handle(body: bytes, message: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 40:
            done.set()
        if message.attempt == 1:
            raise [ValueError, asyncio.CancelledError, StopAsyncIteration, GeneratorExit][seen % 4]()

    await mq.send_many("orders", [Message(b"x")] * 20)
    async with app:
        await asyncio.wait_for(done.wait(), 10)
    assert await left(mq) == 0


# ---- as a program ----

PROGRAM = """
import asyncio, sys
import postroom

app = postroom.App("sqlite:///{path}", grace=30)

@app.subscribe("orders", group="billing")
async def handle(body: bytes) -> None:
    print("begun", flush=True)
    if body == b"hang":
        await asyncio.Event().wait()
    await asyncio.sleep(0.2)
    print("ended", flush=True)

if __name__ == "__main__":
    app.run()
    print("stopped", flush=True)
"""


@pytest.mark.few(1, "starts programs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("body", [b"work", b"hang"])
async def test_signals_stop_a_program_and_a_second_one_does_not_wait(
    tmp_path: Path, number: signal.Signals, body: bytes
) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    (tmp_path / "program.py").write_text(PROGRAM.format(path=tmp_path / "q.db"))
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders")
        await mq.send("orders", body)
    out, err, code = await asyncio.to_thread(run_and_signal, tmp_path, number, twice=body == b"hang")
    assert out == ("ended\nstopped\n" if body == b"work" else "stopped\n")
    assert (code, err) == (0, "")
    async with postroom.connect(url) as mq:
        assert await left(mq) == (0 if body == b"work" else 1)


def run_and_signal(folder: Path, number: signal.Signals, *, twice: bool) -> tuple[str, str, int]:
    process = subprocess.Popen(
        [sys.executable, "program.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        if twice:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.send_signal(number)
        out, err = process.communicate(timeout=20)
        return out, err, process.returncode
    finally:
        process.kill()


HANGING = """
import threading
import postroom

app = postroom.App("sqlite:///{path}", grace=0.1)

@app.subscribe("orders", group="billing")
def handle(body: bytes) -> None:
    print("begun", flush=True)
    threading.Event().wait()

app.run()
print("stopped", flush=True)
"""


async def test_a_thread_that_hangs_does_not_keep_the_program_from_ending(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANGING.format(path=tmp_path / "q.db"))
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        await mq.create_topic("orders")
        await mq.send("orders", b"1")
    out, err, code = await asyncio.to_thread(run_and_signal, tmp_path, signal.SIGTERM, twice=False)
    assert (out, code) == ("stopped\n", 0)
    assert "still running" in err


def test_a_program_without_handlers_is_told_so() -> None:
    with pytest.raises(UsageError, match="no handlers"):
        App("memory://").run()


def test_run_leaves_signal_handlers_as_they_were(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it is another one
    app = App(f"sqlite:///{tmp_path}/no/such/folder.db")

    @app.subscribe("nowhere", group="billing")
    async def handle(body: bytes) -> None: ...

    try:
        with pytest.raises(StoreUnavailable):
            app.run()
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, ours)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("shop", "module:app"),
        ("shop:", "module:app"),
        (":app", "module:app"),
        ("shop:application", r"it has shop_target:app, shop_target:other"),
        ("shop:handle", "function, not an App"),
        ("shopp_target:app", "did you mean shop_target"),
        ("shop_target.py:app", "shop_target:app"),
        ("no.such.module:app", "no module 'no'"),
        ("empty_target:app", "it has no App at all"),
    ],
)
def test_an_app_that_cannot_be_found_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str
) -> None:
    _write_modules(tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=said):
        load_app(target.replace("shop:", "shop_target:"))


def test_an_app_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_modules(tmp_path, monkeypatch)
    assert isinstance(load_app("shop_target:app"), App)
    assert isinstance(load_app("shop_target:space.inner"), App)


def test_a_module_that_fails_by_itself_says_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_modules(tmp_path, monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_app("broken_target:app")


def _write_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    (folder / "shop_target.py").write_text(
        "import postroom, types\napp = postroom.App('memory://')\nother = app\n"
        "space = types.SimpleNamespace(inner=app)\ndef handle(): ...\n"
    )
    (folder / "broken_target.py").write_text("import not_installed_anywhere\n")
    (folder / "empty_target.py").write_text("")
    for name in ("shop_target", "broken_target", "empty_target"):
        monkeypatch.delitem(sys.modules, name, raising=False)
