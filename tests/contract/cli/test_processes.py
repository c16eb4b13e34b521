"""The command line as people meet it: a process with pipes, signals, terminals and a start-up time."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import postroom
from postroom.broker.duties import ExpireGroups
from postroom.clock import ManualClock
from tests.contract.brokers import run_duty
from tests.contract.cli_runner import SECONDS, Answer, Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "orders")
    return cli


def _end(process: subprocess.Popen[bytes]) -> Answer:
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return Answer(process.returncode, (out or b"").decode(), (err or b"").decode())


def test_a_queue_from_nothing(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    assert cli.process("topic", "create", "orders", "-p", "1").code == 0
    assert cli.process("send", "orders", "-", stdin=b"one\ntwo\n").out.startswith("sent 2 messages")
    consumed = cli.process("consume", "orders", "-g", "billing", "--create", "-n", "2")
    assert consumed.out == "one\ntwo\n" and "printed and acked" in consumed.err
    assert cli.process("lag", "orders", "--max-messages", "0").code == 0
    assert cli.process("topic", "delete", "orders").code == 4
    assert cli.process("topic", "delete", "orders", "--yes").code == 0


@pytest.mark.slow("starts programs")
def test_the_reader_of_a_pipe_may_leave(cli: Cli) -> None:
    cli.ok("send", "orders", "-", stdin="".join(f"{'x' * 50} {n}\n" for n in range(20_000)))
    for words in (["read", "orders"], ["consume", "orders", "-g", "g", "--create"]):
        process = cli.start(*words)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"x")
        process.stdout.close()
        process.stdout = None
        answer = _end(process)
        assert answer.code == 0 and "Traceback" not in answer.err and "Broken" not in answer.err
    assert cli.ok("lag", "orders", "g", "--json").json[0]["messages"] > 0


@pytest.mark.slow("starts programs")
@pytest.mark.parametrize(
    "words", [["consume", "orders", "-g", "g", "--create"], ["read", "orders", "-F", "--start", "earliest"]]
)
def test_ctrl_c_ends_quietly(cli: Cli, words: list[str]) -> None:
    cli.ok("send", "orders", "hello")
    process = cli.start(*words)
    assert process.stdout is not None and process.stdout.readline() == b"hello\n"
    process.send_signal(signal.SIGINT)
    answer = _end(process)
    assert answer.code == 130 and "Traceback" not in answer.err


@pytest.mark.slow("starts programs")
def test_ctrl_c_while_waiting_for_standard_input(cli: Cli) -> None:
    process = cli.start("send", "orders", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"one\n")
    process.stdin.flush()
    _until(lambda: cli.ok("topic", "show", "orders", "--json").json["messages"] == 1)
    process.send_signal(signal.SIGINT)
    code = process.wait(SECONDS)  # with the pipe still open
    process.stdin.close()
    process.stdin = None
    answer = _end(process)
    assert code == 130 and "Traceback" not in answer.err and "Fatal" not in answer.err


@pytest.mark.slow("starts programs")
def test_a_watch_shows_sample_after_sample(cli: Cli) -> None:
    cli.ok("group", "create", "orders", "billing")
    process = cli.start("lag", "orders", "--watch", "--interval", "50ms", "--json")
    assert process.stdout is not None
    assert [process.stdout.readline()[:1] for _ in range(3)] == [b"["] * 3
    process.send_signal(signal.SIGINT)
    assert _end(process).code == 130


@pytest.mark.few(1, "starts programs")
@pytest.mark.parametrize(("typed", "code", "left"), [(b"n\n", 4, 1), (b"\n", 4, 1), (b"y\n", 0, 0)])
def test_on_a_terminal_it_asks(cli: Cli, typed: bytes, code: int, left: int) -> None:
    cli.ok("send", "orders", "hello")
    terminal, end = pty.openpty()
    process = cli.start("topic", "delete", "orders", stdin=end, stdout=end, stderr=end)
    os.close(end)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(terminal, 1000)
    assert b"1 messages" in shown or b"1 message" in shown
    os.write(terminal, typed)
    assert process.wait(SECONDS) == code
    os.close(terminal)
    assert len(cli.ok("topic", "list", "--json").json) == left


@pytest.mark.slow("starts programs")
def test_a_worker_runs_the_app_in_this_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "import os, postroom\n"
        "app = postroom.App(os.environ['POSTROOM_URL'])\n"
        "@app.subscribe('orders', group='billing')\n"
        "async def bill(body: bytes):\n"
        "    print(body.decode(), flush=True)\n"
    )
    cli.ok("send", "orders", "hello")
    process = cli.start("worker", "shop:app")
    assert process.stdout is not None and process.stdout.readline() == b"hello\n"
    process.send_signal(signal.SIGTERM)
    answer = _end(process)
    assert answer.code == 0 and "running" in answer.err
    assert cli.ok("lag", "orders", "billing", "--json").json[0]["messages"] == 0


@pytest.mark.slow("starts programs")
def test_a_worker_uses_the_url_that_is_named(cli: Cli, tmp_path: Path) -> None:
    """It wins over the app's own, with a line that says so; the line of a new group says where it starts."""
    (tmp_path / "shop.py").write_text(
        "import postroom\n"
        "app = postroom.App('sqlite:///own.db')\n"
        "@app.subscribe('orders', group='billing')\n"
        "async def bill(body: bytes):\n"
        "    print(body.decode(), flush=True)\n"
    )
    cli.ok("send", "orders", "hello")
    process = cli.start("worker", "shop:app", "--url", cli.url)
    assert process.stdout is not None and process.stdout.readline() == b"hello\n"
    process.send_signal(signal.SIGTERM)
    answer = _end(process)
    assert answer.code == 0 and not (tmp_path / "own.db").exists()
    assert (
        f"the app runs on {cli.url}, as asked for, and not on its own queue, sqlite:///own.db" in answer.err
    )
    assert "group billing of orders is new; it starts at the earliest message" in answer.err


