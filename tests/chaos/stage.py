"""What the tests have in common: a topic and its groups at the beginning, the verdict at the end.

`SECONDS` is how long a test makes trouble: short in `make test-all`, POSTROOM_CHAOS_SECONDS in `make chaos`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

import postroom
from postroom.endpoint.values import Lag
from postroom.testing import check

from .crew import Crew
from .values import parse

__all__ = [
    "GROUPS",
    "LONG",
    "SECONDS",
    "arrives",
    "drained",
    "finish",
    "hire",
    "judge",
    "kill_at_random",
    "make_topic",
    "recovered",
    "until",
    "verdict",
]

LONG = "POSTROOM_CHAOS_SECONDS" in os.environ
SECONDS = float(os.environ.get("POSTROOM_CHAOS_SECONDS", "3"))
ENOUGH = 50  # messages, for a verdict
_HELD_NS = 4_000_000_000  # whom a crash forgot has a message for so long, a lease and some more
_LAZY_NS = 3_000_000_000
"""PostgreSQL flushes what was committed lazily within three times `wal_writer_delay`, 0.6 s, and as long as a
flush takes: seconds, on a disk that has much else to write."""
GROUPS = {"billing": False, "ledger": True}
"""By name: whether it is ordered."""


async def make_topic(
    mq: postroom.Connection,
    topic: str,
    *,
    storage: Literal["durable", "volatile"] = "durable",
    lease: float = 1.5,
    groups: Mapping[str, bool] = GROUPS,
) -> None:
    await mq.create_topic(topic, partitions=3, storage=storage)
    for group, ordered in groups.items():
        mode = "ordered" if ordered else "shared"
        await mq.create_group(topic, group, mode=mode, lease=lease, max_attempts=10)


async def hire(
    crew: Crew,
    topic: str,
    *,
    members: int = 2,
    producers: int = 2,
    pause_s: float = 0.02,
    delays: tuple[float, ...] = (),
    groups: Mapping[str, bool] = GROUPS,
) -> None:
    """Producers and the members of each group; returns when all of that is at work."""
    for group, ordered in groups.items():
        crew.consume(topic, group, members=members, ordered=ordered)
    for number in range(producers):
        crew.produce(topic, f"p{number}", delays, pause_s)
    await until(lambda: crew.count("settled") > 0, "the first message is settled")


async def kill_at_random(crew: Crew) -> None:
    """For the time of the test."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        await asyncio.sleep(random.uniform(0.05, 0.4))
        crew.kill_any()


async def finish(mq: postroom.Connection, crew: Crew, topic: str, seconds: float = 60) -> None:
    """No more is sent; what was sent is settled by those who live, and then they go.

    On a busy machine the time of trouble may have been too short for enough messages.
    """
    await until(lambda: crew.count("confirmed", topic) > ENOUGH, "enough is confirmed")
    crew.dismiss("producer")
    await drained(mq, topic, seconds)
    crew.dismiss("consumer")


async def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """TimeoutError: that says nothing of messages yet, and may be the machine (`tests.rerun`)."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what}: not within {seconds} s")
        await asyncio.sleep(0.05)


async def arrives(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """AssertionError: what does not arrive is lost."""
    try:
        await until(condition, what, seconds)
    except TimeoutError as error:
        raise AssertionError(str(error)) from None


async def recovered(crew: Crew, what: str, since: float) -> None:
    """Everybody is at work again: all of them settle, and all of them send."""
    before = {role: crew.notes(role, verb) for role, verb in _WORK.items()}

    def idle() -> dict[str, int]:
        return {
            f"{role} {pid}": count
            for role, verb in _WORK.items()
            for pid, count in crew.notes(role, verb).items()
            if count <= before[role].get(pid, 0)
        }

    try:
        await until(lambda: not idle(), f"work goes on after {what}")
    except TimeoutError as stuck:
        raise TimeoutError(f"{stuck}; idle since they had done so much: {idle()}") from None
    print(f"{what}: all at work again after {time.monotonic() - since:.2f} s")


_WORK = {"producer": "confirmed", "consumer": "settled"}


async def drained(mq: postroom.Connection, topic: str, seconds: float = 60) -> None:
    """Wait until nothing is delayed any more, and every group has settled everything. What has not become
    less for so long is stuck."""
    began = since = time.monotonic()
    least = 2**62
    while left := await _left(mq, topic):
        count = sum(lag.total.messages for lag in left if isinstance(lag, Lag))
        if count < least:
            least, since = count, time.monotonic()
        assert time.monotonic() < since + seconds, f"{topic} is stuck: {left}"
        await asyncio.sleep(0.1)
    print(f"{topic}: drained in {time.monotonic() - began:.1f} s")


async def _left(mq: postroom.Connection, topic: str) -> list[object]:
    delayed = (await mq.topic(topic)).delayed
    lags = [await mq.lag(topic, group.name) for group in await mq.groups(topic)]
    behind = [lag for lag in lags if lag.total.messages]
    return [f"{delayed} delayed", *behind] if delayed or behind else []


async def judge(
    mq: postroom.Connection,
    crew: Crew,
    topic: str,
    *,
    groups: Mapping[str, bool] = GROUPS,
    since_ns: int = 0,
) -> None:
    """Fails with what is wrong; everything must be drained, and the consumers gone.

    `since_ns`: what was sent before may have been lost from the log.
    """
    stored = [message.value.decode() async for message in mq.read(topic)]
    twice = [value for value, count in Counter(stored).items() if count > 1]
    assert not twice, f"{len(twice)} messages were stored twice: {twice[:5]}"
    for group, ordered in groups.items():
        report = verdict(crew, topic, group, ordered=ordered, since_ns=since_ns)
        print(f"{topic}/{group}: {len(crew.killed)} kills, {len(crew.outages)} outages, {report}")
        assert report.clean, f"{topic}/{group}: {report}"
        assert report.confirmed > ENOUGH, report
        await _judge_dead_letters(mq, topic, group, stored, some_lost=since_ns > 0)


def verdict(crew: Crew, topic: str, group: str, *, ordered: bool = False, since_ns: int = 0) -> check.Verdict:
    """What became of the messages of one group."""
    history = crew.history(topic, group)
    return check.group(history, ordered=ordered, since=since_ns, lease_ns=_HELD_NS, lazy_ns=_LAZY_NS)


async def _judge_dead_letters(
    mq: postroom.Connection, topic: str, group: str, stored: list[str], *, some_lost: bool
) -> None:
    """Those that were to die, each once, and no innocents (I12, I14)."""
    letters = Counter(
        letter.value.decode() for letter in await mq.dead_letters(topic, group, limit=1_000_000)
    )
    expected = Counter(value for value in stored if parse(value).fate == "dead")
    if some_lost:
        expected |= Counter({letter: 1 for letter in letters if parse(letter).fate == "dead"})
    assert letters == expected
