"""A job that publishes exactly once is killed again and again, while partitions are split (I20)."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import postroom.sync
from tests.chaos.staging_process import KEYS, run

KILLS, END = 4, 1_000_000


@pytest.mark.slow("kills processes for seconds")
def test_a_job_that_is_killed_again_and_again(tmp_path: Path) -> None:
    url, checkpoint, chance = f"sqlite:///{tmp_path}/q.db", tmp_path / "checkpoint", random.Random()
    with postroom.sync.connect(url) as mq:
        mq.create_topic("out", partitions=2)
        for turn in range(KILLS):
            before = mq.topic("out").messages
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.staging_process", url, str(checkpoint), str(END)]
            )
            try:
                until = time.monotonic() + 60
                while mq.topic("out").messages == before:
                    assert child.poll() is None and time.monotonic() < until
                    time.sleep(0.01)
                time.sleep(chance.uniform(0, 0.4))
            finally:
                child.kill()
                child.wait()
            if turn == 1:
                mq.split("out", 0)
        end = int(checkpoint.read_text().split()[1]) + 500
        run(url, checkpoint, end)
        found = [int(message.value) for message in mq.read("out")]
    assert sorted(found) == list(range(len(found)))
    assert len(found) >= end
    for key in range(KEYS):
        for place in (0, 1):
            mine = [n for n in found if n % KEYS == key and n % 2 == place]
            assert mine == sorted(mine)
