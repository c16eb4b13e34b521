"""The benchmarks of fairness and of idle members in short: they run, and count what they say."""

from __future__ import annotations

import pytest

from bench import fairness, idle
from bench.grounds import ground

pytestmark = pytest.mark.slow("measures speed")


async def test_a_quiet_producer_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "_BACKLOG", 50_000)
    with ground("sqlite") as where:
        found = await fairness.run(where, 0.3)
    alone, *others = found
    assert alone.others_per_s == 0 and all(one.others_per_s > 0 for one in others)
    assert all(0 < one.stored_p50 <= one.stored_p99 for one in found)
    assert all(one.received_p99 >= one.received_p50 for one in found if "same" not in one.beside)
    assert others[0].allowed_p99(alone) > fairness.FACTOR * alone.stored_p99


async def test_idle_members_hardly_touch_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_SETTLE_S", 0.3)
    with ground("sqlite") as where:
        found = await idle.run(where, groups=5, members=200, seconds=1.0)
    assert (found.groups, found.members) == (5, 200)
    assert found.looks <= 40  # of 200 members, each of which would look
    assert found.transactions_per_s < 100
    assert found.received_ms > 0
