"""The benchmark of slow lanes in short: a bad source among a hundred does not hold up the good ones (R42)."""

from __future__ import annotations

import pytest

from bench import lanes

pytestmark = pytest.mark.slow("measures speed")


async def test_the_good_ones_go_on_beside_a_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a lane the handlers fall behind for good: waiting does not help there.
    monkeypatch.setattr(lanes, "_BAD_S", 0.5)
    monkeypatch.setattr(lanes, "BAD_PER_S", 200)
    monkeypatch.setattr(lanes, "_LAST_S", 5.0)
    alone, with_lane, without = await lanes.run(0.6)
    assert alone.handled == alone.sent > 0
    assert with_lane.handled > 0.9 * with_lane.sent
    assert without.handled < 0.8 * without.sent
    assert with_lane.p99_ms < without.p99_ms
