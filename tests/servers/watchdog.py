"""Nothing is left behind, however the tests end: a small process outlives them and cleans up.

It waits for the end of a pipe that the tests hold open. The kernel closes that pipe when they end, be it by
SIGKILL; no handler, `atexit` or `finally` of ours is needed. Then it ends the server whose id is in the
folder's `pid` file, those of the folders in it likewise, and removes the folder. The tidy way out is the same
one: `dismiss()` closes the pipe.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["Watchdog", "note"]

# A server that does not end in ten seconds is killed. One that nobody has reaped yet (Z) has ended.
_SCRIPT = """
PATH=/usr/bin:/bin
cat >/dev/null
for file in "$1/pid" "$1"/*/pid; do
    read -r pid signal <"$file" || continue
    kill -s "$signal" "$pid"
    tries=100
    while [ $tries -gt 0 ] && kill -0 "$pid" && ! grep -q "^State:.Z" "/proc/$pid/status"; do
        tries=$((tries - 1))
        sleep 0.1
    done
    kill -s KILL "$pid"
done
rm -rf "$1"
"""


class Watchdog:
    def __init__(self, folder: Path, signal_name: str) -> None:
        """`signal_name` ends the server at once and lets it free what outlives a process."""
        self._folder, self._signal = folder, signal_name
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "watchdog", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal goes to the tests, not to us
        )

    def guard(self, pid: int | None) -> None:
        """The server that runs now, or none."""
        note(self._folder, pid, self._signal)

    def dismiss(self) -> None:
        """Remove the folder, and end a server that is still there."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def note(folder: Path, pid: int | None, signal_name: str) -> None:
    """Tells the watchdog of `folder`, or of the one above it, which server runs there."""
    path = folder / "pid"
    if pid is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(f"{pid} {signal_name}\n")
