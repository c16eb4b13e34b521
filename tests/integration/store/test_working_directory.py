"""A queue stays the file it was, wherever its process goes to: daemons change their directory."""

from __future__ import annotations

from pathlib import Path

import pytest

import postroom


async def test_a_process_that_changes_its_directory_keeps_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    async with postroom.connect("sqlite:///queue.db") as mq:
        monkeypatch.chdir(elsewhere)
        await mq.create_topic("orders")
        await mq.send("orders", b"paid", key=b"o-1")
        async with mq.consumer("orders", "billing") as consumer:
            (message,) = await consumer.poll(wait="10s")
            await message.ack()
    assert not list(elsewhere.iterdir())
    async with postroom.connect(f"sqlite:///{home}/queue.db") as mq:
        assert [message.value async for message in mq.read("orders")] == [b"paid"]
