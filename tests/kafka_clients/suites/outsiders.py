"""The clients' own tests: kafka-python's integration tests, franz-go's kgo, librdkafka's C tests.

Each case runs with a time limit. Go's and C's tests run in a process each, so that one that hangs or
ends the process takes no other with it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from .. import fetch
from ..outcome import FAILED, PASSED, SKIPPED, Case
from ..running import TIMED_OUT, Listener, Ran, run

__all__ = [
    "kafka_python",
    "kgo",
    "kgo_cases",
    "librdkafka",
    "librdkafka_cases",
    "librdkafka_share",
    "part_case",
    "parts_in",
    "pytest_cases",
]

# ---- kafka-python ----

_ROOT = Path(__file__).resolve().parents[3]
_PLUGIN = "tests.kafka_clients.suites.legal_names"
_PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR) \S+::(\S+?(?:\[.*?\])?)(?: - (.*))?$")
_PYTEST_SKIP = re.compile(r"^SKIPPED \[(\d+)\] (\S+?): (.*)$")


def kafka_python(listener: Listener) -> Iterator[Case]:
    place = fetch.kafka_python()
    told = {"KAFKA_URI": f"kafka://{listener.address}", "KAFKA_VERSION": "4.3.0"}
    # Lines of the summary are cut to the width of the terminal.
    told |= {"COLUMNS": "300", "PYTHONPATH": str(_ROOT)}
    options = ["-q", "-p", "no:cacheprovider", "-rA", "--tb", "no", "--timeout", "60", "-W", "ignore"]
    chosen = ["-k", "not sasl and not ssl", "--show-capture", "no", "-p", _PLUGIN]
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir", ".", *options, *chosen]
    ran = run([*command, "test/integration"], 1200, cwd=place, env=told)
    cases = list(pytest_cases(ran.said))
    yield from cases
    if ran.code == TIMED_OUT or not cases:
        yield Case("the whole run", FAILED, f"ended with {ran.code}: {ran.last_line}")


def pytest_cases(said: str) -> Iterator[Case]:
    """The cases of pytest's short summary; a test that passed and failed to end is a failure."""
    found: dict[str, Case] = {}
    for line in said.splitlines():
        if match := _PYTEST_LINE.match(line):
            word, name, reason = match.groups()
            if word != "PASSED" or name not in found:
                found[name] = Case(name, PASSED if word == "PASSED" else FAILED, reason or "")
        elif match := _PYTEST_SKIP.match(line):
            number, where, reason = match.groups()
            found[where + reason] = Case(f"{where.rpartition('/')[2]} ({number})", SKIPPED, reason)
    yield from found.values()


# ---- franz-go ----

# Those that talk to a broker; the others test the client by itself.
_KGO = """
Ping ProcessHooks Issue1034 SCRAMAuth ShareGroup Issue325 ConsumeTopicRetrieval
ConsumeTopicRetrieval_Many ConsumeRegex ConsumeRegexShareSkipsInternal 848RegexBrokerResolves Issue337
DirectPartitionPurge Issue434 AddRemovePartitions PauseIssue489 PauseIssueOct2023 Issue523 Issue648
Issue810 Issue865 IssueFetchLargerThanBrokerMaxReadBytes Pooling GroupSimple HookPollStart
ConsumeMaxDecompressBatchBytes GroupETL Client_Produce Issue769 Issue831 Client_ProduceLargeMessages
ShareGroupETL ShareGroupAckOnClose ShareGroupOffsetsAdmin TxnEtl
""".split()  # noqa: SIM905
_KGO_LIMIT_S = 300
_KGO_END = re.compile(r"^\s*--- (PASS|FAIL|SKIP): (\S+) \((.*)\)$")


def kgo(listener: Listener) -> Iterator[Case]:
    place = fetch.franz_go()
    told = {"KGO_SEEDS": listener.address, "KGO_TEST_RF": "1", "KGO_TEST_RECORDS": "10000"}
    told |= {"KGO_LOG_LEVEL": "none"}
    for name in filter(listener.wants, _KGO):
        wanted = [f"-test.run=^Test{name}$", "-test.v", f"-test.timeout={_KGO_LIMIT_S}s"]
        ran = run([place / "kgo.test", *wanted], _KGO_LIMIT_S + 30, cwd=place, env=told)
        yield kgo_cases(f"Test{name}", ran)


def kgo_cases(name: str, ran: Ran) -> Case:
    """What came of one test, with the last thing that it said before it ended."""
    said = ""
    for line in ran.said.splitlines():
        if (match := _KGO_END.match(line)) and match[2] == name:
            verdict = {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}[match[1]]
            return Case(name, verdict, "" if verdict == PASSED else said)
        if re.match(r"^\s+\w+\.go:\d+: ", line) and "DELETING" not in line and "deleting" not in line:
            said = re.sub(r"^\s+\w+\.go:\d+: |\"?\b[0-9a-f]{64}\b\"?", "", line).strip()[:160]
    why = "it took too long" if "panic: test timed out" in ran.said else ran.last_line
    return Case(name, FAILED, why)


# ---- librdkafka ----

