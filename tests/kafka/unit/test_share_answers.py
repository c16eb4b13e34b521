"""Answers to share consumers: what is written by hand `kio` reads, and what a poll brought is told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from postroom.endpoint.values import Grant, Lease, PollReply
from postroom.kafka.share.answers import SharedPartition, Sharing, acknowledge_answer, fetch_answer
from postroom.kafka.share.handing import WantedTopic, handed
from postroom.kafka.topics import KafkaTopic
from postroom.model.messages.batch import BatchBuilder, build_control
from postroom.model.share_session import OPENS, Acknowledged, AckType, ShareSession
from postroom.model.topology.chain import Chain, Link
from postroom.store.contract import StoredBatch
from tests.kafka.unit.test_hot_codecs import BATCHES, CODES, I32, NAMES, read_by_kio

OFFSETS = st.integers(0, 2**62)
ACQUIRED = st.tuples(OFFSETS, OFFSETS, st.integers(1, 100_000))


@st.composite
def answers(draw: st.DrawFn) -> Sharing:
    partitions = st.builds(
        SharedPartition,
        I32,
        CODES,
        st.none() | NAMES,
        CODES,
        st.none() | NAMES,
        st.lists(st.tuples(OFFSETS, st.lists(BATCHES, min_size=1, max_size=2)), max_size=3),
        st.lists(ACQUIRED, max_size=3),
        st.just(True),
    )
    topics = st.dictionaries(st.uuids(), st.lists(partitions, min_size=1, max_size=3), max_size=3)
    each = {id: {one.index: one for one in some} for id, some in draw(topics).items()}
    return Sharing(draw(st.integers(0, 2**31 - 1)), draw(CODES), draw(st.none() | NAMES), each)


@given(version=st.sampled_from([1, 2]), answer=answers())
def test_kio_reads_a_share_fetch_answer_as_it_was_written(version: int, answer: Sharing) -> None:
    found = read_by_kio(78, version, fetch_answer(version, answer))
    assert (int(found.error_code), found.error_message) == (answer.error, answer.message)
    assert found.acquisition_lock_timeout // timedelta(milliseconds=1) == answer.lease_ms
    for read, (id, partitions) in zip(found.responses, answer.topics.items(), strict=True):
        assert read.topic_id == (id if id.int else None)  # type: ignore[union-attr]
        for one, mine in zip(read.partitions, partitions.values(), strict=True):
            assert (one.partition_index, int(one.error_code), one.error_message) == (
                mine.index,
                mine.error,
                mine.message,
            )
            assert (one.acknowledge_error_code, one.acknowledge_error_message) == (
                mine.ack_error,
                mine.ack_message,
            )
            batches = sorted(mine.pieces, key=lambda batch: batch[0])
            assert bytes(one.records or b"") == b"".join(p for _, pieces in batches for p in pieces)
            told = [(r.first_offset, r.last_offset, r.delivery_count) for r in one.acquired_records]
            assert told == [(a, b, min(c, 32_767)) for a, b, c in sorted(mine.acquired)]


@given(version=st.sampled_from([1, 2]), answer=answers())
def test_kio_reads_a_share_acknowledge_answer_as_it_was_written(version: int, answer: Sharing) -> None:
    found = read_by_kio(79, version, acknowledge_answer(version, answer))
    assert (int(found.error_code), found.error_message) == (answer.error, answer.message)
    for read, partitions in zip(found.responses, answer.topics.values(), strict=True):
        for one, mine in zip(read.partitions, partitions.values(), strict=True):
            assert (one.partition_index, int(one.error_code), one.error_message) == (
                mine.index,
                mine.ack_error,
                mine.ack_message,
            )


def test_what_there_is_nothing_to_say_of_is_left_out() -> None:
    answer = Sharing(1)
    answer.partition(UUID(int=1), 0)
    answer.partition(UUID(int=2), 0).ack_error = 121
    assert [id for id, _ in answer.told()] == [UUID(int=2)]


# ---- what a poll brought ----


def a_batch(base: int, count: int) -> StoredBatch:
    builder = BatchBuilder(max_bytes=10_000)
    for number in range(count):
        builder.append(1_000, None, b"%d" % number, [])
    return StoredBatch(base, count, 0, builder.build())


def seal(base: int) -> StoredBatch:
    return StoredBatch(base, 1, 0, build_control(1))


TOPIC: Any = type("Topic", (), {"name": "orders"})
VIEW = KafkaTopic(TOPIC, UUID(int=7), (Chain(0, (Link(3, 0), Link(4, 10))), Chain(1, (Link(5, 0),))))


def given_by(*grants: Grant) -> tuple[ShareSession, Sharing, Any]:
    session, answer, topic = ShareSession(), Sharing(1), WantedTopic(VIEW)
    session.advance(OPENS)
    assert topic.add(0) and topic.add(1) and not topic.add(2)
    return session, answer, handed(session, topic, 9, PollReply(grants, 30_000), answer, 100)


def test_offsets_are_those_of_the_chain_and_batches_come_whole() -> None:
    grant = Grant("orders", 1, 4, (Lease(2, 3, 2, False),), (a_batch(0, 5),))
    session, answer, rest = given_by(grant)
    partition = answer.partition(VIEW.id, 0)
    assert partition.acquired == [(12, 13, 2)] and not rest.settled and not rest.missing
    [(base, pieces)] = partition.pieces
    assert base == 10 and int.from_bytes(b"".join(pieces)[:8], "big") == 10
    found, whole = session.settle((VIEW.id, 0), Acknowledged(12, 13, AckType.ACCEPT))
    assert whole and (found[0].partition_id, found[0].origin, found[0].token) == (4, 10, 9)


def test_a_lease_over_several_batches_is_one_range_and_the_seal_is_acked() -> None:
    batches = (a_batch(0, 5), a_batch(5, 4), seal(9))
    _, answer, rest = given_by(Grant("orders", 0, 3, (Lease(0, 9, 1, False),), batches))
    assert answer.partition(VIEW.id, 0).acquired == [(0, 8, 1)]
    assert [(v.kind, v.first, v.last) for _, v in rest.settled] == [("ack", 9, 9)]
    assert len(answer.partition(VIEW.id, 0).pieces) == 2


def test_offsets_for_which_no_batch_came_are_not_told_and_looked_after() -> None:
    batches = (a_batch(2, 2), a_batch(6, 2))
    session, answer, rest = given_by(Grant("orders", 1, 5, (Lease(0, 9, 1, False),), batches))
    assert answer.partition(VIEW.id, 1).acquired == [(2, 3, 1), (6, 7, 1)]
    assert [span for _, span in rest.missing] == [(0, 1), (4, 5), (8, 9)]
    assert session.in_flight == 4


def test_messages_of_the_groups_own_topics_come_beyond_all_offsets_of_the_log() -> None:
    own = Grant("orders.billing.retry", 0, 8, (Lease(0, 1, 1, False),), (a_batch(0, 2),))
    both = Grant("orders", 0, 3, (Lease(0, 1, 1, False),), (a_batch(0, 2),))
    session, answer, _ = given_by(own, both)
    partition = answer.partition(VIEW.id, 0)
    low, high = sorted(partition.acquired)
    assert low == (0, 1, 1) and high[0] >= 2**40 and high[1] == high[0] + 1
    found, whole = session.settle((VIEW.id, 0), Acknowledged(high[0], high[1], AckType.ACCEPT))
    assert whole and (found[0].topic, found[0].first - found[0].origin) == ("orders.billing.retry", 0)


def test_what_finds_no_room_among_the_offsets_is_given_back() -> None:
    far = Grant("orders.billing.retry", 0, 2**22, (Lease(0, 1, 1, False),), (a_batch(0, 2),))
    session, answer, rest = given_by(far)
    assert not session.in_flight and not answer.told()
    assert [v.kind for _, v in rest.settled] == ["release"]
