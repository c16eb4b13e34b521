"""Ids: what stands for them, what is left of a batch, and the window that remembers them (R32, I13)."""

from __future__ import annotations

import random

import pytest

from postroom.errors import CorruptBatch
from postroom.model.messages import ids as idtable
from postroom.model.messages.batch import BatchBuilder, read_header, records, verify
from postroom.model.messages.ids import (
    DIGEST_SIZE,
    ID_HEADER,
    NO_FLOOR,
    NO_ID,
    IdTable,
    Window,
    digest,
    digests,
    digests_of,
    places,
    split,
    without,
)

# --- digests ---------------------------------------------------------------------------------------------


def test_a_short_id_is_its_own_digest() -> None:
    """They are stored: these must never change."""
    assert digest("a").hex() == "61" + "00" * 14 + "01"
    assert digest("order-42") == b"order-42" + bytes(7) + b"\x08"
    assert digest("fifteen letters") == b"fifteen letters" + b"\x0f"
    assert digest("ä") == "ä".encode() + bytes(13) + b"\x02"


def test_of_a_long_id_it_is_a_hash() -> None:
    """BLAKE2b of 15 bytes, and 0xFF."""
    assert digest("sixteen letters!").hex() == "f819619ddb72732a628e06ea02afa1ff"
    assert digest("0b5c4ee2-1f0b-4b6e-9d6c-5f6f6f0c9f5e")[-1] == 0xFF


def test_ids_that_differ_have_digests_that_differ() -> None:
    ids = (
        ["a" * size for size in range(40)]
        + ["a" * size + "\0" for size in range(40)]
        + ["\0", "\0\0", "ä", "a\u0308"]
    )
    found = {digest(id) for id in ids}
    assert len(found) == len(set(ids))
    assert all(len(one) == DIGEST_SIZE for one in found)
    assert [id for id in ids if digest(id) == NO_ID] == [""]  # which is no id


def test_digests_of_a_batch_one_after_the_other() -> None:
    joined = digests(["a", None, "b" * 20])
    assert joined == digest("a") + NO_ID + digest("b" * 20)
    assert list(split(joined)) == [digest("a"), NO_ID, digest("b" * 20)]
    assert list(split(b"")) == []


def sent(*ids: str | None, compression: str = "none") -> bytes:
    builder = BatchBuilder(compression)
    for number, id in enumerate(ids):
        headers = [("h", b"%d" % number)] + ([(ID_HEADER, id.encode())] if id is not None else [])
        builder.append(1_000 + number, b"key", b"%d" % number, headers)
    return builder.build(7, 3, 41)


def test_digests_are_found_in_the_batch_itself() -> None:
    ids = ["a", None, "b" * 20, ""]
    assert digests_of(sent(*ids)) == digests(["a", None, "b" * 20, None])
    assert digests_of(sent(None, None)) == b""
    with pytest.raises(CorruptBatch):
        digests_of(sent("a")[:-1])


# --- what is left of a batch -----------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "lz4", "gzip"])
def test_a_batch_without_some_of_its_messages(compression: str) -> None:
    whole = sent(*"abcdef", compression=compression)
    left = without(whole, {0, 3, 5})
    before, after = read_header(whole), verify(left)
    assert [(r.offset, r.timestamp, r.value, dict(r.headers)["h"]) for r in records(left)] == [
        (0, 1_001, b"1", b"1"),
        (1, 1_002, b"2", b"2"),
        (2, 1_004, b"4", b"4"),
    ]
    assert (after.compression, after.first_ts, after.last_ts) == (compression, 1_001, 1_004)
    assert (after.producer_id, after.epoch, after.base_sequence) == (7, 3, 41)
    assert before.records == 6
    assert without(whole, ()) == whole


def test_a_large_message_is_not_lost_with_the_others() -> None:
    """I17: what was let in as a whole is let in without a part of it."""
    builder = BatchBuilder(max_bytes=1)
    assert builder.append(0, None, bytes(9_000_000), [])
    assert len(records(without(builder.build(), ()))) == 1