_GROUPS = """
0001 0002 0003 0004 0005 0006 0007 0008 0012 0013 0016 0017 0018 0019 0020 0021 0022 0025 0026 0033 0035
0036 0038 0039 0040 0041 0042 0043 0045 0046 0050 0051 0055 0056 0057 0058 0060 0061 0062 0063 0065 0067
0070 0073 0074 0076 0078 0083 0084 0085 0086 0089 0090 0095 0100 0102 0106 0113 0114 0116 0120 0121 0122
0123 0125 0127 0131 0132 0136 0137 0149 0150 0151 0152
""".split()  # noqa: SIM905
_SHARE_GROUPS = "0170 0171 0172 0173 0174 0175 0176 0177 0178 0179 0180 0181 0184 0185".split()  # noqa: SIM905
# Run part by part, each a case of its own: one takes longer than the limit, and in the others a part fails
# that is known to, behind which the rest would not run.
_IN_PARTS = {"0113", "0171", "0172", "0174", "0179"}
_GROUP_LIMIT_S = 900
_PATIENCE = 3  # times its own, on a machine that others use as well
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ROW = re.compile(r"^\| (\d{4}_\w+)\s*\|\s*(PASSED|FAILED|SKIPPED)\s*\|\s*([\d.]+)s\s*\|(.*)$")
_FAILURE = re.compile(r'^### Test "(\d{4}_\w+)(?: \((.*?)\))?" failed at ([^ ]+) ')
_SHORTEST_S = 0.001
_FUNCTION = re.compile(r"^(?:static )?void (\w+)\(")
_PART_BEGINS = re.compile(r"\bSUB_TEST(?:_QUICK)?\(")


def librdkafka(listener: Listener) -> Iterator[Case]:
    """Not in quick mode (-Q): it leaves out most of what is in a test, which then passes."""
    yield from _groups(listener, _GROUPS)


def librdkafka_share(listener: Listener) -> Iterator[Case]:
    """The share consumer's, which want to be told a version that has share groups.

    Without those (-L) that run against a broker of librdkafka's own.
    """
    yield from _groups(listener, _SHARE_GROUPS, "-L", TEST_KAFKA_VERSION="4.3.0")


def _groups(listener: Listener, groups: Iterable[str], *options: str, **more: str) -> Iterator[Case]:
    place, conf = fetch.librdkafka(), listener.folder / "test.conf"
    conf.write_text(f"bootstrap.servers={listener.address}\ntest.timeout.multiplier={_PATIENCE}\n")
    told = {"RDKAFKA_TEST_CONF": str(conf), "LD_LIBRARY_PATH": "../src:../src-cpp", **more}
    command = [place / "test-runner", "-p1", "-E", *options]
    for group in groups:
        if group not in _IN_PARTS and listener.wants(group):
            ran = run(command, _GROUP_LIMIT_S, cwd=place, env={**told, "TESTS": group})
            yield from librdkafka_cases(group, ran)
        for part in _parts(place, group) if group in _IN_PARTS else ():
            if listener.wants(name := f"{group} {part.removeprefix('do_test_')}"):
                only = {"TESTS": group, "SUBTESTS": f"{part}:"}
                ran = run(command, _GROUP_LIMIT_S, cwd=place, env={**told, **only})
                yield part_case(name, part, librdkafka_cases(group, ran), ran)


def _parts(place: Path, group: str) -> list[str]:
    """The parts of a group, as its source has them."""
    [source] = place.glob(f"{group}-*.c*")
    return parts_in(source.read_text())


def parts_in(source: str) -> list[str]:
    """The functions that are parts of a test.

    >>> parts_in("static void one(int a) {\\n SUB_TEST();\\n}\\nstatic void other() {\\n}")
    ['one']
    """
    found, function = list[str](), ""
    for line in source.splitlines():
        if match := _FUNCTION.match(line):
            function = match[1]
        elif function and _PART_BEGINS.search(line):
            found.append(function)
            function = ""
    return found


def part_case(name: str, part: str, cases: list[Case], ran: Ran) -> Case:
    """What came of one part. A group of which no part was run says that it passed: that is none."""
    failed = next((case for case in cases if case.verdict == FAILED), None)
    if failed is not None:
        return replace(failed, name=name)
    said = _COLOURS.sub("", ran.said)
    if re.search(rf"\[ {part}:\d+\b.*: PASS \(", said):
        return Case(name, PASSED, "")
    skipped = re.search(rf"\[ {part}:\d+\b.*: SKIP: (.*) \]", said)
    return Case(name, SKIPPED, skipped[1] if skipped else "not one of those that need a broker")


def librdkafka_cases(group: str, ran: Ran) -> list[Case]:
    """What came of a group's tests. One that took no time has done nothing, whatever it says."""
    lines = [_COLOURS.sub("", line) for line in ran.said.splitlines()]
    failures = {match[1]: match[2] or match[3] for line in lines if (match := _FAILURE.match(line))}
    found = {name: Case(name, FAILED, f"failed at {where}") for name, where in failures.items()}
    for line in lines:
        if (match := _ROW.match(line)) and match[1].startswith(group) and match[1] not in found:
            name, word, took, reason = match[1], match[2], float(match[3]), match[4].strip()
            verdict = {"PASSED": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED}[word]
            if verdict == PASSED and took < _SHORTEST_S:
                verdict, reason = SKIPPED, "said that it passed, and did nothing"
            found[name] = Case(name, verdict, reason)
    if not found or (ran.code and all(case.verdict != FAILED for case in found.values())):
        took = f"took more than {_GROUP_LIMIT_S} s" if ran.code == TIMED_OUT else f"ended with {ran.code}"
        found[group] = Case(group, FAILED, took)
    return list(found.values())
