"""Tests marked `hasty` wait for nothing: their loop's time runs ahead (`tests.hasty`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.hasty import HastyLoop

LOOPS: dict[bool, Mapping[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    False: {"patient": asyncio.new_event_loop},
    True: {"hasty": HastyLoop},
}


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return LOOPS[item.get_closest_marker("hasty") is not None]