@pytest.mark.few(1, "starts programs")
@pytest.mark.parametrize(("typed", "code", "groups"), [(b"y\n", 0, 1), (b"\n", 4, 0)])
def test_on_a_terminal_a_new_group_is_asked_about(cli: Cli, typed: bytes, code: int, groups: int) -> None:
    cli.ok("send", "orders", "hello")
    terminal, end = pty.openpty()
    process = cli.start("consume", "orders", "-g", "biling", "-n", "1", stdin=end, stdout=end, stderr=end)
    os.close(end)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(terminal, 1000)
    assert b"topic 'orders' has no group 'biling'; it has none yet." in shown
    os.write(terminal, typed)
    assert process.wait(SECONDS) == code
    os.close(terminal)
    assert len(cli.ok("group", "list", "orders", "--json").json) == groups


@pytest.mark.few(1, "starts programs")
@pytest.mark.parametrize("target", ["shop", "nothing_here:app", "json:app"])
def test_a_worker_without_an_app(cli: Cli, target: str) -> None:
    answer = cli.process("worker", target, "--json")
    assert answer.code == 2 and answer.error["error"] == "usage"


def _write_app(folder: Path, body: str, name: str = "shop") -> None:
    head = "import os, postroom\napp = postroom.App(os.environ['POSTROOM_URL'])\n"
    (folder / f"{name}.py").write_text(head + textwrap.dedent(body), encoding="utf-8")


