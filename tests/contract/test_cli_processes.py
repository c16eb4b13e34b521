"""The command line as people meet it: a process with pipes, signals, terminals and a start-up time."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_a_watch_shows_sample_after_sample(cli: Cli) -> None:
    cli.ok("group", "create", "orders", "billing")
    process = cli.start("lag", "orders", "--watch", "--interval", "50ms", "--json")
    assert process.stdout is not None
    assert [process.stdout.readline()[:1] for _ in range(3)] == [b"["] * 3
    process.send_signal(signal.SIGINT)
    assert _end(process).code == 130


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


@pytest.mark.parametrize("target", ["shop", "nothing_here:app", "json:app"])
def test_a_worker_without_an_app(cli: Cli, target: str) -> None:
    answer = cli.process("worker", target, "--json")
    assert answer.code == 2 and answer.error["error"] == "usage"


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
