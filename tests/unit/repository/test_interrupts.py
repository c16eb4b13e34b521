"""A run of the tests in the background, where SIGINT is ignored, starts programs that heed it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARENT = """
import os, signal, subprocess, sys
import tests.interrupts

os.kill(os.getpid(), signal.SIGINT)  # the run itself goes on
subprocess.run([sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT).__name__)"])
"""


@pytest.mark.parametrize("trap", ["trap '' INT", "true"], ids=["ignored", "as in a terminal"])
def test_children_can_be_interrupted_where_the_run_cannot(trap: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'{trap}; exec "$@"', "sh", sys.executable, "-c", PARENT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if trap == "true":
        assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "default_int_handler\n"), done.stderr
