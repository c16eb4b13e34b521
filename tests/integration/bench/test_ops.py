"""`bench ops`: what one operation costs, beside the floor; only that it measures what it says."""

from __future__ import annotations

import pytest

from bench import ops


@pytest.mark.slow("works for seconds")
async def test_operations_in_memory_are_measured_beside_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_IDLE_S", 0.1)
    found = [one async for one in ops.in_memory(0.05)]
    assert [(one.what, one.contender) for one in found] == [
        ("publish", "floor"),
        ("publish", "postroom"),
        ("a message of a list", "postroom"),
        ("a message of a list with keys", "postroom"),
        ("poll and ack of one", "postroom"),
        ("an idle consumer, a second", "postroom"),
    ]
    assert all(one.cpu_us > 0 for one in found)
    shown = ops.table(found)
    ratios = [str(cell) for cell in shown.columns[-2].cells]
    assert [bool(ratio) for ratio in ratios] == [False, True, False, True, True, False]


def test_what_stands_beside_an_operation() -> None:
    rows = ops.Operation("sqlite", "publish", "one row per message", 20.0, 100.0)
    ours = ops.Operation("sqlite", "publish", "postroom", 40.0, 200.0)
    shown = ops.table([ours, rows])
    assert [next(iter(column.cells)) for column in shown.columns[-2:]] == ["2.0", "2.00"]
