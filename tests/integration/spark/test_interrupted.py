"""Ctrl-C at a job: it ends at once, without a word, and leaves no Java process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.integration.spark.streams import send

SECONDS = 120


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_while_spark_is_starting(url: str, mq: Any, tmp_path: Path) -> None:
    """Whoever inherits its standard output and is still there would keep `communicate` waiting."""
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 50)
    line = [sys.executable, "-m", "postroom", "--url", url, "pipeline", "hotspots", "orders"]
    pipe = subprocess.PIPE
    job = subprocess.Popen(line, cwd=tmp_path, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        give_up = time.monotonic() + SECONDS
        while not any(b"SparkSubmit" in Path(f"/proc/{n}/cmdline").read_bytes() for n in _children(job.pid)):
            assert time.monotonic() < give_up and job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        said, complaint = job.communicate(timeout=SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert (job.returncode, said, complaint) == (130, b"", b"")
