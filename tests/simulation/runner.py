"""Runs seeds, each in a child of its own, several at a time; adds up what came of them.

No seed knows what ran before it: a child ends with its world, and whatever that left behind.
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


class Runner:
    def __init__(self, folder: Path, template: Path, jobs: int) -> None:
        self._folder, self._template, self._jobs = folder, template, jobs
        self._runs = 0

    def outcomes(
        self, seeds: Iterable[int], prepare: Callable[[], None] = lambda: None
    ) -> Iterator[dict[str, Any]]:
        """As they come. `prepare` is called in each child before its world begins."""
        waiting = iter(seeds)
        with selectors.DefaultSelector() as selector:
            try:
                while self._fill(waiting, selector, prepare):
                    for key, _ in selector.select():
                        found = self._read(key, selector)
                        if found is not None:
                            yield found
            finally:  # whoever asked has heard enough
                for key in list(selector.get_map().values()):
                    os.kill(key.data[1], signal.SIGKILL)
                    self._end(key, selector)

    def _fill(
        self, waiting: Iterator[int], selector: selectors.BaseSelector, prepare: Callable[[], None]
    ) -> bool:
        """Start as many as may run; returns whether any does."""
        while len(selector.get_map()) < self._jobs:
            seed = next(waiting, None)
            if seed is None:
                break
            self._start(seed, selector, prepare)
        return bool(selector.get_map())

    def _start(self, seed: int, selector: selectors.BaseSelector, prepare: Callable[[], None]) -> None:
        self._runs += 1
        folder = self._folder / f"run-{os.getpid()}-{self._runs}"
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            self._run(seed, folder, writing, prepare)
        os.close(writing)
        selector.register(reading, selectors.EVENT_READ, (seed, child, folder, bytearray()))

    def _run(self, seed: int, folder: Path, writing: int, prepare: Callable[[], None]) -> None:
        try:
            signal.signal(signal.SIGPROF, _stuck)
            signal.setitimer(signal.ITIMER_PROF, _LONGEST_CPU_S)  # of CPU: the machine may be busy
            gc.disable()  # what a collection would end, and when, is not the seed's
            prepare()
            outcome = play(seed, folder, self._template)
        except BaseException:
            outcome = Outcome(seed, faults=[traceback.format_exc()])
        outcome.cpu_s = time.process_time()
        with os.fdopen(writing, "w") as pipe:
            json.dump(vars(outcome), pipe)
        os._exit(0)

    def _read(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> dict[str, Any] | None:
        seed, _, _, data = key.data
        some = os.read(key.fd, 1 << 20)
        if some:
            data += some
            return None
        self._end(key, selector)
        if not data:
            return vars(Outcome(seed, faults=["its process died"]))
        return json.loads(data)  # type: ignore[no-any-return]

    def _end(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        _, child, folder, _ = key.data
        selector.unregister(key.fd)
        os.close(key.fd)
        os.waitpid(child, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _stuck(number: int, frame: object) -> None:
    raise RuntimeError(f"real code ran for {_LONGEST_CPU_S} s of CPU: it does not end")
