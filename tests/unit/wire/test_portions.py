"""Whatever a consumer holds, what it says of it fits into requests that a broker takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postroom.config import DEFAULTS
from postroom.endpoint import requests as r
from postroom.endpoint.values import Beat, Held, Settle, Verdict
from postroom.model.delivery.delivery import Line
from postroom.wire import messages as m
from postroom.wire.client.remote import beatings, settles

TOPIC, BIG = "t" * 250, 2**62
counts = st.sampled_from([0, 1, 3, 150, 2500])
reasons = st.sampled_from(["", "no", "\U0001f600" * 10_000])


def acks(count: int, reason: str = "") -> tuple[Verdict, ...]:
    kind = "retry" if reason else "ack"
    return tuple(Verdict(kind, BIG - 2 * n, BIG - 2 * n, 0, None, reason) for n in range(count))  # type: ignore[arg-type]


@given(st.lists(st.tuples(counts, reasons), max_size=4), counts)
def test_settles_of_any_size_are_taken(several: list[tuple[int, str]], singles: int) -> None:
    parts = [Settle(TOPIC, n, BIG, acks(count, reason)) for n, (count, reason) in enumerate(several)]
    parts += [Settle(TOPIC, n, BIG + n, acks(1)) for n in range(singles)]
    sent = [r.SettleParts(TOPIC, "g" * 60, tuple(some)) for some in settles(parts)]
    for one in sent:
        assert m.decode(m.encode_header(one), r.SettleParts) == one
    there = [
        (p.partition_id, p.token, v.kind, v.first) for one in sent for p in one.parts for v in p.verdicts
    ]
    assert there == [(p.partition_id, p.token, v.kind, v.first) for p in parts for v in p.verdicts]


def test_a_long_reason_is_cut_where_it_is_sent() -> None:
    (some,) = settles([Settle("t", 1, 1, acks(1, "x" * 100_000))])
    assert len(some[0].verdicts[0].reason) == DEFAULTS.max_reason_chars


def test_few_settles_are_passed_on_as_they_are() -> None:
    parts = [Settle("t", 1, 1, acks(5))]
    assert list(settles(parts)) == [parts]


def test_what_a_line_claims_stays_with_it() -> None:
    """Claimed offsets are acked in the same transaction (I27)."""
    line = Line(1, b"k" * 32_000, 1, BIG, 2500)
    park = Settle("t", 1, 1, (*acks(2500), Verdict("park", 1, BIG, line=line)))
    sent = list(settles([Settle("t", 2, 1, acks(2500)), park]))
    assert [part for some in sent for part in some if part.partition_id == 1] == [park]
    for some in sent:
        m.decode(m.encode_header(r.SettleParts("t", "g", tuple(some))), r.SettleParts)


@given(st.lists(counts, max_size=4), counts)
def test_heartbeats_of_any_size_are_taken(several: list[int], singles: int) -> None:
    held = [Held(TOPIC, n, BIG, tuple((BIG - k, BIG) for k in range(c))) for n, c in enumerate(several) if c]
    held += [Held(TOPIC, n, BIG + n, ((0, n),)) for n in range(singles)]
    beat = Beat(TOPIC, "g" * 60, "m" * 120, "c" * 250, tuple(held))
    sent = [r.Beats(tuple(some)) for some in beatings([beat])]
    assert sent
    for one in sent:
        assert m.decode(m.encode_header(one), r.Beats) == one
    there = [(h.partition_id, h.token, s) for one in sent for b in one.beats for h in b.held for s in h.spans]
    assert there == [(h.partition_id, h.token, s) for h in held for s in h.spans]
