"""What came of a suite, and whether that is a surprise.

A case that fails for a known reason is in `expected.toml`, with a sentence. Whatever else fails is a
surprise, and only surprises fail the run. A test that says it passed and did nothing is not counted as
passed: suites skip themselves more often than they say.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = ["FAILED", "PASSED", "SKIPPED", "Case", "Judged", "judged", "known_failures", "table"]

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    verdict: str
    reason: str = ""  # why it failed or was skipped, in the suite's own words


@dataclass(frozen=True, slots=True)
class Judged:
    """A suite's cases on one store, compared with what is expected."""

    suite: str
    store: str
    passed: tuple[str, ...]
    skipped: tuple[Case, ...]
    expected: tuple[Case, ...]  # failed, with the sentence of the list
    surprises: tuple[Case, ...]  # failed, and nobody knows why
    healed: tuple[str, ...]  # on the list, and pass now


def known_failures(path: Path) -> dict[str, dict[str, str]]:
    """By suite and pattern of a case's name: why it fails."""
    return {suite: dict(cases) for suite, cases in tomllib.loads(path.read_text()).items()}


def judged(suite: str, store: str, cases: Iterable[Case], known: Mapping[str, str]) -> Judged:
    found = list(cases)
    listed = {case.name: _sentence(case.name, known) for case in found}
    failed = [case for case in found if case.verdict == FAILED]
    passed = tuple(case.name for case in found if case.verdict == PASSED)
    return Judged(
        suite,
        store,
        passed,
        tuple(case for case in found if case.verdict == SKIPPED),
        tuple(Case(case.name, FAILED, str(listed[case.name])) for case in failed if listed[case.name]),
        tuple(case for case in failed if not listed[case.name]),
        tuple(name for name in passed if listed[name]),
    )


def _sentence(name: str, known: Mapping[str, str]) -> str | None:
    return next((why for pattern, why in known.items() if fnmatchcase(name, pattern)), None)


def table(results: Sequence[Judged]) -> str:
    """One line for each suite and store, and below it the reasons."""
    lines = [
        "| suite | store | passed | failed, known | failed, surprise | skipped |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        counts = (one.passed, one.expected, one.surprises, one.skipped)
        lines.append(f"| {one.suite} | {one.store} | {' | '.join(str(len(few)) for few in counts)} |")
    for one in results:
        where = f"{one.suite} on {one.store}"
        lines += _reasons(f"{where}: SURPRISES", one.surprises)
        lines += _reasons(f"{where}: known failures", one.expected)
        lines += _reasons(f"{where}: skipped", one.skipped)
        if one.healed:
            lines += ["", f"{where}: pass now, take them from the list: {', '.join(one.healed)}"]
    return "\n".join(lines)


def _reasons(title: str, cases: Sequence[Case]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for case in cases:
        by_reason.setdefault(case.reason or "no reason given", []).append(case.name)
    return ["", title, *(f"  {why}: {', '.join(names)}" for why, names in by_reason.items())] if cases else []
