"""A task reads in the database itself: the same as through a broker, and nobody is told that it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

import postroom
import postroom.sync
from postroom.address import parse
from postroom.errors import InvalidSetting, UnknownPartition
from postroom.spark.options import Reach
from postroom.spark.planning import Span
from postroom.spark.queue import Queue
from postroom.spark.reading import task_log
from postroom.store import open_store

MESSAGES = 500


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path}/queue.db"
    with postroom.sync.connect(found) as mq:
        mq.create_topic("t", partitions=1)
        for first in range(0, MESSAGES, 100):
            mq.send_many("t", [postroom.Message(b"%d" % n, key=b"k") for n in range(first, first + 100)])
    return found


def span_of(url: str) -> Span:
    with postroom.sync.connect(url) as mq:
        return Span("t", 0, mq.route("t").ranges[0].partition_id, 0, MESSAGES)


def test_it_fetches_what_a_broker_fetches(url: str) -> None:
    span = span_of(url)
    with task_log(Reach(url)) as log, Queue(Reach(url)) as queue:
        for offset in (0, 150, MESSAGES - 1):
            found = log.fetch_ahead(span, offset).result()
            assert found == queue.fetch(span, offset)
            assert found.batches[0].base_offset <= offset <= found.batches[0].last_offset
            assert (found.start, found.end) == (0, MESSAGES)


def test_it_is_not_listed_among_those_that_use_the_queue(url: str) -> None:
    span = span_of(url)
    store = open_store(parse(url))
    try:
        with task_log(Reach(url)) as log:
            assert log.fetch_ahead(span, 0).result().batches
            assert store.brokers.announced() == []
        with Queue(Reach(url)):
            assert len(store.brokers.announced()) == 1
    finally:
        store.close()


def test_a_partition_that_is_gone_and_a_file_that_is_not_there_are_told(url: str, tmp_path: Path) -> None:
    with task_log(Reach(url)) as log, pytest.raises(UnknownPartition):
        log.fetch_ahead(Span("t", 0, 4711, 0, 1), 0).result()
    with pytest.raises(InvalidSetting, match="there is no file"):
        task_log(Reach(f"sqlite:///{tmp_path}/other.db"))
    assert not (tmp_path / "other.db").exists()
