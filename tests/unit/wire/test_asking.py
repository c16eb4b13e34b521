"""What a connected client holds, and when it is asked about it (R19)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postroom.endpoint.requests import Ask
from postroom.endpoint.values import Beat, Grant, Held, Lease, PollReply, PollRequest, Settle, Verdict
from postroom.model.delivery.delivery import Span
from postroom.wire.server.holdings import Holdings

LEASE, BEFORE = 10_000, 3_000


def request(token: int = 7, *, on_delivery: bool = False) -> PollRequest:
    return PollRequest("orders", "g", "m", token, 10, 1000, 0, True, on_delivery)


def reply(*spans: Span, partition_id: int = 1, lease_ms: int = LEASE) -> PollReply:
    leases = tuple(Lease(first, last, 1, False) for first, last in spans)
    return PollReply((Grant("orders", 0, partition_id, leases, ()),), lease_ms)


def settle(*spans: Span, partition_id: int = 1, token: int = 7) -> list[Settle]:
    return [Settle("orders", partition_id, token, tuple(Verdict("ack", a, z) for a, z in spans))]


def held(*spans: Span, partition_id: int = 1, token: int = 7) -> Held:
    return Held("orders", partition_id, token, spans)


def ask(*parts: Held, lease_ms: int = LEASE) -> Ask:
    return Ask("orders", "g", "m", parts, lease_ms)


def granted(*spans: Span, at: int = 0) -> Holdings:
    holdings = Holdings()
    holdings.granted(request(), reply(*spans), at)
    return holdings


def test_a_holder_is_asked_a_little_before_its_lease_ends_and_once() -> None:
    holdings = granted((0, 4), at=1000)
    assert holdings.due(1000 + LEASE - BEFORE - 1, BEFORE) == []
    assert holdings.due(1000 + LEASE - BEFORE, BEFORE) == [ask(held((0, 4)))]
    assert holdings.due(10**9, BEFORE) == []
    assert len(holdings) == 0


def test_a_short_lease_is_asked_about_in_its_second_half() -> None:
    holdings = Holdings()
    holdings.granted(request(), reply((0, 4), lease_ms=1000), 0)
    assert holdings.due(499, BEFORE) == []
    assert holdings.due(500, BEFORE) == [ask(held((0, 4)), lease_ms=1000)]


def test_short_leases_are_looked_at_more_often() -> None:
    """Three eighths of a lease are left when its holder is asked at the latest."""
    holdings = Holdings()
    assert holdings.look_ms == 0
    holdings.granted(request(), reply((0, 4), lease_ms=30_000), 0)
    assert holdings.look_ms == 3750
    holdings.granted(request(8), reply((5, 6), lease_ms=1000), 0)
    assert holdings.look_ms == 125
    assert holdings.due(500 + holdings.look_ms, BEFORE)
    holdings.settled(settle((0, 4)))
    assert holdings.look_ms == 0
    holdings.kept(ask(lease_ms=2000), [held((5, 6), token=8)], 0)
    assert holdings.look_ms == 250


def test_what_is_settled_is_not_asked_about() -> None:
    holdings = granted((0, 9))
    holdings.settled(settle((3, 4)))
    holdings.settled(settle((0, 0), token=8))  # another delivery
    assert holdings.due(LEASE, BEFORE) == [ask(held((0, 2), (5, 9)))]
    holdings = granted((0, 9))
    holdings.settled(settle((0, 4), (5, 20)))
    assert len(holdings) == 0


def test_a_heartbeat_puts_the_question_off() -> None:
    holdings = granted((0, 4))
    holdings.renewed([Beat("orders", "g", "m", "c", (held((0, 4)), held((0, 4), token=9)))], 5000)
    assert holdings.due(LEASE - BEFORE, BEFORE) == []
    assert holdings.due(5000 + LEASE - BEFORE, BEFORE) == [ask(held((0, 4)))]


def test_what_is_at_work_is_asked_about_again() -> None:
    holdings = granted((0, 4))
    (asked,) = holdings.due(LEASE, BEFORE)
    holdings.kept(asked, [held((2, 4))], LEASE)
    assert holdings.due(2 * LEASE - BEFORE, BEFORE) == [ask(held((2, 4)))]


def test_more_of_one_partition_is_one_holding() -> None:
    holdings = granted((0, 4))  # an ordered group: the token stays
    holdings.granted(request(), reply((5, 9)), 100)
    holdings.granted(request(), reply((5, 9)), 200)  # the answer was lost, and came again
    assert holdings.due(200 + LEASE, BEFORE) == [ask(held((0, 4), (5, 9)))]


def test_one_question_for_all_of_a_member() -> None:
    holdings = granted((0, 4))
    holdings.granted(request(8), reply((5, 9), partition_id=2), 0)
    (asked,) = holdings.due(LEASE, BEFORE)
    assert set(asked.held) == {held((0, 4)), held((5, 9), partition_id=2, token=8)}


def test_what_is_settled_on_delivery_is_nobodys() -> None:
    holdings = Holdings()
    holdings.granted(request(on_delivery=True), reply((0, 4)), 0)
    holdings.granted(request(), PollReply((Grant("orders", 0, 1, (), (), 5),), LEASE), 0)  # nothing new
    assert len(holdings) == 0


spans = st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda one: (one[0], one[0] + one[1]))


@given(st.lists(spans, min_size=1, max_size=4), st.lists(spans, max_size=6))
def test_exactly_what_was_not_settled_is_left(given_out: list[Span], gone: list[Span]) -> None:
    holdings = granted(*given_out)
    for span in gone:
        holdings.settled(settle(span))
    left = {n for a, z in given_out for n in range(a, z + 1)} - {n for a, z in gone for n in range(a, z + 1)}
    asked = [one for found in holdings.due(LEASE, BEFORE) for one in found.held]
    assert {n for one in asked for a, z in one.spans for n in range(a, z + 1)} == left
    assert len(holdings) == 0
