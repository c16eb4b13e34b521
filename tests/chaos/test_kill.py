"""kill -9 of producing and consuming processes at random moments, on every store (R1, R14, R22, R23, R34).

Every message that was confirmed is handled by every group, in ordered groups in the order of its key; no
message is stored twice, and none that was settled comes again (I3, I5, I6, I7); no innocent reaches the dead
letters, and what is sent there arrives there once (I12, I14).
"""

from __future__ import annotations

from pathlib import Path

import pytest

import postroom

from .crew import Crew
from .stage import LONG, SECONDS, finish, hire, judge, kill_at_random, make_topic


@pytest.mark.timeout(SECONDS * 3 + 120)
async def test_every_confirmed_message_is_handled_by_every_group(store_url: str, tmp_path: Path) -> None:
    with Crew(store_url, tmp_path) as crew:
        async with postroom.connect(store_url) as mq:
            await make_topic(mq, "orders")
            await hire(crew, "orders", members=3 if LONG else 2)
            await kill_at_random(crew)
            await finish(mq, crew, "orders")
            await judge(mq, crew, "orders")
