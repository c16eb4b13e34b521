"""What is imported into a process that Spark keeps is not searched for garbage after each task."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("pyspark")

_TASKS = """
import gc
own = gc.get_freeze_count()  # Python 3.12 sets some objects apart by itself
import postroom.spark.source
from postroom.spark.reading import set_apart
set_apart()
before = gc.get_freeze_count()
set_apart()
assert gc.get_freeze_count() == before, "nothing was imported since"
import wave
set_apart()
print(before - own, gc.get_freeze_count() - before, len(gc.get_objects()))
"""


def _counts(**environment: str) -> list[int]:
    found = {name: text for name, text in os.environ.items() if name != "SPARK_REUSE_WORKER"}
    run = subprocess.run(
        [sys.executable, "-c", _TASKS], env=found | environment, check=True, capture_output=True, text=True
    )
    return [int(word) for word in run.stdout.split()]


def test_in_a_process_of_spark_what_is_imported_is_set_apart() -> None:
    apart, later, searched = _counts(SPARK_REUSE_WORKER="1")
    assert apart > 10_000 and later > 0
    assert searched < apart / 10, "what is left to be searched is little"


def test_any_other_process_is_left_alone() -> None:
    assert _counts()[:2] == [0, 0]
