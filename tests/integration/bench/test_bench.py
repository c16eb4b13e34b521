"""The benchmarks in short: they run, and what they claim about shape holds even on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import backlog, latency, throughput
from bench.contenders import PostroomQueue, RowQueue

pytestmark = pytest.mark.slow("measures speed")


async def test_throughput_of_both_contenders() -> None:
    best: dict[tuple[str, str], float] = {}  # of three: other tests run beside this one
    for _ in range(3):
        run = throughput.run([PostroomQueue, RowQueue], seconds=0.2, sizes=(100,), shapes=((1000, 1),))
        async for r in run:
            assert r.messages >= 1000 and r.cpu_s > 0
            best[r.contender, r.what] = max(r.per_s, best.get((r.contender, r.what), 0))
    assert len(best) == 4
    for what in ("publish", "consume + ack"):  # twice as fast on a quiet machine
        assert best["postroom", what] > 0.5 * best["one row per message", what]


async def test_latency_is_measured_from_call_to_confirmation(tmp_path: Path) -> None:
    published = await latency.publish(PostroomQueue(), 0.5)
    received = await latency.end_to_end(0.5)
    assert published.samples == received.samples == 500
    assert 0 < published.p50_ms <= published.p99_ms <= published.max_ms
    assert latency.bare_commit(0.2).samples == 200


async def test_cost_does_not_grow_with_the_backlog() -> None:
    few = max([(await backlog.run(40_000, take=30_000)).per_s for _ in range(3)])
    many = max([(await backlog.run(400_000, take=30_000)).per_s for _ in range(3)])
    assert many > 0.25 * few  # ten times the backlog, best of three beside other tests; `make bench` is exact
