"""kill -9 of producing and consuming processes at random moments (R1, R34, I3, I7, I14).

Every message that was confirmed is handled by every group, and no innocent reaches the dead letters. The
checker knows only what the processes noted. PENSTOCK_CHAOS_SECONDS makes it longer (`make chaos`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "8"))
GROUPS = ("billing", "audit")


class Crew:
    """Processes that are started, killed at random and started again."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.kills = 0
        self._processes: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
        self._started = 0

    def add(self, script: str, *args: str) -> None:
        """Notes of a restarted process go to a file of its own."""
        self._started += 1
        if script == "producer":
            args = (args[0], f"{args[1]}.{self._started}")
        notes = self.folder / f"{script}-{args[1].split('.')[0]}-{self._started}.notes"
        command = [sys.executable, str(HERE / f"{script}_process.py"), self.url, *args, str(notes)]
        self._processes[script, *args, str(self._started)] = subprocess.Popen(command)

    def kill_one(self) -> None:
        key = random.choice(list(self._processes))
        process = self._processes.pop(key)
        assert process.poll() is None, f"{key} ended by itself with {process.returncode}"
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.kills += 1
        self.add(key[0], key[1], key[2].split(".")[0])

    def kill_all(self, script: str) -> None:
        for key in [k for k in self._processes if k[0] == script]:
            process = self._processes.pop(key)
            process.kill()
            process.wait()

    def noted(self, prefix: str) -> list[str]:
        lines: list[str] = []
        for path in self.folder.glob(f"{prefix}-*.notes"):
            text = path.read_text()
            lines += text[: text.rfind("\n") + 1].splitlines()  # the last line may be cut
        return lines


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 120)
async def test_every_confirmed_message_is_handled_by_every_group(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    async with penstock.connect(url) as mq:
        await mq.create_topic("orders", partitions=3)
        for group in GROUPS:
            await mq.create_group("orders", group, lease=1, max_attempts=8)
        crew = Crew(url, tmp_path)
        try:
            for i in range(2):
                crew.add("producer", "orders", f"p{i}")
                for group in GROUPS:
                    crew.add("consumer", "orders", group)
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                await asyncio.sleep(random.uniform(0.1, 0.6))
                crew.kill_one()
            crew.kill_all("producer")
            await _drained(mq)
        finally:
            crew.kill_all("producer")
            crew.kill_all("consumer")
        await _check(mq, crew)


async def _drained(mq: penstock.Connection) -> None:
    """Wait until both groups have settled everything; the test's own time limit ends it."""
    for group in GROUPS:
        while (lag := (await mq.lag("orders", group)).total).messages:
            assert lag.end > 0
            await asyncio.sleep(0.1)


async def _check(mq: penstock.Connection, crew: Crew) -> None:
    confirmed = crew.noted("producer")
    assert len(confirmed) == len(set(confirmed)) > 100
    stored = [m.value.decode() async for m in mq.read("orders")]
    assert len(stored) == len(set(stored)), "a message was stored twice"
    for group in GROUPS:
        handled = crew.noted(f"consumer-{group}")
        lost = set(confirmed) - set(handled)
        assert not lost, f"{len(lost)} confirmed messages were not handled by {group}: {sorted(lost)[:5]}"
        assert set(stored) <= set(handled)
        dead = await mq.dead_letters("orders", group)
        assert not dead, f"innocents among the dead letters: {[d.value for d in dead][:5]}"
        print(
            f"{group}: {len(confirmed)} confirmed, {len(stored)} stored, 0 lost, "
            f"{len(handled) - len(set(handled))} handled more than once, {crew.kills} kills"
        )
