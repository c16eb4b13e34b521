"""The command line for people who run tasks: workers that create topics, and dead letters by error."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

import postroom
from postroom import App, Backoff
from tests.contract.cli_runner import SECONDS, Cli

TOKEN = "pst_" + "x" * 43


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def write_app(folder: Path, body: str, head: str = "app = postroom.App()") -> None:
    (folder / "shop.py").write_text(f"import postroom\n{head}\n{textwrap.dedent(body)}", encoding="utf-8")


def logged(process: subprocess.Popen[bytes], text: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line.decode():
            return line.decode()
    raise AssertionError(f"it ended with {process.wait()} and never said {text!r}")


def stopped(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    return process.returncode


HANDLER = """
    @app.subscribe('parcels', group='billing', max_attempts=1)
    async def bill(parcel: dict):
        raise ValueError(f'no price for {parcel["token"]}')
"""


@pytest.mark.slow("starts programs")
def test_a_worker_creates_the_missing_topics_of_its_app(cli: Cli, tmp_path: Path) -> None:
    """The app names no queue: POSTROOM_URL does. What its log tells of a message has no token in it."""
    write_app(tmp_path, HANDLER)
    process = cli.start("worker", "shop:app", "--create", "--json")
    assert "created topic parcels (4 partitions) in " in logged(process, "created topic")
    logged(process, "running parcels/billing")
    cli.ok("send", "parcels", json.dumps({"token": TOKEN}))
    line = logged(process, "no price for")
    assert TOKEN not in line and "pst_…" in line
    assert "attempt 1 of 1" in line and "moved to dead letters" in json.loads(line)["message"]
    assert stopped(process) == 0


def test_without_it_the_worker_says_where_it_looked_and_what_to_run(cli: Cli, tmp_path: Path) -> None:
    write_app(tmp_path, HANDLER)
    process = cli.start("worker", "shop:app")
    line = logged(process, "parcels")
    assert f"topic 'parcels' does not exist yet in {cli.url}" in line
    assert f"`postroom topic create parcels --url {cli.url}`, or start the worker with --create" in line
    assert stopped(process) == 0


def test_the_environment_wins_over_the_address_in_the_app(cli: Cli, tmp_path: Path) -> None:
    write_app(tmp_path, HANDLER, "app = postroom.App('sqlite:///own.db')")
    process = cli.start("worker", "shop:app", "--create")
    assert f"the app runs on {cli.url}, as asked for" in logged(process, "own.db")
    logged(process, "running")
    assert stopped(process) == 0 and not (tmp_path / "own.db").exists()


def test_an_unknown_topic_names_the_queue(cli: Cli) -> None:
    cli.ok("topic", "create", "parcels")
    answer = cli.process("send", "parcls", "x")
    assert answer.code == 1 and f"there is no topic 'parcls' in {cli.url}" in answer.err


def test_dead_letters_are_listed_by_error(cli: Cli) -> None:
    """Reasons that differ in numbers alone are one error; the traceback is in what is shown of one."""
    cli.ok("topic", "create", "parcels")

    async def fail() -> None:
        app = App(cli.url)

        @app.subscribe("parcels", group="billing", max_attempts=1, retry=Backoff(1, 1, 1))
        async def bill(number: int, message: postroom.Received) -> None:
            if number == 3:
                done.set()
                raise KeyError("sku")
            raise ValueError(f"order {number} is negative")

        done = asyncio.Event()
        async with app:
            await app.send_many("parcels", [1, 2], slot=0)
            await bill.send(3, slot=0, id="third")
            await asyncio.wait_for(done.wait(), SECONDS)

    asyncio.run(fail())
    errors = cli.ok("dead", "list", "parcels", "billing", "--by-error", "--json").json
    assert [(one["letters"], one["error"]) for one in errors] == [
        (2, "ValueError: order <n> is negative"),
        (1, "KeyError: 'sku'"),
    ]
    assert "raise ValueError" in errors[0]["newest"]["traceback"]
    table = cli.ok("dead", "list", "parcels", "billing", "--by-error").out.splitlines()
    assert table[0].split()[:2] == ["letters", "error"] and len(table) == 3
    shown = cli.ok("dead", "show", "parcels", "billing", "--id", "third").out
    assert "Traceback (most recent call last)" in shown and ", in bill" in shown
    assert "Traceback" not in cli.ok("dead", "list", "parcels", "billing").out
    (group,) = cli.ok("dead", "list", "--json").json
    assert (group["topic"], group["group"], group["letters"]) == ("parcels", "billing", 3)
    assert group["oldest"]["reason"].startswith("ValueError")
    assert cli.ok("dead", "list", "parcels").out.splitlines()[1].split()[:3] == ["parcels", "billing", "3"]
    assert "postroom dead list parcels billing --by-error" in cli("doctor").out


def test_the_version_is_told(cli: Cli) -> None:
    assert cli.ok("-V").out == cli.ok("--version").out == f"postroom {postroom.__version__}\n"
