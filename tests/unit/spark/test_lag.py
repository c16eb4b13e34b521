"""The lag of a stream, out of what Spark says of its progress."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from pyspark.sql.streaming.listener import StreamingQueryProgress

import postroom.spark
from postroom.errors import InvalidSetting
from postroom.spark.lag import Lag


def offsets(**topics: dict[str, int]) -> dict[str, Any]:
    return {"v": 1, "topics": topics, "ids": dict.fromkeys(topics, 1)}


def progress(*sources: dict[str, Any], name: str | None = "copy") -> Any:
    """As it is when Spark hands it to Python."""
    made = StreamingQueryProgress.fromJson(
        {
            "id": "8ca1d975-64de-4178-a66d-c770001c7f42",
            "runId": "f4d26296-3913-4b5a-bbac-e5d65aed2f89",
            "name": name,
            "timestamp": "2026-11-16T15:04:16.437Z",
            "batchId": 2,
            "batchDuration": 20,
            "durationMs": {},
            "stateOperators": [],
            "sources": [_source(one) for one in sources],
            "sink": {"description": "files", "numOutputRows": -1},
            "numInputRows": 5,
            "inputRowsPerSecond": 1.0,
            "processedRowsPerSecond": 1.0,
        }
    )
    return made


def _source(given: dict[str, Any]) -> dict[str, Any]:
    figures = {"numInputRows": 5, "inputRowsPerSecond": 1.0, "processedRowsPerSecond": 1.0}
    texts = {name: value if value is None else json.dumps(value) for name, value in given.items()}
    return {"description": "a source", "startOffset": None, "latestOffset": None, **figures, **texts}


BEHIND = {
    "endOffset": offsets(orders={"0": 10, "1": 7}, paid={"0": 3}),
    "latestOffset": offsets(orders={"0": 13, "1": 7, "2": 4}, paid={"0": 3}),
}
RATE = {"endOffset": 17, "latestOffset": None}


@pytest.mark.parametrize("of", ["query", "progress", "json"])
def test_per_topic_and_in_all(of: str) -> None:
    given: Any = progress(RATE, BEHIND)
    if of == "query":
        given = SimpleNamespace(lastProgress=given)
    elif of == "json":  # as it stands in a log
        text = {name: json.loads(one) for name, one in _source(BEHIND).items() if "Offset" in name and one}
        given = {"name": "copy", "sources": [text]}
    found = postroom.spark.lag(given)
    assert found is not None and found.query == "copy" and found.behind == 7
    assert {topic: one.behind for topic, one in found.topics.items()} == {"orders": 7, "paid": 0}
    assert found.topics["orders"].newest == {0: 13, 1: 7, 2: 4}
    assert found.topics["orders"].read == {0: 10, 1: 7}


def test_a_topic_that_is_read_twice_is_as_late_as_the_slower_one() -> None:
    later = {**BEHIND, "endOffset": offsets(orders={"0": 2}, paid={"0": 3})}
    found = postroom.spark.lag(progress(BEHIND, later))
    assert found is not None and found.topics["orders"].read == {0: 2, 1: 7}


def test_where_there_is_nothing_to_say() -> None:
    assert postroom.spark.lag(SimpleNamespace(lastProgress=None)) is None
    with pytest.raises(InvalidSetting, match=r"no source of this query is a stream from Postroom"):
        postroom.spark.lag(progress(RATE))
    with pytest.raises(InvalidSetting, match=r"lag\(\) takes a streaming query, or a progress of one"):
        postroom.spark.lag("orders")


def test_the_listener_tells_shows_and_forgets(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Lag] = []
    listener = postroom.spark.lag_listener(told.append)
    listener.onQueryProgress(SimpleNamespace(progress=progress(RATE)))  # of others
    listener.onQueryProgress(SimpleNamespace(progress=progress(BEHIND)))
    assert [one.behind for one in told] == [7]

    def shown(name: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"query": "copy", "topic": "orders"})

    assert shown("postroom_stream_lag_offsets") == 7
    assert (shown("postroom_stream_newest_offset"), shown("postroom_stream_read_offset")) == (24, 17)
    listener.onQueryTerminated(SimpleNamespace(runId=progress(BEHIND).runId))
    assert shown("postroom_stream_lag_offsets") is None
    with caplog.at_level(logging.INFO, "postroom.spark"):
        postroom.spark.lag_listener().onQueryProgress(SimpleNamespace(progress=progress(BEHIND, name=None)))
    assert "is 7 offsets behind: orders 7, paid 0" in caplog.text
