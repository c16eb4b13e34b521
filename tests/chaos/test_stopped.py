"""Keys that stop while members and operators are killed -9 (R23, I5, I10, I12).

The group stops a key when a message has used up its attempts; an operator restarts, skips or drops it, while
members hold the partitions. Every confirmed message is handled, or was noted as skipped or dropped: those
that were skipped are dead letters, once. Nothing is handled out of the order of its key, and nothing after it
was dropped.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import pytest

import postroom

from .crew import Crew
from .stage import SECONDS, drained, hire, until, verdict
from .values import parse

_GROUPS = {"ledger": True}
_PAUSE_S = 0.6  # of a producer: of fifty messages one stops its key, and somebody has to decide about it


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 180)
async def test_what_stopped_is_operated_while_all_are_killed(store_url: str, tmp_path: Path) -> None:
    with Crew(store_url, tmp_path) as crew:
        async with postroom.connect(store_url) as mq:
            await mq.create_topic("orders", partitions=3)
            await mq.create_group(
                "orders", "ledger", mode="ordered", lease=1.5, max_attempts=2, exhausted="stop"
            )
            await hire(crew, "orders", members=3, producers=2, pause_s=_PAUSE_S, groups=_GROUPS)
            for name in ("o0", "o1"):
                crew.operate("orders", name, "ledger")
            await _kill_at_random(crew)
            verbs = ("restarted", "skipped", "dropped")
            await until(lambda: all(crew.count(verb) for verb in verbs), "each of them was decided")
            crew.dismiss("producer")
            await drained(mq, "orders", SECONDS + 60)
            for role in ("consumer", "operator"):
                crew.dismiss(role)
            await _judge(mq, crew)


async def _kill_at_random(crew: Crew) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        await asyncio.sleep(random.uniform(0.1, 0.5))
        if pids := crew.at(random.choice(("producer", "consumer", "operator"))):
            crew.kill(random.choice(pids))


async def _judge(mq: postroom.Connection, crew: Crew) -> None:
    report = verdict(crew, "orders", "ledger", ordered=True)
    noted = {verb: set(crew.values("operator", verb)) for verb in ("skips", "skipped", "drops", "dropped")}
    letters = Counter([one.value.decode() for one in await mq.dead_letters("orders", "ledger", limit=10**6)])
    done = {verb: len(crew.values("operator", verb)) for verb in ("restarted", "skipped", "dropped")}
    print(f"{len(crew.killed)} kills, {done}, {len(letters)} dead letters; {report}")
    assert {fault.kind for fault in report.faults} <= {"lost"}, report
    assert report.confirmed > 50, report
    lost = [value for value in report.of("lost") if value not in noted["drops"] and value not in letters]
    assert not lost, f"{len(lost)} messages were neither handled nor decided about: {lost[:5]}"
    assert [value for value, count in letters.items() if count > 1] == [], "moved twice (I12)"
    assert noted["skipped"] <= letters.keys(), "skipped, and not among the dead letters"
    to_die = {value for value in letters if parse(value).fate == "dead"}
    assert letters.keys() <= to_die | noted["skips"], "a dead letter that nobody asked for"
    assert _handled_later(crew) == [], "handled after it was skipped or dropped"


def _handled_later(crew: Crew) -> list[str]:
    """What somebody began to handle after an operator had noted that it is done with."""
    ended: dict[str, int] = {}
    for notes in crew.journals("operator-*").values():
        ended.update({entry.value: entry.at for entry in notes if entry.verb in ("skipped", "dropped")})
    return [
        entry.value
        for notes in crew.journals("consumer-orders-ledger-*").values()
        for entry in notes
        if entry.verb == "handled" and entry.at > ended.get(entry.value, entry.at)
    ]
