"""`postroom send --delay/--at/--expires` and `postroom cancel` (R35, R39)."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.contract.cli_runner import Cli


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    if request.param == "sqlite":
        cli = Cli(tmp_path)
    else:
        cli = Cli(tmp_path, request.getfixturevalue(f"{request.param}_url"))
        cli.ok("migrate")
    cli.ok("topic", "create", "mails", "--partitions", "1")
    return cli


def test_a_delayed_message_is_shown_and_delivered(cli: Cli) -> None:
    cli.ok("send", "mails", "much later", "--delay", "1h")
    sent = cli.ok("send", "mails", "later", "--delay", "700ms", "--json").json
    due = datetime.fromisoformat(sent["due"])
    assert sent["offset"] == -1 and sent["id"] and due > datetime.now(UTC) - timedelta(seconds=30)
    (taken,) = cli.ok("consume", "mails", "-g", "post", "--create", "-n", "1", "--json").lines
    assert (taken["value"], taken["id"]) == ("later", sent["id"])
    assert cli.ok("topic", "show", "mails", "--json").json["delayed"] == 1


def test_cancel_takes_one_back(cli: Cli) -> None:
    said = cli.ok("send", "mails", "happy new year", "--at", "2199-12-31T23:59:59Z", "--id", "ny").out
    assert "due 2199-12-31T23:59:59.000Z" in said and "postroom cancel mails ny" in said
    assert "1 delayed" in cli.ok("topic", "purge", "mails", "--dry-run").out
    assert cli.ok("cancel", "mails", "ny").out == "cancelled message ny of topic mails\n"
    again = cli("cancel", "mails", "ny", "--json")
    assert again.code == 1 and again.json["cancelled"] is False and again.error["error"] == "not_waiting"
    assert cli.ok("topic", "show", "mails", "--json").json["delayed"] == 0


def test_cancel_in_an_unknown_topic(cli: Cli) -> None:
    said = cli("cancel", "mail", "x").err
    assert "there is no topic 'mail' in " in said and "did you mean mails?" in said


@pytest.mark.slow("starts programs")
def test_lines_share_a_delay_and_may_have_their_own(cli: Cli) -> None:
    lines = [
        {"value": "a", "id": "a"},
        {"value": "b", "id": "b", "delay": "2h"},
        {"value": "c", "id": "c", "at": "2199-01-01T00:00:00Z"},
        {"value": "d", "id": "d", "delay": 0},
    ]
    stdin = "".join(json.dumps(line) + "\n" for line in lines)
    assert cli.ok("send", "mails", "--jsonl", "--delay", "1h", "--json", stdin=stdin).json["sent"] == 4
    assert cli.ok("topic", "show", "mails", "--json").json["delayed"] == 3
    assert cli.ok("read", "mails").out == "d\n"
    for id in "abc":
        cli.ok("cancel", "mails", id)
    cli.ok("send", "mails", "--delay", "1h", stdin="x\ny\n")
    assert cli.ok("topic", "show", "mails", "--json").json["delayed"] == 2
    assert cli.ok("topic", "purge", "mails", "--yes", "--json").json["delayed"] == 2
    assert cli.ok("topic", "show", "mails", "--json").json["delayed"] == 0


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"value": "v", "delay": "soon"}', "delay"),
        ('{"value": "v", "at": "tomorrow"}', "at"),
        ('{"value": "v", "delay": 1, "at": 1}', "not both"),
        ('{"value": "v", "expires": "later"}', "expires"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "mails")
    answer = cli("send", "mails", "--jsonl", stdin=f'{{"value": "fine"}}\n{line}\n')
    assert answer.code == 2 and "line 2: " in answer.err and complaint in answer.err
    assert "nothing was sent" in answer.err


def test_an_expired_message_is_not_shown(cli: Cli) -> None:
    past = (datetime.now(UTC) - timedelta(seconds=5)).isoformat()
    cli.ok("send", "mails", "old news", "--expires", past)
    cli.ok("send", "mails", "news", "--expires", "1h")
    assert cli.ok("consume", "mails", "-g", "post", "--create", "-n", "1").out == "news\n"


def test_what_waits_is_listed_and_taken_back(cli: Cli) -> None:
    assert cli.ok("delayed", "list").out == "no delayed messages wait\n"
    cli.ok("topic", "create", "calls", "--partitions", "1")
    cli.ok("send", "mails", "much later", "--delay", "2h", "--id", "b", "--key", "ann")
    cli.ok("send", "calls", "later", "--delay", "1h", "--id", "a")
    both = cli.ok("delayed", "list", "--json").json
    assert [(one["topic"], one["id"], one["value"]) for one in both] == [
        ("calls", "a", "later"),
        ("mails", "b", "much later"),
    ]
    assert (both[1]["key"], both[1]["bytes"], both[1]["retry_of"]) == ("ann", 10, None)
    shown = cli.ok("delayed", "list", "mails").out
    assert "much later" in shown and "ann" in shown and "every group" in shown and "calls" not in shown
    again = cli("delayed", "cancel", "mails", "b", "x")
    assert again.code == 1 and again.out == "cancelled message b of topic mails\n"
    assert "no delayed message 'x' waits" in again.err and "postroom delayed list mails" in again.err
    assert cli.ok("delayed", "list", "mails").out == "no delayed messages wait in topic mails\n"


def test_a_long_list_goes_on_behind_a_cursor(cli: Cli) -> None:
    lines = "".join(json.dumps({"value": str(n), "delay": 3600 + n}) + "\n" for n in range(5))
    cli.ok("send", "mails", "--jsonl", stdin=lines)
    first = cli.ok("delayed", "list", "mails", "-n", "2", "--json").json
    assert "… and more; --limit 20 shows them" in cli.ok("delayed", "list", "mails", "-n", "2").out
    rest = cli.ok("delayed", "list", "mails", "--after", first[-1]["cursor"], "--json").json
    assert [one["value"] for one in first + rest] == ["0", "1", "2", "3", "4"]
    wrong = cli("delayed", "list", "--after", first[-1]["cursor"])
    assert wrong.code == 2 and "name the topic" in wrong.err
