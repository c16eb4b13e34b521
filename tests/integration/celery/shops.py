"""A Celery app in a folder, workers of it, and what its tasks wrote down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG = 90

APP = """
    import os, pathlib, time
    from celery import Celery
    import postroom.integrations.celery

    app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend="rpc://")
    app.conf.broker_transport_options = eval(os.environ.get("SHOP_OPTIONS", "{}"))
    app.conf.worker_cancel_long_running_tasks_on_connection_loss = False
    here = pathlib.Path(__file__).parent

    def note(line):
        with open(here / "notes", "a") as file:
            file.write(f"{line}\\n")

    def wait_for(name):
        while not (here / name).exists():
            time.sleep(0.02)

    @app.task
    def add(x, y):
        return x + y

    @app.task
    def write(line):
        note(line)

    @app.task(bind=True, max_retries=3)
    def flaky(self):
        note(f"try {self.request.retries}")
        if self.request.retries < 2:
            raise self.retry(countdown=0.1)
        return self.request.retries

    @app.task(acks_late=True)
    def late(line, until):
        note(f"begins {line}")
        wait_for(until)
        note(f"ends {line}")

    @app.task
    def nested(count):
        for number in range(count):
            write.delay(f"nested {number}")

    @app.task(bind=True, acks_late=True)
    def refused(self):
        from celery.exceptions import Reject
        raise Reject("no", requeue=False)
"""


@dataclass
class Shop:
    folder: Path
    broker: str
    options: dict[str, Any]

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {
            "SHOP_BROKER": self.broker,
            "SHOP_OPTIONS": repr(self.options),
            "PYTHONWARNINGS": "ignore",
        }

    def write_app(self) -> None:
        (self.folder / "shop.py").write_text(textwrap.dedent(APP))

    def notes(self) -> list[str]:
        found = self.folder / "notes"
        return found.read_text().splitlines() if found.exists() else []

    def run(self, program: str) -> str:
        """What a program of the shop prints."""
        ran = subprocess.run(
            [sys.executable, "-c", "import shop\nfrom shop import *\n" + textwrap.dedent(program)],
            cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=LONG, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    @contextmanager
    def worker(self, *arguments: str, name: str = "one") -> Iterator[subprocess.Popen[bytes]]:
        log = self.folder / f"{name}.log"
        command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-n", f"{name}@here", "-l", "info"]
        with log.open("ab") as file:
            worker = subprocess.Popen(
                [*command, *arguments], cwd=self.folder, env=self.env, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        try:
            until(lambda: f"{name}@here ready" in log.read_text() or worker.poll() is not None, log)
            yield worker
        finally:
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)
            try:
                worker.wait(LONG)
            finally:
                kill(worker)


def kill(worker: subprocess.Popen[bytes]) -> None:
    """With its children, at once: they have a session of their own."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


def until(condition: Callable[[], Any], log: Path | None = None) -> None:
    end = time.monotonic() + LONG
    while not condition():
        told = "" if log is None else log.read_text()[-2000:]
        assert time.monotonic() < end, f"it did not come about\n{told}"
        time.sleep(0.02)
