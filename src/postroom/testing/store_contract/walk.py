"""A random walk over all verbs of a group's life, beside a model that keeps every offset by itself.

What a poll hands out is the model's to check, not to predict (`model.delivery` decides it and has tests of
its own): nothing settled, nothing in other hands, nothing outside the log, and in the end everything.
"""

from __future__ import annotations

import random

import pytest

from ...model.delivery import Delivery, Kind, Settlement
from ...model.settings import GroupSettings, Start
from ...store.contract import Group, Store, Topic
from .harness import MovableClock, StoreHarness, acks, append, ask, batch, spans
from .measures import bytes_from

__all__ = ["WalkContract"]

LEASE_MS = 500
STEPS = 120


class WalkContract(StoreHarness):
    @pytest.mark.parametrize("seed", range(5))
    def test_any_walk_keeps_every_message_in_one_hand_until_it_is_settled(
        self, store: Store, topic: Topic, place: int, clock: MovableClock, seed: int
    ) -> None:
        """R1, R19, R21, I6, I7."""
        settings = GroupSettings(lease_ms=LEASE_MS, max_attempts=10_000)
        walk = _Walk(store, place, store.catalog.create_group(topic.name, "walk", settings), clock, seed)
        for _ in range(STEPS):
            walk.step()
            walk.check()
        walk.finish()


