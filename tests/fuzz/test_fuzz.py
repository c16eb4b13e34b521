"""A short run of every target; `make fuzz` runs them for longer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.docs.pages import ROOT

from .targets import SEEDS, TARGETS

every_target = pytest.mark.parametrize("name", TARGETS)


@every_target
def test_sound_inputs_pass(name: str) -> None:
    for seed in SEEDS[name]:
        TARGETS[name](seed)


@every_target
@given(data=st.data())
@settings(max_examples=60)
def test_no_bytes_do_harm(name: str, data: st.DataObject) -> None:
    """Any bytes, and sound ones with a few that are changed."""
    seed = bytearray(data.draw(st.sampled_from(SEEDS[name])))
    places = st.tuples(st.integers(0, len(seed) - 1), st.integers(0, 255))
    for place, value in data.draw(st.lists(places, max_size=4)):
        seed[place] = value
    TARGETS[name](bytes(seed))
    TARGETS[name](data.draw(st.binary(max_size=300)))


@pytest.mark.slow("fuzzes for seconds")
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed: make fuzz")
def test_two_seconds_of_fuzzing_find_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "tests.fuzz", "everything", "-max_total_time=2", "-max_len=8192",
        "-rss_limit_mb=1024", f"-artifact_prefix={tmp_path}/",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done " in done.stderr
