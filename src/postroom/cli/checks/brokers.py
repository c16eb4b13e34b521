"""Checks of served brokers: who answers, who else is there, and whether their clock is ours."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ...errors import PostroomError
from .finding import Finding

if TYPE_CHECKING:
    from ...address import Address
    from ...wire.messages import Welcome

__all__ = ["check_brokers"]

_SET_CLOCKS = (
    "delayed messages, schedules and retention go by the queue's; set the clocks of this machine, of the "
    "brokers and of the database by NTP"
)
_FAR_MS = 5_000  # clocks that differ by more confuse people who read times
_TIMEOUT_MS = 5_000


async def check_brokers(address: Address) -> list[Finding]:
    """Those that the address names, then those that they know of."""
    found: list[Finding] = []
    told: dict[str, str] = {}  # address of others by the broker's id
    known: set[str] = set()
    for place in address.brokers:
        welcome, finding = await _greeted(place, "fail")
        found.append(finding)
        if welcome is not None:
            found += _clock(welcome, place)
            known.add(welcome.broker)
            told.update((one.id, one.address) for one in welcome.brokers)
    for id, place in told.items():
        if id not in known:
            found.append((await _greeted(place, "warn"))[1])
    return found


async def _greeted(place: str, bad: str) -> tuple[Welcome | None, Finding]:
    from ...client.reaching import by_environment
    from ...wire.link import connect
    from ...wire.messages import MAX_VERSION, MIN_VERSION, Hello

    way = by_environment()
    hello = Hello(MIN_VERSION, MAX_VERSION, "postroom doctor", way.token)
    began = time.perf_counter()
    try:
        link = await connect(place, hello, way.tls, timeout_ms=_TIMEOUT_MS)
    except PostroomError as error:
        advice = "" if bad == "fail" else "clients that are told of it cannot reach it: see --advertise"
        return None, Finding(f"broker {place}", "fail" if bad == "fail" else "warn", str(error), advice)
    took_ms = (time.perf_counter() - began) * 1000
    await link.close()
    await asyncio.sleep(0)
    said = f"answers within {took_ms:.0f} ms as version {link.welcome.version}, to {link.welcome.principal}"
    return link.welcome, Finding(f"broker {place}", "ok", said)


def _clock(welcome: Welcome, place: str) -> list[Finding]:
    ahead_ms = welcome.now_ms - time.time_ns() // 1_000_000
    if abs(ahead_ms) <= _FAR_MS:
        return []
    said = f"the clock of the queue is {ahead_ms / 1000:+.1f} s from this machine's"
    return [Finding(f"clock {place}", "warn", said, _SET_CLOCKS)]
