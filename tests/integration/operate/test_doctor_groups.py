"""What `postroom doctor` says of groups: those that hold messages for nobody, and those nobody uses (R44)."""

from __future__ import annotations

import postroom
from postroom.cli.checks.queue import check_groups
from postroom.clock import ManualClock

DAY_S = 24 * 3600


async def _found(mq: postroom.Connection) -> dict[str, str]:
    return {finding.check: finding.message for finding in await check_groups(mq)}


async def test_a_group_that_was_not_used_for_a_day() -> None:
    clock = ManualClock()
    async with postroom.connect("memory://", clock=clock) as mq:
        await mq.create_topic("orders")
        await mq.create_group("orders", "billing")
        assert (await _found(mq)).keys() == {"members"}
        clock.advance(2 * DAY_S)
        found = await _found(mq)
        assert found["unused group"] == "group billing of topic orders was not used for 2d"
        async with mq.consumer("orders", group="billing"):
            found = await _found(mq)
        assert found == {"members": "1 live in 1 groups"}


async def test_a_group_that_holds_messages() -> None:
    async with postroom.connect("memory://") as mq:
        await mq.create_topic("orders")
        await mq.create_topic("clicks", keep="limits")
        for topic in ("orders", "clicks"):
            await mq.create_group(topic, "billing")
            await mq.send(topic, b"hello")
        messages = [f.message for f in await check_groups(mq) if f.check == "idle group"]
        assert [text.endswith("and keeps them from being dropped") for text in messages] == [False, True]


async def test_of_a_broadcast_group_the_members_count() -> None:
    """R11: the group itself has no progress."""
    async with postroom.connect("memory://") as mq:
        await mq.create_topic("prices")
        async with mq.consumer("prices", group="cache", mode="broadcast", member="ann"):
            pass
        await mq.send("prices", b"new")
        found = await check_groups(mq)
        assert [f.message.split()[1] for f in found if f.check == "idle group"] == ["cache@ann"]
        assert "postroom group delete prices cache@ann" in found[-1].advice
