"""The benchmark of route changes in short: it runs, and counts the waits that belong to a change."""

from __future__ import annotations

import pytest

from bench import routes
from bench.grounds import ground
from bench.routes import Span

pytestmark = pytest.mark.slow("measures speed")


async def test_the_pause_of_a_producer() -> None:
    with ground("sqlite") as where:
        found = await routes.run(where, changes=4, quiet_s=0.3, between_s=0.1)
    assert (found.store, found.changes) == ("sqlite", 4)
    assert found.sends > 50 and 0 < found.quiet_p99_ms <= found.quiet_max_ms
    assert 0 < found.median_ms <= found.worst_ms < 20_000  # people look at the figures on a quiet machine


def test_the_longest_send_of_each_change_counts() -> None:
    sends = [Span(0, 0.001), Span(0.98, 1.04), Span(1.0, 1.02), Span(2.0, 2.1), Span(3.0, 3.004)]
    changes = [Span(1.0, 1.02), Span(1.9, 2.1)]
    found = routes.pauses("sqlite", sends, changes)
    assert (found.sends, round(found.median_ms), round(found.worst_ms)) == (5, 80, 100)
    assert (round(found.quiet_max_ms), round(found.change_ms)) == (4, 110)
    assert found.good and not routes.pauses("sqlite", [*sends, Span(2.0, 2.6)], changes).good
