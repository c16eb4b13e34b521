"""Keys in order: which messages of a partition may be handed out (R22, R23, I5)."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from postroom import Received
from postroom.client.consumer.ordered.key_queue import KeyQueue, StoredLine
from postroom.model.delivery.delivery import Line
from postroom.model.delivery.ordered import FAR
from tests.model.examples import examples


def message(position: int, key: bytes | None = b"a") -> Received:
    delivery: Any = SimpleNamespace(attempt=1)
    return Received(b"", key, offset=position, _position=position, _delivery=delivery)


def some(*keys: str, start: int = 0) -> list[Received]:
    """One message for each letter; "-" has no key."""
    return [message(start + at, None if key == "-" else key.encode()) for at, key in enumerate("".join(keys))]


def offsets(messages: list[Received]) -> list[int]:
    return [m._position for m in messages]


def test_a_run_of_a_key_goes_out_together_and_the_rest_waits_for_it() -> None:
    queue = KeyQueue()
    queue.add(some("aabab"))
    first = queue.take(3, 0)
    assert offsets(first) == [0, 1, 2] and queue.out == 3
    assert queue.take(10, 0) == [] and queue.parked == 2
    queue.done(first[:1])
    assert queue.take(10, 0) == []  # one of the run is still out
    queue.done(first[1:2])
    assert offsets(queue.take(10, 0)) == [3]
    queue.done(first[2:])
    assert offsets(queue.take(10, 0)) == [4]


def test_one_of_each_key_at_a_time() -> None:
    queue = KeyQueue()
    queue.add(some("aabbc"))
    first = queue.take(10, 0, one_per_key=True)
    assert offsets(first) == [0, 2, 4]
    assert queue.take(10, 0, one_per_key=True) == []
    queue.done(first[:1])
    assert offsets(queue.take(10, 0, one_per_key=True)) == [1]


def test_messages_without_a_key_are_one_key() -> None:
    queue = KeyQueue()
    queue.add(some("-a-"))
    assert offsets(queue.take(10, 0, one_per_key=True)) == [0, 1]


def test_a_whole_partition_is_one_key() -> None:
    queue = KeyQueue(whole=True)
    queue.add(some("abc"))
    (first,) = queue.take(1, 0)
    assert queue.take(5, 0) == []
    queue.done([first])
    queue.add(some("de", start=3))
    second = queue.take(2, 0)
    assert offsets(second) == [1, 2]
    queue.done(second[:1])
    assert queue.take(5, 0) == []


def test_a_retried_message_holds_its_own_key_only() -> None:
    queue = KeyQueue()
    queue.add(some("aabb"))
    a0, a1, b2, b3 = queue.take(10, 0)
    queue.done([a0, a1])
    queue.back([a1])
    queue.back([a0], 100)
    assert queue.next_at == 100 and queue.waiting == 2
    assert queue.take(10, 99) == [] and not queue.has_more(99)
    queue.done([b2, b3])
    queue.add(some("ab", start=4))
    assert offsets(queue.take(10, 99)) == [5]
    assert queue.waiting == 3 and queue.has_more(100)
    assert offsets(queue.take(10, 100)) == [0, 1, 4]
    assert queue.waiting == queue.parked == 0 and queue.next_at is None


def test_a_message_that_waits_further_back_stops_the_run_before_it() -> None:
    queue = KeyQueue()
    queue.add(some("aaa"))
    taken = queue.take(10, 0)
    queue.done(taken)
    queue.back([taken[0], taken[2]])
    queue.back([taken[1]], 100)
    assert offsets(queue.take(10, 50)) == [0]
    queue.done(taken[:1])
    assert queue.take(10, 50) == [] and queue.next_at == 100
    assert offsets(queue.take(10, 100)) == [1, 2]


def test_a_message_with_a_not_before_goes_among_those_that_came_before_it() -> None:
    """As a new holder receives them (I5)."""
    queue = KeyQueue()
    queue.add(some("ab"))
    queue.add(some("a", start=2), 100)
    queue.add(some("ab", start=3))
    first = queue.take(10, 0)
    assert sorted(offsets(first)) == [0, 1]
    queue.done(first)
    assert offsets(queue.take(10, 0)) == [4]
    assert offsets(queue.take(10, 100)) == [2, 3]


def test_what_was_not_stored_is_out_again() -> None:
    queue = KeyQueue()
    queue.add(some("aa"))
    (first,) = queue.take(1, 0)
    queue.done([first])
    queue.undone([first])
    assert queue.take(1, 0) == [] and queue.out == 1
    queue.done([first])
    assert offsets(queue.take(1, 0)) == [1]


def test_only_what_lies_within() -> None:
    """As a suspect is handled (I14): others that could go on wait, and it does not overtake them."""
    queue = KeyQueue()
    queue.add(some("ab"), 100)
    queue.add(some("ca", start=2))
    assert offsets(queue.take(10, 100, within=(2, 3))) == [2]
    assert not queue.has_more(100, (2, 3)) and queue.has_more(100)
    assert queue.take(10, 100, within=(2, 3)) == []
    assert offsets(queue.take(10, 100)) == [0, 3, 1]


def test_keys_that_came_to_nothing_are_forgotten() -> None:
    queue = KeyQueue()
    for start in range(0, 1000, 10):
        queue.add(some("abcdefghij", start=start))
        queue.done(queue.take(10, 0, one_per_key=True))
    assert not queue._busy and not queue._lines and not queue._ready and not queue._not_before


# ---- lines in the store (I27) ----


def claims(queue: KeyQueue) -> dict[bytes | None, list[int]]:
    return {line.key: offsets(messages) for line, messages in queue.take_claimed()}


def test_what_is_behind_a_stopped_message_is_claimed_for_the_store() -> None:
    queue = KeyQueue()
    queue.add(some("aabaa"))
    first = queue.take(1, 0)
    queue.done(first)
    queue.back(first, FAR)
    assert offsets(queue.take(10, 0)) == [2] and queue.waiting == 4
    queue.park_stopped()
    assert claims(queue) == {b"a": [1, 3, 4]}
    assert (queue.parked, queue.waiting, queue.behind) == (1, 1, 0)
    queue.add(some("ba", start=5))
    assert offsets(queue.take(10, 0)) == [] and claims(queue) == {b"a": [6]}  # b is still out


def test_what_comes_behind_a_stopped_message_that_had_nothing_behind_it_is_claimed_too() -> None:
    queue = KeyQueue()
    queue.add(some("a"))
    first = queue.take(1, 0)
    queue.done(first)
    queue.back(first, FAR)
    queue.park_stopped()
    assert claims(queue) == {}
    queue.add(some("a", start=1))
    assert queue.take(1, 0) == []
    queue.park_stopped()
    assert claims(queue) == {b"a": [1]}


def test_what_was_tried_keeps_its_attempts_and_is_not_parked() -> None:
    queue = KeyQueue()
    queue.add(some("aaa"))
    run = queue.take(3, 0)
    for one in run[:2]:
        one._delivery.attempt = 2  # type: ignore[misc]
    queue.done(run)
    queue.back(run, 50)
    queue.park_waiting()
    assert claims(queue) == {}  # the last one waits for its time as well
    assert offsets(queue.take(10, 50)) == [0, 1, 2]


def test_a_key_whose_line_is_stored_goes_on_with_that_first() -> None:
    queue = KeyQueue()
    queue.has_stored([Line(3, b"a", 3, 9, 4)])
    queue.add(some("ab", start=20))
    assert offsets(queue.take(10, 0)) == [21] and claims(queue) == {b"a": [20]}
    line = queue.hungry()
    assert line is not None and (line.first, line.last) == (3, 20)
    queue.unparked(line, [message(3), message(7)], 8)
    assert queue.hungry() is None
    assert offsets(queue.take(1, 0)) == [3]
    assert queue.hungry() is None and queue.take(1, 0) == []


def test_what_came_and_was_not_looked_at_comes_before_what_is_stored() -> None:
    queue = KeyQueue()
    queue.has_stored([Line(3, b"a", 3, 9, 4)])
    queue.add(some("ba", start=1))
    assert queue.hungry() is None
    assert offsets(queue.take(10, 0)) == [1, 2]
    queue.done([message(1, b"b"), message(2)])
    assert queue.hungry(received=3) is None  # something may come that is earlier
    assert queue.hungry(received=4) is not None


def test_nothing_is_taken_out_of_a_line_while_the_store_is_told_of_it() -> None:
    queue = KeyQueue()
    queue.has_stored([Line(3, b"a", 3, 9, 4)])
    line = queue.hungry()
    assert line is not None
    line.telling += 1
    assert queue.hungry() is None


def test_what_is_settled_on_delivery_waits_here_behind_what_is_stored() -> None:
    queue = KeyQueue(keeps=True)
    queue.has_stored([Line(3, b"a", 3, 9, 4)])
    queue.add(some("ab", start=20))
    assert offsets(queue.take(10, 0)) == [21] and not queue.claimed
    line = queue.hungry()
    assert line is not None
    queue.unparked(line, [message(9)], 10)
    assert offsets(queue.take(10, 0)) == [9, 20]


def test_a_whole_partition_goes_on_with_lines_that_were_stored_by_key() -> None:
    queue = KeyQueue(whole=True)
    queue.has_stored([Line(3, b"a", 3, 9, 2), Line(5, b"b", 5, 8, 2)])
    queue.add(some("ab", start=20))
    assert queue.take(10, 0) == []
    found: list[int] = []
    for _ in range(9):
        if (line := queue.hungry()) is not None:
            at = next(o for o in {b"a": [3, 9], b"b": [5, 8]}[line.key or b""] if o >= line.first)
            queue.unparked(line, [message(at, line.key)], at + 1)
        taken = queue.take(10, 0)
        found += offsets(taken)
        queue.done(taken)
    assert found == [3, 5, 8, 9, 20, 21]


# ---- any course of events ----


class Keys(RuleBasedStateMachine):
    """Against a naive model: by key, the offsets not done with, and which of them are out or wait."""

    whole = False

    def __init__(self) -> None:
        super().__init__()
        self.queue = KeyQueue(whole=self.whole)
        self.now = 0
        self.end = 0
        self.open: dict[object, list[int]] = defaultdict(list)  # offsets by key, in order
        self.out: dict[int, Received] = {}
        self.not_before: dict[int, int] = {}
        self.sent: dict[int, Received] = {}  # done with, but it may turn out that it is not

    def key(self, m: Received) -> object:
        return None if self.whole else m.key

    @rule(keys=st.text("ab-c", min_size=1, max_size=6), wait=st.sampled_from([0, 0, 0, 1, 5]))
    def come(self, keys: str, wait: int) -> None:
        messages = some(keys, start=self.end)
        not_before = self.now + wait if wait else 0
        for m in messages:
            self.open[self.key(m)].append(m._position)
            if wait:
                self.not_before[m._position] = not_before
        self.end += len(messages)
        self.queue.add(messages, not_before)

    @rule(limit=st.integers(1, 5), one=st.booleans())
    def take(self, limit: int, one: bool) -> None:
        self._take(limit, one)

    def _take(self, limit: int, one: bool) -> None:
        out_before = {self.key(m) for m in self.out.values()}
        taken = self.queue.take(limit, self.now, one_per_key=one)
        assert len(taken) <= limit
        ran: dict[object, list[int]] = defaultdict(list)
        for m in taken:
            assert m._position not in self.out and self.not_before.get(m._position, 0) <= self.now
            ran[self.key(m)].append(m._position)
            self.out[m._position] = m
        for key, run in ran.items():
            assert key not in out_before, "a key has one run out at a time"
            assert run == self.open[key][: len(run)], "in order, and nothing left out"
            assert not one or len(run) == 1
        if len(taken) < limit:
            self.nothing_is_left_that_could_go(out_before | set(ran))

    def nothing_is_left_that_could_go(self, busy: set[object]) -> None:
        for key, positions in self.open.items():
            if key not in busy and positions:
                assert self.not_before.get(positions[0], 0) > self.now, f"{key!r} could go on"

    @precondition(lambda self: self.out)
    @rule(data=st.data(), all_of_it=st.booleans())
    def done(self, data: st.DataObject, all_of_it: bool) -> None:
        chosen = sorted(self.out)
        if not all_of_it:
            chosen = data.draw(st.lists(st.sampled_from(chosen), unique=True, min_size=1).map(sorted))
        self._done(chosen)

    def _done(self, chosen: list[int]) -> None:
        self.queue.done([self.out[position] for position in chosen])
        for position in chosen:
            m = self.out.pop(position)
            self.open[self.key(m)].remove(position)
            self.sent = {position: m}

    @precondition(lambda self: self.sent)
    @rule()
    def not_stored(self) -> None:
        ((position, m),) = self.sent.items()
        self.sent = {}
        line = self.open[self.key(m)]
        line.append(position)
        line.sort()
        self.out[position] = m
        self.queue.undone([m])

    @precondition(lambda self: self.out)
    @rule(data=st.data(), wait=st.sampled_from([0, 0, 1, 3, 10]))
    def come_back(self, data: st.DataObject, wait: int) -> None:
        """Retried or released, and with it everything of its key that is out behind it."""
        chosen = data.draw(st.sampled_from(sorted(self.out)))
        first = self.out[chosen]
        later = [p for p, m in self.out.items() if p > chosen and self.key(m) == self.key(first)]
        self.sent = {}
        back = [self.out.pop(position) for position in sorted(later)]
        if back:
            self.queue.done(back)
            self.queue.back(back)
        self.queue.done([self.out.pop(chosen)])
        self.not_before[chosen] = self.now + wait
        self.queue.back([first], self.now + wait if wait else 0)

    @rule(passed=st.integers(1, 4))
    def time_passes(self, passed: int) -> None:
        self.now += passed

    @invariant()
    def counts_are_right(self) -> None:
        assert self.queue.out == len(self.out)
        held = sum(map(len, self.open.values()))
        assert self.queue.fresh + self.queue.parked == held - len(self.out)
        waits = self.queue._waiting
        assert self.queue.waiting == sum(len(self.queue._lines[key]) for key in waits)

    def teardown(self) -> None:
        """Once everything is done with, everything was handed out."""
        self.now += 1000
        for _ in range(2000):
            if self.out:
                self._done(sorted(self.out))
            self._take(5, False)
            if not self.out:
                break
        assert not any(self.open.values()) and not self.queue.has_more(self.now)


class WholePartition(Keys):
    whole = True


class ParkedKeys(Keys):
    """The same while lines go to a store and come back, and the store is sometimes not reached."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, Received] = {}
        self.telling: list[tuple[StoredLine, list[Received]]] = []

    def away(self) -> set[int]:
        """Offsets that are in the store, or on their way there."""
        claimed = [m for messages in self.queue.claimed.values() for m in messages]
        told = [m for _, messages in self.telling for m in messages]
        return {m._position for m in (*claimed, *told, *self.stored.values())}

    @precondition(lambda self: self.out)
    @rule(data=st.data(), wait=st.sampled_from([1, 3, 10]))
    def fail(self, data: st.DataObject, wait: int) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.out)))
        self.out[chosen]._delivery.attempt = 2  # type: ignore[misc]
        later = [p for p, m in self.out.items() if p > chosen and m.key == self.out[chosen].key]
        back = [self.out.pop(position) for position in sorted(later)]
        failed = self.out.pop(chosen)
        self.sent = {}
        self.queue.done([*back, failed])
        self.queue.back(back)
        self.not_before[chosen] = self.now + wait
        self.queue.back([failed], self.now + wait)

    @rule()
    def park(self) -> None:
        self.queue.park_waiting()

    @rule()
    def tell(self) -> None:
        for line, messages in self.queue.take_claimed():
            assert offsets(messages) == sorted(offsets(messages))
            assert line.first <= messages[0]._position and messages[-1]._position <= line.last
            line.telling += 1
            self.telling.append((line, messages))

    @precondition(lambda self: self.telling)
    @rule(which=st.integers(0, 9), reached=st.booleans())
    def told(self, which: int, reached: bool) -> None:
        line, messages = self.telling.pop(which % len(self.telling))
        line.telling -= 1
        if reached:
            self.stored.update((m._position, m) for m in messages)
        else:
            self.queue.claim_again(messages)

    @precondition(lambda self: not self.stored and not self.queue.claimed and not self.telling)
    @rule(keys=st.text("ab-c", min_size=4, max_size=9), split=st.integers(1, 8))
    def hand_over(self, keys: str, split: int) -> None:
        """The partition is newly held, with a line of the store behind what is received."""
        self.queue, self.out, self.sent = KeyQueue(), {}, {}
        self.open, self.not_before = defaultdict(list), {}
        messages = some(keys, start=self.end)
        self.end += len(messages)
        for m in messages:
            self.open[m.key].append(m._position)
        parked = [m for m in messages[split:] if m.key == messages[-1].key]
        if parked:
            first, last = parked[0]._position, parked[-1]._position
            self.stored = {m._position: m for m in parked}
            self.queue.has_stored([Line(first, parked[0].key, first, last, len(parked))])
        self.queue.add([m for m in messages if m not in parked])

    @rule(limit=st.integers(1, 4))
    def unpark(self, limit: int) -> None:
        line = self.queue.hungry()
        if line is None:
            return
        found = sorted(p for p, m in self.stored.items() if m.key == line.key and p >= line.first)[:limit]
        upto = found[-1] if len(found) == limit else line.last
        self.queue.unparked(line, [self.stored.pop(position) for position in found], upto + 1)

    def nothing_is_left_that_could_go(self, busy: set[object]) -> None:
        away = self.away()
        for key, positions in self.open.items():
            stored = self.queue._stored.get(key)  # what it begins with is known when it was asked (`unpark`)
            first_stored = self.end if stored is None else stored.first
            if key not in busy and positions and positions[0] not in away and positions[0] < first_stored:
                assert self.not_before.get(positions[0], 0) > self.now, f"{key!r} could go on"

    @invariant()
    def counts_are_right(self) -> None:
        assert self.queue.out == len(self.out)
        held = sum(map(len, self.open.values())) - len(self.away())
        assert self.queue.fresh + self.queue.parked == held - len(self.out)
        waits = self.queue._waiting
        assert self.queue.waiting == sum(len(self.queue._lines[key]) for key in waits)
        assert all(self.queue._lines.values()), "an empty line"

    def teardown(self) -> None:
        self.now += 1000
        for _ in range(2000):
            if self.out:
                self._done(sorted(self.out))
            self.tell()
            while self.telling:
                self.told(0, True)
            self.unpark(2)
            self._take(5, False)
            if not self.out and not self.stored:
                break
        assert not any(self.open.values()) and not self.queue.has_more(self.now)


@pytest.mark.parametrize("machine", [Keys, WholePartition, ParkedKeys])
def test_any_course_of_events(machine: type[Keys]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
    )