@pytest.mark.parametrize(
    ("sent_ids", "known", "missing"),
    [
        ("abc", "", []),
        ("abc", "b", [1]),
        ("abab", "", [2, 3]),
        ("abab", "a", [0, 2, 3]),
        ("aaa", "a", [0, 1, 2]),
        ("--a-a-", "", [4]),
        ("--a-a-", "a", [2, 4]),
        ("----", "", []),
    ],
)
def test_which_messages_were_dropped_shows_in_what_is_stored(
    sent_ids: str, known: str, missing: list[int]
) -> None:
    """`-` is a message without an id."""
    one_by_one = [NO_ID if id == "-" else digest(id) for id in sent_ids]
    seen, stored = {digest(id) for id in known}, []
    for one in one_by_one:
        if one not in seen:
            stored.append(one)
            seen |= {one} - {NO_ID}
    assert places(one_by_one, stored) == missing


# --- the table -------------------------------------------------------------------------------------------


def ids(first: int, count: int) -> bytes:
    return digests([f"id-{number}" for number in range(first, first + count)])


def test_ids_get_numbers_and_are_found_by_them() -> None:
    table = IdTable()
    assert table.add(ids(0, 100)) == 0
    assert table.add(ids(100, 10_000)) == 100
    assert len(table) == 10_100
    for number in (0, 99, 100, 5_000, 10_099):
        assert table.number(digest(f"id-{number}")) == number
    assert table.number(digest("id-10100")) == -1
    assert table.known(split(ids(10_095, 10))) == list(split(ids(10_095, 5)))


def test_the_newest_number_counts() -> None:
    table = IdTable()
    for _ in range(3):
        table.add(ids(0, 10))
    assert table.number(digest("id-3")) == 23


def test_what_stands_for_no_id_is_never_known() -> None:
    table = IdTable()
    table.add(digests([None, "a", None]) * 5_000)  # many of them do not make it slow either
    assert table.known([NO_ID, digest("a")]) == [digest("a")]
    assert table.number(digest("a")) == 14_998


def test_what_is_forgotten_is_not_known_and_leaves_its_memory() -> None:
    table = IdTable()
    most = 0
    for first in range(0, 200_000, 1_000):
        table.add(ids(first, 1_000))
        table.forget_below(table.end - 10_000)
        most = max(most, table.size)
        oldest = max(0, first - 9_000)
        assert table.number(digest(f"id-{oldest}")) == oldest
        assert table.number(digest(f"id-{oldest - 1}")) == -1
    assert len(table) == 10_000
    assert most < 150 * 10_000  # of 200,000 ids it would be twenty times as much


def test_ids_that_come_and_go_are_seldom_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the table anew takes time: it happens while it grows, and hardly ever after that."""
    made: list[int] = []
    rebuild = IdTable._rebuild
    monkeypatch.setattr(IdTable, "_rebuild", lambda table: (made.append(table.end), rebuild(table)))
    table = IdTable()
    for first in range(0, 400_000, 500):
        table.add(ids(first, 500))
        table.forget_below(table.end - 15_000)
    assert len([at for at in made if at > 40_000]) <= 5  # without generations it would be every 17,000


def test_an_id_takes_less_than_half_of_what_it_takes_in_a_set() -> None:
    """I13: a set has about 100 bytes for each."""
    table = IdTable()
    for first in range(0, 1_000_000, 10_000):
        table.add(random.Random(first).randbytes(160_000))
    assert len(table) == 1_000_000
    assert table.size < 45 * 1_000_000


def test_numbers_do_not_end() -> None:
    """A slot has 32 bits of them; there are always fewer ids than that."""
    table = IdTable(first=2**32 - 3_000)
    for first in range(0, 8_000, 500):
        table.add(ids(first, 500))
        table.forget_below(table.end - 2_000)
        for number in range(max(0, first - 1_500), first + 500, 97):
            assert table.number(digest(f"id-{number}")) == 2**32 - 3_000 + number
        assert table.number(digest(f"id-{first - 1_501}")) == -1


def test_equal_hashes_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one slot: slow, but right."""
    monkeypatch.setattr(idtable, "hash", lambda one: 7, raising=False)
    table = IdTable()
    table.add(ids(0, 300))
    assert [table.number(one) for one in split(ids(0, 300))] == list(range(300))
    assert table.known(split(ids(300, 50))) == []


