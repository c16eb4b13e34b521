"""The peers' harness in short: figures come from two real processes, and a contender's trouble is a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

import pytest
from rich.console import Console

from bench.measure import Latency
from bench.peers.contenders import PEERS
from bench.peers.peer import NotInstalled, Peer
from bench.peers.postroom_peers import PostroomEmbedded
from bench.peers.redis_streams import RedisStreams
from bench.peers.run import Result, Speed, run
from bench.peers.table import latency_table, speed_table

pytestmark = pytest.mark.slow("measures speed")

WHATS = ["publish", "consume + ack", "publish beside", "consume + ack beside"]


class Missing(PostroomEmbedded):
    name = "missing"

    @contextmanager
    def serve(self) -> Iterator[str]:
        raise NotInstalled("not installed: make peers")
        yield


class Broken(PostroomEmbedded):
    name = "broken"

    async def create(self, address: str, queue: str) -> None:
        raise ValueError("[no] queue")


async def test_every_figure_of_a_contender_is_there_and_trouble_of_others_is_a_reason() -> None:
    found = await run([Missing, Broken, PostroomEmbedded], seconds=0.3, sizes=(100,))
    missing, broken, ours = found.results
    assert ours.reason == ""
    assert [speed.what for speed in ours.speeds] == WHATS
    published, drained, _, beside = ours.speeds
    assert published.messages % PostroomEmbedded.batch == 0 and published.seconds >= 0.3
    assert 0 < drained.messages < published.messages  # the first that were taken started the clock
    assert beside.messages > 0 and all(speed.cpu_s > 0 for speed in ours.speeds)
    assert ours.latency is not None and ours.latency.samples == 540  # 0.6 s without the first tenth
    assert 0 < ours.latency.p50_ms <= ours.latency.p99_ms <= ours.latency.max_ms
    assert found.commit.samples == 600
    assert missing.reason == "not installed: make peers" and not missing.speeds
    assert broken.reason == "failed: ValueError('[no] queue')" and not broken.speeds


async def test_a_peer_that_is_installed_runs_in_the_same_harness() -> None:
    (found,) = (await run([RedisStreams], seconds=0.2, sizes=(100,))).results
    if found.reason.startswith("not installed"):
        pytest.skip(found.reason)  # in CI too: peers are for the benchmark
    assert found.reason == ""
    assert [speed.what for speed in found.speeds] == WHATS
    assert found.latency is not None and found.latency.samples == 360


def test_ratios_are_of_postroom_to_each_and_a_reason_is_shown() -> None:
    def result(name: str, rate: int, p99_ms: float) -> Result:
        speed = Speed(100, "publish", rate, 1.0, 0.5)
        return Result(name, "", "", [speed], Latency(name, "publish until received", 1.0, p99_ms, 9.0, 10))

    results = [
        Result("postroom", "", "not available: [yet]"),
        result("postroom embedded", 9000, 2.0),
        result("redis", 3000, 5.0),
    ]
    speeds, latencies = _rows(speed_table(results)), _rows(latency_table(results, results[1].latency))  # type: ignore[arg-type]
    assert any(row[0] == "postroom: not available: [yet]" for row in speeds)
    assert any(row[:4] == ["redis", "100", "3,000", "3.0"] for row in speeds)
    assert any(row[0] == "redis" and row[-2:] == ["2.5", "2.5"] for row in latencies)


@pytest.mark.parametrize("kind", PEERS)
def test_contenders_say_how_they_are_used(kind: type[Peer]) -> None:
    assert kind.how and kind.batch * kind.at_once >= 1


def _rows(table: object) -> list[list[str]]:
    text = StringIO()
    Console(file=text, width=200).print(table)
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.getvalue().splitlines()]
