"""The benchmarks in short: they run, and what they claim about shape holds even on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import backlog, latency, throughput
from bench.contenders import PostroomQueue, RowQueue

pytestmark = pytest.mark.slow("measures speed")


async def test_throughput_of_both_contenders() -> None:
    best: dict[tuple[str, str], float] = {}  # other tests run beside this one

    def fast(what: str) -> bool:  # twice as fast on a quiet machine
        return best["postroom", what] > 0.5 * best["one row per message", what]

    for _ in range(20):
        run = throughput.run([PostroomQueue, RowQueue], seconds=0.2, sizes=(100,), shapes=((1000, 1),))
        async for r in run:
            assert r.messages >= 1000 and r.cpu_s > 0
            best[r.contender, r.what] = max(r.per_s, best.get((r.contender, r.what), 0))
        assert len(best) == 4
        if fast("publish") and fast("consume + ack"):
            return
    raise AssertionError(best)


async def test_latency_is_measured_from_call_to_confirmation(tmp_path: Path) -> None:
    published = await latency.publish(PostroomQueue(), 0.5)
    received = await latency.end_to_end(0.5)
    assert published.samples == received.samples == 500
    assert 0 < published.p50_ms <= published.p99_ms <= published.max_ms
    assert latency.bare_commit(0.2).samples == 200
    confirmed, received = await latency.served(0.5)
    assert confirmed.samples == received.samples == 500 and (received.cpu_percent or 0) > 0


async def test_cost_does_not_grow_with_the_backlog() -> None:
    few = many = 0.0
    for _ in range(8):  # other tests run beside this one; `make bench` is exact
        few = max(few, (await backlog.run(40_000, take=30_000)).per_s)
        many = max(many, (await backlog.run(400_000, take=30_000)).per_s)
        if many > 0.25 * few:
            return
    raise AssertionError((few, many))  # ten times the backlog
