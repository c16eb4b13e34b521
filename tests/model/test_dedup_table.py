"""The table of ids and the window against dictionaries (I13): tables so small that every corner is met."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.model.messages import ids as idtable
from postroom.model.messages.ids import NO_FLOOR, NO_ID, IdTable, Window, digest, digests, split
from tests.model.examples import examples

IDS = [None, *(f"id-{number}" for number in range(60))]
some_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def small_tables() -> Iterator[None]:
    """Pages, slots and generations of a handful: what else takes millions of ids happens all the time."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_PAGE", 4), ("_SLOTS", 16), ("_LEAST", 3)):
            patch.setattr(idtable, name, value)
        yield


@settings(max_examples=examples(300), deadline=None)
@given(
    steps=st.lists(st.tuples(some_ids, st.integers(0, 40)), max_size=40),
    first=st.sampled_from([0, 3, 2**32 - 20]),
)
def test_the_table_knows_what_a_dictionary_knows(
    steps: list[tuple[list[str | None], int]], first: int
) -> None:
    """Each step adds ids, then forgets all but the newest."""
    table, naive = IdTable(first=first), dict[str, int]()
    end = start = first
    for ids, kept in steps:
        assert table.add(digests(ids)) == end
        naive.update((id, number) for number, id in enumerate(ids, end) if id is not None)
        end += len(ids)
        start = max(start, end - kept)
        table.forget_below(end - kept)
        assert (table.start, table.end, len(table)) == (start, end, end - start)
        known = {id: number for id, number in naive.items() if number >= start}
        for id in IDS[1:]:
            assert table.number(digest(str(id))) == known.get(str(id), -1)
        everything = [NO_ID, *(digest(str(id)) for id in IDS[1:])]
        assert table.known(everything) == [digest(id) for id in map(str, IDS[1:]) if id in known]


rows = st.lists(
    st.tuples(
        some_ids,
        st.booleans(),  # whether its ids are stored
        st.integers(0, 3),  # time since the row before
        st.integers(0, 3),  # offsets that are missing before it
        st.integers(0, 30),  # the window's length, where everything unneeded is forgotten after it
    ),
    max_size=30,
)


@settings(max_examples=examples(200), deadline=None)
@given(rows=rows, limit=st.integers(1, 60), unsettled=st.none() | st.integers(0, 80))
def test_the_window_remembers_what_the_rule_says(
    rows: list[tuple[list[str | None], bool, int, int, int]], limit: int, unsettled: int | None
) -> None:
    window, log = Window(0, limit), list[tuple[int, int, str]]()  # offset, time, id
    floor = NO_FLOOR if unsettled is None else unsettled
    now = end = 0
    longest = 31
    for ids, stored, pause, hole, window_ms in rows:
        now += pause
        base = end + hole
        end = base + len(ids)
        window.see(base, len(ids), now, digests(ids) if stored else b"")
        log += [(base + at, now, id) for at, id in enumerate(ids) if id is not None and stored]
        longest = min(longest, window_ms + 1)
        window.forget_below(window.needed(now, longest, floor))
        _compare(window, log, now, longest, floor, end - limit)


def _compare(
    window: Window, log: list[tuple[int, int, str]], now: int, window_ms: int, floor: int, oldest: int
) -> None:
    newest = {id: (offset, time) for offset, time, id in log}
    for id, (offset, time) in newest.items():
        counts = offset >= oldest and (now - time < window_ms or offset >= floor)
        found = window.offset(digest(id))
        assert found in (offset, -1)
        assert (found >= 0 and window.remembered(found, now, window_ms, floor)) is counts
        assert (digest(id) in window.known(split(digest(id)))) is (found >= 0)
