"""Runs seeds: `python -m tests.simulation --seeds 1000`, or one of them with its trace: `--seed 42`.

`--twice` runs each seed twice and compares every step; `--breaks` plants one break after the other and says
which seed finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from .breaks import BREAKS, OUT_OF_REACH, Break
from .installation import prepared
from .plan import SHARDED_FROM, plan_of
from .runner import Runner, Totals, digest_of

__all__ = ["main"]


def main() -> int:
    options = _options()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    folder = Path(tempfile.mkdtemp(prefix="postroom-simulation-", dir=_memory()))
    try:
        runner = Runner(folder, prepared(folder), options.jobs, 10 if options.breaks else 40)
        if options.breaks:
            return _breaks(runner, options)
        if options.seed is not None:
            return _one(runner, options)
        return _many(runner, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make simulate")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--break", dest="broken", choices=sorted(BREAKS), help="undo what keeps an invariant")
    parser.add_argument("--breaks", action="store_true", help="plant every break; a table of who found it")
    parser.add_argument("--only", nargs="*", choices=sorted(BREAKS), help="of the breaks")
    parser.add_argument("--digests", action="store_true", help="of every seed")
    parser.add_argument("--twice", action="store_true", help="every seed, and compare")
    parser.add_argument("--for-s", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="seeds at a time")
    parser.add_argument("--tally", type=Path, help="add a line with the totals to this file")
    return parser.parse_args()


def _seeds(options: argparse.Namespace) -> Iterator[int]:
    """Twice: first upwards, then downwards, so that each comes after others."""
    until = time.monotonic() + (options.for_s or 1e9)
    seeds = range(options.first, options.first + options.seeds)
    for seed in chain(seeds, reversed(seeds)) if options.twice else seeds:
        if time.monotonic() > until:
            return
        yield seed


def _one(runner: Runner, options: argparse.Namespace) -> int:
    prepare = BREAKS[options.broken].apply if options.broken else lambda: None
    (outcome,) = runner.outcomes([options.seed], prepare)
    print("\n".join(outcome["lines"]))
    print(digest_of(outcome))
    for fault in outcome["faults"]:
        print(f"FAULT {fault}")
    return 1 if outcome["faults"] else 0


def _many(runner: Runner, options: argparse.Namespace) -> int:
    began, totals, differ = time.monotonic(), Totals(), 0
    seen: dict[int, str] = {}
    prepare = BREAKS[options.broken].apply if options.broken else lambda: None
    for outcome in runner.outcomes(_seeds(options), prepare):
        totals.add(outcome)
        seed, digest = outcome["seed"], digest_of(outcome)
        if outcome["faults"]:
            print(f"seed {seed}: {outcome['faults'][0][:300]}", flush=True)
        if options.digests:
            print(digest)
        if seen.setdefault(seed, digest) != digest:
            differ += 1
            print(f"seed {seed} differs from its first run: {seen[seed]}, then {digest}", flush=True)
    print(f"{totals}, {totals.seeds / (time.monotonic() - began):.1f} by the clock")
    print("\n".join(totals.lines()))
    if options.twice:
        print(f"{len(seen)} seeds run twice, {differ} differ")
    if options.tally:
        with options.tally.open("a") as file:
            file.write(json.dumps(vars(totals)) + "\n")
    return 1 if totals.failed or differ else 0


def _breaks(runner: Runner, options: argparse.Namespace) -> int:
    """The table: which seed is the first to find each break."""
    missed = 0
    print("| invariant | break | found by seed | as |\n|---|---|---|---|")
    for name, one in BREAKS.items():
        if options.only and name not in options.only:
            continue
        found = _first_found(runner, one, options)
        missed += found is None
        seed, fault = (found["seed"], found["faults"][0]) if found else ("none", "")
        print(
            f"| {one.invariant} | `{name}`: {one.what} | {seed} | {' '.join(fault.split())[:90]} |",
            flush=True,
        )
    for invariant, why in OUT_OF_REACH.items() if not options.only else ():
        print(f"| {invariant} | | out of reach | {why} |")
    return 1 if missed else 0


def _first_found(runner: Runner, one: Break, options: argparse.Namespace) -> dict[str, Any] | None:
    """The outcome of the lowest seed that finds it; worlds without what the break is about are left out."""
    found: list[dict[str, Any]] = []
    first = SHARDED_FROM if one.on_shards else 0
    near = (first + seed for seed in _seeds(options) if one.concerns(plan_of(first + seed)))
    seeds = takewhile(lambda _: not found, near)  # those that run already may be lower
    for outcome in runner.outcomes(seeds, one.apply):
        if outcome["faults"]:
            found.append(outcome)
    return min(found, key=lambda outcome: int(outcome["seed"]), default=None)


def _memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


if __name__ == "__main__":
    sys.exit(main())
