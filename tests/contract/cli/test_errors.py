"""What the command line says when something is wrong: one line, the right exit code, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from postroom.cli.root import run
from tests.contract.cli_runner import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "orders")
    return cli


def test_an_unknown_topic_with_a_suggestion(cli: Cli) -> None:
    answer = cli("lag", "ordes")
    assert answer.code == 1 and answer.out == ""
    assert answer.err.startswith("error: there is no topic 'ordes' in ")
    assert ": did you mean orders?" in answer.err
    assert "postroom topic create ordes" in answer.err and answer.err.count("\n") == 1


def test_an_unknown_group_with_a_suggestion(cli: Cli) -> None:
    cli.ok("group", "create", "orders", "billing")
    answer = cli("group", "show", "orders", "biling", "--json")
    assert (
        answer.code == 1 and answer.error["error"] == "unknown_group" and "billing" in answer.error["message"]
    )


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("orders.db", "sqlite:///orders.db"),
        ("sqlite:/orders.db", "too few slashes"),
        ("sqlit:///orders.db", "did you mean sqlite"),
        ("postroom://localhost/q", "use postroom://host:7070"),
        ("postgresql://localhost", "names no database"),
        ("mysql://localhost/q?sslca=x", "unknown option 'sslca'"),
    ],
)
def test_a_bad_url(cli: Cli, url: str, hint: str) -> None:
    answer = cli("topic", "list", "--url", url)
    assert answer.code == 2 and hint in answer.err
    assert cli("topic", "list", "--url", url, "--json").error["error"] == "invalid_url"


def test_a_mistyped_file_is_not_made(cli: Cli, tmp_path: Path) -> None:
    for words in (
        ["topic", "list"],
        ["send", "orders", "x"],
        ["lag", "orders"],
        ["consume", "orders", "-g", "g"],
    ):
        answer = cli(*words, "--url", f"sqlite:///{tmp_path / 'quene.db'}")
        assert (
            answer.code == 1 and "there is no queue" in answer.err and "postroom topic create" in answer.err
        )
    assert not (tmp_path / "quene.db").exists()


def test_a_folder_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    answer = cli("topic", "create", "orders", "-u", f"sqlite:///{tmp_path / 'nowhere' / 'q.db'}")
    assert answer.code == 1 and "does not exist" in answer.err


def test_a_place_where_no_file_can_be_made(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = cli("topic", "create", "orders", "-u", f"sqlite:///{tmp_path / 'file' / 'q.db'}")
    assert answer.code == 1 and "cannot be opened" in answer.err


def test_a_path_that_is_a_folder(cli: Cli, tmp_path: Path) -> None:
    assert cli("topic", "create", "orders", "-u", f"sqlite:///{tmp_path}").code == 1


def test_a_file_that_is_no_queue(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, and long enough to be read as a header" * 20)
    answer = cli("topic", "list", "-u", f"sqlite:///{tmp_path / 'text.db'}", "--json")
    assert answer.code == 1 and answer.error["error"] == "store_corrupt"


def test_settings_that_the_group_does_not_have(cli: Cli) -> None:
    cli.ok("group", "create", "orders", "billing", "--lease", "30s")
    answer = cli("consume", "orders", "-g", "billing", "--lease", "5s", "-w", "0")
    assert answer.code == 1 and "postroom group alter" in answer.err
    assert (
        cli("consume", "orders", "-g", "billing", "--lease", "5s", "--json").error["error"]
        == "group_conflict"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["topic", "create", "x", "--retention", "a week"],
        ["lag", "orders", "--max-age", "-5m"],
        ["consume", "orders", "-g", "g", "--wait", "soon"],
        ["group", "create", "orders", "g", "--lease", "1 fortnight"],
    ],
    ids=" ".join,
)
def test_a_bad_duration(cli: Cli, words: list[str]) -> None:
    answer = cli(*words)
    assert answer.code == 2 and "must be a duration" in answer.err and words[-2] in answer.err


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("yesterday", "use earliest, latest"),
        ("2026-01-01T00:00:00", "no time zone"),
        ("0=1,0=2", "named twice"),
        ("7", "0=7"),
        ("9=1", "no partition 9"),
        ("", "use earliest"),
    ],
)
def test_a_bad_reset_target(cli: Cli, target: str, hint: str) -> None:
    cli.ok("group", "create", "orders", "billing")
    answer = cli("group", "reset", "orders", "billing", "--to", target, "--yes")
    assert answer.code == 2 and hint in answer.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["topic", "create", "no spaces"], "not a topic name"),
        (["topic", "create", "_mine"], "reserved"),
        (["send", "orders", "x", "-H", "nonsense"], "--header"),
        (["send", "orders", "x", "-H", "a=1", "-H", "a=2"], "twice"),
        (["send", "orders", "x", "--jsonl"], "--jsonl"),
        (["send", "orders", "-", "--id", "o-1"], "--id"),
        (["read", "orders", "-f", "{vlaue}"], "the fields are"),
        (["read", "orders", "-f", "nice"], "--format"),
        (["read", "orders", "--follow", "--end", "latest"], "--follow"),
        (["consume", "orders", "-g", "no.dots"], "not a group name"),
        (["consume", "orders", "-g", "g", "--no-ack", "-n", "5000"], "--no-ack"),
    ],
)
def test_wrong_values(cli: Cli, words: list[str], hint: str) -> None:
    answer = cli(*words)
    assert answer.code == 2 and hint in answer.err and "Traceback" not in answer.err


@pytest.mark.parametrize("words", [["topic", "alter", "orders"], ["group", "alter", "orders", "billing"]])
def test_altering_nothing_is_refused(cli: Cli, words: list[str]) -> None:
    assert cli(*words).code == 2


def test_a_topic_that_is_there_already(cli: Cli) -> None:
    assert "--exist-ok" in cli("topic", "create", "orders").err
    assert cli("topic", "create", "orders").code == 1
    cli.ok("topic", "create", "orders", "--exist-ok")


# --- wrong usage, worded like every other error --------------------------------------------------------


def test_wrong_usage_is_one_line_that_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topic", "creat"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "postroom topic --help" in said and said.count("\n") == 1
    assert run(["send"]) == 2
    assert run(["consume", "orders"]) == 2
    assert run(["read", "orders", "--limit", "none"]) == 2


def test_wrong_usage_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topic", "list", "--nonsense", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["error"] == "usage"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("postroom 0")
    assert run(["--help"]) == 0
    said = capsys.readouterr().out
    assert "Exit codes" in said and "130" in said
    commands = "topic send cancel consume read group lag dead worker demo doctor migrate"
    assert [word for word in commands.split() if word not in said] == []


def test_debug_shows_where_an_error_comes_from(cli: Cli) -> None:
    with pytest.raises(Exception, match="no topic"):
        cli("lag", "ordes", "--debug")