class _Walk:
    def __init__(self, store: Store, place: int, group: Group, clock: MovableClock, seed: int) -> None:
        self.store, self.place, self.group, self.clock = store, place, group, clock
        self.draw = random.Random(seed)
        self.start = self.end = self.cursor = 0
        self.unsettled: set[int] = set()  # below the cursor
        self.held: dict[int, tuple[int, int]] = {}  # offset → token, lease
        self.tokens: list[int] = []
        self.seen: set[int] = set()

    def step(self) -> None:
        steps = [
            self.add,
            self.poll,
            self.poll,
            self.poll_again,
            self.ack,
            self.ack,
            self.give_back,
            self.extend,
        ]
        self.draw.choice([*steps, self.wait, self.wait, self.trim, self.reset])()

    # ---- verbs ----

    def add(self) -> None:
        sizes = [self.draw.randint(1, 6) for _ in range(self.draw.randint(1, 4))]
        append(self.store, self.place, *(batch(size) for size in sizes))
        self.end += sum(sizes)

    def poll(self) -> None:
        token = self.draw.getrandbits(62) + 1
        self.tokens = [*self.tokens[-5:], token]
        for delivery in self._polled(token):
            assert delivery.visible_at == self.clock.ms + LEASE_MS
            for offset in range(delivery.first, delivery.last + 1):
                self._hand_out(offset, token)

    def _hand_out(self, offset: int, token: int) -> None:
        assert max(self.start, 0) <= offset < self.end
        assert offset in self.unsettled or offset >= self.cursor, "handed out after it was settled"
        assert self.held.get(offset, (0, 0))[1] <= self.clock.ms, "handed out while somebody holds it"
        self.cursor = max(self.cursor, offset + 1)
        self.unsettled.add(offset)
        self.held[offset] = (token, self.clock.ms + LEASE_MS)
        self.seen.add(offset)

    def poll_again(self) -> None:
        if not self.tokens:
            return
        token = self.draw.choice(self.tokens)
        mine = {offset for offset in self._of(token) if offset >= self.start}
        if mine:
            found = {o for d in self._polled(token) for o in range(d.first, d.last + 1)}
            assert found == mine, "the same poll was answered otherwise"
            self.held.update(dict.fromkeys(mine, (token, self.clock.ms + LEASE_MS)))

    def _polled(self, token: int) -> tuple[Delivery, ...]:
        empty_handed = self.draw.random() < 0.7
        wish = ask(token, self.end, messages=self.draw.randint(1, 12), empty_handed=empty_handed)
        granted = self.store.progress.poll(self.group, self.place, wish, log_start=self.start)
        self._passed_over()
        assert (granted.leaving, granted.unplaced) == ((), ())
        return granted.deliveries

    def _passed_over(self) -> None:
        """A poll with a start of the log has dropped what lies below it."""
        self.cursor = max(self.cursor, self.start)
        self.unsettled = {offset for offset in self.unsettled if offset >= self.start}
        self.held = {offset: held for offset, held in self.held.items() if offset >= self.start}

    def ack(self) -> None:
        if self.tokens:
            token, first, last = self._somewhere()
            done = self.store.progress.settle(self.group, self.place, token, acks((first, last)))
            mine = self._of(token) & set(range(first, last + 1))
            self.unsettled -= mine
            self._lose(mine)
            assert _offsets(done.lost) == {o for o in range(first, last + 1) if self._open(o)}

    def give_back(self) -> None:
        if not self.tokens:
            return
        token, first, last = self._somewhere()
        kind = self.draw.choice([Kind.RETRY, Kind.RELEASE])
        back = Settlement(kind, first, last, visible_at=self.clock.ms + self.draw.choice([0, 50, 700]))
        self.store.progress.settle(self.group, self.place, token, [back])
        self._lose(self._of(token) & set(range(first, last + 1)))

    def extend(self) -> None:
        if self.tokens:
            token, first, last = self._somewhere()
            lost = self.store.progress.extend(self.group, self.place, token, [(first, last)])
            mine = self._of(token) & set(range(first, last + 1))
            self.held.update(dict.fromkeys(mine, (token, self.clock.ms + LEASE_MS)))
            assert _offsets(lost) == set(range(first, last + 1)) - mine

    def wait(self) -> None:
        self.clock.ms += self.draw.choice([1, 100, LEASE_MS - 1, LEASE_MS, 3 * LEASE_MS])

    def trim(self) -> None:
        self.start = self.store.log.trim(self.place, min(self.end, self.start + self.draw.randint(0, 4)))
        self.store.log.sweep(self.place, rows=self.draw.choice([0, 1, 100]))

    def reset(self) -> None:
        if self.draw.random() < 0.3:
            to = Start("offsets", offsets=((0, self.draw.randint(0, self.end)),))
            self.group = self.store.catalog.reset_group(self.group.topic, self.group.name, to)
            self.store.progress.rewind(self.group, [self.place])
            self.cursor = max(self.start, min(to.offsets[0][1], self.end))
            self.unsettled, self.held, self.tokens = set(), {}, []

    # ---- what must hold ----

    def check(self) -> None:
        (found,) = self.store.progress.backlog(self.group, [self.place], open_spans=1000)
        unsettled = {offset for offset in self.unsettled if offset >= self.start}
        cursor = max(self.cursor, self.start)
        committed = min(unsettled, default=cursor)
        assert (found.cursor, found.end, found.unsettled) == (cursor, self.end, len(unsettled))
        assert (found.committed, _offsets(found.open)) == (committed, unsettled)
        assert found.bytes == bytes_from(self.store, self.place, committed)
        kept = self.store.progress.committed(self.group.id, self.place)
        assert kept is None or kept == min(self.unsettled, default=self.cursor)

    def finish(self) -> None:
        """Whatever happened before: consumers that live settle everything."""
        for token in range(1, 10_000):
            self.clock.ms += LEASE_MS
            wish = ask(token, self.end)
            granted = self.store.progress.poll(self.group, self.place, wish, log_start=self.start)
            self.store.progress.settle(self.group, self.place, token, acks(*spans(granted)))
            if self.store.progress.committed(self.group.id, self.place) == self.end:
                break
        (found,) = self.store.progress.backlog(self.group, [self.place])
        assert (found.committed, found.unsettled, found.bytes) == (self.end, 0, 0)

    # ---- help ----

    def _of(self, token: int) -> set[int]:
        return {offset for offset, (owner, _) in self.held.items() if owner == token}

    def _open(self, offset: int) -> bool:
        return offset in self.unsettled or offset >= self.cursor

    def _lose(self, offsets: set[int]) -> None:
        for offset in offsets:
            del self.held[offset]

    def _somewhere(self) -> tuple[int, int, int]:
        first = self.draw.randint(0, max(0, self.end - 1))
        return self.draw.choice(self.tokens), first, first + self.draw.randint(0, 8)


def _offsets(found: tuple[tuple[int, int], ...]) -> set[int]:
    offsets = [offset for first, last in found for offset in range(first, last + 1)]
    assert len(offsets) == len(set(offsets)), "an offset is there twice"
    return set(offsets)
