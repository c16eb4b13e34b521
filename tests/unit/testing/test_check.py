"""The checkers find what they are there to find: each fault is made by hand, and each excuse."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from postroom.testing import check
from postroom.testing.check import Did, Event, Kind, Verdict

A, B, C, OTHER = "a", "b", "c", "other"


def at(when: int, did: Did, id: str, by: str = "c0", **more: Any) -> Event:
    return Event(when, did, by, id, **more)


def sent(*ids: str, by: str = "p", when: int = 0, confirmed: bool = True, **more: Any) -> list[Event]:
    sending = [Event(when, "sending", by, id, key="k" if id != OTHER else "o", **more) for id in ids]
    return [
        *sending,
        *(Event(when, "confirmed", by, id, topic=more.get("topic", "")) for id in ids if confirmed),
    ]


def handled(when: int, id: str, by: str = "c0", outcome: Did | None = "settled") -> list[Event]:
    ended = [Event(when + 1, outcome, by, id)] if outcome else []
    return [Event(when, "handled", by, id), *ended]


def judged(*parts: list[Event], ordered: bool = True, **how: Any) -> Verdict:
    return check.group([event for part in parts for event in part], ordered=ordered, **how)


def kinds(verdict: Verdict) -> list[tuple[Kind, str]]:
    return [(fault.kind, fault.id) for fault in verdict.faults]


def test_a_clean_run() -> None:
    verdict = judged(sent(A, B, OTHER), handled(1, A), handled(3, B), handled(2, OTHER, "c1"))
    assert verdict.clean and (verdict.confirmed, verdict.handled, verdict.twice) == (3, 3, 0)


def test_histories_are_lines_of_json(tmp_path: Path) -> None:
    path, history = (
        tmp_path / "history",
        [*sent(A, due=7), *handled(1, A), Event(9, "outage", until=12, crash=True)],
    )
    check.write(path, history[:2])
    check.write(path, history[2:])
    with path.open("ab") as file:
        file.write(b'{"at":5,"did":"hand')  # its process was killed
    assert check.read(path) == history


# ---- lost ----


def test_a_confirmed_message_that_nobody_handled_is_lost() -> None:
    assert kinds(judged(sent(A, B), handled(1, A))) == [("lost", B)]


def test_an_unconfirmed_one_is_not() -> None:
    assert judged(sent(A), sent(B, confirmed=False), handled(1, A)).clean


def test_what_was_sent_before_may_be_lost_where_that_is_said() -> None:
    assert judged(sent(A), since=1).clean


def test_what_nobody_sent_is_strange() -> None:
    assert kinds(judged(sent(A), handled(1, A), handled(2, OTHER))) == [("strange", OTHER)]


def test_what_comes_before_it_is_due_is_early() -> None:
    assert kinds(judged(sent(A, due=5), handled(4, A))) == [("early", A)]
    assert judged(sent(A, due=5), handled(5, A)).clean


# ---- repeated ----


def test_a_repeat_without_a_reason() -> None:
    assert kinds(judged(sent(A), handled(1, A, outcome=None), handled(5, A, "c1"))) == [("repeated", A)]


def test_what_was_acked_is_not_handled_again_even_after_a_kill() -> None:
    killed = [at(4, "killed", "")]
    assert kinds(judged(sent(A), handled(1, A), handled(9, A, "c1"), killed)) == [("acked again", A)]


def test_a_living_holder_that_settles_later_is_no_reason() -> None:
    first = [at(1, "handled", A), at(7, "settled", A)]
    assert kinds(judged(sent(A), first, handled(5, A, "c1"))) == [("repeated", A)]


@pytest.mark.parametrize(("outcome", "reason"), [("gone", "gone"), ("returned", "returned")])
def test_a_repeat_of_what_was_taken_or_given_back(outcome: Did, reason: str) -> None:
    verdict = judged(sent(A), handled(1, A, outcome=outcome), handled(5, A, "c1"))
    assert verdict.clean and verdict.excused == {reason: 1} and verdict.twice == 1


def test_a_repeat_after_a_kill() -> None:
    unsettled, again = handled(1, A, outcome=None), handled(5, A, "c1")
    assert judged(sent(A), unsettled, again, [at(3, "killed", "")]).excused == {"killed": 1}
    assert judged(sent(A), unsettled, again, [at(8, "killed", "")]).of("repeated") == [A]


def test_a_repeat_after_a_pause() -> None:
    unsettled, again = handled(1, A, outcome=None), handled(5, A, "c1")
    assert judged(sent(A), unsettled, again, [at(2, "paused", "", until=9)]).excused == {"paused": 1}
    assert judged(sent(A), unsettled, again, [at(2, "paused", "", "c2", until=9)]).of("repeated") == [A]


def test_every_earlier_handling_needs_a_reason() -> None:
    first, killed = handled(1, A, outcome=None), [at(3, "killed", "")]
    verdict = judged(sent(A), first, handled(5, A, "c1"), handled(9, A, "c2"), killed)
    assert [(fault.kind, fault.by) for fault in verdict.faults] == [("acked again", "c2")]


def test_a_crash_may_forget_an_ack_that_was_not_flushed() -> None:
    crash, orderly = Event(9, "outage", until=12, crash=True), Event(9, "outage", until=12)
    first, again = handled(1, A), handled(50, A, "c1")
    assert judged(sent(A), first, again, [crash], lazy_ns=7).excused == {"crash": 1}
    assert judged(sent(A), first, again, [crash], lazy_ns=6).of("acked again") == [A]
    assert judged(sent(A), first, again, [orderly], lazy_ns=7).of("acked again") == [A]


def test_an_answer_may_wait_for_a_holder_that_stands_still_while_a_crash_forgets_the_ack() -> None:
    crash, again = Event(9, "outage", until=12, crash=True), handled(50, A, "c1")
    first = [at(1, "handled", A), at(20, "settled", A)]
    assert judged(sent(A), first, again, [crash]).of("acked again") == [A]
    assert judged(sent(A), first, again, [crash], [at(8, "paused", "", until=19)]).excused == {"crash": 1}
    assert judged(sent(A), first, again, [crash], [at(13, "paused", "", until=19)]).of("acked again") == [A]


def test_a_crash_may_forget_a_hand_out_for_one_lease() -> None:
    crash, first = Event(10, "outage", until=20, crash=True), handled(30, A)
    assert judged(sent(A), first, handled(50, A, "c1"), [crash], lease_ns=30).excused == {"forgotten": 1}
    assert judged(sent(A), first, handled(51, A, "c1"), [crash], lease_ns=30).of("acked again") == [A]
    assert judged(sent(A), first, handled(50, A), [crash], lease_ns=30).excused == {"forgotten": 1}
    assert judged(sent(A), first, handled(51, A), [crash], lease_ns=30).of("acked again") == [A]


def test_a_crash_may_forget_a_hand_out_that_was_handled_before_it_and_acked_after_it() -> None:
    crash, acked = Event(10, "outage", until=20, crash=True), Event(40, "settled", "c0", A)
    parts = sent(A), handled(7, A, outcome=None), [acked], handled(41, A), [crash]
    assert judged(*parts, lease_ns=30, lazy_ns=3).excused == {"forgotten": 1}
    assert judged(*parts, lease_ns=30, lazy_ns=2).of("acked again") == [A]
    assert judged(*parts, lease_ns=20, lazy_ns=3).of("acked again") == [A]


def test_who_was_cut_off_may_have_lost_its_lease() -> None:
    outage = Event(2, "outage", until=4)
    assert judged(sent(A), handled(1, A, outcome=None), handled(5, A, "c1"), [outage]).clean


def test_a_lease_that_an_outage_kept_from_being_renewed_may_end_after_it() -> None:
    outage = Event(2, "outage", until=4)
    parts = sent(A), handled(34, A, outcome=None), handled(36, A, "c1"), [outage]
    assert judged(*parts, lease_ns=30).excused == {"outage": 1}
    assert judged(*parts, lease_ns=29).of("repeated") == [A]


def test_exactly_once_has_no_excuse() -> None:
    parts = sent(A), handled(1, A, outcome="returned"), handled(5, A)
    assert judged(*parts).clean
    assert judged(*parts, exactly_once=True).of("repeated") == [A]


# ---- out of order ----


def test_the_first_handlings_of_a_key_are_in_order() -> None:
    parts = sent(A, B), handled(1, B), handled(3, A, "c1")
    assert kinds(judged(*parts)) == [("out of order", A)]
    assert judged(*parts, ordered=False).clean


def test_what_was_confirmed_comes_before_what_another_sends_later() -> None:
    first, second = sent(A), sent(B, by="p2", when=1)
    assert judged(first, second, handled(2, B), handled(4, A)).of("out of order") == [A]
    unconfirmed = sent(A, confirmed=False)
    assert judged(unconfirmed, second, handled(2, B), handled(4, A)).clean


def test_unconfirmed_messages_of_one_sender_are_in_order_too() -> None:
    assert judged(sent(A, B, confirmed=False), handled(1, B), handled(3, A)).of("out of order") == [A]


def test_the_next_holder_goes_on_in_order() -> None:
    cut_off = [at(when, "handled", id) for when, id in enumerate((A, B, C), 1)] + [at(4, "killed", "")]
    right = [event for when, id in ((5, A), (7, B), (9, C)) for event in handled(when, id, "c1")]
    wrong = [event for when, id in ((5, B), (7, A), (9, C)) for event in handled(when, id, "c1")]
    assert judged(sent(A, B, C), cut_off, right).clean
    verdict = judged(sent(A, B, C), cut_off, wrong)
    assert [fault.why for fault in verdict.faults] == ["after a takeover"]


def test_a_holder_that_is_given_the_same_again_starts_over() -> None:
    lost = [at(1, "handled", A), at(2, "handled", B), at(3, "gone", A), at(3, "gone", B)]
    assert judged(sent(A, B), lost, handled(5, A), handled(7, B)).clean


# ---- dead letters, offsets ----


def test_dead_letters_are_those_that_were_condemned_each_once() -> None:
    parts = (
        sent(A, B, C),
        handled(1, A),
        handled(3, B),
        handled(5, C),
        [at(2, "condemned", A), at(6, "condemned", C)],
    )
    found = [at(9, "dead", A), at(9, "dead", A), at(9, "dead", B)]
    assert judged(*parts, found).clean  # nobody asked
    verdict = judged(*parts, found, dead_letters=True)
    assert sorted(kinds(verdict)) == [("buried twice", A), ("innocent", B), ("not dead", C)]


def test_an_offset_that_goes_back() -> None:
    def committed(when: int, offset: int) -> Event:
        return Event(when, "committed", topic="t", partition=1, offset=offset)

    assert judged([committed(1, 5), committed(2, 5), committed(3, 7)]).clean
    assert judged([committed(1, 5), committed(3, 4)]).of("went back") == ["t/1"]
    assert judged([committed(1, 5), Event(2, "reset"), committed(3, 4)]).clean
    assert judged([committed(1, 5), Event(2, "outage", until=2, crash=True), committed(3, 4)]).clean


def test_groups_and_topics_are_apart() -> None:
    history = [
        *sent(A, topic="t"), *sent(B, topic="u"),
        at(1, "handled", A, topic="t", group="g"), at(1, "handled", B, topic="u", group="h"),
    ]  # fmt: skip
    assert check.group(history, "g", topic="t").clean
    assert check.group(history, "g", topic="u").of("lost") == [B]


# ---- the log ----


def stored(id: str, offset: int, partition: int = 0) -> Event:
    return Event(99, "stored", id=id, partition=partition, offset=offset)


def test_a_log_that_is_as_its_receipts_say() -> None:
    receipts = [Event(1, "confirmed", "p", id, partition=0, offset=n) for n, id in enumerate((A, B))]
    assert check.log([*sent(A, B, confirmed=False), *receipts, stored(A, 0), stored(B, 1)]).clean


def test_what_is_wrong_with_a_log() -> None:
    receipts = [Event(1, "confirmed", "p", id, partition=0, offset=0) for id in (A, B)]
    history = [*sent(A, B, C), *receipts, stored(B, 1), stored(A, 0), stored(A, 2), stored(OTHER, 3)]
    found = sorted(set(kinds(check.log(history))))
    assert found == [
        ("misplaced", B), ("not stored", C), ("out of order", A), ("same offset", B), ("stored twice", A),
        ("strange", OTHER),
    ]  # fmt: skip


def test_a_verdict_says_what_is_wrong() -> None:
    verdict = judged(sent(A, B), handled(1, A))
    assert str(verdict) == ("2 confirmed, 1 handled: 1 lost (lost: b); repeats with a reason: {}")


def test_a_hundred_thousand_messages_are_judged_in_seconds() -> None:
    """Linear in the history: four events each, with a repeat of every tenth after a crash."""
    count, history = 100_000, list[Event]()
    for number in range(count):
        id = f"m{number}"
        history += sent(id, when=number) + handled(number + 1, id)
        if number % 10 == 0:
            history += handled(number + 9, id, "c1")
    history.append(Event(0, "outage", until=count + 20, crash=True))
    began = time.process_time()
    verdict = judged(history, lazy_ns=1, ordered=False)
    assert verdict.twice == count // 10 and verdict.clean
    assert time.process_time() - began < 20