def _logged(process: subprocess.Popen[bytes], text: str) -> str:
    """Wait until it logs a line with that text; the line."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line.decode():
            return line.decode()
    raise AssertionError(f"it ended with {process.wait()} and never said {text!r}")


@pytest.mark.slow("starts programs")
def test_a_worker_waits_for_a_topic_that_is_not_there_yet(cli: Cli, tmp_path: Path) -> None:
    body = """
        @app.subscribe('parcels', group='billing')
        async def bill(body: bytes):
            print(body.decode(), flush=True)
    """
    _write_app(tmp_path, body)
    process = cli.start("worker", "shop:app")
    try:
        line = _logged(process, "parcels")
        _logged(process, "running parcels/billing (bill)")
        assert "parcels/billing (bill): topic 'parcels' does not exist yet in " in line
        assert "create it with `postroom topic create parcels --url " in line
        cli.ok("topic", "create", "parcels")
        cli.ok("send", "parcels", "hello")
        assert process.stdout is not None and process.stdout.readline() == b"hello\n"
    finally:
        process.send_signal(signal.SIGTERM)
        answer = _end(process)
    assert answer.code == 0


@pytest.mark.few(1, "starts programs")
@pytest.mark.parametrize(
    ("decorators", "code", "error", "said"),
    [
        (["group='billing', mode='ordered'"], 1, "group_conflict", "mode cannot be changed"),
        (["group='billing'", "group='billing'"], 2, "usage", "or give one of them a group of its own"),
        (["group='cache', member='shop-1'"], 2, "usage", "add mode='broadcast', or leave it out"),
        (["group='cache', on_missed=print"], 2, "usage", "on_missed= is for members of a broadcast group"),
    ],
)
def test_a_worker_ends_at_once_with_what_waiting_cannot_mend(
    cli: Cli, tmp_path: Path, decorators: list[str], code: int, error: str, said: str
) -> None:
    cli.ok("group", "create", "orders", "billing")
    body = [f"@app.subscribe('orders', {one})\nasync def handle(body: bytes): ...\n" for one in decorators]
    _write_app(tmp_path, "".join(body))
    answer = cli.process("worker", "shop:app", "--json")
    assert (answer.code, answer.error["error"]) == (code, error)
    assert said in answer.error["message"]


@pytest.mark.slow("starts programs")
def test_a_worker_applies_what_its_decorator_names(cli: Cli, tmp_path: Path) -> None:
    cli.ok("group", "create", "orders", "billing", "--max-attempts", "16")
    _write_app(
        tmp_path,
        """
        @app.subscribe('orders', group='billing', max_attempts=5)
        async def bill(body: bytes): ...
        """,
    )
    process = cli.start("worker", "shop:app")
    try:
        assert "group billing of orders: max_attempts 16 → 5, as its handler asks" in _logged(process, "16")
    finally:
        process.send_signal(signal.SIGTERM)
        assert _end(process).code == 0
    assert cli.ok("group", "show", "orders", "billing", "--json").json["max_attempts"] == 5


def test_a_consumer_that_asks_for_other_settings_is_told_the_command(cli: Cli) -> None:
    cli.ok("group", "create", "orders", "billing", "--lease", "20s")
    answer = cli("consume", "orders", "-g", "billing", "--lease", "1m", "--max-attempts", "3")
    assert answer.code == 1
    assert answer.err.strip() == (
        "error: group 'billing' of topic 'orders' has lease='20s', max_attempts=16, but lease='1m', "
        "max_attempts=3 was asked for; leave the setting out, or change the group with "
        "`postroom group alter orders billing --lease 1m --max-attempts 3`"
    )
    cli.ok("group", "alter", "orders", "billing", "--lease", "1m", "--max-attempts", "3")
    cli.ok("consume", "orders", "-g", "billing", "--lease", "1m", "--max-attempts", "3", "--wait", "0")


@pytest.mark.slow("starts programs")
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be paused here")
@pytest.mark.parametrize("member", ["", ", member='shop-1', expires='10m'"])
def test_a_worker_that_was_paused_until_it_was_forgotten_clears_its_cache(
    cli: Cli, tmp_path: Path, member: str
) -> None:
    """A suspended machine: it answered from a cache that nothing refreshed any more, for ever."""
    body = f"""
        def clear():
            print("cleared", flush=True)

        @app.subscribe('orders', group='cache', mode='broadcast', start='latest', on_missed=clear{member})
        async def refresh(body: bytes):
            print(body.decode(), flush=True)
    """
    _write_app(tmp_path, body)
    process = cli.start("worker", "shop:app")
    try:
        _logged(process, "running orders/cache")
        assert process.stdout is not None
        if member:
            assert process.stdout.readline() == b"cleared\n"  # it is new
        _until(lambda: len(cli.ok("group", "list", "orders", "--json").json) == 2)
        cli.ok("send", "orders", "green tea")
        assert process.stdout.readline() == b"green tea\n"
        _until(lambda: cli.ok("lag", "orders", "cache", "--json").json[0]["messages"] == 0)  # it is acked
        process.send_signal(signal.SIGSTOP)
        asyncio.run(_forget_idle(cli.url))
        cli.ok("send", "orders", "white tea")  # it never hears of that
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == b"cleared\n"
        assert "has joined again; it may have missed messages" in _logged(process, "joined again")
        _logged(process, "runs again")
        cli.ok("send", "orders", "black tea")
        assert process.stdout.readline() == b"black tea\n"
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert _end(process).code == 0


async def _forget_idle(url: str) -> None:
    """What brokers do after a quarter of an hour in which nobody was heard of."""
    clock = ManualClock(round(time.time() * 1000) + 15 * 60_000)
    async with postroom.connect(url, clock=clock) as mq:
        await run_duty(mq, ExpireGroups)
        assert [info.name for info in await mq.groups("orders")] == ["cache"]


def test_help_is_there_at_once(cli: Cli) -> None:
    """The commands declare themselves without their slow parts, and without the SDK."""
    line = [sys.executable, "-X", "importtime", "-c", "from postroom.cli.root import app"]
    done = subprocess.run(line, capture_output=True, timeout=SECONDS, env=cli.environment(), check=True)
    imported = {row.rpartition(b"|")[2].strip().decode() for row in done.stderr.splitlines()}
    assert "postroom.cli.root" in imported
    slow = ("rich.", "asyncio", "sqlite3", "msgspec", "aiokafka", "psycopg", "pymysql")
    own = (
        "postroom.broker",
        "postroom.client",
        "postroom.store",
        "postroom.cli.checks",
        "postroom.cli.demo.",
    )
    assert [name for name in imported if name.startswith((*slow, *own))] == []


def test_shell_completion_stays(cli: Cli) -> None:
    env = {
        **cli.environment(),
        "_POSTROOM_COMPLETE": "complete_bash",
        "COMP_WORDS": "postroom to",
        "COMP_CWORD": "1",
    }
    line = [sys.executable, "-c", "from postroom.cli import main; main()"]
    done = subprocess.run(line, capture_output=True, timeout=SECONDS, env=env, check=False)
    assert done.stdout.split() == [b"topic"]


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
