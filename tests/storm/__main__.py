"""Run storms, one after the other, and write a report of each: python -m tests.storm --help.

make storm HOURS=1 STORE=postgres
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from .plan import SURROUNDINGS
from .storm import Storm

_KINDS = ("sqlite", "postgres", "mariadb")


def main() -> int:
    asked = _arguments()
    kinds = [asked.store] if asked.store else list(_KINDS)
    seed = random.randrange(1_000_000) if asked.seed is None else asked.seed
    seconds = asked.hours * 3600 / len(kinds)
    clean = [_storm(kind, seed, seconds, asked) for kind in kinds]
    return 0 if all(clean) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description="Storms over real processes.")
    parser.add_argument("--hours", type=float, default=1.0, help="of all storms together")
    parser.add_argument("--store", choices=sorted(SURROUNDINGS), help="one store instead of all three")
    parser.add_argument("--seed", type=int, help="of the plan of faults; the report names it")
    parser.add_argument("--report", type=Path, default=Path("build/storm"), help="the folder for the reports")
    parser.add_argument("--keep", action="store_true", help="keep the journals of all processes")
    return parser.parse_args()


def _storm(kind: str, seed: int, seconds: float, asked: argparse.Namespace) -> bool:
    print(f"{kind}: {seconds:.0f} s of storm, seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix=f"postroom-storm-{kind}-"))
    report = asyncio.run(Storm(kind, folder, seed=seed, seconds=seconds, say=_say).run())
    page = report.write(asked.report)
    print(report.markdown(), flush=True)
    if report.clean and not asked.keep:
        _remove(folder)
    else:
        print(f"journals and errors of all processes: {folder}")
    print(f"report: {page}", flush=True)
    return report.clean


def _say(line: str) -> None:
    print(line, flush=True)


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())
