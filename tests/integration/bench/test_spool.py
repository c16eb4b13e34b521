"""The benchmark of the spool runs; its figures are for people: `python -m bench spool`."""

from __future__ import annotations

import pytest

from bench import spool

pytestmark = pytest.mark.slow("measures speed")


async def test_landing() -> None:
    found = await spool.landing(8, 0.05, turns=1)
    assert found.spooled_per_s > 1 and found.plain_per_s > 1


async def test_forwarding() -> None:
    found = await spool.forwarding(300, partitions=2)
    assert (found.messages, found.partitions) == (300, 2)
    assert found.forwarded_per_s > 1 and found.beside_per_s > 1
