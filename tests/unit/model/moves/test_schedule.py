"""Due rows become batches: the same ones from the same plan, every message once, in order (I12, I3)."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.config import DEFAULTS
from postroom.model.messages.batch import BatchBuilder, read_header, records, verify
from postroom.model.messages.ids import digest
from postroom.model.messages.sequence import MODULUS
from postroom.model.messages.slot import slot_of
from postroom.model.moves import schedule
from postroom.model.moves.schedule import SLOT_HEADER, DelayedRow, Part, Planned
from postroom.model.topology.route import Range, Route, even_ranges
from tests.model.examples import examples

TOPIC = 1


def route(partitions: int = 1, first_id: int = 1) -> Route:
    ranges = [
        Range(*edges, number, first_id + number) for number, edges in enumerate(even_ranges(partitions))
    ]
    return Route("orders", 1, tuple(ranges))


def row(
    row_id: int,
    *values: str,
    partition_id: int = 1,
    key: bytes | None = None,
    slot: bytes | None = None,
    compression: str = "none",
    size: int = 0,
) -> DelayedRow:
    builder = BatchBuilder(compression, max_bytes=2**30)
    headers = [] if slot is None else [(SLOT_HEADER, slot)]
    for number, value in enumerate(values):
        builder.append(1_000 + number, key, value.encode().ljust(size, b"."), list(headers))
    ids = b"".join(digest(value) for value in values)
    return DelayedRow(row_id, TOPIC, partition_id, 0, len(values), builder.build(), ids)


def texts(batch: bytes) -> list[str]:
    verify(batch)
    return [(record.value or b"").rstrip(b".").decode() for record in records(batch)]


def map_texts(batches: list[bytes]) -> list[str]:
    return [text for batch in batches for text in texts(batch)]


def built(rows: list[DelayedRow], planned: list[Planned], producer_id: int = 7) -> dict[int, list[list[str]]]:
    """The values of the batches of each partition."""
    found: dict[int, list[list[str]]] = defaultdict(list)
    for one in planned:
        batch = schedule.build(one, {r.id: r for r in rows}, producer_id)
        header = read_header(batch)
        identity = (header.producer_id, header.epoch, header.base_sequence, header.records)
        assert identity == (producer_id, schedule.EPOCH, one.sequence, one.records)
        found[one.partition_id].append(texts(batch))
    return dict(found)


# ---- where ----


def test_a_row_goes_where_it_was_sent_as_long_as_that_is_in_the_route() -> None:
    rows = [row(1, "a", partition_id=2, key=b"whatever"), row(2, "b", partition_id=1)]
    planned = schedule.plan(rows, {TOPIC: route(2)}, {})
    assert built(rows, planned) == {2: [["a"]], 1: [["b"]]}


def test_otherwise_each_message_goes_where_its_key_is_now() -> None:
    new = route(3, first_id=10)
    keys = [b"%d" % number for number in range(50)]
    builder = BatchBuilder()
    for key in keys:
        builder.append(0, key, key, [])
    rows = [DelayedRow(1, TOPIC, 1, 0, len(keys), builder.build())]
    found = built(rows, schedule.plan(rows, {TOPIC: new}, {}))
    for target, batches in found.items():
        expected = [k.decode() for k in keys if new.of_slot(slot_of(k)).partition_id == target]
        assert batches == [expected]
    assert len(found) == 3


@pytest.mark.parametrize(
    ("slot", "target"), [(b"0", 10), (b"511", 10), (b"512", 11), (b"1023", 11), (b"1024", 10)]
)
def test_a_named_slot_wins_over_the_key(slot: bytes, target: int) -> None:
    rows = [row(1, "a", key=b"k", slot=slot)]
    assert set(built(rows, schedule.plan(rows, {TOPIC: route(2, 10)}, {}))) == {target}


@pytest.mark.parametrize("slot", [b"", b"x", b"-1", b"1e3", b"\xff"])
def test_a_slot_that_is_no_number_is_not_one(slot: bytes) -> None:
    rows = [row(1, "a", key=b"k", slot=slot)]
    new = route(2, 10)
    expected = new.of_slot(slot_of(b"k")).partition_id
    assert set(built(rows, schedule.plan(rows, {TOPIC: new}, {}))) == {expected}


def test_one_without_a_key_goes_where_its_id_would_go_as_a_key() -> None:
    new = route(4, 10)
    for id in (b"o-1", b"o-2", b"o-3", b"o-4", b"o-5"):
        builder = BatchBuilder()
        builder.append(0, None, b"", [("postroom-id", id)])
        rows = [DelayedRow(1, TOPIC, 1, 0, 1, builder.build())]
        (planned,) = schedule.plan(rows, {TOPIC: new}, {})
        assert planned.partition_id == new.of_slot(slot_of(id)).partition_id


def test_one_without_key_and_id_goes_anywhere_but_always_to_the_same() -> None:
    rows = [row(number, str(number)) for number in range(0, 1024, 8)]
    plans = [schedule.plan(rows, {TOPIC: route(4, 10)}, {}) for _ in range(2)]
    assert plans[0] == plans[1]
    assert len(built(rows, plans[0])) == 4


# ---- in which batches ----


def test_small_rows_are_put_together_and_large_ones_stay_as_they_are() -> None:
    large = row(3, *(f"l{number}" for number in range(250)), compression="lz4")
    rows = [row(1, "a"), row(2, "b", "c"), large, row(4, "d")]
    planned = schedule.plan(rows, {TOPIC: route()}, {})
    assert [[part.row for part in one.parts] for one in planned] == [[1, 2], [3], [4]]
    whole = schedule.build(planned[1], {r.id: r for r in rows}, 7)
    assert whole[61:] == large.batch[61:]


def test_batches_have_their_usual_size() -> None:
    rows = [row(number, str(number)) for number in range(2_500)]
    assert [one.records for one in schedule.plan(rows, {TOPIC: route()}, {})] == [1_000, 1_000, 500]
    heavy = [row(number, str(number), size=100_000) for number in range(12)]
    planned = schedule.plan(heavy, {TOPIC: route()}, {})
    assert [one.records for one in planned] == [5, 5, 2]
    assert all(len(schedule.build(p, {r.id: r for r in heavy}, 7)) <= DEFAULTS.batch_bytes for p in planned)


def test_the_unpacked_size_counts() -> None:
    """A message of 1 MB that compresses to nothing is 1 MB to whoever reads it."""
    rows = [row(number, str(number), size=1_000_000, compression="zstd") for number in range(3)]
    assert max(len(r.batch) for r in rows) < 10_000
    assert [one.records for one in schedule.plan(rows, {TOPIC: route()}, {})] == [1, 1, 1]


def test_no_more_batches_than_a_partition_remembers() -> None:
    """Resumed, all of them must still be known (I3); and the rows that are left are the last ones."""
    rows = [row(number, *(f"{number}.{n}" for n in range(300))) for number in range(20)]
    rows.insert(15, row(100, "small"))
    planned = schedule.plan(rows, {TOPIC: route()}, {})
    assert len(planned) == DEFAULTS.remembered_batches
    assert [part.row for one in planned for part in one.parts] == list(range(8))


def test_behind_a_row_that_is_left_nothing_of_its_partitions_is_taken() -> None:
    """Else a later message of a key would overtake it. The other partitions go on."""
    keys = {2: b"a", 3: b"b"}
    new = Route("orders", 1, (Range(0, 511, 0, 2), Range(512, 1023, 1, 3)))
    assert {new.of_slot(slot_of(key)).partition_id for key in keys.values()} == {2, 3}
    full = [row(n, *(f"{n}.{m}" for m in range(300)), partition_id=2) for n in range(8)]
    builder = BatchBuilder()
    for key in keys.values():
        builder.append(0, key, b"both", [])
    both = DelayedRow(50, TOPIC, 1, 0, 2, builder.build())
    rows = [*full, both, row(51, "behind", partition_id=3), row(52, "elsewhere", partition_id=3)]
    planned = schedule.plan(rows, {TOPIC: new}, {})
    assert {part.row for one in planned for part in one.parts} == set(range(8))


def test_the_first_row_is_always_taken() -> None:
    rows = [row(1, *(str(n) for n in range(20_000)), size=300)]
    assert len(rows[0].batch) > DEFAULTS.batch_bytes
    assert len(schedule.plan(rows, {TOPIC: route()}, {})) == 1


def test_sequences_go_on_from_where_they_were_and_wrap() -> None:
    rows = [row(1, *(str(n) for n in range(300))), row(2, "a"), row(3, "b", partition_id=2)]
    planned = schedule.plan(rows, {TOPIC: route(2)}, {1: MODULUS - 100})
    assert [(one.partition_id, one.sequence) for one in planned] == [(1, MODULUS - 100), (1, 200), (2, 0)]


# ---- the plan ----


def test_a_plan_is_stored_and_read_back() -> None:
    planned = [Planned(2**62, 5, 3, (Part(1), Part(2**40, (0, 7)))), Planned(1, MODULUS - 1, 1, (Part(9),))]
    assert schedule.decode(schedule.encode(planned)) == planned
    assert schedule.decode(schedule.encode([])) == []


def test_ids_of_a_batch() -> None:
    rows = [row(1, "a", "b", "c"), DelayedRow(2, TOPIC, 1, 0, 2, row(2, "x", "y").batch), row(3, "d")]
    planned = Planned(1, 0, 5, (Part(1, (2, 0)), Part(2), Part(3)))
    expected = digest("c") + digest("a") + bytes(32) + digest("d")
    assert schedule.ids_of(planned, {r.id: r for r in rows}) == expected


# ---- what is left ----


def test_what_was_refused_is_left_whole_or_in_part() -> None:
    planned = [
        Planned(1, 0, 2, (Part(1), Part(2, (0, 2)))),
        Planned(2, 0, 2, (Part(2, (1,)), Part(3))),
        Planned(3, 0, 1, (Part(4),)),
    ]
    assert schedule.moved_rows(planned, [True, True, True]) == ({1, 2, 3, 4}, {})
    assert schedule.moved_rows(planned, [True, False, True]) == ({1, 4}, {2: {0, 2}})
    assert schedule.moved_rows(planned, [False, True, False]) == ({3}, {2: {1}})
    assert schedule.moved_rows(planned, [False, False, False]) == (set(), {})


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_row_without_some_of_its_messages(compression: str) -> None:
    whole = row(1, "a", "b", "c", "d", key=b"k", compression=compression)
    left = schedule.left_of(whole, [0, 2])
    assert (texts(left.batch), left.records, left.ids) == (["b", "d"], 2, digest("b") + digest("d"))
    assert [(r.timestamp, r.key) for r in records(left.batch)] == [(1_001, b"k"), (1_003, b"k")]
    assert read_header(left.batch).compression == compression


def test_a_row_of_unknown_ids_stays_so() -> None:
    bare = DelayedRow(1, TOPIC, 1, 0, 2, row(1, "a", "b").batch)
    assert schedule.left_of(bare, [0]).ids == b""


# ---- all of it ----

shapes = st.lists(
    st.tuples(
        st.integers(1, 4),  # messages
        st.sampled_from([1, 2, 3]),  # sent to; 3 is gone
        st.sampled_from([None, b"a", b"b", b"c", b"42"]),
        st.booleans(),  # a large row
    ),
    max_size=30,
)


@settings(max_examples=examples(150))
@given(shapes=shapes, refused=st.sets(st.integers(0, 40)))
def test_every_message_is_moved_once_or_left(
    shapes: list[tuple[int, int, bytes | None, bool]], refused: set[int]
) -> None:
    """Whatever is refused: stored and left together are what was there, and per partition in order."""
    rows = [
        row(n, *(f"{n}.{m}" for m in range(count + 300 * large)), partition_id=place, key=key)
        for n, (count, place, key, large) in enumerate(shapes)
    ]
    by_id = {r.id: r for r in rows}
    planned = schedule.plan(rows, {TOPIC: route(2)}, {})
    stored = [number not in refused for number in range(len(planned))]
    whole, partly = schedule.moved_rows(planned, stored)
    taken = [one for one, ok in zip(planned, stored, strict=True) if ok]
    rest = [schedule.left_of(r, partly[r.id]) if r.id in partly else r for r in rows if r.id not in whole]
    batches = [schedule.build(one, by_id, 7) for one in taken] + [r.batch for r in rest]
    assert sorted(map_texts(batches)) == sorted(map_texts([r.batch for r in rows]))
    for target in (1, 2):
        order = [part.row for one in planned if one.partition_id == target for part in one.parts]
        assert order == sorted(order)
