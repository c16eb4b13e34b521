"""Splits, merges and moves while producers write, ordered groups read, and all are killed -9 (R25, R26).

Whoever dies in the middle of a change leaves it to those who need it: nothing waits for the dead (I11). Every
confirmed message is handled by both ordered groups, in the order of its key, whatever partitions the key has
been in (I4, I10); none is stored twice.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

import postroom
from postroom.testing import check
from tests.ready import ready
from tests.servers import MariaServer, PostgresServer

from .crew import Crew
from .stage import LONG, SECONDS, finish, hire, judge, make_topic, until

_GROUPS = {"ledger": True, "audit": True}
_PAUSE_S = 0.1  # of a producer: eleven processes share the machine, and a change needs its time of it
_TROUBLE_S = SECONDS if LONG else 4.0
_LEAST = int(_TROUBLE_S / 2)  # changes: 30 in a minute
_MORE = 200  # messages of a producer: to every partition
_CHANGE_S = (0.01, 0.04)  # about what a change takes on SQLite, and on a busy server


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 180)
async def test_order_is_kept_while_the_route_changes(store_url: str, tmp_path: Path) -> None:
    await _trouble(store_url, tmp_path, {})


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 180)
async def test_order_is_kept_across_two_shards(
    postgres_server: PostgresServer, mariadb_server: MariaServer, tmp_path: Path
) -> None:
    """Of different kinds; partitions are moved between them, too."""
    with ready(postgres_server) as first, ready(mariadb_server) as second:
        await _trouble(first.url, tmp_path, {"b": second.url})


async def _trouble(url: str, folder: Path, shards: Mapping[str, str]) -> None:
    with Crew(url, folder, shards) as crew:
        async with postroom.connect(url, shards=shards) as mq:
            await make_topic(mq, "orders", groups=_GROUPS)
            await hire(crew, "orders", members=3, producers=4, pause_s=_PAUSE_S, groups=_GROUPS)
            for name in ("c0", "c1"):  # while one is on its way back from the dead, the other goes on
                crew.change("orders", name)
            await _kill_at_work(crew)
            await _changes_go_on(crew)
            await _kill_in_a_change(crew, again=False)
            crew.dismiss("changer")
            await _all_go_on(crew)
            crew.dismiss("producer")
            await _all_handled(crew)
            await finish(mq, crew, "orders")
            route = await mq.route("orders")
            print(f"{route.version - 1} changes: {_changes(crew)}; killed: {_killed(crew)}")
            assert route.version - 1 >= _LEAST
            assert {piece.shard for piece in route.partitions} == {"first", *shards}
            await judge(mq, crew, "orders", groups=_GROUPS)


async def _kill_at_work(crew: Crew) -> None:
    """For the time of the test: changers as often as producers, and as consumers."""
    end = time.monotonic() + _TROUBLE_S
    while time.monotonic() < end or _too_few(crew, end):
        await asyncio.sleep(random.uniform(0.1, 0.6))
        role = random.choice(("producer", "consumer", "changer"))
        if role == "changer":
            await _kill_in_a_change(crew)
        elif pids := crew.at(role):
            crew.kill(random.choice(pids))


def _too_few(crew: Crew, end: float) -> bool:
    """A short run on a busy machine goes on for a while; a long one must have made its changes."""
    return not LONG and crew.count("changed") < _LEAST and time.monotonic() < end + 30


async def _kill_in_a_change(crew: Crew, *, again: bool = True) -> None:
    """At a random step of it, if one begins soon."""
    give_up_at = time.monotonic() + 2
    while not (pids := crew.at("changer", "changing")):
        if time.monotonic() > give_up_at:
            return
        await asyncio.sleep(0.001)
    await asyncio.sleep(random.uniform(0, random.choice(_CHANGE_S)))
    crew.kill(pids[0], again=again)


async def _changes_go_on(crew: Crew) -> None:
    """What somebody left does not stop the others."""
    before = crew.count("changed")
    await until(lambda: crew.count("changed") > before, "the route is changed again")


async def _all_go_on(crew: Crew) -> None:
    """Nobody is left who changes anything: what was left is finished by those who wait for it (I11)."""
    before = crew.notes("producer", "confirmed")
    await until(
        lambda: all(now > before[pid] + _MORE for pid, now in crew.notes("producer", "confirmed").items()),
        "every producer goes on",
    )


async def _all_handled(crew: Crew) -> None:
    """By every group; if not within two minutes, the verdict names what is lost."""
    began = time.monotonic()
    for group in _GROUPS:
        while check.group(crew.history("orders", group)).of("lost"):
            await asyncio.sleep(0.5)
            if time.monotonic() > began + 120:
                return
    print(f"all handled {time.monotonic() - began:.1f} s after the last was sent")


def _changes(crew: Crew) -> Counter[str]:
    """What the changers noted: what they began and never saw the end of was left."""
    done = Counter(value.split("-")[0] for value in crew.values("changer", "changed"))
    refused = len(crew.values("changer", "refused"))
    left = len(crew.values("changer", "changing")) - done.total() - refused
    return done + Counter(refused=refused, left=left)


def _killed(crew: Crew) -> Counter[str]:
    return Counter(title.split("-")[0] for title in crew.killed)
