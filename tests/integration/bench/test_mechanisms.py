"""What mechanisms buy is measured, and the sides are not mixed up."""

from __future__ import annotations

import pytest

from bench import mechanisms


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "_ROUNDS", 1)


async def test_each_is_measured_with_it_and_without() -> None:
    found = await mechanisms.measure(["at_once", "lanes", "beats", "http", "skew"], 0.05)
    sides = {f"{one.what} ({one.unit})": (one.those_with, one.without) for one in found}
    assert sides["beats: connections of ten clients (sockets)"] == (10, 20)
    assert sides["skew: a message is late, the shard a minute behind (ms)"] == (0, 60_000)
    assert len(sides) == 8 and all(one.those_with >= 0 for one in found)
    assert [one.what.partition(":")[0] for one in found if not one.without] == ["skew"]
