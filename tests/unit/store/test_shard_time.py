"""Moments of a shard whose clock is another: there and back (I16)."""

from __future__ import annotations

import pytest

from postroom.config import DEFAULTS
from postroom.model.delivery.delivery import Delivery, Holder, Kind, Settlement
from postroom.model.delivery.ordered import FAR
from postroom.store.contract import Append, Granted, Peek, Settled
from postroom.store.sharded.shard import Skew

HERE = 1_700_000_000_000


@pytest.mark.parametrize("apart", [0, 250, -250])
def test_clocks_that_agree_are_left_alone(apart: int) -> None:
    skew = Skew(HERE + apart, HERE, DEFAULTS.tuning.store.skew_ms)
    assert not skew
    assert skew.there(HERE) == skew.here(HERE) == HERE
    peek = Peek(3, HERE, Holder(1, "ann", HERE))
    assert skew.peek(peek) is peek


@pytest.mark.parametrize(("shard", "first"), [(None, HERE), (HERE, None)])
def test_a_clock_that_is_not_known_is_left_alone(shard: int | None, first: int | None) -> None:
    assert not Skew(shard, first, DEFAULTS.tuning.store.skew_ms)


@pytest.mark.parametrize("apart", [3_600_000, -5_000])
def test_moments_are_moved_there_and_back(apart: int) -> None:
    skew, there = Skew(HERE + apart, HERE, DEFAULTS.tuning.store.skew_ms), HERE + apart
    assert (skew.there(HERE), skew.here(there), skew.due(there), skew.due(None)) == (there, HERE, HERE, None)
    assert [a.due_at for a in skew.appends([Append(1, b"", HERE), Append(1, b"")])] == [there, 0]
    [retry] = skew.settlements([Settlement(Kind.RETRY, 0, 0, visible_at=HERE)])
    assert retry.visible_at == there
    peek = skew.peek(Peek(3, there, Holder(1, "ann", there)))
    assert (peek.next_due, peek.holder) == (HERE, Holder(1, "ann", HERE))
    taken = Delivery(0, 1, there)
    granted = skew.granted(Granted((taken,), (taken,), next_due=there, holder=Holder(1, "ann", there)))
    assert [d.visible_at for d in (*granted.deliveries, *granted.leaving)] == [HERE, HERE]
    assert (granted.next_due, granted.holder) == (HERE, Holder(1, "ann", HERE))
    settled = skew.settled(Settled(kept=(taken,), leaving=(taken,)))
    assert [d.visible_at for d in (*settled.kept, *settled.leaving)] == [HERE, HERE]
    assert skew.delivery_there(skew.delivery(taken)) == taken


def test_what_is_no_moment_is_left_alone() -> None:
    """0 is "none", and a stopped message waits for ever."""
    skew = Skew(HERE + 60_000, HERE, DEFAULTS.tuning.store.skew_ms)
    for moment in (0, FAR):
        assert skew.there(moment) == skew.here(moment) == moment
