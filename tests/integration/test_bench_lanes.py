"""The benchmark of slow lanes in short: a bad source among a hundred does not hold up the good ones (R42)."""

from __future__ import annotations

from bench import lanes


async def test_the_good_ones_go_on_beside_a_bad_one() -> None:
    alone, with_lane, without = await lanes.run(1.0)
    assert alone.handled == alone.sent > 0
    assert with_lane.handled == with_lane.sent > 0  # all of them, within moments
    assert without.handled < without.sent / 2  # most of them wait behind the bad ones
    assert with_lane.p99_ms < without.p99_ms
