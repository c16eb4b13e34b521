"""Modes, order, expiry and limits on the command line: what is asked for is set, shown and kept.

On a SQLite file and on both servers: nothing of this may depend on the store (R7).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import postroom
from tests.contract.cli_runner import Cli


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    """Topic orders, one partition, three messages of two keys."""
    url = None if request.param == "sqlite" else request.getfixturevalue(f"spare_{request.param}_url")
    cli = Cli(tmp_path, url)
    asyncio.run(_send_three(cli.url))
    return cli


async def _send_three(url: str) -> None:
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic("orders", partitions=1)
        for value, key in ((b"1", "a"), (b"2", "b"), (b"3", "a")):
            await mq.send("orders", value, key=key)


# --- topics ------------------------------------------------------------------------------------------


def test_settings_of_a_topic_are_set_shown_and_changed(cli: Cli) -> None:
    """R3, R9, R32."""
    cli.ok(
        "topic", "create", "clicks", "--storage", "volatile", "--dedup-window", "10m",
        "--max-backlog", "1000", "--max-backlog-bytes", "1MB",
    )  # fmt: skip
    shown = cli.ok("topic", "show", "clicks", "--json").json
    assert (shown["storage"], shown["dedup_window_ms"]) == ("volatile", 600_000)
    assert (shown["max_backlog"], shown["max_backlog_bytes"]) == (1000, 1024 * 1024)
    said = cli.ok("topic", "show", "clicks").out
    assert "1,000 messages, 1 MB" in said and "volatile" in said and "10m" in said
    listed = {t["topic"]: t["storage"] for t in cli.ok("topic", "list", "--json").json}
    assert listed == {"orders": "durable", "clicks": "volatile"}
    cli.ok("topic", "alter", "clicks", "--max-backlog", "0", "--dedup-window", "0")
    shown = cli.ok("topic", "show", "clicks", "--json").json
    assert (shown["max_backlog"], shown["dedup_window_ms"], shown["max_backlog_bytes"]) == (0, 0, 1024 * 1024)


@pytest.mark.slow("starts programs")
def test_a_full_backlog_is_an_error_that_says_what_to_do(cli: Cli) -> None:
    """R9."""
    cli.ok("group", "create", "orders", "billing")
    cli.ok("topic", "alter", "orders", "--max-backlog", "3")
    answer = cli("send", "orders", "4", "--json")
    assert answer.code == 1 and answer.error["error"] == "backlog_full"
    cli.ok("consume", "orders", "-g", "billing", "--create", "-n", "3")
    cli.ok("send", "orders", "4")


def test_a_duplicate_is_dropped_and_said_so(cli: Cli) -> None:
    """R32."""
    cli.ok("topic", "create", "bills", "-p", "1", "--dedup-window", "10m")
    cli.ok("send", "bills", "first", "--id", "b-1")
    again = cli.ok("send", "bills", "again", "--id", "b-1", "--json").json
    assert (again["duplicate"], again["offset"]) == (True, 0)
    assert "has a message with the id b-1 already" in cli.ok("send", "bills", "again", "--id", "b-1").out
    assert cli.ok("read", "bills").out == "first\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["topic", "create", "x", "--storage", "paper"], "choose 'durable'"),
        (["topic", "create", "x", "--dedup-window", "soon"], "--dedup-window"),
        (["topic", "create", "x", "--max-backlog-bytes", "much"], "--max-backlog-bytes"),
        (["group", "create", "orders", "g", "--mode", "fair"], "'ordered'"),
        (["group", "create", "orders", "g", "--mode", "ordered", "--order", "size"], "'partition'"),
        (["group", "create", "orders", "g", "--exhausted", "stop"], "mode 'ordered'"),
        (["group", "create", "orders", "g", "--mode", "ordered", "--max-hold", "5ms"], "max_hold"),
        (["group", "create", "orders", "g", "--expires", "never"], "--expires"),
        (["send", "orders", "x", "--delay", "soon"], "--delay"),
        (["send", "orders", "x", "--at", "2030-01-01T00:00:00"], "no time zone"),
        (["send", "orders", "x", "--at", "tomorrow"], "--at"),
        (["send", "orders", "x", "--at", "2030-01-01T00:00:00Z", "--delay", "1s"], "leave one"),
        (["send", "orders", "x", "--expires", "later"], "--expires"),
    ],
)
def test_wrong_values(tmp_path: Path, words: list[str], hint: str) -> None:
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "orders")
    answer = cli(*words)
    assert answer.code == 2 and hint in answer.err


# --- slow lanes ---


@pytest.mark.slow("starts programs")
def test_a_slow_lane(cli: Cli) -> None:
    """R42."""
    cli.ok("group", "create", "orders", "lane", "--slow-lane", "failures=0.3,handling=5s,at_least=3")
    (group,) = [one for one in cli.ok("group", "list", "orders", "--json").json if one["group"] == "lane"]
    policy = group["slow_lane"]
    assert (policy["failures"], policy["handling_ms"], policy["at_least"]) == (0.3, 5000, 3)
    assert "30% fail or they take 5s" in " ".join(cli.ok("group", "show", "orders", "lane").out.split())
    off = cli.ok("group", "alter", "orders", "lane", "--slow-lane", "off", "--json")
    assert off.json["slow_lane"] is None
    cli.ok("group", "alter", "orders", "lane", "--slow-lane", "on")
    asyncio.run(_slow(cli))
    said = cli.ok("lag", "orders", "lane").err
    assert "shop is slow since" in said and "20 of 20 messages failed" in said
    for wrong, hint in (("failures", "off, or a list"), ("share=much", "number"), ("share=7", "share")):
        answer = cli("group", "alter", "orders", "lane", "--slow-lane", wrong)
        assert answer.code == 2 and hint in answer.err


async def _slow(cli: Cli) -> None:
    async with postroom.connect(cli.url) as mq:
        await mq.send_many("orders", [postroom.Message(b"x", source="shop") for _ in range(20)])
        async with mq.consumer("orders", group="lane") as consumer:
            left = 20
            while left:
                for message in await consumer.poll(wait=10):
                    left -= message.source == "shop"
                    await (message.dead("no") if message.source else message.ack())
        async with asyncio.timeout(30):
            while not (await mq.lanes("orders", "lane")).sources:  # noqa: ASYNC110 — the store is asked
                await asyncio.sleep(0.05)


# --- ordered -----------------------------------------------------------------------------------------


def test_an_ordered_group(cli: Cli) -> None:
    """R23."""
    cli.ok(
        "group", "create", "orders", "billing", "--mode", "ordered", "--order", "partition",
        "--exhausted", "stop", "--max-hold", "10m", "--max-attempts", "1",
    )  # fmt: skip
    (group,) = cli.ok("group", "list", "orders", "--json").json
    assert (group["mode"], group["order"], group["exhausted"]) == ("ordered", "partition", "stop")
    assert (group["max_hold_ms"], group["holders"], group["stopped"]) == (600_000, {}, 0)
    said = cli.ok("group", "show", "orders", "billing").out
    assert "ordered by partition" in said and "then its key stops" in said and "holder" in said
    altered = cli.ok(
        "group", "alter", "orders", "billing", "--max-hold", "1h", "--exhausted", "dead", "--json"
    )
    assert (altered.json["max_hold_ms"], altered.json["exhausted"]) == (3_600_000, "dead")
    got = cli.ok("consume", "orders", "-g", "billing", "--create", "-n", "3").out
    assert got == "1\n2\n3\n"


@pytest.mark.slow("starts programs")
def test_who_holds_a_partition_and_what_stopped(cli: Cli) -> None:
    asyncio.run(_stop_one(cli))


async def _stop_one(cli: Cli) -> None:
    settings = {"mode": "ordered", "exhausted": "stop", "max_attempts": 1}
    async with (
        postroom.connect(cli.url) as mq,
        mq.consumer("orders", "billing", member="ann", **settings) as consumer,
    ):
        async for message in consumer:
            if message.value == b"1":
                await message.retry(reason="no stock")
            elif message.value == b"2":
                await message.ack()
                break
        await asyncio.to_thread(_look_at_the_holder, cli)
    await asyncio.to_thread(_restart, cli)


def _look_at_the_holder(cli: Cli) -> None:
    (lag,) = cli.ok("lag", "orders", "billing", "--json").json
    (part,) = lag["partitions"]
    assert (part["holder"], part["stopped"], lag["stopped"], lag["messages"]) == ("ann", 1, 1, 2)
    heading, row, _ = cli.ok("lag", "orders", "billing").out.splitlines()
    assert heading.split()[-2:] == ["stopped", "holder"] and row.split()[-2:] == ["1", "ann"]
    heading, row = cli.ok("lag", "orders").out.splitlines()
    assert heading.split()[-1] == "stopped" and row.split()[-1] == "1"
    (listed,) = cli.ok("group", "list", "orders", "--json").json
    assert (listed["holders"], listed["stopped"], listed["idle_ms"]) == ({"ann": 1}, 1, None)
    assert "ann 1; 1 stopped" in cli.ok("group", "list", "orders").out


def _restart(cli: Cli) -> None:
    """What stopped is shown by the doctor, and goes on after a redrive."""
    found = cli.findings()
    assert "postroom stopped restart orders billing --all" in found["stopped"]["advice"]
    assert cli.ok("dead", "redrive", "orders", "billing", "--json").json["redriven"] == 1
    assert cli.ok("consume", "orders", "-g", "billing", "--create", "-n", "2").out == "1\n3\n"


# --- broadcast ---------------------------------------------------------------------------------------


@pytest.mark.slow("starts programs")
def test_a_broadcast_group_is_shown_by_member(cli: Cli) -> None:
    """R11."""
    words = ("consume", "orders", "-g", "cache", "--create", "--wait", "500ms")
    everything = cli.ok(*words, "--mode", "broadcast", "--member", "ann", "--start", "earliest").out
    assert everything.split() == ["1", "2", "3"]
    cli.ok("send", "orders", "4")
    assert cli.ok(*words, "--member", "bob", "-n", "4").out.split() == ["1", "2", "3", "4"]
    behind = {lag["group"]: lag["messages"] for lag in cli.ok("lag", "orders", "cache", "--json").json}
    assert behind == {"cache": 1, "cache@ann": 1, "cache@bob": 0}
    assert cli.ok("lag", "orders", "cache").out.split()[0] == "group"
    assert cli.ok("lag", "orders", "cache@ann").out.split()[0] == "partition"
    assert cli.ok(*words, "--member", "ann", "-n", "1").out == "4\n"  # it goes on where it stopped
    listed = {g["group"]: g["mode"] for g in cli.ok("group", "list", "orders", "--json").json}
    assert listed == {"cache": "broadcast", "cache@ann": "broadcast", "cache@bob": "broadcast"}
    cli.ok("group", "delete", "orders", "cache", "--yes")
    assert cli.ok("group", "list", "orders", "--json").json == []


# --- expiry ------------------------------------------------------------------------------------------


def test_a_group_may_expire_and_idle_ones_are_shown(cli: Cli) -> None:
    """R44."""
    cli.ok("group", "create", "orders", "trial", "--expires", "7d")
    (group,) = cli.ok("group", "list", "orders", "--json").json
    assert group["expires_ms"] == 7 * 86_400_000 and group["idle_ms"] >= 0
    assert "when idle for 7d" in cli.ok("group", "show", "orders", "trial").out
    assert " idle " in cli.ok("group", "list", "orders").out
    cli.ok("group", "alter", "orders", "trial", "--expires", "0")
    assert "expires" in cli.ok("group", "show", "orders", "trial").out
    assert cli.ok("group", "show", "orders", "trial", "--json").json["expires_ms"] == 0
