"""What failed in a whole run, once more and alone: `python -m tests.rerun`.

A whole run keeps two cores busier than most machines are, and a test that times something may fail for that
alone. Such a test is a fault to mend, and is named; it need not cost the thirteen thousand others. Decides
that it is forgiven if it passes alone, where at most a few failed. Must never forgive what looks for lost,
doubled or misplaced messages: those fail rarely because what they look for is rare.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
NEVER = ("chaos", "failover", "fuzz", "model", "simulation", "storm", "upgrade", "integration/races")


def refusal(failed: list[str]) -> str | None:
    """Why these are not run again; None if they are."""
    if not failed:
        return "no test is known to have failed: the run ended for another reason"
    if len(failed) > MOST:
        return f"{len(failed)} failed, and at most {MOST} are run again"
    if strict := [one for one in failed if one.startswith(tuple(f"tests/{room}/" for room in NEVER))]:
        return f"these are never run again: {', '.join(strict)}"
    return None


def main(root: Path = Path()) -> int:
    record = root / ".pytest_cache/v/cache/lastfailed"
    failed = sorted(json.loads(record.read_text())) if record.exists() else []
    if (why := refusal(failed)) is not None:
        print(f"not run again: {why}", file=sys.stderr)
        return 1
    print("run again, alone:", *failed, sep="\n  ", flush=True)
    ran = subprocess.run([sys.executable, "-m", "pytest", "--matrix=all", *failed], cwd=root, check=False)
    if ran.returncode == 0:
        print("unsteady, to be mended: failed beside others, passed alone:", *failed, sep="\n  ")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
