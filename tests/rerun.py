"""What failed in a whole run, once more and alone: `python -m tests.rerun`.

A whole run keeps two cores busier than most machines are, and a test that times something may fail for that
alone. Such a test is a fault to mend, and is named; it need not cost the thirteen thousand others. Decides
that it is forgiven if it passes alone, where at most a few failed. Must never forgive what looks for lost,
doubled or misplaced messages and found some: that fails rarely because what it looks for is rare. Where such
a test only lost its patience before it looked, it may look again.

As a plugin of pytest it keeps why each test failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

MOST = 5
STRICT = ("chaos", "failover", "fuzz", "model", "simulation", "storm", "upgrade", "integration/races")
IMPATIENT = "TimeoutError: "

_REASONS = pytest.StashKey[dict[str, str]]()


def refusal(failed: Mapping[str, str]) -> str | None:
    """Why these are not run again, by test and reason; None if they are."""
    if not failed:
        return "no test is known to have failed: the run ended for another reason"
    if len(failed) > MOST:
        return f"{len(failed)} failed, and at most {MOST} are run again"
    rooms = tuple(f"tests/{room}/" for room in STRICT)
    strict = [one for one, why in failed.items() if one.startswith(rooms) and not why.startswith(IMPATIENT)]
    return f"these are never run again: {', '.join(strict)}" if strict else None


def main(root: Path = Path()) -> int:
    cache = root / ".pytest_cache/v"
    reasons = _read(cache / "postroom/reasons")
    failed = {one: reasons.get(one, "") for one in sorted(_read(cache / "cache/lastfailed"))}
    told = [f"{one}: {why.splitlines()[0] if why else 'for no known reason'}" for one, why in failed.items()]
    print("failed:", *told, sep="\n  ", flush=True)
    if (why := refusal(failed)) is not None:
        print(f"not run again: {why}", file=sys.stderr)
        return 1
    ran = subprocess.run([sys.executable, "-m", "pytest", "--matrix=all", *failed], cwd=root, check=False)
    if ran.returncode == 0:
        print("unsteady, to be mended: failed beside others, passed alone:", *failed, sep="\n  ")
    return ran.returncode


def _read(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


# ---- as a plugin ----


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REASONS] = {}
    config.pluginmanager.register(_Keeper(config.stash[_REASONS]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    cache = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        known = cache.get("postroom/reasons", {})  # of a run before this one, whose failures are known still
        cache.set("postroom/reasons", {**known, **session.config.stash[_REASONS]})


class _Keeper:
    def __init__(self, reasons: dict[str, str]) -> None:
        self._reasons = reasons

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._reasons[report.nodeid] = str(report.longrepr if crash is None else crash.message)


if __name__ == "__main__":
    sys.exit(main())
