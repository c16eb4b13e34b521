"""What waits in an outbox, and what is stuck there, is seen: by doctor, and in metrics (R30, R43)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

import postroom
from postroom.broker.broker import Broker
from postroom.broker.exposition import Sampler, of_outbox
from tests.contract.cli_runner import Cli
from tests.integration.outbox.outbox_world import KINDS, Database, database_of, eventually

FIGURES = ("messages", "oldest_age_seconds", "stuck_topics")


def _write(database: Database, topic: str, table: str = "postroom_outbox") -> None:
    outbox, connection = postroom.Outbox(table), database.connect()
    outbox.create_table(connection)
    with outbox.transaction(connection):
        outbox.send_many(connection, topic, [postroom.Message(b"x")] * 3)
    connection.close()


def _findings(cli: Cli, *words: str) -> dict[str, dict[str, str]]:
    found = cli("doctor", "--json", *words).json["checks"]
    return {one["check"]: one for one in found if one["check"].startswith("outbox")}


def test_doctor_looks_at_an_outbox(tmp_path: Path) -> None:
    shop, cli = Database("sqlite", f"sqlite:///{tmp_path}/shop.db"), Cli(tmp_path)
    cli.ok("topic", "create", "orders")
    assert not _findings(cli)
    _write(shop, "orders", "letters")
    named = ("--outbox", shop.url, "--outbox-table", "letters")
    found = _findings(cli, *named)["outbox relay"]
    assert found["state"] == "warn" and "3 messages in letters" in found["message"]
    connection = shop.connect()
    connection.execute("DELETE FROM letters")
    connection.commit()
    connection.close()
    assert _findings(cli, *named)["outbox"]["state"] == "ok"
    missing = cli("doctor", "--json", "--outbox", shop.url)
    assert missing.code == 1 and "create_table" in missing.out
    assert cli("doctor", "--json", "--outbox", f"sqlite:///{tmp_path}/none.db").code == 1
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_one_in_the_queues_own_database_is_found(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = database_of(kind, request, tmp_path, durable=True)  # or the doctor finds nothing else
    async with postroom.connect(database.url, migrate=True) as mq:
        endpoint: Any = mq._endpoint
        assert isinstance(endpoint, Broker)
        assert not (await Sampler(endpoint).sample()).outbox
        _write(database, "nowhere")
        connection, outbox = database.connect(autocommit=True), postroom.Outbox()
        async with outbox.relay(mq, database.url):
            await eventually(lambda: bool(outbox.status(connection).stuck))
            sampler = Sampler(endpoint)
            await sampler.sample()
            families = {family.name: family for family in of_outbox(sampler)}
            values = [families[f"postroom_outbox_{name}"].samples[0].value for name in FIGURES]
            assert values[0] == 3 and values[2] == 1
        connection.close()
    found = await _doctor(tmp_path, database.url)
    assert "unknown_topic" in found["outbox stuck"]["message"]


async def _doctor(folder: Path, url: str) -> dict[str, dict[str, str]]:
    import asyncio

    return await asyncio.to_thread(lambda: _findings(Cli(folder, url)))


async def test_the_process_of_the_relay_shows_it(tmp_path: Path) -> None:
    shop = Database("sqlite", f"sqlite:///{tmp_path}/shop.db")
    _write(shop, "orders", "seen")

    def shown(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"postroom_outbox_{name}", {"table": "seen"})

    async with postroom.connect("memory://") as mq, postroom.Outbox("seen").relay(mq, shop.url):
        await eventually(lambda: shown("messages") == 3)
    assert shown("messages") is None
