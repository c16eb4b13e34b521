"""Runs seeds in children, several at a time; adds up what came of them.

A child plays some seeds, one after the other, and ends with whatever their worlds left behind. No seed knows
what ran before it: whatever a world counts or remembers is the world's own.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from .scenario import Outcome, play

__all__ = ["Runner", "Totals", "digest_of"]

_LONGEST_CPU_S = 30  # a seed takes a tenth of a second


@dataclass
class Totals:
    seeds: int = 0
    failed: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    confirmed: int = 0
    handled: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: dict[str, Any]) -> None:
        self.seeds += 1
        self.failed += bool(outcome["faults"])
        for name in ("simulated_s", "cpu_s", "steps", "confirmed", "handled"):
            setattr(self, name, getattr(self, name) + outcome[name])
        self.troubles.update(outcome["troubles"])
        self.kinds.update(outcome["kinds"])

    def __str__(self) -> str:
        return (
            f"{self.seeds} seeds, {self.failed} failed; {self.simulated_s / 3600:.2f} simulated hours, "
            f"{sum(self.troubles.values())} faults, {self.confirmed} messages, {self.steps} steps; "
            f"{self.seeds / max(self.cpu_s, 1e-9):.1f} seeds a second of CPU"
        )

    def lines(self) -> list[str]:
        return [
            f"{what}: {dict(sorted(some.items()))}"
            for what, some in vars(self).items()
            if isinstance(some, Counter)
        ]


def digest_of(outcome: dict[str, Any]) -> str:
    """One line that is the same only if every step was."""
    return f"seed {outcome['seed']}: digest {outcome['digest']:08x}, {outcome['steps']} steps"


@dataclass
class _Child:
    pid: int
    folder: Path
    seeds: list[int]  # that are still to come
    data: bytearray = field(default_factory=bytearray)


class Runner:
    def __init__(self, folder: Path, template: Path, jobs: int, seeds_each: int = 40) -> None:
        """`seeds_each`: so many worlds one child lives through."""
        self._folder, self._template, self._jobs, self._seeds_each = folder, template, jobs, seeds_each
        self._children = 0
        self._left: list[int] = []  # of a child that died

    def outcomes(
        self, seeds: Iterable[int], prepare: Callable[[], None] = lambda: None
    ) -> Iterator[dict[str, Any]]:
        """As they come. `prepare` is called in each child before its first world begins."""
        coming = iter(seeds)
        with selectors.DefaultSelector() as selector:
            try:
                while self._fill(coming, selector, prepare):
                    for key, _ in selector.select():
                        yield from self._read(key, selector)
            finally:  # whoever asked has heard enough
                for key in list(selector.get_map().values()):
                    os.kill(key.data.pid, signal.SIGKILL)
                    self._end(key, selector)
                self._left.clear()

    def _fill(
        self, coming: Iterator[int], selector: selectors.BaseSelector, prepare: Callable[[], None]
    ) -> bool:
        """Start as many as may run; returns whether any does."""
        while len(selector.get_map()) < self._jobs:
            some, self._left = self._left, []
            some = some or list(islice(coming, self._seeds_each))
            if not some:
                break
            self._start(some, selector, prepare)
        return bool(selector.get_map())

    def _start(self, seeds: list[int], selector: selectors.BaseSelector, prepare: Callable[[], None]) -> None:
        self._children += 1
        folder = self._folder / f"run-{os.getpid()}-{self._children}"
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            self._run(seeds, folder, writing, prepare)
        os.close(writing)
        selector.register(reading, selectors.EVENT_READ, _Child(child, folder, seeds))

    def _run(self, seeds: list[int], folder: Path, writing: int, prepare: Callable[[], None]) -> None:
        """In the child. Whatever a world leaves behind is left, and goes with the process."""
        signal.signal(signal.SIGPROF, _stuck)
        gc.disable()  # what a collection would end, and when, is not the seed's
        prepare()
        with os.fdopen(writing, "w") as pipe:
            for seed in seeds:
                outcome = self._play(seed, folder / str(seed))
                json.dump(vars(outcome), pipe)
                pipe.write("\n")
                pipe.flush()
        os._exit(0)

    def _play(self, seed: int, folder: Path) -> Outcome:
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, _LONGEST_CPU_S)  # of CPU: the machine may be busy
        try:
            outcome = play(seed, folder, self._template)
        except BaseException:
            outcome = Outcome(seed, faults=[traceback.format_exc()])
        shutil.rmtree(folder, ignore_errors=True)
        outcome.cpu_s = time.process_time() - began
        return outcome

    def _read(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> Iterator[dict[str, Any]]:
        child: _Child = key.data
        some = os.read(key.fd, 1 << 20)
        child.data += some
        *lines, rest = child.data.split(b"\n")
        child.data = bytearray(rest)
        for line in lines:
            outcome = json.loads(line)
            child.seeds.remove(outcome["seed"])
            yield outcome
        if not some:
            self._end(key, selector)
            if child.seeds:
                seed, *left = child.seeds
                self._left += left
                yield vars(Outcome(seed, faults=["its process died"]))

    def _end(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        child: _Child = key.data
        selector.unregister(key.fd)
        os.close(key.fd)
        os.waitpid(child.pid, 0)
        shutil.rmtree(child.folder, ignore_errors=True)


def _stuck(number: int, frame: object) -> None:
    raise RuntimeError(f"real code ran for {_LONGEST_CPU_S} s of CPU: it does not end")
