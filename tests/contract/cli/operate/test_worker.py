"""`postroom worker` in production: processes, probes, handlers by name, reload, a queue that is away."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.cli_runner import SECONDS, Cli
from tests.servers.places import free_port

APP = """
    import os, postroom
    app = postroom.App()

    @app.subscribe('orders', group='billing')
    async def bill(number: int):
        if number == 13:
            os.kill(os.getpid(), 9)
        print(f"billed {number}", flush=True)

    @app.subscribe('orders', group='tasks', name='mail')
    async def mail(number: int): ...

    @app.subscribe('orders', group='tasks', name='pdf')
    async def pdf(number: int): ...

    @app.every('1h')
    async def tidy(): ...
"""


class Worker:
    """A worker that runs, with its log in a file."""

    def __init__(self, cli: Cli, folder: Path, *words: str) -> None:
        self.log_file = folder / "worker.log"
        with open(self.log_file, "wb") as log:
            self.process = cli.start("worker", "shop:app", *words, stderr=log, stdout=log)

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def until(self, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + SECONDS
        while not (found := holds()):
            assert time.monotonic() < deadline, f"not in time; the log:\n{self.log}"
            time.sleep(0.02)
        return found

    def logs(self, text: str, times: int = 1) -> None:
        self.until(lambda: self.log.count(text) >= times)

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        (port,) = self.until(lambda: re.findall(r"metrics on http://127\.0\.0\.1:(\d+)", self.log))
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ready(self) -> bool:
        return self.ask("/readyz")[0] == 200

    def figure(self, name: str) -> float:
        text = self.ask("/metrics")[1]
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    found = Cli(tmp_path)
    found.ok("topic", "create", "orders", "--partitions", "1")
    write(tmp_path)
    return found


def write(folder: Path, app: str = APP) -> None:
    (folder / "shop.py").write_text(textwrap.dedent(app), encoding="utf-8")


@pytest.fixture
def start(cli: Cli, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def run(*words: str) -> Worker:
        made.append(Worker(cli, tmp_path, *words))
        return made[-1]

    yield run
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_a_worker_answers_probes_and_shows_what_its_handlers_did(cli: Cli, start: Any) -> None:
    worker = start("--only", "bill", "--http-port", "0", "--concurrency", "2")
    worker.until(worker.ready)
    cli.ok("send", "orders", "1")
    cli.ok("send", "orders", "no number")
    worker.until(lambda: worker.figure("postroom_handler_messages_total") == 2)
    assert worker.figure("postroom_handler_failures_total") == 1
    assert worker.figure("postroom_first_wait_seconds_count") == 2
    worker.until(lambda: worker.figure("postroom_group_lag_messages") == 0)  # measured now and then
    assert worker.ask("/healthz") == (200, '{"status": "ok"}\n') == worker.ask("/health")
    assert worker.ask("/readyz", "HEAD") == (200, "")
    assert worker.ask("/") == (404, '{"error": "ask for /healthz, /readyz or /metrics"}\n')
    assert worker.ask("/metrics", "POST")[0] == 405
    assert worker.stop() == 0


@pytest.mark.slow("starts programs")
def test_processes_are_started_again_and_stop_together(cli: Cli, start: Any) -> None:
    worker = start("--processes", "2", "--http-port", "0", "--log-format", "json")
    worker.until(worker.ready)
    processes = json.loads(worker.ask("/readyz")[1])["processes"]
    assert [one["process"] for one in processes] == [1, 2] and len({one["pid"] for one in processes}) == 2
    os.kill(processes[1]["pid"], signal.SIGKILL)
    worker.logs("process 2 was ended by SIGKILL; started again in")
    worker.until(lambda: worker.figure('postroom_worker_restarts_total{process="2"}') == 1)
    worker.until(lambda: worker.figure("postroom_worker_processes_ready") == 2)
    running = 'postroom_handler_running{group="billing",process="2",topic="orders"} 1.0'
    worker.until(lambda: running in worker.ask("/metrics")[1])
    text = worker.ask("/metrics")[1]
    assert len(re.findall(r'^postroom_group_lag_messages{group="billing"', text, re.MULTILINE)) == 1
    cli.ok("send", "orders", "5")
    worker.logs("billed 5")
    assert worker.stop() == 0
    assert all(not Path(f"/proc/{one['pid']}").exists() for one in processes)
    lines = [json.loads(line) for line in worker.log.splitlines() if line.startswith("{")]
    assert {"postroom.worker", "postroom.app"} <= {line["logger"] for line in lines}


@pytest.mark.slow("starts programs")
def test_processes_end_when_their_supervisor_is_killed(start: Any) -> None:
    worker = start("--processes", "2", "--http-port", "0")
    worker.until(worker.ready)
    pids = [one["pid"] for one in json.loads(worker.ask("/readyz")[1])["processes"]]
    worker.process.kill()
    worker.process.wait(SECONDS)
    worker.logs("the worker's supervisor is gone: stopping", 2)
    worker.until(lambda: not any(Path(f"/proc/{pid}").exists() and _lives(pid) for pid in pids))


def _lives(pid: int) -> bool:
    """A process that ended may wait for somebody to read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow("starts programs")
