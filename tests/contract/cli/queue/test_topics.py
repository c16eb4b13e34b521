"""`postroom topic` and `postroom group`: what they show, change and refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

import postroom
from tests.contract.cli_runner import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def orders(cli: Cli) -> Cli:
    """A topic with ten messages and a group that has taken three."""
    cli.ok("topic", "create", "orders", "--partitions", "2")
    cli.ok("send", "orders", "-", stdin="".join(f"order {n}\n" for n in range(10)))
    cli.ok("consume", "orders", "--group", "billing", "--create", "--count", "3")
    return cli


# --- topics ------------------------------------------------------------------------------------------


def test_creating_the_first_topic_makes_the_file_and_says_so(cli: Cli, tmp_path: Path) -> None:
    answer = cli.ok("topic", "create", "orders", "-p", "2")
    assert answer.out == "topic orders is ready, with 2 partitions\n"
    assert f"created the queue {tmp_path / 'queue.db'}" in answer.err
    assert "created" not in cli.ok("topic", "create", "clicks").err


def test_without_a_url_the_queue_is_postroom_db_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli = Cli(tmp_path)
    cli.url = ""
    assert "created the queue postroom.db" in cli.ok("topic", "create", "orders").err
    assert (tmp_path / "postroom.db").exists()


def test_url_counts_wherever_it_stands_and_over_the_environment(cli: Cli, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path / 'other.db'}"
    cli.ok("topic", "create", "here")
    cli.ok("topic", "create", "there", "--url", other)
    for words in (
        ["-u", other, "topic", "list"],
        ["topic", "-u", other, "list"],
        ["topic", "list", "-u", other],
    ):
        assert [t["topic"] for t in cli.ok("--json", *words).json] == ["there"]


def test_topics_are_listed_for_people_and_for_scripts(orders: Cli) -> None:
    plain = orders.ok("topic", "list").out.splitlines()
    assert [line.split() for line in plain] == [
        ["topic", "partitions", "messages", "delayed", "storage", "retention", "groups"],
        ["orders", "2", "10", "0", "durable", "7d", "billing"],
    ]
    (topic,) = orders.ok("topic", "list", "--json").json
    assert (topic["messages"], topic["partitions"], topic["groups"]) == (10, 2, ["billing"])


def test_a_topic_is_shown_and_altered(orders: Cli) -> None:
    orders.ok("topic", "alter", "orders", "--retention", "3d", "--drop-settled")
    shown = orders.ok("topic", "show", "orders", "--json").json
    assert (shown["retention_ms"], shown["drop_settled"], shown["behind"]) == (
        259_200_000,
        True,
        {"billing": 7},
    )
    assert "3d" in orders.ok("topic", "show", "orders").out


def test_purge_throws_messages_away_and_keeps_the_topic(orders: Cli) -> None:
    assert orders.ok("topic", "purge", "orders", "--yes", "--json").json["messages"] == 10
    assert orders.ok("topic", "show", "orders", "--json").json["messages"] == 0


def test_delete_removes_the_topic(orders: Cli) -> None:
    orders.ok("topic", "delete", "orders", "--yes")
    assert orders.ok("topic", "list", "--json").json == []
    assert "no topics yet" in orders.ok("topic", "list").out


# --- groups ------------------------------------------------------------------------------------------


def test_groups_are_created_listed_and_shown(orders: Cli) -> None:
    orders.ok(
        "group", "create", "orders", "late", "--start", "latest", "--lease", "1m", "--max-attempts", "3"
    )
    groups = {g["group"]: g for g in orders.ok("group", "list", "orders", "--json").json}
    assert (groups["billing"]["behind"], groups["late"]["behind"]) == (7, 0)
    assert (groups["late"]["lease_ms"], groups["late"]["max_attempts"]) == (60_000, 3)
    shown = orders.ok("group", "show", "orders", "billing", "--json").json
    assert sum(shown["committed"].values()) == 3 and shown["members"] == []
    assert "partition" in orders.ok("group", "show", "orders", "billing").out


def test_a_paused_group_is_given_nothing_until_it_is_resumed(orders: Cli) -> None:
    orders.ok("group", "pause", "orders", "billing")
    assert orders.ok("consume", "orders", "-g", "billing", "--create", "--wait", "10ms").out == ""
    orders.ok("group", "resume", "orders", "billing")
    assert len(orders.ok("consume", "orders", "-g", "billing", "--create", "-n", "7").out.splitlines()) == 7


def test_alter_changes_what_is_named(orders: Cli) -> None:
    assert (
        orders.ok("group", "alter", "orders", "billing", "--lease", "5s", "--json").json["lease_ms"] == 5000
    )


@pytest.mark.parametrize(
    ("to", "behind"),
    [("earliest", 10), ("latest", 0), ("2020-01-01T00:00:00Z", 10)],
)
def test_reset_moves_a_group(orders: Cli, to: str, behind: int) -> None:
    """R12."""
    answer = orders.ok("group", "reset", "orders", "billing", "--to", to, "--yes", "--json")
    assert answer.json["behind"] == behind


def test_reset_to_offsets(orders: Cli) -> None:
    ends = {
        p["partition"]: p["end"]
        for p in orders.ok("lag", "orders", "billing", "--json").json[0]["partitions"]
    }
    target = ",".join(f"{partition}={max(0, end - 1)}" for partition, end in ends.items())
    answer = orders.ok("group", "reset", "orders", "billing", "--to", target, "--yes", "--json")
    assert answer.json["behind"] == sum(1 for end in ends.values() if end)


def test_reset_moves_the_partition_that_is_named(cli: Cli) -> None:
    """R12: and says so, partition by partition, before it is done."""
    with postroom.sync.connect(cli.url) as mq:
        mq.create_topic("orders", partitions=2)
        for number in range(10):
            mq.send("orders", b"x", slot=1023 * (number % 2))
    cli.ok("consume", "orders", "-g", "billing", "--create", "-n", "10")
    before = cli.ok("group", "show", "orders", "billing", "--json").json["committed"]
    words = ("group", "reset", "orders", "billing", "--to", "1=2")
    planned = cli.ok(*words, "--dry-run", "--json").json
    again = before["1"] - 2
    assert (planned["again"], planned["skipped"]) == (again, 0)
    assert [(p["partition"], p["before"], p["after"], p["moved"]) for p in planned["partitions"]] == [
        (0, before["0"], before["0"], False),
        (1, before["1"], 2, True),
    ]
    shown = cli.ok(*words, "--dry-run").out
    counted = f"{again} messages come again, 0 messages are skipped"
    assert shown.startswith(f"would reset group 'billing' to 1=2: {counted}")
    lines = [line.split() for line in shown.splitlines()]
    assert ["0", str(before["0"]), "stays", "0", "0"] in lines
    assert ["1", str(before["1"]), "2", str(again), "0"] in lines
    assert cli.ok("group", "show", "orders", "billing", "--json").json["committed"] == before
    assert f"{counted}; {again} messages are waiting" in cli.ok(*words, "--yes").out
    after = cli.ok("group", "show", "orders", "billing", "--json").json["committed"]
    assert after == {**before, "1": 2}


@pytest.mark.parametrize(
    ("to", "sentence"),
    [
        ("7=0", "topic 'orders' has no partition 7; it has 0, 1"),
        ("0=999", "and 999 is beyond it: choose"),
        ("2199-01-01T00:00:00Z", "is in the future, where there are no messages yet; use 'latest'"),
    ],
)
def test_a_reset_to_a_place_that_is_not_there(orders: Cli, to: str, sentence: str) -> None:
    for last in ("--yes", "--dry-run"):
        answer = orders("group", "reset", "orders", "billing", "--to", to, last)
        assert answer.code != 0 and sentence in answer.err


def test_delete_forgets_a_group_and_keeps_the_messages(orders: Cli) -> None:
    answer = orders.ok("group", "delete", "orders", "billing", "--yes", "--json")
    assert (answer.json["behind"], answer.json["dead_letters"]) == (7, 0)
    assert orders.ok("group", "list", "orders", "--json").json == []
    assert orders.ok("topic", "show", "orders", "--json").json["messages"] == 10


def test_exist_ok_with_other_settings(cli: Cli) -> None:
    cli.ok("topic", "create", "orders", "-p", "2")
    cli.ok("topic", "create", "orders", "-p", "2", "--exist-ok")
    answer = cli("topic", "create", "orders", "-p", "3", "--retention", "1d", "--exist-ok")
    assert answer.code == 1 and "partitions 2 (asked for: 3), retention 7d (asked for: 1d)" in answer.err
    assert "`postroom topic alter` changes the rest" in answer.err
    cli.ok("group", "create", "orders", "billing", "--lease", "5s")
    assert "add --exist-ok if that is fine" in cli("group", "create", "orders", "billing").err
    cli.ok("group", "create", "orders", "billing", "--lease", "5s", "--exist-ok")
    answer = cli("group", "create", "orders", "billing", "--lease", "6s", "--exist-ok")
    assert (
        answer.code == 1
        and "change the group with `postroom group alter orders billing --lease 6s`" in answer.err
    )


# --- asking first ------------------------------------------------------------------------------------

DESTROYING = [
    ("topic", "delete", "orders"),
    ("topic", "purge", "orders"),
    ("group", "delete", "orders", "billing"),
    ("group", "reset", "orders", "billing", "--to", "latest"),
    ("dead", "discard", "orders", "billing"),
]


@pytest.mark.parametrize("words", DESTROYING, ids=" ".join)
def test_what_destroys_refuses_when_nobody_can_be_asked(orders: Cli, words: tuple[str, ...]) -> None:
    before = orders.ok("lag", "orders", "billing", "--json").json[0]["messages"]
    answer = orders(*words)
    assert answer.code == 4 and "pass --yes" in answer.err and answer.out == ""
    assert orders(*words, "--json").error["error"] == "aborted"
    assert orders.ok("lag", "orders", "billing", "--json").json[0]["messages"] == before


@pytest.mark.parametrize("words", DESTROYING, ids=" ".join)
def test_a_dry_run_counts_and_changes_nothing(orders: Cli, words: tuple[str, ...]) -> None:
    before = orders.ok("topic", "show", "orders", "--json").json
    assert orders.ok(*words, "--dry-run").out.startswith("would ")
    assert orders.ok(*words, "--dry-run", "--json").json["dry_run"] is True
    assert orders.ok("topic", "show", "orders", "--json").json == before


def test_a_group_is_converted_for_kafka_clients_and_back(cli: Cli) -> None:
    with postroom.sync.connect(cli.url) as mq:
        mq.create_topic("orders", kafka_partitions=1, keys="java")
        mq.send_many("orders", [b"1", b"2", b"3"])
    cli.ok("consume", "orders", "-g", "billing", "--create", "-n", "2")
    words = ("group", "convert", "orders", "billing")
    planned = cli.ok(*words, "--to", "kafka", "--dry-run", "--json").json
    assert [(one["before"], one["after"], one["again"]) for one in planned["partitions"]] == [(2, 2, 0)]
    done = cli.ok(*words, "--to", "kafka", "--yes")
    assert done.out.strip().endswith(
        "group billing is kafka now: 0 messages come again, 0 messages are skipped"
    )
    assert cli.ok("group", "list", "orders", "--json").json[0]["mode"] == "kafka"
    assert cli(*words, "--to", "broadcast", "--yes").code == 2
    cli.ok(*words, "--to", "ordered", "--yes")
    assert cli.ok("consume", "orders", "-g", "billing", "-n", "1").out.strip().endswith("3")
    shown = cli.ok("topic", "show", "orders").out
    assert "keys by the rule of java" in shown
