"""A broker that is given a new shard while it runs: SIGHUP, and its settings are read again (R6)."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import postroom
from tests.integration.operate.test_serve import Served, logged
from tests.ready import opened
from tests.servers import PostgresServer

LIMIT = 40


@pytest.fixture
def served(tmp_path: Path, postgres_url: str) -> Iterator[Served]:
    opened(postgres_url, make_tables=True).close()
    made = Served(tmp_path, postgres_url)
    yield made
    made.kill()


class Settings:
    """The file that the broker is started with."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "postroom.toml"
        self.write()

    def write(self, **shards: str) -> None:
        lines = [f'{name} = "{url}"' for name, url in shards.items()]
        self.path.write_text("dev = true\n\n[shards]\n" + "\n".join(lines) + "\n")


def told(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a SIGHUP makes it log."""
    process.send_signal(signal.SIGHUP)
    assert process.stderr is not None
    for line in process.stderr:
        found: dict[str, Any] = json.loads(line)
        if found["logger"] == "postroom.serve" and not found["message"].startswith("dev mode:"):
            return found
    raise AssertionError("it has ended")


async def test_a_new_shard_is_used_without_a_restart(
    served: Served, postgres_url: str, tmp_path: Path
) -> None:
    """The first one that the queue gets beside its own database, and then a second one."""
    settings = Settings(tmp_path)
    process, line = await asyncio.to_thread(served.start, "--config", str(settings.path))
    shards = {"b": f"sqlite:///{tmp_path}/b.db", "c": f"sqlite:///{tmp_path}/c.db"}
    async with asyncio.timeout(LIMIT), postroom.connect(line["url"]) as client:
        await client.create_topic("orders", partitions=2)
        async with postroom.connect(postgres_url, shards={"b": shards["b"]}) as other:
            with pytest.raises(postroom.ShardUnknown, match=r"broker 127\.0\.0\.1:\d+ could not reach"):
                await other.move("orders", 0, shard="b")
            with pytest.raises(postroom.ShardUnknown, match="Ask the operator of the brokers"):
                await client.move("orders", 0, shard="b")
            settings.write(b=shards["b"])
            assert (await asyncio.to_thread(told, process))["message"] == "shard added"
            await other.move("orders", 0, shard="b")
        settings.write(**shards)
        assert (await asyncio.to_thread(told, process))["shard"] == "c"
        await client.move("orders", 1, shard="c")
        route = await client.route("orders")
        assert {piece.shard for piece in route.ranges} == {"b", "c"}
        sent = [await client.send("orders", b"%d" % n, key=str(n)) for n in range(20)]
        assert {receipt.partition for receipt in sent} == {piece.partition for piece in route.ranges}
        async with client.consumer("orders", "billing", mode="ordered") as consumer:
            found = [await anext(consumer) for _ in range(20)]
        assert {m.value for m in found} == {b"%d" % n for n in range(20)}


def test_what_cannot_be_done_is_logged_and_changes_nothing(served: Served, tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    settings.write(b=f"sqlite:///{tmp_path}/b.db")
    process, _ = served.start("--config", str(settings.path))
    assert told(process)["message"] == "the settings were read again: no new shard"
    settings.path.write_text("porrt = 1\n")
    assert "nothing is changed" in told(process)["message"]
    settings.write(b=f"sqlite:///{tmp_path}/elsewhere.db")
    assert told(process)["message"] == "shards that were changed or left out need a restart"
    logged(process, "the settings were read again: no new shard")
    settings.write(b=f"sqlite:///{tmp_path}/b.db", c=served.cli.url)
    line = told(process)
    assert line["level"] == "error"
    assert line["message"].startswith(
        "shard 'c' is not added: shard 'c' is the queue's first database itself"
    )
    settings.write(b=f"sqlite:///{tmp_path}/b.db", c=f"sqlite:///{tmp_path}/c.db")
    assert told(process)["message"] == "shard added"
    assert served.end(process).code == 0


async def test_one_that_is_away_is_used_when_it_comes(
    served: Served, tmp_path: Path, spare_postgres: PostgresServer
) -> None:
    settings = Settings(tmp_path)
    process, line = await asyncio.to_thread(served.start, "--config", str(settings.path))
    there = spare_postgres.url(spare_postgres.create_database())
    opened(there, make_tables=True).close()
    await asyncio.to_thread(spare_postgres.stop)
    settings.write(b=there)
    assert (await asyncio.to_thread(told, process))["message"] == "shard added"
    async with asyncio.timeout(LIMIT), postroom.connect(line["url"]) as client:
        assert [shard.state for shard in await client.shards()] == ["open", "away"]
        await asyncio.to_thread(spare_postgres.start)
        while (await client.shards())[1].state != "open":  # noqa: ASYNC110 - a state of the store
            await asyncio.sleep(0.1)
        await client.create_topic("orders", partitions=2)
        assert {piece.shard for piece in (await client.route("orders")).ranges} == {"first", "b"}
