"""Members of a broadcast group that are forgotten under load: deleted, paused meanwhile, killed -9 (R11).

Whoever was told that it missed messages may have missed those before; nobody misses one without having been
told afterwards. That holds for members with a name across their restarts, and for those without as long as
they live. An ordered group beside them loses nothing, and keeps its order (I5, I6).
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

import postroom

from .crew import Crew
from .member_process import GROUP
from .missed import missed
from .stage import LONG, SECONDS, arrives, hire, judge, make_topic, until

_TOPIC = "orders"
_GROUPS = {"ledger": True}
_NAMED = ("ann", "bob")


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 240)
async def test_nobody_misses_a_message_without_being_told(store_url: str, tmp_path: Path) -> None:
    with Crew(store_url, tmp_path) as crew:
        async with postroom.connect(store_url) as mq:
            await make_topic(mq, _TOPIC, groups=_GROUPS)
            for member in (*_NAMED, None, *([None] if LONG else [])):
                crew.belong(_TOPIC, member)
            await hire(crew, _TOPIC, groups=_GROUPS)
            await until(lambda: len(crew.at("member")) == len(crew.of("member")), "every member is there")
            forgotten = await _trouble(mq, crew)
            await _heal(mq, crew)
            await judge(mq, crew, _TOPIC, groups=_GROUPS)
        told = crew.count("missed")
        print(f"{forgotten} groups of members deleted, {len(crew.killed)} kills; told {told} times")
        assert forgotten and told > len(_NAMED)  # those with a name are told when they are new


async def _trouble(mq: postroom.Connection, crew: Crew) -> int:
    """For the time of the test; returns how many groups were deleted under their members."""
    end, forgotten = time.monotonic() + SECONDS, 0
    while not forgotten or time.monotonic() < end:
        pid = random.choice(crew.of("member"))
        what = random.choice(("delete", "delete", "delete while paused", "delete all", "kill"))
        if what == "kill":
            crew.kill(pid)
        else:
            crew.pause(pid, what == "delete while paused")
            try:
                forgotten += await _delete(mq, everybody=what == "delete all")
                await asyncio.sleep(random.uniform(0, 0.3))
            except postroom.StoreBusy:
                pass  # it was paused while it had the database locked
            finally:
                crew.pause(pid, False)
        await asyncio.sleep(random.uniform(0.05, 0.6))
    return forgotten


async def _delete(mq: postroom.Connection, *, everybody: bool) -> int:
    """Forget a member under its hands, or the group with all its members."""
    names = [info.name for info in await mq.groups(_TOPIC) if info.name.startswith(f"{GROUP}@")]
    if not names:
        return 0
    try:
        await mq.delete_group(_TOPIC, GROUP if everybody else random.choice(names), force=True)
    except postroom.UnknownGroup:
        return 0  # it left meanwhile
    return len(names) if everybody else 1


async def _heal(mq: postroom.Connection, crew: Crew) -> None:
    """All is well for a while; then no more is sent, and what was sent has arrived."""
    confirmed = crew.count("confirmed")
    await until(lambda: crew.count("confirmed") > confirmed + 200, "messages flow")
    crew.dismiss("producer")
    try:
        await arrives(lambda: not missed(crew, _TOPIC), "everything arrives")
    except AssertionError as late:
        raise AssertionError(f"missed, and not told: {_summary(crew)}") from late
    await _caught_up(mq, "ledger")
    for one in ("member", "consumer"):
        crew.dismiss(one)


async def _caught_up(mq: postroom.Connection, group: str) -> None:
    """Wait for as long as it comes nearer to the end: how fast it is depends on the machine."""
    began, deadline, least = time.monotonic(), 0.0, 2**62
    while left := (await mq.lag(_TOPIC, group)).total.messages:
        if left < least:
            least, deadline = left, time.monotonic() + 60
        assert time.monotonic() < deadline, f"{group} is stuck: {left} messages are left"
        await asyncio.sleep(0.2)
    print(f"{group}: caught up in {time.monotonic() - began:.1f} s")


def _summary(crew: Crew) -> dict[str, str]:
    found = missed(crew, _TOPIC)
    return {title: f"{len(values)}, such as {values[:3]}" for title, values in found.items()}
