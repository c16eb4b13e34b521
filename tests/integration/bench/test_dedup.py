"""The benchmark of dedup by id in short: it runs, and the cost has the right size even on a busy machine."""

from __future__ import annotations

import pytest

from bench import dedup
from bench.grounds import ground

pytestmark = pytest.mark.slow("measures speed")


async def test_what_a_window_costs_a_producer() -> None:
    with ground("sqlite") as where:
        found = [await dedup.publish(where, 0.2, 4, "long", 1, keyed=False) for _ in range(3)]
    assert all(one.remembered >= 5_000 for one in found)
    assert (
        max(one.cpu_ratio for one in found) > 0.2
    )  # 0.7 on a quiet machine; other tests run beside this one


def test_the_table_of_ids() -> None:
    found = dedup.table(20_000, "short")
    assert (found.ids, found.new_ns > 0, found.known_ns > 0) == (20_000, True, True)
