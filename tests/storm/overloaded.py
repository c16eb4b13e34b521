"""Some of the suite on a machine that has no time for it: `python -m tests.storm.overloaded`.

Six processes burn what two processors have while the tests of clients, brokers and processes run, at one
place each: whoever waits for a moment and not for an event fails here. The second half of `make test-all`.
"""

from __future__ import annotations

import subprocess
import sys

from .burners import overloaded

__all__ = ["ROOMS"]

ROOMS = (
    "tests/contract/sdk/groups",
    "tests/integration/broker",
    "tests/integration/processes",
    "tests/integration/wire",
)
"""What hands messages from one to another, with leases, timeouts and processes that end."""


def main(arguments: list[str]) -> int:
    line = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow and not spark"]
    with overloaded():
        return subprocess.run([*line, *(arguments or ROOMS)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
