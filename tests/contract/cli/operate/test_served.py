"""The command line on a served queue: the same commands, and a doctor who looks at brokers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import postroom
from tests.contract.cli_runner import Cli
from tests.servers.places import free_port


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    async with postroom.connect("memory://") as mq, await mq.serve(port=0, token="open sesame") as server:
        monkeypatch.setenv("POSTROOM_TOKEN", "open sesame")
        yield server.url


@pytest.fixture
def cli(served: str, tmp_path: Path) -> Cli:
    return Cli(tmp_path, served)


async def run(cli: Cli, *words: str) -> str:
    return (await asyncio.to_thread(cli.ok, *words)).out


async def test_a_message_from_end_to_end(served: str, cli: Cli) -> None:
    await run(cli, "topic", "create", "orders")
    await run(cli, "send", "orders", "hello")
    assert "hello" in await run(cli, "read", "orders")
    assert "orders" in await run(cli, "topic", "list")
    assert "hello" in await run(cli, "consume", "orders", "--group", "billing", "--create", "--count", "1")


async def test_the_doctor_looks_at_brokers(served: str, cli: Cli) -> None:
    found = json.loads(await run(cli, "doctor", "--json"))
    assert [check["state"] for check in found["checks"]] == ["ok", "ok", "ok"]
    nobody = f"127.0.0.1:{free_port()}"
    result = await asyncio.to_thread(cli, "doctor", "--url", f"{served},{nobody}", "--json")
    states = {check["check"]: check["state"] for check in json.loads(result.out)["checks"]}
    assert (result.code, states[f"broker {nobody}"]) == (1, "fail")


async def test_a_wrong_token_is_said(served: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTROOM_TOKEN", "open barley")
    result = await asyncio.to_thread(cli, "topic", "list")
    assert result.code != 0 and "token" in result.err
    assert "barley" not in result.err + result.out


async def test_migrate_is_for_databases(served: str, cli: Cli) -> None:
    result = await asyncio.to_thread(cli, "migrate", "--check")
    assert result.code == 2 and "on its database" in result.err
