"""The shell completes names from the queue: quickly, silently, and nothing where the queue is away."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.cli_runner import Cli

SECONDS = 60


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path)
    for topic in ("orders", "order-mails", "calls"):
        cli.ok("topic", "create", topic, "--partitions", "1")
    cli.ok("group", "create", "orders", "billing")
    cli.ok("group", "create", "calls", "answering")
    return cli


def completed(cli: Cli, *words: str, url: str | None = None) -> list[str]:
    """What the shell is offered for the last word; nothing else may be said."""
    line = ["postroom", *words]
    env = {
        **os.environ, "POSTROOM_URL": url or cli.url, "_POSTROOM_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "postroom"], env=env, cwd=cli.folder, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.slow("starts programs")
def test_topics_and_their_groups_are_completed(cli: Cli) -> None:
    assert completed(cli, "lag", "") == ["calls", "order-mails", "orders"]
    assert completed(cli, "lag", "order") == ["order-mails", "orders"]
    assert completed(cli, "lag", "orders", "") == ["billing"]
    assert completed(cli, "dead", "list", "calls", "an") == ["answering"]
    assert completed(cli, "shard", "drain", "f") == ["first"]
    elsewhere = f"sqlite:///{cli.folder / 'nowhere.db'}"
    assert completed(cli, "lag", "--url", cli.url, "call", url=elsewhere) == ["calls"]


@pytest.mark.slow("starts programs")
def test_a_queue_that_is_not_there_completes_to_nothing_and_is_not_made(cli: Cli) -> None:
    missing = cli.folder / "missing.db"
    assert completed(cli, "lag", "", url=f"sqlite:///{missing}") == []
    assert not missing.exists()
    (cli.folder / "junk.db").write_bytes(b"no database at all" * 100)
    for url in (f"sqlite:///{cli.folder / 'junk.db'}", "nonsense://x", "memory://", ""):
        if url:
            assert completed(cli, "lag", "", url=url) == []


@pytest.mark.slow("starts programs")
def test_a_broker_that_does_not_answer_completes_to_nothing(cli: Cli) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # it takes the connection, and says nothing
        assert completed(cli, "lag", "", url=f"postroom://127.0.0.1:{silent.getsockname()[1]}") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_a_topic(cli: Cli) -> None:
    """With the script that `postroom --show-completion bash` writes."""
    command = f"{sys.executable} -m postroom"
    (cli.folder / "postroom").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (cli.folder / "postroom").chmod(0o755)
    script = """
        eval "$(postroom --show-completion bash)"
        COMP_WORDS=(postroom lag order) COMP_CWORD=2
        _postroom_completion postroom
        echo "${COMPREPLY[@]}"
    """
    env = {**os.environ, "POSTROOM_URL": cli.url, "PATH": f"{cli.folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=env, cwd=cli.folder, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["order-mails", "orders"], done.stderr
