"""Producers that met a seal wait for whoever makes the change: how soon they are told that it is made."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from postroom.broker.topology import route_changes as helping
from postroom.broker.topology.route_changes import RouteChanges, RouteHelp
from postroom.errors import PartitionSealed
from postroom.model.topology.route import Range, Route, split


class _Others:
    """Others work on the change, and it is made at the `looks`-th look."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def help(self, topic: str) -> bool:
        self.left -= 1
        return self.left <= 0

    def route(self, topic: str) -> Route:
        before = Route(topic, 1, (Range(0, 1023, 0, 1),))
        made = split(before, 0).numbered(7, 1, [(1, 2), (2, 3)])
        return before if self.left > 0 else before.after(made)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(helping.asyncio, "sleep", pause)  # type: ignore[attr-defined]
    return found


async def _helped(looks: int) -> list[int]:
    """How many looks were left each time the route was said to have changed."""
    others, told = _Others(looks), list[int]()
    help = RouteHelp(cast(RouteChanges, cast(Any, others)), lambda: told.append(others.left))
    refused = [PartitionSealed("sealed") for _ in range(2)]
    async with asyncio.timeout(20):
        for error in refused:
            await help.met_seal("orders", 1, error)
            assert error.details["successors"] == []
        await asyncio.gather(*help._under_way.values())
        await help.met_seal("orders", 1, error)
    assert error.details["successors"] == [1, 2] and not help._under_way
    return told


async def test_told_once_the_change_is_made_and_not_before(pauses: list[float]) -> None:
    assert await _helped(4) == [0]


async def test_looks_often_at_first_since_a_change_takes_a_moment(pauses: list[float]) -> None:
    await _helped(12)
    assert len(pauses) == 11 and sum(pauses[:4]) < 0.15  # a change takes some 10 to 50 ms
    assert all(0.1 <= pause <= 0.15 for pause in pauses[5:])  # nor is it asked for all the time if it lasts
