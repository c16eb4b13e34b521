"""What the runner of outsiders' suites makes of their words: `make kafka-clients`."""

from __future__ import annotations

import pytest

from postroom.testing.check import Event
from tests.kafka_clients.__main__ import EXPECTED, SUITES
from tests.kafka_clients.outcome import FAILED, PASSED, SKIPPED, Case, judged, known_failures, table
from tests.kafka_clients.running import TIMED_OUT, Ran
from tests.kafka_clients.suites import java_trouble
from tests.kafka_clients.suites.outsiders import (
    kgo_cases,
    librdkafka_cases,
    part_case,
    parts_in,
    pytest_cases,
)
from tests.kafka_clients.suites.share import java_cases

ROW = "\x1b[32m| {name:40} | {verdict:>10} | {took:7.3f}s \x1b[0m| {reason}\n"


def row(name: str, verdict: str, took: float, reason: str = "") -> str:
    return ROW.format(name=name, verdict=verdict, took=took, reason=reason)


def test_only_a_failure_that_nobody_explained_is_a_surprise() -> None:
    cases = [Case("a", PASSED), Case("b1", FAILED, "x"), Case("c", FAILED, "y"), Case("d", SKIPPED, "z")]
    found = judged("suite", "sqlite", cases, {"b*": "There is no b.", "a": "There was no a."})
    assert [case.name for case in found.surprises] == ["c"]
    assert found.expected == (Case("b1", FAILED, "There is no b."),)
    assert found.healed == ("a",)
    said = table([found])
    assert "| suite | sqlite | 1 | 1 | 1 | 1 |" in said
    assert "There is no b.: b1" in said and "y: c" in said and "z: d" in said


def test_a_test_of_librdkafka_that_did_nothing_has_not_passed() -> None:
    said = row("0018_cgrp_term", "PASSED", 0) + row("0018_other", "PASSED", 1.5)
    assert librdkafka_cases("0018", Ran(0, said)) == [
        Case("0018_cgrp_term", SKIPPED, "said that it passed, and did nothing"),
        Case("0018_other", PASSED),
    ]


def test_a_test_of_librdkafka_that_ends_the_process_has_failed() -> None:
    said = '### Test "0022_consume (do_test:265)" failed at test.c:1562:check() at Tue: ###\n'
    cases = librdkafka_cases("0022", Ran(134, said))
    assert cases == [Case("0022_consume", FAILED, "failed at do_test:265")]
    assert librdkafka_cases("0137", Ran(TIMED_OUT, "…"))[0].verdict == FAILED
    assert librdkafka_cases("0137", Ran(0, ""))[0].verdict == FAILED, "not a word is no success"


def test_a_part_of_librdkafkas_tests_that_was_not_run_has_not_passed() -> None:
    source = (
        "static void do_test_one(int n) {\n        SUB_TEST();\n}\n"
        'static void helper(void) {\n}\nvoid other() {\n        SUB_TEST_QUICK("%d", 1);\n}\n'
    )
    assert parts_in(source) == ["do_test_one", "other"]
    said = "\x1b[32m[ do_test_one:12: n=1: PASS (0.10s) ]\n[ other:7: SKIP: needs more ]\n"
    ran, passed = Ran(0, said + row("0171_share", "PASSED", 2)), [Case("0171_share", PASSED)]
    assert part_case("0171 one", "do_test_one", passed, ran) == Case("0171 one", PASSED)
    assert part_case("0171 other", "other", passed, ran) == Case("0171 other", SKIPPED, "needs more")
    assert part_case("0171 third", "third", passed, ran).verdict == SKIPPED
    failed = [Case("0171_share", FAILED, "failed at x")]
    assert part_case("0171 one", "do_test_one", failed, ran) == Case("0171 one", FAILED, "failed at x")


def test_a_test_of_go_says_why_it_failed() -> None:
    said = "    a_test.go:7: broker is too old\n    a_test.go:9: deleting topic x\n--- FAIL: TestA (0.00s)\n"
    assert kgo_cases("TestA", Ran(1, said)) == Case("TestA", FAILED, "broker is too old")
    assert kgo_cases("TestA", Ran(0, "--- PASS: TestA (0.00s)\n")) == Case("TestA", PASSED)
    assert kgo_cases("TestA", Ran(2, "panic: test timed out after 5m\n")).reason == "it took too long"


def test_a_test_of_python_that_passes_and_cannot_end_has_failed() -> None:
    said = (
        "PASSED t/test_a.py::test_one\nERROR t/test_a.py::test_one - Boom\n"
        "FAILED t/test_a.py::test_two[x y] - AssertionError\nSKIPPED [2] t/test_a.py:7: no snappy\n"
    )
    assert list(pytest_cases(said)) == [
        Case("test_one", FAILED, "Boom"),
        Case("test_two[x y]", FAILED, "AssertionError"),
        Case("test_a.py:7 (2)", SKIPPED, "no snappy"),
    ]


def test_every_known_failure_is_of_a_suite_and_has_a_sentence() -> None:
    known = known_failures(EXPECTED)
    assert set(known) <= set(SUITES)
    assert [why for cases in known.values() for why in cases.values() if not why.endswith(".")] == []


def test_what_java_lost_or_got_out_of_order_or_committed_back_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(java_trouble, "_MESSAGES", 3)
    sent = [{"value": str(n), "partition": 0, "offset": n, "timestamp": 1_000 + n} for n in range(3)]

    def failed(ids: str, commits: tuple[int, ...]) -> list[str]:
        whose = {"by": "c0", "topic": "troubled", "group": "troubled-group", "partition": 0}
        times = iter(range(2_000_000_000, 3_000_000_000))
        noted = [Event(next(times), "handled", id=id, key="0", offset=int(id), **whose) for id in ids]
        noted += [Event(next(times), "committed", offset=offset, **whose) for offset in commits]
        return [case.name for case in java_trouble.judged_trouble(sent, noted) if case.verdict == FAILED]

    assert failed("012", (1, 3)) == []
    assert failed("01", (2,)) == ["nothing confirmed is lost"]
    assert failed("021", (3,)) == ["partitions stay in order"]
    assert failed("012", (3, 1)) == ["no committed offset goes back"]


def test_a_case_of_the_share_consumers_is_what_it_said_and_a_program_that_died_has_failed() -> None:
    said = "noise\nPASS implicit\nFAIL renew java.lang.AssertionError: it came again\n"
    found = java_cases(Ran(0, said))
    assert found == [
        Case("implicit", PASSED),
        Case("renew", FAILED, "java.lang.AssertionError: it came again"),
    ]
    assert java_cases(Ran(1, "PASS implicit\nboom"))[-1].verdict == FAILED
    assert java_cases(Ran(0, ""))[-1].verdict == FAILED
