"""The Python processes that Spark keeps for its tasks.

After every task Spark looks for garbage in all that its process has imported, 40 ms for nothing, and a
micro-batch from topic to topic is four such runs. What is imported stays: it is set apart, and not looked at
again. Must never do so in a process that is not Spark's.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["set_apart", "uncollected"]

_REUSED = "SPARK_REUSE_WORKER"  # Spark sets it for processes that serve one task after another

_imported = 0  # modules, when they were set apart


def set_apart() -> None:
    """Call it at the start of a task: it does something only if modules were imported since the last one."""
    global _imported
    if _REUSED in os.environ and len(sys.modules) != _imported:
        gc.collect()  # garbage is not kept
        gc.freeze()
        _imported = len(sys.modules)


@contextmanager
def uncollected() -> Iterator[None]:
    """Records are many and refer to nothing: to look for cycles among them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
