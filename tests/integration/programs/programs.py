"""Programs run as a user runs them: started, told to end, and read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LIMIT", "ROOT", "program", "ran", "until"]

ROOT = Path(__file__).parents[3]
LIMIT = 90  # seconds


@contextmanager
def program(*args: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m …`, until the block is left."""
    running = subprocess.Popen([sys.executable, "-m", *args], cwd=ROOT, env={**os.environ, **environment})
    try:
        yield running
    finally:
        running.terminate()
        running.wait(LIMIT)


def ran(*args: str, status: int = 0, **environment: str) -> str:
    """What a program said that has come to its end; of one that failed, what it said about that."""
    done = subprocess.run(
        [sys.executable, "-m", *args], cwd=ROOT, env={**os.environ, **environment}, timeout=LIMIT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return (done.stderr if status else done.stdout).strip()


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not found():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)
