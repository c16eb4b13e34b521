"""One send at a time, Postroom and a row queue in turn: a short while each, again and again, in one run.

What else the machine does, and how fast its disk is just now, meets both; `bench ops`, which measures one
after the other, is quicker and says more.

    python -m bench.in_turn [sqlite|postgresql|mariadb] [ROUNDS]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median

from .contenders import Contender
from .grounds import STORES, ground
from .measure import timed

_VALUE, _SECONDS = b"x" * 100, 0.6


async def compare(store: str, rounds: int) -> None:
    with ground(store) as where, tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        both = [make() for make in where.contenders[:2]]
        for contender in both:
            await contender.open(Path(tempfile.mkdtemp(dir=folder)))
        rates: list[list[float]] = [[], []]
        cpus: list[list[float]] = [[], []]
        for turn in range(-1, rounds):  # the first is not counted
            for at in (0, 1) if turn % 2 else (1, 0):
                rate, cpu_us = await _measured(both[at])
                if turn >= 0:
                    rates[at].append(rate)
                    cpus[at].append(cpu_us)
        for at, contender in enumerate(both):
            print(f"{contender.name:28} {median(rates[at]):8,.0f}/s {median(cpus[at]):6.0f} us of CPU")
            await contender.close()
    each = " ".join(f"{one / other:.2f}" for one, other in zip(*rates, strict=True))
    print(f"{store}: {median(rates[0]) / median(rates[1]):.2f} times as many; by rounds: {each}", flush=True)


async def _measured(contender: Contender) -> tuple[float, float]:
    count, took, cpu = await timed(_SECONDS, 1_000_000, lambda: contender.publish([_VALUE]))
    return count / took, cpu / count * 1e6


def main() -> None:
    stores, rounds = [one for one in sys.argv[1:] if one in STORES] or STORES, sys.argv[-1]
    for store in stores:
        asyncio.run(compare(store, int(rounds) if rounds.isdecimal() else 12))


if __name__ == "__main__":
    main()
