"""What Spark takes of memory while it works: the driver's Java, and the Python processes below it.

By PSS, which counts what processes share once: forked workers share most of what they have.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Memory", "watching"]

_EVERY_S = 1.0


@dataclass
class Memory:
    """The most that was seen, in bytes."""

    java: int = 0
    python: int = 0

    def see(self, java: int, python: int) -> None:
        self.java, self.python = max(self.java, java), max(self.python, python)


@contextmanager
def watching(spark: Any, seen: Memory) -> Iterator[None]:
    """`seen` learns what the session takes meanwhile."""
    java, ended = int(spark.sparkContext._gateway.proc.pid), threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            seen.see(*_taken(java))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _taken(launched: int) -> tuple[int, int]:
    """Of Java and of Python. What was launched may be a shell that Java runs below."""
    found = {"java": 0, "python": 0}
    for process in _below(launched):
        with suppress(OSError):  # it has ended meanwhile
            name = Path(f"/proc/{process}/comm").read_text()
            kind = "java" if name.startswith("java") else "python"
            found[kind] += _pss(process)
    return found["java"], found["python"]


def _below(process: int) -> Iterator[int]:
    yield process
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _below(int(child))


def _pss(process: int) -> int:
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
