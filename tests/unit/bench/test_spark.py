"""The bench beside Spark's Kafka source: ratios are taken within a round; without Kafka there are none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("deltalake")

from bench import spark_kafka, spark_memory
from bench.peers.peer import NotInstalled
from bench.spark_beside import KAFKA, WORKS, Beside, goals, table
from bench.spark_memory import Memory

STREAM = next(work for work in WORKS if work.what == "stream -> noop")
SMALL = next(work for work in WORKS if work.latency)
OURS = "SQLite file"


def beside(*sides: str, **found: dict[str, list[list[float]]]) -> Beside:
    named = {STREAM.what: found["stream"], SMALL.what: found["small"]}
    return Beside("connector", 3, named, {side: Memory(1, 1) for side in sides})


def test_ratios_are_those_of_one_round_each() -> None:
    """Each round is twice as slow as the one before it: the ratios do not show it."""
    found = beside(
        KAFKA,
        OURS,
        stream={KAFKA: [[400.0], [200.0], [100.0]], OURS: [[640.0], [320.0], [160.0]]},
        small={KAFKA: [[100.0, 900.0, 110.0]] * 3, OURS: [[50.0, 55.0, 60.0]] * 3},
    )
    assert found.ratio(STREAM, OURS) == pytest.approx(1.6)
    assert found.ratio(SMALL, OURS) == pytest.approx(2), "half the time is twice as fast"
    assert [(value, met) for _, _, value, met in goals(found)] == [("1.60", True), ("2.00", True)]
    assert table(found).row_count == 3


def test_without_kafka_there_is_no_column(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POSTROOM_BENCH_SPARK_KAFKA", str(tmp_path / "nothing"))
    assert spark_kafka.connector() is None and spark_kafka.connector_settings() == {}
    with pytest.raises(NotInstalled, match="make peers"), spark_kafka.kafka():
        pass
    found = beside(OURS, stream={OURS: [[640.0]]}, small={OURS: [[50.0]]})
    assert list(goals(found)) == [] and len(table(found).columns) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")
def test_memory_is_that_of_a_process_and_those_below_it() -> None:
    java, python = spark_memory._taken(os.getpid())
    assert java == 0 and python > 1024 * 1024