# --- the window ------------------------------------------------------------------------------------------


def seen(*rows: tuple[int, int, str], limit: int = 1_000) -> Window:
    """Rows of (first offset, time, ids of one letter)."""
    window = Window(rows[0][0], limit)
    for base, time, letters in rows:
        window.see(base, len(letters), time, digests(list(letters)))
    return window


def test_a_window_knows_where_ids_are() -> None:
    window = seen((5, 100, "abc"), (8, 100, "d"), (9, 200, "ef"))
    assert [window.offset(digest(id)) for id in "abcdefg"] == [5, 6, 7, 8, 9, 10, -1]
    assert window.end == 11
    assert window.known([digest("x"), digest("c")]) == [digest("c")]


def test_rows_without_ids_and_holes_between_rows() -> None:
    window = Window(0, 10_000)
    window.see(0, 2, 100, digests("ab"))
    window.see(2, 50, 100, b"")
    window.see(52, 1, 100, digests("c"))
    window.see(2**40, 2, 300, digests("de"))
    assert [window.offset(digest(id)) for id in "abc"] == [-1, -1, -1]  # more messages than are remembered
    assert [window.offset(digest(id)) for id in "de"] == [2**40, 2**40 + 1]
    small = Window(0, 10_000)
    small.see(0, 2, 100, digests("ab"))
    small.see(2, 50, 100, b"")
    small.see(52, 1, 100, digests("c"))
    assert [small.offset(digest(id)) for id in "abc"] == [0, 1, 52]


def test_a_row_that_was_seen_before_changes_nothing() -> None:
    window = seen((0, 100, "ab"), (2, 100, "c"))
    window.see(0, 2, 100, digests("xy"))
    assert window.offset(digest("x")) == -1
    assert window.end == 3


@pytest.mark.parametrize(
    ("offset", "now", "floor", "remembered"),
    [
        (0, 1_099, NO_FLOOR, True),
        (0, 1_100, NO_FLOOR, False),  # the window has passed
        (1, 1_199, NO_FLOOR, True),
        (1, 1_200, NO_FLOOR, False),
        (0, 9_999, 0, True),  # some group has not settled it
        (0, 9_999, 1, False),
        (1, 9_999, 1, True),
    ],
)
def test_how_long_a_message_is_remembered(offset: int, now: int, floor: int, remembered: bool) -> None:
    window = seen((0, 100, "a"), (1, 200, "b"))
    assert window.remembered(offset, now, 1_000, floor) is remembered


def test_of_many_the_newest_are_remembered() -> None:
    window = seen((0, 100, "abc"), (3, 100, "defg"), limit=5)
    assert [window.offset(digest(id)) for id in "abcdefg"] == [-1, -1, 2, 3, 4, 5, 6]
    assert not window.remembered(1, 100, 1_000, 0)
    assert window.remembered(2, 100, 1_000, 0)


def test_what_is_needed() -> None:
    window = seen((0, 100, "ab"), (2, 200, "cd"), (4, 300, "ef"), limit=5)
    assert window.needed(now=300, window_ms=1_000, floor=NO_FLOOR) == 1  # no more than the limit
    assert window.needed(now=300, window_ms=101, floor=NO_FLOOR) == 2
    assert window.needed(now=300, window_ms=100, floor=NO_FLOOR) == 4
    assert window.needed(now=900, window_ms=100, floor=NO_FLOOR) == 6
    assert window.needed(now=900, window_ms=100, floor=3) == 3
    window.forget_below(3)
    assert [window.offset(digest(id)) for id in "abcdef"] == [-1, -1, -1, 3, 4, 5]
    assert window.start == 3


def test_the_memory_of_a_window_is_bounded_whatever_its_rows() -> None:
    """One message a row, each at a time of its own: the worst there is."""
    window = Window(0, 20_000)
    for offset in range(100_000):
        window.see(offset, 1, offset, digest(f"{offset}"))
    assert window.size < 150 * 20_000
