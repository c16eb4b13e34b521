"""`postroom lag`, `dead` and `doctor`: how the queue is doing, and what is to be done about it."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

import postroom
from tests.contract.cli_runner import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Topic orders with ten messages; group billing has taken four, two of them are dead letters."""
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "orders", "--partitions", "1")
    cli.ok(
        "send", "orders", "--jsonl", stdin="".join(f'{{"value": "{n}", "id": "o-{n}"}}\n' for n in range(10))
    )
    asyncio.run(_take(cli.url))
    return cli


async def _take(url: str) -> None:
    async with postroom.connect(url) as mq, mq.consumer("orders", group="billing", window=4) as consumer:
        messages = await consumer.poll(4)
        for message in messages[:2]:
            await message.dead("no such customer")
        await consumer.ack(messages[2:])


# --- lag ---------------------------------------------------------------------------------------------


def test_lag_by_group_and_by_partition(cli: Cli) -> None:
    """R43."""
    (lag,) = cli.ok("lag", "orders", "--json").json
    assert (lag["group"], lag["messages"]) == ("billing", 6)
    (part,) = lag["partitions"]
    assert (part["partition"], part["end"], part["messages"]) == (0, 10, 6)
    heading, row = cli.ok("lag", "orders").out.splitlines()
    assert heading.split()[:2] == ["group", "behind"] and row.split()[:2] == ["billing", "6"]
    assert [line.split()[0] for line in cli.ok("lag", "orders", "billing").out.splitlines()] == [
        "partition", "0", "all",
    ]  # fmt: skip


def test_a_topic_without_groups(cli: Cli) -> None:
    cli.ok("topic", "create", "quiet")
    assert cli.ok("lag", "quiet", "--json").json == []
    assert "no groups" in cli.ok("lag", "quiet").out


def test_a_crossed_threshold_is_exit_code_3(cli: Cli) -> None:
    crossed = cli("lag", "orders", "--max-messages", "5")
    assert crossed.code == 3 and "billing" in crossed.out
    assert "group billing: 6 messages are waiting (limit 5)" in crossed.err
    old = cli("lag", "orders", "--max-age", "0", "--json")
    assert old.code == 3 and old.error["error"] == "threshold_crossed" and old.json[0]["messages"] == 6
    cli.ok("lag", "orders", "--max-messages", "6", "--max-age", "1h")


# --- dead letters ------------------------------------------------------------------------------------


def test_dead_letters_are_listed_and_shown(cli: Cli) -> None:
    """R20."""
    letters = cli.ok("dead", "list", "orders", "billing", "--json").json
    assert [(x["id"], x["reason"], x["value"]) for x in letters] == [
        ("o-0", "no such customer", "0"),
        ("o-1", "no such customer", "1"),
    ]
    assert "no such customer" in cli.ok("dead", "list", "orders", "billing").out
    (shown,) = cli.ok("dead", "show", "orders", "billing", "--id", "o-1", "--json").json
    assert shown["id"] == "o-1" and shown["attempts"] == 1
    assert "dead letter o-1" in cli.ok("dead", "show", "orders", "billing", "--id", "o-1").out
    assert "--limit 10" in cli.ok("dead", "list", "orders", "billing", "-n", "1").out


def test_redrive_one_then_all(cli: Cli) -> None:
    assert cli.ok("dead", "redrive", "orders", "billing", "--dry-run", "--json").json["redriven"] == 2
    assert "handed 1 dead letter back" in cli.ok("dead", "redrive", "orders", "billing", "--id", "o-1").out
    (taken,) = cli.ok("consume", "orders", "-g", "billing", "--create", "-n", "1", "--json").lines
    assert taken["id"] == "o-1"
    assert cli.ok("dead", "redrive", "orders", "billing", "--json").json["redriven"] == 1
    assert "no dead letters" in cli.ok("dead", "list", "orders", "billing").out


def test_discard_throws_away(cli: Cli) -> None:
    assert (
        cli.ok("dead", "discard", "orders", "billing", "--id", "o-0", "--yes", "--json").json["discarded"]
        == 1
    )
    assert [x["id"] for x in cli.ok("dead", "list", "orders", "billing", "--json").json] == ["o-1"]


@pytest.mark.parametrize("deed", ["show", "redrive", "discard"])
def test_an_unknown_id_changes_nothing(cli: Cli, deed: str) -> None:
    answer = cli("dead", deed, "orders", "billing", "--id", "o-9", *(["--yes"] if deed == "discard" else []))
    assert answer.code in (1, 2) and "o-9" in answer.err
    assert len(cli.ok("dead", "list", "orders", "billing", "--json").json) == 2


# --- doctor ------------------------------------------------------------------------------------------


def _states(cli: Cli, *words: str) -> tuple[int, dict[str, str]]:
    answer = cli("doctor", "--json", *words)
    return answer.code, {check["check"]: check["state"] for check in answer.json["checks"]}


def test_a_queue_that_is_well(cli: Cli) -> None:
    code, states = _states(cli)
    assert code == 0 and states.pop("idle group") == states.pop("dead letters") == "warn"
    assert states.pop("disk") in ("ok", "warn") and states.pop("flush") in ("ok", "warn")
    assert set(states.values()) == {"ok"}
    assert {
        "python",
        "sqlite",
        "log lane",
        "progress lane",
        "integrity (log)",
        "schema (log)",
    } <= states.keys()
    said = cli.ok("doctor").out
    assert "group billing of topic orders has no members for " in said
    assert "holds 6 messages and keeps them from being dropped" in said
    assert "synchronous FULL" in said and "synchronous NORMAL" in said


def test_a_queue_that_is_not_there_is_not_made(cli: Cli, tmp_path: Path) -> None:
    code, states = _states(cli, "-u", f"sqlite:///{tmp_path / 'none.db'}")
    assert code == 1 and states["file"] == "fail" and not (tmp_path / "none.db").exists()


def test_a_file_that_is_no_queue(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database, but long enough to look at" * 100)
    code, states = _states(cli, "-u", f"sqlite:///{tmp_path / 'text.db'}")
    assert code == 1 and states["integrity"] == "fail"


def test_a_newer_schema_fails(cli: Cli, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "queue.db") as connection:
        connection.execute("INSERT INTO postroom_schema (version, applied_at) VALUES (999, 0)")
    connection.close()
    code, states = _states(cli)
    assert code == 1 and states["schema (log)"] == "fail"
    assert "update your checkout of Postroom" in cli("doctor").out


def test_a_missing_progress_file_fails(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "queue.db.progress").unlink()
    code, states = _states(cli)
    assert code == 1 and states["progress file"] == "fail"


def test_logs_of_deleted_topics_are_seen(cli: Cli) -> None:
    cli.ok("topic", "delete", "orders", "--yes")
    code, states = _states(cli)
    assert code == 0 and states["dropped logs"] == "warn"


def test_how_long_messages_waited_of_late_is_shown_and_checked(cli: Cli) -> None:
    cli.ok("topic", "create", "mails", "--partitions", "1")
    cli.ok("group", "create", "mails", "post")
    (before,) = cli.ok("lag", "mails", "--json").json
    assert before["first_wait_p50_ms"] is before["first_wait_p95_ms"] is None
    cli.ok("send", "mails", "a")
    cli.ok("consume", "mails", "-g", "post", "-n", "1")
    (after,) = cli.ok("lag", "mails", "--json").json
    assert 0 <= after["first_wait_p50_ms"] <= after["first_wait_p95_ms"]
    assert "p95" in cli.ok("lag", "mails", "--max-wait", "1d").out
    assert "p95" in cli.ok("status").out
