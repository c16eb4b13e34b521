"""`postroom rate`: set, list and clear limits (R40)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.cli_runner import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "orders")
    cli.ok("group", "create", "orders", "billing")
    return cli


def test_limits_are_set_listed_and_cleared(cli: Cli) -> None:
    said = cli.ok("rate", "set", "orders", "--messages", "1000", "--bytes", "10MB").out
    assert said == "topic orders: at most 1,000 messages and 10 MB a second, for all together\n"
    cli.ok("rate", "set", "orders", "billing", "--messages", "0.5")
    cli.ok("rate", "set", "--producer", "shop", "--bytes", "64KB")
    shown = cli.ok("rate", "list").out
    for words in ("group billing of topic orders", "0.5", "producer shop", "64 KB", "topic orders", "1,000"):
        assert words in shown
    assert cli.ok("rate", "clear", "orders").out == "topic orders has no limit\n"
    assert cli.ok("rate", "clear", "orders", "billing").out == "group billing of topic orders has no limit\n"
    assert cli.ok("rate", "set", "--producer", "shop", "--bytes", "0").out == "producer shop has no limit\n"
    assert cli.ok("rate", "list", "--json").json == []


def test_json(cli: Cli) -> None:
    wanted = {"kind": "group", "topic": "orders", "group": "billing", "producer": None}
    wanted |= {"messages_per_s": 100, "bytes_per_s": None, "debt_ms": 0}
    assert cli.ok("rate", "set", "orders", "billing", "--messages", "100", "--json").json == wanted
    assert cli.ok("rate", "list", "--json").json == [wanted]
    cleared = {"topic": "orders", "group": "billing", "producer": None, "limited": False}
    assert cli.ok("rate", "clear", "orders", "billing", "--json").json == cleared


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["set", "orders"], "invalid_setting"),
        (["set", "--messages", "5"], "invalid_setting"),
        (["set", "orders", "--messages", "many"], "invalid_setting"),
        (["set", "orders", "--messages", "nan"], "invalid_setting"),
        (["set", "orders", "--messages=-5"], "invalid_setting"),
        (["set", "orders", "--bytes", "many"], "invalid_setting"),
        (["set", "orders", "--producer", "shop", "--messages", "5"], "invalid_setting"),
        (["set", "order", "--messages", "5"], "unknown_topic"),
        (["set", "orders", "billig", "--messages", "5"], "unknown_group"),
        (["clear", "order"], "unknown_topic"),
    ],
)
def test_bad_input_changes_nothing(cli: Cli, words: list[str], code: str) -> None:
    answer = cli("rate", *words, "--json")
    assert answer.code in (1, 2) and answer.error["error"] == code, answer
    assert cli.ok("rate", "list", "--json").json == []
