"""The benchmark of the outbox runs; its figures are for people: `python -m bench.outbox`."""

from __future__ import annotations

import pytest

from bench import outbox
from bench.grounds import ground

pytestmark = pytest.mark.slow("measures speed")


async def test_written() -> None:
    with ground("sqlite") as where:
        found = await outbox.written(where, 0.05)
    assert len(found) == 5 and all(one.per_s > 1 for one in found)


@pytest.mark.parametrize("same", [False, True])
async def test_relayed(same: bool) -> None:
    with ground("sqlite") as where:
        assert (await outbox.relayed(where, 300, same=same)).messages == 300
        assert (await outbox.soon(where, 5, same=same)).p99_ms > 0
