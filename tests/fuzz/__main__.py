"""`python -m tests.fuzz frames -max_total_time=60`: one target under atheris, with libFuzzer's options.

Says now and then how many bytes were fed, and how much processor time the dearest input took.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["postroom"]):
    from tests.fuzz.served import prepare
    from tests.fuzz.targets import SEEDS, TARGETS, everything

_MOST_S = 1.0  # of the processor, for one input; under atheris everything takes several times as long


class Counted:
    """A target, with the bytes it was fed and the time that the dearest input took."""

    def __init__(self, target: Callable[[bytes], None]) -> None:
        self._target = target
        self._bytes = self._inputs = 0
        self._dearest_s = 0.0
        self._say_at = 1_000_000

    def __call__(self, data: bytes) -> None:
        prepare()
        begun = time.thread_time()
        self._target(data)
        taken_s = time.thread_time() - begun
        self._dearest_s = max(self._dearest_s, taken_s)
        assert taken_s < _MOST_S, f"{len(data)} bytes took {taken_s:.2f} s of the processor"
        self._bytes += len(data)
        self._inputs += 1
        if self._bytes >= self._say_at:
            self._say_at = self._bytes * 3 // 2
            print(
                f"{self._bytes:,} bytes in {self._inputs:,} inputs; the dearest took "
                f"{self._dearest_s * 1000:.0f} ms",
                file=sys.stderr,
                flush=True,
            )


def main() -> None:
    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS[name]):
            (Path(corpus) / str(number)).write_bytes(seed)
        target = Counted({**TARGETS, "everything": everything}[name])
        atheris.Setup([sys.argv[0], corpus, *options], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
