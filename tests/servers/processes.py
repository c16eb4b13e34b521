"""Who is whose child, and whether it still runs: needed to kill a server the way a crash does.

PostgreSQL gives each of its processes a session of its own, so a signal to the group reaches the first only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["children", "kill_tree", "running"]


class _Process(NamedTuple):
    parent: int
    state: str


def running(pid: int) -> bool:
    """A zombie does not run: it has let go of its files, its memory and its ports."""
    process = _table().get(pid)
    return process is not None and process.state != "Z"


def children(pid: int) -> list[int]:
    """Those that it started itself."""
    return [child for child, process in _table().items() if process.parent == pid]


def kill_tree(pid: int, *, timeout_s: float = 10) -> None:
    """SIGKILL to `pid` and its children, and back only when all of them are gone.

    The first is stopped before its children are listed: it can neither replace one nor tidy up after one.
    """
    os.kill(pid, signal.SIGSTOP)
    victims = [pid, *children(pid)]
    for victim in victims:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself meanwhile
    deadline = time.monotonic() + timeout_s
    while any(running(victim) for victim in victims):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {victims} still run {timeout_s} s after SIGKILL")
        time.sleep(0.01)


def _table() -> dict[int, _Process]:
    """All processes: from /proc, or where there is none (macOS) from `ps`, which small containers lack."""
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], check=True, capture_output=True, text=True
        )
        rows = (line.split() for line in listed.stdout.splitlines())
        return {int(pid): _Process(int(parent), state[0]) for pid, parent, state, *_ in rows}
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
            except OSError:
                continue  # it ended while we were reading
            state, parent = stat.rpartition(")")[2].split()[:2]  # the name in brackets may contain anything
            table[int(entry)] = _Process(int(parent), state)
    return table
