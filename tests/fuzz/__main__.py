"""`python -m tests.fuzz frames -max_total_time=60`: one target under atheris, with libFuzzer's options."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["postroom"]):
    from tests.fuzz.targets import SEEDS, TARGETS, everything


def main() -> None:
    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS[name]):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], corpus, *options], {**TARGETS, "everything": everything}[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
