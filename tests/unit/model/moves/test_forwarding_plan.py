"""Which rows go together: order per key, one moment per batch, limits, and the same batches when resumed."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from postroom.config import DEFAULTS
from postroom.model.messages.batch import records
from postroom.model.messages.ids import digest
from postroom.model.moves.batch_line import LINE_BATCHES
from postroom.model.moves.forwarding import (
    Batch,
    ForwardRow,
    Stamp,
    build,
    ids_of,
    pack_headers,
    plan,
    resumed,
)
from postroom.model.topology.route import Range, Route, even_ranges


def _route(partitions: int, *, by_id: bool = False) -> Route:
    ranges = [Range(*slots, n, 100 + n) for n, slots in enumerate(even_ranges(partitions))]
    return Route("orders", 1, tuple(ranges), by_id=by_id)


def _row(id: int, key: bytes | None = None, value: bytes = b"", **more: object) -> ForwardRow:
    row = ForwardRow(id, "orders", key, value or b"%d" % id, b"", None, 1, 0, None)
    return row._replace(**more)  # type: ignore[arg-type]


rows = st.lists(
    st.tuples(st.sampled_from([None, b"a", b"b", b"c", b"d"]), st.sampled_from([0, 0, 0, 5000, 5007, 6000])),
    max_size=60,
)


@given(rows, st.integers(1, 4))
def test_rows_of_a_key_are_on_one_line_in_order(
    some: list[tuple[bytes | None, int]], partitions: int
) -> None:
    found = [_row(n, key, due_at=due) for n, (key, due) in enumerate(some)]
    planned = plan(found, {"orders": _route(partitions)}, {})
    lines: dict[tuple[bytes | None, int], set[tuple[int, int]]] = defaultdict(set)
    seen: dict[tuple[int, int], list[int]] = defaultdict(list)
    for _, line, batch in planned:
        assert len({row.due_at for row in batch}) == 1
        seen[line] += [row.id for row in batch]
        for row in batch:
            lines[row.key, row.due_at].add(line)
    assert all(len(used) == 1 for used in lines.values())
    assert all(ids == sorted(ids) for ids in seen.values())
    taken = {row.id for _, _, batch in planned for row in batch}
    left = [row for row in found if row.id not in taken]
    for row in left:  # what is left for later holds what comes after it on its line
        (line,) = lines[row.key, row.due_at] or {(-1, -1)}
        assert all(id < row.id for id in seen[line])


def test_a_line_takes_no_more_batches_than_a_partition_remembers() -> None:
    found = [_row(n, b"k") for n in range(DEFAULTS.batch_messages * LINE_BATCHES + 5)]
    planned = plan(found, {"orders": _route(2)}, {})
    assert [len(batch) for _, _, batch in planned] == [DEFAULTS.batch_messages] * LINE_BATCHES
    assert [row for _, _, batch in planned for row in batch] == found[:-5]


def test_a_batch_is_not_larger_than_it_should_be_but_takes_any_message() -> None:
    large = [_row(n, b"k", b"x" * (DEFAULTS.batch_bytes // 2)) for n in range(3)]
    huge = _row(3, b"k", b"x" * (2 * DEFAULTS.batch_bytes))
    planned = plan([*large, huge], {"orders": _route(1)}, {})
    assert [[row.id for row in batch] for _, _, batch in planned] == [[0], [1], [2], [3]]


def test_a_slot_is_followed_and_an_id_where_the_topic_looks_at_ids() -> None:
    route, by_id = _route(4), _route(4, by_id=True)
    assert [line for _, line, _ in plan([_row(1, b"k", slot=1023)], {"orders": route}, {})] == [(103, 0)]
    turns = {plan([_row(1, message_id="o-1")], {"orders": route}, {"orders": n})[0][1] for n in range(4)}
    assert turns == {(100, 0), (101, 0), (102, 0), (103, 0)}
    fixed = {plan([_row(1, message_id="o-1")], {"orders": by_id}, {"orders": n})[0][1] for n in range(4)}
    assert len(fixed) == 1


def test_whoever_resumes_builds_the_same_batches() -> None:
    headers = pack_headers([("postroom-id", b"o-1"), ("source", b"web")])
    first = [_row(1, b"a", headers=headers), _row(4, b"b")]
    second = [_row(2, b"a", due_at=9000), _row(3, b"c", due_at=9000)]
    stamps = Stamp(7, 100, 0), Stamp(8, 101, 40)
    batches = [Batch("orders", stamp, some) for stamp, some in zip(stamps, (first, second), strict=True)]
    again = resumed([row._replace(stamp=b.stamp) for b in reversed(batches) for row in reversed(b.rows)])
    assert [build(batch) for batch in again] == [build(batch) for batch in batches]
    assert [batch.due_at for batch in again] == [0, 9000]
    (record, _) = records(build(again[0]))
    assert (record.key, record.value, record.headers) == (
        b"a",
        b"1",
        [("postroom-id", b"o-1"), ("source", b"web")],
    )


def test_ids_are_told_where_somebody_looks_at_them() -> None:
    batch = Batch("orders", Stamp(7, 100, 0), [_row(1, message_id="o-1"), _row(2)])
    assert ids_of(batch, by_id=False) == b""
    assert ids_of(batch, by_id=True) == digest("o-1") + bytes(16)
    delayed = Batch("orders", Stamp(7, 100, 0), [_row(1, due_at=5)])
    assert ids_of(delayed, by_id=False) == bytes(16)
