"""The checker finds what it is there to find: each fault is made by hand, and each excuse."""

from __future__ import annotations

from .checker import HELD_NS, LAZY_NS, Outage, Report, Trail, check
from .journal import Entry
from .values import Value, parse

A, B, C = (str(Value("k", 1, number, "ack")) for number in (1, 2, 3))
NEXT_RUN = str(Value("k", 2, 1, "ack"))
OTHER = str(Value("other", 1, 1, "ack"))


def notes(*lines: tuple[int, str, str]) -> list[Entry]:
    return [Entry(*line) for line in lines]


def sent(*values: str, confirmed: bool = True) -> list[Entry]:
    verbs = ("sending", "confirmed") if confirmed else ("sending",)
    return [Entry(0, verb, value) for verb in verbs for value in values]


def judged(
    producer: list[Entry],
    *consumers: list[Entry],
    killed: dict[str, int] | None = None,
    outages: tuple[Outage, ...] = (),
    ordered: bool = True,
    since_ns: int = 0,
) -> Report:
    trail = Trail({"p": producer}, {f"c{i}": c for i, c in enumerate(consumers)}, killed or {}, outages)
    return check(trail, ordered=ordered, since_ns=since_ns)


def handled(at: int, value: str, outcome: str = "settled") -> list[Entry]:
    return notes((at, "handled", value), (at + 1, outcome, value))


def test_a_value_is_what_it_was() -> None:
    value = Value("p0.k3", 2, 17, "retry", 1_700_000_000_123)
    assert parse(str(value)) == value


def test_a_clean_run() -> None:
    report = judged(sent(A, B, OTHER), handled(1, A) + handled(3, B), handled(2, OTHER))
    assert report.clean and (report.confirmed, report.handled) == (3, 3)


# ---- lost ----


def test_a_confirmed_message_that_nobody_handled_is_lost() -> None:
    report = judged(sent(A, B), handled(1, A))
    assert report.lost == [B] and not report.clean


def test_an_unconfirmed_one_is_not() -> None:
    assert judged([*sent(A), *sent(B, confirmed=False)], handled(1, A)).clean


def test_what_was_sent_before_may_be_lost_where_that_is_said() -> None:
    assert judged(sent(A), since_ns=1).clean


def test_what_nobody_sent_is_strange() -> None:
    assert judged(sent(A), handled(1, A) + handled(2, OTHER)).strange == [OTHER]


# ---- repeated ----


def test_a_repeat_without_a_reason() -> None:
    report = judged(sent(A), handled(1, A), handled(5, A))
    assert report.repeated == [f"{A} by c1"] and not report.clean


def test_settled_and_then_killed_is_no_reason() -> None:
    assert judged(sent(A), handled(1, A), handled(9, A), killed={"c0": 4}).repeated


def test_a_living_holder_that_settles_later_is_no_reason() -> None:
    first = notes((1, "handled", A), (7, "settled", A))
    assert judged(sent(A), first, handled(5, A)).repeated
    assert judged(sent(A), notes((1, "handled", A)), handled(5, A)).repeated


def test_a_repeat_of_what_somebody_else_has() -> None:
    report = judged(sent(A), handled(1, A, "gone"), handled(5, A))
    assert report.clean and report.excused == {"gone": 1}


def test_a_repeat_after_a_kill() -> None:
    report = judged(sent(A), notes((1, "handled", A)), handled(5, A), killed={"c0": 3})
    assert report.clean and report.excused == {"killed": 1}
    assert judged(sent(A), notes((1, "handled", A)), handled(5, A), killed={"c0": 8}).repeated


def test_every_earlier_handling_needs_a_reason() -> None:
    first, second = notes((1, "handled", A)), handled(5, A)
    assert judged(sent(A), first, second, handled(9, A), killed={"c0": 3}).repeated == [f"{A} by c2"]


def test_a_crash_may_forget_a_hand_out_that_was_not_flushed() -> None:
    crash, orderly = Outage(10, 20, crash=True), Outage(10, 20, crash=False)
    first, second = handled(30, A), handled(40, A)
    assert judged(sent(A), first, second, outages=(crash,)).excused == {"forgotten": 1}
    assert judged(sent(A), first, second, outages=(orderly,)).repeated
    assert judged(sent(A), first, handled(HELD_NS + 11, A), outages=(crash,)).repeated  # its lease is over
    assert judged(sent(A), first + second, outages=(crash,)).repeated  # by the same
    assert judged(sent(A), handled(5, A), second, outages=(orderly,)).repeated


def test_a_crash_may_forget_an_ack_that_was_not_flushed() -> None:
    soon, late = Outage(LAZY_NS, LAZY_NS + 5, crash=True), Outage(3 * LAZY_NS, 3 * LAZY_NS, crash=True)
    again = handled(9 * LAZY_NS, A)
    assert judged(sent(A), handled(1, A), again, outages=(soon,)).excused == {"crash": 1}
    assert judged(sent(A), handled(1, A), again, outages=(late,)).repeated
    orderly = Outage(soon.begin, soon.end, crash=False)
    assert judged(sent(A), handled(1, A), again, outages=(orderly,)).repeated


def test_who_was_cut_off_may_have_lost_its_lease() -> None:
    outage = Outage(2, 4, crash=False)
    assert judged(sent(A), notes((1, "handled", A)), handled(5, A), outages=(outage,)).clean


# ---- out of order ----


def test_the_first_handlings_of_a_key_are_in_order() -> None:
    report = judged(sent(A, B), handled(1, B), handled(3, A))
    assert report.out_of_order == [f"{A} by c1"]
    assert judged(sent(A, B), handled(1, B), handled(3, A), ordered=False).clean


def test_a_run_is_before_the_next_one_if_it_was_confirmed() -> None:
    assert judged(sent(A, NEXT_RUN), handled(1, NEXT_RUN) + handled(3, A)).out_of_order
    assert judged([*sent(NEXT_RUN), *sent(A, confirmed=False)], handled(1, NEXT_RUN) + handled(3, A)).clean


def test_unconfirmed_messages_of_one_run_are_in_order_too() -> None:
    late = handled(1, NEXT_RUN) + handled(3, B) + handled(5, A)
    assert judged([*sent(NEXT_RUN), *sent(A, B, confirmed=False)], late).out_of_order == [f"{A} by c0"]


def test_the_next_holder_goes_on_in_order() -> None:
    cut_off = notes((1, "handled", A), (2, "handled", B), (3, "handled", C))
    right = handled(5, A) + handled(7, B) + handled(9, C)
    wrong = handled(5, B) + handled(7, A) + handled(9, C)
    assert judged(sent(A, B, C), cut_off, right, killed={"c0": 4}).clean
    report = judged(sent(A, B, C), cut_off, wrong, killed={"c0": 4})
    assert report.out_of_order == [f"{A} by c1, after a takeover"]


def test_a_holder_that_is_given_the_same_again_starts_over() -> None:
    lost = notes((1, "handled", A), (2, "handled", B), (3, "gone", A), (3, "gone", B))
    assert judged(sent(A, B), lost + handled(5, A) + handled(7, B)).clean
