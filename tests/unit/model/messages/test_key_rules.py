"""Where keys go by the rules of Kafka clients: compared with a client's own code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as murmur2_of_kafka_python

from postroom import InvalidSetting
from postroom.model.messages.slot import Keys, murmur2, slot_by, slot_of
from postroom.model.policy.settings import TopicSettings
from postroom.model.topology.route import Range, Route, even_ranges

# The test vectors of Kafka's own `Utils.murmur2`.
JAVA = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
# Those of librdkafka's test 0048, which takes them from programs of others.
CRC_32 = {
    b"23456": 0xB1B451D7,
    b"this is another string with more length to it perhaps": 0xB0150DF7,
    b"hejsan": 0xD077037E,
}


def _route(keys: Keys, partitions: int) -> Route:
    edges = enumerate(even_ranges(partitions))
    return Route("orders", 1, tuple(Range(*slots, at, at) for at, slots in edges), keys=keys)


@pytest.mark.parametrize("key", JAVA)
def test_murmur2_is_that_of_java(key: bytes) -> None:
    assert murmur2(key) == JAVA[key] % 2**32


@given(st.binary(max_size=200))
def test_murmur2_is_that_of_kafka_python(key: bytes) -> None:
    assert murmur2(key) == murmur2_of_kafka_python(key) % 2**32


@given(st.binary(max_size=100), st.integers(1, 64))
def test_a_key_goes_to_the_partition_that_a_java_client_chooses(key: bytes, partitions: int) -> None:
    chosen = (murmur2_of_kafka_python(key) & 0x7FFFFFFF) % partitions
    route = _route("java", partitions)
    assert route.of_slot(route.slot_of(key)).partition == chosen


@given(st.binary(max_size=100), st.integers(1, 64))
def test_a_key_has_the_slot_that_it_always_had_where_the_topic_names_no_rule(key: bytes, count: int) -> None:
    assert _route("postroom", count).slot_of(key) == slot_of(key)


@pytest.mark.parametrize("key", CRC_32)
@pytest.mark.parametrize("partitions", [1, 3, 17])
def test_a_key_goes_to_the_partition_that_librdkafka_chooses(key: bytes, partitions: int) -> None:
    starts = [first for first, _ in even_ranges(partitions)]
    assert slot_by("librdkafka", key, starts) == starts[CRC_32[key] % partitions]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (TopicSettings(keys="java"), "set kafka_partitions="),
        (TopicSettings(kafka_partitions=2, keys="murmur"), "'librdkafka'"),  # type: ignore[arg-type]
    ],
)
def test_a_rule_is_one_of_three_and_for_topics_of_kafka_clients(settings: TopicSettings, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        settings.check_kafka()
