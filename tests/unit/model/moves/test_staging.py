"""What a batch that comes again consists of, decided without a store (I20)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from postroom.errors import CorruptBatch, InvalidSetting, PermissionDenied, StagingConflict
from postroom.model.messages.batch import BatchBuilder
from postroom.model.moves.staging import (
    Decision,
    Span,
    StagedQuery,
    Wish,
    check_name,
    marks_after,
    owner_after,
    revision_for,
    split_batches,
    summed,
)
from postroom.store.sql.staging import _Wished

NONE = StagedQuery(-1)


def decision(rows: int = 3, source: dict[str, Span] | None = None, revision: int = 1) -> Decision:
    return Decision("q", 5, revision, (("a", rows),), rows, source or {}, 1)


def test_a_batch_that_is_new_is_decided() -> None:
    assert revision_for(NONE, None, 0, Wish((("a", 1),), 1)) == 1
    assert revision_for(StagedQuery(4), None, 7, Wish()) == 1


def test_the_same_rows_are_what_was_decided() -> None:
    assert revision_for(StagedQuery(5), decision(), 5, Wish((("b", 3),), 3)) is None
    assert (
        revision_for(StagedQuery(5, {"s": 2}), decision(3, {"s": (0, 2)}), 5, Wish((), 3, {"s": (0, 2)}))
        is None
    )


def test_rows_of_other_content_are_refused_if_both_are_known() -> None:
    one, other, otherwise = summed(b"hash one", 7), summed(b"hash one", 8), summed(b"hash two", 8)
    recorded = replace(decision(), content=one)
    for content in (one, b"", otherwise):
        assert revision_for(StagedQuery(5), recorded, 5, Wish((("b", 3),), 3, content=content)) is None
    assert revision_for(StagedQuery(5), decision(), 5, Wish((("b", 3),), 3, content=one)) is None
    with pytest.raises(StagingConflict, match=r"3 rows, and comes again.*other content"):
        revision_for(StagedQuery(5), recorded, 5, Wish((("b", 3),), 3, content=other))
    known = replace(decision(3, {"s": (0, 2)}), content=one)  # a row is known by its source offset
    assert revision_for(StagedQuery(5, {"s": 2}), known, 5, Wish((), 3, {"s": (0, 2)}, content=other)) is None


def test_decisions_of_earlier_and_later_versions_can_be_read() -> None:
    """What is kept of a wish has grown by its content: neither minds what the other has."""

    class Earlier(msgspec.Struct, array_like=True):
        segments: tuple[tuple[str, int], ...]
        rows: int
        source: dict[str, tuple[int, int]]
        topics: tuple[int, ...]

    old, new = Earlier((("a", 3),), 3, {}, (1,)), _Wished((("a", 3),), 3, {}, (1,), b"some")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=_Wished) == _Wished(*astuple(old))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=Earlier) == old
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({"rows": 2}), type=Wish).content == b""


@pytest.mark.parametrize("rows", [0, 1, 2, 4])
def test_another_number_of_rows_is_refused(rows: int) -> None:
    if rows == 0:  # nothing to lose
        assert revision_for(StagedQuery(5), decision(), 5, Wish()) is None
        return
    with pytest.raises(StagingConflict, match=f"with 3 rows, and comes back with {rows}"):
        revision_for(StagedQuery(5), decision(), 5, Wish((("b", rows),), rows))


def test_a_batch_that_is_not_remembered_is_refused() -> None:
    with pytest.raises(StagingConflict, match="not remembered"):
        revision_for(StagedQuery(9), None, 5, Wish())
    assert revision_for(StagedQuery(9, {"s": 4}), None, 5, Wish((), 3, {"s": (2, 4)}, {"s": 4})) == 1


def test_what_was_left_out_must_be_what_was_decided() -> None:
    wish = Wish((("b", 2),), 4, {"s": (1, 4)}, {"s": 1})
    with pytest.raises(StagingConflict, match="up to 2 of source partition 's'"):
        revision_for(StagedQuery(5, {"s": 2}), decision(3, {"s": (0, 2)}), 5, wish)
    assert revision_for(StagedQuery(5, {"s": 1, "t": 9}), decision(3, {"s": (0, 1)}, 4), 5, wish) == 5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 2)), max_size=12))
def test_whatever_ranges_come_back_every_row_is_decided_once(turns: list[tuple[int, int, int]]) -> None:
    """A checkpoint that is set back, by some batches, again and again; each batch has any end."""
    known, decisions, rows = NONE, dict[int, Decision](), list[int]()
    ends = [0]  # of batches, as the checkpoint has them
    for back, length, _ in turns:
        del ends[max(1, len(ends) - back) :]
        batch, first = len(ends) - 1, ends[-1]
        last = first + length - 1
        mark = known.marks.get("s", -1)
        new = [row for row in range(first, last + 1) if row > mark]
        segments = (("x", len(new)),) if new else ()
        wish = Wish(segments, length, {"s": (first, last)}, {"s": mark})
        revision = revision_for(known, decisions.get(batch), batch, wish)
        if revision is not None:
            rows += new
            decisions[batch] = Decision("q", batch, revision, segments, length, wish.source, 1)
            known = StagedQuery(max(batch, known.batch), marks_after(known, wish))
        ends.append(last + 1)
    assert rows == list(range(len(rows)))
    assert len(rows) == known.marks.get("s", -1) + 1


@pytest.mark.parametrize(
    "wish",
    [
        Wish((), 5),
        Wish((), 5, {"s": (0, 4)}),
        Wish((("a", 1),), 2, {"s": (0, 0), "t": (0, 9)}),  # a last row that nobody has staged
        Wish((("a", 1),), 1, {"s": (5, 4)}),
        Wish((("a", 1),), 1, {"s": (-3, 4)}),
    ],
)
def test_rows_that_nobody_has_staged_are_not_decided(wish: Wish) -> None:
    with pytest.raises(StagingConflict):
        revision_for(NONE, None, 0, wish)
    with pytest.raises(StagingConflict):
        revision_for(StagedQuery(5), decision(3, {"s": (7, 9)}), 5, wish)


def test_a_wider_range_without_its_rows_is_refused() -> None:
    known, before = StagedQuery(5, {"s": 2}), decision(3, {"s": (0, 2)})
    with pytest.raises(StagingConflict, match="stage every row above the marks"):
        revision_for(known, before, 5, Wish((), 5, {"s": (0, 4)}, {"s": 2}))
    assert revision_for(known, before, 5, Wish((), 2, {"s": (0, 1)}, {"s": 2})) is None


def test_whose_a_query_is() -> None:
    """I23: the first's; whoever has the database may go on with any, and begins its own."""
    assert owner_after("q", None, "shop") == owner_after("q", "shop", "shop") == "shop"
    assert owner_after("q", None, "") == owner_after("q", "", "") == ""
    assert owner_after("q", "shop", "") == "shop"
    for owner in ("", "shop", "EVIL"):
        with pytest.raises(PermissionDenied, match="give-query 'q' evil"):
            owner_after("q", owner, "evil")


def test_batches_one_after_the_other() -> None:
    made = []
    for count in (1, 3, 2):
        builder = BatchBuilder("lz4")
        for number in range(count):
            builder.append(1, b"k", b"%d" % number, [])
        made.append(builder.build())
    assert split_batches(b"".join(made)) == made
    assert split_batches(b"") == []
    for wrong in (b"x", made[0][:-1], made[0] + b"\0" * 11, made[0] + b"\xff" * 70, b"".join(made)[:-3]):
        with pytest.raises(CorruptBatch):
            split_batches(wrong)


@pytest.mark.parametrize("name", ["", "x" * 121, "a\nb", None, 3])
def test_names_that_are_none(name: object) -> None:
    with pytest.raises(InvalidSetting, match="query="):
        check_name(name, "query")
