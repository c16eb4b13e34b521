"""`postroom stopped …`: what stopped its key is listed, shown, restarted, skipped and dropped (R23)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import postroom
from tests.contract.cli_runner import Cli

PLACE = ("orders", "billing")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """a1 and b1 have stopped; a2, a3 and b2 wait behind them."""
    made = Cli(tmp_path)
    asyncio.run(_stop_two(made.url))
    return made


async def _stop_two(url: str) -> None:
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.create_group("orders", "billing", mode="ordered", exhausted="stop", max_attempts=1)
        for value in ("a1", "b1", "a2", "b2", "a3"):
            await mq.send("orders", value.encode(), key=value[0], id=value, headers={"kind": "refund"})
        async with mq.consumer("orders", "billing") as consumer:
            for _ in range(2):
                (message,) = await consumer.poll(max_messages=1, wait=20)
                await message.retry(reason=f"{message.id} is broken")


def left(cli: Cli) -> list[str]:
    return sorted(one["id"] for one in cli.ok("stopped", "list", *PLACE, "--json").json)


def handled(cli: Cli, count: int) -> list[str]:
    return cli.ok("consume", "orders", "-g", "billing", "-n", str(count)).out.split()


def test_what_stopped_is_listed_and_shown(cli: Cli) -> None:
    heading, first, second = cli.ok("stopped", "list", *PLACE).out.splitlines()
    assert heading.split() == ["id", "key", "place", "attempts", "since", "behind", "reason", "value"]
    assert (first.split()[:4], first.split()[5:]) == (
        ["a1", "a", "0:0", "1"],
        ["2", "a1", "is", "broken", "a1"],
    )
    assert second.split()[:4] == ["b1", "b", "0:1", "1"]
    assert "… and more; --limit 10 shows them" in cli.ok("stopped", "list", *PLACE, "-n", "1").out
    (shown,) = cli.ok("stopped", "show", *PLACE, "--key", "b", "--json").json
    assert (shown["id"], shown["key"], shown["value"], shown["behind"]) == ("b1", "b", "b1", 1)
    assert (shown["reason"], shown["headers"]) == ("b1 is broken", {"kind": "refund"})
    text = cli.ok("stopped", "show", *PLACE, "--id", "a1").out
    assert "orders, partition 0, offset 0" in text and "header kind" in text and "key waits since" in text


def test_one_is_restarted(cli: Cli) -> None:
    dry = cli.ok("stopped", "restart", *PLACE, "--key", "a", "--dry-run")
    assert dry.out == "would restart 1 message of group billing\n" and left(cli) == ["a1", "b1"]
    assert cli.ok("stopped", "restart", *PLACE, "--key", "a").out == "restarted 1 message of group billing\n"
    assert left(cli) == ["b1"]
    assert handled(cli, 3) == ["a1", "a2", "a3"]


def test_one_is_skipped(cli: Cli) -> None:
    said = cli.ok("stopped", "skip", *PLACE, "--id", "b1").out
    assert said == (
        "skipped 1 message of group billing to the dead letters: `postroom dead list orders billing` shows "
        "them\n"
    )
    (letter,) = cli.ok("dead", "list", *PLACE, "--json").json
    assert (letter["id"], letter["reason"]) == ("b1", "b1 is broken")
    assert handled(cli, 1) == ["b2"] and left(cli) == ["a1"]


def test_what_is_dropped_is_asked_about(cli: Cli) -> None:
    refused = cli("stopped", "drop", *PLACE, "--key", "a")
    assert refused.code == 4 and refused.err.strip() == (
        "error: refusing to drop what stopped in group 'billing' without confirmation: 1 message will be "
        "lost to the group; pass --yes to go ahead"
    )
    dry = cli.ok("stopped", "drop", *PLACE, "--all", "--dry-run").out
    assert dry.startswith("would drop what stopped in group 'billing': 2 messages will be lost")
    assert left(cli) == ["a1", "b1"]
    assert (
        cli.ok("stopped", "drop", *PLACE, "--key", "a", "--yes").out == "dropped 1 message of group billing\n"
    )
    assert handled(cli, 2) == ["a2", "a3"] and left(cli) == ["b1"]
    assert cli.ok("stopped", "drop", *PLACE, "--all", "--yes", "--json").json["dropped"] == 1
    assert "nothing has stopped in group billing of topic orders" in cli.ok("stopped", "list", *PLACE).out


def test_a_wrong_choice_says_what_to_type(cli: Cli) -> None:
    for verb in ("restart", "skip", "drop"):
        for words in ((), ("--all", "--id", "a1"), ("--id", "a1", "--key", "a")):
            answer = cli("stopped", verb, *PLACE, *words)
            assert (answer.code, answer.err.strip()) == (
                2,
                "error: say which: --id ID, --key KEY (each repeatable), or --all",
            )
        for option, name in (("--id", "x7"), ("--key", "c")):
            yes = ["--yes"] if verb == "drop" else []
            answer = cli("stopped", verb, *PLACE, option, name, *yes)
            assert (answer.code, answer.err.strip()) == (
                1,
                f"error: group 'billing' of topic 'orders' has no stopped message with the {option[2:]} "
                f"'{name}': `postroom stopped list` lists those it has; nothing was changed",
            )
    assert left(cli) == ["a1", "b1"]


def test_the_doctor_says_what_to_type(cli: Cli) -> None:
    found = cli.findings()
    assert "has 2 messages stopped, the oldest key waits for" in found["stopped"]["message"]
    assert found["stopped"]["advice"] == (
        "`postroom stopped list orders billing` shows why; mend it, then `postroom stopped restart orders "
        "billing --all`, or let the keys go on with `skip` or `drop`"
    )
