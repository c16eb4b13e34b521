"""`postroom serve` as a process: the first token, the log, signals, and what stops it from starting."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postroom.model.access import hash_of, is_token
from postroom.store import open_sqlite
from tests.contract.cli_runner import Answer, Cli

SECONDS = 60


class Served:
    """Brokers as processes on one queue; whatever is left of them is killed."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.cli = Cli(folder, url)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        """A broker that is ready, and what it logged then."""
        process = self.begin(*words)
        return process, logged(process, "serving")

    def begin(self, *words: str, **settings: Any) -> subprocess.Popen[bytes]:
        """Without a buffer on our side, so that what was not looked at is there for `end`."""
        words = ("serve", "--port", "0", "--http-port", "0", "--log-format", "json", *words)
        process = self.cli.start(*words, bufsize=0, **settings)
        self.processes.append(process)
        return process

    def end(self, process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> Answer:
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
        return Answer(process.returncode, (out or b"").decode(), err.decode())

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.kill()


def logged(process: subprocess.Popen[bytes], message: str) -> dict[str, Any]:
    """The next line of the log that says so."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"{") and json.loads(line)["message"] == message:
            found: dict[str, Any] = json.loads(line)
            return found
    raise AssertionError(f"{message!r} was never logged; exit code {process.wait(SECONDS)}")


def brokers(folder: Path) -> list[str]:
    with closing(open_sqlite(folder / "queue.db")) as store:
        return [broker.address for broker in store.brokers.live()]


def test_the_first_start_shows_a_token_once(served: Served, tmp_path: Path) -> None:
    process, line = served.start()
    assert process.stdout is not None
    text = b"".join(process.stdout.readline() for _ in range(5)).decode()
    (token,) = re.findall(r"POSTROOM_TOKEN=(\S+)", text)
    assert is_token(token) and f"POSTROOM_URL={line['url']}\n" in text
    answer = served.end(process)
    assert answer.code == 0 and "pst_" not in answer.err and answer.out.strip() == ""
    with closing(open_sqlite(tmp_path / "queue.db")) as store:
        admin = store.access.by_secret(hash_of(token))
    assert admin is not None and admin.name == "admin" and len(admin.permissions) == 3
    again, _ = served.start()
    second = served.end(again)
    assert (second.code, second.out) == (0, "") and "pst_" not in second.err


def test_a_first_token_that_nobody_can_read(served: Served) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = served.begin(stdout=writer)
    os.close(writer)
    told = logged(process, "the first token could not be shown: `postroom access rotate admin` makes another")
    assert told["level"] == "error"
    answer = served.end(process)
    assert answer.code == 0 and "Traceback" not in answer.err


def test_of_brokers_that_start_at_once_one_shows_a_token(served: Served) -> None:
    processes = [served.begin("--json") for _ in range(2)]
    urls = [logged(process, "serving")["url"] for process in processes]
    answers = [served.end(process) for process in processes]
    assert [answer.code for answer in answers] == [0, 0]
    (shown,) = (json.loads(answer.out) for answer in answers if answer.out)
    assert shown["principal"] == "admin" and shown["url"] in urls and is_token(shown["token"])


@pytest.mark.parametrize("server", ["postgres_url", "mysql_url"])
def test_on_a_database_server(tmp_path: Path, server: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(server)
    served = Served(tmp_path, url)
    refused = served.cli.process("serve", "--port", "0", "--http-port", "0", "--json")
    assert refused.code == 1 and "postroom migrate" in refused.error["message"]
    process, line = served.start("--migrate", "--json")
    try:
        assert process.stdout is not None and b"pst_" in process.stdout.readline()
        assert "@" in url and line["store"] != url  # there is a password in it
        assert served.end(process).code == 0
    finally:
        served.kill()


def test_dev_makes_no_principal(served: Served, tmp_path: Path) -> None:
    process, line = served.start("--dev")
    assert line["dev"] is True
    answer = served.end(process)
    assert (answer.code, answer.out) == (0, "") and "without a token" in answer.err
    with closing(open_sqlite(tmp_path / "queue.db")) as store:
        assert store.access.principals() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_it_leaves_the_list(served: Served, tmp_path: Path, number: int) -> None:
    (tmp_path / "postroom.toml").write_text('url = "sqlite:///other.db"\nzone = "eu-1"\n')
    process, line = served.start("--config", "postroom.toml")
    assert line["zone"] == "eu-1"
    assert line["store"].endswith("queue.db")  # POSTROOM_URL beats the file
    assert brokers(tmp_path) == [line["url"].removeprefix("postroom://")]
    answer = served.end(process, number)
    messages = [json.loads(text)["message"] for text in answer.err.splitlines()]
    assert answer.code == 0 and messages[-2:] == ["stopping", "stopped"] and "Traceback" not in answer.err
    assert brokers(tmp_path) == []


def test_a_second_signal_ends_it_at_once(served: Served) -> None:
    process, _ = served.start("--grace", "10m")
    process.send_signal(signal.SIGSTOP)  # both signals are there before it does anything about the first
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert process.wait(SECONDS) == 130


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_http_beside_it(served: Served) -> None:
    pytest.importorskip("fastapi")
    process, line = served.start("--json", "--http-port", str(free_port()))
    assert process.stdout is not None
    token = json.loads(process.stdout.readline())["token"]
    assert get(f"{line['http']}/health") == 200
    assert get(f"{line['http']}/api/v1/topics") == 401
    assert get(f"{line['http']}/api/v1/topics", token) == 200
    answer = served.end(process)
    assert answer.code == 0 and token not in answer.err and "Traceback" not in answer.err


def get(url: str, token: str | None = None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_an_http_port_that_is_taken(served: Served, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        answer = served.cli.process("serve", "--port", "0", "--http-port", port, "--json")
    assert answer.code == 2 and answer.out == "" and "another http_port" in answer.error["message"]
    assert brokers(tmp_path) == []


def test_a_port_that_is_taken(served: Served, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        answer = served.cli.process("serve", "--port", port, "--http-port", "0", "--json")
    assert answer.code == 2 and answer.out == ""
    assert f"cannot listen on 127.0.0.1:{port}" in answer.error["message"]
    with closing(open_sqlite(tmp_path / "queue.db")) as store:
        assert store.access.principals() == []  # a token was neither made nor lost


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dev", "--host", "0.0.0.0"], "dev lets everybody in"),
        (["--config", "nothing.toml"], "cannot be read"),
        (["--config", "bad.toml"], "bad.toml: 'prot' is no setting: did you mean port?"),
        (["--tls-cert", "a.pem"], "tls_cert is nothing without tls_key"),
        (["--tls-cert", "bad.toml", "--tls-key", "bad.toml"], "tls_cert and tls_key cannot be used"),
        (["--grace", "soon"], "--grace must be a duration"),
        (["--url", "postroom://127.0.0.1:7070"], "not on another broker"),
        (["sqlite:///a.db", "--url", "sqlite:///b.db"], "named twice"),
        (["nonsense://x"], "there is no scheme"),
        (["--port", "x"], "--port"),
    ],
)
def test_what_it_does_not_start_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("prot = 1")
    answer = Cli(tmp_path)("serve", "--http-port", "0", "--port", "0", *words)
    assert answer.code == 2 and says in answer.err and not (tmp_path / "queue.db").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["postgresql://ann:hunter2@127.0.0.1:1/q"],
        ["mysql://ann:hunter2@127.0.0.1:1/q", "--json"],
        ["mysql://ann:hunter2@127.0.0.1:1/q?nonsense=1"],
        ["--config", "secret.toml"],
        ["sqlite:///q.db", "--shard", "b=postgresql://ann:hunter2@127.0.0.1/"],
    ],
)
def test_no_password_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    url = "postgresql://ann:hunter2@127.0.0.1:1/q"
    (tmp_path / "secret.toml").write_text(f'url = "{url}"\n[shards]\nb = "{url}"\n')
    monkeypatch.setenv("POSTROOM_SHARDS", "")
    cli = Cli(tmp_path, url if "--config" in words else None)
    answer = cli("serve", "--http-port", "0", "--port", "0", *words)
    assert answer.code in (1, 2) and answer.err.count("\n") == 1
    assert "hunter2" not in answer.out + answer.err


def test_a_limit_of_files_is_raised_or_fewer_connections_are_taken(served: Served) -> None:
    """Strangers take what is allowed; who has to go then is told so, and not reset without a word."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))

    process = served.begin("--dev", preexec_fn=few)
    assert process.stderr is not None
    lines = [json.loads(next(line for line in process.stderr if line.startswith(b"{"))) for _ in range(2)]
    assert lines[1]["message"] == "serving", lines
    assert lines[0]["level"] == "warning" and "may open 256 files" in lines[0]["message"]
    assert "LimitNOFILE" in lines[0]["message"]
    port = int(lines[1]["url"].rpartition(":")[2])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    try:
        strangers[0].settimeout(SECONDS)
        said = strangers[0].recv(10_000)  # the oldest gives way
        assert b"max_connections" in said
    finally:
        for one in strangers:
            one.close()
    assert "Traceback" not in served.end(process).err
