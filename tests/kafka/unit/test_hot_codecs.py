"""The messages that are written by hand say what `kio` says, in every version that is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from postroom.errors import ProtocolError
from postroom.kafka.apis import APIS
from postroom.kafka.hot import (
    FetchedPartition,
    FetchedTopic,
    Metadata,
    MetadataTopic,
    Node,
    Produced,
    api_versions,
    fetch_answer,
    metadata_answer,
    produce_answer,
    read_fetch,
    read_produce,
)

NAMES = st.text("abc.-_é", min_size=1, max_size=20)
I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
CODES = st.sampled_from([0, 1, 3, 6, 10, 29, 45, 87, 100])
BATCHES = st.binary(min_size=1, max_size=300)


def read_by_kio(key: int, version: int, pieces: Sequence[bytes | memoryview]) -> Any:
    data = b"".join(pieces)
    found, size = entity_reader(load_response_schema(key, version))(data, 0)
    assert size == len(data), "nothing is left over"
    return found


def versions(key: int) -> st.SearchStrategy[int]:
    return st.integers(APIS[key].lowest, APIS[key].highest)


@given(
    version=versions(0),
    transactional_id=st.none() | NAMES,
    acks=st.sampled_from([-1, 0, 1]),
    topics=st.lists(st.tuples(NAMES, st.lists(st.tuples(I32, st.none() | BATCHES), max_size=4)), max_size=4),
)
def test_a_produce_request_that_kio_wrote_is_read_as_it_was(
    version: int, transactional_id: str | None, acks: int, topics: list[Any]
) -> None:
    import datetime
    import sys

    kind: Any = load_request_schema(0, version)
    module = sys.modules[kind.__module__]
    request = kind(
        transactional_id=transactional_id,
        acks=acks,
        timeout=datetime.timedelta(milliseconds=1500),
        topic_data=tuple(
            module.TopicProduceData(
                name=name,
                partition_data=tuple(module.PartitionProduceData(index=i, records=r) for i, r in partitions),
            )
            for name, partitions in topics
        ),
    )
    written: list[bytes] = []
    entity_writer(kind)(_Sink(written), request)  # type: ignore[arg-type]
    found = read_produce(version, memoryview(b"".join(written)))
    assert (found.transactional_id, found.acks, found.timeout_ms) == (transactional_id, acks, 1500)
    sent = [(name, index, batch) for name, partitions in topics for index, batch in partitions]
    assert [
        (s.topic, s.partition, s.batch if s.batch is None else bytes(s.batch)) for s in found.sent
    ] == sent


@given(
    version=versions(1),
    numbers=st.tuples(*[st.integers(0, 2**31 - 1)] * 4),
    topics=st.lists(st.tuples(NAMES, st.uuids(), st.lists(st.tuples(I32, I64, I32), max_size=4)), max_size=4),
)
def test_a_fetch_request_that_kio_wrote_is_read_as_it_was(
    version: int, numbers: tuple[int, int, int, int], topics: list[Any]
) -> None:
    import datetime
    import sys

    kind: Any = load_request_schema(1, version)
    module = sys.modules[kind.__module__]
    fields = kind.__dataclass_fields__
    wait_ms, min_bytes, max_bytes, session_id = numbers
    request = kind(
        **({"replica_id": -1} if version < 15 else {}),
        **(
            {"session_id": session_id, "session_epoch": 3, "forgotten_topics_data": ()}
            if version >= 7
            else {}
        ),
        **({"rack_id": "here"} if "rack_id" in fields else {}),
        max_wait=datetime.timedelta(milliseconds=wait_ms),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        isolation_level=1,
        topics=tuple(
            module.FetchTopic(
                **({"topic_id": id} if version >= 13 else {"topic": name}),
                partitions=tuple(
                    module.FetchPartition(partition=index, fetch_offset=offset, partition_max_bytes=most)
                    for index, offset, most in partitions
                ),
            )
            for name, id, partitions in topics
        ),
    )
    written: list[bytes] = []
    entity_writer(kind)(_Sink(written), request)  # type: ignore[arg-type]
    found = read_fetch(version, memoryview(b"".join(written)))
    assert found[:4] == (wait_ms, min_bytes, max_bytes, session_id if version >= 7 else 0)
    assert [tuple(map(tuple, topic.partitions)) for topic in found.topics] == [
        tuple(partitions) for _, _, partitions in topics
    ]
    if version >= 13:
        assert [topic.id or UUID(int=0) for topic in found.topics] == [id for _, id, _ in topics]
    else:
        assert [topic.name for topic in found.topics] == [name for name, _, _ in topics]


class _Sink:
    def __init__(self, pieces: list[bytes]) -> None:
        self.write = pieces.append


@given(
    version=versions(0),
    produced=st.lists(st.builds(Produced, NAMES, I32, CODES, I64, I64, st.none() | NAMES), max_size=6),
)
def test_kio_reads_a_produce_answer_as_it_was_written(version: int, produced: list[Produced]) -> None:
    found = read_by_kio(0, version, produce_answer(version, produced))
    by_topic = {topic.name: topic.partition_responses for topic in found.responses}
    for topic, partitions in by_topic.items():
        mine = [one for one in produced if one.topic == topic]
        assert [p.index for p in partitions] == [one.partition for one in mine]
        assert [int(p.error_code) for p in partitions] == [one.error for one in mine]
        assert [p.base_offset for p in partitions] == [one.base_offset for one in mine]
        if version >= 5:
            assert [p.log_start_offset for p in partitions] == [one.log_start for one in mine]
        if version >= 8:
            assert [p.error_message for p in partitions] == [one.message for one in mine]
    assert set(by_topic) == {one.topic for one in produced}


@st.composite
def fetched_topics(draw: st.DrawFn) -> list[FetchedTopic]:
    partitions = st.builds(FetchedPartition, I32, CODES, I64, I64, st.lists(BATCHES, max_size=3))
    topics = st.builds(FetchedTopic, NAMES, st.uuids(), st.lists(partitions, max_size=3))
    return draw(st.lists(topics, max_size=3))


@given(version=versions(1), topics=fetched_topics(), error=CODES)
def test_kio_reads_a_fetch_answer_as_it_was_written(
    version: int, topics: list[FetchedTopic], error: int
) -> None:
    found = read_by_kio(1, version, fetch_answer(version, topics, error))
    if version >= 7:
        assert (int(found.error_code), found.session_id) == (error, 0)
    assert len(found.responses) == len(topics)
    for answer, topic in zip(found.responses, topics, strict=True):
        assert (answer.topic_id if version >= 13 else answer.topic) == (
            topic.id if version >= 13 else topic.name
        )
        for read, one in zip(answer.partitions, topic.partitions, strict=True):
            assert (read.partition_index, int(read.error_code)) == (one.index, one.error)
            assert (read.high_watermark, read.last_stable_offset) == (one.end, one.end)
            assert read.aborted_transactions is None
            assert b"".join(one.pieces) == bytes(read.records or b"")
            if version >= 11:
                assert read.preferred_read_replica == -1


TOPICS = st.builds(
    MetadataTopic, CODES, NAMES, st.uuids(), st.booleans(), st.lists(st.integers(0, 9), max_size=3).map(tuple)
)
NODES = st.lists(st.builds(Node, st.integers(0, 99), NAMES, st.integers(1, 65535)), max_size=3).map(tuple)


@given(version=versions(3), nodes=NODES, topics=st.lists(TOPICS, max_size=4))
def test_kio_reads_a_metadata_answer_as_it_was_written(
    version: int, nodes: tuple[Node, ...], topics: list[MetadataTopic]
) -> None:
    found = read_by_kio(3, version, metadata_answer(version, Metadata(nodes, "cluster", 7, tuple(topics))))
    assert [(b.node_id, b.host, b.port) for b in found.brokers] == [tuple(node) for node in nodes]
    for read, topic in zip(found.topics, topics, strict=True):
        assert (int(read.error_code), read.name) == (topic.error, topic.name)
        if version >= 10:
            assert read.topic_id == topic.id or topic.id == UUID(int=0)
        assert [(p.partition_index, p.leader_id) for p in read.partitions] == list(enumerate(topic.leaders))


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4])
def test_kio_reads_which_versions_there_are(version: int) -> None:
    found = read_by_kio(18, version, api_versions(version, [(0, 3, 12), (18, 0, 5)]))
    assert [(k.api_key, k.min_version, k.max_version) for k in found.api_keys] == [(0, 3, 12), (18, 0, 5)]


@given(version=versions(0), data=st.binary(max_size=200))
def test_bytes_that_are_no_produce_request_are_refused_and_nothing_else_happens(
    version: int, data: bytes
) -> None:
    try:
        read_produce(version, memoryview(data))
    except ProtocolError:
        pass


@given(version=versions(1), data=st.binary(max_size=200))
def test_bytes_that_are_no_fetch_request_are_refused_and_nothing_else_happens(
    version: int, data: bytes
) -> None:
    try:
        read_fetch(version, memoryview(data))
    except ProtocolError:
        pass
