"""`postroom status`: all topics and groups at a glance, and what is wrong; lag and groups of all topics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import postroom
from postroom import Connection
from tests.contract.cli_runner import Cli


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    url = None if request.param == "sqlite" else request.getfixturevalue(f"spare_{request.param}_url")
    cli = Cli(tmp_path, url)
    asyncio.run(_fill(cli.url))
    return cli


async def _fill(url: str) -> None:
    """Orders are read by two groups: one has a dead letter, the other a stopped key. Nobody reads clicks."""
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.create_topic("clicks", partitions=1)
        await mq.create_group("orders", "billing", max_attempts=1)
        await mq.create_group("orders", "ledger", mode="ordered", exhausted="stop", max_attempts=1)
        for number in range(3):
            await mq.send("orders", b"%d" % number, key="k")
        await mq.send("clicks", b"later", delay="1h")
        await _fail_first(mq, "billing")
        await _fail_first(mq, "ledger")


async def _fail_first(mq: Connection, group: str) -> None:
    async with mq.consumer("orders", group=group, window=1) as consumer:
        (message,) = await consumer.poll(max_messages=1, wait=60)
        await message.retry(reason="no such account")


def test_it_shows_every_group_and_what_is_wrong_with_it(cli: Cli) -> None:
    shown = cli.ok("status").out
    assert "clicks" in shown and "no group" in shown
    assert "group billing of topic orders has 1 dead letter: `postroom dead list orders billing`" in shown
    assert "group ledger of topic orders has 1 stopped key: `postroom stopped list orders ledger`" in shown
    assert "2 messages wait for group billing of topic orders, which nobody reads" in shown


def test_scripts_get_the_same_as_json(cli: Cli) -> None:
    found = cli.ok("status", "--json").json
    lines = {(line["topic"], line["group"]): line for line in found["groups"]}
    assert set(lines) == {("orders", "billing"), ("orders", "ledger"), ("clicks", None)}
    billing, ledger = lines["orders", "billing"], lines["orders", "ledger"]
    assert (billing["behind"], billing["dead_letters"], billing["members"]) == (2, 1, 0)
    assert (ledger["stopped"], ledger["state"], ledger["mode"]) == (1, "keys stopped", "ordered")
    assert lines["clicks", None]["delayed"] == 1
    assert len(found["attention"]) == 4


def test_a_monitor_is_told_by_the_exit_code(cli: Cli) -> None:
    failed = cli("status", "--check", "--json")
    assert failed.code == 3
    assert failed.error["error"] == "attention" and "dead list orders billing" in failed.error["message"]
    cli.ok("dead", "discard", "orders", "billing", "--yes")
    for group in ("billing", "ledger"):
        cli.ok("group", "delete", "orders", group, "--yes")
    assert "Nothing needs attention." in cli.ok("status", "--check").out


def test_a_group_that_was_paused_is_named(cli: Cli) -> None:
    cli.ok("group", "pause", "orders", "billing")
    assert "is paused: `postroom group resume orders billing`" in cli.ok("status").out


@pytest.mark.slow("starts programs")
def test_lag_and_group_list_need_no_topic(cli: Cli) -> None:
    lags = cli.ok("lag", "--json").json
    assert [(lag["topic"], lag["group"]) for lag in lags] == [("orders", "billing"), ("orders", "ledger")]
    assert "orders / billing" in cli.ok("lag").out
    groups = cli.ok("group", "list").out
    assert "topic" in groups and "orders" in groups and "ledger" in groups
    assert "topic" not in cli.ok("group", "list", "orders").out


def test_an_empty_queue_says_how_to_begin(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "orders")
    cli.ok("topic", "delete", "orders", "--yes")
    assert "postroom topic create" in cli.ok("status").out
    assert cli.ok("lag").out.strip() == "there are no groups: nobody is behind"