def test_a_second_signal_does_not_wait_for_handlers(cli: Cli, start: Any, tmp_path: Path) -> None:
    hangs = APP.replace('print(f"billed {number}", flush=True)', "print('begun', flush=True); await hang()")
    hangs += "\n    async def hang():\n        import asyncio\n        await asyncio.sleep(3600)\n"
    write(tmp_path, hangs)
    worker = start("--only", "bill", "--processes", "2")
    cli.ok("send", "orders", "1")
    worker.logs("begun")
    worker.logs("running orders/billing", 2)
    worker.process.send_signal(signal.SIGTERM)
    worker.logs("shutting down", 3)  # the supervisor, and both processes
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(SECONDS) == 0
    assert cli.ok("lag", "orders", "billing", "--json").json[0]["messages"] == 1


@pytest.mark.few(1, "starts programs")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "bil"], "there is no handler 'bil': the app has bill, mail, pdf, tidy"),
        (
            ["--only", "bil", "--processes", "2"],
            "there is no handler 'bil': the app has bill, mail, pdf, tidy",
        ),
        (["--only", "mail"], "mail shares topic 'orders' and group 'tasks' with pdf: choose both"),
        (["--log-level", "loud"], "choose one of debug, info, warning, error"),
    ],
)
def test_what_cannot_be_meant_is_refused(cli: Cli, words: list[str], said: str) -> None:
    answer = cli.process("worker", "shop:app", *words)
    assert answer.code == 2 and said in answer.err


@pytest.mark.slow("starts programs")
def test_handlers_are_chosen_by_name_and_run_as_often_as_asked(start: Any) -> None:
    worker = start("--only", "mail", "--only", "pdf", "--log-level", "debug")
    worker.logs("running orders/tasks (mail), orders/tasks (pdf)")
    assert worker.stop() == 0
    worker = start("--only", "tidy")
    worker.logs("running every.tidy/every (tidy)")
    assert worker.stop() == 0


@pytest.mark.slow("starts programs")
def test_a_queue_that_is_away_at_the_start_is_waited_for(cli: Cli, start: Any) -> None:
    """R52: the log says so, readiness says no, and the worker runs once the queue is there."""
    port = free_port()
    broker_url = f"postroom://127.0.0.1:{port}"
    worker = start("--only", "bill", "--http-port", "0", "--url", broker_url)
    worker.logs("the queue cannot be reached: ")
    status, body = worker.ask("/readyz")
    assert status == 503 and "cannot be reached" in json.loads(body)["error"]
    assert "127.0.0.1" not in body and worker.ask("/healthz")[0] == 200
    broker = cli.start(
        "serve",
        "--dev",
        "--port",
        str(port),
        "--http-port",
        "0",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        worker.until(worker.ready)
        assert worker.log.count("cannot be reached") == 1
        assert worker.stop() == 0
    finally:
        broker.terminate()
        broker.wait(SECONDS)


@pytest.mark.slow("starts programs")
def test_a_worker_that_waits_for_its_queue_can_be_stopped(start: Any) -> None:
    worker = start("--only", "bill", "--url", f"postroom://127.0.0.1:{free_port()}")
    worker.logs("cannot be reached")
    assert worker.stop() == 0


@pytest.mark.slow("starts programs")
def test_a_worker_starts_again_when_a_file_changes(cli: Cli, start: Any, tmp_path: Path) -> None:
    worker = start("--only", "bill", "--reload")
    worker.logs("running orders/billing (bill)")
    write(tmp_path, "this is not Python\n")
    worker.logs("changed: shop.py; starting again")
    worker.logs("started again when a file changes")
    write(tmp_path, APP.replace("billed", "paid for"))
    worker.logs("running orders/billing (bill)", 2)
    cli.ok("send", "orders", "3")
    worker.logs("paid for 3")
    assert worker.stop() == 0
