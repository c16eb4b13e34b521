"""The benchmark of delayed messages runs; its figures are for people: `python -m bench.delayed`."""

from __future__ import annotations

import pytest

from bench import delayed
from bench.grounds import ground

pytestmark = pytest.mark.slow("measures speed")


@pytest.mark.parametrize("a_row", [100, 1])
async def test_burst(a_row: int) -> None:
    with ground("sqlite") as where:
        found = await delayed.burst(where, 400, a_row)
    assert (found.messages, found.a_row) == (400, a_row)
    assert found.scheduled_per_s > 10 and found.delivered_per_s > 10


async def test_lateness() -> None:
    with ground("sqlite") as where:
        found = await delayed.lateness(where, 0.3)
    assert (found.samples, found.early) == (300, 0)


async def test_others() -> None:
    with ground("sqlite") as where:
        found = await delayed.others(where, 200, 0.1, turns=1)
    assert found.publish_per_s > 10 and found.consume_per_s > 10
